"""The commit: from here on the client sees the decode engine's answer, for better or worse."""

from kvbaton.router.config import RouterConfig
from kvbaton.router.exchange import Exchange
from kvbaton.router.headers import HeaderList, response_headers
from kvbaton.router.legs import DecodeReady
from kvbaton.router.relay import StreamEnd, relay_stream
from kvbaton.router.timeline import AttemptTimeline, Step
from kvbaton.router.usage import finish_plain_answer

_STREAM_TIMINGS = (
    ("prefill", Step.PREFILL_SENT, Step.PREFILL_DONE),
    ("decode", Step.DECODE_SENT, Step.FIRST_BYTE),
    ("exposed", Step.PREFILL_DONE, Step.FIRST_BYTE),
)
_PLAIN_TIMINGS = (
    ("prefill", Step.PREFILL_SENT, Step.PREFILL_DONE),
    ("decode", Step.DECODE_SENT, Step.DECODE_HEAD),
)


async def deliver(
    exchange: Exchange,
    ready: DecodeReady,
    cached_tokens: int | None,
    timeline: AttemptTimeline,
    config: RouterConfig,
) -> StreamEnd:
    """Send an answer that has begun well to the client, and close it."""
    try:
        headers = response_headers(ready.response.headers.items())
        if config.timing_headers:
            headers += _timing_header(timeline, streamed=ready.streamed)
        if not ready.streamed:
            body = (
                finish_plain_answer(ready.first, cached_tokens)
                if timeline.prefill is not None
                else ready.first
            )
            await exchange.answer(ready.response.status, body, headers)
            return StreamEnd.COMPLETE
        headers = [
            (name, value) for name, value in headers if name not in ("cache-control", "x-accel-buffering")
        ]
        headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        await exchange.start(ready.response.status, headers)
        return await relay_stream(exchange, ready.first, ready.rest(), config.idle_timeout_s)
    finally:
        ready.close()
        timeline.mark(Step.LAST_BYTE)


def _timing_header(timeline: AttemptTimeline, *, streamed: bool) -> HeaderList:
    timings = _STREAM_TIMINGS if streamed else _PLAIN_TIMINGS
    durations = ((name, timeline.between_s(start, end)) for name, start, end in timings)
    entries = [
        f"{name};dur={duration_s * 1000:.1f}" for name, duration_s in durations if duration_s is not None
    ]
    return [("server-timing", ", ".join(entries))] if entries else []
