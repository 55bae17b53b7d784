"""The token check finds the first difference and says where it is."""

import dataclasses
from pathlib import Path

from kvbaton.bench.check import check_config, check_prompts, compare
from kvbaton.bench.config import BenchConfig
from kvbaton.workload.cells import Cell

CONFIG = BenchConfig(out=Path("out"), cells=(Cell(2048, 0.4), Cell(4096, 0.2)))


def test_equal_tokens_have_no_difference() -> None:
    result = compare("a", [[1, 2], [3, 4]], "plain", [[1, 2], [3, 4]])

    assert (result.equal, result.prompts, result.first_difference) == (2, 2, None)


def test_difference_is_named_by_prompt_and_token() -> None:
    result = compare("a", [[1, 2], [3, 4], [1, 9], [3, 4]], "plain", [[1, 2], [3, 4], [1, 2], [3, 4]])

    assert result.equal == 3
    assert result.first_difference is not None
    assert "prompt 0 (together), output token 1" in result.first_difference


def test_shorter_answer_is_a_difference() -> None:
    assert compare("a", [[1], [1]], "plain", [[1, 2], [1]]).equal == 1


def test_check_runs_in_float32_and_changes_nothing_else() -> None:
    assert dataclasses.replace(check_config(CONFIG), dtype=CONFIG.dtype) == CONFIG


def test_prompts_cover_the_lengths_and_partly_filled_blocks() -> None:
    lengths = {len(prompt) for prompt in check_prompts(CONFIG)}

    assert max(lengths) <= 4096
    assert 2048 in lengths
    assert any(length % CONFIG.block_tokens for length in lengths)


def test_prompts_are_the_same_for_everybody() -> None:
    assert check_prompts(CONFIG) == check_prompts(CONFIG)
