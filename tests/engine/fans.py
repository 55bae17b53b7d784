"""Requests that fan out: several choices, several prompts, and what cannot be handed off at all."""

import random

from engine.asks import Ask, random_tokens


def make_fans(seed: int) -> list[Ask]:
    """Return requests that a router must split, serve in one place, or pass through, but never hang.

    Seeded ones fit a chunk with all their choices; see `engine.asks.shape`.
    """
    rng = random.Random(seed)
    plain: dict[str, object] = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    seeded = plain | {"temperature": 0.9, "seed": 77}
    stream: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
    long = random_tokens(rng, 1500)
    words = [{"role": "user", "content": "Which lane is the baton in? " * 12}]
    return [
        Ask("n=3", "/v1/completions", seeded | {"prompt": long[:300], "n": 3}),
        Ask("n=2 streamed", "/v1/completions", seeded | stream | {"prompt": long[:300], "n": 2}),
        Ask("n=2 chat", "/v1/chat/completions", seeded | {"messages": words, "n": 2}),
        Ask(
            "a list of prompts",
            "/v1/completions",
            plain | {"temperature": 0, "prompt": [long[:700], long[3:131], [5, 6, 7]]},
        ),
        Ask(
            "a list of prompts streamed",
            "/v1/completions",
            plain | stream | {"temperature": 0, "prompt": [long[:256], long[:257]]},
        ),
        Ask(
            "a list of texts",
            "/v1/completions",
            plain | {"temperature": 0, "prompt": ["on your marks", "go"]},
        ),
        Ask("a list of one prompt", "/v1/completions", plain | {"temperature": 0, "prompt": [long[:900]]}),
        Ask("echo", "/v1/completions", plain | {"temperature": 0, "prompt": long[:200], "echo": True}),
        Ask(
            "prompt logprobs",
            "/v1/completions",
            plain | {"temperature": 0, "prompt": long[:400], "prompt_logprobs": 1},
        ),
        Ask(
            "only logprobs of a text",
            "/v1/completions",
            plain | {"temperature": 0, "prompt": "run", "logprobs": 5},
        ),
    ]


def fans_out(request: Ask) -> bool:
    """Whether a request is more than one prompt with one answer, so that a router may serve it in one place."""
    prompt = request.body.get("prompt", "")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return (
        several
        or request.body.get("n", 1) != 1
        or "echo" in request.body
        or "prompt_logprobs" in request.body
    )
