"""What devices did at most, measurement by measurement, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.analysis.ceiling_history import Pace, alike, since
from fp8bench.model import Ceilings
from fp8bench.report.elements import Column, Field, Page, Part, Table, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.history import count_of
from fp8bench.report.words.ceilings import UNITS, rate_words, settings_words

_TONES = {Pace.SLOWER: Tone.BAD, Pace.FASTER: Tone.GOOD, Pace.UNCLEAR: Tone.DOUBT}
_COLUMNS = (
    Column("rate"), Column("before"), Column("last", number=True), Column("change", number=True), Column("is")
)  # fmt: skip
_LEGEND = (
    "before: all earlier measurements under the same software and settings; change: from the middle one",
    "slower, faster: more than 5% beyond all of them; unclear: runs of one measurement differ by more than 5%",
)


def page_of(history: Sequence[Ceilings], store: str) -> Page:
    """A part for each device with its settings: its newest rates beside those of before."""
    parts = [
        Part("ceilings", _title(some), (Table("ceilings", "", _COLUMNS, tuple(_rows(some))),))
        for some in together(((one.device, one.under), one) for one in history).values()
    ]
    return Page(
        f"{store}: {count_of(len(history), 'measurement')} of what devices do at most", "", tuple(parts), _LEGEND
    )


def _title(some: Sequence[Ceilings]) -> str:
    """'AMD EPYC (torch 2.13.0, threads 1): 3 measurements, 2026-11-20 to 2026-11-23'."""
    days = dict.fromkeys(one.when[:10] for one in (some[0], some[-1]))
    return f"{some[-1].device} ({settings_words(some[-1])}): {count_of(len(some), 'measurement')}, {' to '.join(days)}"


def _rows(some: Sequence[Ceilings]) -> Iterator[tuple[Field, ...]]:
    newest = some[-1]
    for rate in newest.rates:
        one = since(rate, alike(newest, some))
        shown = partial(units.count, unit=UNITS[rate.limit])
        if one is None or rate.value is None:
            yield (
                Field(rate_words(rate)),
                Field(units.NONE),
                Field(shown(rate.value)),
                Field(units.NONE),
                Field(rate.why),
            )
            continue
        yield (
            Field(rate_words(rate)), Field(units.span(one.before, shown)), Field(shown(rate.value)),
            Field(units.change(rate.value / one.middle)),
            Field(one.pace.value, tone=_TONES.get(one.pace, Tone.PLAIN)),
        )  # fmt: skip
