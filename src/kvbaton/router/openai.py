"""OpenAI-style request bodies: read once, value bytes kept as the client sent them."""

import json
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec import Raw

from kvbaton.base.ids import RequestId, TransferId
from kvbaton.policy.view import LocalReason, RequestShape
from kvbaton.router.http_errors import BadRequest

Fields = dict[str, Raw]
"""A JSON object with its values still encoded; lives only between parsing and sending."""

CHARS_PER_TOKEN = 4  # good enough to tell long prompts from short ones, and costs no tokenizer
CLIENT_FORBIDDEN = ("kv_transfer_params", "ec_transfer_params")
"""Fields that choose hosts, ports or memory: never taken from a client."""

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ONE = Raw(b"1")
_FALSE = Raw(b"false")
_DROPPED_FROM_PREFILL = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    # Its token is thrown away, and vLLM 0.32 on CPU dies of a seeded request whose prefill takes several chunks.
    "seed",
)
_PLAIN_PARTS = frozenset(
    {"text", "input_text", "output_text", "refusal", "thinking", "reasoning_text", "summary_text"}
)
_fields = msgspec.json.Decoder(Fields)
_list = msgspec.json.Decoder(list[Raw])


class Endpoint(StrEnum):
    """The paths whose requests are handed off."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"


_DEFAULT_LIMIT = {
    Endpoint.COMPLETIONS: "max_tokens",
    Endpoint.CHAT: "max_completion_tokens",
    Endpoint.RESPONSES: "max_output_tokens",
}


class _Part(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: Raw = Raw(b"null")


@dataclass(frozen=True, slots=True)
class AttemptIds:
    """What names one attempt on both legs.

    Attributes:
        transfer_id: matches the legs in our connector.
        request_id: the `X-Request-Id` of both legs; upstream's connectors match by what vLLM derives from it.
    """

    transfer_id: TransferId
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A parsed request body.

    Attributes:
        endpoint: the path it was sent to.
        fields: top-level values, without those a client may not set.
        shape: what routing depends on.
    """

    endpoint: Endpoint
    fields: Fields
    shape: RequestShape

    def prefill_leg(self, ids: AttemptIds, params: Fields) -> bytes:
        """The body of the prefill leg: one token, no stream, everything that shapes the prompt untouched."""
        fields = self._with(ids, params)
        for name in _DROPPED_FROM_PREFILL:
            fields.pop(name, None)
        fields["stream"] = _FALSE
        if "n" in fields:
            fields["n"] = _ONE
        present = [name for name in _LIMITS if name in fields] or [_DEFAULT_LIMIT[self.endpoint]]
        fields.update(dict.fromkeys(present, _ONE))
        if self.endpoint is Endpoint.RESPONSES:
            fields["store"] = _FALSE
        return msgspec.json.encode(fields)

    def decode_leg(self, ids: AttemptIds, params: Fields) -> bytes:
        """The body of the decode leg: the client's own, plus our parameters."""
        return msgspec.json.encode(self._with(ids, params))

    def local(self) -> bytes:
        """The body for a decode engine that prefills for itself."""
        return msgspec.json.encode(self.fields)

    def _with(self, ids: AttemptIds, params: Fields) -> Fields:
        fields = self.fields | {"kv_transfer_params": Raw(msgspec.json.encode(params))}
        if self.endpoint is Endpoint.RESPONSES:
            # vLLM names a response by this field and not by the header.
            fields["request_id"] = Raw(msgspec.json.encode(f"resp_{ids.request_id}"))
        return fields

    def engine_request_id(self, ids: AttemptIds) -> RequestId:
        """What vLLM will call the request, up to the random suffix of each engine."""
        match self.endpoint:
            case Endpoint.COMPLETIONS:
                return RequestId(f"cmpl-{ids.request_id}-0")
            case Endpoint.CHAT:
                return RequestId(f"chatcmpl-{ids.request_id}")
            case Endpoint.RESPONSES:
                return RequestId(f"resp_{ids.request_id}_0")


def parse_body(endpoint: Endpoint, body: bytes) -> ClientBody:
    """Read a request body.

    Raises:
        BadRequest: not a JSON object.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request body is not a JSON object: {error}") from None
    for name in CLIENT_FORBIDDEN:
        fields.pop(name, None)
    return ClientBody(endpoint, fields, _shape(endpoint, fields))


def strip_forbidden(body: bytes) -> bytes:
    """Remove the forbidden fields, at any depth, from a body on its way to an engine.

    A body that is not JSON, or holds none of them, comes back as it is. What counts as JSON is what an engine's
    own parser takes, which is more than the standard: NaN, or UTF-16.

    Raises:
        BadRequest: nested too deeply to be looked through.
    """
    try:
        try:
            value: object = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            value = json.loads(body)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    except ValueError:
        return body
    return json.dumps(value).encode() if _strip(value) else body


def _strip(value: object) -> bool:
    found = False
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            for name in CLIENT_FORBIDDEN:
                found |= item.pop(name, None) is not None
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
    return found


def _shape(endpoint: Endpoint, fields: Fields) -> RequestShape:
    if endpoint is Endpoint.COMPLETIONS:
        prompt_tokens, reason = _completion_prompt(fields)
    else:
        conversation = fields.get("messages" if endpoint is Endpoint.CHAT else "input", Raw(b"null"))
        prompt_tokens = _chars(conversation) // CHARS_PER_TOKEN
        reason = LocalReason.MULTIMODAL if _is_multimodal(conversation) else None
    return RequestShape(max(1, prompt_tokens), reason or _option_reason(endpoint, fields))


def _completion_prompt(fields: Fields) -> tuple[int, LocalReason | None]:
    if not _is_unset(fields, "prompt_embeds"):
        return 1, LocalReason.PROMPT_EMBEDS
    prompt = fields.get("prompt", Raw(b"null"))
    encoded = bytes(prompt).lstrip()
    if not encoded.startswith(b"["):
        return _chars(prompt) // CHARS_PER_TOKEN, None
    first = encoded[1:].lstrip()[:1]
    if first not in (b'"', b"["):  # one list of token ids
        return encoded.count(b",") + 1, None
    prompts = _list.decode(prompt)
    if len(prompts) > 1:
        return 1, LocalReason.MANY_PROMPTS
    only = prompts[0]
    tokens = bytes(only).count(b",") + 1 if first == b"[" else _chars(only) // CHARS_PER_TOKEN
    return tokens, None


def _option_reason(endpoint: Endpoint, fields: Fields) -> LocalReason | None:
    checks = (
        (LocalReason.MANY_CHOICES, _number(fields, "n", 1) > 1 or _number(fields, "best_of", 1) > 1),
        (LocalReason.BEAM_SEARCH, _is_true(fields, "use_beam_search")),
        (LocalReason.ECHO, _is_true(fields, "echo")),
        (LocalReason.PROMPT_LOGPROBS, not _is_unset(fields, "prompt_logprobs")),
        (LocalReason.TRUNCATION, _truncates_by_limit(fields)),
        (LocalReason.NO_OUTPUT, any(_number(fields, name, 1) == 0 for name in _LIMITS)),
    )
    for reason, applies in checks:
        if applies:
            return reason
    if endpoint is Endpoint.RESPONSES:
        return _responses_reason(fields)
    return None


def _responses_reason(fields: Fields) -> LocalReason | None:
    if not _is_unset(fields, "previous_response_id") or _is_true(fields, "background"):
        return LocalReason.STORED_STATE
    for tool in _items(fields.get("tools", Raw(b"[]"))):
        if _part_type(tool) != "function":
            return LocalReason.HOSTED_TOOLS
    return None


def _truncates_by_limit(fields: Fields) -> bool:
    if _number(fields, "truncate_prompt_tokens", 1) < 0:
        return True
    return bytes(fields.get("truncation", Raw(b'"disabled"'))) not in (b'"disabled"', b"null")


def _is_multimodal(conversation: Raw) -> bool:
    for item in _items(conversation):
        try:
            content = msgspec.json.decode(item, type=_Message).content
        except msgspec.DecodeError:
            continue  # the engine will say what is wrong with it
        for part in _items(content):
            if bytes(part)[:1] == b"{" and _part_type(part) not in _PLAIN_PARTS:
                return True
    return False


def _items(value: Raw) -> list[Raw]:
    try:
        return _list.decode(value)
    except msgspec.DecodeError:
        return []


def _part_type(part: Raw) -> str:
    try:
        return msgspec.json.decode(part, type=_Part).type
    except msgspec.DecodeError:
        return "unreadable"


def _chars(value: Raw) -> int:
    return len(memoryview(value))


def _number(fields: Fields, name: str, default: int) -> int:
    try:
        # Lax as vLLM itself is: "2" is 2 there too.
        return int(msgspec.json.decode(fields[name], type=float, strict=False))
    except (KeyError, msgspec.DecodeError, OverflowError, ValueError):
        return default


def _is_true(fields: Fields, name: str) -> bool:
    try:
        return msgspec.json.decode(fields[name], type=bool, strict=False)
    except (KeyError, msgspec.DecodeError):
        return False


def _is_unset(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, Raw(b"null"))) == b"null"
