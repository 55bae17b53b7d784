"""Small random-weight models, made here in seconds so that nothing has to be downloaded.

The weights are noise, so the text is too. What is real is the shape: attention, paged KV, a tokenizer and a chat
template, served by an unmodified vLLM. `transformers` is imported only inside the functions that make a model.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvbaton.base.errors import ConfigError

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CORPUS_BYTES: Final = 6_000_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines a model's bytes; its hash names the folder the model is kept in.

    `initializer_range` is large on purpose: with small random weights greedy text falls into repetition, which would
    hide corrupted KV.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 4096
    max_position_tokens: int = 32_768
    initializer_range: float = 0.15
    seed: int = 20_240_607
    revision: int = 1

    @property
    def digest(self) -> str:
        """Return a short hash over every field."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


RECIPES: Final = {
    "tiny": Recipe(
        hidden_size=512, intermediate_size=1536, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64
    ),
    "nano": Recipe(
        hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64
    ),
}


def is_builtin(name: str) -> bool:
    """Say whether a model name is one of ours."""
    return name in RECIPES


def cache_root() -> Path:
    """Return the folder made models are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvbaton" / "models"


def ensure_model(name: str, root: Path | None = None) -> Path:
    """Return the folder of a built-in model, making it first when it is not there.

    The model is written beside its final place and renamed into it, so a half-written one is never found and two
    processes that race both end with the same bytes.

    Raises:
        ConfigError: no built-in model has this name.
    """
    if name not in RECIPES:
        raise ConfigError("model", name, f"one of {', '.join(RECIPES)}, or a path or hub name")
    recipe = RECIPES[name]
    root = cache_root() if root is None else root
    target = root / f"{name}-{recipe.digest}"
    if (target / "config.json").exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        write_tokenizer(recipe, scratch)
        write_weights(recipe, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_weights(recipe: Recipe, folder: Path) -> None:
    """Write config and weights of a Qwen3 with this recipe's shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    config = Qwen3Config(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=recipe.max_position_tokens,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
    )
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(recipe.seed)
    try:
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    finally:
        torch.random.set_rng_state(generator_state)


def write_tokenizer(recipe: Recipe, folder: Path) -> None:
    """Train a byte-level BPE on this Python's own standard library and write it with a chat template.

    The library is at hand on every machine and has both prose and code. Its text differs between Python versions,
    so token ids may too; nothing relies on them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(standard_library_texts(CORPUS_BYTES), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=recipe.max_position_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)


def standard_library_texts(limit_bytes: int) -> Iterator[str]:
    """Yield sources of the standard library, in name order, up to a total size."""
    total_bytes = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        total_bytes += len(text)
        if total_bytes > limit_bytes:
            return
        yield text


def main() -> int:
    """Print the path of a built-in model, made if need be."""
    parser = argparse.ArgumentParser(prog="python -m kvbaton.launch.model", description=main.__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    print(ensure_model(parser.parse_args().name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
