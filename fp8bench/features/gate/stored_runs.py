"""The gate's sources: two sides that were measured at different times, or a stored duel.

If a run or duel was cut off, cases that were planned and never measured fail. Suspects of runs are duelled if the first
side is a commit of the repository in the working directory, otherwise the second side's are re-measured. Suspects of a
duel are duelled again, with fresh processes on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench.analysis.compare.compare import Compared, compare
from fp8bench.analysis.compare.sides import make_side
from fp8bench.analysis.findings import findings
from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, Fp8benchError, RunNotFound, StoreError
from fp8bench.features.duel.kind import DuelKind
from fp8bench.features.duel.run import SESSIONS, run_duel, sessions_of
from fp8bench.features.duel.sides import OWN, PACKAGE, DuelQuestion
from fp8bench.features.duel.values import CaseResult, Duel
from fp8bench.features.duel.verdicts import compare_means, comparisons
from fp8bench.features.gate.judging import (
    GateOutcome,
    GateVerdict,
    JudgedFigure,
    SecondLook,
    first_look,
    join_looks,
    key_of,
    mark_blind,
    second_look,
)
from fp8bench.features.gate.power import Newest, Second, sights_of, sights_of_history
from fp8bench.features.gate.thresholds import Rules
from fp8bench.jobs.after_run import into_history
from fp8bench.jobs.compare import compared_of, read_runs
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.environment import command_line
from fp8bench.model import Comparison, Direction, Evidence, Request, Run
from fp8bench.model.specs import MEAN, RELATIVE, RELATIVE_MEAN, TIME
from fp8bench.model.stopping import LEAST_ROUNDS, QUICK_ROUNDS
from fp8bench.pipeline import measure_again
from fp8bench.plan.resumable import refuse_code_of_others
from fp8bench.report.comparisons import side_words
from fp8bench.report.panels import together
from fp8bench.store.commit_runs import find_commit, find_runs
from fp8bench.store.runs.listing import store_of
from fp8bench.units import clock
from fp8bench.user_code import import_user_modules

Confirm = Callable[[Sequence[Comparison]], SecondLook]
# Results of second duels, by commit and case: another duel adds its sessions to them.
Pool = dict[tuple[str, str], CaseResult]
# Without a budget, a remaining suspect is re-measured in at most this many duels.
MOST_LOOKS = 4


@dataclass(frozen=True)
class GateSource:
    """Comparisons to judge. `confirm` re-measures suspects, `second` describes how. `problem` is why nothing can be
    judged, with its exit `code`. A history has its series' present state in `newest`, and all figures that rules may
    match in `unchanged`; its comparisons are only changes. `duel` is set if one is judged. `lost` are cases that were
    measured before and do not compare now. Re-measuring ends after `budget` seconds, and takes about `look_seconds`
    each time, both None if unknown."""

    title: str
    comparisons: tuple[Comparison, ...] = ()
    confirm: Confirm | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
    second: Second = Second.AGAIN
    newest: tuple[Newest, ...] = ()
    unchanged: tuple[Comparison, ...] = ()
    duel: Duel | None = None
    lost: frozenset[str] = frozenset()
    budget: float | None = None
    look_seconds: float | None = None


def failed_case(case: str, suite: str, evidence: Evidence, reason: str) -> Comparison:
    return Comparison(case, suite, TIME, "s", Direction.NONE, evidence, why=reason, failed=True)


def unmeasured_cases(runs: Sequence[Run], evidence: Evidence) -> Iterator[Comparison]:
    """Yields a failed case for each planned case of unfinished runs without a record in any of the runs."""
    planned: dict[str, tuple[str, Run]] = {}
    for run in runs:
        for group in () if run.finished else run.plan:
            for case in group.cases:
                planned.setdefault(case.case.id, (case.case.workload, run))
    for run in runs:
        for record in run.records:
            planned.pop(record.case.id, None)
    for name, (suite, run) in planned.items():
        yield failed_case(name, suite, evidence, f"run {run.id} was interrupted before it was measured")


def judge_source(source: GateSource, rules: Rules, rerun: bool, observer: JobObserver) -> GateVerdict:
    """Takes the first look; further ones while there are suspects and `rerun` allows it; and computes what was
    detectable."""
    figures = first_look(source.comparisons, rules)
    second = source.second if rerun and source.confirm is not None else Second.NONE
    if source.newest:
        sights = sights_of_history(source.newest, rules, len(figures), second)
    else:
        sights = sights_of(figures, second)
    if not source.problem:
        figures = mark_blind(_remeasure(figures, source, rules, rerun, observer), sights, source.lost)
        changed = {figure.key for figure in figures}
        tonight = mark_blind(first_look([series.comparison for series in source.newest], rules), sights, source.lost)
        figures += tuple(
            figure for figure in tonight if figure.outcome is GateOutcome.CANNOT_TELL and figure.key not in changed
        )
    return GateVerdict(source.title, figures, source.notes, source.problem, source.code, sights)


def _remeasure(
    figures: tuple[JudgedFigure, ...], source: GateSource, rules: Rules, rerun: bool, observer: JobObserver
) -> tuple[JudgedFigure, ...]:
    """Re-measures suspects until none is in doubt, or time is up."""
    confirm = source.confirm if rerun else None
    begun, last = time.monotonic(), 0.0
    # Looks of duels accumulate: each narrows intervals until all suspects are settled.
    for number in range(MOST_LOOKS):
        suspects = [figure.comparison for figure in figures if figure.outcome is GateOutcome.SUSPECTED]
        looked = time.monotonic()
        # Do not start a look that would exceed the budget: a build's time is limited.
        is_over = number > 0 and source.budget is not None and looked - begun + last > source.budget
        if not suspects or is_over:
            break
        if confirm is None:
            return second_look(figures, SecondLook({}, refused="--no-rerun"), rules)
        takes = "" if source.look_seconds is None else f", which takes about {clock(source.look_seconds)}"
        observer.note(f"gate: {len(suspects)} suspected, measured again{takes}")
        look = confirm(suspects)
        figures = second_look(figures, look, rules)
        last = time.monotonic() - looked
        if not look.adds_up:
            break
    return figures


def duel_suspects(
    question: DuelQuestion,
    request: Request,
    store: Path,
    suspects: Sequence[Comparison],
    observer: JobObserver,
    pool: Pool,
) -> SecondLook:
    """Duels the suspects, and judges the sessions of all such duels. The time decides about a ratio to the reference,
    because the sides share rounds."""
    # 1. Quick runs have few rounds: sessions compensate for that.
    if request.quick:
        question = replace(question, sessions=question.sessions or SESSIONS)
    # 2. An impossible duel is a refused look, not an error: other suspects have other looks.
    try:
        refuse_code_of_others("what was measured", request.imports)
        import_user_modules(request.imports)
        duel = run_duel(question, _full_rounds(request), store, observer, {suspect.case for suspect in suspects})
    except Fp8benchError as error:
        return SecondLook({}, refused=str(error).rstrip("."))
    if not duel.finished:
        raise KeyboardInterrupt
    # 3. Sessions of earlier looks of the same commits also count.
    duel = replace(duel, results=tuple(pool_sessions(result, duel.before.commit, pool) for result in duel.results))
    figures = {key_of(comparison): comparison for comparison in (*comparisons(duel), *compare_means(duel))}
    # The sides share rounds, so a ratio to the reference agrees with the time.
    for metric, relative in ((TIME, RELATIVE), (MEAN, RELATIVE_MEAN)):
        figures |= {(case, relative): comparison for (case, name), comparison in figures.items() if name == metric}
    return SecondLook(figures, f"in duel {duel.id}", adds_up=True)


def pool_sessions(result: CaseResult, commit: str, pool: Pool) -> CaseResult:
    """Prepends the sessions of earlier duels, and keeps all of them for the next one."""
    key = commit, result.after.case.id
    if result.measured and key in pool:
        result = replace(result, sessions=(*pool[key].sessions, *result.sessions))
    if result.measured:
        pool[key] = result
    return result


def times_as_long(request: Request, sessions: int) -> float:
    """Returns how many times as long a second duel of all its cases takes as one with this many sessions."""
    rounds = request.rounds or QUICK_ROUNDS
    longer = max(LEAST_ROUNDS, rounds) / rounds if request.quick else 1.0
    return longer * max(SESSIONS, sessions) / sessions


def _full_rounds(request: Request) -> Request:
    rounds = max(LEAST_ROUNDS, request.rounds or 0) if request.quick else request.rounds
    return replace(request, trace=None, rounds=rounds)


def duel_with(
    commit: str, request: Request, store: Path, suspects: Sequence[Comparison], observer: JobObserver, pool: Pool
) -> SecondLook | None:
    """Duels the current code with a commit; returns None if the repository does not have it."""
    if find_commit(commit, Path()) is None:
        return None
    is_fp8bench = Path.cwd().resolve().is_relative_to(PACKAGE.parent)
    question = DuelQuestion(against_self=commit) if is_fp8bench else DuelQuestion(against=commit)
    look = duel_suspects(question, request, store, suspects, observer, pool)
    if look.refused:
        observer.note(f"gate: no duel ({look.refused}); what is suspected is measured again alone")
    return look


def remeasure_cases(run: Run, cases: Collection[str], store: Path, observer: JobObserver) -> tuple[Run | None, str]:
    run_store = store_of(Path(run.path)) or store
    try:
        with observer.measuring() as progress:
            rerun = measure_again(
                replace(run, request=_full_rounds(run.request)), cases, run_store, progress, command_line()
            )
    except Fp8benchError as error:
        return None, str(error).rstrip(".")
    if not rerun.finished:
        raise KeyboardInterrupt
    observer.note(into_history(rerun, run_store))
    return rerun, ""


_MOST_LISTED = 5


def compare_sides(word_a: str, word_b: str, store: Path, observer: JobObserver) -> GateSource:
    """Compares two named sides. A missing first side is a problem, not wrong usage."""
    title = f"{word_b} against {word_a}"
    # 1. First builds have no baseline, but a missing second side is a mistake.
    missing: list[StoreError] = []
    sides = []
    for word in (word_a, word_b):
        try:
            sides.append(read_runs(find_runs(word, store), observer))
        except StoreError as error:
            missing.append(error)
            sides.append([])
    if len(missing) == 2:
        raise StoreError(f"neither side exists: {missing[0]} {missing[1]}")
    old, new = sides
    if missing and new:
        return GateSource(title, problem=f"the baseline is missing: {missing[0]}", code=EXIT_BASELINE)
    if missing:
        raise missing[0]
    # 2. Sides without common cases are a problem, which lists what they have.
    compared = compared_of(word_a, old, word_b, new, observer)
    title = f"{side_words(compared.after)}; against {side_words(compared.before)}"
    problem, code = _problem(compared)
    if problem:
        return GateSource(title, compared.comparisons, problem=problem, code=code)

    # 3. Suspects are duelled if the commit is known, otherwise re-measured.
    pool: Pool = {}

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        return _second_look(compared, suspects, store, observer, pool)

    # 4. Collect unmeasured cases, changed conditions, and cases of only one side.
    cut_off = unmeasured_cases(compared.after.runs, Evidence.CROSS_RUN)
    second = Second.DUEL if _commit_to_duel(compared, compared.after.runs[-1]) is not None else Second.AGAIN
    notes = [f"{fact.name} was {fact.before:.60} and is {fact.after:.60}" for fact in compared.differing]
    for words, cases in (("is gone", compared.only_before), ("is new", compared.only_after)):
        notes += [f"{case} {words}" for case in cases[:_MOST_LISTED]]
        if cases[_MOST_LISTED:]:
            notes.append(f"and {len(cases) - _MOST_LISTED} more")
    lost = frozenset(case for case, sightings in compared.before.sightings.items() if sightings[-1].record.is_ok)
    budget = compared.after.runs[-1].request.budget
    return GateSource(
        title, (*compared.comparisons, *cut_off), confirm, tuple(notes), second=second, lost=lost, budget=budget
    )


def _problem(compared: Compared) -> tuple[str, int]:
    has_failed = any(comparison.failed for comparison in compared.comparisons)
    if not compared.after.is_measured:
        return ("" if has_failed else f"no case of {compared.after.name} came to a number."), EXIT_FAILED
    # A case that fails now is judged, even if the others cannot be compared.
    if has_failed:
        return "", 0
    if compared.conditions:
        return (
            f"the baseline was measured under other conditions, so times do not compare: {compared.conditions}. "
            "Measure both sides alike, or duel."
        ), EXIT_BASELINE
    if not compared.comparable:
        whys = (comparison.why for comparison in compared.comparisons if comparison.why)
        return f"the baseline does not compare: {next(whys, 'they have no case in common')}.", EXIT_BASELINE
    return "", 0


def _second_look(
    compared: Compared, suspects: Sequence[Comparison], store: Path, observer: JobObserver, pool: Pool
) -> SecondLook:
    """Re-measures each suspect with the request of the newest run that has its case: suites may have separate runs."""
    newest = {suspect.case: compared.after.sightings[suspect.case][-1].run for suspect in suspects}
    by_run = together((newest[suspect.case].id, suspect) for suspect in suspects)
    looks = (_look_by_run(newest[some[0].case], compared, some, store, observer, pool) for some in by_run.values())
    return join_looks(list(looks))


def _look_by_run(
    newest: Run, compared: Compared, suspects: Sequence[Comparison], store: Path, observer: JobObserver, pool: Pool
) -> SecondLook:
    commit = _commit_to_duel(compared, newest)
    look = duel_with(commit, newest.request, store, suspects, observer, pool) if commit is not None else None
    if look is not None and not look.refused:
        return look
    rerun, refused = remeasure_cases(newest, {suspect.case for suspect in suspects}, store, observer)
    if rerun is None:
        return SecondLook({}, refused=refused)
    figures = compare(compared.before, make_side("again", [(rerun, findings(rerun))]), extra=compared.after).comparisons
    return SecondLook({key_of(figure): figure for figure in figures}, f"measured again in run {rerun.id}")


def _commit_to_duel(compared: Compared, newest: Run) -> str | None:
    """Returns the first side's commit if a duel with it would ask the same question; else None. A duel measures the
    current code on its second side, with one interpreter on both: it would not show the cost of a different torch."""
    head = find_commit("HEAD", Path())
    if head is None or newest.environment.get("commit") != head or compared.differing:
        return None
    commit, *other_commits = {run.environment.get("commit") for run in compared.before.runs}
    clean = all(run.environment.get("dirty") is False for run in compared.before.runs)
    return commit if not other_commits and isinstance(commit, str) and clean else None


def duel_revision(question: DuelQuestion, request: Request, store: Path, observer: JobObserver) -> GateSource:
    sessions = question.sessions or sessions_of(request)
    times = times_as_long(request, sessions) * (1 if request.budget is not None else MOST_LOOKS)
    observer.note(
        "gate: a time left that is shown is that of the first look; what that suspects is measured again, for up to "
        f"{times:.3g} times as long"
    )
    begun = time.monotonic()
    duel = run_duel(question, request, store, observer)
    if not duel.finished:
        raise KeyboardInterrupt
    seconds = (time.monotonic() - begun) * times_as_long(request, sessions)
    return replace(load_duel(duel.id, store, observer), look_seconds=seconds)


def load_duel(word: str, store: Path, observer: JobObserver) -> GateSource:
    path = next(iter(DuelKind().files(store)), None) if word == "last" else DuelKind().find(word, store)
    if path is None:
        raise RunNotFound(f"no duel {word!r:.200} in {store}. Give an id, a file's stem, a path, or 'last'.")
    # 1. A duel without measurements is a problem, with its notes.
    duel = DuelKind().load(path)
    title = f"duel {duel.id}: {' against '.join(side.title or side.name for side in (duel.after, duel.before))}"
    notes = (*duel.notes, *duel.troubles)
    if not any(result.measured or result.failed for result in duel.results):
        return GateSource(title, notes=notes, problem="the duel measured nothing.", code=EXIT_FAILED, duel=duel)
    # 2. Suspects are duelled again, at the same commits.
    pool: Pool = {}

    def confirm(suspects: Sequence[Comparison]) -> SecondLook:
        refused = _move_reason(duel)
        if refused:
            return SecondLook({}, refused=refused)
        # Words like HEAD may have moved since; commits have not.
        commit, is_fp8bench = duel.before.commit or None, duel.before.title.startswith(OWN)
        against, against_self = (None, commit) if is_fp8bench else (commit, None)
        sessions = max(SESSIONS, duel.sessions)
        question = DuelQuestion(duel.before.python, duel.after.python, against, against_self, sessions)
        return duel_suspects(question, duel.request, store, suspects, observer, pool)

    # 3. Cases that were not measured because of an interrupt fail.
    figures = comparisons(duel)
    compared_cases = {comparison.case for comparison in figures}
    cut_off = [
        failed_case(case, case.partition("[")[0], Evidence.PAIRED, "the duel was interrupted before it was measured")
        for case in duel.cases
        if case not in compared_cases
    ]
    # 4. A second look needs the same commit here.
    second = Second.NONE if _move_reason(duel) else Second.DUEL
    lost = frozenset(result.after.case.id for result in duel.results if not result.refused_alike)
    return GateSource(
        title, (*figures, *cut_off), confirm, notes, second=second, duel=duel, lost=lost, budget=duel.request.budget
    )


def _move_reason(duel: Duel) -> str:
    if not duel.after.commit:
        return ""
    head = find_commit("HEAD", PACKAGE if duel.before.title.startswith(OWN) else Path())
    if head == duel.after.commit:
        return ""
    return f"the duel was of commit {duel.after.commit[:8]}, and here is {head[:8] if head else 'no repository'}"
