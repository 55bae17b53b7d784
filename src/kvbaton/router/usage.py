"""Cached-token figures as one server would report them."""

import msgspec
from msgspec import Raw

from kvbaton.router.openai import Fields

_object = msgspec.json.Decoder(Fields)
_DETAILS = ("prompt_tokens_details", "input_tokens_details")


def finish_plain_answer(body: bytes, cached_tokens: int | None) -> bytes:
    """Correct a decode engine's plain answer for the client.

    To the decode engine every handed-over token looks cached; what a client wants to know is how many the
    prefill engine had cached. Handoff parameters of the decode engine are for routers and are dropped.
    """
    try:
        fields = _object.decode(body)
        changed = bytes(fields.get("kv_transfer_params", Raw(b"null"))) != b"null"
        if changed:
            fields["kv_transfer_params"] = Raw(b"null")
        if cached_tokens is not None and "usage" in fields:
            usage = _with_cached(fields["usage"], cached_tokens)
            if usage is not None:
                fields["usage"] = usage
                changed = True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # not an object of ours to correct
    return msgspec.json.encode(fields) if changed else body


def _with_cached(usage: Raw, cached_tokens: int) -> Raw | None:
    if bytes(usage) == b"null":
        return None
    counts = _object.decode(usage)
    for name in _DETAILS:
        if name in counts and bytes(counts[name]) != b"null":
            details = _object.decode(counts[name])
            if "cached_tokens" in details:
                details["cached_tokens"] = Raw(str(cached_tokens).encode())
                counts[name] = Raw(msgspec.json.encode(details))
                return Raw(msgspec.json.encode(counts))
    return None
