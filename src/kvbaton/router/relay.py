"""An engine's answer on its way to the client, after the point of no return."""

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum

from kvbaton.router.exchange import Exchange
from kvbaton.router.upstream import ConnectionFailed


class StreamEnd(StrEnum):
    """How a relayed stream ended."""

    COMPLETE = "ok"
    BROKEN = "broken_stream"
    IDLE = "idle_stream"
    CLIENT_GONE = "client_gone"


async def relay_stream(
    exchange: Exchange, first: bytes, rest: AsyncIterator[bytes], idle_timeout_s: float
) -> StreamEnd:
    """Relay pieces as they come, unread, until the stream ends, breaks, stalls or the client leaves.

    The head must have been sent. A break or a stall is told to the client.
    """
    gone = exchange.gone
    if gone.done():
        return StreamEnd.CLIENT_GONE
    pumping = asyncio.create_task(_pump(exchange, first, rest, idle_timeout_s))
    try:
        await asyncio.wait({pumping, gone}, return_when=asyncio.FIRST_COMPLETED)
        return pumping.result() if pumping.done() else StreamEnd.CLIENT_GONE
    finally:
        pumping.cancel()
        await asyncio.wait({pumping})


async def _pump(
    exchange: Exchange, first: bytes, rest: AsyncIterator[bytes], idle_timeout_s: float
) -> StreamEnd:
    loop = asyncio.get_running_loop()
    try:
        await exchange.piece(first)
        async with asyncio.timeout(idle_timeout_s) as idle:
            async for piece in rest:
                idle.reschedule(None)  # a slow client is not a silent engine
                await exchange.piece(piece)
                idle.reschedule(loop.time() + idle_timeout_s)
    except ConnectionFailed:
        message = "The decode engine broke off its answer."
        await exchange.break_off(502, message, "decode_reset")
        return StreamEnd.BROKEN
    except TimeoutError:
        message = f"The decode engine sent nothing for {idle_timeout_s:g} s."
        await exchange.break_off(504, message, "idle_timeout")
        return StreamEnd.IDLE
    await exchange.end()
    return StreamEnd.COMPLETE
