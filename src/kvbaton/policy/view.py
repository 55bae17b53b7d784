"""What a router knows when it decides: a frozen picture of the fleet and of one request."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvbaton.base.ids import EngineAddress

EngineName = NewType("EngineName", str)
"""An engine as the router's operator names it: its base URL."""


class Role(StrEnum):
    """What an engine computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class TransferMode(StrEnum):
    """Who posts the transfer: push = the producer writes, pull = the consumer reads."""

    PUSH = "push"
    PULL = "pull"


class ModePreference(StrEnum):
    """The transfer mode an operator asks for; AUTO takes push wherever the engine can."""

    PUSH = "push"
    PULL = "pull"
    AUTO = "auto"


class LocalReason(StrEnum):
    """Why a request cannot be handed off and is served by the decode engine alone."""

    MANY_CHOICES = "many_choices"  # n or best_of > 1: a handoff has one consumer
    BEAM_SEARCH = "beam_search"
    MANY_PROMPTS = "many_prompts"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"  # the decode engine never computes the prompt's logits
    PROMPT_EMBEDS = "prompt_embeds"
    MULTIMODAL = "multimodal"
    TRUNCATION = "truncation"  # the kept part may depend on the output limit, which the legs do not share
    NO_OUTPUT = "no_output"  # zero tokens asked for
    STORED_STATE = "stored_state"  # refers to a response only the decode engine remembers
    HOSTED_TOOLS = "hosted_tools"  # the engine itself loops over several generations


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """Where a prefill engine's KV can be asked for.

    Attributes:
        address: side channel and engine id.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline-parallel ranks.
        dcp_size: decode-context-parallel ranks.
        only_mode: the one transfer mode the engine's connector speaks; None if it takes either.
    """

    address: EngineAddress
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    only_mode: TransferMode | None = None


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at the moment of a decision.

    Attributes:
        name: which engine.
        up: it answered its last health check and no connection to it has failed since.
        queued_tokens: prompt tokens of the prefill legs in flight there.
        running_requests: decode legs promised or running there.
        identity: known identity of a prefill engine.
        identity_stable: False when answers keep naming other producers, as data-parallel ranks behind one port do.
    """

    name: EngineName
    up: bool
    queued_tokens: int = 0
    running_requests: int = 0
    identity: ProducerIdentity | None = None
    identity_stable: bool = True


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything a decision may depend on besides the request.

    Attributes:
        prefill: prefill engines, in the operator's order.
        decode: decode engines, in the operator's order.
        preference: the transfer mode asked for.
        turn: number of decisions made so far; spreads ties.
    """

    prefill: tuple[EngineView, ...]
    decode: tuple[EngineView, ...]
    preference: ModePreference = ModePreference.PUSH
    turn: int = 0

    def has_complete_pair(self) -> bool:
        """Whether at least one prefill and one decode engine are up."""
        return any(e.up for e in self.prefill) and any(e.up for e in self.decode)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a decision needs to know of a request.

    Attributes:
        prompt_tokens: estimated prompt length.
        local_reason: set when the request cannot be handed off.
    """

    prompt_tokens: int
    local_reason: LocalReason | None = None
