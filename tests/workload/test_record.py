"""Records read back what was written, and know vLLM's and our own definitions."""

import pytest

from kvbaton.workload.record import CellResult, Header, HookTime, Request, Skipped, TokenCheck, decode, encode

REQUEST = Request(
    "bench-0", 2048, 3, 0.0, 0.5, [0.02, 0.04], mode="push",
    steps_s={"prefill_sent": 0.001, "prefill_done": 0.401, "decode_first_byte": 0.431}, num_attempts=1,
)  # fmt: skip
RECORDS = [
    Header("2026-10-01T00:00:00+00:00", "abc", 1, {"model": "tiny"}, {"vllm": "1"}, {"cpu": "x"}),
    TokenCheck("ours-push", "plain", "float32", 2, 1, "prompt 1", [[1, 2], [3]]),
    CellResult(
        "ours-push", 0, "none", "loopback", 2048, 16, 0.4, "poisson", 1, 0.4, 0.16, 9.0, [REQUEST], {"prefill": 1.0},
        [HookTime("prefill", "worker", "wait_for_save", 3, 0.1, 0.05)],
    ),
    Skipped("upstream-push", 1, "none", 4096, None, "rho 0.95", True),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_reads_back_equal(record) -> None:
    assert decode(encode(record)) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_is_one_line(record) -> None:
    assert b"\n" not in encode(record)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"type":"other"}', b"\xff", b'{"type":"cell"}'])
def test_line_that_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_tpot_leaves_out_the_first_token() -> None:
    assert REQUEST.tpot_s == pytest.approx(0.03)


def test_tpot_of_a_single_token_is_not_known() -> None:
    assert Request("a", 1, 1, 0.0, 0.5, []).tpot_s is None


def test_exposed_is_first_token_minus_end_of_prefill_leg() -> None:
    assert REQUEST.exposed_s == pytest.approx(0.03)
    assert REQUEST.prefill_leg_s == pytest.approx(0.4)


def test_exposed_without_a_router_is_not_known() -> None:
    assert Request("a", 1, 2, 0.0, 0.5, [0.1]).exposed_s is None
