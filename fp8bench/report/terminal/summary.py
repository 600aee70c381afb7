"""The end of a run's text: what it comes to in at most five lines, or of several suites as one table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.model import Run
from fp8bench.report.case_status import Standing, bounds, emulated, speed_up, standing, status_words, tone_of
from fp8bench.report.elements import Column, Element, Facts, Field, Part, Table, Text
from fp8bench.report.memories import share_of
from fp8bench.report.panels import Panel, Result, ResultGroup, together
from fp8bench.report.tensor_panels import about_tensors
from fp8bench.report.terminal.tables import main_error, value_of
from fp8bench.report.words.legend import error_word
from fp8bench.report.words.naming import common_tone
from fp8bench.report.words.speed import span

_HOW_MATRIX = "speed-up over the reference, median over a suite's cases; perhaps: a label casts doubt on some"


def summary(run: Run, panels: Sequence[Panel], width: int, report: str = "") -> Part:
    """The verdict in a few lines, no line too long, and where the run and its report are."""
    timed = [panel for panel in panels if not about_tensors(panel)]
    elements: list[Element] = []
    if len({panel.case.workload for panel in timed}) > 1:
        elements += [_matrix(timed)]
    elif timed:
        facts = {"verdict": _verdict, "speed-up": _speed_up, "error": _error, "memory": _memory}
        told = {name: _joined(list(tell(timed)), width - len(f"  {name}: ")) for name, tell in facts.items()}
        elements += [Facts(tuple((name, words) for name, words in told.items() if words))]
    stored = f"report: {report}" if report else f"stored in {run.path}" if run.path else "this run was not stored"
    return Part("summary", "summary" if elements else "", (*elements, Text(stored)))


def _cases(panels: Sequence[Panel]) -> Mapping[str, list[tuple[ResultGroup, Result]]]:
    """What is compared, by precision, in the order it was measured, with the groups that it is of."""
    found = (member for panel in panels for member in panel.members)
    return together((result.mode, (group, result)) for group, result in found if not result.record.is_reference)


def _verdict(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 perhaps faster than fp32', 'fp8 FAILED in 1 of 3 cases, emulated in 2'; what was timed first."""
    reference = " or ".join(dict.fromkeys(panel.reference for panel in panels if panel.reference))
    untimed = {mode: not any(speed_up(result) for _, result in cases) for mode, cases in _cases(panels).items()}
    for mode, cases in sorted(_cases(panels).items(), key=lambda pair: untimed[pair[0]]):
        statuses = [status_words(result) for _, result in cases]
        counts = Counter("not timed" if words == units.NONE else words for words in statuses)
        (first, number), *others = sorted(counts.items(), key=lambda pair: (pair[0] != "FAILED", -pair[1]))
        many = f" in {number} of {len(cases)} cases" if others else ""
        word = " than " if first.endswith(("faster", "slower")) else " as " if "same" in first else ""
        than = word + reference if word else ""
        yield f"{mode} {first}{than}{many}" + "".join(f", {word} in {count}" for word, count in others)


def _speed_up(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 1.90x [1.88, 1.93]', of several cases the range."""
    for mode, cases in _cases(panels).items():
        speeds = [speed for _, result in cases if (speed := speed_up(result)) is not None]
        if len(speeds) == 1:
            yield f"{mode} {units.speed_up(speeds[0].point)} {bounds(speeds[0])}"
        elif speeds:
            yield f"{mode} {span([speed.point for speed in speeds])}"


def _error(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 small (2.9e-03)', the largest of several cases."""
    for mode in _cases(panels):
        values = [
            value for panel in panels for result in panel.results
            if result.mode == mode and (value := value_of(result.record.measurement(main_error(panel)))) is not None
        ]  # fmt: skip
        if values:
            worst = max(values, key=lambda value: (value != value, abs(value)))
            yield f"{mode} {error_word(values)} ({units.relative_error(worst)})"


def _memory(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 0.626x of fp32's', the largest of several cases; that of an emulation is its cost."""
    for mode, cases in _cases(panels).items():
        known = ((share_of(group, result), group.reference) for group, result in cases)
        shares = [(share, reference) for share, reference in known if share is not None]
        if shares:
            share, reference = max(shares)
            cost = " (emulated)" if any(emulated(result) for _, result in cases) else ""
            yield f"{mode} {units.ratio(share)} of {reference}'s{cost}"


def _joined(words: Sequence[str], room: int) -> str:
    """As many as fit into one line, and how many more there are."""
    for count in range(len(words), 0, -1):
        text = "; ".join(words[:count]) + (f"; {len(words) - count} more" if count < len(words) else "")
        if len(text) <= room or count == 1:
            return text if len(text) <= room else f"{text[: room - 3]}..."
    return ""


def _matrix(panels: Sequence[Panel]) -> Table:
    """A row for each suite, a column for each precision."""
    several = len({panel.case.device for panel in panels}) > 1
    modes = list(dict.fromkeys(result.mode for panel in panels for result in panel.results))
    by_suite = together(
        (f"{panel.case.workload}{f' on {panel.case.device}' if several else ''}", one)
        for panel in panels
        for one in panel.results
    )
    rows = [
        (Field(suite), *(_cell([one for one in results if one.mode == mode]) for mode in modes))
        for suite, results in by_suite.items()
    ]
    return Table("matrix", _HOW_MATRIX, (Column("suite"), *(Column(mode) for mode in modes)), tuple(rows))


def _cell(results: Sequence[Result]) -> Field:
    """'1.90x', 'perhaps 1.90x', 'reference', 'emulated', 'FAILED'."""
    if not results:
        return Field(units.NONE)
    speeds = [speed.point for one in results if (speed := speed_up(one)) is not None]
    if not speeds or any(standing(one) is Standing.FAILED for one in results):
        worst = min(results, key=lambda one: standing(one) is not Standing.FAILED)
        return Field(status_words(worst), tone=tone_of(worst))
    doubts = any(standing(one) in (Standing.DOUBTED, Standing.UNSURE) for one in results)
    shown = units.speed_up(statistics.median(speeds))
    return Field(f"perhaps {shown}" if doubts else shown, tone=common_tone(map(tone_of, results)))
