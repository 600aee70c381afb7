"""A table is a list of columns over items: what a column is called, and what of an item stands in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fp8bench import units
from fp8bench.report.elements import Column, Field, Table, Tone

T = TypeVar("T")
# A number is shown by the column's unit or its own `show`, and sorts as what it is; None is a dash.
Content = Field | str | float | None


@dataclass(frozen=True)
class Col(Generic[T]):
    """`of` gives what stands in a row's field, `tone` how it is meant; without `when` the column is left out."""

    heading: str
    of: Callable[[T], Content]
    number: bool = False
    show: Callable[[float], str] | None = None
    unit: str = ""
    tone: Callable[[T], Tone] | None = None
    hint: str = ""
    shared: bool = False
    below: bool = False
    when: bool = True

    @property
    def column(self) -> Column:
        return Column(self.heading, self.number, self.hint, self.unit, self.shared, self.below)

    def field(self, item: T) -> Field:
        content = self.of(item)
        if isinstance(content, Field):
            return content
        tone = self.tone(item) if self.tone is not None else Tone.PLAIN
        if isinstance(content, str):
            return Field(content, tone=tone)
        if content is None:
            return Field(units.NONE, tone=tone)
        return Field(self.show(content) if self.show else units.shown(content, self.unit), content, tone)


def table(
    name: str, caption: str, cols: Sequence[Col[T]], items: Iterable[T], *, main: bool = False, folded: bool = False
) -> Table:  # fmt: skip
    """A row for each item."""
    shown = [col for col in cols if col.when]
    rows = tuple(tuple(col.field(item) for col in shown) for item in items)
    return Table(name, caption, tuple(col.column for col in shown), rows, main, folded)
