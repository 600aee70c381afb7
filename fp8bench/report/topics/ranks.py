"""Several ranks: how far apart they are, what they send beside its error, and what they gain over one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from fp8bench import units
from fp8bench.analysis.ranks import (
    OFF,
    WAITING,
    Efficiency,
    Middle,
    OverlapFigures,
    RankTimes,
    Untold,
    bubble,
    efficiency,
    frontier,
    overlap_of,
    rank_times,
    skew,
    true_communication,
)
from fp8bench.model import Timing, specs
from fp8bench.model.ranks import Overlap, RankScaling, Sent, Transfer
from fp8bench.report.case_status import cost_tone
from fp8bench.report.columns import Col, case_cols, figure_col, table
from fp8bench.report.elements import Element, Field, Table, Text, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import Figures, NamedCase, Panel, Result, ResultGroup, together

_RATES = (specs.ALGBW, specs.BUSBW, specs.EFFECTIVE_BUSBW)
FUNCTIONAL = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so that rates, skew and "
    "overlap say nothing about a cluster."
)
_COLLECTIVE, _SQNR = "collective", "sqnr_db"
# Parameters that only matter for FP8.
_COMPOSED = ("fp8", "scaling")
_LOST = ("saturated_ppm", "flushed_percent")
# Smaller shares of values are lost in any format.
_LOST_PERCENT = 0.01


def _interval(
    figure: Middle | Untold, show: Callable[[float | None], str], times: float = 1.0, tone: Tone = Tone.PLAIN
) -> Field:
    """'50.0% (45.0% to 55.0%)', or the word for why it is unknown."""
    if isinstance(figure, Untold):
        return Field(figure.word, None, Tone.DOUBT if figure.word != units.NONE else Tone.PLAIN, hint=figure.why)
    return Field(f"{show(figure.value)} ({units.span(figure[1:], show)})", figure.value * times, tone)


def _reasons(what: str, figures: Iterable[tuple[str, Middle | Untold]]) -> Iterator[str]:
    untold = [(why, mode) for mode, why in figures if isinstance(why, Untold)]
    for why, modes in together(untold).items():
        if why.word == units.NONE:
            yield f"No {what} of {', '.join(dict.fromkeys(modes))}: {why.why}."
    words = [f"{why.word}: {why.why}" for why in dict.fromkeys(why for why, _ in untold) if why.word != units.NONE]
    if words:
        yield f"No {what} is told where it says {'; '.join(words)}."


def ranks(panel: Panel) -> Iterator[Table | Text]:
    """Nothing for cases of one process."""
    if panel.case.ranks < 2:
        return
    yield from (shown for shown in (_times(panel), wire(panel)) if shown.rows)
    yield from map(Text, cheapest(panel))
    if (gains := _efficiencies(panel)).rows:
        yield gains
        known = ((result.mode, gain) for _, result in panel.members if (gain := efficiency(result.record)) is not None)
        figures = ((mode, figure) for mode, gain in known for figure in gain)
        yield from map(Text, _reasons("efficiency", figures))
    yield from (shown for shown in (_sent_table(panel), _overlaps(panel)) if shown.rows)
    told = panel.known(lambda result: overlap_of(result.record))
    overlaps = (
        (result.mode, each)
        for _, result, overlap in told
        for each in (overlap.exposed, overlap.hidden)
        if each != WAITING
    )
    yield from map(Text, (*_reasons("overlap", overlaps), *_bubbles(panel)))
    if panel.case.device == "cpu":
        yield Text(FUNCTIONAL)


def _efficiencies(panel: Panel) -> Table:
    cols: list[Col[tuple[ResultGroup, Result, RankScaling, Efficiency]]] = [
        *case_cols(""),
        Col(
            "one rank",
            lambda row: _middle(row[2].whole),
            number=True,
            unit="s",
            hint="a step of the whole batch by one rank, the others waiting",
        ),
        Col(
            "its share",
            lambda row: _middle(row[2].share),
            number=True,
            unit="s",
            hint="a step of one rank's share of the batch by one rank",
        ),
        Col(
            "together",
            lambda row: _middle(row[2].together),
            number=True,
            unit="s",
            hint="a step of the whole batch by all ranks",
        ),
        Col(
            "strong",
            lambda row: _interval(row[3].strong, units.percent, 100, cost_tone(row[1])),
            number=True,
            unit="%",
            hint="one rank over ranks times together; between: what rounds leave",
        ),
        Col(
            "weak",
            lambda row: _interval(row[3].weak, units.percent, 100, cost_tone(row[1])),
            number=True,
            unit="%",
            hint="its share over together; between: what rounds leave",
        ),
    ]
    known = panel.known(lambda result: result.record.scaling)
    rows = [(*case, gain) for case in known if (gain := efficiency(case[1].record)) is not None]
    return table("scaling", f"scaling efficiency of {panel.case.ranks} ranks", cols, rows)


def _sent_table(panel: Panel) -> Table:
    cols: list[Col[tuple[ResultGroup, Result, Sequence[Sent]]]] = [
        *case_cols(""),
        Col("operation", lambda row: row[2][0].operation.replace("_", "-")),
        Col("dtype", lambda row: row[2][0].dtype),
        Col(
            "calls",
            lambda row: max(row[2], key=attrgetter("bytes")).calls,
            number=True,
            show=str,
            hint="of the rank that sends most by it",
        ),
        Col(
            "most",
            lambda row: max(sent.bytes for sent in row[2]),
            number=True,
            unit="B",
            hint="by the rank that sends most; of a collective a ring's share",
        ),
        Col(
            "least",
            lambda row: min(sent.bytes for sent in row[2]) if len(row[2]) == panel.case.ranks else 0.0,
            number=True,
            unit="B",
            hint="by the rank that sends least",
        ),
    ]
    sent = (
        (*case, together(((message.operation, message.dtype), message) for message in case[1].record.sent))
        for case in panel.members
    )
    rows = [(group, result, each) for group, result, known in sent for each in known.values()]
    return table("sent", "what a rank sends in a step, counted", cols, rows)


def _times(panel: Panel) -> Table:
    cols: list[Col[tuple[ResultGroup, Result, Timing, Sequence[RankTimes]]]] = [
        *case_cols(""),
        Col(
            "slowest",
            lambda row: max(arm.step for arm in row[3]),
            number=True,
            unit="s",
            hint="median of the rank that was slowest on the whole",
        ),
        Col("fastest", lambda row: min(arm.step for arm in row[3]), number=True, unit="s"),
        figure_col(specs.RANK_SKEW, lambda row: (skew(row[2]) or 0.0) * 100),
        figure_col(specs.COMMUNICATION, lambda row: true_communication(row[2])),
        Col(
            "waiting",
            lambda row: None if true_communication(row[2]) is None else max(arm.waiting for arm in row[3]),
            number=True,
            unit="s",
            hint="of the rank that waits most",
        ),
    ]
    timed = panel.known(lambda result: result.record.timing)
    rows = [(*case, times) for case in timed if (times := rank_times(case[2]))]
    return table("ranks", f"{panel.case.ranks} ranks", cols, rows)


def wire(panel: Panel) -> Table:
    errors = (("SQNR", _SQNR, "dB"), ("saturated", "saturated_ppm", "ppm"), ("flushed", "flushed_percent", "%"))
    cols: list[Col[tuple[ResultGroup, Result, Transfer, Figures]]] = [
        *case_cols(""),
        figure_col(
            specs.WIRE_BYTES,
            lambda row: Field(
                units.size(row[2].wire), row[2].wire, hint="counted" if row[2].counted else "a ring's share"
            ),
        ),
        figure_col(specs.LOGICAL_BYTES, lambda row: row[2].logical),
        *(
            figure_col(
                spec, partial(lambda spec, row: Field(row[3][spec].shown, row[3][spec].value, cost_tone(row[1])), spec)
            )
            for spec in _RATES
        ),
        *(
            Col(heading, partial(lambda name, row: row[3][name].value, name), number=True, unit=unit)
            for heading, name, unit in errors
        ),
    ]
    rows = [(*case, Figures(*case[:2])) for case in panel.known(lambda result: result.record.transfer)]
    return table("wire", "bytes on the wire beside the error", cols, rows)


@dataclass(frozen=True)
class WireLine:
    """One case of a collective, or the same case beside several ways of FP8: `words` say which."""

    collective: str
    words: str
    members: Sequence[NamedCase]

    @property
    def logical(self) -> float:
        sent = (case.result.record.transfer for case in self.members)
        return max((transfer.logical for transfer in sent if transfer), default=0.0)

    @property
    def cost(self) -> tuple[float, float] | None:
        """Bytes that a rank sends, and the SQNR of what it gets."""
        wire, sqnr = self._median(specs.WIRE_BYTES), self._median(_SQNR)
        return None if wire is None or sqnr is None else (wire, sqnr)

    @property
    def lost(self) -> str:
        figures = [case.figures for case in self.members]
        saturated, flushed = (max(own[name].value or 0.0 for own in figures) for name in _LOST)
        told = [f"saturated {units.shown(saturated, 'ppm')}"] if saturated else []
        return ", ".join(told + ([f"flushed {units.percentage(flushed)}"] if flushed >= _LOST_PERCENT else []))

    @property
    def told(self) -> str:
        wire, sqnr = self.cost or (0.0, 0.0)
        return ", ".join(filter(None, (units.size(wire), units.decibels(sqnr), self.lost)))

    def _median(self, name: str) -> float | None:
        values = [value for case in self.members if (value := case.figures[name].value) is not None]
        return statistics.median(values) if values else None


def _collective_of(panel: Panel, result: Result) -> str:
    collective = dict(result.record.case.params).get(_COLLECTIVE, panel.case.workload)
    return str(collective).replace("_", "-")


def _lines_of(panel: Panel) -> list[WireLine]:
    sent = [own for own in panel.results if own.record.transfer is not None]
    composed = {own.mode for own in sent if own.record.transfer and own.record.transfer.counted}
    told = {_COLLECTIVE, *_COMPOSED}
    named = []
    for case in panel.members:
        group, result = case
        params = dict(group.case.params)
        ways = [str(params[name]).replace("_", "-") for name in _COMPOSED if result.mode in composed and name in params]
        words = " ".join([*([] if ways and result.mode == "fp8" else [result.mode]), *ways])
        swept = tuple(pair for pair in group.case.params if pair not in panel.shared and pair[0] not in told)
        named.append(((_collective_of(panel, result), swept, words), case))
    return [WireLine(collective, words, cases) for (collective, _, words), cases in together(named).items()]


def _unbeaten(lines: Sequence[WireLine]) -> list[WireLine]:
    """Those that no other beats in both bytes and error; none if that is all of them."""
    known = [(line, cost) for line in lines if (cost := line.cost) is not None]
    best = [known[place][0] for place in frontier([cost for _, cost in known])]
    return best if len(best) < len(known) else []


def wire_costs(panel: Panel) -> dict[str, list[WireLine]]:
    """By collective, at its largest size."""
    known = [line for line in _lines_of(panel) if line.cost is not None]
    sizes = together((line.collective, line.logical) for line in known)
    largest = [line for line in known if line.logical == max(sizes[line.collective])]
    return together(
        (line.collective + (f" of {units.size(line.logical)}" if len({*sizes[line.collective]}) > 1 else ""), line)
        for line in largest
    )


def cheapest(panel: Panel) -> Iterator[str]:
    for collective, lines in wire_costs(panel).items():
        if best := sorted(_unbeaten(lines), key=lambda line: line.cost or ()):
            told = "; ".join(f"{line.words} ({line.told})" for line in best)
            yield f"{collective}: nothing else sends as little with as small an error as {told}."


def _overlaps(panel: Panel) -> Table:
    cols: list[Col[tuple[ResultGroup, Result, Overlap, OverlapFigures]]] = [
        *case_cols(""),
        Col("products", lambda row: _middle(row[2].compute), number=True, unit="s"),
        Col("communication", lambda row: _middle(row[2].communication), number=True, unit="s"),
        Col("both at once", lambda row: _middle(row[2].both), number=True, unit="s"),
        Col(
            "check sum",
            lambda row: row[3].check_sum,
            number=True,
            show="{:.3f}".format,
            tone=lambda row: Tone.DOUBT if row[3].exposed is OFF else Tone.PLAIN,
            hint="both in turn over the sum of both alone",
        ),
        figure_col(specs.EXPOSED, lambda row: _interval(row[3].exposed, units.seconds)),
        figure_col(specs.HIDDEN_COMMUNICATION, lambda row: _interval(row[3].hidden, units.percent, times=100)),
    ]
    known = panel.known(lambda result: result.record.overlap)
    rows = [(*case, figures) for case in known if (figures := overlap_of(case[1].record)) is not None]
    return table("overlap", "communication beside products", cols, rows)


def _middle(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def _bubbles(panel: Panel) -> Iterator[str]:
    for group, result, share in panel.known(lambda result: bubble(result.record)):
        who = " at ".join(filter(None, (result.mode, group.place)))
        yield (
            f"{who}: for {share.measured * 100:.0f}% of the time that they compute "
            f"ranks wait or send; of equal stages that send in no time it is {share.ideal * 100:.0f}%."
        )


@section("ranks", "Ranks", 98)
def ranks_section(material: Material) -> Iterator[Element]:
    """A step is over when its slowest rank is. What a collective takes is the least that any rank was in it: the others
    waited for whoever came last.
    """
    for number, (title, panel) in enumerate(titled_panels(material), 1):
        for element in ranks(panel):
            if not isinstance(element, Table):
                yield element
                continue
            yield replace(element, name=f"{element.name}-{number}", caption=f"{title}: {element.caption}")
