"""What the numbers of tensors say, in sentences: of the formats of one width, which keeps most of how many tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.report.panels import Panel, ResultGroup
from fp8bench.report.tensor_panels import SQNR, cell_of, figure

_ELEMENTS = re.compile(r"e(\d+)m(\d+)")
_MOST_NAMED = 3


def best_by_width(panel: Panel) -> Iterator[str]:
    """'with 8 bits e4m3fn 1x128 has the highest SQNR in all 13 tensors of numerics: 31.8 to 45.0 dB'.

    Widths of which there is but one precision have nothing to choose, and no sentence.
    """
    known = [_by_width(group) for group in panel.groups]
    for bits in sorted({bits for one in known for bits in one}, reverse=True):
        found = [one[bits] for one in known if one.get(bits)]
        if len({words for one in found for words in one}) > 1:
            yield _sentence(bits, found, panel.case.workload)


def _by_width(group: ResultGroup) -> dict[int, dict[str, float]]:
    """SQNR by precision, by the bits of their elements."""
    found: dict[int, dict[str, float]] = {}
    for result in group.results:
        cell, value = cell_of(result), figure(result, SQNR)[1]
        elements = _ELEMENTS.match(cell.fmt)
        if elements and value is not None:
            found.setdefault(1 + int(elements[1]) + int(elements[2]), {})[cell.words] = value
    return found


def _sentence(bits: int, found: Sequence[Mapping[str, float]], suite: str) -> str:
    winners = [max(one, key=lambda words: one[words]) for one in found]
    best = sorted(one[words] for one, words in zip(found, winners, strict=True))
    (first, number), *others = Counter(winners).most_common()
    named = "".join(f", {words} in {times}" for words, times in others[:_MOST_NAMED])
    return (
        f"with {bits} bits {first} has the highest SQNR {_share(number, len(found), suite)}{named}: "
        f"{_span(best[0], best[-1])}"
    )


def _share(number: int, total: int, suite: str) -> str:
    """'in 8 of 13 tensors of numerics'."""
    if total == 1:
        return f"on {suite}"
    return f"in {f'{number} of ' if number < total else 'all '}{total} tensors of {suite}"


def _span(low: float, high: float) -> str:
    one, other = units.decibels(low), units.decibels(high)
    return one if one == other else f"{one.removesuffix(' dB')} to {other}"
