"""One message of every kind, fixed for ever: what wire version 1 looks like."""

from kvbaton.wire import messages as m

KEY = m.Key("xfer-7f3a", 2, 1)
LAYOUT = m.WireLayout(
    memory="DRAM",
    groups=[m.WireGroup("attention", 128), m.WireGroup("state", 1024)],
    regions=[
        m.WireRegion(0x7F00_0000_0000, 1 << 30, 65536, 65536, 0, 0),
        m.WireRegion(4096, 1 << 20, 512, 1024, 1, 3),
    ],
    num_blocks=1024,
)
IDENTITY = m.Identity(
    engine_id="engine-a",
    pp=0,
    tp=1,
    tp_size=2,
    pp_size=1,
    boot_epoch=0x1234_5678_9ABC,
    agent="engine-a/0/1",
    agent_metadata=b"\x00\x01meta",
    layout=LAYOUT,
    fingerprint={"model": "qwen3", "dtype": "bfloat16"},
)
BLOCKS = [m.WireBlocks(0, bytes.fromhex("0500000004000000")), m.WireBlocks(3, b"")]
NONCE = bytes(range(32))
PROOF = bytes(range(32, 64))

SAMPLES: dict[str, m.AnyMessage | m.Written] = {
    "hello": m.Hello(NONCE),
    "challenge": m.Challenge(NONCE, PROOF),
    "lookup": m.Lookup(PROOF),
    "directory": m.Directory("engine-a", 2, 1, [m.RankAddress(0, 1, "10.0.0.7", 5601, 99)]),
    "introduce": m.Introduce(IDENTITY, PROOF),
    "welcome": m.Welcome(IDENTITY),
    "refused": m.Refused("incompatible", "dtype differs", "dtype", "float32", "bfloat16"),
    "register": m.Register(KEY, "push", 300, b"\xaa" * 16, BLOCKS, 30.5, 2, True),
    "progress": m.Progress(KEY, 3),
    "sealed": m.Sealed(KEY, 4, b"\x01\x02\x03\x04"),
    "offer": m.Offer(KEY, 0, BLOCKS, True, b"\x05\x06\x07\x08"),
    "received": m.Received(KEY),
    "confirmed": m.Confirmed(KEY),
    "failed": m.Failed(KEY, "preempted", "blocks were taken back"),
    "cancel": m.Cancel(KEY, "aborted"),
    "cancelled": m.Cancelled(KEY),
    "release": m.Release(KEY),
    "ping": m.Ping(7),
    "pong": m.Pong(7),
    "written": m.Written(KEY, 3, 4),
    "written-open": m.Written(KEY, 0),
}
