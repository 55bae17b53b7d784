"""Client: the process that sends requests, driven by one JSON line per order.

It is a process of its own so that it can sit in the router's network namespace, and so that loading vLLM's serving
benchmark, which takes seconds, happens once per contender and never while requests run. That benchmark sends the
requests of every cell and its definitions of TTFT, ITL and throughput are the ones reported.

Orders: `ready`, `fetch`, `complete` and `load`; see `ORDERS`. Each is answered by {"ok": ...} or {"error": "..."}.
"""

import argparse
import asyncio
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import aiohttp

BENCHMARK_MODULE: Final = "vllm.benchmarks.serve"
REQUEST_TIMEOUT: Final = aiohttp.ClientTimeout(total=600)
PROBE_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)

Order = dict[str, Any]


async def ready(order: Order) -> bool:
    """Whether `url` answers 200 now."""
    try:
        async with (
            aiohttp.ClientSession(timeout=PROBE_TIMEOUT) as session,
            session.get(order["url"]) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def fetch(order: Order) -> Any:
    """The JSON document at `url`."""
    async with aiohttp.ClientSession(timeout=PROBE_TIMEOUT) as session, session.get(order["url"]) as response:
        response.raise_for_status()
        return await response.json()


async def complete(order: Order) -> list[Any]:
    """Post `bodies` to the completions endpoint under `url`, `at_once` of them at a time; answers in order."""
    gate = asyncio.Semaphore(order["at_once"])

    async def one(session: aiohttp.ClientSession, body: Order) -> Any:
        async with gate, session.post(f"{order['url']}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {(await response.text())[:500]}")
            return await response.json()

    async with aiohttp.ClientSession(timeout=REQUEST_TIMEOUT) as session:
        return await asyncio.gather(*(one(session, body) for body in order["bodies"]))


async def load(order: Order) -> Any:
    """Run vLLM's serving benchmark with `argv` and return what it would save, per-request values included."""
    benchmark = load_benchmark()
    parser = argparse.ArgumentParser(prog="vllm bench serve")
    benchmark.add_cli_args(parser)
    with tempfile.TemporaryDirectory(prefix="kvbaton-bench-") as folder:
        saved = Path(folder) / "result.json"
        argv = [*order["argv"], "--save-result", "--save-detailed", "--result-filename", str(saved)]
        await benchmark.main_async(parser.parse_args(argv))
        return json.loads(saved.read_text(encoding="utf-8"))


async def prepare(_order: Order) -> bool:
    """Load the benchmark now, so that no order has to wait for it later."""
    load_benchmark()
    return True


def load_benchmark() -> ModuleType:
    """vLLM's benchmark, by name: this package does not depend on vLLM."""
    return importlib.import_module(BENCHMARK_MODULE)


ORDERS: Final[dict[str, Callable[[Order], Awaitable[Any]]]] = {
    "ready": ready,
    "fetch": fetch,
    "complete": complete,
    "load": load,
    "prepare": prepare,
}


def main() -> int:
    """Serve orders from standard input until it closes."""
    # vLLM prints its own tables: they go to the log, and the answers keep the original standard output.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        order: Order = json.loads(line)
        try:
            answer = {"ok": asyncio.run(_serve(order))}
        except (Exception, SystemExit) as error:  # noqa: BLE001  owner loop: every order must be answered
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    return 0


async def _serve(order: Order) -> Any:
    return await ORDERS[order["do"]](order)


if __name__ == "__main__":
    sys.exit(main())
