"""An OpenAI-compatible engine without a model: real sockets, scripted behaviour, an honest record of what it saw.

It is as unforgiving as vLLM where that matters to a router: a decode leg with missing push parameters is a crash,
one that names a producer which does not hold its KV waits until it is aborted, and the response head of a stream
goes out before any KV has arrived.
"""

import asyncio
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web

Json = dict[str, Any]  # bodies as a test reads them

PUSH_KEYS = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id")
"""What upstream's push connector reads without a default."""

WAIT_TIMEOUT_S = 10.0
DEFAULT_TOKENS = ("to", "pass", "the", "baton")


class FakeConnector(StrEnum):
    """Which connector the engine pretends to load."""

    KVBATON = "kvbaton"  # names its producer in /metrics, takes either mode
    NIXL_PULL = "nixl_pull"  # upstream's: decode reads by block ids
    NIXL_PUSH = "nixl_push"  # upstream's: matches the legs by request id


class Cut(StrEnum):
    """Where an engine drops the connection instead of going on."""

    BEFORE_HEAD = "before_head"
    AFTER_HEAD = "after_head"
    MID_STREAM = "mid_stream"


@dataclass(slots=True)
class Script:
    """How to treat one request; the default is to serve it.

    Attributes:
        status: HTTP status; an error status answers at once with `body`.
        body: error body.
        before_head: waited for before the response head.
        before_tokens: waited for between the head and the first token.
        token_gates: waited for before the token of the same index.
        cut: where the connection is dropped.
        hang: never answers; only an abort ends it.
        params: whether a prefill answer carries kv_transfer_params.
        waits_for_kv: whether a decode leg waits until its KV exists.
        error_event: a stream begins with an error event, as after a failed transfer.
        tokens: what is generated.
        headers: extra response headers.
    """

    status: int = 200
    body: bytes = b'{"error":{"message":"scripted","type":"scripted","param":null,"code":500}}'
    before_head: asyncio.Event | None = None
    before_tokens: asyncio.Event | None = None
    token_gates: tuple[asyncio.Event, ...] = ()
    cut: Cut | None = None
    hang: bool = False
    params: bool = True
    waits_for_kv: bool = True
    error_event: bool = False
    tokens: tuple[str, ...] = DEFAULT_TOKENS
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Seen:
    """One generation request as it arrived.

    Attributes:
        path: with its query.
        headers: names in lower case.
        raw: the body's bytes.
        body: the body, decoded.
        peer: client address of the connection it came on.
        ended: how it ended: None while it runs, else "served", "aborted" or "cut".
    """

    path: str
    headers: dict[str, str]
    raw: bytes
    body: Json
    peer: str = ""
    ended: str | None = None

    @property
    def request_id(self) -> str:
        """The `X-Request-Id` it came with."""
        return self.headers["x-request-id"]

    @property
    def params(self) -> Json:
        """Its kv_transfer_params; empty if there are none."""
        return self.body.get("kv_transfer_params") or {}


class FakeFabric:
    """Which KV exists where, so that fake decode engines wait for it as real ones do."""

    def __init__(self) -> None:
        self._finished: set[tuple[str, str]] = set()
        self._changed = asyncio.Condition()

    async def finish(self, engine_id: str, keys: tuple[str, ...]) -> None:
        """A prefill has ended at `engine_id`; it can be asked for by any of `keys`."""
        async with self._changed:
            self._finished.update((engine_id, key) for key in keys)
            self._changed.notify_all()

    async def wait_finished(self, engine_id: str, key: str) -> None:
        """Wait until `engine_id` has prefilled `key`; for ever if it never does."""
        async with self._changed:
            await self._changed.wait_for(lambda: (engine_id, key) in self._finished)


class FakeEngine:
    """One fake engine on a socket of its own.

    Owner: the event loop it was started on. Lifetime: `serving()` closes it.
    """

    def __init__(
        self, fabric: FakeFabric | None = None, connector: FakeConnector = FakeConnector.KVBATON
    ) -> None:
        self.connector = connector
        self.engine_id = f"engine-{secrets.token_hex(4)}"
        self.side_channel = ("127.0.0.1", 5600)
        self.healthy = True
        self.silent = False
        self.health_checks = 0
        self.cached_tokens = 0
        self.api_key: str | None = None
        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        self.other: list[Seen] = []
        self.crashes: list[str] = []
        self.running = 0
        self.max_running = 0
        self._fabric = fabric
        self._scripts: deque[Script] = deque()
        self._default = Script()
        self._waiters: list[asyncio.Event] = []
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._port}"

    def next(self, *scripts: Script) -> None:
        """Treat the next requests by these scripts, one each."""
        self._scripts.extend(scripts)

    def always(self, script: Script) -> None:
        """Treat every request without a script of its own by this one."""
        self._default = script

    def forget_scripts(self) -> None:
        """Drop the scripts of requests that never came."""
        self._scripts.clear()

    def restart_as(self, engine_id: str, port: int) -> None:
        """Become another producer behind the same URL, as a restarted process does."""
        self.engine_id = engine_id
        self.side_channel = (self.side_channel[0], port)

    @property
    def aborted(self) -> list[Seen]:
        """Requests whose connection was closed by the other side."""
        return [seen for seen in self.seen if seen.ended == "aborted"]

    async def wait_until(self, condition: Callable[["FakeEngine"], bool]) -> None:
        """Wait until `condition` holds; it is looked at whenever a request arrives or ends.

        Raises:
            TimeoutError: it does not come to hold.
        """
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            while not condition(self):
                waiter = asyncio.Event()
                self._waiters.append(waiter)
                await waiter.wait()

    async def start(self, port: int = 0) -> None:
        """Listen; port 0 takes a free one."""
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            app.router.add_post(path, self._generate)
        app.router.add_route("*", "/{any:.*}", self._echo)
        # Without handler cancellation aiohttp would not notice an abort while nothing is being written.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and drop all connections; `start` again takes the same port."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeEngine"]:
        """Listen while the block runs."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def _health(self, _request: web.Request) -> web.Response:
        self.health_checks += 1
        self._notify()
        if self.silent:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = ["# HELP vllm:num_requests_running Running.", "vllm:num_requests_running 0.0"]
        if self.connector is FakeConnector.KVBATON:
            host, port = self.side_channel
            lines.append(
                f'kvbaton:engine_info{{engine_id="{self.engine_id}",host="{host}",port="{port}",'
                f'tp_size="1",pp_size="1",role="prefill",connector="BatonConnector"}} 1.0'
            )
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        if not self._authorized(request):
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _echo(self, request: web.Request) -> web.Response:
        raw = await request.read()
        seen = Seen(
            request.path_qs,
            {k.lower(): v for k, v in request.headers.items()},
            raw,
            {},
            _peer(request),
            "served",
        )
        self.other.append(seen)
        return web.json_response(
            {"method": request.method, "path": request.path_qs, "body": raw.decode("latin-1")}
        )

    def _authorized(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.path_qs, headers, raw, json.loads(raw), _peer(request))
        probe = "probe" in seen.headers.get("x-request-id", "")
        (self.probes if probe else self.seen).append(seen)
        script = Script() if probe else (self._scripts.popleft() if self._scripts else self._default)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        self._notify()
        try:
            response = await self._serve(request, seen, script)
        except (asyncio.CancelledError, ConnectionError):
            seen.ended = "aborted"
            raise
        else:
            seen.ended = seen.ended or "served"
            return response
        finally:
            self.running -= 1
            self._notify()

    def _notify(self) -> None:
        """Wake the waiters; not a condition's `notify`, because a cancelled handler can no longer await its lock."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set()

    async def _serve(self, request: web.Request, seen: Seen, script: Script) -> web.StreamResponse:
        if not self._authorized(request):
            return web.Response(
                status=401, body=b'{"error":{"message":"unauthorized"}}', content_type="application/json"
            )
        if not isinstance(seen.body.get("n") or 1, int):
            return web.Response(
                status=400, body=b'{"error":{"message":"n"}}', content_type="application/json"
            )
        if script.hang:
            await asyncio.Event().wait()
        await _wait(script.before_head)
        if script.cut is Cut.BEFORE_HEAD:
            return self._drop(request, seen)
        if script.status != 200:
            return web.Response(
                status=script.status,
                body=script.body,
                content_type="application/json",
                headers=script.headers,
            )
        if seen.params.get("do_remote_decode"):
            return await self._prefill(seen, script)
        if seen.body.get("stream"):
            return await self._stream(request, seen, script)
        await self._await_kv(seen, script)
        await _wait(script.before_tokens)
        for gate in script.token_gates:
            await _wait(gate)
        return web.json_response(self._plain(seen, script.tokens), headers=script.headers)

    async def _prefill(self, seen: Seen, script: Script) -> web.Response:
        await _wait(script.before_tokens)
        answer = self._plain(seen, script.tokens[:1])
        if script.params:
            answer["kv_transfer_params"] = self._offer(seen)
            if self._fabric is not None:
                keys = (_derived_id(seen), str(seen.params.get("transfer_id")))
                await self._fabric.finish(self.engine_id, keys)
        return web.json_response(answer, headers=script.headers)

    def _offer(self, seen: Seen) -> Json:
        offer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{_derived_id(seen)}-{secrets.token_hex(4)}",
            "remote_host": self.side_channel[0],
            "remote_port": self.side_channel[1],
            "tp_size": 1,
            "pp_size": 1,
        }
        match self.connector:
            case FakeConnector.NIXL_PULL:
                offer |= {"remote_block_ids": [[1, 2, 3]], "transfer_mode": "pull"}
            case FakeConnector.NIXL_PUSH:
                offer |= {"remote_block_ids": [[1, 2, 3]], "transfer_mode": "push"}
            case FakeConnector.KVBATON:
                offer |= {"remote_block_ids": [], "transfer_mode": "push", "transfer_epoch": 0}
                offer["transfer_id"] = seen.params["transfer_id"]
        return offer

    async def _await_kv(self, seen: Seen, script: Script) -> None:
        params = seen.params
        if not params.get("do_remote_prefill"):
            return
        if params.get("transfer_mode") == "pull":
            missing = [key for key in ("remote_engine_id", "transfer_id") if key not in params]
        else:
            missing = [key for key in PUSH_KEYS if params.get(key) is None]
        if missing:
            self.crashes.append(f"missing {missing}")
            raise web.HTTPInternalServerError(text=f"KeyError: {missing}")
        if self._fabric is None or not script.waits_for_kv:
            return
        by_request = self.connector is not FakeConnector.KVBATON
        key = _derived_id(seen) if by_request else str(params["transfer_id"])
        await self._fabric.wait_finished(params["remote_engine_id"], key)

    async def _stream(self, request: web.Request, seen: Seen, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **script.headers}
        )
        await response.prepare(request)
        if script.cut is Cut.AFTER_HEAD:
            return self._drop(request, seen)
        await self._await_kv(seen, script)
        await _wait(script.before_tokens)
        if script.error_event:
            await response.write(
                b'data: {"error":{"message":"KV load failed","type":"InternalServerError","code":500}}\n\n'
            )
            await response.write(b"data: [DONE]\n\n")
            return response
        for index, token in enumerate(script.tokens):
            if index < len(script.token_gates):
                await _wait(script.token_gates[index])
            if script.cut is Cut.MID_STREAM and index == len(script.tokens) - 1:
                return self._drop(request, seen)
            await response.write(f"data: {json.dumps(_chunk(seen, token))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _drop(self, request: web.Request, seen: Seen) -> web.Response:
        seen.ended = "cut"
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _plain(self, seen: Seen, tokens: tuple[str, ...]) -> Json:
        chat = seen.path.startswith("/v1/chat")
        text = " ".join(tokens)
        choices = [
            {"index": i, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
            if chat
            else {"index": i, "finish_reason": "length", "text": text}
            for i in range(seen.body.get("n") or 1)
        ]
        return {
            "id": _derived_id(seen),
            "object": "chat.completion" if chat else "text_completion",
            "created": 1,
            "model": "fake",
            "choices": choices,
            "usage": {
                "prompt_tokens": 7,
                "completion_tokens": len(tokens),
                "total_tokens": 7 + len(tokens),
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            },
            "kv_transfer_params": None,
        }


def _peer(request: web.Request) -> str:
    return str(request.transport.get_extra_info("peername")) if request.transport is not None else ""


def _derived_id(seen: Seen) -> str:
    """The request id as vLLM derives it from the header, without the random suffix."""
    request_id = seen.headers.get("x-request-id", "none")
    if seen.path.startswith("/v1/chat"):
        return f"chatcmpl-{request_id}"
    if seen.path.startswith("/v1/responses"):
        return f"{seen.body.get('request_id')}_0"
    return f"cmpl-{request_id}-0"


def _chunk(seen: Seen, token: str) -> Json:
    chat = seen.path.startswith("/v1/chat")
    choice: Json = {"index": 0, "finish_reason": None}
    choice |= {"delta": {"content": token + " "}} if chat else {"text": token + " "}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": _derived_id(seen), "object": kind, "created": 1, "model": "fake", "choices": [choice]}


async def _wait(event: asyncio.Event | None) -> None:
    if event is not None:
        await event.wait()
