"""What a device does at most: a line for each rate, and a table with what was measured before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.analysis.ceiling_history import Pace, Since, alike, since
from fp8bench.model import Ceilings, Limit, Rate
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Page, Part, Table, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.history import count_of

UNITS = {**dict.fromkeys(Limit, "B/s"), Limit.PRODUCT: "FLOP/s", Limit.LAUNCH: "launches/s"}
_TONES = {Pace.SLOWER: Tone.BAD, Pace.FASTER: Tone.GOOD, Pace.UNCLEAR: Tone.DOUBT}
_LEGEND = (
    "before: all earlier measurements under the same software and settings; change: from the middle one",
    "slower, faster: more than 5% beyond all of them; unclear: runs of one measurement differ by more than 5%",
)


def lines_of(found: Ceilings, history: Sequence[Ceilings] = ()) -> Iterator[str]:
    """When and under which settings, then a line a rate, with what it was before under the same ones."""
    settings = settings_words(found)
    yield f"measured {found.when}{f' ({settings})' if settings else ''}; other software or settings need their own"
    earlier, names = alike(found, history), list(map(rate_words, found.rates))
    longest = max(map(len, names), default=0)
    for name, rate in zip(names, found.rates, strict=True):
        one = since(rate, earlier)
        yield f"{name:<{longest}}  {_said(rate)}{f'; {since_words(one)}' if one is not None else ''}"


def settings_words(found: Ceilings) -> str:
    """'machine box, torch 2.13.0, threads 1'."""
    return ", ".join(f"{name} {value}" for name, value in found.under if name not in ("device", "name"))


def rate_words(rate: Rate) -> str:
    """'product bf16'."""
    return f"{rate.limit.value} {rate.precision}".strip()


def since_words(one: Since) -> str:
    """'slower than before: -12.0% against 425 GFLOP/s, the middle of 3'."""
    words = {Pace.SLOWER: "slower than before", Pace.FASTER: "faster than before"}.get(one.pace, one.pace.value)
    assert one.rate.value is not None
    count = f", the middle of {len(one.before)}" if len(one.before) > 1 else ""
    middle = units.count(one.middle, UNITS[one.rate.limit])
    return f"{words}: {units.change(one.rate.value / one.middle)} against {middle}{count}"


def spread_words(rate: Rate) -> str:
    """'spread 1.5% over 5 runs', and what that means where it is wide."""
    bound = "" if rate.steady else ": no bound"
    return f"spread {units.percent(rate.spread)} over {len(rate.runs)} runs{bound}"


def shape_words(rate: Rate) -> str:
    if rate.limit is Limit.LAUNCH:
        return "one element"
    size = "x".join(map(str, rate.shape)) if rate.limit is Limit.PRODUCT else f"arrays of {units.size(rate.shape[0])}"
    return f"{size}, the best of {rate.searched} searched"


def _said(rate: Rate) -> str:
    if rate.value is None:
        return f"not measured: {rate.why}"
    each = f", {units.seconds(1 / rate.value)} each" if rate.limit is Limit.LAUNCH else ""
    rated = units.count(rate.value, UNITS[rate.limit])
    return f"{rated}{each}; {spread_words(rate)}; {shape_words(rate)}"


def page_of(history: Sequence[Ceilings], store: str) -> Page:
    """A part for each device with its settings: its newest rates beside those of before."""
    parts = [
        Part("ceilings", _title(some), (_table(some),))
        for some in together(((one.device, one.under), one) for one in history).values()
    ]
    return Page(
        f"{store}: {count_of(len(history), 'measurement')} of what devices do at most", "", tuple(parts), _LEGEND
    )


def _title(some: Sequence[Ceilings]) -> str:
    """'AMD EPYC (torch 2.13.0, threads 1): 3 measurements, 2026-11-20 to 2026-11-23'."""
    days = dict.fromkeys(one.when[:10] for one in (some[0], some[-1]))
    return f"{some[-1].device} ({settings_words(some[-1])}): {count_of(len(some), 'measurement')}, {' to '.join(days)}"


def _table(some: Sequence[Ceilings]) -> Table:
    newest = some[-1]
    cols: list[Col[tuple[Rate, Since | None]]] = [
        Col("rate", lambda row: rate_words(row[0])),
        Col("before", lambda row: units.span(row[1].before, partial(_shown, row)) if row[1] else None),
        Col("last", lambda row: _shown(row, row[0].value), number=True),
        Col("change", lambda row: units.change((row[0].value or 0.0) / row[1].middle) if row[1] else None, number=True),
        Col("is", lambda row: row[1].pace.value if row[1] else row[0].why,
            tone=lambda row: _TONES.get(row[1].pace, Tone.PLAIN) if row[1] else Tone.PLAIN),
    ]  # fmt: skip
    earlier = alike(newest, some)
    rows = [(rate, since(rate, earlier) if rate.value is not None else None) for rate in newest.rates]
    return table("ceilings", "", cols, rows)


def _shown(row: tuple[Rate, Since | None], value: float | None) -> str:
    return units.count(value, UNITS[row[0].limit])
