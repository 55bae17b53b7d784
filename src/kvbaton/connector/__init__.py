"""The vLLM shell: a connector that vLLM loads by name.

`{"kv_connector": "BatonConnector", "kv_connector_module_path": "kvbaton.connector"}` works without installing anything else;
with the package installed, its plugin has registered the name and the module path may be left out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbaton.connector.facade import BatonConnector

__all__ = ["BatonConnector"]


def __getattr__(name: str) -> object:
    """Load vLLM and torch only when somebody asks for the connector itself."""
    if name == "BatonConnector":
        from kvbaton.connector.facade import BatonConnector

        return BatonConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
