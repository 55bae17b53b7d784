"""Two engines hand KV over: vLLM's schedulers, our halves, real couriers and sockets; only the model and the wire are pretended."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from connector.vllm_engine import BLOCK_TOKENS, KvEngine, Wanted, make_scheduler
from kvbaton.base.ids import AgentName, EngineAddress, EngineId, Rank
from kvbaton.connector.caches import describe_caches
from kvbaton.connector.checksum import block_checksum
from kvbaton.connector.config import parse_settings
from kvbaton.connector.fence import NoFence
from kvbaton.connector.groups import transfer_groups
from kvbaton.connector.tail import LayerTail
from kvbaton.connector.worker import BatonWorker
from kvbaton.runtime.commands import PrefillPreempted
from kvbaton.runtime.courier import Courier
from kvbaton.runtime.directory import DirectoryServer
from kvbaton.transport.faults import Corrupt
from kvbaton.transport.memory import MemoryNetwork, MemoryTransport

TIMEOUT_S = 30.0
NUM_OUT = 6
EXTRA = {
    "verify": True,
    "handoff_timeout_s": 5,
    "lease_s": 3,
    "park_s": 5,
}


class Node:
    """One engine with everything of ours around it."""

    def __init__(
        self, name: str, wanted: Wanted, network: MemoryNetwork, layer_tail: bool, verify: bool = True
    ) -> None:
        scheduler = make_scheduler(wanted)
        config = scheduler.kv_cache_config
        self.caches = [torch.zeros(wanted.num_blocks, 2, BLOCK_TOKENS, 128) for _ in config.kv_cache_groups]
        self.engine = KvEngine(scheduler, name, self.caches, depth=2 if wanted.overlapped else 1)
        groups = transfer_groups(config)
        named = {f"{index}.attn": cache for index, cache in enumerate(self.caches)}
        caches = describe_caches(named, config, groups)
        layout = caches.layout
        settings = parse_settings(EXTRA | {"verify": verify})
        self.courier = Courier.start(
            settings.courier("127.0.0.1"),
            engine_id=name,
            rank=Rank(),
            tp_size=1,
            pp_size=1,
            layout=layout,
            fingerprint={},
            transport=MemoryTransport(network, AgentName(name)),
            checksum=block_checksum(layout, [cache.untyped_storage() for cache in self.caches]),
        )
        tail = None
        if layer_tail:
            block_bytes = [layout.group_block_bytes(index) for index in range(len(groups))]
            tail = LayerTail(
                caches.region_by_layer,
                lambda *_: len(caches.region_by_layer),
                block_bytes,
                self.courier.submit,
            )
        self.engine.worker = BatonWorker(
            self.courier, NoFence(self.courier.submit), 0.003, quiet_limit_s=10, tail=tail
        )
        self.directory = DirectoryServer.start("127.0.0.1", 0, name, 1, 1, None)
        self.directory.set_ranks([self.courier.address])
        half = scheduler.connector._scheduler
        half._about = replace(
            half._about, address=EngineAddress("127.0.0.1", self.directory.port, EngineId(name))
        )

    def close(self) -> None:
        self.directory.close()
        self.courier.close()
        self.engine.scheduler.shutdown()


class Pair:
    """A producer and a consumer, stepped in turn by the test."""

    def __init__(self, wanted: Wanted, network: MemoryNetwork, layer_tail: bool, verify: bool = True) -> None:
        self.network = network
        self.prefill = Node("p", replace(wanted, role="kv_producer"), network, layer_tail, verify)
        self.decode = Node("d", replace(wanted, role="kv_consumer"), network, layer_tail, verify)
        self.free = (self.prefill.engine.num_free, self.decode.engine.num_free)

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.prefill, self.decode

    def run_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not done():
            assert time.monotonic() < end, [node.engine.reasons for node in self.nodes]
            for node in self.nodes:
                node.engine.turn()

    def run_to_rest(self) -> None:
        self.run_until(lambda: not any(node.engine.scheduler.has_requests() for node in self.nodes))

    def prefill_now(self, num_tokens: int, first: int = 1, **sampling: Any) -> dict[str, Any]:
        name = self.prefill.engine.add(
            num_tokens, {"do_remote_decode": True}, first, **({"max_tokens": 1} | sampling)
        )
        self.run_until(lambda: name in self.prefill.engine.reasons)
        return self.prefill.engine.params[name]

    def text(self, name: str) -> list[int]:
        self.run_until(lambda: name in self.decode.engine.reasons)
        return self.decode.engine.text.get(name, [])

    def early_params(self, transfer_id: str) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": self.prefill.directory.port,
            "transfer_id": transfer_id,
        }


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def make_pair(model: str, network: MemoryNetwork) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(layer_tail: bool = False, verify: bool = True, **wanted: Any) -> Pair:
        pairs.append(Pair(Wanted(model, **wanted), network, layer_tail, verify))
        return pairs[-1]

    yield make
    for pair in pairs:
        for node in pair.nodes:
            node.close()


@pytest.fixture
def alone(model: str) -> Iterator[Callable[..., list[int]]]:
    """What one engine that does everything itself says."""
    nodes: list[Node] = []

    def run(num_tokens: int, first: int = 1, window: bool = False, num_out: int = NUM_OUT) -> list[int]:
        if not nodes:
            nodes.append(Node("alone", Wanted(model, "kv_both", window=window), MemoryNetwork(), False))
        engine = nodes[0].engine
        name = engine.add(num_tokens, None, first, max_tokens=num_out)
        while name not in engine.reasons:
            engine.turn()
        return engine.text[name]

    yield run
    for node in nodes:
        node.close()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("window", [False, True])
def test_text_after_a_handoff_is_the_text_of_one_engine(make_pair, alone, overlapped, mode, window):
    pair = make_pair(overlapped=overlapped, window=window)
    for num_tokens in (2, 31, 32, 33, 64, 96, 97, 200, 333):
        params = pair.prefill_now(num_tokens, first=num_tokens)
        name = pair.decode.engine.add(
            num_tokens, params | {"transfer_mode": mode}, num_tokens, max_tokens=NUM_OUT
        )

        assert pair.text(name) == alone(num_tokens, num_tokens, window), num_tokens
    pair.run_to_rest()
    assert (pair.prefill.engine.num_free, pair.decode.engine.num_free) == pair.free


@pytest.mark.parametrize("overlapped", [False, True])
def test_text_is_right_when_the_consumer_registers_before_the_prefill(make_pair, alone, overlapped):
    pair = make_pair(overlapped=overlapped)
    expected = alone(300)
    name = pair.decode.engine.add(300, pair.early_params("t-1"), max_tokens=NUM_OUT)
    pair.decode.engine.turn()
    pair.prefill.engine.add(300, {"do_remote_decode": True, "transfer_id": "t-1"})

    assert pair.text(name) == expected
    pair.run_to_rest()
    assert (pair.prefill.engine.num_free, pair.decode.engine.num_free) == pair.free


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_text_is_right_when_steps_are_sent_layer_by_layer(make_pair, alone, overlapped, window):
    pair = make_pair(layer_tail=True, overlapped=overlapped, window=window)
    for num_tokens in (64, 96, 200, 333):
        expected = alone(num_tokens, num_tokens, window)
        params = pair.early_params(f"t-{num_tokens}")
        name = pair.decode.engine.add(num_tokens, params, num_tokens, max_tokens=NUM_OUT)
        pair.decode.engine.turn()
        produce = {"do_remote_decode": True, "transfer_id": f"t-{num_tokens}"}
        pair.prefill.engine.add(num_tokens, produce, num_tokens)

        assert pair.text(name) == expected, num_tokens
    pair.run_to_rest()
    assert (pair.prefill.engine.num_free, pair.decode.engine.num_free) == pair.free


def test_text_is_right_where_the_consumer_has_a_prefix_already(make_pair, alone):
    pair = make_pair()
    expected = alone(250)
    for cached in (70, 128, 200):
        warm = pair.decode.engine.add(cached, None)
        pair.text(warm)
        params = pair.prefill_now(250)
        name = pair.decode.engine.add(250, params, max_tokens=NUM_OUT)

        assert pair.text(name) == expected, cached


@pytest.mark.parametrize("overlapped", [False, True])
def test_text_is_right_after_the_producer_was_preempted_mid_way(make_pair, alone, overlapped):
    pair = make_pair(num_blocks=12, overlapped=overlapped, arguments={"enable_prefix_caching": False})
    expected = alone(200, 2)
    engine = pair.prefill.engine
    rival = engine.add(100, None, max_tokens=180)
    while engine.scheduler.requests[rival].num_computed_tokens < 120:
        engine.turn()
    engine.add(200, {"do_remote_decode": True, "transfer_id": "t-1"}, 2)
    name = pair.decode.engine.add(200, pair.early_params("t-1"), 2, max_tokens=NUM_OUT)
    pair.run_until(lambda: engine.commands(PrefillPreempted) or name in pair.decode.engine.reasons)
    engine.scheduler.finish_requests(rival, RequestStatus.FINISHED_ABORTED)

    assert pair.text(name) == expected
    pair.run_to_rest()
    assert (pair.prefill.engine.num_free, pair.decode.engine.num_free) == pair.free


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_abort_at_any_moment_leaves_no_block_behind(make_pair, turns: int, side: str, overlapped: bool):
    pair = make_pair(overlapped=overlapped)
    prefill = pair.prefill.engine.add(300, {"do_remote_decode": True, "transfer_id": "t-1"})
    decode = pair.decode.engine.add(300, pair.early_params("t-1"), max_tokens=NUM_OUT)
    for _ in range(turns):
        for node in pair.nodes:
            node.engine.turn()
    node, name = (pair.prefill, prefill) if side == "prefill" else (pair.decode, decode)
    node.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    pair.run_to_rest()
    assert (pair.prefill.engine.num_free, pair.decode.engine.num_free) == pair.free
    if side == "prefill":
        assert decode in pair.decode.engine.reasons


def test_prefill_nobody_fetches_is_freed_when_its_lease_ends(make_pair):
    pair = make_pair()
    pair.prefill_now(100)

    assert pair.prefill.engine.num_free < pair.free[0]
    pair.run_to_rest()
    assert pair.prefill.engine.num_free == pair.free[0]


def test_consumer_of_a_prefill_nobody_knows_fails_within_its_deadline(make_pair):
    pair = make_pair()
    name = pair.decode.engine.add(100, pair.early_params("nobody-knows"))

    assert pair.text(name) == []
    assert pair.decode.engine.reasons[name] == "error"


def test_consumer_whose_handoff_fails_computes_the_same_text_itself_where_allowed(make_pair, alone):
    pair = make_pair(policy="recompute")
    name = pair.decode.engine.add(100, pair.early_params("nobody-knows"), max_tokens=NUM_OUT)

    assert pair.text(name) == alone(100)


def test_many_handoffs_at_once_keep_their_texts_apart(make_pair, alone):
    pair = make_pair(num_blocks=200)
    expected = {first: alone(100 + first, first) for first in range(1, 9)}
    names = {}
    for first in expected:
        names[first] = pair.decode.engine.add(
            100 + first, pair.early_params(f"t-{first}"), first, max_tokens=NUM_OUT
        )
    for first in reversed(expected):
        params = {"do_remote_decode": True, "transfer_id": f"t-{first}"}
        pair.prefill.engine.add(100 + first, params, first)

    assert {first: pair.text(name) for first, name in names.items()} == expected
    pair.run_to_rest()
    assert (pair.prefill.engine.num_free, pair.decode.engine.num_free) == pair.free


@pytest.mark.parametrize(("verify", "reason"), [(True, "error"), (False, "length")])
def test_corrupted_block_is_caught_where_verified_and_changes_the_text_where_not(
    make_pair, alone, network, verify: bool, reason: str
):
    pair = make_pair(verify=verify)
    network.inject(Corrupt())
    name = pair.decode.engine.add(100, pair.prefill_now(100), max_tokens=NUM_OUT)

    assert pair.text(name) != alone(100)
    assert pair.decode.engine.reasons[name] == reason
