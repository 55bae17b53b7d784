"""What a fake engine is told to do and what it writes down, apart from the server that does it."""

import asyncio
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Json = dict[str, Any]  # bodies as a test reads them

PUSH_KEYS = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id")
"""What upstream's push connector reads without a default."""

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


def derived_id(seen: Seen) -> str:
    """The request id as vLLM derives it from the header, without the random suffix."""
    request_id = seen.headers.get("x-request-id", "none")
    if seen.path.startswith("/v1/chat"):
        return f"chatcmpl-{request_id}"
    if seen.path.startswith("/v1/responses"):
        return f"{seen.body.get('request_id')}_0"
    return f"cmpl-{request_id}-0"


def chunk(seen: Seen, token: str) -> Json:
    """One token as a stream event's object."""
    chat = seen.path.startswith("/v1/chat")
    choice: Json = {"index": 0, "finish_reason": None}
    choice |= {"delta": {"content": token + " "}} if chat else {"text": token + " "}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": derived_id(seen), "object": kind, "created": 1, "model": "fake", "choices": [choice]}


def opening(seen: Seen) -> list[bytes]:
    """What a stream says before its first token, and also before an error: vLLM's chat streams name the role."""
    if not seen.path.startswith("/v1/chat"):
        return []
    choice: Json = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    about: Json = {"id": derived_id(seen), "object": "chat.completion.chunk", "created": 1, "model": "fake"}
    return [f"data: {json.dumps({**about, 'choices': [choice]})}\n\n".encode()]


def plain_answer(seen: Seen, tokens: tuple[str, ...], cached_tokens: int) -> Json:
    """A complete answer, shaped for the endpoint it was asked at."""
    chat = seen.path.startswith("/v1/chat")
    text = " ".join(tokens)
    choices = [
        {"index": i, "finish_reason": "length", "message": {"role": "assistant", "content": text}}
        if chat
        else {"index": i, "finish_reason": "length", "text": text}
        for i in range(seen.body.get("n") or 1)
    ]
    return {
        "id": derived_id(seen),
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": "fake",
        "choices": choices,
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": len(tokens),
            "total_tokens": 7 + len(tokens),
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
        "kv_transfer_params": None,
    }
