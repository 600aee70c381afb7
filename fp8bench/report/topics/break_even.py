"""Reports from which size on each precision is faster: on the terminal, on the page, and to other programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.break_even import BreakEven, Sweep, SweptMode, find_sweeps, iterate_swept_modes
from fp8bench.model import Finding, Params, Record, Run
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import Elements, Tables, Tone
from fp8bench.report.page.section import Material, iterate_titled_panels, section
from fp8bench.report.panels import FindingsById, Panel, ResultGroup, describe_params, group_into_panels, together
from fp8bench.report.words.legend import BREAK_EVEN_LEGEND
from fp8bench.report.words.naming import join_words

SweepWithModes = tuple[Sweep, Sequence[SweptMode]]


class _SweptRow(NamedTuple):
    sweep: Sweep
    mode: SweptMode


def _pair_records_with_findings(group: ResultGroup) -> list[tuple[Record, Finding]]:
    return [(result.record, result.finding) for result in group.results]


def list_swept_modes(panel: Panel) -> list[SweepWithModes]:
    groups = list(map(_pair_records_with_findings, panel.groups))
    axis_sweeps = find_sweeps([group.case.params for group in panel.groups])
    return [(sweep, modes) for sweep in axis_sweeps if (modes := tuple(iterate_swept_modes(sweep, groups)))]


def break_even_table(panel: Panel, title: str = "") -> Tables:
    rows = []
    for sweep, modes in list_swept_modes(panel):
        rows += [_SweptRow(sweep, mode) for mode in modes]
    if not rows:
        return

    def describe_sweep(row: _SweptRow) -> str:
        # The panel's heading has the parameters that all its groups share.
        constant_params = describe_params(pair for pair in row.sweep.fixed_params if pair not in panel.common_params)
        return f"over {row.sweep.axis}{' at ' * bool(constant_params)}{constant_params}"

    def describe_sizes(row: _SweptRow) -> str:
        points = row.sweep.indexed_sizes
        size_range_text = f"{units.whole(points[0][0])} to {units.whole(points[-1][0])}"
        return f"{row.sweep.axis} = {size_range_text}, {len(points)} sizes"

    cols: ColumnList[_SweptRow] = [
        Col("", describe_sweep, shared=True),
        Col("case", "mode.mode"),
        Col("against", "mode.base_mode"),
        Col(
            "pays",
            lambda row: describe_crossings(row.sweep.axis, row.mode.break_even) if row.mode.break_even else None,
            tone=lambda row: Tone.DOUBT if row.mode.break_even is None or row.mode.doubted_sizes else Tone.PLAIN,
        ),
        Col("measured", describe_sizes),
        Col("remarks", lambda row: "; ".join(list_remarks(row.mode)), below=True),
    ]
    yield table("break-even", f"{title}from where on it pays", cols, rows)


def describe_crossings(axis: str, break_even: BreakEven) -> str:
    """Returns where a precision is faster, as 'from m = 900 (700 to 1100) on', 'at every size' or 'nowhere'."""
    # 1. Without a crossing, all known verdicts are equal.
    if not break_even.crossings:
        verdicts = [stretch.is_faster for stretch in break_even.stretches if stretch.is_faster is not None]
        if not verdicts:
            return "cannot tell: every size is within the noise"
        if len(break_even.stretches) == 1:
            return "at every size" if verdicts[0] else "nowhere"
        return "wherever it can be told" if verdicts[0] else "nowhere that can be told"
    # 2. Combine each size where the precision becomes faster with the next size where it stops being faster.
    faster_size_ranges = []
    range_start_text = ""
    for crossing in break_even.crossings:
        size, low, high = map(_show_size, (crossing.size, crossing.low, crossing.high))
        crossing_size_text = f"{size} ({low} to {high})"
        if crossing.becomes_faster:
            range_start_text = f"from {axis} = {crossing_size_text}"
        else:
            faster_size_ranges.append(
                f"{range_start_text} to {crossing_size_text}"
                if range_start_text
                else f"up to {axis} = {crossing_size_text}"
            )
            range_start_text = ""
    if range_start_text:
        faster_size_ranges.append(f"{range_start_text} on")
    return " and ".join(faster_size_ranges)


def _show_size(size: float) -> str:
    return units.whole(round(size))


def list_remarks(mode: SweptMode) -> Iterator[str]:
    break_even = mode.break_even
    if break_even is None and mode.points:
        yield "too few sizes with a ratio"
    if break_even is not None:
        unclear_size_ranges = []
        for stretch in break_even.stretches:
            # Near a break-even size, unclear results are expected. So sizes between its bounds get no remark.
            is_near_break_even = any(
                crossing.low <= stretch.first_size <= crossing.high for crossing in break_even.crossings
            )
            if stretch.is_faster is None and not is_near_break_even:
                unclear_size_ranges.append(" to ".join(map(_show_size, (stretch.first_size, stretch.last_size))))
        if unclear_size_ranges:
            yield f"too close to tell from {join_words(unclear_size_ranges)}"
        if break_even.within_noise:
            yield f"within the noise: {_join_sweep_sizes(break_even.within_noise)}"
        if not break_even.level:
            yield "a quick run: in brackets is the range of the rounds, not a confidence interval"
    for reason, sizes in together((reason, size) for size, reason in mode.missing_ratios).items():
        yield f"no ratio at {_join_sweep_sizes(sizes)}: {reason}"
    if mode.doubted_sizes:
        yield f"labels cast doubt on {_join_sweep_sizes(mode.doubted_sizes)}"


def _join_sweep_sizes(sizes: Sequence[int]) -> str:
    return join_words([units.whole(size) for size in sizes], 6)


class BreakEvenRow(NamedTuple):
    """A size at which a precision becomes faster than `against`, or stops being faster if `begins` is False. `low` and
    `high` bound the size. A sweep without such a size has one row, in which these are None.

    `pays` describes the whole sweep, as 'at every size' or 'nowhere'. It is '' if too few sizes have a ratio. `axis` is
    the swept parameter, which was measured from `smallest` to `largest`. `held` has the constant parameters.
    """

    suite: str
    device: str
    axis: str
    held: Params
    mode: str
    against: str
    pays: str
    size: float | None
    low: float | None
    high: float | None
    begins: bool | None
    confidence: float | None
    smallest: int
    largest: int
    remarks: str


def iterate_break_even_rows(run: Run, findings: FindingsById) -> Iterator[BreakEvenRow]:
    for panel in group_into_panels(run, findings):
        for sweep, modes in list_swept_modes(panel):
            sizes = [size for size, _ in sweep.indexed_sizes]
            for mode in modes:
                leading_row_fields = (
                    panel.suite,
                    panel.device,
                    sweep.axis,
                    sweep.fixed_params,
                    mode.mode,
                    mode.base_mode,
                )
                break_even = mode.break_even
                crossings_text = describe_crossings(sweep.axis, break_even) if break_even else ""
                # A level of 0 marks the range of a few rounds, which has no confidence.
                level = break_even.level or None if break_even else None
                trailing_row_fields = (level, sizes[0], sizes[-1], "; ".join(list_remarks(mode)))
                for crossing in break_even.crossings if break_even else ():
                    yield BreakEvenRow(*leading_row_fields, crossings_text, *crossing, *trailing_row_fields)
                # A sweep without a crossing has one row, with the verdict for all its sizes.
                if not break_even or not break_even.crossings:
                    yield BreakEvenRow(
                        *leading_row_fields, crossings_text, None, None, None, None, *trailing_row_fields
                    )


@section("break-even", "From which size on it pays", 75, lead=BREAK_EVEN_LEGEND)
def break_even_section(material: Material) -> Elements:
    for title, panel in iterate_titled_panels(material):
        yield from break_even_table(panel, f"{title}: ")
