"""What the data of a panel are made of, before any scaling: a table that does not grow with the groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8bench import units
from fp8bench.model import TensorStatistics
from fp8bench.report.blocks import Panel
from fp8bench.report.layout import INDENT, Column, Paint, Row, table, wrap


def data_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """A title and a row for each kind and role, over all groups of the panel; no lines where nobody looked at the data.

    A format has a column only if some value lies outside its range.
    """
    looked_at = [one.record.statistics for one in panel.results if one.record.statistics]
    worst = _worst(one for group in looked_at for one in group)
    if not worst:
        return []
    names = list(dict.fromkeys(name for one in worst for name, _, _ in one.outside))
    crossed = [name for name in names if any(any(_shares(one, name)) for one in worst)]
    columns = [Column("data"), *(Column(title, right=True) for title in ("values", "amax", *crossed))]
    rows = [
        Row(
            (
                _name(one),
                units.whole(one.count),
                units.significant(one.amax),
                *_cells(one, crossed),
            )
        )
        for one in worst
    ]
    title = _title(len(looked_at), [name for name in names if name not in crossed])
    return [*wrap(title, width, hang=INDENT), *table(columns, rows, width, paint)]


def _title(num_groups: int, contained: Sequence[str]) -> str:
    title = "data, before any scaling"
    if num_groups > 1:
        title += f"; each figure is the largest of {num_groups} groups"
    return f"{title}; all within the range of {', '.join(contained)}" if contained else title


def _worst(found: Iterable[TensorStatistics]) -> list[TensorStatistics]:
    """One for each kind and role, in the order they were first met: the largest count, magnitude and shares of any."""
    by_name: dict[tuple[str, str], list[TensorStatistics]] = {}
    for one in found:
        by_name.setdefault((one.kind, one.role), []).append(one)
    return [_largest(members) for members in by_name.values()]


def _largest(members: Sequence[TensorStatistics]) -> TensorStatistics:
    names = dict.fromkeys(name for one in members for name, _, _ in one.outside)
    shares = {name: [_shares(one, name) for one in members] for name in names}
    return TensorStatistics(
        members[0].kind,
        members[0].role,
        max(one.count for one in members),
        max(one.amax for one in members),
        tuple(
            (name, max(above for above, _ in pairs), max(below for _, below in pairs)) for name, pairs in shares.items()
        ),
    )


def _name(one: TensorStatistics) -> str:
    """'mlp gradient'; once where kind and role are the same word."""
    return one.kind if one.role in ("", one.kind) else f"{one.kind} {one.role}"


def _shares(one: TensorStatistics, name: str) -> tuple[float, float]:
    """The shares above a format's range and vanishing in it; none where the format was not asked about."""
    return next(((above, vanishing) for known, above, vanishing in one.outside if known == name), (0.0, 0.0))


def _cells(one: TensorStatistics, names: Sequence[str]) -> list[str]:
    """'0.02% / 1.3%', '-' where nothing lies outside."""
    pairs = [_shares(one, name) for name in names]
    return [" / ".join(units.share(share) for share in pair) if any(pair) else units.NONE for pair in pairs]
