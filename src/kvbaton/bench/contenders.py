"""Contenders: what is compared, each as the connector, settings and routing it runs with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvbaton.base.errors import ConfigError
from kvbaton.protocol.mode import Mode

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]


class Patch(StrEnum):
    """What the instrument takes away from upstream's connector when its engine starts."""

    PROGRESS_THREAD = "progress-thread"  # NIXL's, which spins; upstream has no setting for it
    PINNING = "pinning"  # of the computing thread to the last core of its NUMA node, on CPU engines


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to hand KV over.

    Attributes:
        key: its name on the command line and in records.
        label: its name in reports; says so when it is patched.
        connector: vLLM's name of it; None for one plain engine that hands nothing over.
        mode: how the router dispatches; None without a router.
        settings: `kv_connector_extra_config`.
        patches: what is patched away at start, as the instrument names it.
        colour: of its marks in plots.
    """

    key: str
    label: str
    connector: str | None
    mode: Mode | None
    settings: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    patches: tuple[Patch, ...] = ()
    colour: str = "#777777"

    @property
    def is_ours(self) -> bool:
        """Whether it is kvbaton's connector."""
        return self.connector == OURS


OURS: Final = "BatonConnector"
PLAIN: Final = "plain"

_ALL: Final = (
    Contender(PLAIN, "one plain engine on all cores (no handoff)", None, None, colour="#8a8f98"),
    Contender("upstream-pull", "upstream pull (NixlConnector)", "NixlConnector", Mode.PULL, colour="#b4540a"),
    Contender(
        "upstream-push", "upstream push (NixlPushConnector)", "NixlPushConnector", Mode.PUSH, colour="#c98a00"
    ),
    Contender(
        "upstream-pull-unpinned",
        "upstream pull, PATCHED: not pinned",
        "NixlConnector",
        Mode.PULL,
        patches=(Patch.PINNING,),
        colour="#c2607a",
    ),
    Contender(
        "upstream-push-unpinned",
        "upstream push, PATCHED: not pinned",
        "NixlPushConnector",
        Mode.PUSH,
        patches=(Patch.PINNING,),
        colour="#9a7a4a",
    ),
    Contender(
        "upstream-pull-quiet",
        "upstream pull, PATCHED: not pinned, progress thread off",
        "NixlConnector",
        Mode.PULL,
        patches=(Patch.PINNING, Patch.PROGRESS_THREAD),
        colour="#a8326e",
    ),
    Contender("ours-pull", "kvbaton pull", OURS, Mode.PULL, {"mode": "pull"}, colour="#5b54c9"),
    Contender(
        "ours-push",
        "kvbaton push, whole",
        OURS,
        Mode.PUSH,
        {"mode": "push", "stream": False},
        colour="#2f7fd1",
    ),
    Contender(
        "ours-stream",
        "kvbaton push, streaming",
        OURS,
        Mode.PUSH,
        {"mode": "push", "stream": True, "layer_tail": False},
        colour="#0f8f8a",
    ),
    Contender(
        "ours-stream-tail",
        "kvbaton push, streaming, layer tail",
        OURS,
        Mode.PUSH,
        {"mode": "push", "stream": True, "layer_tail": "auto"},
        colour="#2f8f2f",
    ),
)
CONTENDERS: Final[Mapping[str, Contender]] = MappingProxyType({one.key: one for one in _ALL})
BASELINES: Final = ("upstream-pull", "upstream-push", "upstream-pull-unpinned", "upstream-pull-quiet")
"""What ratios are taken against, as far as it was measured."""


def parse_contenders(text: str) -> tuple[Contender, ...]:
    """Read a comma-separated list of keys, or `all`.

    Raises:
        ConfigError: a key names no contender or comes twice.
    """
    if text.strip() == "all":
        return tuple(CONTENDERS.values())
    keys = [key.strip() for key in text.split(",")]
    for key in keys:
        if key not in CONTENDERS or keys.count(key) > 1:
            raise ConfigError("--contenders", text, f"all, or each at most once of {', '.join(CONTENDERS)}")
    return tuple(CONTENDERS[key] for key in keys)
