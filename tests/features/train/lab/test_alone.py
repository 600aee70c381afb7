"""What an arm takes with nothing beside it, against counts by hand and by autograd's own hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8bench.features.train.lab.lab import Lab, NotFinite
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.values import Arm, ArmCost
from fp8bench.model import MemoryRole
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus
from tests.features.train.lab.labs import lab_of, task_of

LOW = Arm("low", "fp8-delayed", settings=(("optimizer_states", "fp8lm"), ("gradients", "bf16")))
# Of a batch this large what is kept for backward is what a step needs most.
LARGE = {"batch": 256}
SAVED = (MemoryRole.ACTIVATIONS, MemoryRole.LOW_ACTIVATIONS, MemoryRole.LOW_WEIGHTS, MemoryRole.DATA)


def cost_of(corpus: Corpus, arm: Arm | str, lab: Lab | None = None, **settings: Any) -> ArmCost:
    return (lab or Lab(Settings())).alone(task_of(corpus, arm, **settings))


def saved_for_backward(trainer: Trainer) -> int:
    """Bytes that autograd keeps in one step beside the weights, each memory once."""
    weights = {one.untyped_storage().data_ptr() for one in trainer.memory_roles()[MemoryRole.WEIGHTS]}  # type: ignore[attr-defined]
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        list(trainer.advance())
    return sum(one.untyped_storage().nbytes() for one in kept.values())


MORE = (pytest.param(one, marks=pytest.mark.slow) for one in ("fp32", "bf16"))


@pytest.mark.parametrize("arm", ["fp8", *MORE])
def test_what_lies_at_the_highest_point_is_what_autograd_keeps(arm: str, corpus: Corpus) -> None:
    """And weights, moments and gradients of so many bytes a parameter; all parts sum to the peak."""
    memory = cost_of(corpus, arm, **LARGE).memory
    assert memory is not None and memory.why == ""
    roles = {MemoryRole(name): size for name, size in memory.roles}
    assert sum(roles.values()) == memory.peak
    trainer = Trainer(task_of(corpus, arm, **LARGE), Arm(arm, arm))
    list(trainer.advance())
    assert sum(roles.get(role, 0) for role in SAVED) == pytest.approx(saved_for_backward(trainer), abs=64)
    count = trainer.state().parameters
    assert roles[MemoryRole.WEIGHTS] == 4 * count and roles[MemoryRole.OPTIMIZER] == pytest.approx(8 * count, abs=64)


def test_what_is_kept_between_two_steps(corpus: Corpus) -> None:
    """Low states are low, and histories of delayed scales are counted once they are there."""
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    plain, low = dict(cost_of(corpus, "bf16", lab).kept), dict(cost_of(corpus, LOW, lab).kept)
    count = plain["weights"] / 4
    assert plain["gradients"] == 4 * count and low["gradients"] == 2 * count and "casts" not in plain
    assert low["first moment"] < 1.01 * count and low["second moment"] < 2.02 * count
    assert low["casts"] == 4 * 3 * (1024 * 4 + 4 + 4), "a history, a scale and a count of each role of four layers"
    beside = cost_of(corpus, "bf16", lab).memory
    alone = cost_of(corpus, "bf16", lab_of(task_of(corpus, "fp32"))).memory
    assert beside and alone and (beside.peak, beside.roles) == (alone.peak, alone.roles), "other arms are forgotten"


def test_an_arm_that_stops_has_no_memory_to_tell_of(corpus: Corpus) -> None:
    """Its steps would be empty."""
    with pytest.raises(NotFinite, match="its steps were not finite after 1, and it stopped"):
        cost_of(corpus, "fp16", rate=10.0, handicap=1000.0, loss_scale="4294967296")


@pytest.mark.slow
def test_a_batch_is_tried_in_two_steps_of_the_arm_alone(corpus: Corpus) -> None:
    """More take more, checkpointing less; what a step needs at its highest point is what the memory pass says."""
    lab = lab_of(task_of(corpus, "fp32"))
    blocks = Arm("blocks", "fp32", settings=(("checkpointing", "blocks"),))
    small, middle, large = (lab.try_alone(task_of(corpus, "fp32", batch=one), 1 << 30) for one in (32, 64, 128))
    less = lab.try_alone(task_of(corpus, blocks, batch=128), 1 << 30)
    assert small and middle and large and less and large - middle == 2 * (middle - small) > 0 and less < large
    memory = cost_of(corpus, "fp32", batch=128).memory
    assert memory is not None and large == pytest.approx(memory.peak, rel=0.01)


def test_further_steps_go_over_the_last_ones_again(corpus: Corpus) -> None:
    """Of an arm that is done: real ones, which change its weights and nobody else's; one that stops says so."""
    lab = lab_of(task_of(corpus, "fp32", "bf16", steps=3))
    for arm in ("fp32", "bf16"):
        lab.advance(arm, 3)
    before = lab.validate("fp32"), lab.validate("bf16")
    assert lab.loop("fp32", 5) > 0 and lab.check("fp32").wrong == ""
    assert (lab.validate("fp32")[0].loss != before[0][0].loss) and lab.validate("bf16") == before[1]
    wild = lab_of(task_of(corpus, "fp16", steps=3, rate=10.0, handicap=1000.0, loss_scale="4294967296"))
    with pytest.raises(NotFinite):
        wild.loop("fp16", 3)
    assert wild.check("fp16").wrong == "it has stopped: its numbers are not finite"
