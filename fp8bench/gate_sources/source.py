"""What a gate judges, and how it looks a second time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8bench.errors import EXIT_OK
from fp8bench.gating.judging import SecondLook
from fp8bench.model import Comparison

Confirm = Callable[[Sequence[Comparison]], SecondLook]


@dataclass(frozen=True)
class Source:
    """Comparisons and what they are of. `confirm` measures suspects again.

    `problem` says why there is nothing to judge, and `code` is the exit code that it stands for.
    """

    title: str
    comparisons: tuple[Comparison, ...] = ()
    confirm: Confirm | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK
