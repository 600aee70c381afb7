"""Reads and writes the row of a benchmark in asv's results files. A row has one value for each combination of the
benchmark's parameters, in the order of itertools.product.

asv shortens rows: a column with only nulls becomes a single null, and nulls at the end are cut. In this module every
combination has a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from reprlib import repr as shown
from types import ModuleType
from typing import Any, cast

from fp8bench.errors import StoreError
from fp8bench.model.codec import MalformedValueError

# The columns of a row, in the order of asv 0.6.
COLUMNS = (
    "result",
    "params",
    "version",
    "started_at",
    "duration",
    "stats_ci_99_a",
    "stats_ci_99_b",
    "stats_q_25",
    "stats_q_75",
    "stats_number",
    "stats_repeat",
    "samples",
    "profile",
)
# The confidence level of the intervals that asv's compute_stats returns.
_INTERVAL_LEVEL = 0.99
# The parameter lists of a broken file may have more combinations than fit into memory, so a row with more than this is
# refused.
MAX_PARAM_COMBINATIONS = 100_000


@dataclass(frozen=True)
class AsvStats:
    """asv's statistics of one combination of parameters: the 99% interval of the median, the quartiles, and the number
    of samples.
    """

    ci_99_a: float
    ci_99_b: float
    q_25: float
    q_75: float
    number: int
    repeat: int


@dataclass(frozen=True)
class AsvRow:
    """A row of an asv results file: the results of one benchmark. `values`, `stats` and `samples` have one entry for
    each combination of `params`.

    `params` are texts in asv's form: the repr of each value, like "'fp8'" or "256". A value is None if the benchmark
    failed and NaN if it was not measured. `started_at` is in ms since 1970, `duration` in seconds.
    """

    params: tuple[tuple[str, ...], ...]
    version: str | None
    values: tuple[float | None, ...]
    stats: tuple[AsvStats | None, ...]
    samples: tuple[tuple[float, ...] | None, ...]
    started_at: int | None = None
    duration: float | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        count = count_param_combinations(self.params)
        if {len(self.values), len(self.stats), len(self.samples)} != {count}:
            raise MalformedValueError(
                f"{len(self.values)} values, {len(self.stats)} statistics and {len(self.samples)} lists of samples "
                f"for {count} combinations"
            )


# The value, statistics and samples of one combination of parameters.
RowFigures = tuple[float | None, AsvStats | None, tuple[float, ...] | None]
NOT_MEASURED: RowFigures = (math.nan, None, None)


def index_figures_by_params(row: AsvRow) -> dict[tuple[str, ...], RowFigures]:
    """Returns the figures of a row. The key is the combination of parameters and not its position in the row, because
    the grid may have changed since the row was written.
    """
    figures = zip(row.values, row.stats, row.samples, strict=True)
    return dict(zip(itertools.product(*row.params), figures, strict=True))


def make_row(
    params: tuple[tuple[str, ...], ...],
    version: str | None,
    figures: Mapping[tuple[str, ...], RowFigures],
    started_at: int | None,
    duration: float | None,
) -> AsvRow:
    cells = [figures.get(texts, NOT_MEASURED) for texts in itertools.product(*params)]
    values, stats, samples = zip(*cells, strict=True) if cells else ((), (), ())
    return AsvRow(params, version, values, stats, samples, started_at, duration)


def count_param_combinations(params: Iterable[Sequence[str]]) -> int:
    return math.prod(len(values) for values in params)


def are_param_lists(plain: object) -> bool:
    """Returns whether a JSON value is a list of lists of texts, like the parameters in asv's files."""
    return isinstance(plain, list) and all(map(_is_list_of_texts, plain))


def _is_list_of_texts(plain: object) -> bool:
    return isinstance(plain, list) and all(isinstance(text, str) for text in plain)


def import_asv_statistics() -> ModuleType:
    """Imports asv's statistics late, so that runs can be measured and stored without asv."""
    try:
        from asv_runner import statistics
    except ImportError as error:
        raise StoreError(
            f"asv's statistics cannot be imported ({error}): pip install 'asv_runner>=0.3,<0.4'."
        ) from None
    return cast(ModuleType, statistics)


def summarize_samples(samples: Sequence[float]) -> tuple[float | None, AsvStats | None]:
    """Returns the value and the statistics that asv computes from samples, or (None, None) without samples.

    For some samples, like values of 1e-313, asv's computation divides by zero. Then the returned interval is infinite.
    """
    if not samples:
        return None, None
    # A single sample has no interval.
    if len(samples) == 1:
        return samples[0], AsvStats(-math.inf, math.inf, samples[0], samples[0], 1, 1)
    # asv's computation is slow. If both ends of its interval are samples, compute the same figures without asv.
    sorted_samples = sorted(samples)
    count = len(sorted_samples)
    low, high = _confidence_interval_indices(count)
    if math.isfinite(low) and math.isfinite(high):
        median, first_quartile, third_quartile = (
            _interpolate(sorted_samples, index, fraction) for index, fraction in _quartile_positions(count)
        )
        return median, AsvStats(
            sorted_samples[int(low)], sorted_samples[int(high)], first_quartile, third_quartile, 1, count
        )
    # There are too few samples for such an interval, so asv estimates one.
    asv = import_asv_statistics()
    try:
        value, stats = asv.compute_stats(list(samples), 1)
    except ArithmeticError:
        value, low, high = (asv.quantile(list(samples), fraction) for fraction in (0.5, 0.25, 0.75))
        return value, AsvStats(-math.inf, math.inf, low, high, 1, count)
    return value, None if stats is None else AsvStats(**stats)


def _interpolate(sorted_samples: Sequence[float], index: int, fraction: float) -> float:
    """Interpolates linearly between the sample at this index and the next one."""
    if index == len(sorted_samples) - 1:
        return sorted_samples[index]
    return (1 - fraction) * sorted_samples[index] + fraction * sorted_samples[index + 1]


@lru_cache(maxsize=1024)
def _quartile_positions(count: int) -> list[tuple[int, float]]:
    positions = (divmod((count - 1) * share, 1) for share in (0.5, 0.25, 0.75))
    return [(int(index), share) for index, share in positions]


@lru_cache(maxsize=1024)
def _confidence_interval_indices(count: int) -> tuple[float, float]:
    """Returns the indices of the two ends of asv's confidence interval among `count` sorted samples. The indices are
    infinite if there are too few samples.

    Results are cached, because asv's computation is slow and depends only on the number of samples.
    """
    if not count:
        return -math.inf, math.inf
    return cast("tuple[float, float]", import_asv_statistics().quantile_ci(range(count), 0.5, _INTERVAL_LEVEL)[1])


def read_row(columns: Sequence[str], cells: object) -> AsvRow:
    """Returns the row that the values in a results file describe. Raises MalformedValueError for values that no
    benchmark can have.
    """
    if not isinstance(cells, list):
        raise MalformedValueError(f"expected a list, found {shown(cells)}")
    cell_by_column = dict(zip(columns, cells, strict=False))
    param_lists: Any = cell_by_column.get("params")
    if not are_param_lists(param_lists):
        raise MalformedValueError(f"'params' is {shown(param_lists)}, expected lists of texts")
    params = tuple(tuple(values) for values in param_lists)
    count = count_param_combinations(params)
    if count > MAX_PARAM_COMBINATIONS:
        raise MalformedValueError(f"its parameters have more than {MAX_PARAM_COMBINATIONS} combinations")

    def read_column(key: str, is_valid: Callable[[object], bool] = _is_plain_number) -> tuple[Any, ...]:
        return _expand_column(cell_by_column.get(key), key, count, is_valid)

    columns_of_stats = [
        read_column(
            f"stats_{field.name}", _is_64_bit_integer if field.name in ("number", "repeat") else _is_plain_number
        )
        for field in fields(AsvStats)
    ]
    stats_of_combinations = []
    for figures in zip(*columns_of_stats, strict=True):
        if 0 < figures.count(None) < len(figures):  # asv fails on a row that has only some of the statistics
            raise MalformedValueError("some statistics of a value are missing")
        stats_of_combinations.append(None if None in figures else AsvStats(*figures))
    samples = read_column("samples", lambda value: isinstance(value, list) and all(map(_is_plain_number, value)))
    return AsvRow(
        params,
        _read_scalar_cell(cell_by_column, "version", lambda value: isinstance(value, str)),
        read_column("result"),
        tuple(stats_of_combinations),
        tuple(None if sample is None else tuple(sample) for sample in samples),
        _read_scalar_cell(cell_by_column, "started_at", _is_64_bit_integer),
        _read_scalar_cell(cell_by_column, "duration", _is_plain_number),
        _read_scalar_cell(cell_by_column, "profile", lambda value: isinstance(value, str)),
    )


def _expand_column(plain: object, key: str, count: int, is_valid: Callable[[object], bool]) -> tuple[Any, ...]:
    """Returns the column of an asv row, extended to one value for each combination of parameters. The added values are
    None, because asv cuts off None at the end. Raises MalformedValueError if `is_valid` rejects a value.
    """
    cells = [] if plain is None else plain
    if not isinstance(cells, list):
        raise MalformedValueError(f"{key!r} is {shown(plain)}, expected a list")
    if len(cells) > count:
        raise MalformedValueError(f"{key!r} has {len(cells)} values for {count} combinations")
    first_invalid_cell = next(
        (cell for cell in cells if cell is not None and not is_valid(cell)),
        None,
    )
    if first_invalid_cell is not None:
        raise MalformedValueError(f"{key!r} has the value {shown(first_invalid_cell)}")
    return (*cells, *[None] * (count - len(cells)))


def _read_scalar_cell(cell_by_column: Mapping[str, Any], key: str, is_valid: Callable[[object], bool]) -> Any:
    value = cell_by_column.get(key)
    if value is not None and not is_valid(value):
        raise MalformedValueError(f"{key!r} is {shown(value)}")
    return value


def _is_plain_number(plain: object) -> bool:
    return type(plain) is float or _is_64_bit_integer(plain)


def _is_64_bit_integer(plain: object) -> bool:
    """Returns whether a JSON value is an integer of at most 64 bits, as readers of asv's files expect."""
    return type(plain) is int and abs(plain) < 1 << 63


def write_row(row: AsvRow, columns: Sequence[str]) -> list[Any]:
    """Returns the values of a row as asv writes them: without nulls at the end, and with 5 digits for statistics and
    duration.
    """
    value_by_column: dict[str, Any] = {
        "result": list(row.values),
        "samples": [None if sample is None else list(sample) for sample in row.samples],
        "version": row.version,
        "started_at": row.started_at,
        "duration": _round_to_5_digits(row.duration),
        "profile": row.profile,
    }
    for field in fields(AsvStats):
        value_by_column[f"stats_{field.name}"] = [
            _round_to_5_digits(getattr(stat, field.name, None)) for stat in row.stats
        ]
    # asv writes a column with only nulls as a single null.
    for key, column in value_by_column.items():
        if isinstance(column, list) and all(value is None for value in column):
            value_by_column[key] = None
    value_by_column["params"] = [list(values) for values in row.params]
    cells = [value_by_column.get(column) for column in columns]
    while cells and cells[-1] is None:
        cells.pop()
    return cells


def _round_to_5_digits(value: float | None) -> float | None:
    return float(f"{value:.4e}") if isinstance(value, float) else value
