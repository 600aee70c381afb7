"""The end of a run's text: what it comes to in at most five lines, or of several suites as one table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.model import Run
from fp8bench.report.case_status import Standing, bounds, emulated, speed_up, standing, status_words, tone_of
from fp8bench.report.elements import Column, Element, Facts, Field, Part, Table, Text, Tone
from fp8bench.report.memories import PEAK, share_of
from fp8bench.report.panels import Panel, Result, ResultGroup
from fp8bench.report.tensor_panels import about_tensors
from fp8bench.report.terminal.tables import main_error, value_of
from fp8bench.report.words.legend import error_word
from fp8bench.report.words.speed import span

_HOW_MATRIX = "speed-up over the reference, median over a suite's cases; perhaps: a label casts doubt on some"

# A precision's results with the groups they are of.
_Cases = Sequence[tuple[ResultGroup, Result]]


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


def _cases(panels: Sequence[Panel]) -> Mapping[str, _Cases]:
    """What is compared, by precision, in the order it was measured."""
    found: dict[str, list[tuple[ResultGroup, Result]]] = {}
    for panel in panels:
        for group in panel.groups:
            for result in group.results:
                if not result.record.is_reference:
                    found.setdefault(result.mode, []).append((group, result))
    return found


def _verdict(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 perhaps faster than fp32', 'fp8 FAILED in 1 of 3 cases, emulated in 2'; what was timed first."""
    reference = " or ".join(dict.fromkeys(panel.reference for panel in panels if panel.reference))
    for mode, cases in sorted(_cases(panels).items(), key=lambda pair: not _judged(pair[1])):
        counts = Counter(_status(result) for _, result in cases)
        (first, number), *others = sorted(counts.items(), key=lambda pair: (pair[0] != "FAILED", -pair[1]))
        many = f" in {number} of {len(cases)} cases" if others else ""
        than = (
            f" than {reference}"
            if first.endswith(("faster", "slower"))
            else f" as {reference}"
            if "same" in first
            else ""
        )
        yield f"{mode} {first}{than}{many}" + "".join(f", {word} in {count}" for word, count in others)


def _judged(cases: _Cases) -> bool:
    return any(speed_up(result) for _, result in cases)


def _status(result: Result) -> str:
    words = status_words(result)
    return "not timed" if words == units.NONE else words


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
        shares = [(share, group.reference) for group, result in cases if (share := _share(group, result)) is not None]
        if shares:
            share, reference = max(shares)
            cost = " (emulated)" if any(emulated(result) for _, result in cases) else ""
            yield f"{mode} {units.ratio(share)} of {reference}'s{cost}"


def _share(group: ResultGroup, result: Result) -> float | None:
    """By what it is for, where that is known, else by its peak."""
    known = share_of(group, result)
    base = next((one for one in group.results if one.record.is_reference), None)
    if known is not None or base is None:
        return known
    own, other = (value_of(one.record.measurement(PEAK)) for one in (result, base))
    return own / other if own is not None and other else None


def _joined(words: Sequence[str], room: int) -> str:
    """As many as fit into one line, and how many more there are."""
    for count in range(len(words), 0, -1):
        text = "; ".join(words[:count]) + (f"; {len(words) - count} more" if count < len(words) else "")
        if len(text) <= room or count == 1:
            return text if len(text) <= room else f"{text[: room - 3]}..."
    return ""


def _matrix(panels: Sequence[Panel]) -> Table:
    """A row for each suite, a column for each precision."""
    modes = list(dict.fromkeys(result.mode for panel in panels for result in panel.results))
    rows = []
    for suite, members in _by_suite(panels).items():
        cells = {mode: _cell([one for panel in members for one in panel.results if one.mode == mode]) for mode in modes}
        rows.append((Field(suite), *cells.values()))
    return Table("matrix", _HOW_MATRIX, (Column("suite"), *(Column(mode) for mode in modes)), tuple(rows))


def _by_suite(panels: Sequence[Panel]) -> Mapping[str, list[Panel]]:
    several = len({panel.case.device for panel in panels}) > 1
    found: dict[str, list[Panel]] = {}
    for panel in panels:
        found.setdefault(f"{panel.case.workload}{f' on {panel.case.device}' if several else ''}", []).append(panel)
    return found


def _cell(results: Sequence[Result]) -> Field:
    """'1.90x', 'perhaps 1.90x', 'reference', 'emulated', 'FAILED'."""
    if not results:
        return Field(units.NONE)
    speeds = [speed.point for one in results if (speed := speed_up(one)) is not None]
    if not speeds or any(standing(one) is Standing.FAILED for one in results):
        worst = min(results, key=lambda one: standing(one) is not Standing.FAILED)
        return Field(status_words(worst), tone=tone_of(worst))
    doubts = any(standing(one) in (Standing.DOUBTED, Standing.UNSURE) for one in results)
    tones = {tone_of(one) for one in results}
    shown = units.speed_up(statistics.median(speeds))
    return Field(f"perhaps {shown}" if doubts else shown, tone=tones.pop() if len(tones) == 1 else Tone.PLAIN)
