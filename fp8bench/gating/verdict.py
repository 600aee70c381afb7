"""What a gate has to say in the end, and the code a build ends with."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.errors import EXIT_BASELINE, EXIT_FAILED, EXIT_OK, EXIT_REGRESSION
from fp8bench.gating.judging import Judged, Outcome


@dataclass(frozen=True)
class Verdict:
    """All figures judged. `title` says what was held against what, `notes` what a reader should know beside it.

    `problem` says why there is nothing to judge, and `code` is the exit code that it stands for.
    """

    title: str
    judged: tuple[Judged, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    code: int = EXIT_OK

    def of(self, *outcomes: Outcome) -> tuple[Judged, ...]:
        """The figures with one of some outcomes."""
        return tuple(one for one in self.judged if one.outcome in outcomes)

    @property
    def exit_code(self) -> int:
        """3 a case failed, 1 something is worse, else 0; where nothing could be judged, what that stands for."""
        if self.problem:
            return self.code
        if self.of(Outcome.FAILED):
            return EXIT_FAILED
        return EXIT_REGRESSION if self.of(Outcome.REGRESSION) else EXIT_OK

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if self.problem:
            return "no baseline to judge by" if self.code == EXIT_BASELINE else "nothing was measured"
        failed, worse = len(self.of(Outcome.FAILED)), len(self.of(Outcome.REGRESSION))
        parts = [f"{failed} failed"] if failed else []
        parts += [f"{worse} regression{'s' * (worse != 1)}"] if worse else []
        return " and ".join(parts) or "no regression"

    @property
    def counts(self) -> str:
        """'112 figures: 1 regression, 2 better, 109 fine'."""
        found = {name: len(self.of(name)) for name in Outcome}
        parts = [f"{count} {_COUNTED.get(name, name.value)}" for name, count in found.items() if count]
        total = len(self.judged)
        return f"{total} figure{'s' * (total != 1)}" + (f": {', '.join(parts)}" if parts else "")


_COUNTED = {Outcome.NONE: "without a number on both sides", Outcome.IGNORED: "not judged"}
