"""A run in a notebook: short names of its cases, a table, a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fp8bench import units
from fp8bench.model import Case, Finding, Interval, Run, Verdict
from fp8bench.report.case_status import inverse, show_speed
from fp8bench.report.page.drawing.labels import escaped
from fp8bench.report.panels import shared_params, show_params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 60
_HELD = (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.UNSURE)


def short_names(cases: Sequence[Case]) -> dict[str, str]:
    """Ids by names that tell cases apart and no more: the mode, and the suite, parameters and device that differ."""
    shared = {
        suite: shared_params([case.params for case in cases if case.workload == suite])
        for suite in dict.fromkeys(case.workload for case in cases)
    }
    several = len({case.device for case in cases}) > 1
    names = {}
    for case in cases:
        own = show_params(pair for pair in case.params if pair not in shared[case.workload])
        words = (case.mode, case.workload if len(shared) > 1 else "", own, case.device if several else "")
        names[" ".join(filter(None, words))] = case.id
    return names


class Findings(Mapping[str, Finding]):
    """Findings by short names ('bf16 shape=64'); a case's id, or words that fit one case only, will do as well."""

    def __init__(self, findings: Mapping[str, Finding]) -> None:
        self._findings = findings
        self._ids = short_names([finding.case for finding in findings.values()])

    def __getitem__(self, name: str) -> Finding:
        known = self._findings.get(self._ids.get(name, name))
        if known is not None:
            return known
        fitting = [key for key, one in self._ids.items() if {*name.split()} <= _words(self._findings[one].case)]
        if len(fitting) == 1 and name.strip():
            return self[fitting[0]]
        shown = ", ".join((fitting or list(self._ids))[:_MOST_ROWS])
        raise KeyError(f"{name!r:.80} fits {len(fitting)} cases. Give one of: {shown}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def _words(case: Case) -> set[str]:
    return {case.mode, case.workload, case.device, *(f"{name}={value}" for name, value in case.params)}


def as_html(run: Run, findings: Findings) -> str:
    """A small table: what was measured, its verdict, and its best case."""
    cells = [
        (name, found.verdict_words, show_speed(_speed_up(found)), units.seconds(found.best_seconds))
        for name, found in list(findings.items())[:_MOST_ROWS]
    ]
    left = len(findings) - len(cells)
    rows = "".join(f"<tr>{''.join(f'<td>{escaped(text)}</td>' for text in row)}</tr>" for row in cells)
    more = f"<p>and {left} more</p>" if left else ""
    head = "".join(f"<th>{word}</th>" for word in ("case", "verdict", "speed-up", "best"))
    return f"<p>{escaped(repr(run))}</p><table><tr>{head}</tr>{rows}</table>{more}"


def _speed_up(found: Finding) -> Interval | None:
    """How many times as fast as its reference a case is; None where nothing says so."""
    return inverse(found.ratio if found.verdict in _HELD else None)


def speed_chart(run: Run, findings: Findings) -> Figure:
    """The speed-up of every case that has one, with its interval."""
    import matplotlib.pyplot as plt

    speeds = [(name, speed) for name, found in findings.items() if (speed := _speed_up(found)) is not None]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.32 * len(speeds)), layout="constrained")
    plt.close(figure)  # whoever asked shows it
    for place, (_, speed) in enumerate(reversed(speeds)):
        known = math.isfinite(speed.half_width) and math.isfinite(speed.low) and math.isfinite(speed.high)
        apart = [[speed.point - speed.low], [speed.high - speed.point]] if known else None
        axes.errorbar(speed.point, place, xerr=apart, fmt="o", capsize=3)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(speeds)), [name for name, _ in reversed(speeds)])
    axes.set_xlabel("speed-up over the reference, above 1 is faster")
    axes.set_title(run.request.suite if speeds else f"{run.request.suite}: no case has a speed-up")
    return figure
