"""What a gate judges: comparisons, what they are of, and the cases that were planned and never measured.

A run or a duel that was cut off is not green for its first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fp8bench.analysis.gate.judging import Judged, Outcome, SecondLook, Verdict, first_look, second_look
from fp8bench.analysis.gate.power import Newest, Second, sights_of, sights_of_history
from fp8bench.analysis.gate.sight import USUAL_POWER, Sights
from fp8bench.analysis.gate.thresholds import Rule
from fp8bench.analysis.metric import TIME
from fp8bench.errors import EXIT_BASELINE, EXIT_OK
from fp8bench.jobs.observer import JobObserver
from fp8bench.model import Comparison, Direction, Evidence, Run

Confirm = Callable[[Sequence[Comparison]], SecondLook]


@dataclass(frozen=True)
class Source:
    """Comparisons and what they are of. `confirm` measures suspects again, `second` says how.

    `problem` says why there is nothing to judge, and `code` is the exit code that it stands for. A history has
    `newest`, its series as they are now; the comparisons are its changes alone.
    """

    title: str
    comparisons: tuple[Comparison, ...] = ()
    confirm: Confirm | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
    second: Second = Second.AGAIN
    newest: tuple[Newest, ...] = ()


def failed(case: str, suite: str, evidence: Evidence, why: str) -> Comparison:
    """A case that came to nothing where it should have."""
    return Comparison(case, suite, TIME, "s", Direction.NONE, evidence, why=why, failed=True)


def unmeasured(runs: Sequence[Run], evidence: Evidence) -> Iterator[Comparison]:
    """The cases that unfinished runs lack, where no other of these runs has them."""
    there = {record.case.id for run in runs for record in run.records}
    for run in runs:
        for planned in (one for group in run.plan for one in group.cases):
            if not run.finished and planned.case.id not in there:
                there.add(planned.case.id)
                why = f"run {run.id} was interrupted before it was measured"
                yield failed(planned.case.id, planned.case.workload, evidence, why)


def judged(
    source: Source, rules: tuple[Rule, ...], rerun: bool, observer: JobObserver, required: float | None = None
) -> Verdict:
    """Both looks; the second only where there is something to look at, and somebody may; and what could be seen.

    A slow-down as large as its threshold must be seen in the share `required` of builds. A history that has nothing to
    compare with yet is too young for that, and no failure.
    """
    figures = first_look(source.comparisons, rules)
    sights = _sights(source, figures, rules, rerun, required)
    suspects = [figure.comparison for figure in figures if figure.outcome is Outcome.TO_CONFIRM]
    if suspects and not source.problem:
        if rerun and source.confirm is not None:
            observer.note(f"gate: {len(suspects)} suspected, measured again")
            figures = second_look(figures, source.confirm(suspects), rules)
        else:
            figures = second_look(figures, SecondLook({}, refused="--no-rerun"), rules)
    code = source.code
    if required is not None and code == EXIT_BASELINE and sights.young and not sights.blind:
        code = EXIT_OK
    return Verdict(source.title, figures, source.notes, source.problem, code, sights)


def _sights(
    source: Source, figures: tuple[Judged, ...], rules: tuple[Rule, ...], rerun: bool, required: float | None
) -> Sights:
    """What could have been seen, of the series of a history or of the figures of two sides."""
    second = source.second if rerun and source.confirm is not None else Second.NONE
    power = USUAL_POWER if required is None else required
    if source.newest:
        return sights_of_history(source.newest, rules, len(figures), second, power, required is not None)
    return sights_of(figures, second, power, required is not None)
