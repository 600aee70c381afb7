"""Several ranks at a glance: a short table for each collective, or for all ways of training together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.analysis.ranks import Untold, efficiency, rank_times, sent_by_rank
from fp8bench.model import specs
from fp8bench.report.case_status import cost_tone, status_words, tone_of
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Table, Text, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import NamedCase, Panel, Result, ResultGroup, together, value_of
from fp8bench.report.topics.ranks import (
    COLLECTIVE,
    COMPOSED,
    FUNCTIONAL,
    SQNR,
    WireLine,
    beside,
    cheapest,
    lines_of,
    reasons,
    unbeaten,
)
from fp8bench.report.words.naming import common_tone

_WAY = "way"
# The largest rank's rows over the mean: any router leaves less than this.
_UNEVEN = 1.1
UNBEATEN = "* nothing else sends as little with as small an error"
POOLED = "What is measured beside every way of FP8 stands once, by the median of its groups."
LEGEND = (
    "algbw is the vector's bytes in the dtype that is sent over the median step of the slowest rank, busbw that times "
    "nccl-tests' factor; wire: what a rank sends, of FP8 counted; SQNR against float64. strong: one rank's step over "
    "ranks times that of all, between what rounds leave; gap: how far steps are from one rank alone, relatively"
)


def boards(panel: Panel) -> Iterator[Table]:
    """Nothing for cases of one process, or of other workloads."""
    params = dict(panel.case.params)
    if panel.case.ranks < 2:
        return
    if COLLECTIVE in params:
        for collective, lines in together((line.collective, line) for line in lines_of(panel)).items():
            yield _of_collective(collective, lines, panel)
    elif _WAY in params:
        yield _of_ways(panel)


def remarks(panel: Panel) -> Iterator[str]:
    if any(cheapest(panel)):
        yield UNBEATEN
    if any(COMPOSED[0] in dict(group.case.params) for group in panel.groups) and len(panel.groups) > 1:
        yield POOLED
    yield from filter(None, (_waiting(*member) for member in panel.members))
    told = (
        (result.mode, gain.strong) for _, result in panel.members if (gain := efficiency(result.record)) is not None
    )
    yield from reasons("efficiency", told)
    if panel.case.device == "cpu":
        yield FUNCTIONAL


def _waiting(group: ResultGroup, result: Result) -> str:
    """'fp32: of 6144 rows the experts of rank 0 multiply 4523; rank 1 waits longest ...'; '' if the load is even."""
    rows = [value_of(result.record.measurement(f"rank{rank}_rows")) for rank in range(result.record.case.ranks)]
    times = rank_times(result.record.timing) if result.record.timing is not None else ()
    counts = [count for count in rows if count is not None]
    if not times or len(counts) < len(times) or max(counts) < _UNEVEN * statistics.mean(counts):
        return ""
    most, waiting = counts.index(max(counts)), max(times, key=lambda time: time.waiting)
    rows_of_all, own = (units.whole(round(count)) for count in (sum(counts), counts[most]))
    told = f"of {rows_of_all} rows the experts of rank {most} multiply {own}"
    name = f"{group.place} {result.mode}".strip()
    return f"{name}: {told}; rank {waiting.rank} waits longest, {units.seconds(waiting.waiting)} of a step."


def _of_collective(collective: str, lines: Sequence[WireLine], panel: Panel) -> Table:
    sizes = dict.fromkeys(line.logical for line in lines if line.logical)
    size = f" of {' or '.join(map(units.size, sizes))}" if sizes else ""
    best = [line for alike in together((line.swept, line) for line in lines).values() for line in unbeaten(alike)]
    cols: list[Col[WireLine]] = [
        Col("", lambda line: line.swept, shared=True), Col("case", lambda line: line.words),
        Col("", lambda line: "*" if line in best else "", hint=UNBEATEN),
        Col("busbw", lambda line: line.middle(specs.BUSBW, line.tone), number=True, unit="B/s",
            hint="algbw times nccl-tests' factor"),
        Col("algbw", lambda line: line.middle(specs.ALGBW, line.tone), number=True, unit="B/s",
            hint="the vector's bytes as they are sent, over the median step"),
        Col("wire", lambda line: line.middle(specs.WIRE_BYTES), number=True, unit="B",
            hint="what a rank sends to others in a step"),
        Col("SQNR", lambda line: line.middle(SQNR), number=True, unit="dB", hint="against float64"),
        Col("verdict", lambda line: _verdict(line.results)), Col("lost", lambda line: line.lost, below=True),
    ]  # fmt: skip
    kept = {col.heading for col in cols} - {"", "lost"}
    return table(f"board-{collective}", f"{collective}{size}, {panel.case.ranks} ranks", cols, lines, kept=kept)


def _verdict(results: Sequence[Result]) -> Field:
    counts = together((status_words(result), result) for result in results)
    ordered = sorted(counts.items(), key=lambda pair: (pair[0] != "FAILED", -len(pair[1])))
    said = [words if len(counts) == 1 else f"{words} {len(some)}/{len(results)}" for words, some in ordered]
    return Field(", ".join(said), tone=common_tone(map(tone_of, results)))


def _of_ways(panel: Panel) -> Table:
    cols: list[Col[NamedCase]] = [
        Col("", lambda row: f"{row.group.case.param(_WAY)} {beside(panel, row.group, {_WAY})}".strip(), shared=True),
        Col("case", lambda row: row.result.mode),
        Col("verdict", lambda row: status_words(row.result), tone=lambda row: tone_of(row.result)),
        Col("pace", lambda row: Field(row.figures.rate.shown, row.figures.rate.value), number=True, unit="tok/s",
            hint="of all ranks together; none where it is the cost of emulation"),
        Col("strong", lambda row: _strong(row.result),
            hint="one rank over ranks times together, within what rounds leave"),
        Col("sent", lambda row: max(sent_by_rank(row.result.record), default=None), number=True, unit="B",
            hint="by the rank that sends most"),
        Col("memory", lambda row: ((use := row.result.record.memory) and max(
            (rank.peak for rank in use.ranks), default=use.peak)) or None, number=True, unit="B",
            hint="of the rank that takes most"),
        Col("gap", lambda row: row.figures["update_error"].value, number=True, show=units.relative_error,
            hint="relative distance of three updates from one rank's"),
    ]  # fmt: skip
    return table("board-ways", f"steps that {panel.case.ranks} ranks take together", cols, panel.members)


def _strong(result: Result) -> Field:
    gain = efficiency(result.record)
    if gain is None:
        return Field(units.NONE)
    if isinstance(gain.strong, Untold):
        return Field(gain.strong.word, None, Tone.DOUBT, gain.strong.why)
    span = units.span(gain.strong[1:], lambda value: units.percent(value, 0))
    return Field(span, gain.strong.value, cost_tone(result))


@section("rank-boards", "At a glance", 12)
def rank_boards_section(material: Material) -> Iterator[Element]:
    """The section Ranks has skew, waiting, overlap and efficiency."""
    panels = [pair for pair in titled_panels(material) if any(boards(pair[1]))]
    for number, (title, panel) in enumerate(panels, 1):
        for board in boards(panel):
            caption = board.caption if len(panels) == 1 else f"{title}: {board.caption}"
            yield replace(board, name=f"{board.name}-{number}", caption=caption)
        yield from map(Text, remarks(panel))
