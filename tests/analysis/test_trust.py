"""Which labels cast doubt on a verdict, which can take it away, and which say something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.trust import CAN_BE_HARD, REMARKS, Labelled, casts_doubt, doubted
from fp8bench.model import Case, Finding, Label, Verdict

FINDING = Finding(Case("gemm", (), "bf16", "cpu"), Verdict.FASTER)


def test_remarks_are_facts_of_the_case_and_no_doubt_of_its_speed() -> None:
    """Being bound by launches, or by a power cap, is what it is; energy is another matter than speed."""
    assert {Label.LAUNCH_BOUND, Label.POWER_CAPPED, Label.ENERGY_UNRESOLVED} == REMARKS
    assert not doubted(FINDING) and not doubted(replace(FINDING, labels=tuple(REMARKS)))
    assert not REMARKS & CAN_BE_HARD


@pytest.mark.parametrize("label", sorted(set(Label) - REMARKS))
def test_any_other_label_casts_doubt(label: Label) -> None:
    assert casts_doubt(label) and doubted(replace(FINDING, labels=(*REMARKS, label)))


@pytest.mark.parametrize("label", Label)
def test_few_labels_take_a_verdict_away(label: Label) -> None:
    """A verdict must not get lost for another one."""
    assert Labelled(label).hard is False
    if label in CAN_BE_HARD:
        assert Labelled(label, hard=True).hard and casts_doubt(label)
        return
    with pytest.raises(ValueError, match=f"{label} takes no verdict away: aa-failed, contended, throttled can"):
        Labelled(label, hard=True)
