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

from aiohttp import web

from kvbaton.testing.fake_script import (
    PUSH_KEYS,
    Cut,
    FakeConnector,
    FakeFabric,
    Json,
    Script,
    Seen,
    chunk,
    derived_id,
    opening,
    plain_answer,
)

WAIT_TIMEOUT_S = 30.0


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
        self.echo_cut = False
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

    async def _echo(self, request: web.Request) -> web.StreamResponse:
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
        if self.echo_cut:
            response = web.StreamResponse(
                headers={"Content-Length": "1000", "Content-Type": "application/json"}
            )
            await response.prepare(request)
            await response.write(b'{"half": ')
            return self._drop(request, seen)
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
        except asyncio.CancelledError:
            seen.ended = "aborted"
            raise
        except ConnectionError:  # found out by writing
            seen.ended = "aborted"
            return web.Response()
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
        return web.json_response(
            plain_answer(seen, script.tokens, self.cached_tokens), headers=script.headers
        )

    async def _prefill(self, seen: Seen, script: Script) -> web.Response:
        await _wait(script.before_tokens)
        answer = plain_answer(seen, script.tokens[:1], self.cached_tokens)
        if script.params:
            answer["kv_transfer_params"] = self._offer(seen)
            if self._fabric is not None:
                keys = (derived_id(seen), str(seen.params.get("transfer_id")))
                await self._fabric.finish(self.engine_id, keys)
        return web.json_response(answer, headers=script.headers)

    def _offer(self, seen: Seen) -> Json:
        offer = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": f"{derived_id(seen)}-{secrets.token_hex(4)}",
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
        key = derived_id(seen) if by_request else str(params["transfer_id"])
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
        for event in opening(seen):
            await response.write(event)
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
            await response.write(f"data: {json.dumps(chunk(seen, token))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _drop(self, request: web.Request, seen: Seen) -> web.Response:
        seen.ended = "cut"
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def _peer(request: web.Request) -> str:
    return str(request.transport.get_extra_info("peername")) if request.transport is not None else ""


async def _wait(event: asyncio.Event | None) -> None:
    if event is not None:
        await event.wait()
