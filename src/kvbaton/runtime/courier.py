"""Courier: the one thread per worker rank that owns the transport agent, the peers and every handoff.

Engine threads only enqueue commands and read results. The courier sleeps in its selector while nothing moves: control messages come
over sockets, so an idle engine costs nothing. While bytes move it polls the transport, because without a progress thread neither
incoming data nor outgoing notifications advance by themselves.
"""

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kvbaton.base.errors import RemoteProtocolError, TransportError
from kvbaton.base.ids import EngineAddress, Rank, RequestId
from kvbaton.kv.layout import Layout
from kvbaton.kv.plan import Plan
from kvbaton.protocol.machine import Effect
from kvbaton.runtime import commands as c
from kvbaton.runtime.channel import Acceptor, listen
from kvbaton.runtime.config import CourierConfig
from kvbaton.runtime.flights import Awaited, Ended, Flights
from kvbaton.runtime.handoffs import Checksum
from kvbaton.runtime.inbound import Inbound
from kvbaton.runtime.link import Link
from kvbaton.runtime.link_speed import LinkSpeed
from kvbaton.runtime.links import Links
from kvbaton.runtime.mailbox import Inbox, Item, Outbox
from kvbaton.runtime.observe import Gauges, Observations, Observer
from kvbaton.runtime.outbound import Outbound
from kvbaton.transport.base import Operation, Transport
from kvbaton.wire.messages import AnyMessage, Identity, RankAddress
from kvbaton.wire.translate import layout_to_wire

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_BACK_OFF = 1.3
_SELECTOR_TICK_S = 0.001
"""The selector counts in these."""
_MAX_SLEEP_S = 60.0


class Courier:
    """One rank's mover of KV.

    Owner: its own thread, for everything but the methods that say otherwise.
    Lifetime: `start` to `close`. Handoffs that are open at `close` are given up, after their transfers have ended.
    """

    def __init__(
        self,
        config: CourierConfig,
        *,
        engine_id: str,
        rank: Rank,
        tp_size: int,
        pp_size: int,
        layout: Layout,
        fingerprint: Mapping[str, str],
        transport: Transport,
        checksum: Checksum,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the listener; `start` does the rest on the courier's thread."""
        self.config = config
        self.layout = layout
        self.transport = transport
        self.checksum = checksum
        self.secret = config.secret
        self.times = config.heartbeat
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.observer = Observer(config.trace_file)
        self.now = clock
        self.inbound = Inbound(self)
        self.outbound = Outbound(self)
        self._about = (engine_id, rank, tp_size, pp_size, dict(fingerprint))
        self._boot_epoch = int.from_bytes(os.urandom(8), "big") >> 2
        self._sock = listen(config.host, 0)
        self.address = RankAddress(
            rank.pp,
            rank.tp,
            str(self._sock.getsockname()[0]),
            int(self._sock.getsockname()[1]),
            self._boot_epoch,
        )
        self.links = Links(self, rank)
        self.speed = LinkSpeed()
        self._flights = Flights(transport, self.speed, clock)
        self._poll_s = config.poll_min_s
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._waiting_quiet: list[Callable[[], None]] = []
        self._deaf = ""  # why notifications cannot be read; logged once
        self._stop = False
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvbaton-courier", daemon=True)
        self.identity: Identity

    @classmethod
    def start(
        cls,
        config: CourierConfig,
        *,
        engine_id: str,
        rank: Rank,
        tp_size: int,
        pp_size: int,
        layout: Layout,
        fingerprint: Mapping[str, str],
        transport: Transport,
        checksum: Checksum,
    ) -> "Courier":
        """Run a courier. Raises TransportError if the memory cannot be registered, OSError if it cannot listen."""
        courier = cls(
            config,
            engine_id=engine_id,
            rank=rank,
            tp_size=tp_size,
            pp_size=pp_size,
            layout=layout,
            fingerprint=fingerprint,
            transport=transport,
            checksum=checksum,
        )
        courier._thread.start()
        if not courier._started.wait(_START_TIMEOUT_S):
            raise TransportError(f"the courier did not start within {_START_TIMEOUT_S:g} s")
        if courier._start_error is not None:
            raise courier._start_error
        return courier

    # --- for engine threads -------------------------------------------------------------------------------------------

    def submit(self, commands: Sequence[c.Command]) -> None:
        """Hand work over, in order; never blocks. Callable from any thread."""
        if commands:
            self._inbox.put(commands)

    def tail_parts(self, num_bytes: int, tokens_left: int) -> int:
        """In how many parts what a step adds should leave while the step runs; 1: after it. Callable from any thread.

        Args:
            num_bytes: so much.
            tokens_left: of the prompt, for later steps to compute.
        """
        left_bytes = tokens_left * self.layout.token_bytes
        return self.speed.tail_parts(num_bytes, left_bytes, len(self.layout.regions))

    def take_results(self) -> c.Results:
        """What has ended since the last call. Callable from any thread."""
        return self._outbox.take()

    def wait_results(self, timeout_s: float) -> bool:
        """Wait until there is something to take. Callable from any thread."""
        return self._outbox.wait(timeout_s)

    def wait_quiet(self, request_ids: Collection[RequestId], timeout_s: float) -> bool:
        """Wait until no transfer reads these prefills' blocks, after all commands submitted before. Callable from any thread."""
        wanted, quiet = frozenset(request_ids), threading.Event()

        def check() -> None:
            if self.outbound.is_quiet(wanted):
                quiet.set()
            else:
                self._waiting_quiet.append(check)

        self.call_soon(check)
        return quiet.wait(timeout_s)

    def take_statistics(self) -> Observations:
        """Counts and observations since the last call, as plain data. Callable from any thread."""
        return self.observer.take()

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run something on the courier's thread. Callable from any thread."""
        self._inbox.put((work,))

    def close(self) -> None:
        """Give everything up and stop; idempotent. Callable from any thread."""
        self._stop = True
        self._inbox.rouse()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT_S)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001  # reported to whoever called `start`
            self._start_error = error
            self._sock.close()
            self._release()
            return
        finally:
            self._started.set()
        while not self._stop:
            try:
                self._turn()
            except Exception:  # noqa: BLE001  # whatever it was, the other handoffs must go on
                _log.exception("the courier survived an unexpected error")
        self._finish()

    def _begin(self) -> None:
        engine_id, rank, tp_size, pp_size, fingerprint = self._about
        self.transport.register(self.layout.regions)
        self.identity = Identity(
            engine_id=engine_id,
            pp=rank.pp,
            tp=rank.tp,
            tp_size=tp_size,
            pp_size=pp_size,
            boot_epoch=self._boot_epoch,
            agent=self.transport.name,
            agent_metadata=self.transport.metadata(),
            layout=layout_to_wire(self.layout),
            fingerprint=fingerprint,
        )
        self.selector.register(self._inbox.pipe, selectors.EVENT_READ, lambda _mask: self._inbox.awake())
        self._acceptor = Acceptor(self.selector, self._sock, self.links.accept)

    def _turn(self) -> None:
        """One round: sleep or poll, sockets, commands, transport, deadlines."""
        pause_s = self._pause_s()
        moving = pause_s is not None
        for key, mask in self._select(pause_s):
            key.data(mask)
        for item in self._inbox.take():
            self._run_command(item)
        progressed = self._poll_transport() if moving or self._flights or len(self.inbound) else False
        slower = min(self._poll_s * _BACK_OFF, self.config.poll_max_s)
        self._poll_s = self.config.poll_min_s if progressed else slower
        self._tick()
        checks, self._waiting_quiet = self._waiting_quiet, []
        for check in checks:
            check()
        self.observer.gauges = Gauges(
            self.inbound.num_quarantined,
            len(self.inbound),
            self.outbound.num_legs,
            self.outbound.num_leases,
        )

    def _pause_s(self) -> float | None:
        """How long the transport may be left alone; None where nothing moves."""
        pause_s = self._flights.pause_s(late_s=self._poll_s)
        waited_for = self.links.draining or self.inbound.expects_data or self.outbound.has_sealed
        if waited_for or self._waiting_quiet:
            pause_s = self._poll_s if pause_s is None else min(pause_s, self._poll_s)
        return None if pause_s is None else max(self.config.poll_min_s, pause_s)

    def _select(self, pause_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._inbox:
            return self.selector.select(0)
        if pause_s is not None and pause_s < _SELECTOR_TICK_S:
            time.sleep(pause_s)  # noqa: TID251  # polling hardware progress; nothing signals it
            return self.selector.select(0)
        if not self._inbox.fall_asleep() or self._stop:
            return self.selector.select(0)
        ready = self.selector.select(self._sleep_s() if pause_s is None else pause_s)
        self._inbox.awake()
        return ready

    def _sleep_s(self) -> float:
        deadlines = [part.next_deadline() for part in (self.inbound, self.outbound, self.links)]
        soonest = min((each for each in deadlines if each is not None), default=None)
        return _MAX_SLEEP_S if soonest is None else min(max(0.0, soonest - self.now()), _MAX_SLEEP_S)

    def _run_command(self, item: Item) -> None:
        try:
            self._command(item)
        except Exception:  # noqa: BLE001  # one command's bug must not take the others with it
            _log.exception("command %r failed", item)

    def _command(self, item: Item) -> None:
        match item:
            case c.StartReceive():
                self.inbound.start(item)
            case c.CancelReceive():
                self.inbound.cancel(item)
            case c.DeclineTransfer():
                self.inbound.decline(item)
            case c.PrefillStarted():
                self.outbound.started(item)
            case c.PrefillProgress():
                self.outbound.progressed(item)
            case c.PrefillTail():
                self.outbound.tail(item)
            case c.PrefillFinished():
                self.outbound.finished(item)
            case c.PrefillAborted():
                self.outbound.aborted(item)
            case c.PrefillPreempted():
                self.outbound.preempted(item)
            case _:
                item()

    def _poll_transport(self) -> bool:
        """Advance transfers both ways. Returns whether anything happened."""
        arrived = []
        try:
            arrived = self.transport.notifications()
        except Exception as error:  # noqa: BLE001  # what we have posted must still end
            if not self._deaf:
                _log.exception("notifications cannot be read")
            self._deaf = repr(error)
        else:
            self._deaf = ""
        for notification in arrived:
            self.inbound.on_written(notification.agent, notification.payload)
        return self._flights.poll() or bool(arrived)

    def _tick(self) -> None:
        now = self.now()
        self.inbound.tick(now)
        self.outbound.tick(now)
        self.links.tick(now)

    def _finish(self) -> None:
        """Wait for our WRITEs, say goodbye, free everything."""
        self._acceptor.close()
        until = self.now() + _STOP_TIMEOUT_S / 2
        try:
            self.outbound.close_all()
            while self._flights and self.now() < until:
                time.sleep(self.config.poll_min_s)  # noqa: TID251  # as in _select
                self._poll_transport()
        except Exception:  # noqa: BLE001  # sockets and memory are given back all the same
            _log.exception("the courier could not end its handoffs")
        self.links.close()
        self._release()

    def _release(self) -> None:
        """Give sockets and memory back."""
        try:
            self.transport.close()
        except Exception:  # noqa: BLE001  # the process is about to end; the rest must still be closed
            _log.exception("the transport could not be closed")
        self.selector.close()
        self._inbox.close()
        self.observer.close()

    # --- for links ----------------------------------------------------------------------------------------------------

    def on_link_message(self, link: Link, message: AnyMessage) -> None:
        """Whoever has a use for it."""
        try:
            self._dispatch(link, message)
        except RemoteProtocolError:
            raise  # ends the connection
        except Exception:  # noqa: BLE001  # one message's bug must not take those behind it along
            _log.exception("a %s from %s met an internal error", type(message).__name__, link.name)

    def _dispatch(self, link: Link, message: AnyMessage) -> None:
        if not (self.inbound.on_message(link, message) or self.outbound.on_message(link, message)):
            self.observer.unexpected(f"{type(message).__name__} from a peer")

    def on_link_announcement(self, link: Link, announcement: Effect) -> None:
        """The peer's state changed."""
        self.links.announce(link, announcement)

    # --- for handoffs -------------------------------------------------------------------------------------------------

    def dialled(self, address: EngineAddress) -> Link:
        """Our counterpart rank of another engine."""
        return self.links.dialled(address)

    def post(
        self,
        operation: Operation,
        link: Link,
        plan: Plan,
        notification: bytes,
        ended: Ended,
        is_awaited: Awaited,
    ) -> None:
        """Post a transfer; `ended` follows exactly once."""
        self._poll_s = self.config.poll_min_s
        self._flights.post(operation, link, plan, notification, ended, is_awaited)

    def report_sent(self, request_id: RequestId) -> None:
        """For the engine."""
        self._outbox.sent(request_id)

    def report_quarantined(self, request_id: RequestId, failure: str) -> None:
        """For the engine."""
        self._outbox.quarantined(request_id, failure)

    def report_received(self, request_id: RequestId, failure: str | None) -> None:
        """For the engine."""
        self._outbox.received(request_id, failure)

    def rouse_engine(self) -> None:
        """End the engine's wait for results: work for it is on its way."""
        self._outbox.rouse()
