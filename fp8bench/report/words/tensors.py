"""What the numbers of tensors say, in sentences: of the formats of one width, which keeps most of how many tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.report.panels import Panel, ResultGroup, together
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
    cells = ((cell_of(result), figure(result, SQNR)[1]) for result in group.results)
    known = ((_ELEMENTS.match(cell.fmt), cell.words, value) for cell, value in cells if value is not None)
    by_bits = together((1 + int(one[1]) + int(one[2]), (words, value)) for one, words, value in known if one)
    return {bits: dict(pairs) for bits, pairs in by_bits.items()}


def _sentence(bits: int, found: Sequence[Mapping[str, float]], suite: str) -> str:
    winners = [max(one, key=lambda words: one[words]) for one in found]
    best = [one[words] for one, words in zip(found, winners, strict=True)]
    low, high = units.decibels(min(best)), units.decibels(max(best))
    span = low if low == high else f"{low.removesuffix(' dB')} to {high}"
    (first, number), *others = Counter(winners).most_common()
    named = "".join(f", {words} in {times}" for words, times in others[:_MOST_NAMED])
    total = len(found)
    some = f"{number} of" if number < total else "all"
    where = f"on {suite}" if total == 1 else f"in {some} {total} tensors of {suite}"
    return f"with {bits} bits {first} has the highest SQNR {where}{named}: {span}"
