"""Which matrix shapes a lower precision pays for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model import Params
from fp8bench.report.case_status import FACTS, doubts, show_speed_up, speed_up, standing, status_words
from fp8bench.report.elements import Axis, Element, Heat
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, show_params, together
from fp8bench.report.words.naming import NamedCase, named_cases

_SIDES = ("m", "n", "k")
_LEAST_SHAPES = 3
# A map with more holes than this reads worse than a list of its shapes.
_LEAST_FILLED = 0.6
# Which parameters name the columns: what is not among them names the rows. The first of equally full maps is taken.
_COLUMNS = (("product",), ("k",), ("n", "k"), ("m", "k"), ("n",), ("m",))
_Grid = Sequence[Sequence[NamedCase | None]]


@dataclass(frozen=True)
class _Layout:
    """Shapes as rows and columns; `places` says where each group stands."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def filled(self) -> float:
        return len(self.places) / (len(self.rows) * len(self.columns))


@sections.register("shapes")
class Shapes(Section):
    """Speed-up over the shapes of products; emulations have none."""

    name = "shapes"
    title = "Which shapes gain"
    lead = (
        "Speed-up over the reference at the same shape: above 1x it pays, below it costs. The words of each field say "
        "how sure that is."
    )
    rank = 80

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in titled_panels(material):
            yield from _panel(title, panel)


def _panel(title: str, panel: Panel) -> Iterator[Element]:
    if len(panel.groups) < _LEAST_SHAPES or not all({*_SIDES} <= {*dict(group.case.params)} for group in panel.groups):
        return
    by_mode = together(
        (case.result.mode, (case.place, case)) for case in named_cases(panel) if speed_up(case.result) is not None
    )
    places = tuple(panel.place(group) for group in panel.groups)
    found = {mode: [dict(cases).get(place) for place in places] for mode, cases in by_mode.items()}
    layout, words = _layout(panel), f"speed-up over {panel.reference} by shape"
    if layout is None:  # one row each, a column for each precision
        grid = [list(one) for one in zip(*found.values(), strict=True)]
        yield from [_heat(f"{title}: {words}", places, tuple(found), grid)] if found else []
        return
    for mode, results in found.items():
        by_place = dict(zip(layout.places, results, strict=True))
        grid = [
            [by_place.get((row, column)) for column in range(len(layout.columns))] for row in range(len(layout.rows))
        ]
        yield _heat(f"{title}, {mode}: {words}", layout.rows, layout.columns, grid)


def _layout(panel: Panel) -> _Layout | None:
    """The fullest map that has at least two rows and columns; None where all have too many holes."""
    own = [tuple(pair for pair in group.case.params if pair not in panel.shared) for group in panel.groups]
    layouts = [made for columns in _COLUMNS if (made := _split(own, columns)) is not None]
    return max((one for one in layouts if one.filled >= _LEAST_FILLED), key=lambda one: one.filled, default=None)


def _split(own: Sequence[Params], columns: Sequence[str]) -> _Layout | None:
    """Parameters as rows and columns; None where they make no map, or two shapes would share a field."""
    if any("layer" in dict(params) for params in own):  # which says n and k, by the product
        own = [tuple(pair for pair in params if pair[0] not in _SIDES) for params in own]
    down = [tuple(pair for pair in params if pair[0] not in columns) for params in own]
    across = [tuple(pair for pair in params if pair[0] in columns) for params in own]
    rows, heads = _sorted(down), _sorted(across)
    if len(rows) < 2 or len(heads) < 2 or len({*zip(down, across, strict=True)}) < len(own):
        return None
    row_of, column_of = ({params: index for index, params in enumerate(each)} for each in (rows, heads))
    places = tuple((row_of[one], column_of[other]) for one, other in zip(down, across, strict=True))
    return _Layout(tuple(map(show_params, rows)), tuple(map(show_params, heads)), places)


def _sorted(found: Sequence[Params]) -> list[Params]:
    """Each once; by size where all values are numbers, else as they came."""
    each = list(dict.fromkeys(found))
    numbers = all(isinstance(value, int | float) for params in each for _, value in params)
    alike = len({len(params) for params in each}) == 1
    return sorted(each, key=lambda params: [value for _, value in params]) if numbers and alike else each


def _heat(title: str, rows: tuple[str, ...], columns: tuple[str, ...], grid: _Grid) -> Heat:
    values = tuple(tuple(_value(one) for one in row) for row in grid)
    hints = tuple(tuple(_hint(one) for one in row) for row in grid)
    workload = next(one for row in grid for one in row if one is not None).result.record.case.workload
    return Heat(f"shapes-{workload}", title, _description(grid), rows, columns, values, Axis("speed-up", "x"), hints)


def _value(case: NamedCase | None) -> float | None:
    found = speed_up(case.result) if case is not None else None
    return found.point if found is not None else None


def _hint(case: NamedCase | None) -> str:
    """'m=256 n=256 bf16: 1.95x [1.90, 2.01], faster', and why it is in doubt."""
    if case is None:
        return "not measured"
    words, why = f"{case.name}: {show_speed_up(case.result)}, {status_words(case.result)}", doubts(case.result)
    head = "Labelled" if standing(case.result) in FACTS.values() else "In doubt"
    return f"{words}. {head}: {'; '.join(why)}" if why else words


def _description(grid: _Grid) -> str:
    """The best and the worst, how many gain, and how many are in doubt."""
    found = [(speed, case) for row in grid for case in row if case and (speed := _value(case)) is not None]
    least, most = (choose(found, key=lambda pair: pair[0]) for choose in (min, max))
    gain = sum(speed > 1 for speed, _ in found)
    words = f"{gain} of {len(found)} are above 1x: from {units.ratio(least[0])} at {least[1].name}"
    words += f" to {units.ratio(most[0])} at {most[1].name}."
    doubtful = sum(case.result.finding is not None and case.result.finding.doubtful for _, case in found)
    return f"{words} {doubtful} of them carry a label that casts doubt on it." if doubtful else words
