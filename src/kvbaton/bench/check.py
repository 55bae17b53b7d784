"""Check: do all contenders produce the same greedy tokens? In float32, since bf16 with random weights is chaotic."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Final

from kvbaton.bench.config import BenchConfig
from kvbaton.bench.measure import PATIENCE_S, SLOWEST_REQUEST_S, Stand, completion_body, tokens_of
from kvbaton.workload.record import TokenCheck

CHECK_DTYPE: Final = "float32"
NUM_PROMPTS: Final = 4
LOWEST_TOKEN: Final = 10
VOCABULARY: Final = 3000
"""Token ids up to here exist in every model that could be meant, the built-in ones included."""


def check_config(config: BenchConfig) -> BenchConfig:
    """The benchmark's configuration, as the check runs it."""
    return dataclasses.replace(config, dtype=CHECK_DTYPE)


def check_prompts(config: BenchConfig) -> list[list[int]]:
    """Prompts around the lengths that will be measured; odd ones too, so that a last block is partly filled."""
    rng = random.Random(config.seed)
    lengths = sorted({cell.prompt_tokens for cell in config.cells})
    wanted = [lengths[index % len(lengths)] - 37 * (index % 2) for index in range(NUM_PROMPTS)]
    return [[rng.randrange(LOWEST_TOKEN, VOCABULARY) for _ in range(max(1, length))] for length in wanted]


def collect_tokens(stand: Stand, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Each prompt's tokens, once alone and once with the others around it."""
    bodies = [completion_body(stand.model, prompt, stand.config.output_tokens) for prompt in prompts]
    timeout_s = PATIENCE_S + SLOWEST_REQUEST_S * len(bodies)
    url = stand.lineup.target_url
    alone = stand.agent.complete(url, bodies, at_once=1, timeout_s=timeout_s)
    together = stand.agent.complete(url, bodies, at_once=len(bodies), timeout_s=timeout_s)
    return [tokens_of(answer) for answer in [*alone, *together]]


def compare(contender: str, tokens: list[list[int]], reference: str, expected: list[list[int]]) -> TokenCheck:
    """Say how many token lists are equal and where the first difference is."""
    difference = None
    equal = 0
    for index, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
        if ours == theirs:
            equal += 1
        elif difference is None:
            at = next(
                (k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            together = "together" if index >= len(tokens) // 2 else "alone"
            difference = f"prompt {index % (len(tokens) // 2)} ({together}), output token {at}: {ours[at : at + 3]} for {theirs[at : at + 3]}"
    return TokenCheck(contender, reference, CHECK_DTYPE, len(tokens), equal, difference, tokens)
