"""What hardware with the formats would hold of an arm, held against formats that are really kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fp8bench.features.train.lab.lab import Lab, hardware_of_arm, made_alone
from fp8bench.features.train.lab.own_trainer import trainer_of
from fp8bench.features.train.values import Arm
from fp8bench.model import MemoryUse
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Arithmetic, MemoryMeter
from fp8bench.registry import devices, precisions
from fp8bench.worker.device_layout import DeviceLedger, Hardware, LaidOutArithmetic
from fp8bench.worker.memory_pass import PreparedMemory, _second_step, memory_of_step
from tests.facts import CPU
from tests.features.train.lab.labs import task_of
from tests.worker.device_codes import Bfloat16Emulated, RealCodes

# Of a batch this large what is kept for backward is what a step needs most.
LARGE = {"batch": 64}
LOW = (("optimizer_states", "fp8lm"), ("gradients", "bf16"))


def memory_of(corpus: Corpus, arm: Arm | str, **settings: Any) -> MemoryUse:
    found = Lab(Settings()).alone(task_of(corpus, arm, **{**LARGE, **settings})).memory
    assert found is not None
    return found


def test_bf16_derived_from_values_in_float32_is_bf16_as_counted(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that this processor keeps: within 1%."""
    native = memory_of(corpus, "bf16")
    hardware = Hardware({"bf16": precisions.get("bf16").arithmetic(CPU)})
    monkeypatch.setattr("fp8bench.features.train.lab.lab.hardware_of_arm", lambda task: hardware)
    taken = type(precisions.get("bf16"))
    monkeypatch.setattr(taken, "arithmetic", lambda own, facts: Bfloat16Emulated())
    emulated = memory_of(corpus, "bf16")
    assert native.on_device == native.peak and emulated.on_device is not None
    assert emulated.peak > 1.1 * native.peak and abs(emulated.on_device / native.peak - 1) < 0.01


@pytest.mark.parametrize("mode", ["fp8", "mxfp8", *(pytest.param(one, marks=pytest.mark.slow) for one in (
    "fp8-rowwise", "fp8-block", "fp8-delayed", "nvfp4"))])  # fmt: skip
@pytest.mark.parametrize("states", [(), LOW])
def test_against_codes_in_memory(mode: str, states: tuple[tuple[str, str], ...], corpus: Corpus) -> None:
    """To the byte: the same arm, whose casts are the hardware's own codes."""
    task, device = task_of(corpus, Arm("own", mode, settings=states), **LARGE), devices.get("cpu")
    meter, hardware = device.memory_meter(0), precisions.get(mode).laid_out(CPU)
    assert isinstance(meter, MemoryMeter) and isinstance(hardware, Arithmetic)
    ledger = DeviceLedger(meter)

    def beside(word: str, inner: Arithmetic) -> Arithmetic:
        return RealCodes(hardware, ledger) if word == mode else inner

    def make(*_: object) -> Any:
        def prepare() -> PreparedMemory:
            trainer = trainer_of(task, task.arms[0], None, beside)
            return PreparedMemory(trainer, lambda phase: list(trainer.advance(phase, watched=False)))

        return prepare

    _second_step(make, device, meter, None)  # what is made once a process is there by then
    found = _second_step(make, device, meter, None).course
    assert found is not None
    derived = memory_of(corpus, task.arms[0])
    assert derived.on_device == found.on_device and derived.on_device < derived.peak


def test_a_map_counts_and_so_does_what_stands_around_products(corpus: Corpus) -> None:
    mapped = Arm("mapped", "bf16", settings=(("precision_map", (("mlp", "fp8"), ("norm", "fp8"))),))
    found, plain = memory_of(corpus, mapped), memory_of(corpus, "bf16")
    assert found.on_device is not None and found.on_device < found.peak and found.on_device != plain.peak


@pytest.mark.parametrize(
    ("arm", "settings", "why"),
    [
        ("fp8", {"arch": "cnn"}, "torch has no convolution in small formats"),
        ("fp8", {"attention": "rounded"}, "--attention rounded rounds what no kernel keeps"),
        ("mxfp6", {}, "no library here has a product"),
    ],
)
def test_nobody_can_say(arm: str, settings: dict[str, str], why: str, corpus: Corpus) -> None:
    found = memory_of(corpus, arm, **settings)
    assert found.on_device is None and found.off_device.startswith(why)


def test_of_several_ranks_nobody_derives_it(corpus: Corpus) -> None:
    task = task_of(corpus, "fp8")
    assert hardware_of_arm(replace(task, facts=replace(CPU, ranks=2))).why == "of several ranks nobody derives it"


def test_a_planted_mistake_is_seen(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands that hardware would have no memory for: the figure is another one."""
    task = task_of(corpus, "fp8", **LARGE)
    device, hardware = devices.get("cpu"), hardware_of_arm(task)
    figures = []
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(LaidOutArithmetic, "_attach", lambda own, shadow, real: None)
        use, _ = memory_of_step(made_alone(task, task.arms[0], hardware), device, 0, leaks=False, hardware=hardware)
        assert isinstance(use, MemoryUse)
        figures.append(use.on_device)
    assert figures[0] != figures[1]
