"""A table from a list of columns over items."""

from __future__ import annotations

from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Column, Field, Tone


def test_a_column_shows_texts_numbers_and_what_is_missing() -> None:
    cols = [
        Col("name", lambda row: row[0], tone=lambda row: Tone.BAD if row[1] is None else Tone.PLAIN),
        Col("time", lambda row: row[1], number=True, unit="s"),
        Col("twice", lambda row: row[1] and 2 * row[1], number=True, show="{:.0f}".format),
        Col("why", lambda row: Field(row[0], hint="more"), below=True),
        Col("nowhere", lambda row: 1 / 0, when=False),
    ]
    made = table("times", "caption", cols, [("a", 0.5), ("b", None)], main=True)
    assert (made.name, made.caption, made.main, made.folded) == ("times", "caption", True, False)
    assert made.columns == (
        Column("name"),
        Column("time", number=True, unit="s"),
        Column("twice", number=True),
        Column("why", below=True),
    )
    assert made.rows == (
        (Field("a"), Field("500 ms", 0.5), Field("1", 1.0), Field("a", hint="more")),
        (Field("b", tone=Tone.BAD), Field("-"), Field("-"), Field("b", hint="more")),
    )
