"""Several ranks: how far apart they are, what they send at what error, and their gain over one rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

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
from fp8bench.model import Params, Timing, specs
from fp8bench.model.ranks import Overlap, RankScaling, Sent, Transfer
from fp8bench.report.case_status import cost_tone
from fp8bench.report.columns import Col, case_cols, figure_col, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Texts, Tone
from fp8bench.report.page.section import Material, name_tables, section, titled_panels
from fp8bench.report.panels import Cases, Figures, NamedCase, Panel, Result, ResultGroup, join_parts, together

_RATES = (specs.ALGBW, specs.BUSBW, specs.EFFECTIVE_BUSBW)
FUNCTIONAL = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so that rates, skew and "
    "overlap say nothing about a cluster."
)
_COLLECTIVE = "collective"
_SQNR = "sqnr_db"
_SATURATED = "saturated_ppm"
_FLUSHED = "flushed_percent"
# Parameters that only matter for FP8.
_COMPOSED = ("fp8", "scaling")
# Smaller shares of values are lost in any format.
_LOST_PERCENT = 0.01


def _show_middle(
    figure: Middle | Untold, show: Callable[[float | None], str], factor: float = 1.0, tone: Tone = Tone.PLAIN
) -> Field:
    """'50.0% (45.0% to 55.0%)', or the word for why it is unknown."""
    if isinstance(figure, Untold):
        tone = Tone.DOUBT if figure.word != units.NONE else Tone.PLAIN
        return Field(figure.word, None, tone, hint=figure.why)
    return Field(f"{show(figure.value)} ({units.span(figure[1:], show)})", figure.value * factor, tone)


def _reasons(subject: str, figures: Iterable[tuple[str, Middle | Untold]]) -> Texts:
    """Says why figures are unknown: with the modes if their fields are dashes, else with the word in their fields."""
    modes_by_reason = together((figure, mode) for mode, figure in figures if isinstance(figure, Untold))
    words = []
    for reason, modes in modes_by_reason.items():
        if reason.word == units.NONE:
            yield Text(f"No {subject} of {', '.join(dict.fromkeys(modes))}: {reason.why}.")
        else:
            words.append(f"{reason.word}: {reason.why}")
    if words:
        yield Text(f"No {subject} is told where it says {'; '.join(words)}.")


def ranks(panel: Panel) -> Iterator[Table | Text]:
    """Nothing for cases of one process."""
    if panel.case.ranks < 2:
        return
    # 1. How far ranks are apart, and what they send.
    yield from if_rows(_times(panel), wire(panel))
    yield from map(Text, cheapest(panel))
    # 2. What several ranks gain over one.
    scaled = _scaled_cases(panel)
    if scaled:
        yield _efficiencies(panel, scaled)
        figures: list[tuple[str, Middle | Untold]] = []
        for row in scaled:
            figures += [(row.result.mode, figure) for figure in row.efficiency]
        yield from _reasons("efficiency", figures)
    # 3. What is sent while products run.
    yield from if_rows(_sent_table(panel), _overlaps(panel))
    overlaps: list[tuple[str, Middle | Untold]] = []
    for _, result, overlap in panel.known(lambda result: overlap_of(result.record)):
        overlaps += [(result.mode, figure) for figure in (overlap.exposed, overlap.hidden) if figure != WAITING]
    yield from _reasons("overlap", overlaps)
    yield from _bubbles(panel)
    # Figures of a CPU look like those of a cluster, and are none.
    if panel.device == "cpu":
        yield Text(FUNCTIONAL)


def if_rows(*tables: Table) -> Tables:
    return (table for table in tables if table.rows)


class _ScaledCase(NamedTuple):
    group: ResultGroup
    result: Result
    scaling: RankScaling
    efficiency: Efficiency


def _scaled_cases(panel: Panel) -> list[_ScaledCase]:
    rows = []
    for group, result, scaling in panel.known(lambda result: result.record.scaling):
        gain = efficiency(result.record)
        if gain is not None:
            rows.append(_ScaledCase(group, result, scaling, gain))
    return rows


def _efficiencies(panel: Panel, rows: Sequence[_ScaledCase]) -> Table:
    def seconds(heading: str, of: Callable[[_ScaledCase], Sequence[float]], hint: str) -> Col[_ScaledCase]:
        return Col(heading, lambda row: _middle(of(row)), unit="s", hint=hint)

    def share(heading: str, of: Callable[[_ScaledCase], Middle | Untold], hint: str) -> Col[_ScaledCase]:
        # Efficiencies are ratios of two measurements, so that both spreads are in them.
        hint += "; between: what rounds leave"
        return Col(
            heading, lambda row: _show_middle(of(row), units.percent, 100, cost_tone(row.result)), unit="%", hint=hint
        )

    cols: list[Col[_ScaledCase]] = [
        *case_cols(""),
        seconds("one rank", lambda row: row.scaling.whole, "a step of the whole batch by one rank, the others waiting"),
        seconds("its share", lambda row: row.scaling.share, "a step of one rank's share of the batch by one rank"),
        seconds("together", lambda row: row.scaling.together, "a step of the whole batch by all ranks"),
        share("strong", lambda row: row.efficiency.strong, "one rank over ranks times together"),
        share("weak", lambda row: row.efficiency.weak, "its share over together"),
    ]
    return table("scaling", f"scaling efficiency of {panel.case.ranks} ranks", cols, rows)


class _Messages(NamedTuple):
    """What a case's ranks send by one operation in one dtype, a message for each rank."""

    group: ResultGroup
    result: Result
    sent: Sequence[Sent]


def _sent_table(panel: Panel) -> Table:
    rows = []
    for group, result in panel.members:
        by_kind = together(((message.operation, message.dtype), message) for message in result.record.sent)
        rows += [_Messages(group, result, messages) for messages in by_kind.values()]

    def least(row: _Messages) -> float:
        # A rank that sends nothing has no message.
        if len(row.sent) == panel.case.ranks:
            return min(message.bytes for message in row.sent)
        return 0.0

    def most(row: _Messages) -> Sent:
        return max(row.sent, key=attrgetter("bytes"))

    cols: list[Col[_Messages]] = [
        *case_cols(""),
        Col("operation", lambda row: row.sent[0].operation.replace("_", "-")),
        Col("dtype", lambda row: row.sent[0].dtype),
        Col("calls", lambda row: most(row).calls, show=str, hint="of the rank that sends most by it"),
        Col(
            "most",
            lambda row: most(row).bytes,
            unit="B",
            hint="by the rank that sends most; of a collective a ring's share",
        ),
        Col("least", least, unit="B", hint="by the rank that sends least"),
    ]
    return table("sent", "what a rank sends in a step, counted", cols, rows)


class _TimedRanks(NamedTuple):
    group: ResultGroup
    result: Result
    timing: Timing
    ranks: Sequence[RankTimes]


def _times(panel: Panel) -> Table:
    rows = []
    for group, result, timing in panel.known(lambda result: result.record.timing):
        if times := rank_times(timing):
            rows.append(_TimedRanks(group, result, timing, times))

    def waiting(row: _TimedRanks) -> float | None:
        if true_communication(row.timing) is None:
            return None
        return max(rank.waiting for rank in row.ranks)

    cols: list[Col[_TimedRanks]] = [
        *case_cols(""),
        Col(
            "slowest",
            lambda row: max(rank.step for rank in row.ranks),
            unit="s",
            hint="median of the rank that was slowest on the whole",
        ),
        Col("fastest", lambda row: min(rank.step for rank in row.ranks), unit="s"),
        figure_col(specs.RANK_SKEW, lambda row: (skew(row.timing) or 0.0) * 100),
        figure_col(specs.COMMUNICATION, lambda row: true_communication(row.timing)),
        Col("waiting", waiting, unit="s", hint="of the rank that waits most"),
    ]
    return table("ranks", f"{panel.case.ranks} ranks", cols, rows)


class _SentCase(NamedTuple):
    group: ResultGroup
    result: Result
    transfer: Transfer
    figures: Figures


def wire(panel: Panel) -> Table:
    rows = []
    for group, result, transfer in panel.known(lambda result: result.record.transfer):
        rows.append(_SentCase(group, result, transfer, Figures(group, result)))

    def rate(spec: specs.MetricSpec) -> Col[_SentCase]:
        return figure_col(
            spec, lambda row: Field(row.figures[spec].shown, row.figures[spec].value, cost_tone(row.result))
        )

    def error(heading: str, name: str, unit: str) -> Col[_SentCase]:
        return Col(heading, lambda row: row.figures[name].value, unit=unit)

    def wire_bytes(row: _SentCase) -> Field:
        hint = "counted" if row.transfer.counted else "a ring's share"
        return Field(units.size(row.transfer.wire), row.transfer.wire, hint=hint)

    cols: list[Col[_SentCase]] = [
        *case_cols(""),
        figure_col(specs.WIRE_BYTES, wire_bytes),
        figure_col(specs.LOGICAL_BYTES, lambda row: row.transfer.logical),
        *map(rate, _RATES),
        error("SQNR", _SQNR, "dB"),
        error("saturated", _SATURATED, "ppm"),
        error("flushed", _FLUSHED, "%"),
    ]
    return table("wire", "bytes on the wire beside the error", cols, rows)


@dataclass(frozen=True)
class WireLine:
    """One case of a collective, or the same case beside several ways of FP8: `words` say which."""

    collective: str
    words: str
    members: Cases

    @property
    def logical(self) -> float:
        transfers = (case.record.transfer for case in self.members)
        return max((transfer.logical for transfer in transfers if transfer), default=0.0)

    @property
    def cost(self) -> tuple[float, float] | None:
        """Bytes that a rank sends, and the SQNR of what it gets."""
        wire = self._median(specs.WIRE_BYTES)
        sqnr = self._median(_SQNR)
        if wire is None or sqnr is None:
            return None
        return wire, sqnr

    @property
    def losses(self) -> str:
        saturated = max(case.figures[_SATURATED].value or 0.0 for case in self.members)
        flushed = max(case.figures[_FLUSHED].value or 0.0 for case in self.members)
        return join_parts(
            f"saturated {units.describe(saturated, 'ppm')}" if saturated else "",
            f"flushed {units.percentage(flushed)}" if flushed >= _LOST_PERCENT else "",
        )

    @property
    def summary(self) -> str:
        wire, sqnr = self.cost or (0.0, 0.0)
        return join_parts(units.size(wire), units.decibels(sqnr), self.losses)

    def _median(self, name: str) -> float | None:
        values = [value for case in self.members if (value := case.figures[name].value) is not None]
        if values:
            return statistics.median(values)
        return None


def _line_key(panel: Panel, case: NamedCase, is_composed: bool) -> tuple[str, Params, str]:
    """A case's collective, the parameters that no word names, and words for its precision: 'rowwise two-shot'."""
    params = dict(case.group.case.params)
    words = [str(params[name]).replace("_", "-") for name in _COMPOSED if is_composed and name in params]
    if not words or case.mode != "fp8":
        # 'fp8' alone adds nothing to its ways.
        words.insert(0, case.mode)
    unnamed = [pair for pair in case.group.case.params if pair not in panel.shared]
    swept = tuple(pair for pair in unnamed if pair[0] not in (_COLLECTIVE, *_COMPOSED))
    collective = str(params.get(_COLLECTIVE, panel.suite))
    return collective.replace("_", "-"), swept, " ".join(words)


def _lines_of(panel: Panel) -> list[WireLine]:
    """A line for each collective, precision and setting; ways of FP8 differ in their words."""
    sent = panel.known(lambda result: result.record.transfer)
    # A counted transfer is one of our own programs, which differ by their ways.
    composed = {result.mode for _, result, transfer in sent if transfer.counted}
    cases = together((_line_key(panel, case, case.mode in composed), case) for case in panel.members)
    return [WireLine(collective, words, members) for (collective, _, words), members in cases.items()]


def _find_unbeaten(lines: Sequence[WireLine]) -> list[WireLine]:
    """Those that no other beats in both bytes and error; none if that is all of them."""
    # Only lines with a cost are compared (`wire_costs`).
    costs = [line.cost or (0.0, 0.0) for line in lines]
    best = [lines[place] for place in frontier(costs)]
    if len(best) < len(lines):
        return best
    return []


def wire_costs(panel: Panel) -> dict[str, list[WireLine]]:
    """By collective, at its largest size."""
    lines = [line for line in _lines_of(panel) if line.cost is not None]
    sizes = together((line.collective, line.logical) for line in lines)
    largest = []
    for line in lines:
        # Small messages are bound by latency, whatever their format.
        if line.logical == max(sizes[line.collective]):
            has_sizes = len(set(sizes[line.collective])) > 1
            size = f" of {units.size(line.logical)}" if has_sizes else ""
            largest.append((line.collective + size, line))
    return together(largest)


def cheapest(panel: Panel) -> Iterator[str]:
    for collective, lines in wire_costs(panel).items():
        best = sorted(_find_unbeaten(lines), key=lambda line: line.cost or ())
        if best:
            words = "; ".join(f"{line.words} ({line.summary})" for line in best)
            yield f"{collective}: nothing else sends as little with as small an error as {words}."


class _OverlapCase(NamedTuple):
    group: ResultGroup
    result: Result
    seconds: Overlap
    figures: OverlapFigures


def _overlaps(panel: Panel) -> Table:
    rows = []
    for group, result, overlap in panel.known(lambda result: result.record.overlap):
        figures = overlap_of(result.record)
        if figures is not None:
            rows.append(_OverlapCase(group, result, overlap, figures))
    cols: list[Col[_OverlapCase]] = [
        *case_cols(""),
        Col("products", lambda row: _middle(row.seconds.compute), unit="s"),
        Col("communication", lambda row: _middle(row.seconds.communication), unit="s"),
        Col("both at once", lambda row: _middle(row.seconds.both), unit="s"),
        Col(
            "check sum",
            lambda row: row.figures.check_sum,
            show="{:.3f}".format,
            tone=lambda row: Tone.DOUBT if row.figures.exposed is OFF else Tone.PLAIN,
            hint="both in turn over the sum of both alone",
        ),
        figure_col(specs.EXPOSED, lambda row: _show_middle(row.figures.exposed, units.seconds)),
        figure_col(specs.HIDDEN_COMMUNICATION, lambda row: _show_middle(row.figures.hidden, units.percent, 100)),
    ]
    return table("overlap", "communication beside products", cols, rows)


def _middle(seconds: Sequence[float]) -> float | None:
    if seconds:
        return statistics.median(seconds)
    return None


def _bubbles(panel: Panel) -> Texts:
    for group, result, share in panel.known(lambda result: bubble(result.record)):
        name = join_parts(result.mode, group.place, by=" at ")
        yield Text(
            f"{name}: for {share.measured * 100:.0f}% of the time that they compute "
            f"ranks wait or send; of equal stages that send in no time it is {share.ideal * 100:.0f}%."
        )


@section("ranks", "Ranks", 98)
def ranks_section(material: Material) -> Elements:
    """A step is over when its slowest rank is. What a collective takes is the least that any rank was in it: the others
    waited for whoever came last.
    """
    for number, (title, panel) in enumerate(titled_panels(material), 1):
        yield from name_tables(ranks(panel), number, title)
