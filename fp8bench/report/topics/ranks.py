"""Several ranks: how far apart they are, what they send beside what that costs in error, and what they gain on one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from fp8bench import units
from fp8bench.analysis.middles import Middle, Untold
from fp8bench.analysis.overlaps import OFF, WAITING, overlap_of
from fp8bench.analysis.pipelines import bubble
from fp8bench.analysis.ranks import frontier, memory_skew, rank_times, round_times, skew, true_communication
from fp8bench.analysis.scaling import efficiency
from fp8bench.model import specs
from fp8bench.model.ranks import Sent
from fp8bench.report.case_status import emulated
from fp8bench.report.columns import column_of
from fp8bench.report.elements import Axis, Column, Element, Field, Lines, Mark, Point, Scatter, Table, Text, Tone
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Figures, Panel, Result, ResultGroup, together

_RATES = (specs.ALGBW, specs.BUSBW, specs.EFFECTIVE_BUSBW)
# More ranks have no column each.
_MOST_COLUMNS = 8
FUNCTIONAL = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so that rates, skew and "
    "overlap say nothing about a cluster."
)
# A longer table is for who asks: its charts stand above it.
_MOST_ROWS = 16
# Fewer say nothing that the table does not; float32 beside them would leave no room for differences.
_LEAST_WAYS = 4
_ALL_BUT_EXACT_DB = 100.0


def within(
    found: Middle | Untold, show: Callable[[float | None], str], times: float = 1.0, tone: Tone = Tone.PLAIN
) -> Field:
    """'50.0% (45.0% to 55.0%)', or 'wide'."""
    if isinstance(found, Untold):
        return Field(found.word, None, Tone.DOUBT if found.word != units.NONE else Tone.PLAIN, hint=found.why)
    return Field(f"{show(found.value)} ({units.span(found[1:], show)})", found.value * times, tone)


def reasons(what: str, figures: Iterable[tuple[str, Middle | Untold]]) -> Iterator[str]:
    """Why there is no `what` of these cases, and what the words mean that stand in its place: each once."""
    untold = [(why, mode) for mode, why in figures if isinstance(why, Untold)]
    for why, modes in together(untold).items():
        if why.word == units.NONE:
            yield f"No {what} of {', '.join(dict.fromkeys(modes))}: {why.why}."
    words = [f"{why.word}: {why.why}" for why in dict.fromkeys(why for why, _ in untold) if why.word != units.NONE]
    if words:
        yield f"No {what} is told where it says {'; '.join(words)}."


def scaling(panel: Panel) -> Iterator[Table | Text]:
    """Nothing of cases that one rank could not take as well."""
    if (table := _efficiencies(panel)) is not None:
        yield table
        yield from map(Text, _none_told(panel))
    yield from filter(None, [_sent(panel)])


def _efficiencies(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        Column("one rank", number=True, unit="s", hint="a step of the whole batch by one rank, the others waiting"),
        Column("its share", number=True, unit="s", hint="a step of one rank's share of the batch by one rank"),
        Column("together", number=True, unit="s", hint="a step of the whole batch by all ranks"),
        Column("strong", number=True, unit="%", hint="one rank over ranks times together; between: what rounds leave"),
        Column("weak", number=True, unit="%", hint="its share over together; between: what rounds leave"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        found = efficiency(result.record)
        if found is None:
            continue
        times = (Field(units.seconds(one), one) for one in found.seconds)
        tone = Tone.DOUBT if emulated(result) else Tone.PLAIN
        shares = (within(one, units.percent, 100, tone) for one in (found.strong, found.weak))
        rows.append((Field(panel.place(group)), Field(result.mode), *times, *shares))
    title = f"scaling efficiency of {panel.case.ranks} ranks"
    return Table("scaling", title, columns, tuple(rows)) if rows else None


def _none_told(panel: Panel) -> Iterator[str]:
    told = [(one.mode, found) for _, one in panel.members if (found := efficiency(one.record)) is not None]
    yield from reasons("efficiency", ((mode, one) for mode, found in told for one in (found.strong, found.weak)))


def _sent(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"), Column("operation"), Column("dtype"),
        Column("calls", number=True, hint="of the rank that sends most by it"),
        Column("most", number=True, unit="B", hint="by the rank that sends most; of a collective a ring's share"),
        Column("least", number=True, unit="B", hint="by the rank that sends least"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        for (operation, dtype), each in _by_operation(result.record.sent).items():
            most = max(each, key=lambda one: one.bytes)
            least = min(one.bytes for one in each) if len(each) == panel.case.ranks else 0.0
            numbers = (Field(str(most.calls), most.calls), *(Field(units.size(b), b) for b in (most.bytes, least)))
            rows.append((Field(panel.place(group)), Field(result.mode), Field(operation), Field(dtype), *numbers))
    return Table("sent", "what a rank sends in a step, counted", columns, tuple(rows)) if rows else None


def _by_operation(sent: tuple[Sent, ...]) -> dict[tuple[str, str], list[Sent]]:
    found: dict[tuple[str, str], list[Sent]] = {}
    for one in sent:
        found.setdefault((one.operation, one.dtype), []).append(one)
    return found


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


@sections.register("ranks")
class Ranks(Section):
    """Nothing of cases that one process ran."""

    name = "ranks"
    title = "Ranks"
    lead = (
        "A step is over when its slowest rank is. What a collective takes is the least that any rank was in it: the "
        "others waited for whoever came last."
    )
    rank = 98

    def elements(self, material: Material) -> Iterator[Element]:
        for number, (title, panel) in enumerate(titled_panels(material), 1):
            yield from _costs(number, panel)
            yield from _over_time(number, panel)
            for element in ranks(panel):
                if not isinstance(element, Table):
                    yield element
                    continue
                caption, long = f"{title}: {element.caption}", len(element.rows) > _MOST_ROWS
                yield replace(element, name=f"{element.name}-{number}", caption=caption, folded=long)


def _costs(number: int, panel: Panel) -> Iterator[Scatter]:
    """Bytes on the wire beside the error, of each collective that has more than one way."""
    for collective, costs in wire_costs(panel).items():
        shown = [one for one in costs if one.sqnr < _ALL_BUT_EXACT_DB]
        if len(shown) < _LEAST_WAYS:
            continue
        points = tuple(Point(one.way, one.words, one.wire, one.sqnr, hint=one.hint) for one in shown)
        description = (
            f"What a rank sends in a step of {collective}, and the signal-to-noise ratio of what it gets: further left "
            "is less to send, further up a smaller error. What keeps more than 100 dB is left out."
        )
        yield Scatter(f"wire-{collective}-{number}", f"{collective}: bytes on the wire beside the error", description,
                      Axis("sent by a rank", "B", log=True), Axis("SQNR in dB"), points)  # fmt: skip


def _over_time(number: int, panel: Panel) -> Iterator[Lines]:
    """Each rank's median of a round, of the case whose ranks are furthest apart."""
    timed = [(group, one, one.record.timing) for group, one in panel.members if one.record.timing is not None]
    apart = [(skew(timing), group, result, timing) for group, result, timing in timed]
    told = [one for one in apart if one[0] is not None]
    if not told:
        return
    _, group, result, timing = max(told, key=lambda one: one[0] or 0.0)
    rounds = round_times(timing)
    where = " at ".join(filter(None, (result.mode, panel.place(group))))
    series = tuple(
        (f"rank {rank}", tuple(Mark(f"rank {rank}, round {place}", value) for place, value in enumerate(times, 1)))
        for rank, times in enumerate(rounds)
    )
    places = tuple(str(place) for place in range(1, len(rounds[0]) + 1))
    description = f"The step of each rank in each round of {where}, whose ranks are furthest apart."
    yield Lines(f"ranks-over-time-{number}", f"ranks over time: {where}", description, places=places,
                axis=Axis("step", "s"), series=series)  # fmt: skip
