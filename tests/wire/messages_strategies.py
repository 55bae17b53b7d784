"""Strategies for every message of the side channel."""

from hypothesis import strategies as st

from kvbaton.wire import messages as m
from strategies import counts, names, nonces, proofs, transfer_ids

keys = st.builds(m.Key, transfer_ids, counts, counts)
id_bytes = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(
    lambda ids: b"".join(each.to_bytes(4, "little") for each in ids)
)
blocks = st.lists(st.builds(m.WireBlocks, counts, id_bytes), max_size=4)
regions = st.builds(m.WireRegion, counts, counts, counts, counts, counts, counts)
layouts = st.builds(
    m.WireLayout,
    names,
    st.lists(st.builds(m.WireGroup, names, counts), max_size=3),
    st.lists(regions, max_size=3),
    counts,
)
identities = st.builds(
    m.Identity,
    engine_id=names,
    pp=counts,
    tp=counts,
    tp_size=counts,
    pp_size=counts,
    boot_epoch=counts,
    agent=names,
    agent_metadata=st.binary(max_size=64),
    layout=layouts,
    fingerprint=st.dictionaries(names, names, max_size=3),
)
addresses = st.builds(m.RankAddress, counts, counts, names, st.integers(1, 65535), counts)
checksums = st.binary(max_size=64)
ttls = st.floats(0, 86400, exclude_min=True)

messages: st.SearchStrategy[m.AnyMessage] = st.one_of(
    st.builds(m.Hello, nonces),
    st.builds(m.Challenge, nonces, proofs),
    st.builds(m.Lookup, proofs),
    st.builds(m.Directory, names, counts, counts, st.lists(addresses, max_size=3)),
    st.builds(m.Introduce, identities, proofs),
    st.builds(m.Welcome, identities),
    st.builds(m.Refused, names, names, names, names, names),
    st.builds(
        m.Register,
        keys,
        names,
        counts,
        st.binary(max_size=64),
        blocks,
        ttls,
        st.integers(1, 4096),
        st.booleans(),
    ),
    st.builds(m.Progress, keys, counts),
    st.builds(m.Sealed, keys, counts, checksums),
    st.builds(m.Offer, keys, counts, blocks, st.booleans(), checksums),
    st.builds(m.Received, keys),
    st.builds(m.Confirmed, keys),
    st.builds(m.Failed, keys, names, names),
    st.builds(m.Cancel, keys, names),
    st.builds(m.Cancelled, keys),
    st.builds(m.Release, keys),
    st.builds(m.Ping, counts),
    st.builds(m.Pong, counts),
)
written = st.builds(m.Written, keys, counts, st.none() | counts)
