"""What one of several ranks that train together says of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.training import Line


@dataclass(frozen=True)
class RankLines:
    """The lines of some steps, and what shows whether the ranks still train the same model.

    `same` are digests of what all ranks must have alike. `batches` are two digests for each step that was looked at: of
    the sequences that this rank has read, and of all that the step has, of which the ranks read `shares` parts.
    `faults` are what this rank has found wrong itself.
    """

    lines: tuple[Line, ...]
    same: tuple[tuple[str, int], ...] = ()
    batches: tuple[tuple[int, int, int], ...] = ()
    shares: int = 1
    faults: tuple[str, ...] = ()
