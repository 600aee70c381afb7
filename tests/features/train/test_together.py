"""Which arms are trained beside each other, by what each needs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import Turns, make_arms, turns_of
from fp8bench.features.train.values import ArmCost
from fp8bench.model import MemoryUse
from tests.facts import CPU
from tests.trainings import small, training

# What each keeps between two steps, and needs at the highest point of one.
NEEDS = {"bf16": (40, 100), "fp8": (50, 120), "mxfp8": (60, 180)}


def turns(room: int, needs: Mapping[str, tuple[int, int]] = NEEDS, seeds: int = 2) -> Turns:
    request = small(dtypes=("bf16", "fp8", "mxfp8"), memory_limit=room, seeds=seeds)
    asked = replace(training(), request=request, arms=make_arms(request, CPU))
    costs = [ArmCost(arm, 0, kept=(("weights", kept),), memory=MemoryUse(peak)) for arm, (kept, peak) in needs.items()]
    return turns_of(asked, costs)


def names(found: Turns) -> list[tuple[int, str]]:
    return [(one.number, "+".join(arm.name for arm in one.arms)) for one in found.turns]


ALL = "bf16+bf16 again+bf16 other seed+fp8+mxfp8"


def test_all_are_together_where_they_fit() -> None:
    """What all keep, and the most that a step of one needs more: 230 and 120; the repeat is in the first seed alone."""
    found = turns(350)
    assert names(found) == [(0, ALL), (1, ALL.replace("+bf16 again", ""))] and (found.cut, found.out) == ("", {})
    assert names(turns(349))[0] == (0, "bf16+bf16 again")
    assert names(turns(1, {"bf16": (40, 100)}))[0] == (0, ALL), "nobody knows what the others need"


def test_else_each_is_beside_the_reference() -> None:
    """In every seed; the first of a seed has the reference's own lines. One that fits alone only is alone."""
    found = turns(219)
    pairs = ["bf16+bf16 again", "bf16+bf16 other seed", "bf16+fp8", "mxfp8"]
    assert names(found) == [*((0, one) for one in pairs), *((1, one) for one in pairs[1:])]
    assert [one.first for one in found.turns] == [True, False, False, False, True, False, False]
    assert "all arms need 350 B together, and there are 219 B" in found.cut and not found.out


def test_one_that_fits_nowhere_is_out_and_the_reference_is_needed() -> None:
    """With the bytes."""
    found = turns(179)
    assert found.out == {"mxfp8": "it needs 180 B alone, and there are 179 B"}
    assert names(found) == [(0, "bf16+bf16 again"), (0, "bf16+bf16 other seed"), (0, "bf16+fp8"),
                            (1, "bf16+bf16 other seed"), (1, "bf16+fp8")]  # fmt: skip
    with pytest.raises(UsageError, match=r"the reference bf16 needs 100 B .*, and there are 99 B. Choose a smaller"):
        turns(99)
