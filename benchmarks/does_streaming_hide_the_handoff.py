"""Does sending KV while prefill runs hide the handoff, and does it do so without slowing prefill or decode?

We would be wrong if, in any cell that is a steady state for both sides,

1. the exposed handoff of streaming were not below half of upstream pull's, progress thread off (the stricter of the two baselines), or
2. the prefill leg of streaming were more than 1.15 times that baseline's, or
3. TTFT of streaming were above the baseline's, or
4. TPOT of streaming were more than 1.10 times the baseline's,

each by more than its 95 % interval. Where the interval holds the limit, the records cannot tell and the verdict is "open".

Usage: python benchmarks/does_streaming_hide_the_handoff.py RESULTS_FOLDER [STREAMING [BASELINE]]
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbaton.bench.store import Store
from kvbaton.workload.record import CellResult, Request
from kvbaton.workload.stats import Spread, bootstrap_ratio, is_steady

SEED = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio that must stay below a limit."""

    name: str
    value: Callable[[Request], float | None]
    limit: float


CLAIMS = (
    Claim("exposed handoff", lambda request: request.exposed_s, 0.5),
    Claim("prefill leg", lambda request: request.prefill_leg_s, 1.15),
    Claim("TTFT", lambda request: request.ttft_s, 1.0),
    Claim("TPOT", lambda request: request.tpot_s, 1.1),
)

Cells = dict[tuple[str, int, float], dict[int, CellResult]]


def cells_of(records: list[CellResult], contender: str) -> Cells:
    """Steady cells of a contender by link, prompt length and rate, then by repeat."""
    found: Cells = {}
    for record in records:
        if record.contender == contender and record.rate_per_s is not None and is_steady(record.rho):
            found.setdefault((record.link, record.prompt_tokens, record.rate_per_s), {})[record.repeat] = (
                record
            )
    return found


def ratio(claim: Claim, ours: dict[int, CellResult], base: dict[int, CellResult]) -> Spread | None:
    """Ratio of a claim's value, paired by repeat."""
    repeats = sorted(ours.keys() & base.keys())

    def values(result: CellResult) -> list[float]:
        good = (claim.value(request) for request in result.requests if request.error is None)
        return [value for value in good if value is not None]

    return bootstrap_ratio(
        [values(ours[r]) for r in repeats], [values(base[r]) for r in repeats], random.Random(SEED)
    )


def verdict(found: Spread, limit: float) -> str:
    """What the records say about a ratio and its limit."""
    if found.high < limit:
        return "holds"
    return "WRONG" if found.low > limit else "open"


def main() -> int:
    """Print every verdict; the exit status is 1 when one is against us and 2 when nothing can be compared."""
    folder, *names = sys.argv[1:] or ["--help"]
    if folder.startswith("-") or len(names) > 2:
        print(__doc__)
        return 2
    streaming, baseline = [*names, *("ours-stream-tail", "upstream-pull-quiet")[len(names) :]]
    records = [record for record in Store(Path(folder)).records if isinstance(record, CellResult)]
    ours, base = cells_of(records, streaming), cells_of(records, baseline)
    shared = sorted(ours.keys() & base.keys())
    if not shared:
        print(f"{folder}: no cell has both {streaming} and {baseline}")
        return 2
    against = 0
    print(f"{streaming} / {baseline}")
    for key in shared:
        link, tokens, rate = key
        for claim in CLAIMS:
            found = ratio(claim, ours[key], base[key])
            if found is None:
                continue
            said = verdict(found, claim.limit)
            against += said == "WRONG"
            print(
                f"  {tokens:>6} tokens at {rate:g}/s, link {link:<8} {claim.name:<16} "
                f"{found.middle:5.2f} ({found.low:.2f}-{found.high:.2f}), limit {claim.limit:g}: {said}"
            )
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
