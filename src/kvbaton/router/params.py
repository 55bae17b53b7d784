"""`kv_transfer_params`: the dict vLLM's connectors read, written and read in this file only."""

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from kvbaton.base.ids import EngineAddress, EngineId, RequestId, TransferId
from kvbaton.policy.view import ProducerIdentity, TransferMode
from kvbaton.router.openai import Fields

_NULL = Raw(b"null")
_TRUE = Raw(b"true")
_FALSE = Raw(b"false")


class _Wire(msgspec.Struct):
    """The fields we read of a prefill engine's answer; all else passes through unread."""

    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dcp_size: int | None = None
    transfer_mode: str | None = None
    transfer_epoch: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: Raw = _NULL
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What a prefill leg came back with.

    Attributes:
        fields: the parameters as the engine wrote them.
        identity: whom they name; None if the engine does not say.
        cached_tokens: prompt tokens the prefill engine had cached; None if it does not say.
    """

    fields: Fields
    identity: ProducerIdentity | None
    cached_tokens: int | None


class NoParams(ValueError):
    """A prefill answer without usable `kv_transfer_params`: the KV cannot be found."""


def prefill_params(transfer_id: TransferId) -> Fields:
    """Parameters that ask an engine to keep a prompt's KV for a consumer."""
    return {
        "do_remote_decode": _TRUE,
        "do_remote_prefill": _FALSE,
        "remote_engine_id": _NULL,
        "remote_block_ids": _NULL,
        "remote_host": _NULL,
        "remote_port": _NULL,
        "transfer_id": _raw(transfer_id),
    }


def push_params(identity: ProducerIdentity, transfer_id: TransferId, engine_request_id: RequestId) -> Fields:
    """Parameters that tell a consumer where to register, before the producer has answered.

    Always the full set: a decode engine of upstream's dies on a missing key.
    """
    fields: Fields = {
        "do_remote_prefill": _TRUE,
        "do_remote_decode": _FALSE,
        "remote_engine_id": _raw(identity.address.engine_id),
        "remote_host": _raw(identity.address.host),
        "remote_port": _raw(identity.address.port),
        "tp_size": _raw(identity.tp_size),
        "pp_size": _raw(identity.pp_size),
        "remote_request_id": _raw(engine_request_id),
        "transfer_id": _raw(transfer_id),
        "transfer_mode": _raw(TransferMode.PUSH.value),
    }
    if identity.dcp_size != 1:
        fields["dcp_size"] = _raw(identity.dcp_size)
    return fields


def serial_params(
    answer: PrefillAnswer, mode: TransferMode, transfer_id: TransferId, epoch: int = 0
) -> Fields:
    """Parameters for a consumer that starts after the producer has answered: the answer's own, completed."""
    fields = answer.fields | {"transfer_mode": _raw(mode.value)}
    fields.setdefault("transfer_id", _raw(transfer_id))
    if mode is TransferMode.PUSH:
        fields.pop("remote_block_ids", None)  # the producer writes; the consumer must not read by these
    if epoch:
        fields["transfer_epoch"] = _raw(epoch)
    return fields


def read_answer(body: bytes) -> PrefillAnswer:
    """Read a prefill leg's response body.

    Raises:
        NoParams: it names no KV to fetch, or cannot be read.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
        if bytes(answer.kv_transfer_params).strip() in (b"null", b"{}"):
            raise NoParams(
                "the answer carries no kv_transfer_params; is a KV connector configured as producer?"
            )
        fields = msgspec.json.decode(answer.kv_transfer_params, type=Fields)
        wire = msgspec.json.decode(answer.kv_transfer_params, type=_Wire)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoParams(f"the answer cannot be read: {error}") from None
    return PrefillAnswer(fields, _identity(wire), _cached_tokens(answer.usage))


def _identity(wire: _Wire) -> ProducerIdentity | None:
    if not wire.remote_engine_id or not wire.remote_host or wire.remote_port is None:
        return None
    return ProducerIdentity(
        EngineAddress(wire.remote_host, wire.remote_port, EngineId(wire.remote_engine_id)),
        tp_size=wire.tp_size or 1,
        pp_size=wire.pp_size or 1,
        dcp_size=wire.dcp_size or 1,
        # Upstream's connectors name the one mode they speak. Ours names its default; the epoch gives it away.
        only_mode=_mode(wire.transfer_mode) if wire.transfer_epoch is None else None,
    )


def _mode(text: str | None) -> TransferMode | None:
    return TransferMode(text) if text in ("push", "pull") else None


def _cached_tokens(usage: _Usage | None) -> int | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return details.cached_tokens if details is not None else None


def _raw(value: str | int) -> Raw:
    return Raw(msgspec.json.encode(value))
