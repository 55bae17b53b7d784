"""Finding out which producer stands behind a prefill engine's URL, at no user's expense."""

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvbaton.base.ids import EngineAddress, EngineId, RequestId, TransferId
from kvbaton.policy.view import ProducerIdentity
from kvbaton.router.config import ConnectorKind
from kvbaton.router.engines import Engine
from kvbaton.router.headers import ClientHeaders
from kvbaton.router.openai import Endpoint
from kvbaton.router.params import NoParams, prefill_params, read_answer
from kvbaton.router.upstream import Upstream, read_all

INFO_METRIC = "kvbaton:engine_info"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class Source(StrEnum):
    """Where an identity was learnt."""

    METRICS = "metrics"
    PROBE = "probe"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Learnt:
    """The producers behind one URL; more than one for data-parallel ranks.

    Attributes:
        producers: distinct identities, in the order found.
        source: where from.
        transfer_id: what a probe left at the producer, to be released.
    """

    producers: tuple[ProducerIdentity, ...]
    source: Source
    transfer_id: TransferId | None = None


class IdentityUnknown(Exception):
    """The engine does not say who it is; the message says why."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def read_metrics(text: str) -> tuple[ProducerIdentity, ...]:
    """Find the producers an engine's metrics name.

    Only the lines of our own gauge are looked at: an engine's whole text is too much for an event loop.
    """
    start = INFO_METRIC + "{"
    found: dict[ProducerIdentity, None] = {}
    for line in text.splitlines():
        if not line.startswith(start):
            continue
        labels = {name: _ESCAPE.sub(r"\1", value) for name, value in _LABEL.findall(line)}
        if labels.get("role", "prefill") == "decode":
            continue
        try:
            address = EngineAddress(labels["host"], int(labels["port"]), EngineId(labels["engine_id"]))
            sizes = (int(labels.get("tp_size", "1")), int(labels.get("pp_size", "1")))
        except (KeyError, ValueError):
            continue
        if address.host and address.engine_id:
            found[ProducerIdentity(address, *sizes)] = None
    return tuple(found)


async def learn_identity(
    upstream: Upstream, engine: Engine, connector: ConnectorKind, api_key: str | None
) -> Learnt:
    """Ask an engine for its producers: its metrics first, then, unless told otherwise, by one token of work.

    Raises:
        IdentityUnknown: neither way led to an identity.
        ConnectionFailed: the engine could not be reached.
    """
    producers = read_metrics((await _get(upstream, engine, "/metrics", api_key)).decode("utf-8", "replace"))
    if producers:
        return Learnt(producers, Source.METRICS)
    if connector is ConnectorKind.KVBATON:
        raise IdentityUnknown(f"its /metrics has no {INFO_METRIC}")
    return await _probe(upstream, engine, api_key)


async def _probe(upstream: Upstream, engine: Engine, api_key: str | None) -> Learnt:
    try:
        models = msgspec.json.decode(await _get(upstream, engine, "/v1/models", api_key), type=_Models)
    except msgspec.DecodeError as error:
        raise IdentityUnknown(f"its model list cannot be read: {error}") from None
    if not models.data:
        raise IdentityUnknown("it serves no model")
    transfer_id = TransferId(f"xfer-{secrets.token_hex(16)}")
    body = {
        "model": models.data[0].id,
        "prompt": [0],  # a token id every vocabulary has, so no tokenizer is needed
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": prefill_params(transfer_id),
    }
    headers = ClientHeaders((), None).for_leg(RequestId(f"kvb-probe{secrets.token_hex(16)}"), api_key)
    response = await upstream.send(engine, "POST", Endpoint.COMPLETIONS, headers, msgspec.json.encode(body))
    try:
        answer = await read_all(response)
    finally:
        response.close()
    if response.status != 200:
        raise IdentityUnknown(f"its answer to a one-token probe was {response.status}")
    try:
        identity = read_answer(answer).identity
    except NoParams as error:
        raise IdentityUnknown(str(error)) from None
    if identity is None:
        raise IdentityUnknown("its kv_transfer_params name no producer")
    return Learnt((identity,), Source.PROBE, transfer_id)


async def _get(upstream: Upstream, engine: Engine, path: str, api_key: str | None) -> bytes:
    response = await upstream.send(engine, "GET", path, ClientHeaders((), None).for_passing_on(api_key), None)
    try:
        body = await read_all(response)
    finally:
        response.close()
    return body if response.status == 200 else b""
