"""`kvbaton bench`: from flags to records and a report, resumable at any point."""

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final

from kvbaton.base.errors import ConfigError, KvbatonError
from kvbaton.bench.arguments import config_from
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.describe import describe_commands, describe_plan
from kvbaton.bench.engines import Model
from kvbaton.bench.facts import make_header
from kvbaton.bench.plan import estimate_s, plan_visits
from kvbaton.bench.processes import run_quietly
from kvbaton.bench.progress import Progress
from kvbaton.bench.report import write_report
from kvbaton.bench.runner import Runner, unchecked, wrong
from kvbaton.bench.site import enter_site
from kvbaton.bench.store import Store
from kvbaton.bench.support import with_supported
from kvbaton.workload.cells import Link

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_INTERRUPTED: Final = 130
BUILT_IN_MODELS: Final = ("tiny", "nano")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    try:
        config = config_from(arguments)
        if arguments.report_only:
            return report_only(config)
        config, left_out = with_supported(config)
        for line in left_out:
            print(line)
        if arguments.dry_run:
            store = Store(config.out)
            print(describe_plan(config, store.done(), len(unchecked(config, store))))
            print(describe_commands(config))
            return EXIT_OK
        with stopping_politely():
            return measure(config)
    except ConfigError as error:
        print(f"kvbaton bench: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        print(
            "\nkvbaton bench: interrupted; everything is stopped. The same command resumes.", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    except KvbatonError as error:
        print(f"kvbaton bench: {error}", file=sys.stderr)
        return EXIT_FAILED


def report_only(config: BenchConfig) -> int:
    """Write the report of what the folder holds.

    Raises:
        ConfigError: it holds nothing.
    """
    records = Store(config.out).records
    if not records:
        raise ConfigError("--out", str(config.out), "a folder with results")
    for path in write_report(config.out, records):
        print(path)
    return EXIT_OK


def measure(config: BenchConfig) -> int:
    """Do everything the folder does not hold yet, and write the report."""
    with contextlib.ExitStack() as stack:
        site, warning = enter_site(config, stack)
        if warning is not None:
            print(warning)
            config = dataclasses.replace(config, links=(Link(),), namespaces=False)
        store = Store(config.out)
        header = make_header(config, site.topology)
        store.require_same(header.settings)
        model = resolve_model(config)
        pending = unchecked(config, store)
        print(describe_plan(config, store.done(), len(pending)), flush=True)
        store.append(header)
        progress = Progress(sys.stderr, estimate_s(config, plan_visits(config, store.done()), len(pending)))
        runner = Runner(config, store, model, site, progress)
        try:
            runner.check_tokens(pending)
            for visit in plan_visits(config, store.done()):
                if visit.contender.key not in wrong(store):
                    runner.visit(visit)
        finally:
            paths = write_report(config.out, store.records)
            progress.say("report: " + "  ".join(str(path) for path in paths))
    return EXIT_FAILED if runner.num_failures else EXIT_OK


def resolve_model(config: BenchConfig) -> Model:
    """What engines load; a built-in model is made by a process of its own, so that torch is not loaded here.

    Raises:
        KvbatonError: it could not be made.
    """
    if config.model in BUILT_IN_MODELS:
        made = run_quietly([sys.executable, "-m", "kvbaton.launch.model", config.model])
        return Model(made.splitlines()[-1], config.model)
    return Model(config.model, config.model)


@contextlib.contextmanager
def stopping_politely() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that engines and namespaces go too."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
