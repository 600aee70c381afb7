"""What the data of a panel are made of, before any scaling: a table that does not grow with the groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model import TensorStatistics
from fp8bench.report.blocks import Panel
from fp8bench.report.layout import INDENT, Column, Paint, Row, table, wrap


@dataclass(frozen=True)
class DataSummary:
    """One statistic for each kind and role over all groups of a panel, and of how many groups.

    `crossed` are the formats whose range some value lies outside of; `contained` those that hold them all.
    """

    worst: tuple[TensorStatistics, ...]
    crossed: tuple[str, ...]
    contained: tuple[str, ...]
    num_groups: int

    @property
    def title(self) -> str:
        """What the figures are of."""
        title = "data, before any scaling"
        if self.num_groups > 1:
            title += f"; each figure is the largest of {self.num_groups} groups"
        return f"{title}; all within the range of {', '.join(self.contained)}" if self.contained else title


def summary(panel: Panel) -> DataSummary | None:
    """What the data of a panel are made of; None where nobody looked at them."""
    looked_at = [one.record.statistics for one in panel.results if one.record.statistics]
    worst = _worst(one for group in looked_at for one in group)
    if not worst:
        return None
    names = dict.fromkeys(name for one in worst for name, _, _ in one.outside)
    crossed = tuple(name for name in names if any(any(shares_of(one, name)) for one in worst))
    contained = tuple(name for name in names if name not in crossed)
    return DataSummary(tuple(worst), crossed, contained, len(looked_at))


def data_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """A title and a row for each kind and role, over all groups of the panel; no lines where nobody looked at the data.

    A format has a column only if some value lies outside its range.
    """
    found = summary(panel)
    if found is None:
        return []
    columns = [Column("data"), *(Column(title, right=True) for title in ("values", "amax", *found.crossed))]
    rows = [
        Row(
            (
                name_of(one),
                units.whole(one.count),
                units.significant(one.amax),
                *(show_shares(one, name) for name in found.crossed),
            )
        )
        for one in found.worst
    ]
    return [*wrap(found.title, width, hang=INDENT), *table(columns, rows, width, paint)]


def _worst(found: Iterable[TensorStatistics]) -> list[TensorStatistics]:
    """One for each kind and role, in the order they were first met: the largest count, magnitude and shares of any."""
    by_name: dict[tuple[str, str], list[TensorStatistics]] = {}
    for one in found:
        by_name.setdefault((one.kind, one.role), []).append(one)
    return [_largest(members) for members in by_name.values()]


def _largest(members: Sequence[TensorStatistics]) -> TensorStatistics:
    names = dict.fromkeys(name for one in members for name, _, _ in one.outside)
    shares = {name: [shares_of(one, name) for one in members] for name in names}
    return TensorStatistics(
        members[0].kind,
        members[0].role,
        max(one.count for one in members),
        max(one.amax for one in members),
        tuple(
            (name, max(above for above, _ in pairs), max(below for _, below in pairs)) for name, pairs in shares.items()
        ),
    )


def name_of(one: TensorStatistics) -> str:
    """'mlp gradient'; once where kind and role are the same word."""
    return one.kind if one.role in ("", one.kind) else f"{one.kind} {one.role}"


def shares_of(one: TensorStatistics, name: str) -> tuple[float, float]:
    """The shares above a format's range and vanishing in it; none where the format was not asked about."""
    return next(((above, vanishing) for known, above, vanishing in one.outside if known == name), (0.0, 0.0))


def show_shares(one: TensorStatistics, name: str) -> str:
    """'0.02% / 1.3%', '-' where nothing lies outside."""
    pair = shares_of(one, name)
    return " / ".join(units.share(share) for share in pair) if any(pair) else units.NONE
