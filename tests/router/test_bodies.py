"""Bodies, parameters, headers and settings, without a socket."""

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.base.errors import ConfigError
from kvbaton.base.ids import RequestId, TransferId
from kvbaton.policy.view import EngineName, TransferMode
from kvbaton.router.command import main
from kvbaton.router.config import RouterConfig, parse_engine_url
from kvbaton.router.headers import read_client_headers, response_headers
from kvbaton.router.http_errors import BadRequest
from kvbaton.router.identity import read_metrics
from kvbaton.router.openai import AttemptIds, Endpoint, parse_body, strip_forbidden
from kvbaton.router.params import NoParams, prefill_params, read_answer, serial_params
from kvbaton.router.usage import finish_plain_answer
from strategies import examples

IDS = AttemptIds(TransferId("xfer-1"), RequestId("kvb1"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
known_fields = st.sampled_from(
    [
        "prompt",
        "messages",
        "input",
        "n",
        "best_of",
        "echo",
        "tools",
        "max_tokens",
        "truncate_prompt_tokens",
        "stream",
    ]
)


@examples(100)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), st.sampled_from(Endpoint))
def test_any_bytes_are_a_body_or_a_bad_request(raw: bytes, endpoint: Endpoint):
    try:
        body = parse_body(endpoint, raw)
    except BadRequest:
        return

    assert body.shape.prompt_tokens >= 1


@examples(100)
@given(st.dictionaries(known_fields, json_values), st.sampled_from(Endpoint))
def test_any_fields_keep_their_values_on_the_decode_leg(fields: dict[str, object], endpoint: Endpoint):
    body = parse_body(endpoint, json.dumps(fields).encode())
    decode = json.loads(body.decode_leg(IDS, prefill_params(IDS.transfer_id)))
    prefill = json.loads(body.prefill_leg(IDS, prefill_params(IDS.transfer_id)))

    assert {name: decode[name] for name in fields} == fields
    assert json.loads(body.local()) == fields
    assert prefill["stream"] is False
    assert 1 in [prefill.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("x" * 400, 100), ([1] * 50, 50), (["x" * 400], 100), ([[1, 2, 3]], 3), ("", 1)]
)
def test_prompt_length_is_estimated_from_its_form(prompt: object, tokens: int):
    body = parse_body(Endpoint.COMPLETIONS, json.dumps({"prompt": prompt}, separators=(",", ":")).encode())

    assert abs(body.shape.prompt_tokens - tokens) <= 1


@examples(100)
@given(json_values)
def test_stripping_changes_nothing_that_is_allowed(value: object):
    raw = json.dumps(value).encode()

    assert strip_forbidden(raw) == raw


@pytest.mark.parametrize("raw", [b"", b"--boundary\r\nbinary\xff", b"{", b'{"a": 1} trailing'])
def test_stripping_leaves_what_is_not_json(raw: bytes):
    assert strip_forbidden(raw) == raw


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32", "utf-8-sig"])
def test_stripping_reads_all_that_an_engine_would_read(encoding: str):
    raw = '{"x": NaN, "y": -Infinity, "kv_transfer_params": {"remote_host": "evil"}}'.encode(encoding)

    assert b"evil" not in strip_forbidden(raw).replace(b"\0", b"")
    assert list(json.loads(strip_forbidden(raw))) == ["x", "y"]


def test_deep_nesting_is_refused():
    with pytest.raises(BadRequest):
        strip_forbidden(b'{"kv_transfer_params": {}, "x":' + b"[" * 100_000)
    with pytest.raises(BadRequest):
        parse_body(Endpoint.CHAT, b'{"messages":' + b"[" * 100_000)


def test_answer_becomes_pull_parameters_verbatim_and_push_parameters_without_blocks():
    offered = {
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 1,
        "remote_block_ids": [[1]],
        "new": {"x": 1},
    }
    answer = read_answer(json.dumps({"kv_transfer_params": offered}).encode())
    pull = json.loads(msgspec.json.encode(serial_params(answer, TransferMode.PULL, IDS.transfer_id)))
    push = json.loads(msgspec.json.encode(serial_params(answer, TransferMode.PUSH, IDS.transfer_id, epoch=2)))

    assert pull == offered | {"transfer_id": "xfer-1", "transfer_mode": "pull"}
    del offered["remote_block_ids"]
    assert push == offered | {"transfer_id": "xfer-1", "transfer_mode": "push", "transfer_epoch": 2}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": 3}',
        b'{"kv_transfer_params": {"remote_port": "x"}}',
        b"\xff",
    ],
)
def test_answer_without_usable_params_says_so(raw: bytes):
    with pytest.raises(NoParams):
        read_answer(raw)


def test_metrics_name_producers_of_prefill_engines_only():
    line = (
        'kvbaton:engine_info{{engine_id="{}",host="h\\"1",port="5600",tp_size="2",pp_size="1",role="{}"}} 1.0'
    )
    text = "\n".join(
        [
            "vllm:x 1",
            line.format("a", "prefill"),
            line.format("a", "prefill"),
            line.format("b", "decode"),
            'kvbaton:engine_info{engine_id="c",port="no"} 1',
            "kvbaton:engine_info{broken",
        ]
    )
    (found,) = read_metrics(text)

    assert (found.address.engine_id, found.address.host, found.address.port, found.tp_size) == (
        "a",
        'h"1',
        5600,
        2,
    )


@pytest.mark.parametrize("details", ["prompt_tokens_details", "input_tokens_details"])
def test_cached_tokens_are_corrected_where_reported(details: str):
    body = json.dumps({"usage": {"x": 1, details: {"cached_tokens": 9, "y": 2}}}).encode()

    assert json.loads(finish_plain_answer(body, 4))["usage"] == {
        "x": 1,
        details: {"cached_tokens": 4, "y": 2},
    }
    assert finish_plain_answer(body, None) == body


@pytest.mark.parametrize("body", [b"", b"text", b"[]", b'{"usage": null}', b'{"usage": 3}', b'{"usage": {}}'])
def test_answer_without_cached_tokens_is_left_alone(body: bytes):
    assert finish_plain_answer(body, 4) == body


def test_answer_loses_the_decode_engines_handoff_parameters():
    body = b'{"id": "1", "kv_transfer_params": {"remote_host": "h"}}'

    assert json.loads(finish_plain_answer(body, None)) == {"id": "1", "kv_transfer_params": None}


def test_hop_by_hop_headers_stay_behind():
    raw = [
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"TE", b"x"),
        (b"X-End", b"2"),
        (b"Host", b"h"),
    ]

    assert read_client_headers(raw).end_to_end == (("x-end", "2"),)
    assert response_headers([("Transfer-Encoding", "chunked"), ("X-A", "1"), ("Content-Length", "3")]) == [
        ("x-a", "1")
    ]


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a:1", "http://a:1"),
        ("a:1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1"),
        ("https://a/base/", "https://a/base"),
    ],
)
def test_engine_url_is_read_as_users_write_it(text: str, url: str):
    assert parse_engine_url("--prefill", text) == url


@pytest.mark.parametrize(
    "text", ["", "ftp://a", "http://", "http://a:x", "http://a?b=1", "http://u:p@a", "http://a:99999"]
)
def test_engine_url_that_cannot_work_is_refused(text: str):
    with pytest.raises(ConfigError) as caught:
        parse_engine_url("--prefill", text)

    assert caught.value.key == "--prefill"


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: RouterConfig((), (b,)),
        lambda a, b: RouterConfig((a,), ()),
        lambda a, b: RouterConfig((a,), (a,)),
        lambda a, b: RouterConfig((a, a), (b,)),
        lambda a, b: RouterConfig((a,), (b,), port=70000),
        lambda a, b: RouterConfig((a,), (b,), retries=-1),
        lambda a, b: RouterConfig((a,), (b,), idle_timeout_s=0),
    ],
)
def test_settings_that_cannot_work_are_refused(build: Callable[[EngineName, EngineName], RouterConfig]):
    with pytest.raises(ConfigError):
        build(EngineName("http://a"), EngineName("http://b"))


def test_command_line_without_engines_says_what_is_missing(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "--prefill" in capsys.readouterr().err
