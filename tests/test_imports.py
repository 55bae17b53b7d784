"""Rules of the source tree that a linter cannot see: what an import costs, and how big a module may grow."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvbaton

SOURCE = Path(kvbaton.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
HEAVY = {
    "aiohttp",
    "asyncio",
    "nixl",
    "torch",
    "transformers",
    "uvicorn",
    "vllm",
    "numpy",
    "prometheus_client",
}
MAX_MODULE_LINES = 400


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50
    )
    return set(done.stdout.split())


def test_package_import_loads_nothing_heavy() -> None:
    loaded = loaded_by("import kvbaton")

    assert loaded & HEAVY == set()


def test_cli_import_loads_no_engine_and_no_http_stack() -> None:
    loaded = loaded_by("import kvbaton.cli; kvbaton.cli.build_parser()")

    assert loaded & {"nixl", "torch", "transformers", "vllm", "uvicorn", "aiohttp"} == set()


def test_public_names_are_sorted_and_exist() -> None:
    names = list(kvbaton.__all__)

    assert names == sorted(names)
    assert [name for name in names if not hasattr(kvbaton, name)] == []


def test_every_package_folder_is_a_package() -> None:
    folders = {path.parent for path in MODULES}

    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_is_documented_and_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert ast.get_docstring(ast.parse(text)), "the first sentence names the module's one concept"
    assert len(text.splitlines()) <= MAX_MODULE_LINES, "split it, or write a decision record and list it here"


def test_no_module_leaves_blanket_ignores_or_notes_to_self() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|type: ignore(?!\[)")
    hits = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]

    assert hits == []


def test_light_layers_import_without_engine_libraries() -> None:
    layers = [
        m.name
        for m in pkgutil.iter_modules([str(SOURCE)])
        if m.name not in {"connector", "__main__", "testing"}
    ]
    loaded = loaded_by("import " + ", ".join(f"kvbaton.{name}" for name in layers))

    assert loaded & {"nixl", "torch", "transformers", "vllm"} == set()
