"""Built-in models: named by their recipe, made once."""

import dataclasses
import json
from pathlib import Path

import pytest

from kvbaton.base.errors import ConfigError
from kvbaton.launch.model import RECIPES, ensure_model, standard_library_texts
from kvbaton.launch.prepare import resolve_model


def test_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        ensure_model("huge", tmp_path)


def test_digest_changes_with_every_field() -> None:
    recipe = RECIPES["tiny"]
    changed = [
        dataclasses.replace(recipe, **{f.name: getattr(recipe, f.name) + 1})
        for f in dataclasses.fields(recipe)
    ]

    assert len({recipe.digest, *(one.digest for one in changed)}) == len(changed) + 1


def test_finished_model_is_found_and_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / f"tiny-{RECIPES['tiny'].digest}"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")

    assert ensure_model("tiny", tmp_path) == folder


def test_corpus_is_limited_and_in_a_fixed_order() -> None:
    texts = list(standard_library_texts(100_000))

    assert 0 < sum(map(len, texts)) <= 100_000
    assert texts == list(standard_library_texts(100_000))


def test_local_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_model(str(tmp_path))

    assert refused.value.key == "model"


def test_hub_name_is_left_alone() -> None:
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.engine
def test_nano_is_made_whole_and_twice_alike(tmp_path: Path) -> None:
    first, second = (ensure_model("nano", tmp_path / name) for name in ("a", "b"))

    assert json.loads((first / "config.json").read_text())["num_hidden_layers"] == 2
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.name]
