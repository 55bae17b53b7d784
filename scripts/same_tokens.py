"""Ask one engine without a connector, then pairs of engines, the same varied requests, and report every difference.

The long form of tests/engine/test_answers.py:

    python scripts/same_tokens.py --requests 200 --out report.json

It runs push and pull, with prefix caching off and on, with checksums compared, and prints one line per combination.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engine.asks import CONCURRENCY, Answer, Ask, ask_all, ask_alone, differences, logprob_pairs, make_asks
from engine.deployment import Deployment, small, without_connector
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.protocol.mode import Mode

MAX_SHOWN = 10


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare answers of pairs of engines with those of one engine."
    )
    add = parser.add_argument
    add("--requests", type=int, default=200)
    add("--seed", type=int, default=1)
    add("--concurrency", type=int, default=CONCURRENCY)
    add("--model", default="nano")
    add("--dtype", default="float32", help="with bfloat16 only logprobs and checksums say anything")
    add("--noise", type=float, default=2e-3, help="largest difference of a logprob that is no difference")
    add("--mode", action="append", choices=[*Mode], help="default: both")
    add("--caching", action="append", choices=["on", "off"], help="default: both")
    add("--twice", action="store_true", help="ask the one engine twice, to see how repeatable it is itself")
    add("--out", type=Path, help="write figures as JSON")
    return parser.parse_args(argv)


def ask_one(arguments: argparse.Namespace, theatre: Theatre, asks: list[Ask]) -> list[Answer]:
    """Ask the engine without a connector."""
    engine = theatre.play(
        "alone",
        lambda folder: small(
            folder, model=arguments.model, dtype=arguments.dtype, prefix_caching=False, kv_cache_gib=2
        ),
        without_connector,
        alone=True,
    )
    url = engine.prefill[0].url
    answers = asyncio.run(ask_alone(url, arguments.model, asks))
    if arguments.twice:
        again = asyncio.run(ask_alone(url, arguments.model, list(reversed(asks))))[::-1]
        report(
            "one engine, asked twice",
            asks,
            answers,
            again,
            arguments.noise,
            exact=arguments.dtype == "float32",
        )
    return answers


def report(
    name: str, asks: list[Ask], expected: list[Answer], found: list[Answer], noise: float, *, exact: bool
) -> dict[str, object]:
    """Print one line, and the first differences; returns the figures."""
    wrong = [
        f"{ask.about} {dict(ask.body, prompt='...', messages='...')}: {'; '.join(texts)}"
        for ask, one, other in zip(asks, expected, found, strict=True)
        if (texts := differences(ask, one, other, noise))
    ]
    gaps = sorted(
        abs(ours - theirs)
        for one, other in zip(expected, found, strict=True)
        for ours, theirs in logprob_pairs(one, other)
    )
    figures: dict[str, object] = {
        "requests": len(asks),
        "different": len(wrong),
        "different_tokens": sum(
            one.tokens != other.tokens for one, other in zip(expected, found, strict=True) if other.ok
        ),
        "failed": sum(not answer.ok for answer in found),
        "logprobs": len(gaps),
        "logprob_gap_p50": round(gaps[len(gaps) // 2], 6) if gaps else None,
        "logprob_gap_p99": round(gaps[len(gaps) * 99 // 100], 6) if gaps else None,
        "logprob_gap_max": round(gaps[-1], 6) if gaps else None,
    }
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
    for text in wrong[:MAX_SHOWN] if exact else ():
        print(f"    {text[:600]}", flush=True)
    return figures


def ask_pair(
    arguments: argparse.Namespace,
    pair: Deployment,
    name: str,
    mode: Mode,
    asks: list[Ask],
    expected: list[Answer],
) -> dict[str, object]:
    """Ask a pair in one mode, and count what its couriers noted."""
    marks = pair.trace_marks()
    salted = [ask.but(cache_salt=f"salt-{mode}") for ask in asks]
    found = asyncio.run(ask_all(pair.router(mode).url, arguments.model, salted, arguments.concurrency))
    figures = report(name, salted, expected, found, arguments.noise, exact=arguments.dtype == "float32")
    figures["quiet_after_s"] = round(wait_quiet(pair), 2)
    received = pair.received(marks)
    figures["handoffs"] = dict(Counter(f"{trace['mode']} {trace['outcome']}" for trace in received))
    figures["bytes"] = sum(int(str(trace["bytes"])) for trace in received)
    figures["checksums"] = sum(int(str(trace["checksums"])) for trace in received)
    figures["blocks"] = sum(int(str(trace["blocks"])) for trace in received)
    print(
        f"    handoffs {figures['handoffs']}, blocks {figures['blocks']}, checksums compared and equal {figures['checksums']}, MB {int(str(figures['bytes'])) / 1e6:.1f}, "
        f"all quiet after {figures['quiet_after_s']} s",
        flush=True,
    )
    return figures


def main() -> int:
    arguments = parse()
    modes = [Mode(mode) for mode in arguments.mode or Mode]
    asks = make_asks(arguments.seed, arguments.requests)
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="same-tokens-", ignore_cleanup_errors=True) as folder:
        theatre = Theatre(Path(folder), os.environ.get("KVBATON_ENGINE_LOCK"))
        try:
            expected = ask_one(arguments, theatre, asks)
            for caching in arguments.caching or ("off", "on"):
                pair = theatre.play(
                    f"caching-{caching}",
                    lambda folder, on=caching == "on": small(  # type: ignore[misc]
                        folder,
                        model=arguments.model,
                        dtype=arguments.dtype,
                        prefix_caching=on,
                        kv_cache_gib=2,
                    ),
                )
                for mode in modes:
                    name = f"{mode}, prefix caching {caching}"
                    results[name] = ask_pair(arguments, pair, name, mode, asks, expected)
        finally:
            theatre.close()
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    # With less precision, equal computation in another order gives other tokens; then checksums and logprobs count.
    key = "different" if arguments.dtype == "float32" else "failed"
    wrong = sum(int(str(figures[key])) for figures in results.values())  # type: ignore[index]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
