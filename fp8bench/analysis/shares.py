"""What the parts of a step come to in its untouched time: shares from a pass that looked, times estimated from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fp8bench.errors import UsageError
from fp8bench.model import UNATTRIBUTED, Case, Finding, Level, Record, Run, Share, Shares, SharesFrom

# Casts fused into another kernel's work have no kernel, and no time, of their own.
_FUSED = "casts are fused into {count} of its kernels, whose time is told as the other work in them"
_EMULATED = "emulated: these are parts of what the emulation costs, and say nothing of the precision's speed"
_NO_MODULES = "compiled: parts by kernel, whose module nobody knows"


@dataclass(frozen=True)
class SharePart:
    """A part of a step, or what all of them leave: `share` of it, and the seconds that this comes to in the step as it
    was timed; None where nothing was."""

    kind: str
    module: str
    direction: str
    what: str
    calls: int
    share: float
    seconds: float | None


@dataclass(frozen=True)
class StepShares:
    """The parts of a case's step; without any, why there are none. `seconds` are its best case, which nobody looked
    into; of an emulated one they are what the emulation costs, and so are its parts."""

    case: Case
    shares: Shares | None
    why: str = ""
    seconds: float | None = None
    emulated: bool = False

    @property
    def rows(self) -> Iterator[SharePart]:
        """The longest first, and at last what is left of the step."""
        shares = self.shares
        if shares is None:
            return
        for part in shares.parts:
            direction = "backward" if part.backward else "forward" if part.module else ""
            yield SharePart(
                part.kind.value, part.module, direction, part.what, part.calls, *self._of(part.seconds / shares.whole)
            )
        yield SharePart(UNATTRIBUTED, "", "", "", 0, *self._of(shares.unattributed))

    @property
    def by_kind(self) -> dict[str, float]:
        """Shares of the step by kind of work, and what is left; convolutions apart from other products."""
        if self.shares is None:
            return {}
        found = self.shares.summed(_kind_in_words)
        return {**dict(sorted(found.items(), key=lambda one: -one[1])), UNATTRIBUTED: self.shares.unattributed}

    @property
    def by_module(self) -> dict[str, float]:
        """Shares of the step by module, the largest first; work outside of all is left out."""
        return {} if self.shares is None else {name: share for name, share in self.shares.by_module.items() if name}

    @property
    def remarks(self) -> Iterator[str]:
        if self.shares is None:
            return
        if self.emulated:
            yield _EMULATED
        if self.shares.of is SharesFrom.COMPILED:
            yield _NO_MODULES
        if self.shares.fused:
            yield _FUSED.format(count=self.shares.fused)
        unknown = {part.what: part.calls for part in self.shares.parts if part.kind == "unknown"}
        yield from (f"unknown: {name}, {calls} calls a step, of which no rule says what it does" for name, calls in
                    unknown.items())  # fmt: skip

    def _of(self, share: float) -> tuple[float, float | None]:
        return share, None if self.seconds is None else share * self.seconds


def _kind_in_words(part: Share) -> str:
    return f"{part.kind.value} ({part.what})" if part.what and part.kind.value != "unknown" else part.kind.value


def parts_of(run: Run, findings: Mapping[str, Finding]) -> list[StepShares]:
    return [parts_of_record(record, findings.get(record.case.id)) for record in run.records]


def parts_of_record(record: Record, finding: Finding | None) -> StepShares:
    why = "" if record.shares is not None else record.reason or record.detail or "none were looked for"
    seconds = None if finding is None else finding.best_seconds
    return StepShares(record.case, record.shares, why, seconds, record.support.level is Level.EMULATED)


def refuse_none(run: Run) -> None:
    """Raise UsageError for a run whose steps' parts nobody has looked for."""
    if not any(record.shares for record in run.records):
        raise UsageError(
            f"the run {run.id} does not know what parts of its steps take. Measure it again, with --shares."
        )
