"""What several ranks took and sent, as the terminal and the report's page both tell it."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.pipelines import bubble
from fp8bench.analysis.ranks import overlap_figures, rank_times, skew, true_communication
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Column, Field, Table, Text, Tone
from fp8bench.report.panels import Panel, Result, ResultGroup

_FUNCTIONAL = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so that rates, skew and "
    "overlap say nothing about a cluster."
)


def ranks(panel: Panel) -> Iterator[Table | Text]:
    """Nothing of cases that one process ran."""
    if panel.case.ranks < 2:
        return
    yield from filter(None, (_times(panel), _wire(panel)))
    yield from map(Text, (*_overlaps(panel), *_bubbles(panel)))
    if panel.case.device == "cpu":
        yield Text(_FUNCTIONAL)


def _times(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        Column("slowest", number=True, unit="s", hint="median of the rank that was slowest on the whole"),
        Column("fastest", number=True, unit="s"),
        Column("skew", number=True, unit="%", hint="between the slowest and the fastest rank of a call"),
        Column("communication", number=True, unit="s", hint="the least that any rank was in it: what it takes"),
        Column("waiting", number=True, unit="s", hint="of the rank that waits most"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        timing = result.record.timing
        times = rank_times(timing) if timing is not None else ()
        if not times or timing is None:
            continue
        steps, waits = [one.step for one in times], [one.waiting for one in times]
        true = true_communication(timing)
        numbers = [_seconds(max(steps)), _seconds(min(steps)), _number((skew(timing) or 0.0) * 100, "%")]
        numbers += [_seconds(true), _seconds(max(waits) if true is not None else None)]
        rows.append((Field(panel.place(group)), Field(result.mode), *numbers))
    return Table("ranks", f"{panel.case.ranks} ranks", columns, tuple(rows)) if rows else None


def _wire(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        Column("wire", number=True, unit="B", hint="what a rank sends to others in a step"),
        Column("logical", number=True, unit="B", hint="the whole vector as float32"),
        Column("algbw", number=True, unit="B/s", hint="bytes of the vector as it is sent, over the median step"),
        Column("busbw", number=True, unit="B/s", hint="times nccl-tests' factor"),
        Column("effective", number=True, unit="B/s", hint="the same of the logical bytes"),
        Column("SQNR", number=True, unit="dB"), Column("saturated", number=True, unit="ppm"),
        Column("flushed", number=True, unit="%"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        sent = result.record.transfer
        if sent is None:
            continue
        seconds = result.finding.median_seconds if result.finding is not None else None
        rates = (sent.payload, sent.payload * sent.bus_factor, sent.logical * sent.bus_factor)
        tone = Tone.DOUBT if emulated(result) else Tone.PLAIN
        shown = [
            Field(units.count(one / seconds, "B/s"), one / seconds, tone) if seconds else Field(units.NONE)
            for one in rates
        ]
        errors = [_measured(result, name) for name in ("sqnr_db", "saturated_ppm", "flushed_percent")]
        counted = Field(units.size(sent.wire), sent.wire, hint="counted" if sent.counted else "a ring's share")
        rows.append(
            (Field(panel.place(group)), Field(result.mode), counted, _number(sent.logical, "B"), *shown, *errors)
        )
    return Table("wire", "bytes on the wire beside the error", columns, tuple(rows)) if rows else None


def _overlaps(panel: Panel) -> Iterator[str]:
    for group, result in panel.members:
        if result.record.overlap is None:
            continue
        found, who = overlap_figures(result.record.overlap), _who(panel, group, result)
        if found.exposed is None or found.hidden is None:
            yield f"{who}: no overlap is told: {found.why}."
        else:
            hidden = f"{found.hidden * 100:.0f}% of communication hides behind products"
            yield f"{who}: {units.seconds(found.exposed)} exposed, {hidden} (check sum {found.check_sum:.2f})."


def _bubbles(panel: Panel) -> Iterator[str]:
    for group, result in panel.members:
        found = bubble(result.record)
        if found is not None:
            yield (
                f"{_who(panel, group, result)}: for {found.measured * 100:.0f}% of the time that they compute "
                f"ranks wait or send; of equal stages that send in no time it is {found.ideal * 100:.0f}%."
            )


def _who(panel: Panel, group: ResultGroup, result: Result) -> str:
    place = panel.place(group)
    return f"{result.mode}{f' at {place}' if place else ''}"


def _measured(result: Result, name: str) -> Field:
    found = result.record.measurement(name)
    return Field(units.NONE) if found is None else _number(found.samples[0], found.unit, name)


def _seconds(value: float | None) -> Field:
    return Field(units.seconds(value), value)


def _number(value: float, unit: str, name: str = "") -> Field:
    return Field(units.shown(value, unit, name), value)
