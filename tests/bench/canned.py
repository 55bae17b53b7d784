"""Records as a benchmark would have written them, made by code."""

import random

from kvbaton.bench.contenders import CONTENDERS
from kvbaton.workload.record import CellResult, Header, HookTime, Record, Request, Skipped, TokenCheck

HEADER = Header(
    "2026-10-01T12:00:00+00:00", "abc123", 7, {"model": "tiny", "dtype": "bfloat16"}, {"vllm": "0.32.0"}, {"cpu": "two cores"}
)  # fmt: skip


def request(
    index: int, prefill_s: float, exposed_s: float, rng: random.Random, *, mode: str | None
) -> Request:
    leg_s = prefill_s * rng.uniform(0.95, 1.05)
    first_s = 0.001 + leg_s + exposed_s * rng.uniform(0.9, 1.1)
    steps_s = {"prefill_sent": 0.001, "prefill_done": 0.001 + leg_s, "decode_first_byte": first_s}
    return Request(
        f"r-{index}", 2048, 4, index * 2.5, first_s + 0.002, [rng.uniform(0.018, 0.022) for _ in range(3)],
        mode=mode, steps_s={} if mode is None else steps_s, num_attempts=0 if mode is None else 1,
    )  # fmt: skip


def cell(
    contender: str,
    *,
    repeat: int = 0,
    rate_per_s: float | None = 0.4,
    prefill_s: float = 0.4,
    exposed_s: float = 0.1,
    link: str = "none",
    num_requests: int = 8,
) -> CellResult:
    rng = random.Random(f"{contender}{repeat}{rate_per_s}")
    known = CONTENDERS[contender].mode
    mode = None if known is None else known.value
    requests = [request(i, prefill_s, exposed_s, rng, mode=mode) for i in range(num_requests)]
    return CellResult(
        contender, repeat, link, "loopback", 2048, 4, rate_per_s, "poisson", 7 + repeat, prefill_s,
        None if rate_per_s is None else rate_per_s * prefill_s, 20.0, requests,
        {"prefill": 8.0, "decode": 4.0, "router": 0.4},
        [
            HookTime("prefill", "worker", "wait_for_save", 80, 0.8, 0.4),
            HookTime("decode", "scheduler", "build_connector_meta", 800, 1.6, 1.2),
            HookTime("decode", "worker", "step.100", 989, 0.1, 0.1),
            HookTime("decode", "worker", "step.400", 11, 0.1, 0.1),
            HookTime("decode", "engine thread", "nixl.make_prepped_xfer", num_requests, 0.2, 0.2, 128 * num_requests),
            HookTime("decode", "engine thread", "nixl.transfer", num_requests, 0.6, 0.6, num_requests),
        ],
    )  # fmt: skip


def records() -> list[Record]:
    """Three repeats of three contenders at two rates, one of them half as fast to hand over."""
    found: list[Record] = [HEADER, TokenCheck("plain", "plain", "float32", 8, 8, None, [[1]])]
    found += [
        cell(contender, repeat=repeat, rate_per_s=rate_per_s, exposed_s=exposed_s)
        for repeat in range(3)
        for contender, exposed_s in (("plain", 0.0), ("upstream-pull", 0.1), ("ours-stream", 0.02))
        for rate_per_s in (None, 0.4, 0.8)
    ]
    found.append(Skipped("upstream-push", 0, "none", 2048, 0.8, "rho 0.95 is not below 0.9", True))
    return found
