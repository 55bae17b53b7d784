"""Hypothesis strategies and profiles shared by the tests of the pure core."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvbaton.base.ids import MAX_TRANSFER_ID_CHARS

SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

# One fixed set of examples everywhere, so that a red run is red again; `KVBATON_EXAMPLES=20000` explores new ones instead.
EXPLORE = int(os.environ.get("KVBATON_EXAMPLES", "0"))


def examples(number: int, *, steps: int = 50) -> settings:
    """Settings for a property test: `number` fixed examples, or as many fresh ones as KVBATON_EXAMPLES asks for."""
    return settings(
        max_examples=EXPLORE or number,
        stateful_step_count=steps,
        derandomize=not EXPLORE,
        database=None,
        deadline=None,
        suppress_health_check=SLOW_IS_FINE,
        print_blob=bool(EXPLORE),
    )


counts = st.integers(0, (1 << 62) - 1)
names = st.text(max_size=20)
transfer_ids = st.text(min_size=1, max_size=MAX_TRANSFER_ID_CHARS)
nonces = st.binary(min_size=16, max_size=64)
proofs = st.binary(max_size=64)
