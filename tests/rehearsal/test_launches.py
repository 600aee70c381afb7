"""How many kernels a training step of gpt2-124m launches, and a cast; how many bytes a cast moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8bench.model import Request
from fp8bench.nn.sizes import SIZES
from fp8bench.nn.tensor_scales import largest_magnitudes
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.counts import sampled
from tests.facts import B200, H200
from tests.rehearsal.ceilings import ALL_AMAXES, of_cast, of_phases
from tests.rehearsal.stage import Done, Stage

MODES = {"fp8": H200, "fp8-delayed": H200, "fp8-rowwise": H200, "fp8-block": H200, "mxfp8": B200, "nvfp4": B200}
BLOCKS = SIZES["gpt2-124m"].layers
# Launches of a step relative to bf16 with weights cast equally often.
MOST = {
    ("fp8", "cached"): 1.8,
    ("fp8-delayed", "cached"): 1.8,
    ("fp8-rowwise", "cached"): 1.35,
    ("fp8-block", "cached"): 1.35,
    ("mxfp8", "cached"): 1.35,
    ("nvfp4", "cached"): 1.6,
}


def gpt2(stage: Stage, corpus: Corpus, mode: str, weights: str) -> tuple[Done, dict[str, int]]:
    request, facts = Request("transformer", (mode,), axes=(("weights", (weights,)),)), MODES.get(mode, H200)
    ((planned,),) = (group.cases for group in make_plan(request, (facts,), corpus.identity, compares=False))
    return stage.second_step(planned.case, facts), of_phases(planned.case)


def launches(stage: Stage, corpus: Corpus, mode: str, weights: str, blocks: int) -> int:
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(SIZES, "gpt2-124m", replace(SIZES["gpt2-124m"], layers=blocks))
        done, most = gpt2(stage, corpus, mode, weights)
    assert {phase: done.phases[phase] for phase in most if done.phases[phase] > most[phase]} == {}, mode
    return done.launches


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["cached", pytest.param("recast", marks=pytest.mark.nightly)])
def test_a_training_step(weights: str, stage: Stage, corpus: Corpus) -> None:
    """With weights cast once per step it launches little more than bf16.

    All blocks are equal: each adds what the second adds.
    """
    told, carrier = [], None
    for mode in ("bf16", *MODES):
        one, two = (launches(stage, corpus, mode, weights, blocks) for blocks in (1, 2))
        all_of_them = one + (BLOCKS - 1) * (two - one)
        carrier = carrier or all_of_them
        ratio = all_of_them / carrier
        told.append(f"{mode}, weights={weights}: {all_of_them}, {ratio:.2f} times as many")
        assert ratio <= MOST.get((mode, weights), ratio), told
    print(*told, sep="\n")


@pytest.mark.parametrize("mode", sampled([], ["bf16", *MODES]))
def test_all_blocks_launch_alike(mode: str, stage: Stage, corpus: Corpus) -> None:
    one, two, twelve = (launches(stage, corpus, mode, "cached", blocks) for blocks in (1, 2, BLOCKS))
    assert twelve == one + (BLOCKS - 1) * (two - one)


@pytest.mark.parametrize("mode", [mode for mode in MODES if of_cast(mode)])
@pytest.mark.parametrize("role", Role)
def test_one_cast(mode: str, role: Role, stage: Stage) -> None:
    """Reads bfloat16 values for the maximum, and again for codes, a byte per orientation.

    Two NVFP4 codes are a byte, and 16 share a scale; orientations are read separately, and rotated values pass through
    float32.
    """
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    arithmetic, most = precisions.get(mode).arithmetic(MODES[mode]).layer("layer"), of_cast(mode)
    assert most is not None
    arithmetic.turn(arithmetic.cast(x, role), x, role)  # its cache exists from now on
    with stage.ledger(MODES[mode]) as both:
        operand, turned = arithmetic.cast_both(x, role)
        turned = turned or arithmetic.turn(operand, x, role)
    with stage.ledger(MODES[mode]) as one:
        arithmetic.cast(x, role)
    weight = role is Role.WEIGHT
    assert both.done.launches <= (most.weight_both if weight else most.both)
    assert one.done.launches <= (most.weight if weight else most.one)
    later = arithmetic.turn(operand, x, role)
    in_byte = 2 if mode == "nvfp4" else 1
    assert operand.data.shape == (8192, 4096 // in_byte)
    assert turned.data.shape == later.data.shape == (4096, 8192 // in_byte)
    assert operand.data.is_contiguous() and turned.data.is_contiguous() and later.data.is_contiguous()
    most_bytes = 6.0 if mode != "nvfp4" else 2 + 2 * 2 + 1 + 2 / 16 if weight else (2 + 4) + (2 + 4) + 1 + 2 / 16
    assert most_bytes <= both.done.bytes / x.numel() < most_bytes + 0.1


def test_the_amaxes_of_all_weights(stage: Stage) -> None:
    weights = [torch.empty(768, 768, device="meta") for _ in range(48)]
    with stage.ledger(H200) as ledger:
        largest_magnitudes(weights)
    assert ledger.done.operators == {"aten::_foreach_norm": ALL_AMAXES}
