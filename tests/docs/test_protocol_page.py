"""The protocol page shows the machines as they are."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_protocol_page_matches_the_transition_tables() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "protocol_diagrams.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
