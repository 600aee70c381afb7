"""Finds the comparisons that the gate judges: those between two stored sides (sets of runs), or those of a duel.

If a run or duel was interrupted, planned cases that were not measured fail. A suspect is a figure that seems worse, and
is measured again. A suspect of stored runs is measured in a duel if the first side is a commit of the repository in the
working directory. Otherwise only the second side is measured again. A suspect of a duel is measured in a second duel,
with fresh processes on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fp8bench.analysis.compare.compare import ComparedSides, compare
from fp8bench.analysis.compare.sides import make_comparison_side
from fp8bench.analysis.findings import findings
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, Fp8benchError, RunNotFound, StoreError
from fp8bench.features.duel.kind import DuelKind
from fp8bench.features.duel.run import SESSIONS, count_default_sessions, run_duel
from fp8bench.features.duel.sides import FP8BENCH_TITLE, PACKAGE_FOLDER, DuelQuestion
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.duel.verdicts import compare_means, comparisons
from fp8bench.features.gate.judging import (
    TIME_METRICS,
    GateOutcome,
    GateVerdict,
    JudgedFigure,
    SecondMeasurement,
    apply_second_look,
    case_and_metric,
    join_second_looks,
    judge_first_look,
    mark_undetectable_figures,
)
from fp8bench.features.gate.power import RemeasurementMethod, SeriesState, detection_limits, history_detection_limits
from fp8bench.features.gate.thresholds import ThresholdRules
from fp8bench.jobs.after_run import add_to_history
from fp8bench.jobs.compare import compare_runs, read_runs
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.environment import command_line
from fp8bench.model import Comparison, Direction, Evidence, Request, Run
from fp8bench.model.run import BENCH
from fp8bench.model.specs import COUNTS, MEAN_TIME, RELATIVE_MEAN_TIME, RELATIVE_TIME, TIME
from fp8bench.model.stopping import LEAST_ROUNDS, QUICK_ROUNDS
from fp8bench.pipeline import measure_again
from fp8bench.plan.resumable import refuse_untrusted_code
from fp8bench.report.comparisons import CODE_DIGEST_FACT, describe_comparison_side, describe_differing_fact
from fp8bench.report.panels import together
from fp8bench.store.commit_runs import find_commit, find_runs
from fp8bench.store.runs.listing import find_store_of_run
from fp8bench.units import clock
from fp8bench.user_code import import_user_modules

ConfirmCallback = Callable[[Sequence[Comparison]], SecondMeasurement]

# Suspects are measured again at most this many times.
MAX_SUSPECT_REMEASUREMENTS = 4


@dataclass(frozen=True)
class GateSource:
    """The comparisons to judge, and how to measure suspects (figures that seem worse) again.

    `confirm` measures suspects again, and `remeasurement` is its method. If nothing can be judged, `problem` is the
    reason, and `code` its exit code. `expected_cases` have to have comparable times; otherwise the gate cannot
    tell whether they became slower. `duel` is set if a duel is judged. Measuring again ends after `budget` seconds, and
    takes about `look_seconds` each time. Both numbers are None if unknown.

    For a history, `comparisons` has only the changes, and `series_states` has the latest state of each series.
    `unchanged_figures` has the figures of all series, so that a thresholds rule that matches only unchanged figures is
    not reported as unused.
    """

    title: str
    comparisons: tuple[Comparison, ...] = ()
    confirm: ConfirmCallback | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
    remeasurement: RemeasurementMethod = RemeasurementMethod.MEASURED_AGAIN
    series_states: tuple[SeriesState, ...] = ()
    unchanged_figures: tuple[Comparison, ...] = ()
    duel: Duel | None = None
    expected_cases: frozenset[str] = frozenset()
    budget: float | None = None
    look_seconds: float | None = None


def make_failed_comparison(case: str, suite: str, evidence: Evidence, reason: str) -> Comparison:
    return Comparison(case, suite, TIME, "s", Direction.NONE, evidence, why=reason, failed=True)


def find_unmeasured_cases(runs: Sequence[Run], evidence: Evidence) -> Iterator[Comparison]:
    """Yields a failed comparison for each case that an unfinished run has planned, and of which no run has a record."""
    planned: dict[str, tuple[str, Run]] = {}
    for run in runs:
        for group in () if run.finished else run.plan:
            for case in group.cases:
                planned.setdefault(case.case.id, (case.case.workload, run))
    for run in runs:
        for record in run.records:
            planned.pop(record.case.id, None)
    for name, (suite, run) in planned.items():
        yield make_failed_comparison(name, suite, evidence, f"run {run.id} was interrupted before it was measured")


def judge_comparisons(source: GateSource, rules: ThresholdRules, rerun: bool, observer: JobObserver) -> GateVerdict:
    """Returns the gate's verdict on all comparisons of `source`. Figures that seem worse are suspects. With `rerun`
    they are measured again, which confirms them or rules them out. A time counts as undecided if the gate would not
    have noticed a slow-down of it.
    """
    # 1. Find suspects by the first measurement, and compute which slow-down the gate would detect.
    figures = judge_first_look(source.comparisons, rules)
    remeasurement = source.remeasurement if rerun and source.confirm is not None else RemeasurementMethod.NONE
    if source.series_states:
        limits = history_detection_limits(source.series_states, rules, len(figures), remeasurement)
    else:
        limits = detection_limits(figures, remeasurement)
    # 2. Measure suspects again, and mark times whose slow-down the gate would not detect.
    if not source.problem:
        settled_figures = _note_same_work(_resolve_suspect_figures(figures, source, rules, rerun, observer))
        figures = mark_undetectable_figures(settled_figures, limits, source.expected_cases)
        # 3. Mark also times of a history that did not change.
        changed_figure_keys = {figure.key for figure in figures}
        newest_figures = mark_undetectable_figures(
            judge_first_look([series.comparison for series in source.series_states], rules),
            limits,
            source.expected_cases,
        )
        figures += tuple(
            figure
            for figure in newest_figures
            if figure.outcome is GateOutcome.CANNOT_TELL and figure.key not in changed_figure_keys
        )
    return GateVerdict(source.title, figures, source.notes, source.problem, source.code, limits)


def _resolve_suspect_figures(
    figures: tuple[JudgedFigure, ...], source: GateSource, rules: ThresholdRules, rerun: bool, observer: JobObserver
) -> tuple[JudgedFigure, ...]:
    """Measures suspects (figures that seem worse) again until each is confirmed or ruled out, or until the source's
    budget of seconds is used up. Returns all figures.
    """
    confirm_suspects = source.confirm if rerun else None
    start = time.monotonic()
    last_look_seconds = 0.0
    # Each further duel adds its sessions, so that intervals become narrower until all suspects are decided.
    for look_number in range(MAX_SUSPECT_REMEASUREMENTS):
        suspected_comparisons = [figure.comparison for figure in figures if figure.outcome is GateOutcome.SUSPECTED]
        look_start_time = time.monotonic()
        # Do not start a measurement that would exceed the budget.
        is_over_budget = (
            look_number > 0
            and source.budget is not None
            and look_start_time - start + last_look_seconds > source.budget
        )
        if not suspected_comparisons or is_over_budget:
            break
        if confirm_suspects is None:
            return apply_second_look(figures, SecondMeasurement({}, refused="--no-rerun was given"), rules)
        measuring_time_text = "" if source.look_seconds is None else f", which takes about {clock(source.look_seconds)}"
        observer.note(f"gate: {len(suspected_comparisons)} suspected, measured again{measuring_time_text}")
        second_measurement = confirm_suspects(suspected_comparisons)
        figures = apply_second_look(figures, second_measurement, rules)
        last_look_seconds = time.monotonic() - look_start_time
        if not second_measurement.pools_samples:
            break
    return figures


def _note_same_work(figures: Sequence[JudgedFigure]) -> list[JudgedFigure]:
    """Notes at each suspected time that both sides do the same work, if all counts of its case (such as FLOPs and
    bytes) are equal."""
    has_same_work: dict[str, bool] = {}
    for figure in figures:
        change = figure.comparison
        if change.metric in COUNTS:
            has_same_work[change.case] = has_same_work.get(change.case, True) and change.before == change.after
    figures_with_work_notes = list(figures)
    for index, figure in enumerate(figures):
        is_suspected_time = figure.outcome is GateOutcome.SUSPECTED and figure.comparison.metric in TIME_METRICS
        if is_suspected_time and has_same_work.get(figure.comparison.case):
            same_work_note = "its operators and bytes are the same in both, so memory or the machine may differ"
            figures_with_work_notes[index] = replace(figure, why="; ".join(filter(None, (same_work_note, figure.why))))
    return figures_with_work_notes


@dataclass
class SuspectRemeasurer:
    """Measures suspects (figures that seem worse) again, in a duel or alone. The sessions of all duels with the same
    commit add up, so that intervals become narrower.
    """

    store: Path
    observer: JobObserver
    _result_by_case: dict[tuple[str, str], CaseResult] = field(default_factory=dict)

    def duel(self, question: DuelQuestion, request: Request, suspects: Sequence[Comparison]) -> SecondMeasurement:
        """Measures suspects in a duel, and judges its sessions together with those of earlier duels."""
        # 1. A quick run has few rounds, so its duel gets more sessions.
        if request.quick:
            question = replace(question, sessions=question.sessions or SESSIONS)
        # 2. If the duel is impossible, return the reason instead of raising an error: other suspects may still be
        # measured.
        cases = {suspect.case for suspect in suspects}
        try:
            refuse_untrusted_code("what was measured", request.imports)
            import_user_modules(request.imports)
            duel = run_duel(question, _make_full_rounds_request(request), self.store, self.observer, cases)
        except Fp8benchError as error:
            return SecondMeasurement({}, refused=str(error).rstrip("."))
        if not duel.finished:
            raise KeyboardInterrupt
        # 3. Add the sessions of earlier duels with the same commit.
        results = (self.add_earlier_sessions(result, duel.before.commit) for result in duel.results)
        duel = replace(duel, results=tuple(results))
        figures = {case_and_metric(figure): figure for figure in (*comparisons(duel), *compare_means(duel))}
        # Both sides are timed in the same rounds, so the change of a time is also that of its ratio to the reference.
        for metric, relative_metric in ((TIME, RELATIVE_TIME), (MEAN_TIME, RELATIVE_MEAN_TIME)):
            figures |= {(case, relative_metric): figure for (case, name), figure in figures.items() if name == metric}
        return SecondMeasurement(figures, f"in duel {duel.id}", pools_samples=True)

    def add_earlier_sessions(self, result: CaseResult, commit: str) -> CaseResult:
        """Returns the result of a case with its sessions in all duels with this commit, oldest first. Remembers these
        sessions for the next duel.
        """
        key = commit, result.after.case.id
        if not result.is_measured:
            return result
        if key in self._result_by_case:
            result = replace(result, sessions=(*self._result_by_case[key].sessions, *result.sessions))
        self._result_by_case[key] = result
        return result

    def duel_with_commit(
        self, commit: str, request: Request, suspects: Sequence[Comparison]
    ) -> SecondMeasurement | None:
        """Measures suspects (figures that seem worse) of the current code in a duel with a commit. Returns None if the
        repository does not have the commit.
        """
        if find_commit(commit, Path()) is None:
            return None
        # In the repository of fp8bench, the code to compare is fp8bench itself.
        is_fp8bench = Path.cwd().resolve().is_relative_to(PACKAGE_FOLDER.parent)
        question = DuelQuestion(against_self=commit) if is_fp8bench else DuelQuestion(against=commit)
        second_measurement = self.duel(question, request, suspects)
        if second_measurement.refused:
            self.observer.note(
                f"gate: no duel is possible ({second_measurement.refused}); suspects are measured again without one"
            )
        return second_measurement

    def measure_cases(self, run: Run, cases: Collection[str]) -> tuple[Run | None, str]:
        """Measures cases of a run again. Returns the new run, or None and the reason."""
        store = find_store_of_run(Path(run.path)) or self.store
        run = replace(run, request=_make_full_rounds_request(run.request))
        try:
            with self.observer.measuring() as progress:
                new_run = measure_again(run, cases, store, progress, command_line())
        except Fp8benchError as error:
            return None, str(error).rstrip(".")
        if not new_run.finished:
            raise KeyboardInterrupt
        if sentence := add_to_history(new_run, store):
            self.observer.note(sentence)
        return new_run, ""


def compute_second_duel_factor(request: Request, sessions: int) -> float:
    """Returns how many times as long as the first duel a second duel of all cases takes. The first duel had
    `sessions` sessions.
    """
    rounds = request.rounds or QUICK_ROUNDS
    round_count_factor = max(LEAST_ROUNDS, rounds) / rounds if request.quick else 1.0
    return round_count_factor * max(SESSIONS, sessions) / sessions


def _make_full_rounds_request(request: Request) -> Request:
    rounds = max(LEAST_ROUNDS, request.rounds or 0) if request.quick else request.rounds
    return replace(request, trace=None, rounds=rounds)


_MAX_LISTED_CASES = 5


def compare_stored_sides(name_a: str, name_b: str, store: Path, observer: JobObserver) -> GateSource:
    """Compares two named sides (runs, commits or stores). If only the first side is missing, this is not a usage
    error: the result has a problem with exit code 4.
    """
    title = f"{name_b} against {name_a}"
    # 1. The first build has no baseline, so its first side may be missing. A missing second side is a mistake.
    side_errors = []
    sides = []
    for name in (name_a, name_b):
        try:
            sides.append(read_runs(find_runs(name, store), observer))
        except StoreError as error:
            side_errors.append(error)
            sides.append([])
    if len(side_errors) == 2:
        raise StoreError(f"neither side exists: {side_errors[0]} {side_errors[1]}")
    old, new = sides
    if side_errors and new:
        return GateSource(title, problem=f"the baseline is missing: {side_errors[0]}", code=EXIT_BASELINE)
    if side_errors:
        raise side_errors[0]
    # 2. If the sides cannot be compared, explain why.
    compared_sides = compare_runs(name_a, old, name_b, new, observer)
    title = (
        f"{describe_comparison_side(compared_sides.after)}; against {describe_comparison_side(compared_sides.before)}"
    )
    problem, exit_code = _explain_unjudgeable(compared_sides)
    if problem:
        return GateSource(title, compared_sides.comparisons, problem=problem, code=exit_code)
    # 3. Collect unmeasured cases, facts that differ between the runs, and cases that only one side has.
    interrupted_cases = find_unmeasured_cases(compared_sides.after.runs, Evidence.CROSS_RUN)
    notes = [describe_differing_fact(fact, " was {} and is {}") for fact in compared_sides.differing_facts]
    for change, cases in (("is gone", compared_sides.only_before), ("is new", compared_sides.only_after)):
        notes += [f"{case} {change}" for case in cases[:_MAX_LISTED_CASES]]
        if cases[_MAX_LISTED_CASES:]:
            notes.append(f"and {len(cases) - _MAX_LISTED_CASES} more")
    expected_cases = [
        case
        for case, case_sightings in compared_sides.before.sightings_by_case.items()
        if case_sightings[-1].record.is_ok
    ]
    # 4. Measure suspects in a duel if the first side's commit is known, and otherwise again without a duel.
    newest_run = compared_sides.after.runs[-1]
    can_duel = _find_commit_to_duel(compared_sides, newest_run) is not None
    return GateSource(
        title,
        (*compared_sides.comparisons, *interrupted_cases),
        partial(_remeasure_suspect_figures, compared_sides, SuspectRemeasurer(store, observer)),
        tuple(notes),
        remeasurement=RemeasurementMethod.DUEL if can_duel else RemeasurementMethod.MEASURED_AGAIN,
        expected_cases=frozenset(expected_cases),
        budget=newest_run.request.budget,
    )


def _explain_unjudgeable(compared: ComparedSides) -> tuple[str, int]:
    has_failed_comparison = any(comparison.failed for comparison in compared.comparisons)
    if not compared.after.is_measured:
        return ("" if has_failed_comparison else f"no case of {compared.after.name} was measured."), EXIT_FAILED
    # A case that fails only on the second side is enough for a verdict.
    if has_failed_comparison:
        return "", 0
    if compared.conditions:
        return (
            f"the baseline was measured under other conditions, so times do not compare: {compared.conditions}. "
            "Measure both sides alike, or duel."
        ), EXIT_BASELINE
    if not compared.comparable:
        reasons = (comparison.why for comparison in compared.comparisons if comparison.why)
        return f"the baseline does not compare: {next(reasons, 'they have no case in common')}.", EXIT_BASELINE
    return "", 0


def _remeasure_suspect_figures(
    compared: ComparedSides, remeasurer: SuspectRemeasurer, suspects: Sequence[Comparison]
) -> SecondMeasurement:
    """Measures each suspect again, with the request of the newest run that has its case. Each suite may have a
    separate run.
    """
    newest_run_by_case = {suspect.case: compared.after.sightings_by_case[suspect.case][-1].run for suspect in suspects}
    suspects_by_run_id = together((newest_run_by_case[suspect.case].id, suspect) for suspect in suspects)
    second_looks = [
        _remeasure_for_run(newest_run_by_case[group[0].case], compared, remeasurer, group)
        for group in suspects_by_run_id.values()
    ]
    return join_second_looks(second_looks)


def _remeasure_for_run(
    newest_run: Run, compared: ComparedSides, remeasurer: SuspectRemeasurer, suspects: Sequence[Comparison]
) -> SecondMeasurement:
    commit = _find_commit_to_duel(compared, newest_run)
    second_measurement = None if commit is None else remeasurer.duel_with_commit(commit, newest_run.request, suspects)
    if second_measurement is not None and not second_measurement.refused:
        return second_measurement
    rerun, refusal = remeasurer.measure_cases(newest_run, {suspect.case for suspect in suspects})
    if rerun is None:
        return SecondMeasurement({}, refused=refusal)
    figures = compare(
        compared.before, make_comparison_side("again", [(rerun, findings(rerun))]), extra=compared.after
    ).comparisons
    return SecondMeasurement(
        {case_and_metric(figure): figure for figure in figures}, f"measured again in run {rerun.id}"
    )


def _find_commit_to_duel(compared: ComparedSides, newest_run: Run) -> str | None:
    """Returns the first side's commit if a duel with this commit would answer the same question as the comparison.
    Returns None if the sides differ in more than their code: a duel measures both sides with one interpreter and one
    torch, so it would not show the cost of a different torch.
    """
    head_commit = find_commit("HEAD", Path())
    # A duel of `bench` measures the callables of both commits.
    if any(fact.name != CODE_DIGEST_FACT or newest_run.request.suite != BENCH for fact in compared.differing_facts):
        return None
    if head_commit is None or newest_run.environment.get("commit") != head_commit:
        return None
    commit, *other_commits = {run.environment.get("commit") for run in compared.before.runs}
    # A commit does not have the uncommitted changes of a run.
    are_commits_clean = all(run.environment.get("dirty") is False for run in compared.before.runs)
    return commit if not other_commits and isinstance(commit, str) and are_commits_clean else None


def duel_revision(question: DuelQuestion, request: Request, store: Path, observer: JobObserver) -> GateSource:
    sessions = question.sessions or count_default_sessions(request)
    remeasuring_time_factor = compute_second_duel_factor(request, sessions) * (
        1 if request.budget is not None else MAX_SUSPECT_REMEASUREMENTS
    )
    observer.note(
        "gate: the time shown is that of the first measurement. If something seems worse, it is measured again, "
        f"which may take up to {remeasuring_time_factor:.3g} times as long"
    )
    start = time.monotonic()
    duel = run_duel(question, request, store, observer)
    if not duel.finished:
        raise KeyboardInterrupt
    seconds = (time.monotonic() - start) * compute_second_duel_factor(request, sessions)
    return replace(load_duel(duel.id, store, observer), look_seconds=seconds)


def load_duel(name: str, store: Path, observer: JobObserver) -> GateSource:
    path = next(iter(DuelKind().files(store)), None) if name == "last" else DuelKind().find(name, store)
    if path is None:
        raise RunNotFound(f"no duel {name!r:.200} in {store}. Give an id, a duel's name, a path, or 'last'.")
    # 1. A duel without measurements is an error. The duel's notes are shown in any case.
    duel = DuelKind().load(path)
    title = f"duel {duel.id}: {' against '.join(side.title or side.name for side in (duel.after, duel.before))}"
    notes = (*duel.notes, *duel.troubles)
    if not any(result.is_measured or result.has_failed for result in duel.results):
        return GateSource(title, notes=notes, problem="the duel measured nothing.", code=EXIT_FAILED, duel=duel)
    # 2. Measure suspects in a second duel of the same commits.
    suspect_remeasurer = SuspectRemeasurer(store, observer)

    def confirm(suspects: Sequence[Comparison]) -> SecondMeasurement:
        refusal_reason = _explain_moved_head(duel)
        if refusal_reason:
            return SecondMeasurement({}, refused=refusal_reason)
        # A name like HEAD may mean a different commit now, so use the commit itself.
        commit = duel.before.commit or None
        against, against_self = (None, commit) if duel.before.title.startswith(FP8BENCH_TITLE) else (commit, None)
        sessions = max(SESSIONS, duel.sessions)
        question = DuelQuestion(duel.before.python, duel.after.python, against, against_self, sessions)
        return suspect_remeasurer.duel(question, duel.request, suspects)

    # 3. Planned cases that were not measured because of an interrupt fail.
    figures = comparisons(duel)
    compared_cases = {comparison.case for comparison in figures}
    reason = "the duel was interrupted before it was measured"
    interrupted_cases = [
        make_failed_comparison(case, case.partition("[")[0], Evidence.PAIRED, reason)
        for case in duel.cases
        if case not in compared_cases
    ]
    # 4. If side B is a commit, a second duel is possible only while this commit is checked out.
    remeasurement = RemeasurementMethod.NONE if _explain_moved_head(duel) else RemeasurementMethod.DUEL
    expected_cases = frozenset(result.after.case.id for result in duel.results if not result.is_refused_by_both)
    return GateSource(
        title,
        (*figures, *interrupted_cases),
        confirm,
        notes,
        remeasurement=remeasurement,
        duel=duel,
        expected_cases=expected_cases,
        budget=duel.request.budget,
    )


def _explain_moved_head(duel: Duel) -> str:
    if not duel.after.commit:
        return ""
    head_commit = find_commit("HEAD", PACKAGE_FOLDER if duel.before.title.startswith(FP8BENCH_TITLE) else Path())
    if head_commit == duel.after.commit:
        return ""
    return (
        f"the duel was of commit {duel.after.commit[:8]}, "
        f"and here is {head_commit[:8] if head_commit else 'no repository'}"
    )
