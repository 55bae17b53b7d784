"""A launcher to kill: starts two children, prints their process groups, and waits for ever."""

import asyncio
import sys
from pathlib import Path

from kvbaton.launch.specs import ProcessSpec, Role
from kvbaton.launch.supervisor import Supervisor, launcher_environment


async def main() -> None:
    child, log_dir, ports = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    async with Supervisor(lambda children: None, grace_s=1) as supervisor:
        groups = []
        for number, port in enumerate(ports):
            argv = (sys.executable, child, "parent", port)
            log_path = log_dir / f"{number}.log"
            spec = ProcessSpec(
                str(number), Role.PREFILL, argv, launcher_environment(), log_path, f"http://127.0.0.1:{port}"
            )
            groups.append((await supervisor.start(spec)).group)
        await supervisor.wait_ready(supervisor.children, 30)
        print(*groups, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
