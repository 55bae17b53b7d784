"""Records: what a benchmark writes down, one JSON object per line, so that every figure can be computed again."""

from typing import Final

import msgspec

SCHEMA: Final = 1


class Header(msgspec.Struct, tag="header", frozen=True):
    """What a run was: appended whenever a benchmark starts or resumes.

    Attributes:
        schema: version of this file's format.
        started_at: ISO 8601, with zone.
        commit: of kvbaton, with `+` when the tree had changes.
        seed: the run's; a repeat uses seed + repeat.
        settings: everything that must be equal for results to share a file.
        versions: by distribution.
        hardware: what it ran on.
    """

    started_at: str
    commit: str
    seed: int
    settings: dict[str, str]
    versions: dict[str, str]
    hardware: dict[str, str]
    schema: int = SCHEMA


class TokenCheck(msgspec.Struct, tag="check", frozen=True):
    """Whether a contender's greedy tokens equal the reference's.

    Attributes:
        contender: its key.
        reference: key of the contender it was compared with.
        dtype: both ran with.
        prompts: how many were compared.
        equal: how many of them gave the same tokens.
        first_difference: of one that did not, in words.
        tokens: by prompt, so that a resumed run can compare with a contender it does not start again.
    """

    contender: str
    reference: str
    dtype: str
    prompts: int
    equal: int
    first_difference: str | None
    tokens: list[list[int]]


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. Client times as vLLM's benchmark takes them; steps as the router saw them, since its arrival there.

    Attributes:
        request_id: as the client sent it.
        prompt_tokens: by the server's count.
        output_tokens: received.
        start_s: since the first request of the cell.
        ttft_s: to the first token.
        itls_s: between consecutive tokens.
        error: what went wrong, or None.
        mode: push, pull or local, by the router.
        steps_s: the router's timeline.
        num_attempts: how often the router tried.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    start_s: float
    ttft_s: float
    itls_s: list[float]
    error: str | None = None
    mode: str | None = None
    steps_s: dict[str, float] = {}
    num_attempts: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, as vLLM defines it."""
        return sum(self.itls_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def prefill_leg_s(self) -> float | None:
        """From sending the prefill leg to its end."""
        return _between(self.steps_s, "prefill_sent", "prefill_done")

    @property
    def exposed_s(self) -> float | None:
        """Exposed handoff: first token minus end of the prefill leg, both on the router's clock."""
        return _between(self.steps_s, "prefill_done", "decode_first_byte")


class HookTime(msgspec.Struct, frozen=True):
    """Time spent in one connector hook of one engine during a cell.

    Attributes:
        engine: prefill, decode or plain.
        side: scheduler, worker, or the name of the thread that called NIXL.
        hook: method name; calls made inside another hook count there only. Or "step." and an upper edge in microseconds: engine steps by
            the CPU time of all their hooks.
        calls: how often.
        wall_s: by the clock on the wall.
        cpu_s: of the calling thread.
        amount: descriptors, for the calls that carry some.
    """

    engine: str
    side: str
    hook: str
    calls: int
    wall_s: float
    cpu_s: float
    amount: int = 0


class CellResult(msgspec.Struct, tag="cell", frozen=True):
    """One contender, one cell, one repeat.

    Attributes:
        contender: its key.
        repeat: from 0.
        link: as the user wrote it.
        topology: "namespaces", "loopback" or "remote".
        prompt_tokens: asked for.
        output_tokens: asked for.
        rate_per_s: None when requests went one at a time.
        arrivals: their shape.
        seed: of prompts and arrivals.
        service_s: mean unloaded prefill leg, from requests sent one at a time just before.
        rho: offered load of the prefill engine.
        duration_s: from the first request to the last token.
        requests: all of them, failed ones too.
        cpu_s: by process.
        hooks: time in connector hooks.
        notes: what a reader must know about this result.
    """

    contender: str
    repeat: int
    link: str
    topology: str
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float | None
    arrivals: str
    seed: int
    service_s: float | None
    rho: float | None
    duration_s: float
    requests: list[Request]
    cpu_s: dict[str, float]
    hooks: list[HookTime]
    notes: list[str] = []


class Skipped(msgspec.Struct, tag="skipped", frozen=True):
    """A cell that was not measured, and why.

    Attributes:
        final: whether a resumed run leaves it alone; a failure is tried again.
    """

    contender: str
    repeat: int
    link: str
    prompt_tokens: int
    rate_per_s: float | None
    reason: str
    final: bool


Record = Header | TokenCheck | CellResult | Skipped

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """One line, without its end."""
    return _encoder.encode(record)


def decode(line: bytes) -> Record:
    """Read one line.

    Raises:
        ValueError: it is no record of ours (msgspec's own errors are ValueErrors).
    """
    return _decoder.decode(line)


def _between(steps_s: dict[str, float], start: str, end: str) -> float | None:
    if start in steps_s and end in steps_s:
        return steps_s[end] - steps_s[start]
    return None
