"""A cell's record joins what vLLM's benchmark saved with what the router noted."""

import math
from pathlib import Path

import pytest

from bench import canned
from kvbaton.base.errors import KvbatonError
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import CONTENDERS
from kvbaton.bench.engines import Model
from kvbaton.bench.measure import (
    Timeline,
    benchmark_argv,
    mean_service_s,
    notes_for,
    patience_s,
    requests_from,
    tokens_of,
)
from kvbaton.workload.arrivals import Arrivals
from kvbaton.workload.cells import Cell

CONFIG = BenchConfig(out=Path("out"))
MODEL = Model("/models/tiny", "tiny")
SAVED = {
    "start_times": [100.5, 100.0],
    "input_lens": [2048, 2049],
    "output_lens": [3, 0],
    "ttfts": [0.5, 0.0],
    "itls": [[0.02, 0.03], []],
    "errors": ["", "Traceback ...\nClientOSError: reset\n"],
}
STEPS = {"prefill_sent": 0.01, "prefill_done": 0.4, "decode_first_byte": 0.45}


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_requests_are_joined_with_timelines_by_id() -> None:
    first, second = requests_from(SAVED, {"x-0": Timeline("push", STEPS, 1, None)}, "x-")

    assert (first.mode, first.steps_s, first.num_attempts) == ("push", STEPS, 1)
    assert first.itls_s == [0.02, 0.03]
    assert (second.mode, second.steps_s) == (None, {})


def test_times_count_from_the_cells_first_request() -> None:
    assert [request.start_s for request in requests_from(SAVED, {}, "x-")] == [0.5, 0.0]


def test_failed_request_keeps_the_last_line_of_its_error() -> None:
    first, second = requests_from(SAVED, {}, "x-")

    assert first.error is None
    assert second.error == "ClientOSError: reset"


def test_contenders_are_asked_the_same_with_the_same_seed() -> None:
    asked = [benchmark_argv(CONFIG, MODEL, "http://r", Cell(2048, 0.4), 10, 7, "x-") for _ in range(2)]

    assert asked[0] == asked[1]
    assert option(asked[0], "--seed") == "7"
    assert option(asked[0], "--request-rate") == "0.4"
    assert option(asked[0], "--burstiness") == "1.0"
    assert option(asked[0], "--tokenizer") == "/models/tiny"


def test_unloaded_requests_go_one_at_a_time() -> None:
    argv = benchmark_argv(CONFIG, MODEL, "http://r", Cell(2048, None), 3, 7, "x-")

    assert option(argv, "--max-concurrency") == "1"
    assert "--request-rate" not in argv


def test_uniform_arrivals_are_an_infinite_burstiness() -> None:
    config = BenchConfig(out=Path("out"), arrivals=Arrivals.UNIFORM)

    assert math.isinf(
        float(option(benchmark_argv(config, MODEL, "u", Cell(1, 1.0), 1, 1, ""), "--burstiness"))
    )


def test_patience_outlasts_the_arrivals() -> None:
    assert patience_s(Cell(2048, 0.1), 30) > 30 / 0.1


def test_service_is_the_mean_prefill_leg_or_ttft_without_one() -> None:
    routed = canned.cell("ours-push", prefill_s=0.4).requests
    plain = canned.cell("plain", prefill_s=0.4, exposed_s=0.0).requests

    assert mean_service_s(routed) == pytest.approx(0.4, rel=0.05)
    assert mean_service_s(plain) == pytest.approx(0.403, rel=0.05)
    assert mean_service_s([]) is None


def test_notes_tell_overload_failures_and_wrong_modes() -> None:
    requests = [*canned.cell("upstream-pull").requests[:2], *requests_from(SAVED, {}, "x-")[1:]]
    notes = " | ".join(notes_for(CONTENDERS["ours-push"], requests, 1.2))

    assert "1 of 3 requests failed" in notes
    assert "2 requests were not handed over by push" in notes
    assert "not a steady state" in notes


def test_good_result_has_no_notes() -> None:
    result = canned.cell("ours-push")

    assert notes_for(CONTENDERS["ours-push"], result.requests, result.rho) == []


def test_answer_without_token_ids_is_refused() -> None:
    assert tokens_of({"choices": [{"token_ids": [1, 2]}]}) == [1, 2]
    with pytest.raises(KvbatonError):
        tokens_of({"choices": [{"text": "x"}]})
