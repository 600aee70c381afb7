"""From which size on each precision pays, for the terminal, the page and other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.break_even import BreakEven, Sweep, SweptMode, sweeps_of, swept_modes
from fp8bench.model import Finding, Params, Run
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Table, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import Panel, panels_of, show_params, together
from fp8bench.report.words.legend import BREAK_EVEN
from fp8bench.report.words.naming import join_words

Swept = tuple[Sweep, Sequence[SweptMode]]


def swept(panel: Panel) -> list[Swept]:
    groups = [[(result.record, result.finding) for result in group.results] for group in panel.groups]
    sweeps = sweeps_of([group.case.params for group in panel.groups])
    pairs = ((sweep, tuple(swept_modes(sweep, groups))) for sweep in sweeps)
    return [(sweep, modes) for sweep, modes in pairs if modes]


def break_even_table(panel: Panel, sweeps: Sequence[Swept], title: str = "") -> Iterator[Table]:
    def place(row: tuple[Sweep, SweptMode]) -> str:
        held = show_params(pair for pair in row[0].held if pair not in panel.shared)
        return f"over {row[0].axis}{' at ' * bool(held)}{held}"

    def measured(row: tuple[Sweep, SweptMode]) -> str:
        sizes = [size for size, _ in row[0].places]
        return f"{row[0].axis} = {units.whole(sizes[0])} to {units.whole(sizes[-1])}, {len(sizes)} sizes"

    cols: list[Col[tuple[Sweep, SweptMode]]] = [
        Col("", place, shared=True),
        Col("case", lambda row: row[1].mode),
        Col("against", lambda row: row[1].against),
        Col(
            "pays",
            lambda row: pays(row[0].axis, row[1].found) if row[1].found else None,
            tone=lambda row: Tone.DOUBT if row[1].found is None or row[1].doubted else Tone.PLAIN,
        ),
        Col("measured", measured),
        Col("remarks", lambda row: "; ".join(remarks(row[1])), below=True),
    ]
    if rows := [(sweep, mode) for sweep, modes in sweeps for mode in modes]:
        yield table("break-even", f"{title}from where on it pays", cols, rows)


def pays(axis: str, crossed: BreakEven) -> str:
    """'from m = 900 (700 to 1100) on', 'at every size', 'nowhere', 'cannot be told'."""
    told = [stretch.pays for stretch in crossed.stretches if stretch.pays is not None]
    if not crossed.crossings:
        if not told:
            return "cannot be told: every size is within the noise"
        if len(crossed.stretches) == 1:
            return "at every size" if told[0] else "nowhere"
        return "wherever it can be told" if told[0] else "nowhere that can be told"
    parts, beginning = [], ""
    for crossing in crossed.crossings:
        size, low, high = (units.whole(round(each)) for each in (crossing.size, crossing.low, crossing.high))
        if crossing.begins:
            beginning = f"from {axis} = {size} ({low} to {high})"
        else:
            parts.append(f"{beginning or f'up to {axis} ='}{' to' * bool(beginning)} {size} ({low} to {high})")
            beginning = ""
    return " and ".join([*parts, *([f"{beginning} on"] if beginning else [])])


def remarks(mode: SweptMode) -> Iterator[str]:
    if mode.found is None and mode.points:
        yield "too few sizes with a ratio"
    if mode.found is not None:
        # Sizes where it cannot be told, beside the crossings' own intervals.
        unknown = [
            " to ".join(units.whole(round(size)) for size in (stretch.first, stretch.last))
            for stretch in mode.found.stretches
            if stretch.pays is None and not any(each.low <= stretch.first <= each.high for each in mode.found.crossings)
        ]
        if unknown:
            yield f"too close to tell from {join_words(unknown)}"
        if mode.found.within_noise:
            yield f"within the noise: {_sizes(mode.found.within_noise)}"
        if not mode.found.level:
            yield "a quick look: in brackets is the range of the rounds, without a confidence"
    for why, sizes in together((why, size) for size, why in mode.refused).items():
        yield f"no ratio at {_sizes(sizes)}: {why}"
    if mode.doubted:
        yield f"labels cast doubt on {_sizes(mode.doubted)}"


def _sizes(sizes: Sequence[int]) -> str:
    return join_words([units.whole(size) for size in sizes], 6)


class BreakEvenRow(NamedTuple):
    """A size between `low` and `high` at which a precision begins to pay (`begins`) or ceases to.

    Without such a size, `pays` says it all ('at every size', 'nowhere'; '' if too few sizes have a ratio). Sizes are
    values of `axis`, from `smallest` to `largest`; `held` are the parameters that the sweep's cases share.
    """

    suite: str
    device: str
    axis: str
    held: Params
    mode: str
    against: str
    pays: str
    size: float | None
    low: float | None
    high: float | None
    begins: bool | None
    confidence: float | None
    smallest: int
    largest: int
    remarks: str


def break_even_rows(run: Run, findings: Mapping[str, Finding]) -> Iterator[BreakEvenRow]:
    for panel in panels_of(run, findings):
        for sweep, modes in swept(panel):
            sizes = [size for size, _ in sweep.places]
            for mode in modes:
                about = (panel.case.workload, panel.case.device, sweep.axis, sweep.held, mode.mode, mode.against)
                crossed = mode.found
                words = pays(sweep.axis, crossed) if crossed else ""
                level = crossed.level or None if crossed else None
                for crossing in (crossed.crossings if crossed else ()) or (None,):
                    size, low, high, begins = crossing or (None, None, None, None)
                    yield BreakEvenRow(
                        *about, words, size, low, high, begins, level, sizes[0], sizes[-1], "; ".join(remarks(mode))
                    )


@section("break-even", "From which size on it pays", 75, lead=BREAK_EVEN)
def break_even_section(material: Material) -> Iterator[Element]:
    for title, panel in titled_panels(material):
        yield from break_even_table(panel, swept(panel), f"{title}: ")
