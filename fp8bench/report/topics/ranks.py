"""Several ranks: how far apart they are, what they send at what error, and their gain over one rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from fp8bench.model import Timing, specs
from fp8bench.model.ranks import Overlap, RankScaling, Sent, Transfer
from fp8bench.report.case_status import cost_tone
from fp8bench.report.columns import Col, Cols, case_cols, figure_col, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Texts, Tone
from fp8bench.report.page.section import Material, name_tables, section, titled_panels
from fp8bench.report.panels import CaseValue, NamedCase, Panel, join_parts, together

_RATES = (specs.ALGBW, specs.BUSBW, specs.EFFECTIVE_BUSBW)
FUNCTIONAL = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so rates, skew and overlap "
    "do not apply to a cluster."
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
    """Returns '50.0% (45.0% to 55.0%)', or the word for why it is unknown."""
    if isinstance(figure, Untold):
        return Field(figure.word, tone=Tone.DOUBT if figure.word != units.NONE else Tone.PLAIN)
    return Field(f"{show(figure.value)} ({units.span(figure[1:], show)})", figure.value * factor, tone)


def _reasons(subject: str, figures: Iterable[tuple[str, Middle | Untold]]) -> Texts:
    """Yields why figures are unknown: with the modes if their fields are dashes, else with the word in their fields."""
    modes_by_reason = together((figure, mode) for mode, figure in figures if isinstance(figure, Untold))
    words = []
    for reason, modes in modes_by_reason.items():
        if reason.word == units.NONE:
            yield Text(f"No {subject} of {', '.join(dict.fromkeys(modes))}: {reason.why}.")
        else:
            words.append(f"{reason.word}: {reason.why}")
    if words:
        yield Text(f"{subject.capitalize()} is unknown where the table says {'; '.join(words)}.")


def ranks(panel: Panel) -> Iterator[Table | Text]:
    """Nothing for cases of one process."""
    if panel.case.ranks < 2:
        return
    # 1. The times of ranks, and the bytes that they send.
    yield from if_rows(_times(panel), wire(panel))
    yield from map(Text, cheapest(panel))
    # 2. The gain over one rank.
    scaled = _find_scaled(panel)
    if scaled:
        yield _efficiencies(panel, scaled)
        figures: list[tuple[str, Middle | Untold]] = []
        for row in scaled:
            figures += [(row.case.mode, figure) for figure in row.efficiency]
        yield from _reasons("efficiency", figures)
    # 3. Communication during products.
    yield from if_rows(_sent_table(panel), _overlaps(panel))
    overlaps: list[tuple[str, Middle | Untold]] = []
    for case, overlap in panel.find_values(lambda result: overlap_of(result.record)):
        overlaps += [(case.mode, figure) for figure in (overlap.exposed, overlap.hidden) if figure != WAITING]
    yield from _reasons("overlap", overlaps)
    yield from _bubbles(panel)
    # A CPU's figures look like those of a cluster.
    if panel.device == "cpu":
        yield Text(FUNCTIONAL)


def if_rows(*tables: Table) -> Tables:
    return (table for table in tables if table.rows)


class _ScaledCase(NamedTuple):
    case: NamedCase
    scaling: RankScaling
    efficiency: Efficiency


def _find_scaled(panel: Panel) -> list[_ScaledCase]:
    rows = []
    for case, scaling in panel.find_values(lambda result: result.record.scaling):
        gain = efficiency(case.record)
        if gain is not None:
            rows.append(_ScaledCase(case, scaling, gain))
    return rows


def _efficiencies(panel: Panel, rows: Sequence[_ScaledCase]) -> Table:
    def share(heading: str, of: Callable[[_ScaledCase], Middle | Untold], hint: str) -> Col[_ScaledCase]:
        return Col(
            heading, lambda row: _show_middle(of(row), units.percent, 100, cost_tone(row.case)), unit="%", hint=hint
        )

    cols: Cols[_ScaledCase] = [
        *case_cols(""),
        Col("one rank", lambda row: _middle(row.scaling.whole), unit="s", hint="the whole batch, the others wait"),
        Col("its share", lambda row: _middle(row.scaling.share), unit="s", hint="one rank's share of the batch"),
        Col("together", lambda row: _middle(row.scaling.together), unit="s", hint="the whole batch, by all ranks"),
        share(
            "strong",
            lambda row: row.efficiency.strong,
            "one rank / (ranks x together); in brackets: the range of rounds",
        ),
        share("weak", lambda row: row.efficiency.weak, "its share / together; in brackets: the range of rounds"),
    ]
    return table("scaling", f"scaling efficiency of {panel.case.ranks} ranks", cols, rows)


# The messages of a case by one operation in one dtype, one for each rank.
_Messages = CaseValue[Sequence[Sent]]


def _sent_table(panel: Panel) -> Table:
    rows: list[_Messages] = []
    for case in panel.members:
        by_kind = together(((message.operation, message.dtype), message) for message in case.record.sent)
        rows += [CaseValue(case, messages) for messages in by_kind.values()]

    def least(row: _Messages) -> float:
        # A rank that sends nothing has no message.
        if len(row.value) == panel.case.ranks:
            return min(message.bytes for message in row.value)
        return 0.0

    def most(row: _Messages) -> Sent:
        return max(row.value, key=attrgetter("bytes"))

    cols: Cols[_Messages] = [
        *case_cols(""),
        Col("operation", lambda row: row.value[0].operation.replace("_", "-")),
        Col("dtype", lambda row: row.value[0].dtype),
        Col("calls", lambda row: most(row).calls, show=str, hint="of the rank that sends most"),
        Col("most", lambda row: most(row).bytes, unit="B", hint="by the rank that sends most"),
        Col("least", least, unit="B", hint="by the rank that sends least"),
    ]
    return table("sent", "bytes that a rank sends in a step", cols, rows)


class _TimedRanks(NamedTuple):
    case: NamedCase
    timing: Timing
    ranks: Sequence[RankTimes]


def _times(panel: Panel) -> Table:
    rows = []
    for case, timing in panel.find_values(lambda result: result.record.timing):
        if times := rank_times(timing):
            rows.append(_TimedRanks(case, timing, times))

    def waiting(row: _TimedRanks) -> float | None:
        if true_communication(row.timing) is None:
            return None
        return max(rank.waiting for rank in row.ranks)

    cols: Cols[_TimedRanks] = [
        *case_cols(""),
        Col("slowest", lambda row: max(rank.step for rank in row.ranks), unit="s", hint="median of the slowest rank"),
        Col("fastest", lambda row: min(rank.step for rank in row.ranks), unit="s"),
        figure_col(specs.RANK_SKEW, lambda row: (skew(row.timing) or 0.0) * 100),
        figure_col(specs.COMMUNICATION, lambda row: true_communication(row.timing)),
        Col("waiting", waiting, unit="s", hint="of the rank that waits most"),
    ]
    return table("ranks", f"{panel.case.ranks} ranks", cols, rows)


def wire(panel: Panel) -> Table:
    def rate(spec: specs.MetricSpec) -> Col[CaseValue[Transfer]]:
        return figure_col(spec, lambda row: row.case.figures[spec].value, lambda row: cost_tone(row.case))

    def error(heading: str, name: str, unit: str) -> Col[CaseValue[Transfer]]:
        return Col(heading, lambda row: row.case.figures[name].value, unit=unit)

    cols: Cols[CaseValue[Transfer]] = [
        *case_cols(""),
        figure_col(specs.WIRE_BYTES, "value.wire"),
        figure_col(specs.LOGICAL_BYTES, "value.logical"),
        *map(rate, _RATES),
        error("SQNR", _SQNR, "dB"),
        error("saturated", _SATURATED, "ppm"),
        error("flushed", _FLUSHED, "%"),
    ]
    rows = panel.find_values(lambda result: result.record.transfer)
    return table("wire", "bytes on the wire, and the error", cols, rows)


def _name_format(case: NamedCase, is_counted: bool) -> str:
    """Returns 'bf16', or 'two-shot rowwise': the parameters of fp8bench's own collectives imply 'fp8'."""
    params = dict(case.group.case.params)
    words = [str(params[name]).replace("_", "-") for name in _COMPOSED if is_counted and name in params]
    if not words or case.mode != "fp8":
        words.insert(0, case.mode)
    return " ".join(words)


def _describe_cost(case: NamedCase, wire: float, sqnr: float) -> str:
    saturated = case.figures[_SATURATED].value or 0.0
    flushed = case.figures[_FLUSHED].value or 0.0
    return join_parts(
        units.size(wire),
        units.decibels(sqnr),
        f"saturated {units.describe(saturated, 'ppm')}" if saturated else "",
        f"flushed {units.percentage(flushed)}" if flushed >= _LOST_PERCENT else "",
    )


def cheapest(panel: Panel) -> Iterator[str]:
    """Yields for each collective the formats that no other one beats in both bytes and error, at its largest size."""
    by_collective: dict[str, list[CaseValue[Transfer]]] = {}
    for row in panel.find_values(lambda result: result.record.transfer):
        name = str(dict(row.case.group.case.params).get(_COLLECTIVE, panel.suite))
        by_collective.setdefault(name.replace("_", "-"), []).append(row)
    for collective, rows in by_collective.items():
        sizes = {row.value.logical for row in rows}
        costs: dict[str, tuple[float, float]] = {}
        words: dict[str, str] = {}
        for case, transfer in rows:
            sqnr = case.figures[_SQNR].value
            # Small messages are bound by latency, whatever their format.
            if sqnr is not None and transfer.logical == max(sizes):
                name = _name_format(case, transfer.counted)
                costs[name] = (transfer.wire, sqnr)
                words[name] = f"{name} ({_describe_cost(case, transfer.wire, sqnr)})"
        names = sorted(words, key=costs.__getitem__)
        best = frontier([costs[name] for name in names])
        # If no format is beaten, there is nothing to choose by.
        if len(best) < len(names):
            size = f" of {units.size(max(sizes))}" if len(sizes) > 1 else ""
            shown = "; ".join(words[names[place]] for place in best)
            yield f"{collective}{size}: best trade-offs of bytes and error: {shown}."


class _OverlapCase(NamedTuple):
    case: NamedCase
    seconds: Overlap
    figures: OverlapFigures


def _overlaps(panel: Panel) -> Table:
    rows = []
    for case, overlap in panel.find_values(lambda result: result.record.overlap):
        figures = overlap_of(case.record)
        if figures is not None:
            rows.append(_OverlapCase(case, overlap, figures))
    cols: Cols[_OverlapCase] = [
        *case_cols(""),
        Col("products", lambda row: _middle(row.seconds.compute), unit="s"),
        Col("communication", lambda row: _middle(row.seconds.communication), unit="s"),
        Col("both at once", lambda row: _middle(row.seconds.both), unit="s"),
        Col(
            "check sum",
            "figures.check_sum",
            show="{:.3f}".format,
            tone=lambda row: Tone.DOUBT if row.figures.exposed is OFF else Tone.PLAIN,
            hint="both in turn over the sum of both alone",
        ),
        figure_col(specs.EXPOSED, lambda row: _show_middle(row.figures.exposed, units.seconds)),
        figure_col(specs.HIDDEN_COMMUNICATION, lambda row: _show_middle(row.figures.hidden, units.percent, 100)),
    ]
    return table("overlap", "communication during products", cols, rows)


def _middle(seconds: Sequence[float]) -> float | None:
    if seconds:
        return statistics.median(seconds)
    return None


def _bubbles(panel: Panel) -> Texts:
    for case, share in panel.find_values(lambda result: bubble(result.record)):
        name = join_parts(case.mode, case.place, by=" at ")
        yield Text(
            f"{name}: ranks wait or send for {share.measured:.0%} of the time for which they compute; with equal "
            f"stages and free communication this would be {share.ideal:.0%}."
        )


@section("ranks", "Ranks", 98)
def ranks_section(material: Material) -> Elements:
    """A step ends when its slowest rank has finished. A collective's time is the shortest time that any rank spent in
    it: the other ranks also waited for the last one.
    """
    for number, (title, panel) in enumerate(titled_panels(material), 1):
        yield from name_tables(ranks(panel), number, title)
