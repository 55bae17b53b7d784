"""Do requests that already decode feel the KV of others arrive, in very many pieces?

We would be wrong if tokens came more than 1.05 times as far apart while KV arrives as while the prefill engine computes the same prompts for nobody.

Start a deployment per contender, in turn, on the same two cores, with a model of 64 thin layers, so that 8,192 tokens are 16,384 blocks of 8 KiB:

    python benchmarks/does_arriving_kv_disturb_decode.py --make-model /tmp/thin
    kvbaton up --model /tmp/thin --block-tokens 32 --max-model-len 8320 --kv-cache-gib 2 --no-prefix-caching --dtype bfloat16 \\
        --ucx-tls tcp --port 8000 --engine-port 8100 [--connector NixlConnector --mode pull]
    python benchmarks/does_arriving_kv_disturb_decode.py --router http://localhost:8000 \\
        --prefill http://localhost:8100 --decode http://localhost:8102

Requests of many lengths first mix the order of free blocks, so that neighbours in a prompt are none in memory.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from kvbaton.launch.handoffs import parse_timeline
from kvbaton.launch.model import Recipe, write_tokenizer, write_weights

THIN = Recipe(hidden_size=64, intermediate_size=128, num_layers=64, num_heads=1, num_kv_heads=1, head_dim=64)
PROMPT_TOKENS = 8192
BACKGROUND = 3
CHURN = 160
SEED = 20_261_130

Window = tuple[float, float]


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Tokens that mean nothing."""
    return [rng.randrange(10, THIN.vocab_size) for _ in range(num_tokens)]


def body(tokens: list[int], max_tokens: int) -> dict[str, Any]:
    """A completion that runs to its limit."""
    return {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


async def stream(
    http: aiohttp.ClientSession, url: str, request: dict[str, Any], name: str = ""
) -> list[float]:
    """Send a request; when each token came."""
    headers = {"X-Request-Id": name} if name else {}
    async with http.post(f"{url}/v1/completions", json=request, headers=headers) as response:
        response.raise_for_status()
        return [time.monotonic() async for line in response.content if line.startswith(b"data: {")]


async def churn(http: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
    """Mix the order of an engine's free blocks."""
    gate = asyncio.Semaphore(24)

    async def one() -> None:
        async with gate:
            await stream(http, url, body(prompt(rng, rng.randrange(16, 400)), rng.randrange(2, 100)))

    await asyncio.gather(*(one() for _ in range(CHURN)))


class Decoding:
    """Requests that generate on the decode engine all the while.

    Owner: the measurement. Lifetime: `start` to `stop`.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
        """Start nothing."""
        self._http, self._url, self._rng = http, url, rng
        self._moments: list[list[float]] = []  # one list per request
        self._started = [asyncio.Event() for _ in range(BACKGROUND)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when all of them generate."""
        self._tasks = [asyncio.create_task(self._one(started)) for started in self._started]
        await asyncio.gather(*(started.wait() for started in self._started))

    async def _one(self, started: asyncio.Event) -> None:
        while True:
            moments: list[float] = []
            self._moments.append(moments)
            request = body(prompt(self._rng, 64), 8000)
            async with self._http.post(f"{self._url}/v1/completions", json=request) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        moments.append(time.monotonic())  # read while it grows
                        started.set()

    async def stop(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps(self, window: Window) -> Iterator[float]:
        """Times between tokens that lie in a window."""
        for moments in self._moments:
            for before, after in pairwise(moments):
                if window[0] <= before and after <= window[1]:
                    yield after - before


async def measure(http: aiohttp.ClientSession, args: argparse.Namespace) -> dict[str, Any]:
    """Both phases against a running deployment."""
    rng = random.Random(SEED)
    await churn(http, args.decode, rng)
    await churn(http, args.prefill, rng)
    prompts = [prompt(rng, args.prompt_tokens) for _ in range(args.arrivals)]
    decoding = Decoding(http, args.decode, rng)
    await decoding.start()
    alone, arriving = [], []
    for number, tokens in enumerate(prompts):
        began = time.monotonic()
        await stream(http, args.prefill, body([*tokens[:-1], 9], 1))
        alone.append((began, time.monotonic()))
        name = f"arrival-{number}-{rng.getrandbits(32):x}"
        began = time.monotonic()
        await stream(http, args.router, body(tokens, 1), name)
        async with http.get(f"{args.router}/kvbaton/requests/{name}") as response:
            steps = parse_timeline(await response.text()).steps_s
        arriving.append((began + steps["decode_sent"], began + steps["decode_first_byte"]))
    await decoding.stop()
    usual = statistics.median(gap for window in alone for gap in decoding.gaps(window))
    # the arrival's own first step computes its last token, for every contender: left out
    arriving = [(first, last - 1.5 * usual) for first, last in arriving]
    return {
        "alone": [list(decoding.gaps(w)) for w in alone],
        "arriving": [list(decoding.gaps(w)) for w in arriving],
    }


def line(name: str, gaps: Sequence[float]) -> str:
    """A row of the report."""
    ordered = sorted(gaps)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return f"{name:<28} n {len(gaps):5}  mean {1e3 * statistics.mean(gaps):7.2f}  p99 {1e3 * p99:7.2f}  max {1e3 * ordered[-1]:7.2f} ms"


def main() -> int:
    """Measure, print, and keep the raw gaps where asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make-model", type=Path, metavar="DIR")
    for role in ("router", "prefill", "decode"):
        parser.add_argument(f"--{role}", metavar="URL")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--arrivals", type=int, default=5)
    parser.add_argument("--raw", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.make_model:
        args.make_model.mkdir(parents=True, exist_ok=True)
        write_tokenizer(THIN, args.make_model)
        write_weights(THIN, args.make_model)
        return 0
    if not (args.router and args.prefill and args.decode):
        parser.error("--router, --prefill and --decode are needed")

    async def run() -> dict[str, Any]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as http:
            return await measure(http, args)

    found = asyncio.run(run())
    if args.raw:
        args.raw.write_text(json.dumps(found), encoding="utf-8")
    alone = [gap for gaps in found["alone"] for gap in gaps]
    arriving = [gap for gaps in found["arriving"] for gap in gaps]
    print(line("prefill computes for nobody", alone))
    print(line("KV arrives", arriving))
    each = sorted(
        statistics.mean(b) / statistics.mean(a)
        for a, b in zip(found["alone"], found["arriving"], strict=True)
        if a and b
    )
    print(
        f"ratio {statistics.mean(arriving) / statistics.mean(alone):.3f}, single arrivals {each[0]:.3f} to {each[-1]:.3f}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
