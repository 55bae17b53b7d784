"""The demonstration: a few streamed answers through the router, and what each handoff cost.

Three short requests at once, then one long prompt, printed as the tokens arrive. The built-in model has random weights,
so the words mean nothing; that they are the words a single server would say is what the tests check.
"""

import asyncio
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import aiohttp

from kvbaton.launch.chat import ChatAnswer, ChatFailed, ChatRequest, stream_chat
from kvbaton.launch.handoffs import (
    HandoffRow,
    RouterTimeline,
    join,
    parse_timeline,
    read_traces,
    render_table,
)

SHORT_PROMPTS: Final = (
    "Why are prefill and decode better apart?",
    "Name the parts of a relay race.",
    "def hand_over(baton):",
)
LONG_SENTENCE: Final = "A runner who slows down to hand over the baton has already lost the race. "
LONG_PROMPT_TOKENS: Final = 3000
LONG_SENTENCE_TOKENS: Final = 24
SHORT_OUTPUT_TOKENS: Final = 24
LONG_OUTPUT_TOKENS: Final = 32
LEGEND: Final = """\
prefill: the prefill leg, as the router saw it.  exposed: what the first token waited for after that.
tail: how long KV still moved after prefill had ended.  early: the part that had moved before.
"""
REQUEST_TIMEOUT: Final = aiohttp.ClientTimeout(total=300)
TRACE_WAIT_S: Final = 3.0
TRACE_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demonstration plays."""

    router_url: str
    model: str
    max_model_len: int
    trace_paths: Sequence[Path]
    out: IO[str]


@dataclass(slots=True)
class Lanes:
    """Several answers growing side by side, one screen line each; elsewhere a line once an answer is complete.

    Owner: the demonstration's task.
    """

    out: IO[str]
    labels: Sequence[str]
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Reserve the lines."""
        self.texts = [""] * len(self.labels)
        if self.out.isatty():
            self.out.write("\n" * len(self.labels))

    def add(self, lane: int, piece: str) -> None:
        """Let one answer grow."""
        self.texts[lane] += piece
        if self.out.isatty():
            self.out.write(f"\x1b[{len(self.labels)}F" + "".join(f"\x1b[2K{line}\n" for line in self.lines()))
            self.out.flush()

    def lines(self) -> list[str]:
        """Return one line per answer, cut at the left so that the newest words show."""
        width = shutil.get_terminal_size().columns - 12
        return [
            f"  {label:<8} {printable(text)[-width:]}"
            for label, text in zip(self.labels, self.texts, strict=True)
        ]

    def close(self) -> None:
        """Print what could not be drawn while it grew."""
        if not self.out.isatty():
            self.out.write("\n".join(self.lines()) + "\n")
            self.out.flush()


def printable(text: str) -> str:
    """Return text on one line, with whatever a terminal might act upon replaced."""
    return "".join(character if character.isprintable() else "·" for character in text)


def long_prompt(max_model_len: int) -> str:
    """Return a prompt of several chunks that fits the model."""
    tokens = min(LONG_PROMPT_TOKENS, max_model_len // 2)
    return LONG_SENTENCE * max(1, tokens // LONG_SENTENCE_TOKENS)


async def warm_up(stage: Stage, num_requests: int) -> None:
    """Send requests nobody waits for: the first one through an engine builds kernels and connections.

    Raises:
        ChatFailed: the deployment does not answer.
    """
    async with aiohttp.ClientSession(timeout=REQUEST_TIMEOUT) as session:
        for _ in range(num_requests):
            request = ChatRequest(f"warm-{uuid.uuid4().hex[:12]}", stage.model, "Ready, steady, go. " * 40, 2)
            await stream_chat(session, stage.router_url, request, lambda _: None)


async def run_demo(stage: Stage) -> bool:
    """Play the demonstration; say whether every request was answered."""
    out = stage.out
    tag = uuid.uuid4().hex[:8]
    shorts = [
        ChatRequest(f"demo-{tag}-{index}", stage.model, prompt, SHORT_OUTPUT_TOKENS)
        for index, prompt in enumerate(SHORT_PROMPTS)
    ]
    long = ChatRequest(f"demo-{tag}-long", stage.model, long_prompt(stage.max_model_len), LONG_OUTPUT_TOKENS)
    labels = [f"short {index + 1}" for index in range(len(shorts))]
    async with aiohttp.ClientSession(timeout=REQUEST_TIMEOUT) as session:
        out.write(f"\n{len(shorts)} short requests at once:\n")
        lanes = Lanes(out, labels)
        results = await asyncio.gather(
            *(ask(session, stage, request, lanes, lane) for lane, request in enumerate(shorts))
        )
        lanes.close()
        out.write("\none long prompt:\n")
        lanes = Lanes(out, ["long"])
        results.append(await ask(session, stage, long, lanes, 0))
        lanes.close()
        rows = await collect_rows(session, stage, [*labels, "long"], [*shorts, long], results)
    out.write(f"\n{render_table(rows)}\n")
    out.write(LEGEND)
    for label, result in zip([*labels, "long"], results, strict=True):
        if isinstance(result, ChatFailed):
            out.write(f"{label}: {result}\n")
    return all(isinstance(result, ChatAnswer) and result.output_tokens > 0 for result in results)


async def ask(
    session: aiohttp.ClientSession, stage: Stage, request: ChatRequest, lanes: Lanes, lane: int
) -> ChatAnswer | ChatFailed:
    """Send one request into its lane; a failure is a result here, so that the others still finish."""
    try:
        return await stream_chat(session, stage.router_url, request, lambda piece: lanes.add(lane, piece))
    except ChatFailed as error:
        return error


async def collect_rows(
    session: aiohttp.ClientSession,
    stage: Stage,
    labels: Sequence[str],
    requests: Sequence[ChatRequest],
    results: Sequence[ChatAnswer | ChatFailed],
) -> list[HandoffRow]:
    """Fetch each request's timeline and find its traces, which workers write shortly after the last byte."""
    timelines = [await fetch_timeline(session, stage.router_url, request.request_id) for request in requests]
    traces = read_traces(stage.trace_paths)
    waited_s = 0.0
    while (
        stage.trace_paths
        and waited_s < TRACE_WAIT_S
        and not all(join(timeline, traces) for timeline in timelines)
    ):
        await asyncio.sleep(TRACE_POLL_S)
        waited_s += TRACE_POLL_S
        traces = read_traces(stage.trace_paths)
    rows = []
    for label, result, timeline in zip(labels, results, timelines, strict=True):
        answer = result if isinstance(result, ChatAnswer) else ChatAnswer("", None, 0.0, None, 0)
        rows.append(
            HandoffRow(
                label,
                answer.prompt_tokens,
                answer.output_tokens,
                answer.ttft_s,
                timeline,
                join(timeline, traces),
            )
        )
    return rows


async def fetch_timeline(session: aiohttp.ClientSession, url: str, request_id: str) -> RouterTimeline | None:
    """Ask the router what it noted; a router that keeps nothing leaves the columns blank."""
    try:
        async with session.get(f"{url}/kvbaton/requests/{request_id}") as response:
            return parse_timeline(await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
