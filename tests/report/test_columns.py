"""A table from a list of columns over items."""

from __future__ import annotations

from typing import NamedTuple

from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Column, Field, Tone


class Timed(NamedTuple):
    """A row."""

    name: str
    seconds: float | None


def test_a_column_shows_texts_numbers_and_what_is_missing() -> None:
    cols: list[Col[Timed]] = [
        Col("name", "name", tone=lambda row: Tone.BAD if row.seconds is None else Tone.PLAIN),
        Col("time", "seconds", number=True, unit="s"),
        Col("twice", lambda row: row.seconds and 2 * row.seconds, number=True, show="{:.0f}".format),
        Col("why", lambda row: Field(row.name), below=True),
        Col("nowhere", lambda row: 1 / 0, when=False),
    ]
    made = table("times", "caption", cols, [Timed("a", 0.5), Timed("b", None)], main=True)
    assert (made.name, made.caption, made.main, made.folded) == ("times", "caption", True, False)
    assert made.columns == (
        Column("name"),
        Column("time", number=True, unit="s"),
        Column("twice", number=True),
        Column("why", below=True),
    )
    assert made.rows == (
        (Field("a"), Field("500 ms", 0.5), Field("1", 1.0), Field("a")),
        (Field("b", tone=Tone.BAD), Field("-"), Field("-"), Field("b")),
    )
