"""What NIXL raises becomes our tree, completely and nowhere else."""

import subprocess
import sys
from types import ModuleType

import pytest

from kvbaton.base.errors import TransportError
from kvbaton.base.ids import AgentName
from kvbaton.kv.layout import MemoryKind, Region
from kvbaton.transport.nixl import (
    _STATE_BY_NIXL_WORD,
    ERROR_BY_NIXL_NAME,
    NixlTransport,
    nixl_exceptions,
)

pytestmark = pytest.mark.nixl


@pytest.fixture
def nixl() -> ModuleType:
    module: ModuleType = pytest.importorskip("nixl", reason="NIXL is not installed")
    return module


def test_every_exception_nixl_exports_has_exactly_one_class_of_ours(nixl: ModuleType) -> None:
    exported = {kind.__name__ for kind in nixl_exceptions(nixl)}

    assert exported
    assert exported <= set(ERROR_BY_NIXL_NAME)
    assert all(issubclass(kind, TransportError) for kind in ERROR_BY_NIXL_NAME.values())


def test_every_exception_is_translated_when_raised(nixl: ModuleType) -> None:
    transport = NixlTransport(AgentName("translator"), MemoryKind.DRAM)
    for kind in (*nixl_exceptions(nixl), RuntimeError, ValueError, TypeError):
        with pytest.raises(TransportError) as caught, transport._translated("do it"):
            raise kind("why")

        assert type(caught.value) is ERROR_BY_NIXL_NAME.get(kind.__name__, TransportError)
        assert "do it" in str(caught.value)
        assert "why" in str(caught.value)
    transport.close()


def test_every_nixl_word_is_a_state() -> None:
    assert set(_STATE_BY_NIXL_WORD) == {"DONE", "PROC", "ERR"}


def test_unknown_backend_is_refused_by_name(nixl: ModuleType) -> None:
    with pytest.raises(TransportError, match="no backend NOPE"):
        NixlTransport(AgentName("a"), MemoryKind.DRAM, backends=("UCX", "NOPE"))


def test_empty_name_is_refused(nixl: ModuleType) -> None:
    with pytest.raises(TransportError):
        NixlTransport(AgentName(""), MemoryKind.DRAM)


def test_empty_region_is_refused(nixl: ModuleType) -> None:
    transport = NixlTransport(AgentName("a"), MemoryKind.DRAM)
    with pytest.raises(TransportError):
        transport.register([Region(4096, 0, 1, 1, 0)])
    transport.close()


def test_missing_nixl_is_a_clear_error_and_import_of_the_module_needs_none() -> None:
    script = (
        "import sys; sys.modules['nixl'] = None\n"
        "from kvbaton.transport.nixl import NixlTransport\n"
        "from kvbaton.base.errors import TransportError\n"
        "from kvbaton.kv.layout import MemoryKind\n"
        "try: NixlTransport('a', MemoryKind.DRAM)\n"
        "except TransportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )

    assert "install the package 'nixl'" in done.stdout
