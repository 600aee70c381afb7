"""From which size on each precision pays, as the terminal and the report's page both tell it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.break_even import BreakEven, Crossing, Stretch
from fp8bench.analysis.sweeps import Sweep, SweptMode, sweeps_of, swept_modes
from fp8bench.report.elements import Column, Field, Table, Tone
from fp8bench.report.panels import Panel, show_params, together
from fp8bench.report.words.naming import listed

Swept = tuple[Sweep, Sequence[SweptMode]]


def swept(panel: Panel) -> list[Swept]:
    """Every number that varies alone in a panel, with what each precision comes to over it."""
    groups = [[(one.record, one.finding) for one in group.results] for group in panel.groups]
    sweeps = sweeps_of([group.case.params for group in panel.groups])
    found = ((sweep, tuple(swept_modes(sweep, groups))) for sweep in sweeps)
    return [(sweep, modes) for sweep, modes in found if modes]


def table(panel: Panel, found: Sequence[Swept], caption: str) -> Table:
    """A row for each precision and sweep."""
    columns = (
        Column("", shared=True), Column("case"), Column("against"), Column("pays"), Column("measured"),
        Column("remarks", below=True),
    )  # fmt: skip
    rows = []
    for sweep, modes in found:
        held = show_params(pair for pair in sweep.held if pair not in panel.shared)
        sizes = [size for size, _ in sweep.places]
        measured = f"{sweep.axis} = {units.whole(sizes[0])} to {units.whole(sizes[-1])}, {len(sizes)} sizes"
        for one in modes:
            doubtful = one.found is None or bool(one.doubted)
            tone = Tone.DOUBT if doubtful else Tone.PLAIN
            words = Field(pays(sweep.axis, one.found) if one.found else units.NONE, tone=tone)
            place = Field(f"over {sweep.axis}{' at ' * bool(held)}{held}")
            rest = Field("; ".join(remarks(one)))
            rows.append((place, Field(one.mode), Field(one.against), words, Field(measured), rest))
    return Table("break-even", caption, columns, tuple(rows))


def pays(axis: str, found: BreakEven) -> str:
    """'from m = 900 (700 to 1100) on', 'at every size', 'nowhere', 'cannot be told'."""
    told = [stretch.pays for stretch in found.stretches if stretch.pays is not None]
    if not found.crossings:
        if not told:
            return "cannot be told: every size is within the noise"
        if len(found.stretches) == 1:
            return "at every size" if told[0] else "nowhere"
        return "wherever it can be told" if told[0] else "nowhere that can be told"
    parts, beginning = [], ""
    for one in found.crossings:
        if one.begins:
            beginning = f"from {axis} = {_place(one)}"
        else:
            parts.append(f"{beginning} to {_place(one)}" if beginning else f"up to {axis} = {_place(one)}")
            beginning = ""
    return " and ".join([*parts, *([f"{beginning} on"] if beginning else [])])


def _place(one: Crossing) -> str:
    """'900 (700 to 1100)'."""
    size, low, high = (units.whole(round(value)) for value in (one.size, one.low, one.high))
    return f"{size} ({low} to {high})"


def remarks(one: SweptMode) -> Iterator[str]:
    """What else is to know: stretches that cannot be told, sizes within noise, without a ratio, or in doubt."""
    if one.found is None and one.points:
        yield "too few sizes with a ratio"
    if one.found is not None:
        unknown = [_between(stretch) for stretch in one.found.stretches if _open(stretch, one.found)]
        if unknown:
            yield f"too close to tell from {listed(unknown)}"
        if one.found.within_noise:
            yield f"within the noise: {_sizes(one.found.within_noise)}"
        if not one.found.level:
            yield "a quick look: in brackets is the range of the rounds, without a confidence"
    for why, sizes in together((why, size) for size, why in one.refused).items():
        yield f"no ratio at {_sizes(sizes)}: {why}"
    if one.doubted:
        yield f"labels cast doubt on {_sizes(one.doubted)}"


def _open(stretch: Stretch, found: BreakEven) -> bool:
    """Whether it cannot be told there, and that is not a crossing's own interval."""
    return stretch.pays is None and not any(one.low <= stretch.first <= one.high for one in found.crossings)


def _between(stretch: Stretch) -> str:
    return " to ".join(units.whole(round(size)) for size in (stretch.first, stretch.last))


def _sizes(sizes: Sequence[int]) -> str:
    return listed([units.whole(size) for size in sizes], 6)
