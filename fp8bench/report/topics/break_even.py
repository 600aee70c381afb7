"""From which size on each precision pays, for the terminal, the page and other programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.break_even import BreakEven, Sweep, SweptMode, sweeps_of, swept_modes
from fp8bench.model import Params, Run
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import Elements, Tables, Tone
from fp8bench.report.page.section import Material, section, titled_panels
from fp8bench.report.panels import FindingsById, Panel, describe_params, panels_of, together
from fp8bench.report.words.legend import BREAK_EVEN
from fp8bench.report.words.naming import join_words

Swept = tuple[Sweep, Sequence[SweptMode]]


class _Row(NamedTuple):
    sweep: Sweep
    mode: SweptMode


def swept(panel: Panel) -> list[Swept]:
    groups = [[(result.record, result.finding) for result in group.results] for group in panel.groups]
    sweeps = sweeps_of([group.case.params for group in panel.groups])
    return [(sweep, modes) for sweep in sweeps if (modes := tuple(swept_modes(sweep, groups)))]


def break_even_table(panel: Panel, sweeps: Sequence[Swept], title: str = "") -> Tables:
    rows: list[_Row] = []
    for sweep, modes in sweeps:
        rows += [_Row(sweep, mode) for mode in modes]
    if not rows:
        return

    def place(row: _Row) -> str:
        held = describe_params(pair for pair in row.sweep.held if pair not in panel.shared)
        return f"over {row.sweep.axis}{' at ' * bool(held)}{held}"

    def sizes(row: _Row) -> str:
        places = row.sweep.places
        span = f"{units.whole(places[0][0])} to {units.whole(places[-1][0])}"
        return f"{row.sweep.axis} = {span}, {len(places)} sizes"

    def tone(row: _Row) -> Tone:
        if row.mode.found is None or row.mode.doubted:
            return Tone.DOUBT
        return Tone.PLAIN

    cols: Cols[_Row] = [
        Col("", place, shared=True),
        Col("case", "mode.mode"),
        Col("against", "mode.against"),
        Col("pays", lambda row: pays(row.sweep.axis, row.mode.found) if row.mode.found else None, tone=tone),
        Col("measured", sizes),
        Col("remarks", lambda row: "; ".join(remarks(row.mode)), below=True),
    ]
    yield table("break-even", f"{title}from where on it pays", cols, rows)


def pays(axis: str, crossed: BreakEven) -> str:
    """Returns 'from m = 900 (700 to 1100) on', 'at every size', 'nowhere', 'cannot be told'."""
    if not crossed.crossings:
        verdicts = [stretch.pays for stretch in crossed.stretches if stretch.pays is not None]
        if not verdicts:
            return "cannot be told: every size is within the noise"
        if len(crossed.stretches) == 1:
            if verdicts[0]:
                return "at every size"
            return "nowhere"
        if verdicts[0]:
            return "wherever it can be told"
        return "nowhere that can be told"
    parts = []
    beginning = ""
    for crossing in crossed.crossings:
        size, low, high = map(_whole, (crossing.size, crossing.low, crossing.high))
        end = f"{size} ({low} to {high})"
        if crossing.begins:
            beginning = f"from {axis} = {end}"
        else:
            parts.append(f"{beginning} to {end}" if beginning else f"up to {axis} = {end}")
            beginning = ""
    if beginning:
        parts.append(f"{beginning} on")
    return " and ".join(parts)


def _whole(size: float) -> str:
    return units.whole(round(size))


def remarks(mode: SweptMode) -> Iterator[str]:
    crossed = mode.found
    if crossed is None and mode.points:
        yield "too few sizes with a ratio"
    if crossed is not None:
        unknown = []
        for stretch in crossed.stretches:
            # Within the interval of a crossing this is expected.
            is_near = any(crossing.low <= stretch.first <= crossing.high for crossing in crossed.crossings)
            if stretch.pays is None and not is_near:
                unknown.append(" to ".join(map(_whole, (stretch.first, stretch.last))))
        if unknown:
            yield f"too close to tell from {join_words(unknown)}"
        if crossed.within_noise:
            yield f"within the noise: {_sizes(crossed.within_noise)}"
        if not crossed.level:
            yield "a quick look: in brackets is the range of the rounds, without a confidence"
    for reason, sizes in together((reason, size) for size, reason in mode.refused).items():
        yield f"no ratio at {_sizes(sizes)}: {reason}"
    if mode.doubted:
        yield f"labels cast doubt on {_sizes(mode.doubted)}"


def _sizes(sizes: Sequence[int]) -> str:
    return join_words([units.whole(size) for size in sizes], 6)


class BreakEvenRow(NamedTuple):
    """A size between `low` and `high` from which on a precision pays (`begins`) or no longer does.

    Without such a size, `pays` is 'at every size' or 'nowhere', or '' if too few sizes have a ratio. Sizes are values
    of `axis`, from `smallest` to `largest`; `held` are the parameters that the sweep's cases share.
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


def break_even_rows(run: Run, findings: FindingsById) -> Iterator[BreakEvenRow]:
    for panel in panels_of(run, findings):
        for sweep, modes in swept(panel):
            sizes = [size for size, _ in sweep.places]
            for mode in modes:
                about = (panel.suite, panel.device, sweep.axis, sweep.held, mode.mode, mode.against)
                crossed = mode.found
                words = pays(sweep.axis, crossed) if crossed else ""
                level = crossed.level or None if crossed else None
                ends = (level, sizes[0], sizes[-1], "; ".join(remarks(mode)))
                for crossing in crossed.crossings if crossed else ():
                    yield BreakEvenRow(*about, words, *crossing, *ends)
                if not crossed or not crossed.crossings:
                    yield BreakEvenRow(*about, words, None, None, None, None, *ends)


@section("break-even", "From which size on it pays", 75, lead=BREAK_EVEN)
def break_even_section(material: Material) -> Elements:
    for title, panel in titled_panels(material):
        yield from break_even_table(panel, swept(panel), f"{title}: ")
