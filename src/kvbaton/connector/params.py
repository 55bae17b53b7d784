"""`kv_transfer_params`: what a request asks of the connector and what a finished prefill answers; dicts end in this file.

Security: whoever can send `kv_transfer_params` chooses the host and port this engine connects to. Behind kvbaton's router clients
cannot (it strips and rewrites them); without it, list the prefill engines in the `peers` setting.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvbaton.base.ids import MAX_TRANSFER_ID_CHARS, EngineAddress, EngineId, HandoffKey, RequestId, TransferId
from kvbaton.protocol.mode import Mode

_Tid = Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID_CHARS, pattern=r"^[\x21-\x7e]+$")]
_Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:%\[\]-]+$")]
_Engine = Annotated[str, Meta(min_length=1, max_length=512)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_Epoch = Annotated[int, Meta(ge=0, lt=1 << 62)]

_ENGINE_REQUEST = re.compile(r"(?:0_)?(?:cmpl-(.+)-\d+|chatcmpl-(.+)|resp_(.+)_0)-[0-9a-f]{8}", re.DOTALL)
"""How vLLM names a request of the three endpoints after the caller's `X-Request-Id`, up to a random ending of its own."""


class _Flags(msgspec.Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class _Produce(msgspec.Struct):
    transfer_id: _Tid | None = None


class _Consume(msgspec.Struct):
    remote_engine_id: _Engine
    remote_host: _Host
    remote_port: _Port
    transfer_id: _Tid | None = None
    remote_request_id: _Engine | None = None
    transfer_mode: Literal["push", "pull"] | None = None
    transfer_epoch: _Epoch | None = None
    epoch: _Epoch | None = None
    tp_size: _Size | None = None
    pp_size: _Size | None = None


@dataclass(frozen=True, slots=True)
class Produce:
    """The request's KV is to be handed to a consumer.

    Attributes:
        key: the handoff.
    """

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class Consume:
    """The request's KV comes from a producer.

    Attributes:
        key: the handoff.
        address: the producing engine's directory.
        mode: who posts.
        tp_size: tensor-parallel size of the producing engine, as claimed.
        pp_size: pipeline-parallel size of the producing engine, as claimed.
    """

    key: HandoffKey
    address: EngineAddress
    mode: Mode
    tp_size: int
    pp_size: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The parameters cannot be acted upon; the request fails, or is computed here where the failure policy says so.

    Attributes:
        reason: a sentence for the log.
    """

    reason: str


Intent = Produce | Consume | Refuse


@dataclass(frozen=True, slots=True)
class Rules:
    """What this engine accepts.

    Attributes:
        produces: it may hand KV off.
        consumes: it may receive KV.
        mode: who posts where a request does not say.
        peers: producers a request may name ("host" or "host:port"); None allows any.
    """

    produces: bool
    consumes: bool
    mode: Mode
    peers: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Self:
    """What a producer tells about itself.

    Attributes:
        address: its directory.
        tp_size: tensor-parallel size.
        pp_size: pipeline-parallel size.
        mode: who posts by default.
    """

    address: EngineAddress
    tp_size: int
    pp_size: int
    mode: Mode


def read_intent(params: object, rules: Rules, request_id: str) -> Intent | None:
    """Understand a request's `kv_transfer_params`; total, so that no input raises.

    Args:
        params: what the request carries.
        rules: what this engine accepts.
        request_id: the engine's name of the request; names the handoff where a router knows no transfer ids.

    Returns:
        None for an ordinary request.
    """
    if not params:
        return None
    try:
        flags = msgspec.convert(params, _Flags)
        if flags.do_remote_decode and flags.do_remote_prefill:
            return Refuse("kv_transfer_params: do_remote_decode and do_remote_prefill are both set")
        if flags.do_remote_decode:
            return _produce(msgspec.convert(params, _Produce), rules, request_id)
        if flags.do_remote_prefill:
            return _consume(msgspec.convert(params, _Consume), rules)
    except msgspec.ValidationError as error:
        return Refuse(f"kv_transfer_params: {error}")
    return None


def answer(key: HandoffKey, request_id: RequestId, num_tokens: int, about: Self) -> dict[str, object]:
    """What the finished prefill's response carries, ready to be sent to a consumer (upstream's keys and our own)."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": about.address.engine_id,
        "remote_host": about.address.host,
        "remote_port": about.address.port,
        "remote_request_id": request_id,
        "remote_block_ids": [],
        "remote_num_tokens": num_tokens,
        "tp_size": about.tp_size,
        "pp_size": about.pp_size,
        "transfer_id": key.transfer_id,
        "transfer_epoch": key.epoch,
        "transfer_mode": about.mode.value,
    }


def shared_transfer_id(request_id: str) -> TransferId:
    """Name a handoff after the `X-Request-Id` that both legs carry.

    Routers made for vLLM's own connectors (vllm-router) send no transfer id, and drop the one a prefill answers with.

    Args:
        request_id: the id as the router sent it, or as an engine lengthened it.
    """
    found = _ENGINE_REQUEST.fullmatch(request_id)
    name = request_id if found is None else next(group for group in found.groups() if group is not None)
    return TransferId(f"req-{hashlib.sha256(name.encode()).hexdigest()[:40]}")


def _produce(raw: _Produce, rules: Rules, request_id: str) -> Intent:
    if not rules.produces:
        return Refuse("kv_transfer_params: do_remote_decode on an engine whose kv_role does not produce")
    return Produce(HandoffKey(TransferId(raw.transfer_id or shared_transfer_id(request_id))))


def _consume(raw: _Consume, rules: Rules) -> Intent:
    if not rules.consumes:
        return Refuse("kv_transfer_params: do_remote_prefill on an engine whose kv_role does not consume")
    if rules.peers is not None and not rules.peers.intersection(
        {raw.remote_host, f"{raw.remote_host}:{raw.remote_port}"}
    ):
        return Refuse(
            f"kv_transfer_params: {raw.remote_host}:{raw.remote_port} is not among the configured peers"
        )
    if raw.transfer_id is not None:
        transfer_id = TransferId(raw.transfer_id)
    elif raw.remote_request_id is not None:
        transfer_id = shared_transfer_id(raw.remote_request_id)
    else:
        return Refuse(
            "kv_transfer_params: neither transfer_id nor remote_request_id says which prefill it is"
        )
    epoch = raw.transfer_epoch if raw.transfer_epoch is not None else raw.epoch or 0
    return Consume(
        HandoffKey(transfer_id, epoch),
        EngineAddress(raw.remote_host, raw.remote_port, EngineId(raw.remote_engine_id)),
        Mode(raw.transfer_mode) if raw.transfer_mode else rules.mode,
        raw.tp_size or 1,
        raw.pp_size or 1,
    )
