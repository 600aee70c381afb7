"""Looking for the largest number that fits, by few attempts. Knows of batches and memory only that more need more.

What attempts take is close to a line in the number: two of them say where it meets the room there is, and the answer
and its neighbour are tried there. Where it is no line, doubling and halving end the search all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# So many guesses by the line between what fits and what does not; then halving.
_MOST_INTERPOLATIONS = 4
# A line is not followed further than so many times as far as anything that was tried; a third of the way comes first.
_FAR = 8


@dataclass(frozen=True)
class Attempt:
    """One number that was tried: whether it fitted, what it took if somebody counted, why it did not fit."""

    number: int
    fits: bool
    taken: int | None = None
    why: str = ""


@dataclass
class Search:
    """From `start` up to `top`; `room` is where attempts are expected to stop fitting, None where nobody knows."""

    start: int
    top: int
    room: int | None
    attempts: list[Attempt] = field(default_factory=list)
    _stride: int = 1
    _interpolated: int = 0

    @property
    def fitting(self) -> Attempt | None:
        """The largest that has fitted."""
        return max((one for one in self.attempts if one.fits), key=lambda one: one.number, default=None)

    @property
    def failing(self) -> Attempt | None:
        """The smallest that has not."""
        return min((one for one in self.attempts if not one.fits), key=lambda one: one.number, default=None)

    def run(self, attempt: Callable[[int], Attempt]) -> None:
        """Attempts until what fits and what does not are neighbours, or the smallest fails, or the top fits."""
        number: int | None = self.start
        while number is not None:
            self.attempts.append(attempt(number))
            number = self._next()

    def _next(self) -> int | None:
        low, high = self.fitting, self.failing
        if high is None:
            assert low is not None
            return self._further(low.number) if low.number < self.top else None
        floor = low.number if low is not None else 0
        if high.number - floor <= 1:
            return None
        guess = self._guess()
        if guess is None or guess >= high.number or self._interpolated >= _MOST_INTERPOLATIONS:
            return (floor + high.number) // 2
        self._interpolated += 1
        return max(guess, floor + 1)

    def _further(self, low: int) -> int:
        """Nothing has failed yet: where the line ends; twice as far where there is none; past its end in strides."""
        guess = self._guess()
        if guess is None:
            return min(2 * low, self.top)
        if guess <= low:
            guess = low + self._stride
            self._stride *= 2
        return min(guess if guess <= _FAR * low else guess // 3, self.top)

    def _guess(self) -> int | None:
        """The largest number that fits by the line through the two largest that somebody counted; None without one."""
        counted = sorted((one.number, one.taken) for one in self.attempts if one.taken is not None)
        if self.room is None or len(counted) < 2:
            return None
        (first, less), (second, more) = counted[-2:]
        if more <= less:
            return None
        return second + (self.room - more) * (second - first) // (more - less)
