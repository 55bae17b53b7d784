"""The router's own pages, requests that are not handed off, and input nobody should send."""

import asyncio
import json

import aiohttp
import pytest
from yarl import URL

from kvbaton.testing.fake_script import Cut, Script
from router.harness import CHAT, COMPLETIONS, PROMPT, run_cluster

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (COMPLETIONS, {"prompt": PROMPT, "n": 4}, "many_choices"),
        (COMPLETIONS, {"prompt": PROMPT, "best_of": 2}, "many_choices"),
        (COMPLETIONS, {"prompt": PROMPT, "use_beam_search": True}, "beam_search"),
        (COMPLETIONS, {"prompt": ["one", "two"]}, "many_prompts"),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "many_prompts"),
        (COMPLETIONS, {"prompt": PROMPT, "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": PROMPT, "prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"prompt": PROMPT, "truncate_prompt_tokens": -1}, "truncation"),
        (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0}, "no_output"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}]},
            "multimodal",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 2}, "many_choices"),
        ("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}, "stored_state"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "hosted_tools"),
    ],
)
async def test_request_that_cannot_be_handed_off_is_served_by_decode(
    path: str, fields: dict, reason: str
):  # case 43
    async with run_cluster() as cluster:
        body = {"model": "fake", **fields}
        answer = await cluster.post(path, body)

        assert answer.status == 200
        assert (answer.headers["x-kvbaton-mode"], answer.headers["x-kvbaton-reason"]) == ("local", reason)
        assert "x-kvbaton-prefill" not in answer.headers
        assert cluster.prefill[0].seen == []
        assert cluster.decode[0].seen[0].body == body
        assert len(answer.json["choices"]) == fields.get("n", 1)
        await cluster.wait_idle()


@pytest.mark.parametrize("prompt", [["one"], [[1, 2, 3]], [1, 2, 3], "text"])
async def test_single_prompt_in_any_form_is_handed_off(prompt: object):
    async with run_cluster() as cluster:
        answer = await cluster.complete(prompt)

        assert answer.headers["x-kvbaton-mode"] == "push"
        assert cluster.prefill[0].seen[0].body["prompt"] == prompt


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[1]", b'"text"', b"{", b'{"a":1}x', b"\xff\xfe", b"null"]
)
async def test_body_that_is_no_json_object_is_a_400(body: bytes):
    async with run_cluster() as cluster:
        answer = await cluster.post(COMPLETIONS, body)

        assert answer.status == 400
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert cluster.prefill[0].seen == []
        assert cluster.metric("requests_total", mode="none", reason="none", outcome="client_error") == 1


STRANGE = [
    {},
    {"prompt": None},
    {"prompt": []},
    {"prompt": {}},
    {"prompt": PROMPT, "n": "x", "max_tokens": "y", "echo": "z"},
    {"prompt": PROMPT, "n": 1e400},
    {"messages": 7},
    {"messages": [3, {"content": [None, 4, {"type": 5}]}]},
    {"input": [{}], "tools": 3},
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses"])
async def test_strange_fields_are_left_to_the_engine_to_judge(path: str):
    async with run_cluster() as cluster:
        for body in STRANGE:
            answer = await cluster.post(path, json.dumps(body).replace("Infinity", "1e400"))

            assert answer.status == (400 if "n" in body else 200), body
        await cluster.wait_idle()


async def test_too_large_body_is_a_413():
    async with run_cluster(max_body_bytes=1000) as cluster:
        answer = await cluster.complete("x" * 2000)

        assert answer.status == 413
        assert cluster.prefill[0].seen == []


async def test_models_and_other_paths_pass_through_to_decode():
    async with run_cluster(api_key="fleet") as cluster:
        models = await cluster.get("/v1/models")
        target = URL(f"{cluster.url}/tokenize?x=%2F1", encoded=True)
        async with cluster.client.post(
            target, json={"prompt": "hi"}, headers={"X-Request-Id": "mine"}
        ) as other:
            echoed = await other.json()
        seen = cluster.decode[0].other[0]

        assert models.json["data"][0]["id"] == "fake"
        assert echoed["path"] == "/tokenize?x=%2F1"
        assert (seen.headers["x-request-id"], seen.headers["authorization"]) == ("mine", "Bearer fleet")
        assert other.headers["x-kvbaton-decode"] == cluster.decode[0].url
        assert cluster.prefill[0].other == []
        await cluster.wait_idle()


@pytest.mark.parametrize("key", ["kv_transfer_params", "kv\\u005ftransfer_params", "ec_transfer_params"])
async def test_passed_on_bodies_lose_forbidden_fields_at_any_depth(key: str):
    async with run_cluster() as cluster:
        body = f'{{"a": [{{"{key}": {{"remote_host": "evil"}}}}], "b": 1}}'
        await cluster.post("/inference/v1/generate", body, headers={"content-type": "application/json"})

        assert json.loads(cluster.decode[0].other[0].raw) == {"a": [{}], "b": 1}


async def test_pass_through_without_decode_is_refused():
    async with run_cluster(start_engines=False, settle=False) as cluster:
        answer = await cluster.get("/v1/models")

        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_local_request_fails_over_before_its_first_byte():
    async with run_cluster(decode=2) as cluster:
        cluster.decode[0].always(Script(status=503))
        answers = [await cluster.complete(n=2) for _ in range(2)]

        assert [answer.status for answer in answers] == [200, 200]


async def test_local_request_given_up_is_aborted():
    async with run_cluster() as cluster:
        cluster.decode[0].next(Script(hang=True))
        asking = cluster.start(n=2)
        await cluster.decode[0].wait_until(lambda e: e.running == 1)
        asking.cancel()
        async with asyncio.timeout(1):
            await cluster.decode[0].wait_until(lambda e: len(e.aborted) == 1)
        await cluster.wait_idle()


async def test_health_ready_and_metrics_answer():
    async with run_cluster() as cluster:
        await cluster.complete()
        ready = await cluster.get("/ready")
        metrics = (await cluster.get("/metrics")).raw.decode()

        assert (await cluster.get("/health")).status == 200
        assert ready.json["prefill"][0]["producer"] == cluster.prefill[0].engine_id
        assert 'kvbaton_router_requests_total{mode="push",outcome="ok",reason="as_configured"} 1.0' in metrics
        assert f'kvbaton_router_engine_up{{engine="{cluster.decode[0].url}",role="decode"}} 1.0' in metrics
        assert 'kvbaton_router_leg_seconds_count{leg="prefill"} 1.0' in metrics


async def test_timeline_shows_every_step_by_any_id():
    async with run_cluster() as cluster:
        body = {"model": "fake", "prompt": PROMPT, "stream": True}
        answer = await cluster.post(COMPLETIONS, body, headers={"X-Request-Id": "mine"})
        await cluster.wait_idle()
        request_id = answer.headers["x-request-id"]
        by_request = (await cluster.get(f"/kvbaton/requests/{request_id}")).json
        attempt = by_request["attempts"][0]
        by_transfer = (await cluster.get(f"/kvbaton/requests/{attempt['transfer_id']}")).json
        by_client = (await cluster.get("/kvbaton/requests/mine")).json
        steps = attempt["steps_s"]

        assert by_request["outcome"] == "ok"
        assert by_transfer["attempts"] == by_client["attempts"] == [attempt]
        assert steps.keys() == {
            "prefill_sent",
            "prefill_head",
            "prefill_done",
            "decode_sent",
            "decode_head",
            "decode_first_byte",
            "last_byte",
        }
        assert (
            0
            <= steps["prefill_sent"]
            <= steps["prefill_done"]
            <= steps["decode_first_byte"]
            <= steps["last_byte"]
        )
        assert len((await cluster.get("/kvbaton/requests")).json["requests"]) == 1
        assert (await cluster.get("/kvbaton/requests/unknown")).status == 404


async def test_transfer_id_of_a_running_request_is_not_shown():
    async with run_cluster() as cluster:
        cluster.prefill[0].next(Script(hang=True))
        cluster.start()
        await cluster.prefill[0].wait_until(lambda e: e.running == 1)
        listed = (await cluster.get("/kvbaton/requests")).raw

        assert cluster.prefill[0].seen[0].params["transfer_id"].encode() not in listed


async def test_only_the_last_timelines_are_kept():
    async with run_cluster(kept_timelines=2) as cluster:
        answers = [await cluster.complete() for _ in range(3)]
        found = [
            (await cluster.get(f"/kvbaton/requests/{a.headers['x-request-id']}")).status for a in answers
        ]

        assert found == [404, 200, 200]


async def test_explain_says_what_would_be_done_and_sends_nothing():
    async with run_cluster() as cluster:
        body = {"model": "fake", "prompt": PROMPT}
        handoff = await cluster.post("/kvbaton/explain?path=/v1/completions", body)
        local = await cluster.post("/kvbaton/explain?path=/v1/completions", body | {"n": 2})
        wrong = await cluster.post("/kvbaton/explain?path=/v1/embeddings", body)

        assert handoff.json["mode"] == "push"
        assert handoff.json["prefill"] == cluster.prefill[0].url
        assert (local.json["mode"], local.json["reason"]) == ("local", "many_choices")
        assert wrong.status == 400
        assert cluster.prefill[0].seen == cluster.decode[0].seen == []


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", "/health", 405), ("GET", "/kvbaton/none", 404)]
)
async def test_own_pages_refuse_what_they_do_not_know(method: str, path: str, status: int):
    async with run_cluster() as cluster, cluster.client.request(method, cluster.url + path) as response:
        assert response.status == status


async def test_public_client_completes_and_streams():
    openai = pytest.importorskip("openai")
    async with (
        run_cluster() as cluster,
        openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="k") as client,
    ):
        plain = await client.completions.create(model="fake", prompt=PROMPT, max_tokens=4)
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content async for chunk in stream]

        assert plain.choices[0].text == "to pass the baton"
        assert "".join(pieces).strip() == "to pass the baton"


async def test_public_client_sees_a_broken_stream_as_an_error():
    openai = pytest.importorskip("openai")
    async with (
        run_cluster() as cluster,
        openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="k") as client,
    ):
        cluster.decode[0].next(Script(cut=Cut.MID_STREAM))
        stream = await client.completions.create(model="fake", prompt=PROMPT, stream=True)

        with pytest.raises(openai.APIError, match="broke off"):
            [chunk async for chunk in stream]


async def test_stopping_router_lets_a_running_stream_finish():
    async with run_cluster() as cluster:
        gate = asyncio.Event()
        cluster.decode[0].next(Script(before_tokens=gate))
        asking = cluster.start(stream=True)
        await cluster.decode[0].wait_until(lambda e: e.running == 1)
        cluster.server.stop()
        gate.set()

        assert (await asking).text == "to pass the baton"


async def test_stopping_router_cuts_what_does_not_end_and_aborts_it():
    async with run_cluster() as cluster:
        cluster.prefill[0].next(Script(hang=True))
        asking = cluster.start(stream=True)
        await cluster.prefill[0].wait_until(lambda e: e.running == 1)
        cluster.server.stop()
        await cluster.prefill[0].wait_until(lambda e: len(e.aborted) == 1)

        assert (await asking).status == 503


async def test_passed_on_answer_that_breaks_is_not_passed_off_as_complete():
    async with run_cluster() as cluster:
        cluster.decode[0].echo_cut = True
        with pytest.raises(aiohttp.ClientPayloadError):
            await cluster.get("/other")
        await cluster.wait_idle()
