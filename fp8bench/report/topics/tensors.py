"""Reports the errors of formats and scalings on tensors. These cases are not timed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, starmap
from operator import itemgetter
from typing import NamedTuple

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model.specs import find_metric_spec
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Tone
from fp8bench.report.page.section import Material, iterate_titled_panels, section
from fp8bench.report.panels import (
    SQNR_METRIC,
    UNDERFLOW_METRIC,
    WORST_BLOCKS_METRIC,
    NamedCase,
    Panel,
    Result,
    ResultGroup,
    median_value,
    together,
)
from fp8bench.report.terminal.layout import GAP, INDENT
from fp8bench.report.words.naming import join_words

WORST_ROWS_METRIC = "sqnr_row_p1_db"
SATURATION_METRIC = "saturation_percent"
# The title and the description of the column of each metric. docs/formats.md defines the metrics.
TENSOR_METRICS = {
    SQNR_METRIC: ("SQNR", "of the whole tensor"),
    "sqnr_row_median_db": ("rows, median", "median of the rows' SQNR"),
    WORST_ROWS_METRIC: ("rows, p1", "SQNR that 1% of the rows are below"),
    "sqnr_block_median_db": ("blocks, median", "median of the SQNR of blocks of 32 values"),
    WORST_BLOCKS_METRIC: ("blocks, p1", "SQNR that 1% of the blocks of 32 values are below"),
    "relative_error": ("relative error", "norm of the error over that of the tensor"),
    "max_ulp": (
        "max ulp",
        "largest error, divided by the distance between neighbouring values of the format; ignores saturated values",
    ),
    "cosine_loss": ("1 - cosine", "the cosine is that of the tensor and its rounded values"),
    "slope": ("slope", "1 if values neither shrink nor stretch on the whole"),
    UNDERFLOW_METRIC: ("underflow", "values that became zero"),
    "underflow_nonzero_percent": ("of non-zeros", "share of the values other than zero that became zero"),
    SATURATION_METRIC: ("saturated", "beyond the format's largest, before the clamp"),
    "subnormal_percent": ("subnormal", "below the format's smallest normal number"),
    "not_finite_percent": ("lost", "numbers that became infinite or NaN"),
    "utilisation_percent": ("utilisation", "largest magnitude over the format's largest; of blocks, the middle one"),
    "dynamic_range_octaves": ("range", "octaves from the smallest magnitude that is not zero to the largest"),
    "scale_drift_octaves": (
        "scale drift",
        "of scales from earlier steps: the largest change between steps, in octaves",
    ),
    "scale_lag_octaves": (
        "scale lag",
        "of scales from earlier steps: by how many octaves a scaled amax exceeded the format's largest",
    ),
}
# Names and default values of the options of precisions with a single format and scaling.
_FORMAT_OPTION = "format"
_SCALING_OPTION = "scaling"
_EXACT_ROUNDING_VALUE = "exact"
_SAME_FORMAT_VALUE = "same"
_ROLE_OPTIONS = ("input", "weight", "gradient")
_TENSOR_PARAM = "tensor"
_FORMAT_BITS_PATTERN = re.compile(r"e(\d+)m(\d+)")
_MAX_SHOWN_RUNNERS_UP = 3
TENSORS_LEGEND = (
    "SQNR: the tensor's power over that of its error, in dB: 6 dB more is half the error, 0 is nothing left; worst "
    "rows, blocks: the SQNR that 1% of the rows, or of blocks of 32, are below; underflow: values that became zero; "
    "saturated: values beyond the format's largest; slope: 1 if values do not shrink"
)
_OVERVIEW_CAPTION = (
    "SQNR in dB, higher is better; all other figures are in the report, in --csv and in a run of one tensor"
)
# The width of the report's page in characters: large enough to give each tensor a column.
_PAGE_WIDTH = 10_000
# If there are more tensors than this, the terminal shows only SQNRs.
_MAX_TENSORS_IN_FULL = 2
_TERMINAL_COLUMNS = (
    ("SQNR", SQNR_METRIC),
    ("worst rows", WORST_ROWS_METRIC),
    ("worst blocks", WORST_BLOCKS_METRIC),
    ("underflow", UNDERFLOW_METRIC),
    ("saturated", SATURATION_METRIC),
    ("slope", "slope"),
)


class NamedFormat(NamedTuple):
    """The format of a precision, as 'e4m3fn', and the name of the precision in tables, as 'e4m3fn row'. For a precision
    with several formats, both are its full name.
    """

    fmt: str
    name: str


def name_precision(result: Result) -> NamedFormat:
    """Returns the format and the short name of a result's precision."""
    case = result.record.case
    if case.precision_map:
        return NamedFormat(case.mode, case.mode)
    return _split_precision(case.precision)


@cache
def _split_precision(mode: str) -> NamedFormat:
    """Splits a mode (a precision with options) into its format and its short name. If the options do not give a single
    format and scaling, or if this version does not know the mode, both are the mode itself.
    """
    whole_mode_format = NamedFormat(mode, mode)
    try:
        precision = precisions.get(mode)
    except UsageError:
        return whole_mode_format
    options = precision.chosen
    if not {_FORMAT_OPTION, _SCALING_OPTION} <= {*options} or any(
        options.get(role, _SAME_FORMAT_VALUE) != _SAME_FORMAT_VALUE for role in _ROLE_OPTIONS
    ):
        return whole_mode_format
    # The format's name includes how its scales are rounded, because MX formats support several roundings.
    recipe = getattr(precision, "recipe", None)
    scaling = recipe.input.scaling if recipe is not None else None
    rounding_text = "" if scaling is None or str(scaling.rounding) == _EXACT_ROUNDING_VALUE else str(scaling.rounding)
    fmt = str(options[_FORMAT_OPTION])
    return NamedFormat(fmt, f"{fmt} {options[_SCALING_OPTION]} {rounding_text}".strip())


def tensor_name(panel: Panel, group: ResultGroup) -> str:
    params = dict(group.case.params)
    if _TENSOR_PARAM not in params:
        return group.setting_name or panel.suite
    params_of_groups = [dict(neighbour.case.params) for neighbour in panel.groups]
    # Name the shape only if the panel has this tensor in several shapes.
    params_of_same_tensor = [
        neighbour for neighbour in params_of_groups if neighbour.get(_TENSOR_PARAM) == params[_TENSOR_PARAM]
    ]
    differing_params = [
        f"{name}={value}"
        for name, value in params.items()
        if any(namesake.get(name) != value for namesake in params_of_same_tensor)
    ]
    return " ".join([str(params[_TENSOR_PARAM]), *differing_params])


def show_metric(result: Result, metric: str) -> tuple[str, float | None]:
    """Returns a metric of a result as text and as a number. If it was not measured, these are a dash and None."""
    measurement = result.record.measurement(metric)
    value = median_value(measurement)
    if measurement is None or value is None:
        return units.NONE, None
    return format_tensor_figure(value, measurement.unit), value


def format_tensor_figure(value: float, unit: str) -> str:
    """Formats a value in the short form that tables of tensors use, as '31.8' for 31.8 dB."""
    if unit == "dB":
        return units.decibels(value).removesuffix(" dB")
    if unit == units.RATIO:
        return units.format_significant_digits(value, 5) if 0.1 <= abs(value) < 10 else units.relative_error(value)
    if unit == "%":
        return units.percentage(value)
    return units.format_significant_digits(value)


def name_best_precisions(panel: Panel) -> Iterator[str]:
    """Yields a sentence for each width, as 'with 8 bits e4m3fn 1x128 has the highest SQNR in all 13 tensors of
    numerics: 31.8 to 45.0 dB'.

    If only one precision of a width was measured, this width has no sentence.
    """
    # For each width of an element in bits, a list of tensors with the SQNR of every precision.
    tensors_by_bits = together(chain.from_iterable(_sqnr_by_bits(group).items() for group in panel.groups))
    for bits, tensors in sorted(tensors_by_bits.items(), reverse=True):
        if len(set().union(*tensors)) > 1:
            yield _describe_best_precisions(bits, tensors, panel.suite)


def _sqnr_by_bits(group: ResultGroup) -> dict[int, dict[str, float]]:
    """Returns the SQNR of each precision on one tensor, by name, grouped by the bits of the precision's format."""
    sqnr_by_bits: dict[int, dict[str, float]] = {}
    for result in group.results:
        named_format, (_, value) = name_precision(result), show_metric(result, SQNR_METRIC)
        match = _FORMAT_BITS_PATTERN.match(named_format.fmt)
        # Leave out a recipe with several formats, because it has no single width.
        if match and value is not None:
            bits = 1 + int(match[1]) + int(match[2])  # the sign, the exponent and the mantissa
            sqnr_by_bits.setdefault(bits, {})[named_format.name] = value
    return sqnr_by_bits


def _describe_best_precisions(bits: int, tensors: Sequence[Mapping[str, float]], suite: str) -> str:
    best_precisions_with_sqnr = [max(sqnr_by_precision.items(), key=itemgetter(1)) for sqnr_by_precision in tensors]
    best_count_by_precision = Counter(precision for precision, _ in best_precisions_with_sqnr)
    sqnrs_of_best_precisions = [sqnr for _, sqnr in best_precisions_with_sqnr]
    low = units.decibels(min(sqnrs_of_best_precisions))
    high = units.decibels(max(sqnrs_of_best_precisions))
    sqnr_range = low if low == high else f"{low.removesuffix(' dB')} to {high}"
    (best_precision, num_wins), *runners_up = best_count_by_precision.most_common()
    num_tensors = len(tensors)
    win_count_text = f"{num_wins} of" if num_wins < num_tensors else "all"
    tensors_text = f"on {suite}" if num_tensors == 1 else f"in {win_count_text} {num_tensors} tensors of {suite}"
    tensors_text += "".join(
        f", {precision} in {tensor_count}" for precision, tensor_count in runners_up[:_MAX_SHOWN_RUNNERS_UP]
    )
    return f"with {bits} bits {best_precision} has the highest SQNR {tensors_text}: {sqnr_range}"


def tensor_tables(panel: Panel, width: int) -> Elements:
    if len(panel.groups) > _MAX_TENSORS_IN_FULL:
        yield from _make_sqnr_tables(panel, width)
        return
    has_several_groups = len(panel.groups) > 1

    def metric_column(heading: str, metric: str) -> Col[NamedCase]:
        tone = Tone.STRONG if metric == SQNR_METRIC else Tone.PLAIN
        return Col(heading, lambda case: show_metric(case, metric)[0], number=True, tone=lambda _: tone)

    cols: ColumnList[NamedCase] = [
        Col("tensor", lambda case: tensor_name(panel, case.group) if has_several_groups else "", shared=True),
        Col("precision", lambda case: name_precision(case).name),
        *starmap(metric_column, _TERMINAL_COLUMNS),
    ]
    yield table("tensors", "", cols, panel.named_cases)


def _make_sqnr_tables(panel: Panel, width: int) -> Tables:
    """Yields tables of SQNRs that fit the width: a row for each precision, and a column for each tensor."""
    case_by_mode = {case.mode: case for case in panel.named_cases}
    names = [tensor_name(panel, group) for group in panel.groups]
    precision_name_width = max(len(name_precision(result).name) for result in case_by_mode.values())

    def tensor_column(tensor_number: int) -> Col[Result]:
        fields = {
            result.mode: Field(*show_metric(result, SQNR_METRIC)) for result in panel.groups[tensor_number].results
        }
        return Col(names[tensor_number], lambda result: fields.get(result.mode), number=True)

    for number, tensor_numbers in enumerate(
        _group_columns_into_tables([len(name) for name in names], width - len(INDENT) - precision_name_width)
    ):
        cols: ColumnList[Result] = [
            Col("precision", lambda result: name_precision(result).name),
            *map(tensor_column, tensor_numbers),
        ]
        yield table("sqnr", "" if number else _OVERVIEW_CAPTION, cols, case_by_mode.values())


def _group_columns_into_tables(widths: Sequence[int], max_width: int) -> Sequence[Sequence[int]]:
    """Divides columns into tables that fit `max_width`. There are as few tables as possible, with about the same
    number of columns each.
    """
    columns = range(len(widths))
    # The last attempt has one column per table, and is used even if it is too wide.
    for num_tables in range(1, len(widths) + 1):
        size = -(-len(widths) // num_tables)
        column_groups = [columns[start : start + size] for start in columns[::size]]
        widest_table_width = max(
            sum(widths[group.start : group.stop]) + len(GAP) * len(group) for group in column_groups
        )
        if widest_table_width <= max_width:
            break
    return column_groups


@section("tensors", "Errors of tensors", 45)
def tensors_section(material: Material) -> Elements:
    """SQNR, in dB, is the power of a tensor over that of its error. 6 dB more is half the error; 0 dB means that
    nothing of the tensor is left. The largest values decide the SQNR; for small values look at the worst rows and
    blocks, and at underflow. The suite cast measures the times of casts.
    """
    panels = [(title, panel) for title, panel in iterate_titled_panels(material) if not panel.is_timed]
    for title, panel in panels:
        for overview in _make_sqnr_tables(panel, _PAGE_WIDTH):
            yield replace(overview, name=f"sqnr-{panel.suite}", caption=f"{title}: SQNR in dB, higher is better")
        for group in panel.groups:
            # Infinite and NaN values are not part of the SQNR. If there are such values, the SQNR looks too good.
            results_with_loss = [
                result for result in group.results if (show_metric(result, "not_finite_percent")[1] or 0) > 0
            ]
            if results_with_loss:
                names = join_words(name_precision(result).name for result in results_with_loss)
                explanation = f"{tensor_name(panel, group)}: numbers became infinite or NaN in {names}"
                yield Text(f"{explanation}; its SQNR leaves them out.", Tone.BAD)
    yield from (_metrics_table(title, panel) for title, panel in panels)


def _metrics_table(title: str, panel: Panel) -> Table:
    def metric_column(metric: str) -> Col[NamedCase]:
        name, hint = TENSOR_METRICS[metric]
        unit = find_metric_spec(metric).unit.removeprefix(units.RATIO)
        return Col(name, lambda case: Field(*show_metric(case, metric)), number=True, hint=hint, unit=unit)

    cols: ColumnList[NamedCase] = [
        Col("tensor", lambda case: tensor_name(panel, case.group)),
        Col("precision", lambda case: name_precision(case).name),
        *(metric_column(metric) for metric in TENSOR_METRICS if metric in panel.metrics and metric != SQNR_METRIC),
    ]
    rows = [case for case in panel.named_cases if show_metric(case, SQNR_METRIC)[1] is not None]
    return table(f"figures-{panel.suite}", f"{title}: all other figures", cols, rows, folded=True)
