"""Which labels cast doubt on a verdict, which can take it away, and which say something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.analysis.trust import CAN_BE_HARD, REMARKS, casts_doubt, doubted
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
