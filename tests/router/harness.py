"""A router and fake engines on real sockets, and the client's side of a conversation with them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import uvicorn

from kvbaton.base.ids import TransferId
from kvbaton.policy.view import EngineName, ModePreference, ProducerIdentity
from kvbaton.router.app import RouterApp
from kvbaton.router.config import RouterConfig
from kvbaton.router.server import make_server
from kvbaton.testing.fake_engine import FakeEngine
from kvbaton.testing.fake_script import FakeConnector, FakeFabric

TIMEOUT_S = 30.0
PROMPT = "the quick brown fox jumps over the lazy dog"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class RecordingReleaser:
    """A releaser that remembers."""

    def __init__(self) -> None:
        self.released: list[tuple[ProducerIdentity, TransferId]] = []
        self.fail = False
        self._changed = asyncio.Event()

    async def release(self, identity: ProducerIdentity, transfer_id: TransferId) -> None:
        self.released.append((identity, transfer_id))
        self._changed.set()
        if self.fail:
            raise ConnectionError("scripted")

    async def wait_released(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self._changed.wait()


class StoppableServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Do what a stop signal does, without waiting for the server's next tick."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        lines = [line for line in self.raw.split(b"\n\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    @property
    def text(self) -> str:
        """Generated text, streamed or not, of either endpoint."""
        bodies = self.events if self.raw.startswith(b"data:") else [self.json]
        parts = []
        for body in bodies:
            choice = body["choices"][0]
            holder = choice.get("message") or choice.get("delta") or choice
            parts.append(holder.get("content") or holder.get("text") or "")
        return "".join(parts).strip()


@dataclass
class Cluster:
    """Engines, the router in front of them and one client."""

    app: RouterApp
    url: str
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    fabric: FakeFabric
    releaser: RecordingReleaser
    client: aiohttp.ClientSession
    server: StoppableServer
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def post(self, path: str, body: Any, **kwargs: Any) -> Answer:
        if isinstance(body, (bytes, str)):
            kwargs["data"] = body
        else:
            kwargs["json"] = body
        async with asyncio.timeout(TIMEOUT_S), self.client.post(self.url + path, **kwargs) as response:
            return Answer(
                response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read()
            )

    async def get(self, path: str, **kwargs: Any) -> Answer:
        async with asyncio.timeout(TIMEOUT_S), self.client.get(self.url + path, **kwargs) as response:
            return Answer(
                response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read()
            )

    async def complete(self, prompt: Any = PROMPT, **fields: Any) -> Answer:
        return await self.post(COMPLETIONS, {"model": "fake", "prompt": prompt, "max_tokens": 4, **fields})

    def start(self, prompt: Any = PROMPT, **fields: Any) -> asyncio.Task[Answer]:
        """Send a completion without waiting for it; cancelling the task hangs up."""
        task = asyncio.create_task(self.complete(prompt, **fields))
        self.tasks.append(task)
        return task

    def metric(self, name: str, **labels: str) -> float:
        return self.app.metrics.sample(f"kvbaton_router_{name}", labels.items())

    def in_flight(self) -> list[int]:
        return [n for e in self.app.fleet.engines.values() for n in (e.running_requests, e.queued_tokens)]

    async def wait_idle(self) -> None:
        """Wait until all books are empty."""
        async with asyncio.timeout(TIMEOUT_S):
            while any(self.in_flight()):  # noqa: ASYNC110 - the books send no signal
                await asyncio.sleep(0)


@asynccontextmanager
async def run_cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    connector: FakeConnector = FakeConnector.KVBATON,
    settle: bool = True,
    start_engines: bool = True,
    api_key: str | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    fabric = FakeFabric()
    async with AsyncExitStack() as stack:
        engines = [FakeEngine(fabric, connector) for _ in range(prefill + decode)]
        for number, engine in enumerate(engines):
            engine.side_channel = ("127.0.0.1", 5600 + number)
            engine.api_key = api_key
            await engine.start()
            stack.push_async_callback(engine.stop)
            if not start_engines:
                await engine.stop()
        names = [EngineName(engine.url) for engine in engines]
        config = replace(
            RouterConfig(tuple(names[:prefill]), tuple(names[prefill:]), api_key=api_key, backoff_s=0.02),
            **settings,
        )
        releaser = RecordingReleaser()
        app = RouterApp(config, releaser)
        server, url = await stack.enter_async_context(_serving(app))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        )
        if settle:
            async with asyncio.timeout(TIMEOUT_S):
                await app.wait_settled()
        cluster = Cluster(app, url, engines[:prefill], engines[prefill:], fabric, releaser, client, server)
        try:
            yield cluster
        finally:
            for task in cluster.tasks:
                task.cancel()
            await asyncio.gather(*cluster.tasks, return_exceptions=True)


@asynccontextmanager
async def _serving(app: RouterApp) -> AsyncIterator[tuple[StoppableServer, str]]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = StoppableServer(make_server(app, "warning").config)
    server.config.timeout_graceful_shutdown = 1
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await server.listening.wait()
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        await serving
        listener.close()


def mode(value: str) -> ModePreference:
    return ModePreference(value)
