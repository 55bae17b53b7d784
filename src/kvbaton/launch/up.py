"""`kvbaton up`: from a configuration to a running deployment, and back to nothing."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import IO, Final, TypeVar

from kvbaton.base.errors import ConfigError, KvbatonError
from kvbaton.launch.arguments import config_from
from kvbaton.launch.chat import ChatFailed
from kvbaton.launch.demo import Stage, run_demo, warm_up
from kvbaton.launch.failure import ProcessFailed
from kvbaton.launch.prepare import Deployment, ModelNotMade, describe, prepare
from kvbaton.launch.progress import Progress
from kvbaton.launch.supervisor import Supervisor, launcher_environment

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_INTERRUPTED: Final = 130
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


class Interrupted(KvbatonError):
    """Asked to stop before the work was done."""


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    try:
        deployment = prepare(config_from(arguments), launcher_environment())
        return asyncio.run(serve(deployment, demo=arguments.demo, out=sys.stdout))
    except ConfigError as error:
        print(f"kvbaton up: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except ModelNotMade as error:
        print(f"kvbaton up: {error}", file=sys.stderr)
    except ProcessFailed as failed:
        print(f"\nkvbaton up: {failed.report.render()}", file=sys.stderr)
    except ChatFailed as failed:
        print(f"\nkvbaton up: the deployment is up but does not answer: {failed}", file=sys.stderr)
    except (Interrupted, KeyboardInterrupt):
        print("\nkvbaton up: interrupted; everything is stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED


async def serve(deployment: Deployment, *, demo: bool, out: IO[str]) -> int:
    """Bring a deployment up, use or announce it, and stop it; returns the exit status.

    Raises:
        ProcessFailed: a process ended or did not become ready.
        ChatFailed: the deployment came up but does not answer.
        Interrupted: asked to stop before it was up, or in the middle of the demonstration.
    """
    out.write("\n".join(describe(deployment)) + "\n")
    out.flush()
    started_s = time.monotonic()
    with stop_event() as stop:
        async with Supervisor(Progress(out, asyncio.get_running_loop().time)) as supervisor:
            watch = Watch(supervisor, stop)
            await watch.run(bring_up(supervisor, deployment, out))
            out.write(f"  up after {time.monotonic() - started_s:.0f} s\n")
            if demo:
                answered = await watch.run(run_demo(stage_of(deployment, out)))
            else:
                out.write(announcement(deployment))
                out.flush()
                with contextlib.suppress(Interrupted):
                    await watch.run(asyncio.Event().wait())
                answered = True
            out.write("stopping\n")
            out.flush()
    return EXIT_OK if answered else EXIT_FAILED


async def bring_up(supervisor: Supervisor, deployment: Deployment, out: IO[str]) -> None:
    """Start the engines, then the router, then send what nobody should have to wait for."""
    config = deployment.config
    engines = [await supervisor.start(spec) for spec in deployment.engines]
    await supervisor.wait_ready(engines, config.ready_timeout_s)
    await supervisor.wait_ready([await supervisor.start(deployment.router)], config.ready_timeout_s)
    await warm_up(stage_of(deployment, out), num_requests=max(config.prefill, config.decode))


class Watch:
    """Runs work until it is done, a process ends under it, or somebody asks to stop. Owner: `serve`."""

    def __init__(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        self._supervisor = supervisor
        self._stop = stop

    async def run(self, work: Coroutine[None, None, T]) -> T:
        """Run work and return its result.

        Raises:
            ProcessFailed: a process ended first.
            Interrupted: the stop event was set first.
        """
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(self._supervisor.wait_any_end())
        others = (stopped, ended)
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if ended.done():
                raise ended.result()
            raise Interrupted
        finally:
            for one in (task, *others):
                one.cancel()
            await asyncio.gather(task, *others, return_exceptions=True)


@contextlib.contextmanager
def stop_event() -> Iterator[asyncio.Event]:
    """Give an event that Ctrl-C and the polite signals set."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def stage_of(deployment: Deployment, out: IO[str]) -> Stage:
    """Return where requests go."""
    config = deployment.config
    return Stage(deployment.router.url, config.model, config.max_model_len, deployment.trace_paths, out)


def announcement(deployment: Deployment) -> str:
    """Return what a user needs to try it, with a line to paste."""
    body = {
        "model": deployment.config.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 32,
    }
    url = deployment.router.url
    return (
        f"\n  router   {url}   (live page: {url}/kvbaton/, metrics: {url}/metrics)\n\n"
        f"  curl -sN {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'\n\n"
        "Ctrl-C stops everything.\n"
    )
