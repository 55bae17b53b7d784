"""What a client gets, and what the other leg sees, when something breaks."""

import asyncio
import random

import aiohttp
import pytest

from kvbaton.testing.fake_script import Cut, FakeConnector, Script
from router.harness import CHAT, COMPLETIONS, PROMPT, TIMEOUT_S, Cluster, mode, run_cluster

BAD = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


def _waiting() -> Script:
    """A script that waits until the test ends."""
    return Script(hang=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_prefill_error_cancels_decode_and_reaches_the_client(
    status: int, stream: bool
):  # cases 9 and 11
    async with run_cluster(retries=0) as cluster:
        cluster.prefill[0].next(Script(status=status, body=BAD, headers={"retry-after": "7"}))
        cluster.decode[0].next(_waiting())
        answer = await cluster.complete(stream=stream)

        assert (answer.status, answer.raw) == (status, BAD)
        assert answer.headers["retry-after"] == "7"
        await cluster.decode[0].wait_until(lambda e: e.running == 0)
        assert len(cluster.decode[0].aborted) == len(cluster.decode[0].seen)
        assert cluster.metric("failures_total", stage="prefill", kind="status") == 1
        await cluster.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 500])
async def test_decode_error_cancels_prefill_and_reaches_the_client(status: int, stream: bool):  # case 16
    async with run_cluster(retries=0) as cluster:
        cluster.prefill[0].next(_waiting())
        cluster.decode[0].next(Script(status=status, body=BAD))
        answer = await cluster.complete(stream=stream)

        assert (answer.status, answer.raw) == (status, BAD)
        await cluster.prefill[0].wait_until(lambda e: e.running == 0)
        assert len(cluster.prefill[0].aborted) == 1
        assert len(cluster.prefill[0].seen) == 1
        await cluster.wait_idle()


async def test_decode_error_after_prefill_releases_the_blocks():  # case 16
    async with run_cluster(retries=0) as cluster:
        rejected = asyncio.Event()
        cluster.decode[0].next(Script(status=400, body=BAD, before_head=rejected))
        asking = cluster.start()
        await cluster.prefill[0].wait_until(lambda e: bool(e.seen) and e.seen[0].ended == "served")
        rejected.set()
        assert (await asking).status == 400
        await cluster.releaser.wait_released()

        identity, transfer_id = cluster.releaser.released[0]
        assert identity.address.engine_id == cluster.prefill[0].engine_id
        assert transfer_id == cluster.prefill[0].seen[0].params["transfer_id"]


async def test_served_request_releases_nothing():
    async with run_cluster() as cluster:
        await cluster.complete()
        await cluster.complete(stream=True)

        assert cluster.releaser.released == []


async def test_failing_releaser_is_counted_and_hurts_nobody():
    async with run_cluster(retries=0) as cluster:
        cluster.releaser.fail = True
        cluster.decode[0].next(Script(status=500))
        assert (await cluster.complete()).status == 500
        await cluster.releaser.wait_released()

        assert (await cluster.complete()).status == 200
        assert cluster.metric("releases_total", outcome="failed") == 1


@pytest.mark.parametrize("asked", ["push", "pull"])
async def test_prefill_without_params_is_a_bad_gateway(asked: str):  # cases 15 and 35
    async with run_cluster(mode=mode(asked)) as cluster:
        cluster.prefill[0].next(Script(params=False))
        cluster.decode[0].next(_waiting())
        answer = await cluster.complete()

        assert answer.status == 502
        assert answer.json["error"]["code"] == "no_kv_transfer_params"
        assert cluster.metric("failures_total", stage="prefill", kind="no_params") == 1
        assert all(seen.params.get("do_remote_prefill") for seen in cluster.decode[0].seen)
        await cluster.wait_idle()


@pytest.mark.parametrize("broken", [Script(status=503), Script(cut=Cut.BEFORE_HEAD)])
async def test_broken_prefill_is_retried_elsewhere_with_new_ids(broken: Script):  # cases 12 and 32
    async with run_cluster(prefill=2) as cluster:
        first = cluster.prefill[0]
        first.always(broken)
        answers = [await cluster.complete() for _ in range(2)]
        ids = [{seen.request_id for seen in engine.seen} for engine in cluster.prefill]
        transfers = [{seen.params["transfer_id"] for seen in engine.seen} for engine in cluster.prefill]

        assert [answer.status for answer in answers] == [200, 200]
        assert {answer.headers["x-kvbaton-prefill"] for answer in answers} == {cluster.prefill[1].url}
        assert ids[0]
        assert len(ids[1]) == 2
        assert ids[0].isdisjoint(ids[1])
        assert transfers[0].isdisjoint(transfers[1])
        assert cluster.metric("retries_total") >= 1


async def test_client_error_is_not_retried():
    async with run_cluster(prefill=2, decode=2) as cluster:
        cluster.prefill[0].always(Script(status=400, body=BAD))
        cluster.prefill[1].always(Script(status=400, body=BAD))
        assert (await cluster.complete()).status == 400

        assert sum(len(engine.seen) for engine in cluster.prefill) == 1


@pytest.mark.parametrize("cut", [Cut.BEFORE_HEAD, Cut.AFTER_HEAD])
async def test_decode_lost_before_its_first_token_is_retried(cut: Cut):  # case 54
    async with run_cluster(decode=2) as cluster:
        cluster.decode[0].always(Script(cut=cut))
        answer = await cluster.complete(stream=True)

        assert answer.status == 200
        assert answer.text == "to pass the baton"
        assert answer.headers["x-kvbaton-decode"] == cluster.decode[1].url
        await cluster.wait_idle()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stream_that_begins_with_an_error_is_retried_on_the_same_pair(path: str):
    async with run_cluster() as cluster:
        cluster.decode[0].next(Script(error_event=True))
        answer = await cluster.post(path, streamed(path))

        assert answer.text == "to pass the baton"
        assert len({seen.params["transfer_id"] for seen in cluster.decode[0].seen}) == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stream_that_begins_with_an_error_is_an_error_status_in_the_end(path: str):  # case 54
    async with run_cluster(retries=1) as cluster:
        cluster.decode[0].always(Script(error_event=True))
        answer = await cluster.post(path, streamed(path))

        assert answer.status == 500
        assert answer.json["error"]["message"] == "KV load failed"
        assert cluster.metric("failures_total", stage="decode", kind="error_event") == 2


def streamed(path: str) -> dict[str, object]:
    prompt = (
        {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    return {"model": "fake", "max_tokens": 4, "stream": True, **prompt}


async def test_stream_cut_after_the_commit_ends_in_an_error_event_and_no_retry():  # case 54
    async with run_cluster(decode=2) as cluster:
        for engine in cluster.decode:
            engine.always(Script(cut=Cut.MID_STREAM))
        answer = await cluster.complete(stream=True)

        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "decode_reset"
        assert sum(len(engine.seen) for engine in cluster.decode) == 1
        await cluster.wait_idle()
        assert (
            cluster.metric("requests_total", mode="push", reason="as_configured", outcome="broken_stream")
            == 1
        )


async def test_plain_answer_cut_is_a_json_error():
    async with run_cluster(retries=0) as cluster:
        cluster.decode[0].always(Script(cut=Cut.BEFORE_HEAD))
        answer = await cluster.complete()

        assert answer.status == 502
        assert answer.json["error"]["code"] == "decode_reset"


async def test_kept_alive_connection_closed_by_the_engine_is_forgiven():
    async with run_cluster(retries=0) as cluster:
        await cluster.complete()
        cluster.prefill[0].next(Script(cut=Cut.BEFORE_HEAD))
        answer = await cluster.complete()

        assert answer.status == 200
        assert len(cluster.prefill[0].seen) == 3


async def test_no_byte_is_sent_before_prefill_succeeded():  # case 54
    async with run_cluster(retries=0) as cluster:
        cluster.decode[0].always(Script(waits_for_kv=False))
        failing = asyncio.Event()
        cluster.prefill[0].next(Script(status=500, body=BAD, before_head=failing))
        asking = cluster.start(stream=True)
        await cluster.decode[0].wait_until(lambda e: len(e.seen) == 1)
        await cluster.prefill[0].wait_until(lambda e: e.running == 1)

        assert not asking.done()
        failing.set()
        answer = await asking
        assert (answer.status, answer.raw) == (500, BAD)


async def test_restarted_prefill_is_noticed_and_decode_resent():  # case 7
    async with run_cluster() as cluster:
        old = cluster.prefill[0].engine_id
        cluster.prefill[0].restart_as("engine-new", 5999)
        answer = await cluster.complete(stream=True)
        first, second = cluster.decode[0].seen

        assert answer.text == "to pass the baton"
        assert (first.params["remote_engine_id"], first.ended) == (old, "aborted")
        assert (second.params["remote_engine_id"], second.params["remote_port"]) == ("engine-new", 5999)
        assert second.params["transfer_id"] == first.params["transfer_id"]
        assert second.params["transfer_epoch"] == 1
        assert cluster.metric("identity_mismatches_total", engine=cluster.prefill[0].url) == 1
        answer = await cluster.complete()
        assert len(cluster.decode[0].seen) == 3
        assert answer.headers["x-kvbaton-reason"] == "as_configured"


async def test_producers_alternating_behind_one_url_make_it_serial():  # case 38
    async with run_cluster() as cluster:
        for number in range(3):
            cluster.prefill[0].restart_as(f"rank-{number}", 6000 + number)
            answer = await cluster.complete()
            assert answer.status == 200

        assert answer.headers["x-kvbaton-reason"] == "identity_unstable"
        assert cluster.decode[0].seen[-1].params["remote_engine_id"] == "rank-2"


@pytest.mark.parametrize("connector", list(FakeConnector))
async def test_unknown_identity_goes_serial_and_works(connector: FakeConnector):
    async with run_cluster(connector=connector, mode=mode("auto")) as cluster:
        engine = next(e for e in cluster.app.fleet.engines.values() if e.role == "prefill")
        engine.identity = None
        answer = await cluster.complete()

        assert answer.text == "to pass the baton"
        assert answer.headers["x-kvbaton-reason"] == "identity_unknown"
        assert engine.identity is not None


async def test_deadline_cancels_both_legs_with_504():
    async with run_cluster(request_timeout_s=0.2) as cluster:
        cluster.prefill[0].next(_waiting())
        answer = await cluster.complete(stream=True)

        assert answer.status == 504
        assert answer.json["error"]["type"] == "timeout_error"
        for engine in cluster.prefill + cluster.decode:
            await engine.wait_until(lambda e: e.running == 0)
            assert len(engine.aborted) == 1
        await cluster.wait_idle()


async def test_silent_stream_is_closed_and_the_client_told():  # case 21
    async with run_cluster(idle_timeout_s=0.2) as cluster:
        started = asyncio.Event()
        started.set()
        cluster.decode[0].next(Script(token_gates=(started, asyncio.Event())))
        answer = await cluster.complete(stream=True)

        assert answer.events[-1]["error"]["code"] == "idle_timeout"
        await cluster.decode[0].wait_until(lambda e: len(e.aborted) == 1)
        await cluster.wait_idle()


async def test_client_gone_during_prefill_aborts_both_legs():  # cases 27, 39 and 53
    async with run_cluster() as cluster:
        cluster.prefill[0].next(_waiting())
        asking = cluster.start(stream=True)
        for engine in (cluster.prefill[0], cluster.decode[0]):
            await engine.wait_until(lambda e: e.running == 1)
        asking.cancel()
        async with asyncio.timeout(1):
            for engine in (cluster.prefill[0], cluster.decode[0]):
                await engine.wait_until(lambda e: len(e.aborted) == 1)
        await cluster.wait_idle()

        await cluster.releaser.wait_released()
        assert (
            cluster.metric("requests_total", mode="push", reason="as_configured", outcome="client_gone") == 1
        )


async def test_client_gone_after_prefill_aborts_decode_and_releases():  # case 27
    async with run_cluster() as cluster:
        cluster.decode[0].next(Script(before_tokens=asyncio.Event()))
        asking = cluster.start()
        await cluster.prefill[0].wait_until(lambda e: bool(e.seen) and e.seen[0].ended == "served")
        await cluster.decode[0].wait_until(lambda e: e.running == 1)
        asking.cancel()
        async with asyncio.timeout(1):
            await cluster.decode[0].wait_until(lambda e: len(e.aborted) == 1)
        await cluster.releaser.wait_released()

        assert cluster.releaser.released[0][1] == cluster.prefill[0].seen[0].params["transfer_id"]


async def test_client_gone_in_serial_prefill_starts_no_decode():
    async with run_cluster(mode=mode("pull")) as cluster:
        cluster.prefill[0].next(_waiting())
        asking = cluster.start()
        await cluster.prefill[0].wait_until(lambda e: e.running == 1)
        asking.cancel()
        await cluster.prefill[0].wait_until(lambda e: len(e.aborted) == 1)
        await cluster.wait_idle()

        assert cluster.decode[0].seen == []


async def test_client_gone_mid_stream_aborts_decode():
    async with run_cluster() as cluster:
        started = asyncio.Event()
        started.set()
        cluster.decode[0].next(Script(token_gates=(started, asyncio.Event())))
        body = {"model": "fake", "prompt": PROMPT, "stream": True}
        async with cluster.client.post(cluster.url + COMPLETIONS, json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        async with asyncio.timeout(1):
            await cluster.decode[0].wait_until(lambda e: len(e.aborted) == 1)
        await cluster.wait_idle()

        assert cluster.releaser.released == []


async def test_engines_that_start_late_are_waited_for():
    async with run_cluster(start_engines=False, settle=False, max_backoff_s=0.05) as cluster:
        early = await cluster.complete()
        ready_before = await cluster.get("/ready")
        for engine in cluster.prefill + cluster.decode:
            await engine.start()
        async with asyncio.timeout(TIMEOUT_S):
            await cluster.app.wait_settled()

        assert (early.status, early.headers["retry-after"]) == (503, "1")
        assert ready_before.status == 503
        assert (await cluster.get("/ready")).status == 200
        assert (await cluster.complete()).status == 200


async def test_stopped_engine_is_refused_then_found_again():
    async with run_cluster(max_backoff_s=0.05, retries=0) as cluster:
        await cluster.prefill[0].stop()
        lost = await cluster.complete()
        refused = await cluster.complete()
        cluster.prefill[0].restart_as("engine-new", 5999)
        await cluster.prefill[0].start()
        async with asyncio.timeout(TIMEOUT_S):
            await cluster.app.wait_settled()
        answer = await cluster.complete()

        assert lost.status in (502, 503)
        assert refused.status == 503
        assert answer.status == 200
        assert cluster.metric("identity_mismatches_total", engine=cluster.prefill[0].url) == 0


async def _disturb(cluster: Cluster, rng: random.Random) -> None:
    """One request that is served, refused, cut, or given up at a random point."""
    asking = asyncio.create_task(cluster.complete(stream=rng.random() < 0.5))
    for _ in range(rng.randrange(60)):
        await asyncio.sleep(0)
    if rng.random() < 0.7:
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def _random_script(rng: random.Random) -> Script:
    return rng.choice(
        [
            Script(),
            Script(status=500),
            Script(status=400),
            Script(cut=Cut.BEFORE_HEAD),
            Script(cut=Cut.AFTER_HEAD),
            Script(cut=Cut.MID_STREAM),
            Script(params=False),
            Script(error_event=True),
        ]
    )


@pytest.mark.parametrize("seed", [1, 2])
async def test_books_are_empty_after_any_mix_of_failures(seed: int):  # cases 14 and 20
    rng = random.Random(seed)
    async with run_cluster(prefill=2, decode=2, request_timeout_s=2, max_backoff_s=0.02) as cluster:
        for _ in range(10):
            for engine in cluster.prefill + cluster.decode:
                engine.next(*(_random_script(rng) for _ in range(rng.randrange(10))))
            await asyncio.gather(*(_disturb(cluster, rng) for _ in range(20)))
        await cluster.wait_idle()

        assert cluster.in_flight() == [0] * 8
        for engine in cluster.prefill + cluster.decode:
            await engine.wait_until(lambda e: e.running == 0)
            engine.forget_scripts()
        async with asyncio.timeout(TIMEOUT_S):
            await cluster.app.wait_settled()
        assert (await cluster.complete()).status == 200


async def test_more_requests_than_a_default_pool_holds_are_all_at_the_engine_at_once():  # case 28
    async with run_cluster() as cluster:
        go = asyncio.Event()
        cluster.decode[0].always(Script(before_tokens=go))
        asking = [cluster.start(stream=True) for _ in range(150)]
        await cluster.decode[0].wait_until(lambda e: e.running == 150)
        health = await cluster.get("/health")
        go.set()
        answers = await asyncio.gather(*asking)

        assert health.status == 200  # case 29
        assert {answer.text for answer in answers} == {"to pass the baton"}
        await cluster.wait_idle()


async def test_connections_are_reused():  # case 45
    async with run_cluster() as cluster:
        for _ in range(10):
            await cluster.complete()

        assert len({seen.peer for seen in cluster.decode[0].seen}) == 1


async def test_refused_connection_is_retried_elsewhere():
    async with run_cluster(prefill=2, max_backoff_s=0.05) as cluster:
        await cluster.prefill[0].stop()
        answers = [await cluster.complete() for _ in range(3)]

        assert [answer.status for answer in answers] == [200] * 3


async def test_broken_client_upload_is_no_request():
    async with run_cluster() as cluster:

        async def endless():
            yield b'{"model": "fake", '
            raise ConnectionResetError

        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await cluster.client.post(cluster.url + COMPLETIONS, data=endless())
        await cluster.wait_idle()

        assert (await cluster.complete()).status == 200
        assert len(cluster.prefill[0].seen) == 1


async def test_engine_that_misses_one_check_stays_and_is_taken_out_when_silent_for_long():  # case 29
    async with run_cluster(check_timeout_s=0.1, health_interval_s=0.02) as cluster:
        decode = cluster.decode[0]
        decode.silent = True
        seen = decode.health_checks
        await decode.wait_until(lambda e: e.health_checks > seen + 1)
        assert (await cluster.complete()).status == 200
        await decode.wait_until(lambda e: e.health_checks > seen + 5)
        assert (await cluster.get("/ready")).status == 503

        decode.silent = False
        async with asyncio.timeout(TIMEOUT_S):
            await cluster.app.wait_settled()
        assert (await cluster.complete()).status == 200


async def test_unhealthy_engine_is_taken_out():
    async with run_cluster(decode=2, health_interval_s=0.02) as cluster:
        sick = cluster.decode[0]
        sick.healthy = False
        seen = sick.health_checks
        await sick.wait_until(lambda e: e.health_checks > seen + 2)
        answers = [await cluster.complete() for _ in range(4)]

        assert {answer.headers["x-kvbaton-decode"] for answer in answers} == {cluster.decode[1].url}
