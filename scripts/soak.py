"""Keep a pair of engines busy for a while with everything at once, and watch answers, leftovers and memory.

    python scripts/soak.py --minutes 30

Rounds of varied requests in both modes, clients that leave, and nonsense sent to engines directly. After each round everything
must be at rest; one line per round says how many answers were right and how much memory the engines hold.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engine.asks import Answer, Ask, ask, ask_alone, differences, make_asks, session
from engine.deployment import Actor, Deployment, small, without_connector
from engine.junk import bad_params, bad_producer_params
from engine.legs import good_params
from engine.quiet import wait_quiet
from engine.theatre import Theatre
from kvbaton.launch.groups import members_of
from kvbaton.protocol.mode import Mode

NOISE = 2e-3
PER_ROUND = 40


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Keep a pair of engines busy and watch them.")
    add = parser.add_argument
    add("--minutes", type=float, default=10)
    add("--requests", type=int, default=120, help="different requests to draw from")
    add("--seed", type=int, default=1)
    add("--model", default="nano")
    return parser.parse_args(argv)


def resident_mib(engine: Actor) -> float:
    """Return the private memory of an engine's processes."""
    total_kib = 0
    for process in members_of(engine.group):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
    return total_kib / 1024


async def play_round(
    pair: Deployment, number: int, rng: random.Random, known: Sequence[tuple[Ask, Answer]]
) -> tuple[int, list[str]]:
    """Do everything at once; returns how many answers were compared, and what was wrong."""
    model = pair.config.model
    chosen = [rng.choice(known) for _ in range(PER_ROUND)]
    nonsense = bad_params(good_params(pair, f"soak-{number}")) | bad_producer_params()
    async with session() as http:

        async def compare(request: Ask, expected: Answer) -> list[str]:
            salted = request.but(cache_salt=f"{number if rng.random() < 0.7 else 'shared'}")
            found = await ask(http, pair.router(rng.choice(list(Mode))).url, model, salted)
            return differences(request, expected, found, NOISE)

        async def leave(request: Ask) -> None:
            url = pair.router(rng.choice(list(Mode))).url
            task = asyncio.create_task(ask(http, url, model, request.but(cache_salt=f"left-{number}")))
            await asyncio.wait({task}, timeout=rng.uniform(0, 2))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def annoy(params: object) -> None:
            engine = rng.choice(pair.engines)
            greedy = rng.choice([each for each, _ in known if not each.seeded])
            request = greedy.but(kv_transfer_params=params, cache_salt=f"junk-{number}")
            await ask(http, engine.url, model, request)

        odd = [leave(rng.choice(known)[0]) for _ in range(PER_ROUND // 4)]
        odd += [annoy(params) for params in rng.sample(list(nonsense.values()), PER_ROUND // 4)]
        meanwhile = asyncio.gather(*odd)
        wrong = await asyncio.gather(*(compare(*each) for each in chosen))
        await meanwhile
    return len(chosen), [text for texts in wrong for text in texts]


def main() -> int:
    arguments = parse()
    asks = make_asks(arguments.seed, arguments.requests)
    total = num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        theatre = Theatre(Path(folder), os.environ.get("KVBATON_ENGINE_LOCK"))
        try:
            alone = theatre.play(
                "alone", lambda path: small(path, prefix_caching=False), without_connector, alone=True
            )
            expected = asyncio.run(ask_alone(alone.prefill[0].url, arguments.model, asks))
            known = list(zip(asks, expected, strict=True))
            pair = theatre.play("pair", small)
            for mode in Mode:
                pair.router(mode)
            end_s = time.monotonic() + arguments.minutes * 60
            number = 0
            while time.monotonic() < end_s:
                number += 1
                started_s = time.monotonic()
                rng = random.Random(f"{arguments.seed} {number}")
                compared, wrong = asyncio.run(play_round(pair, number, rng, known))
                took_s = time.monotonic() - started_s
                rest_s = wait_quiet(pair, 60)
                total, num_wrong = total + compared, num_wrong + len(wrong)
                memory = ", ".join(
                    f"{engine.spec.name} {resident_mib(engine):.0f} MiB" for engine in pair.engines
                )
                print(
                    f"round {number}: {compared} answers in {took_s:.0f} s, {len(wrong)} wrong, at rest after {rest_s:.1f} s; {memory}",
                    flush=True,
                )
                for text in wrong[:5]:
                    print(f"    {text[:500]}", flush=True)
        finally:
            theatre.close()
    print(f"{total} answers compared, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
