"""The router as a process: it starts, says where it listens, and ends when told to."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process

import aiohttp
import pytest

from kvbaton.testing.fake_engine import FakeEngine
from kvbaton.testing.fake_script import Script
from router.harness import TIMEOUT_S

COMMAND = (sys.executable, "-m", "kvbaton.router", "--port", "0", "--connector", "kvbaton")


async def _start(prefill: str, decode: str) -> tuple[Process, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--prefill", prefill, "--decode", decode, stderr=PIPE
    )
    assert process.stderr is not None
    async for line in process.stderr:
        if b"running on" in line:
            return process, next(word for word in line.decode().split() if word.startswith("http://"))
    raise AssertionError("the router ended before it listened")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stop_signal_lets_a_stream_finish_and_ends_with_status_zero(number: signal.Signals):
    async with (
        FakeEngine().serving() as prefill,
        FakeEngine().serving() as decode,
        asyncio.timeout(TIMEOUT_S),
    ):
        process, url = await _start(prefill.url, decode.url)
        assert process.stderr is not None
        rest = asyncio.create_task(process.stderr.read())
        gate = asyncio.Event()
        decode.next(Script(before_tokens=gate))
        async with aiohttp.ClientSession() as client:
            asking = asyncio.create_task(_ask(client, url))
            await decode.wait_until(lambda e: e.running == 1)
            process.send_signal(number)
            gate.set()

            assert await asking == 200
        assert await process.wait() == 0
        assert b"Traceback" not in await rest


async def _ask(client: aiohttp.ClientSession, url: str) -> int:
    body = {"model": "fake", "prompt": "hi", "stream": True}
    while True:  # refused until the router has found its engines
        async with client.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
            if response.status != 503:
                return response.status
