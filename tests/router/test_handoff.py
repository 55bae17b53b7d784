"""The two legs of a request: what they carry, in which order they leave, what the client gets."""

import asyncio
import json

import pytest

from kvbaton.testing.fake_script import DEFAULT_TOKENS, PUSH_KEYS, FakeConnector, Script
from router.harness import CHAT, COMPLETIONS, PROMPT, Answer, Cluster, mode, run_cluster

MESSAGES = [{"role": "user", "content": PROMPT}]


async def _ask(cluster: Cluster, path: str, *, stream: bool) -> Answer:
    body = {"model": "fake", "max_tokens": 4, "stream": stream}
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    return await cluster.post(path, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("connector", list(FakeConnector))
async def test_request_through_any_connector_gives_decode_text(
    connector: FakeConnector, path: str, stream: bool
):
    async with run_cluster(connector=connector, mode=mode("auto")) as cluster:
        answer = await _ask(cluster, path, stream=stream)

        assert answer.status == 200
        assert answer.text == "to pass the baton"
        assert len(cluster.prefill[0].seen) == len(cluster.decode[0].seen) == 1
        assert answer.headers["x-kvbaton-mode"] == (
            "pull" if connector is FakeConnector.NIXL_PULL else "push"
        )
        assert answer.headers["content-type"].startswith(
            "text/event-stream" if stream else "application/json"
        )
        assert cluster.decode[0].crashes == []
        await cluster.wait_idle()


async def test_push_decode_leg_leaves_before_prefill_answers():  # cases 1 and 2
    async with run_cluster() as cluster:
        prefilled = asyncio.Event()
        cluster.prefill[0].next(Script(before_head=prefilled))
        asking = cluster.start(stream=True)
        await cluster.decode[0].wait_until(lambda e: e.running == 1)

        assert cluster.prefill[0].running == 1
        prefilled.set()
        assert (await asking).text == "to pass the baton"


async def test_push_first_request_needs_no_warm_up():
    async with run_cluster() as cluster:
        answer = await cluster.complete()

        assert answer.headers["x-kvbaton-reason"] == "as_configured"
        assert cluster.prefill[0].probes == []  # /metrics told


@pytest.mark.parametrize(("path", "form"), [(COMPLETIONS, "cmpl-{}-0"), (CHAT, "chatcmpl-{}")])
async def test_push_legs_carry_matching_ids_and_the_full_key_set(path: str, form: str):  # case 3
    async with run_cluster() as cluster:
        await _ask(cluster, path, stream=False)
        prefill, decode = cluster.prefill[0].seen[0], cluster.decode[0].seen[0]

        assert prefill.path == decode.path == path
        assert prefill.request_id == decode.request_id
        assert prefill.params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "transfer_id": decode.params["transfer_id"],
        }
        assert decode.params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": cluster.prefill[0].engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": form.format(decode.request_id),
            "transfer_id": decode.params["transfer_id"],
            "transfer_mode": "push",
        }
        assert set(PUSH_KEYS) <= decode.params.keys()
        assert decode.params["transfer_id"].startswith("xfer-")
        assert len(decode.params["transfer_id"]) == len("xfer-") + 32


async def test_pull_decode_leg_carries_the_answer_verbatim():
    async with run_cluster(connector=FakeConnector.NIXL_PULL, mode=mode("pull")) as cluster:
        await cluster.complete()
        params = cluster.decode[0].seen[0].params

        assert params["remote_block_ids"] == [[1, 2, 3]]
        assert params["transfer_mode"] == "pull"
        assert params["transfer_id"] == cluster.prefill[0].seen[0].params["transfer_id"]
        assert params["remote_request_id"].startswith(f"cmpl-{cluster.prefill[0].seen[0].request_id}-0-")


async def test_pull_decode_leg_waits_for_prefill():
    async with run_cluster(mode=mode("pull")) as cluster:
        prefilled = asyncio.Event()
        cluster.prefill[0].next(Script(before_head=prefilled))
        asking = cluster.start()
        await cluster.prefill[0].wait_until(lambda e: e.running == 1)

        assert cluster.decode[0].seen == []
        prefilled.set()
        answer = await asking
        assert answer.text == "to pass the baton"
        assert cluster.decode[0].seen[0].params["transfer_mode"] == "pull"


@pytest.mark.parametrize(
    ("connector", "asked", "used", "reason"),
    [
        (FakeConnector.NIXL_PULL, "push", "pull", "engine_only_pulls"),
        (FakeConnector.NIXL_PUSH, "pull", "push", "engine_only_pushes"),
        (FakeConnector.NIXL_PULL, "auto", "pull", "as_configured"),
        (FakeConnector.KVBATON, "auto", "push", "as_configured"),
    ],
)
async def test_mode_the_engine_cannot_speak_is_replaced_with_a_reason(
    connector: FakeConnector, asked: str, used: str, reason: str
):  # cases 4 and 5
    async with run_cluster(connector=connector, mode=mode(asked)) as cluster:
        answer = await cluster.complete()

        assert answer.text == "to pass the baton"
        assert (answer.headers["x-kvbaton-mode"], answer.headers["x-kvbaton-reason"]) == (used, reason)


async def test_client_params_never_reach_an_engine():
    async with run_cluster() as cluster:
        await cluster.complete(kv_transfer_params={"remote_host": "evil", "do_remote_prefill": True})
        await cluster.complete(n=2, kv_transfer_params={"remote_host": "evil"}, ec_transfer_params={"a": 1})

        assert all(b"evil" not in seen.raw for seen in cluster.prefill[0].seen + cluster.decode[0].seen)
        assert "kv_transfer_params" not in cluster.decode[0].seen[1].body


async def test_decode_leg_keeps_the_clients_value_bytes():  # case 31
    values = '"model":"fake","prompt":"caf\\u00e9 \\ud83c\\udf88","temperature":1.10,"max_tokens":4,"stop":[ "\\n" ]'
    async with run_cluster() as cluster:
        await cluster.post(COMPLETIONS, "{" + values + "}", headers={"content-type": "application/json"})

        assert cluster.decode[0].seen[0].raw.startswith(("{" + values + ",").encode())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_tokens": 40},
        {"max_completion_tokens": 40},
        {"max_tokens": 40, "max_completion_tokens": 30},
        {"max_tokens": None},
        {"max_tokens": 40, "min_tokens": 7},
    ],
)
async def test_prefill_leg_asks_for_exactly_one_token(
    path: str, limits: dict[str, int | None]
):  # cases 30 and 31
    body = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}, "n": 1, "seed": 3}
    body |= limits
    body |= {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    async with run_cluster() as cluster:
        await cluster.post(path, body)
        prefill, decode = cluster.prefill[0].seen[0].body, cluster.decode[0].seen[0].body
        del decode["kv_transfer_params"]
        default = "max_tokens" if path == COMPLETIONS else "max_completion_tokens"
        present = [name for name in limits if name != "min_tokens"] or [default]

        assert decode == body
        assert prefill["stream"] is False
        assert prefill["n"] == 1
        assert [prefill[name] for name in present] == [1] * len(present)
        assert not {"min_tokens", "stream_options", "seed"} & prefill.keys()


async def test_end_to_end_headers_travel_on_both_legs():
    headers = {
        "Authorization": "Bearer client",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Request-Id": "mine",
        "Connection": "x-private",
        "X-Private": "hop",
        "X-Tenant": "blue",
    }
    async with run_cluster() as cluster:
        body = json.dumps({"model": "fake", "prompt": PROMPT})
        answer = await cluster.post(COMPLETIONS, body, headers=headers)

        for seen in (cluster.prefill[0].seen[0], cluster.decode[0].seen[0]):
            assert seen.headers["authorization"] == "Bearer client"
            assert seen.headers["traceparent"] == headers["traceparent"]
            assert seen.headers["x-tenant"] == "blue"
            assert seen.headers["x-client-request-id"] == "mine"
            assert seen.headers["x-request-id"] != "mine"
            assert "x-private" not in seen.headers
        assert answer.headers["x-client-request-id"] == "mine"
        assert answer.headers["x-request-id"] == cluster.prefill[0].seen[0].request_id


async def test_api_key_opens_engines_unless_the_client_has_its_own():  # case 34
    async with run_cluster(api_key="fleet", connector=FakeConnector.NIXL_PUSH) as cluster:
        without = await cluster.complete()
        other = await cluster.post(
            COMPLETIONS, {"model": "fake", "prompt": PROMPT}, headers={"Authorization": "Bearer wrong"}
        )

        assert without.status == 200
        assert other.status == 401
        assert cluster.prefill[0].probes[0].headers["authorization"] == "Bearer fleet"


async def test_cached_tokens_are_those_of_the_prefill_engine():
    async with run_cluster() as cluster:
        cluster.prefill[0].cached_tokens, cluster.decode[0].cached_tokens = 3, 6
        answer = await cluster.complete()

        assert answer.json["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 4,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


async def test_served_stream_is_relayed_byte_for_byte_as_it_comes():  # case 26
    gates = tuple(asyncio.Event() for _ in range(4))
    async with run_cluster() as cluster:
        cluster.decode[0].next(Script(token_gates=gates))
        body = {"model": "fake", "prompt": PROMPT, "stream": True}
        for gate in gates[:1]:
            gate.set()
        async with cluster.client.post(cluster.url + COMPLETIONS, json=body) as response:
            for number, gate in enumerate(gates):
                gate.set()
                piece = await response.content.readuntil(b"\n\n")

                assert (
                    json.loads(piece.removeprefix(b"data: "))["choices"][0]["text"].strip()
                    == (DEFAULT_TOKENS[number])
                )
            assert await response.read() == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "names"), [(False, ["prefill", "decode"]), (True, ["prefill", "decode", "exposed"])]
)
async def test_timing_header_is_sent_on_demand(stream: bool, names: list[str]):
    async with run_cluster(timing_headers=True) as cluster:
        answer = await cluster.complete(stream=stream)

        assert [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")] == names


async def test_every_pair_is_used_evenly():  # case 51
    async with run_cluster(prefill=2, decode=2) as cluster:
        pairs: dict[tuple[str, str], int] = {}
        for _ in range(12):
            headers = (await cluster.complete()).headers
            pair = (headers["x-kvbaton-prefill"], headers["x-kvbaton-decode"])
            pairs[pair] = pairs.get(pair, 0) + 1

        assert sorted(pairs.values()) == [3, 3, 3, 3]


async def test_long_streams_send_the_next_request_to_the_other_decode_engine():  # case 19
    async with run_cluster(decode=2) as cluster:
        started, gate = asyncio.Event(), asyncio.Event()
        started.set()
        for engine in cluster.decode:
            engine.always(Script(token_gates=(started, gate)))
        streams = [cluster.start(stream=True) for _ in range(10)]
        for engine in cluster.decode:
            await engine.wait_until(lambda e: e.running == 5)
        assert sorted(
            e.running_requests for e in cluster.app.fleet.engines.values() if e.role == "decode"
        ) == [5, 5]
        gate.set()
        await asyncio.gather(*streams)
        await cluster.wait_idle()


async def test_responses_legs_share_a_request_id_in_the_body():
    async with run_cluster() as cluster:
        answer = await cluster.post("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 9})
        prefill, decode = cluster.prefill[0].seen[0], cluster.decode[0].seen[0]

        assert answer.status == 200
        assert prefill.body["request_id"] == decode.body["request_id"] == f"resp_{decode.request_id}"
        assert decode.params["remote_request_id"] == f"resp_{decode.request_id}_0"
        assert (prefill.body["max_output_tokens"], decode.body["max_output_tokens"]) == (1, 9)
        assert prefill.body["store"] is False
