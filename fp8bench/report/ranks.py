"""What several ranks took and sent, as the terminal and the report's page both tell it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from fp8bench import units
from fp8bench.analysis.overlaps import OFF, WAITING, overlap_of
from fp8bench.analysis.pipelines import bubble
from fp8bench.analysis.ranks import frontier, memory_skew, rank_times, skew, true_communication
from fp8bench.model import specs
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Column, Field, Table, Text, Tone
from fp8bench.report.metric_columns import column_of
from fp8bench.report.panels import Figures, Panel, Result, ResultGroup, together
from fp8bench.report.scaling import scaling
from fp8bench.report.untold import reasons, within

_RATES = (specs.ALGBW, specs.BUSBW, specs.EFFECTIVE_BUSBW)
# More ranks have no column each.
_MOST_COLUMNS = 8
FUNCTIONAL = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so that rates, skew and "
    "overlap say nothing about a cluster."
)


def ranks(panel: Panel) -> Iterator[Table | Text]:
    """Nothing of cases that one process ran."""
    if panel.case.ranks < 2:
        return
    yield from filter(None, (_times(panel), _memory(panel), _wire(panel)))
    yield from map(Text, cheapest(panel))
    yield from scaling(panel)
    beside = _overlaps(panel)
    if beside is not None:
        yield beside
        yield from map(Text, _no_overlaps(panel))
    yield from map(Text, _bubbles(panel))
    if panel.case.device == "cpu":
        yield Text(FUNCTIONAL)


def _times(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        Column("slowest", number=True, unit="s", hint="median of the rank that was slowest on the whole"),
        Column("fastest", number=True, unit="s"),
        column_of(specs.RANK_SKEW), column_of(specs.COMMUNICATION),
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


def _memory(panel: Panel) -> Table | None:
    """A column a rank, where they are few."""
    known = [(group, one, one.record.memory) for group, one in panel.members]
    told = [(group, result, use) for group, result, use in known if use is not None and use.ranks]
    if not told:
        return None
    each = panel.case.ranks if panel.case.ranks <= _MOST_COLUMNS else 0
    columns = (
        Column("", shared=True), Column("case"),
        *(Column(f"rank {rank}", number=True, unit="B") for rank in range(each)),
        *(() if each else (Column("most", number=True, unit="B"), Column("least", number=True, unit="B"))),
        column_of(specs.MEMORY_SKEW),
    )  # fmt: skip
    rows = []
    for group, result, use in told:
        peaks = [one.peak for one in use.ranks]
        shown = peaks if each else [max(peaks), min(peaks)]
        numbers = [_number(float(peak), "B") for peak in shown]
        numbers.append(_number((memory_skew(use) or 0.0) * 100, "%"))
        rows.append((Field(panel.place(group)), Field(result.mode), *numbers))
    return Table("rank-memory", "memory of each rank at the highest point of a step", columns, tuple(rows))


def _wire(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        *map(column_of, (specs.WIRE_BYTES, specs.LOGICAL_BYTES, *_RATES)),
        Column("SQNR", number=True, unit="dB"), Column("saturated", number=True, unit="ppm"),
        Column("flushed", number=True, unit="%"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        sent = result.record.transfer
        if sent is None:
            continue
        tone, figures = Tone.DOUBT if emulated(result) else Tone.PLAIN, Figures(group, result)
        shown = [Field(figures.shown(one), figures[one].value, tone) for one in _RATES]
        errors = [_measured(result, name) for name in ("sqnr_db", "saturated_ppm", "flushed_percent")]
        counted = Field(units.size(sent.wire), sent.wire, hint="counted" if sent.counted else "a ring's share")
        rows.append(
            (Field(panel.place(group)), Field(result.mode), counted, _number(sent.logical, "B"), *shown, *errors)
        )
    return Table("wire", "bytes on the wire beside the error", columns, tuple(rows)) if rows else None


@dataclass(frozen=True)
class WireCost:
    """What a rank sends in one way, and what that leaves of the values.

    `way` is the precision, of FP8 how its means are composed; `words` name the case, `hint` says what was lost.
    """

    collective: str
    way: str
    words: str
    wire: float
    sqnr: float
    hint: str


def wire_costs(panel: Panel) -> dict[str, list[WireCost]]:
    """By collective. What is the same in several groups, since it has no codes, is told once."""
    found: dict[tuple[object, ...], WireCost] = {}
    for _, result in panel.members:
        sent, sqnr, params = result.record.transfer, _value(result, "sqnr_db"), dict(result.record.case.params)
        if sent is None or sqnr is None:
            continue
        collective = str(params.get("collective", panel.case.workload))
        composed = [str(params[name]) for name in ("fp8", "scaling") if name in params and sent.counted]
        way = composed[0] if composed else result.mode
        shares = (
            f"saturated {_measured(result, 'saturated_ppm').text}, flushed {_measured(result, 'flushed_percent').text}"
        )
        words = " ".join([result.mode, *composed])
        cost = WireCost(collective, way, words, sent.wire, sqnr, shares)
        found.setdefault((collective, words), cost)
    return together((one.collective, one) for one in found.values())


def cheapest(panel: Panel) -> Iterator[str]:
    """Of each collective what nothing else beats in bytes and error both."""
    for collective, costs in wire_costs(panel).items():
        best = [costs[place] for place in frontier([(one.wire, one.sqnr) for one in costs])]
        if len(best) < len(costs):
            named = [
                f"{one.words} ({units.size(one.wire)}, {units.decibels(one.sqnr)}, {one.hint})"
                for one in sorted(best, key=lambda one: one.wire)
            ]
            yield f"{collective}: nothing else sends as little with as small an error as {'; '.join(named)}."


def _overlaps(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        Column("products", number=True, unit="s"), Column("communication", number=True, unit="s"),
        Column("both at once", number=True, unit="s"),
        Column("check sum", number=True, hint="both in turn over the sum of both alone"),
        column_of(specs.EXPOSED), column_of(specs.HIDDEN_COMMUNICATION),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        overlap, found = result.record.overlap, overlap_of(result.record)
        if overlap is None or found is None:
            continue
        parts = [overlap.compute, overlap.communication, overlap.both]
        numbers = [_seconds(statistics.median(one) if one else None) for one in parts]
        check = units.NONE if found.check_sum is None else f"{found.check_sum:.3f}"
        off = found.exposed is OFF
        numbers.append(Field(check, found.check_sum, Tone.DOUBT if off else Tone.PLAIN))
        numbers += [within(found.exposed, units.seconds), within(found.hidden, units.percent, times=100)]
        rows.append((Field(panel.place(group)), Field(result.mode), *numbers))
    return Table("overlap", "communication beside products", columns, tuple(rows)) if rows else None


def _no_overlaps(panel: Panel) -> Iterator[str]:
    told = [(one.mode, found) for _, one in panel.members if (found := overlap_of(one.record)) is not None]
    figures = ((mode, one) for mode, found in told for one in (found.exposed, found.hidden) if one != WAITING)
    yield from reasons("overlap", figures)


def _value(result: Result, name: str) -> float | None:
    found = result.record.measurement(name)
    return None if found is None else found.samples[0]


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
    return Field(units.NONE) if found is None else _number(found.samples[0], found.unit)


def _seconds(value: float | None) -> Field:
    return Field(units.seconds(value), value)


def _number(value: float, unit: str) -> Field:
    return Field(units.shown(value, unit), value)
