"""What a label does to a verdict: nothing, cast doubt on it, or take it away. One place that all reports ask."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model import Finding, Label

# Facts about a case that are no doubt about its speed.
REMARKS = frozenset({Label.LAUNCH_BOUND, Label.POWER_CAPPED, Label.ENERGY_UNRESOLVED})
# Those that can be so grave that nothing is left to judge. When they are not, they cast doubt as all others do.
CAN_BE_HARD = frozenset({Label.AA_FAILED, Label.CONTENDED, Label.THROTTLED})


@dataclass(frozen=True)
class Labelled:
    """A label, what there is to say of it here, and whether it is so grave that no verdict can be given."""

    label: Label
    reason: str = ""
    hard: bool = False

    def __post_init__(self) -> None:
        if self.hard and self.label not in CAN_BE_HARD:
            raise ValueError(f"{self.label} takes no verdict away: {', '.join(sorted(CAN_BE_HARD))} can")


def casts_doubt(label: Label) -> bool:
    """Whether a verdict beside this label is no plain fact."""
    return label not in REMARKS


def doubted(finding: Finding) -> bool:
    """Whether a label forbids showing the verdict as a plain fact."""
    return any(map(casts_doubt, finding.labels))
