"""Runner: check tokens, then visit every contender and measure what it owes, writing down each result at once."""

from pathlib import Path

from kvbaton.base.errors import KvbatonError
from kvbaton.bench.check import check_config, check_prompts, collect_tokens, compare
from kvbaton.bench.config import BenchConfig
from kvbaton.bench.contenders import PLAIN, Contender
from kvbaton.bench.engines import Model
from kvbaton.bench.measure import Stand, run_cell, warm_up
from kvbaton.bench.plan import CHECK_S, Step, Visit, step_s, visit_s
from kvbaton.bench.progress import Progress
from kvbaton.bench.site import Site
from kvbaton.bench.stand import standing
from kvbaton.bench.store import Store
from kvbaton.workload.record import CellResult, Skipped
from kvbaton.workload.stats import STEADY_RHO, is_steady, offered_load


class Runner:
    """Does one benchmark.

    Owner: the main thread. Failures of one contender are recorded and do not stop the others.
    """

    def __init__(
        self, config: BenchConfig, store: Store, model: Model, site: Site, progress: Progress
    ) -> None:
        self._config = config
        self._store = store
        self._model = model
        self._site = site
        self._progress = progress
        self.num_failures = 0

    def check_tokens(self, pending: tuple[Contender, ...]) -> None:
        """Compare greedy tokens of these contenders with the reference, which is compared with itself."""
        prompts = check_prompts(self._config)
        for contender in pending:
            self._progress.show(f"checking the tokens of {contender.key}")
            try:
                with standing(
                    check_config(self._config),
                    contender,
                    self._model,
                    self._site,
                    self._folder("check", contender),
                ) as stand:
                    self._site.shape(self._config.links[0])
                    tokens = collect_tokens(stand, prompts)
            except KvbatonError as error:
                self._fail(f"token check of {contender.key}: {error}")
                continue
            finally:
                self._progress.advance(CHECK_S)
            reference = next(iter(self._store.checks().values()), None)
            key, expected = (
                (contender.key, tokens)
                if reference is None
                else (reference.reference, reference_tokens(self._store))
            )
            result = compare(contender.key, tokens, key, expected)
            self._store.append(result)
            if result.first_difference is not None:
                self._fail(f"{contender.key} differs from {key}: {result.first_difference}; it is not timed")

    def visit(self, visit: Visit) -> None:
        """Boot a contender and measure its cells."""
        left = list(visit.steps)
        self._progress.show(f"booting {visit.contender.key}, repeat {visit.repeat + 1}")
        planned_s = visit_s(self._config, visit) - sum(step_s(self._config, step) for step in visit.steps)
        try:
            folder = self._folder(f"r{visit.repeat}", visit.contender)
            with standing(self._config, visit.contender, self._model, self._site, folder) as stand:
                self._progress.show(f"warming up {visit.contender.key}")
                self._site.shape(left[0].link)
                warm_up(stand, sorted({step.cell.prompt_tokens for step in left}))
                self._progress.advance(planned_s)
                while left:
                    self._measure(stand, visit, left[0])
                    self._progress.advance(step_s(self._config, left.pop(0)))
        except KvbatonError as error:
            self._fail(f"{visit.contender.key}, repeat {visit.repeat + 1}: {error}")
            for step in left:
                self._skip(visit, step, str(error).splitlines()[0], final=False)
                self._progress.advance(step_s(self._config, step))

    def _measure(self, stand: Stand, visit: Visit, step: Step) -> None:
        cell = step.cell
        service_s = None if cell.rate_per_s is None else self._service_s(visit, step)
        rho = offered_load(cell.rate_per_s, service_s)
        if rho is not None and not is_steady(rho) and not self._config.overload:
            reason = f"rho {rho:.2f} is not below {STEADY_RHO}"
            self._progress.say(
                f"  {visit.contender.key} {cell.name} link {step.link.name}: not run, {reason}"
            )
            self._skip(visit, step, reason, final=True)
            return
        self._progress.show(
            f"{visit.contender.key}  {cell.name}/s  link {step.link.name}  repeat {visit.repeat + 1}"
        )
        self._site.shape(step.link)
        result = run_cell(stand, cell, step.link, visit.repeat, service_s)
        self._store.append(result)
        for note in result.notes:
            self._progress.say(f"  {visit.contender.key} {cell.name} link {step.link.name}: {note}")

    def _service_s(self, visit: Visit, step: Step) -> float | None:
        """The unloaded prefill leg measured in this repeat, maybe before the benchmark was resumed."""
        for record in reversed(self._store.records):
            if (
                isinstance(record, CellResult)
                and record.rate_per_s is None
                and (record.contender, record.repeat) == (visit.contender.key, visit.repeat)
                and (record.link, record.prompt_tokens) == (step.link.name, step.cell.prompt_tokens)
            ):
                return record.service_s
        return None

    def _skip(self, visit: Visit, step: Step, reason: str, *, final: bool) -> None:
        self._store.append(
            Skipped(
                visit.contender.key, visit.repeat, step.link.name, step.cell.prompt_tokens, step.cell.rate_per_s, reason, final
            )
        )  # fmt: skip

    def _fail(self, text: str) -> None:
        self.num_failures += 1
        self._progress.say(f"! {text}")

    def _folder(self, what: str, contender: Contender) -> Path:
        return self._config.out / "logs" / f"{what}-{contender.key}"


def unchecked(config: BenchConfig, store: Store) -> tuple[Contender, ...]:
    """Contenders whose tokens are still to be compared, the reference first."""
    if not config.check_tokens or config.attached:
        return ()
    checks = store.checks()
    ordered = sorted(config.contenders, key=lambda contender: contender.key != PLAIN)
    return tuple(
        contender
        for contender in ordered
        if contender.key not in checks or checks[contender.key].equal < checks[contender.key].prompts
    )


def wrong(store: Store) -> set[str]:
    """Contenders that gave other tokens than the reference."""
    return {key for key, check in store.checks().items() if check.equal < check.prompts}


def reference_tokens(store: Store) -> list[list[int]]:
    """What the reference answered."""
    checks = store.checks()
    reference = next(iter(checks.values())).reference
    return checks[reference].tokens
