"""Digest: eight bytes that two engines compare to know that they mean the same prompt."""

import hashlib
from typing import Any, Final

import msgspec

_ENCODER: Final = msgspec.msgpack.Encoder()


def prompt_digest(request: Any) -> bytes:
    """Hash everything about a request's prompt that its KV depends on.

    Returns:
        Empty where the prompt has no tokens to hash (embeddings).
    """
    if request.prompt_token_ids is None:
        return b""
    # the fastest way there is from a list of integers to bytes that mean only this list
    digest = hashlib.blake2b(_ENCODER.encode(request.prompt_token_ids), digest_size=8)
    lora = getattr(request, "lora_request", None)
    parts = [lora.lora_name if lora is not None else "", getattr(request, "cache_salt", None) or ""]
    for feature in getattr(request, "mm_features", None) or ():
        parts.append(str(getattr(feature, "mm_hash", None) or feature.identifier))
        parts.append(str(getattr(feature.mm_position, "offset", "")))
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.digest()
