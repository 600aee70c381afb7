"""A run in a notebook: tables as pandas frames, short names of cases, a table, a chart."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from fp8bench.analysis.findings import findings
from fp8bench.analysis.tapes import parts_of
from fp8bench.model import Case, Finding, Record, Run, Timing, Verdict
from fp8bench.model.specs import STEP
from fp8bench.report.case_status import inverse
from fp8bench.report.data.boards import check_package
from fp8bench.report.data.plain import Rows, csv_text, frame
from fp8bench.report.data.run import run_rows
from fp8bench.report.elements import Code, Element, Facts, Field, Items, Page, Table, Text, Verdicts
from fp8bench.report.page.drawing.scale import escaped
from fp8bench.report.page.section import material_of, page_of
from fp8bench.report.panels import shared_params, show_params
from fp8bench.report.topics.break_even import BreakEvenRow, break_even_rows
from fp8bench.report.topics.shares import rows_of
from fp8bench.report.words.naming import many

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SAMPLE_COLUMNS = ("case", "mode", "arm", "round", "call", "block", "phase", "nanoseconds")
# The case, the reference's second entry, and the reference itself if the case was measured apart with it.
_ARMS = ("case", "control", "reference")
# Categories take a byte or two a row, text fifty.
_REPEATED = ("case", "mode", "arm", "phase")
STATISTICS_COLUMNS = ("case", "kind", "role", "values", "amax", "format", "share_above", "share_vanishing")
ENERGY_COLUMNS = (
    "case", "mode", "source", "window", "steps", "seconds", "joules", "intervals", "uncertainty", "sm_clock",
    "temperature", "idle_before", "idle_after", "phase",
)  # fmt: skip
_MOST_ROWS = 60
_HELD = (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.UNSURE)


@dataclass(frozen=True)
class RunFrames:
    """A run and its tables, each made when first asked for; docs/outputs.md describes their columns."""

    run: Run

    @cached_property
    def results(self) -> pd.DataFrame:
        """The tidy rows, just as reading the run's CSV gives them."""
        import pandas as pd

        return pd.read_csv(io.StringIO(csv_text(*run_rows([(self.run, findings(self.run))]))), low_memory=False)

    @cached_property
    def samples(self) -> pd.DataFrame:
        import pandas as pd

        parts = [
            _samples(record, arm, timing)
            for record in self.run.records
            for arm, timing in zip(_ARMS, (record.timing, record.control, record.paired_with), strict=True)
            if timing is not None and timing.slots
        ]
        frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(SAMPLE_COLUMNS))
        return frame.astype(dict.fromkeys(_REPEATED, "category"))

    @frame
    def statistics(self) -> Rows:
        """What each group's data are before scaling: a row for each kind, role and format."""
        return STATISTICS_COLUMNS, [
            (record.case.id, statistic.kind, statistic.role, statistic.count, statistic.amax, *outside)
            for record in self.run.records
            for statistic in record.statistics
            for outside in statistic.outside or ((None, None, None),)
        ]

    @frame
    def break_even(self) -> Rows:
        rows = break_even_rows(self.run, findings(self.run))
        return BreakEvenRow._fields, [(*row[:3], show_params(row.held), *row[4:]) for row in rows]

    @frame
    def energy(self) -> Rows:
        """Every energy window of steps and phases, with the idle power around its case's windows."""
        return ENERGY_COLUMNS, [
            (
                record.case.id, record.case.mode, use.source, number, window.steps, window.seconds, window.joules,
                window.intervals, window.uncertainty, window.sm_clock, window.temperature, use.idle_before,
                use.idle_after, phase,
            )
            for record in self.run.records
            if (use := record.energy) is not None
            for phase, windows in ((STEP, use.windows), *((part.phase, part.windows) for part in use.phases))
            for number, window in enumerate(windows)
        ]  # fmt: skip

    @frame
    def shares(self) -> Rows:
        return rows_of(parts_of(self.run, findings(self.run)))


def _samples(record: Record, arm: str, timing: Timing) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    calls = np.array([call for slot in timing.slots for call in slot.calls_ns], dtype=np.int64)
    num_calls, num_cells = calls.shape
    rounds = [slot.round for slot in timing.slots for _ in slot.calls_ns]
    places = [place for slot in timing.slots for place in range(len(slot.calls_ns))]
    columns = (
        record.case.id, record.case.mode, arm, np.repeat(rounds, num_cells), np.repeat(places, num_cells),
        np.tile(timing.segments.blocks, num_calls),
        np.tile(np.array(timing.segments.phases, dtype=object), num_calls), calls.reshape(-1),
    )  # fmt: skip
    return pd.DataFrame(dict(zip(SAMPLE_COLUMNS, columns, strict=True)))


def short_names(cases: Sequence[Case]) -> dict[str, str]:
    """Ids by the shortest names that tell cases apart: the mode, and what else differs."""
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
    """Findings by short names ('bf16 shape=64'), a case's id, or words that fit one case only."""

    def __init__(self, findings: Mapping[str, Finding]) -> None:
        self._findings = findings
        self._ids = short_names([finding.case for finding in findings.values()])

    def __getitem__(self, name: str) -> Finding:
        known = self._findings.get(self._ids.get(name, name))
        if known is not None:
            return known
        cases = {key: self._findings[text].case for key, text in self._ids.items()}
        words = {key: {case.mode, case.workload, case.device, *show_params(case.params).split()}
                 for key, case in cases.items()}  # fmt: skip
        fitting = [key for key in cases if {*name.split()} <= words[key]]
        if len(fitting) == 1 and name.strip():
            return self[fitting[0]]
        shown = ", ".join((fitting or list(self._ids))[:_MOST_ROWS])
        raise KeyError(f"{name!r:.80} fits {len(fitting)} cases. Give one of: {shown}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def strip_page(run: Run, findings: Mapping[str, Finding]) -> Page:
    parts = [part for part in page_of(material_of([run], [findings])).parts if part.name == "verdict"]
    state = "" if run.finished else ", unfinished"
    title = f"{run.request.suite}, run {run.id}: {many(len(run.records), 'case')}{state}"
    return Page(title, "", tuple(replace(part, title="") for part in parts))


def as_html(page: Page, report: str = "") -> str:
    texts = [page.title, page.subtitle, *(f"{name}: {what}" for name, what in page.facts)]
    blocks = [f"<p>{escaped(text)}</p>" for text in texts if text]
    for part in page.parts:
        blocks += [f"<h4>{escaped(part.title)}</h4>"] if part.title else []
        blocks += [f"<p>{escaped(part.lead)}</p>"] if part.lead else []
        blocks += map(_element_html, part.elements)
    if report:  # a relative address below the notebook's folder, which its server can show; else the file's
        address = Path(report).as_uri() if Path(report).is_absolute() else quote(report)
        blocks.append(f'<p><a href="{escaped(address)}">{escaped(report)}</a></p>')
    return "".join(blocks)


def _element_html(element: Element) -> str:
    match element:
        case Text():
            return f"<p>{escaped(element.text)}</p>"
        case Items():
            return f"<ul>{''.join(f'<li>{escaped(item.text)}</li>' for item in element.items)}</ul>"
        case Facts():
            return "".join(f"<p>{escaped(name)}: {escaped(what)}</p>" for name, what in element.pairs)
        case Code():
            return f"<pre>{escaped(element.text)}</pre>"
        case Table():
            title = f"<p>{escaped(element.caption)}</p>" if element.caption else ""
            return title + _grid([column.title for column in element.columns], element.rows)
        case Verdicts():
            return _grid(["", *element.questions], [(Field(name), *fields) for name, fields in element.rows])
    return ""  # charts are in the report


def _grid(titles: Sequence[str], rows: Iterable[Sequence[Field]]) -> str:
    head = "".join(f"<th>{escaped(title)}</th>" for title in titles)
    words = ([f"{field.text} ({field.hint})" if field.hint else field.text for field in row] for row in rows)
    lines = "".join(f"<tr>{''.join(f'<td>{escaped(text)}</td>' for text in row)}</tr>" for row in words)
    return f"<table><tr>{head}</tr>{lines}</table>"


def speed_chart(run: Run, findings: Findings) -> Figure:
    check_package("matplotlib", "'fp8bench[plots]'", ".pyplot", wanted_by="plot()")
    import matplotlib.pyplot as plt

    ratios = ((name, finding.ratio) for name, finding in findings.items() if finding.verdict in _HELD)
    speeds = [(name, speed) for name, ratio in ratios if (speed := inverse(ratio)) is not None]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.32 * len(speeds)), layout="constrained")
    plt.close(figure)  # the caller shows it
    for place, (_, speed) in enumerate(reversed(speeds)):
        known = math.isfinite(speed.half_width) and math.isfinite(speed.low) and math.isfinite(speed.high)
        apart = [[speed.point - speed.low], [speed.high - speed.point]] if known else None
        axes.errorbar(speed.point, place, xerr=apart, fmt="o", capsize=3)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(speeds)), [name for name, _ in reversed(speeds)])
    axes.set_xlabel("speed-up over the reference, above 1 is faster")
    axes.set_title(run.request.suite if speeds else f"{run.request.suite}: no case has a speed-up")
    return figure
