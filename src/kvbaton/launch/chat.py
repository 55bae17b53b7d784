"""One streamed chat completion against an OpenAI-compatible server."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp

from kvbaton.base.errors import KvbatonError

DATA_PREFIX: Final = b"data: "
DONE: Final = b"[DONE]"
ERROR_TEXT_BYTES: Final = 500


class ChatFailed(KvbatonError):
    """A server refused a request or broke off; carries the status and what it said."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the server answered {status}: {detail}")
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What to ask for. `ignore_eos` is vLLM's: a random model may end its text at once."""

    request_id: str
    model: str
    prompt: str
    max_tokens: int

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What came back."""

    text: str
    ttft_s: float | None
    total_s: float
    prompt_tokens: int | None
    output_tokens: int


async def stream_chat(
    session: aiohttp.ClientSession, url: str, request: ChatRequest, on_text: Callable[[str], None]
) -> ChatAnswer:
    """Send a request and hand each piece of text on as it arrives.

    Raises:
        ChatFailed: the status is not 200, the stream carries an error, or it ends without a finish.
    """
    reader = _StreamReader(on_text, clock=session.loop.time)
    headers = {"X-Request-Id": request.request_id}
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=request.body(), headers=headers
        ) as response:
            if response.status != 200:
                detail = (await response.content.read(ERROR_TEXT_BYTES)).decode(errors="replace")
                raise ChatFailed(response.status, detail)
            async for line in response.content:
                reader.feed(line.strip())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatFailed(0, f"{type(error).__name__}: {error}") from error
    return reader.finish()


class _StreamReader:
    """Collects one answer from its server-sent events. Owner: `stream_chat`."""

    def __init__(self, on_text: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._on_text = on_text
        self._clock = clock
        self._started_s = clock()
        self._first_s: float | None = None
        self._pieces: list[str] = []
        self._prompt_tokens: int | None = None
        self._output_tokens: int | None = None
        self._done = False

    def feed(self, line: bytes) -> None:
        if not line.startswith(DATA_PREFIX):
            return
        data = line.removeprefix(DATA_PREFIX)
        if data == DONE:
            self._done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(200, json.dumps(event["error"]))
        usage = event.get("usage") or {}
        if usage:
            self._prompt_tokens = usage.get("prompt_tokens")
            self._output_tokens = usage.get("completion_tokens")
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content")
            if piece:
                self._first_s = self._clock() if self._first_s is None else self._first_s
                self._pieces.append(piece)
                self._on_text(piece)

    def finish(self) -> ChatAnswer:
        if not self._done:
            raise ChatFailed(200, "the stream ended before [DONE]")
        return ChatAnswer(
            text="".join(self._pieces),
            ttft_s=None if self._first_s is None else self._first_s - self._started_s,
            total_s=self._clock() - self._started_s,
            prompt_tokens=self._prompt_tokens,
            output_tokens=len(self._pieces) if self._output_tokens is None else self._output_tokens,
        )
