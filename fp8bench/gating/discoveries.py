"""Which of many p-values are news, where one in a hundred is small by chance alone."""

from __future__ import annotations

from collections.abc import Sequence


def discoveries(p_values: Sequence[float], share: float) -> list[bool]:
    """Benjamini and Hochberg's rule: of those it picks, no more than `share` are expected to be chance.

    Where all are chance, it picks any at all with a probability of `share`.
    """
    ranked = sorted(range(len(p_values)), key=lambda place: p_values[place])
    last = 0
    for rank, place in enumerate(ranked, 1):
        if p_values[place] <= share * rank / len(p_values):
            last = rank
    chosen = set(ranked[:last])
    return [place in chosen for place in range(len(p_values))]
