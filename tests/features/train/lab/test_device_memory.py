"""Memory of one arm alone against what autograd keeps, and what hardware with the formats would hold against real
codes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8bench.features.train.arms import MSAMP_LEVELS
from fp8bench.features.train.lab.lab import Lab, NotFinite, find_hardware
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.step import advance
from fp8bench.features.train.values import Arm, ArmCost
from fp8bench.model import MemoryRole, MemoryUse
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Arithmetic, MemoryMeter
from fp8bench.registry import devices, precisions
from fp8bench.worker.device_layout import DeviceLedger
from fp8bench.worker.memory_pass import StateWithStep, _measure_second_step
from tests.counts import for_each, sampled
from tests.facts import CPU
from tests.features.train.lab.labs import lab_of, task_of
from tests.worker.device_codes import RealCodes

# A batch so large that activations saved for backward dominate.
LARGE = {"batch": 64}
LOW = (("optimizer_states", "fp8lm"), ("gradients", "bf16"))
SAVED = (MemoryRole.ACTIVATIONS, MemoryRole.LOW_ACTIVATIONS, MemoryRole.LOW_WEIGHTS, MemoryRole.DATA)


def cost_of(corpus: Corpus, arm: Arm | str, lab: Lab | None = None, **settings: Any) -> ArmCost:
    return (lab or Lab(Settings())).measure_memory(task_of(corpus, arm, **settings))


def memory_of(corpus: Corpus, arm: Arm | str, **settings: Any) -> MemoryUse:
    memory = cost_of(corpus, arm, **{**LARGE, **settings}).memory
    assert memory is not None
    return memory


def saved_for_backward(trainer: Trainer) -> int:
    """Bytes that autograd saves in one step in addition to the weights, each storage once."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in trainer.memory_roles()[MemoryRole.WEIGHTS]}  # type: ignore[attr-defined]
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        list(advance(trainer))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("arm", sampled(["fp8"], ["fp8", "fp32", "bf16"]))
def test_what_lies_at_the_highest_point_is_what_autograd_keeps(arm: str, corpus: Corpus) -> None:
    """Weights, moments and gradients take their bytes a parameter; all parts sum to the peak."""
    memory = memory_of(corpus, arm, batch=256)
    assert memory.why == ""
    roles = {MemoryRole(name): size for name, size in memory.roles}
    assert sum(roles.values()) == memory.peak
    trainer = Trainer(task_of(corpus, arm, batch=256), Arm(arm, arm))
    list(advance(trainer))
    assert sum(roles.get(role, 0) for role in SAVED) == pytest.approx(saved_for_backward(trainer), abs=64)
    count = trainer.describe_arm_state().parameters
    assert roles[MemoryRole.WEIGHTS] == 4 * count and roles[MemoryRole.OPTIMIZER] == pytest.approx(8 * count, abs=64)


def test_what_is_kept_between_two_steps(corpus: Corpus) -> None:
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    low_states = Arm("low", "fp8-delayed", settings=LOW)
    plain, low = dict(cost_of(corpus, "bf16", lab).kept), dict(cost_of(corpus, low_states, lab).kept)
    count = plain["weights"] / 4
    assert plain["gradients"] == 4 * count and low["gradients"] == 2 * count and "casts" not in plain
    assert low["first moment"] < 1.01 * count and low["second moment"] < 2.02 * count
    assert low["casts"] == 4 * 3 * (1024 * 4 + 4 + 4), "a history, a scale and a count of each role of four layers"
    beside = cost_of(corpus, "bf16", lab).memory
    alone = cost_of(corpus, "bf16", lab_of(task_of(corpus, "fp32"))).memory
    assert beside and alone and (beside.peak, beside.roles) == (alone.peak, alone.roles), "other arms are forgotten"


def test_states_in_low_precision_take_less_memory_in_a_small_model_too(corpus: Corpus) -> None:
    """Restored states are a small part of the model, and copies for measuring do not count."""
    low, plain = (memory_of(corpus, arm, model="nano", batch=2) for arm in (MSAMP_LEVELS["msamp-o2"], "bf16"))
    assert low.on_device is not None and low.on_device < 0.9 * plain.peak
    count = 1.0e6
    assert dict(low.roles)["optimizer"] < 3.3 * count and dict(plain.roles).get("workspace", 0) < count


def test_an_arm_that_stops_raises_instead_of_a_memory(corpus: Corpus) -> None:
    with pytest.raises(NotFinite, match="stopped at step 1"):
        cost_of(corpus, "fp16", rate=10.0, loss_scale="4294967296")


@pytest.mark.parametrize(
    ("mode", "states"),
    [
        pytest.param("mxfp8", LOW, marks=pytest.mark.slow),
        *sampled([], itertools.product(("fp8", "fp8-rowwise", "fp8-block", "fp8-delayed", "nvfp4"), ((), LOW))),
    ],
)
def test_against_codes_in_memory(mode: str, states: tuple[tuple[str, str], ...], corpus: Corpus) -> None:
    """The derived bytes on the device equal, to the byte, those of the same arm with the hardware's own codes."""
    task, device = task_of(corpus, Arm("own", mode, settings=states), **LARGE), devices.get("cpu")
    meter, hardware = device.memory_meter(0), precisions.get(mode).laid_out(CPU)
    assert isinstance(meter, MemoryMeter) and isinstance(hardware, Arithmetic)
    ledger = DeviceLedger(meter)

    def beside(word: str, inner: Arithmetic) -> Arithmetic:
        return RealCodes(hardware, ledger) if word == mode else inner

    def make(*_: object) -> Any:
        def prepare() -> StateWithStep:
            trainer = Trainer(task, task.arms[0], None, beside)
            return StateWithStep(trainer, lambda phase: list(advance(trainer, phase, watched=False)))

        return prepare

    _measure_second_step(make, device, meter, None)  # one-time allocations of the process exist by then
    course = _measure_second_step(make, device, meter, None).memory_course
    assert course is not None
    derived = memory_of(corpus, task.arms[0])
    assert derived.on_device == course.on_device and derived.on_device < derived.peak


def test_a_map_counts_and_so_does_what_stands_around_products(corpus: Corpus) -> None:
    mapped = Arm("mapped", "bf16", settings=(("precision_map", (("mlp", "fp8"), ("norm", "fp8"))),))
    memory, plain = memory_of(corpus, mapped), memory_of(corpus, "bf16")
    assert memory.on_device is not None and memory.on_device < memory.peak and memory.on_device != plain.peak


@for_each(
    ("arm", "settings", "why"),
    [
        ("fp8", {"arch": "cnn"}, "torch has no convolution in small formats"),
        ("fp8", {"attention": "rounded"}, "--attention rounded rounds values"),
        ("mxfp6", {}, "no library here has a product"),
    ],
)
def test_what_hardware_would_hold_is_unknown(arm: str, settings: dict[str, str], why: str, corpus: Corpus) -> None:
    memory = memory_of(corpus, arm, **settings)
    assert memory.on_device is None and memory.off_device.startswith(why)
    of_ranks = replace(task_of(corpus, "fp8"), facts=replace(CPU, ranks=2))
    assert find_hardware(of_ranks).why == "the memory on a device is not derived for several ranks"
