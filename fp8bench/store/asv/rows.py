"""A benchmark's row in asv's results files: its value under each combination of its parameters.

Combinations are in the order of itertools.product. asv shortens rows (a column of nulls becomes null, nulls at the end
are cut); here every combination has its place.
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
from fp8bench.model.codec import Malformed

# The columns of asv 0.6, in its order.
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
# As in asv's compute_stats.
_COVERAGE = 0.99
# The lists of a broken file may multiply to more combinations than fit into memory.
MOST_COMBINATIONS = 100_000


@dataclass(frozen=True)
class Stats:
    """asv's statistics of one combination: the 99% interval of the median, quartiles, and how many samples."""

    ci_99_a: float
    ci_99_b: float
    q_25: float
    q_75: float
    number: int
    repeat: int


@dataclass(frozen=True)
class AsvRow:
    """A benchmark's results. `values`, `stats` and `samples` have one entry for each combination of `params`.

    `params` are texts as asv has them (repr of each value: "'fp8'", "256"). A value is None where the benchmark failed
    and NaN where it was not measured. `started_at` is in ms since 1970, `duration` in seconds.
    """

    params: tuple[tuple[str, ...], ...]
    version: str | None
    values: tuple[float | None, ...]
    stats: tuple[Stats | None, ...]
    samples: tuple[tuple[float, ...] | None, ...]
    started_at: int | None = None
    duration: float | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        count = combinations(self.params)
        if {len(self.values), len(self.stats), len(self.samples)} != {count}:
            raise Malformed(
                f"{len(self.values)} values, {len(self.stats)} statistics and {len(self.samples)} lists of samples "
                f"for {count} combinations"
            )


# Value, statistics and samples of one combination; and those of one that was not measured.
Figures = tuple[float | None, Stats | None, tuple[float, ...] | None]
NOT_MEASURED: Figures = (math.nan, None, None)


def by_combination(row: AsvRow) -> dict[tuple[str, ...], Figures]:
    """Returns the figures of a row by the texts of their combinations; grids may have changed since."""
    figures = zip(row.values, row.stats, row.samples, strict=True)
    return dict(zip(itertools.product(*row.params), figures, strict=True))


def row_of(
    params: tuple[tuple[str, ...], ...],
    version: str | None,
    figures: Mapping[tuple[str, ...], Figures],
    started_at: int | None,
    duration: float | None,
) -> AsvRow:
    cells = [figures.get(texts, NOT_MEASURED) for texts in itertools.product(*params)]
    values, stats, samples = zip(*cells, strict=True) if cells else ((), (), ())
    return AsvRow(params, version, values, stats, samples, started_at, duration)


def combinations(params: Iterable[Sequence[str]]) -> int:
    return math.prod(len(values) for values in params)


def are_params(plain: object) -> bool:
    """Whether this is a list of lists of texts, as parameters are in all of asv's files."""
    return isinstance(plain, list) and all(map(_are_texts, plain))


def _are_texts(plain: object) -> bool:
    return isinstance(plain, list) and all(isinstance(text, str) for text in plain)


def asv_statistics() -> ModuleType:
    """Imports asv's own statistics. It is called late, so that runs are measured and kept without them."""
    try:
        from asv_runner import statistics
    except ImportError as error:
        raise StoreError(
            f"asv's statistics cannot be imported ({error}): pip install 'asv_runner>=0.3,<0.4'."
        ) from None
    return cast(ModuleType, statistics)


def cell(samples: Sequence[float]) -> tuple[float | None, Stats | None]:
    """Returns the value and the statistics that asv makes of samples; (None, None) without any.

    asv's interval divides by zero on some samples, as on values of 1e-313; these have no interval here.
    """
    if not samples:
        return None, None
    if len(samples) == 1:
        return samples[0], Stats(-math.inf, math.inf, samples[0], samples[0], 1, 1)
    ordered = sorted(samples)
    count = len(ordered)
    low, high = _ranks(count)
    if math.isfinite(low) and math.isfinite(high):
        middle, first, third = (_interpolate(ordered, place, share) for place, share in _quartiles(count))
        return middle, Stats(ordered[int(low)], ordered[int(high)], first, third, 1, count)
    asv = asv_statistics()
    try:
        value, stats = asv.compute_stats(list(samples), 1)
    except ArithmeticError:
        value, low, high = (asv.quantile(list(samples), share) for share in (0.5, 0.25, 0.75))
        return value, Stats(-math.inf, math.inf, low, high, 1, count)
    return value, None if stats is None else Stats(**stats)


def _interpolate(ordered: Sequence[float], place: int, share: float) -> float:
    """Returns the value this share of the way from one place to the next; the last value has no next one."""
    if place == len(ordered) - 1:
        return ordered[place]
    return (1 - share) * ordered[place] + share * ordered[place + 1]


@lru_cache(maxsize=1024)
def _quartiles(count: int) -> list[tuple[int, float]]:
    parts = (divmod((count - 1) * share, 1) for share in (0.5, 0.25, 0.75))
    return [(int(place), share) for place, share in parts]


@lru_cache(maxsize=1024)
def _ranks(count: int) -> tuple[float, float]:
    """Returns the indices of the ends of asv's interval in sorted samples; infinite if these are too few.

    asv computes them for every list of samples, which takes longer than everything else.
    """
    if not count:
        return -math.inf, math.inf
    return cast("tuple[float, float]", asv_statistics().quantile_ci(range(count), 0.5, _COVERAGE)[1])


def read_row(columns: Sequence[str], cells: object) -> AsvRow:
    """Raises Malformed for what no benchmark gives."""
    if not isinstance(cells, list):
        raise Malformed(f"expected a list, found {shown(cells)}")
    named = dict(zip(columns, cells, strict=False))
    plain: Any = named.get("params")
    if not are_params(plain):
        raise Malformed(f"'params' is {shown(plain)}, expected lists of texts")
    params = tuple(tuple(values) for values in plain)
    count = combinations(params)
    if count > MOST_COMBINATIONS:
        raise Malformed(f"its parameters have more than {MOST_COMBINATIONS} combinations")

    def column(key: str, sound: Callable[[object], bool] = _is_number) -> tuple[Any, ...]:
        return _column(named.get(key), key, count, sound)

    columns_of_stats = [
        column(f"stats_{field.name}", _is_count if field.name in ("number", "repeat") else _is_number)
        for field in fields(Stats)
    ]
    stats = []
    for figures in zip(*columns_of_stats, strict=True):
        if 0 < figures.count(None) < len(figures):  # asv fails on an interval without quartiles
            raise Malformed("some statistics of a value are missing")
        stats.append(None if None in figures else Stats(*figures))
    samples = column("samples", lambda value: isinstance(value, list) and all(map(_is_number, value)))
    return AsvRow(
        params,
        _single(named, "version", lambda value: isinstance(value, str)),
        column("result"),
        tuple(stats),
        tuple(None if sample is None else tuple(sample) for sample in samples),
        _single(named, "started_at", _is_count),
        _single(named, "duration", _is_number),
        _single(named, "profile", lambda value: isinstance(value, str)),
    )


def _column(plain: object, key: str, count: int, sound: Callable[[object], bool]) -> tuple[Any, ...]:
    """Returns a value for each combination, with None where asv has shortened the column."""
    cells = [] if plain is None else plain
    if not isinstance(cells, list):
        raise Malformed(f"{key!r} is {shown(plain)}, expected a list")
    if len(cells) > count:
        raise Malformed(f"{key!r} has {len(cells)} values for {count} combinations")
    wrong = next((cell for cell in cells if cell is not None and not sound(cell)), None)
    if wrong is not None:
        raise Malformed(f"{key!r} has the value {shown(wrong)}")
    return (*cells, *[None] * (count - len(cells)))


def _single(named: Mapping[str, Any], key: str, sound: Callable[[object], bool]) -> Any:
    value = named.get(key)
    if value is not None and not sound(value):
        raise Malformed(f"{key!r} is {shown(value)}")
    return value


def _is_number(plain: object) -> bool:
    return type(plain) is float or _is_count(plain)


def _is_count(plain: object) -> bool:
    """Whether it is a whole number of 64 bits, which asv's readers expect."""
    return type(plain) is int and abs(plain) < 1 << 63


def write_row(row: AsvRow, columns: Sequence[str]) -> list[Any]:
    """Returns a row as asv writes it: shortened, and with 5 digits of statistics and duration."""
    named: dict[str, Any] = {
        "result": list(row.values),
        "samples": [None if sample is None else list(sample) for sample in row.samples],
        "version": row.version,
        "started_at": row.started_at,
        "duration": _shorten(row.duration),
        "profile": row.profile,
    }
    for field in fields(Stats):
        named[f"stats_{field.name}"] = [_shorten(getattr(stat, field.name, None)) for stat in row.stats]
    for key, column in named.items():
        if isinstance(column, list) and all(value is None for value in column):
            named[key] = None
    named["params"] = [list(values) for values in row.params]
    cells = [named.get(column) for column in columns]
    while cells and cells[-1] is None:
        cells.pop()
    return cells


def _shorten(value: float | None) -> float | None:
    return float(f"{value:.4e}") if isinstance(value, float) else value
