"""Golden bytes: version 1 of the wire must stay readable, and stay what we write, until the version number changes.

`wire_v1.hex` is never regenerated to make a test pass. A message that has to change gets a new version and a new file.
"""

from pathlib import Path
from typing import get_args

import pytest

from kvbaton.wire import messages as m
from kvbaton.wire.frame import WIRE_VERSION, Deframer, frame
from wire.samples import SAMPLES

GOLDEN = {
    name: bytes.fromhex(text)
    for name, text in (
        line.split()
        for line in (Path(__file__).parent / "golden" / "wire_v1.hex").read_text().splitlines()
        if line and not line.startswith("#")
    )
}


def test_version_one_is_the_version_the_golden_file_holds() -> None:
    assert WIRE_VERSION == 1
    assert GOLDEN.keys() == SAMPLES.keys()


def test_every_message_has_a_sample() -> None:
    assert {type(sample) for sample in SAMPLES.values()} == {*get_args(m.AnyMessage), m.Written}


@pytest.mark.parametrize("name", SAMPLES)
def test_encoding_writes_the_golden_bytes(name: str) -> None:
    assert frame(m.encode(SAMPLES[name])).hex() == GOLDEN[name].hex()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_golden_bytes_read_as_the_message(name: str) -> None:
    (payload,) = Deframer().feed(GOLDEN[name])

    decode = m.decode_written if name.startswith("written") else m.decode
    assert decode(payload) == SAMPLES[name]
