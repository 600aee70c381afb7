"""In which order arms take turns: at random, and still each of them in every place equally often.

Whoever comes first in a round, or after a certain neighbour, may be slower for that alone. Orders that are drawn anew
for each round even that out in the long run only, and 16 rounds are not long.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Orders(Generic[T]):
    """The orders of rounds, by blocks: of so many rounds as there are arms, each arm is in every place once.

    A block ends where other arms take turns than before: those who stay begin a block of their own, so that what one
    that leaves had left over puts nobody more than one round out of balance.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._arms: list[T] = []
        self._left: list[list[int]] = []

    def next(self, arms: Sequence[T]) -> list[T]:
        if not arms:  # all have failed, or none has a phase of its own
            return []
        if not self._left or self._arms != list(arms):
            self._arms = list(arms)
            self._left = self._block(len(arms))
        return [arms[place] for place in self._left.pop()]

    def _block(self, count: int) -> list[list[int]]:
        """Williams' square with names dealt out at random, its rows in random order.

        Each row is a zigzag (0, 1, -1, 2, -2, ...) from another start. Its steps are all different, so that with an
        even number of arms each follows each other one exactly once. With an odd number no square does that, and the
        mirrored rows, as a second block, make it twice each.
        """
        names = list(range(count))
        self._draw.shuffle(names)
        zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
        rows = [[names[(start + step) % count] for step in zigzag] for start in range(count)]
        mirrored = [row[::-1] for row in rows] if count % 2 else []
        for block in (rows, mirrored):
            self._draw.shuffle(block)
        return [*mirrored, *rows]
