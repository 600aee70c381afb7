"""What a label does to a verdict: nothing, cast doubt on it, or take it away. One place that all reports ask."""

from __future__ import annotations

from fp8bench.model import Finding, Label

# Facts about a case that are no doubt about its speed.
REMARKS = frozenset({Label.LAUNCH_BOUND, Label.POWER_CAPPED, Label.ENERGY_UNRESOLVED})
# Those that can be so grave that nothing is left to judge: `analysis.labels` says when they are. Else they are doubts.
CAN_BE_HARD = frozenset({Label.AA_FAILED, Label.CONTENDED, Label.THROTTLED})


def casts_doubt(label: Label) -> bool:
    """Whether a verdict beside this label is no plain fact."""
    return label not in REMARKS


def doubted(finding: Finding) -> bool:
    """Whether a label forbids showing the verdict as a plain fact."""
    return any(map(casts_doubt, finding.labels))
