"""How much of a model's products its cases convert, and what not and why: for the terminal and the page alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.model.step import Coverage
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Items, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel, together
from fp8bench.report.words.naming import listed

_KINDS = {
    "linear": "linear layers", "conv1d": "Conv1D (GPT-2's linear layers)", "conv2d": "convolutions",
    "experts": "experts (a matrix for each)", "head": "the head",
}  # fmt: skip
_OUTSIDE = "outside of layers"


def coverages(panel: Panel) -> list[tuple[str, Coverage]]:
    """Each that cases of a panel have, with their modes: 'bf16, fp8'."""
    known = [(one.record.coverage, one.mode) for one in panel.results]
    found = together((coverage, mode) for coverage, mode in known if coverage is not None)
    return [(", ".join(dict.fromkeys(modes)), coverage) for coverage, modes in found.items()]


def sentence(modes: str, coverage: Coverage) -> str:
    """'92.1% of the FLOPs of a step's products are converted in bf16, fp8: 1.2 GFLOP of 1.3 GFLOP', without an end."""
    words = f"{units.percent(coverage.share)} of the FLOPs of a step's products are converted in {modes}"
    return f"{words}: {units.count(coverage.converted_flops, 'FLOP')} of {units.count(coverage.flops, 'FLOP')}"


def elements(panel: Panel, number: int = 0) -> Iterator[Element]:
    for place, (modes, coverage) in enumerate(coverages(panel)):
        name = f"{number}-{place}" if number or place else "kinds"
        yield Text(f"{sentence(modes, coverage)}.", Tone.STRONG)
        yield _kinds(f"coverage-{name}", modes, coverage)
        left = _left(coverage)
        if left:
            yield _reasons(f"coverage-left-{name}", modes, left, coverage)
        if remarks := list(_remarks(coverage)):
            yield Items(tuple(map(Text, remarks)))


def _kinds(name: str, modes: str, coverage: Coverage) -> Table:
    cols: list[Col[tuple[str, int | None, int, int]]] = [
        Col("products of", lambda row: row[0]),
        Col("weights", lambda row: row[1], number=True, show=str),
        Col("FLOPs", lambda row: row[2], number=True, show=units.count),
        Col("share", lambda row: _over(row[2], coverage.flops), number=True, show=units.percent),
        Col("converted", lambda row: _over(row[3], row[2]), number=True, show=units.percent),
    ]
    counts = Counter(one.kind for one in coverage.holders)
    rows: list[tuple[str, int | None, int, int]] = [
        (_KINDS.get(kind, kind), counts[kind], *flops) for kind, flops in coverage.by_kind().items()
    ]
    rows += [(_OUTSIDE, None, sum(one.flops or 0 for one in coverage.others), 0)] if coverage.others else []
    return table(name, f"what is converted in {modes}", cols, rows)


def _left(coverage: Coverage) -> list[tuple[str, list[str], int]]:
    """What is not converted by its reason, the most FLOPs first: (reason, names, FLOPs)."""
    names, flops = defaultdict[str, list[str]](list), defaultdict[str, int](int)
    for holder in coverage.holders:
        if not holder.converted:
            names[holder.reason].append(holder.name)
            flops[holder.reason] += holder.flops
    for other in coverage.others:
        names[other.reason].append(other.weight or other.module or other.operator)
        flops[other.reason] += other.flops or 0
    return sorted(((why, names[why], flops[why]) for why in names), key=lambda one: -one[2])


def _reasons(name: str, modes: str, left: Sequence[tuple[str, list[str], int]], coverage: Coverage) -> Table:
    cols: list[Col[tuple[str, list[str], int]]] = [
        Col("not converted", lambda row: listed(list(dict.fromkeys(row[1])), 3)),
        Col("share", lambda row: _over(row[2], coverage.flops), number=True, show=units.percent),
        Col("why", lambda row: row[0], below=True),
    ]
    return table(name, f"what is not converted in {modes}, and why", cols, left)


def _remarks(coverage: Coverage) -> Iterator[str]:
    yield from coverage.remarks
    if coverage.loss:
        yield f"backward begins from {coverage.loss}"
    wanted = together((one.native, one.name) for one in coverage.holders if one.converted and one.native)
    for why, names in wanted.items():
        yield f"{listed(names, 3)}: {why}"
    if coverage.unknown:
        yield f"{coverage.unknown} calls of operators without a formula are in no sum"


def _over(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@sections.register("coverage")
class CoverageSection(Section):
    """A table by kind of layer, and reasons, for each model of a profile."""

    name = "coverage"
    title = "Coverage"
    rank = 5
    lead = "Which of a model's products its cases make in another precision; counted in a step that nobody timed."

    def elements(self, material: Material) -> Iterator[Element]:
        for number, (_, panel) in enumerate(material.panels()):
            yield from elements(panel, number)
