import pytest

from kvbaton.router.beginning import Beginning

ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ERROR = b'data: {"error": {"message": "KV load failed", "code": 503}}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created"}\n\n'


def fed(*pieces: bytes) -> Beginning:
    beginning = Beginning()
    for piece in pieces:
        beginning.feed(piece)
    return beginning


@pytest.mark.parametrize("opening", [b"", ROLE, ROLE + ROLE, CREATED, ROLE.replace(b"\n", b"\r\n")])
def test_beginning_is_an_error_when_one_follows_the_opening(opening: bytes):
    beginning = fed(opening, ERROR)

    assert beginning.decided
    assert beginning.error is not None
    assert beginning.error.status == 503


@pytest.mark.parametrize("opening", [ROLE, ROLE + ROLE, CREATED])
def test_beginning_is_open_until_something_follows_the_opening(opening: bytes):
    beginning = fed(opening)

    assert not beginning.decided


@pytest.mark.parametrize(
    "answer",
    [
        TOKEN,
        b'data: {"choices":[{"text":"a"}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","content":""},"token_ids":[5]}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","tool_calls":[]}}]}\n\n',
        b'data: {"choices":[]}\n\n',
        b"data: [DONE]\n\n",
        b": still here\n\n",
        b"x" * 70_000,
    ],
)
def test_beginning_is_an_answer_when_anything_else_comes(answer: bytes):
    beginning = fed(ROLE, answer)

    assert beginning.decided
    assert beginning.error is None
    assert beginning.received == ROLE + answer


def test_beginning_cut_anywhere_is_judged_the_same():
    whole = ROLE + ERROR
    for cut in range(len(whole)):
        assert fed(whole[:cut], whole[cut:]).error is not None


def test_beginning_with_an_error_that_cannot_be_read_is_an_error():
    beginning = fed(b'data: {"error": "KV load failed"}\n\n')

    assert beginning.error is not None
    assert beginning.error.status == 500
