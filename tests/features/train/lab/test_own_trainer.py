"""A user's own model in the lab: its batches, its optimizer, what its layers cast, and what cannot be trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.own_model import UserArmModel, UserBatches
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.values import (
    Arm,
    LayerReading,
    SeedTask,
    StreamLine,
    Validation,
    make_empty_text,
)
from fp8bench.model.raw import Settings
from fp8bench.nn.own_model import parse_make_return_value
from fp8bench.workloads.model import LOADED_MODELS, MODEL_MAKERS_IN_PROCESS
from tests.counts import for_each
from tests.facts import CPU
from tests.features.train.lab.labs import lab_of, restarted, rows

TRUE = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A model with dropout, batch norm and a head that returns the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.norm(self.first(x))), 0.1, self.training)
        return F.cross_entropy(self.head(hidden), y)


class InPlace(Net):
    """Normalises its input in place, as many models do."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5), y)


def pairs(step: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 16)
    return x, (x @ TRUE).argmax(1)


def loader() -> DataLoader[Any]:
    x = torch.randn(80, 16, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, (x @ TRUE).argmax(1)), batch_size=16, shuffle=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], 0.5)


def from_numpy(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws from the seeded generators of numpy and random."""
    x = torch.from_numpy(np.random.randn(16, 16)).float() * (1 + random.random())
    return x, (x @ TRUE).argmax(1)


def half_frozen() -> Net:
    model = Net()
    model.first.requires_grad_(False)
    return model


MAKERS: dict[str, Callable[[], object]] = {
    "function": lambda: {"model": Net(), "batches": pairs, "held_out": pairs},
    "loader": lambda: (Net(), loader()),
    "sgd": lambda: {"model": Net(), "batches": loader(), "optimizer": sgd, "schedule": halving},
    "single": lambda: (Net(), pairs(0, 0)),
    "spectral": lambda: (
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4)),
        lambda step, seed: torch.randn(16, 16),
    ),
    "in-place": lambda: {"model": InPlace(), "batches": [pairs(0, 0), pairs(1, 0)], "held_out": [pairs(2, 0)]},
    "numpy": lambda: (Net(), from_numpy),
    "large": lambda: (nn.Linear(256, 256), torch.randn(1, 256)),
    "half frozen": lambda: (half_frozen(), pairs),
    "targets": lambda: (nn.Linear(16, 4), pairs, lambda output, batch: F.cross_entropy(output, batch[1])),
    "plain": lambda: (
        nn.Linear(16, 4),
        lambda step, seed: (torch.randn(16, 16),),
        lambda output: output.square().mean(),
    ),
}


@pytest.fixture(autouse=True)
def _makers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, make in {**MAKERS, **{name: make for name, (make, _) in WRONG.items()}}.items():
        monkeypatch.setitem(MODEL_MAKERS_IN_PROCESS, name, make)
    yield
    LOADED_MODELS.clear()


def task_of(name: str, *modes: str, steps: int = 12, seed: int = 0, **settings: Any) -> SeedTask:
    own = replace(TrainerSettings(make=name), **settings)
    arms = tuple(Arm(mode, mode) for mode in modes)
    return SeedTask(seed, arms, own, steps, 4, make_empty_text("own"), CPU)


def trained(task: SeedTask, arm: str) -> list[StreamLine]:
    return list(lab_of(task).advance(arm, task.steps))


def by_hand(make: Callable[[], object], steps: int, seed: int = 0) -> list[float]:
    """The losses of the same loop written by hand, with the same draws."""
    from fp8bench.features.train.lab.step_optimizer import derive_seed
    from fp8bench.nn.own_model import seed_generators

    with seed_generators(seed, CPU):
        given = parse_make_return_value("own", make(), seed)
    batches = UserBatches("own", given, seed, CPU)
    losses = []
    assert given.optimizer is not None and given.schedule is not None
    optimizer = given.optimizer(given.model)
    schedule = given.schedule(optimizer)
    for step in range(steps):
        x, y = batches.read(step)
        with seed_generators(derive_seed("step", seed, step, 0), CPU):
            optimizer.zero_grad()
            loss = given.model(x, y)
            loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def test_an_untouched_arm_is_the_loop_written_by_hand() -> None:
    """Losses are equal bit for bit, with torch's optimizer and schedule."""
    lines = rows(trained(task_of("sgd", "untouched", clip=0.0), "untouched"))
    assert [row.loss for row in lines] == by_hand(MAKERS["sgd"], 12)
    assert [row.rate for row in lines] == pytest.approx([0.1] * 4 + [0.05] * 4 + [0.025] * 4)


@for_each("name", ["loader", "in-place", "numpy", "targets"])
def test_arms_read_the_same_batches_and_differ_by_their_arithmetic(name: str) -> None:
    """In fp32 the first loss is that of the untouched model, in fp8 another; a repeated task gives the same."""
    task = task_of(name, "untouched", "fp32", "fp8")
    lab = lab_of(task)
    untouched, fp32, fp8 = (rows(lab.advance(arm.name, 6)) for arm in task.arms)
    assert fp32[0].loss == pytest.approx(untouched[0].loss, rel=1e-6)
    assert fp8[0].loss != fp32[0].loss and fp8[0].loss == pytest.approx(fp32[0].loss, rel=0.1)
    assert rows(trained(task, "fp8"))[:6] == fp8 and {row.tokens for row in fp8} == {16}
    assert rows(lab_of(replace(task, seed=1)).advance("fp32", 1))[0].loss != fp32[0].loss


@for_each("name", ["sgd", "loader"])
@for_each("mode", ["fp8-delayed", "untouched"])
def test_a_checkpoint_goes_on_to_the_same_bits(name: str, mode: str, tmp_path: Path) -> None:
    """The checkpoint is in the middle of an epoch, with moments, schedules, running means and delayed scales."""
    task = task_of(name, mode)
    whole = rows(trained(task, mode))
    lab = lab_of(task)
    lab.advance(mode, 7)
    assert rows(restarted(lab, task, tmp_path / name).advance(mode, 12)) == whole[7:]


def test_micro_batches_are_the_next_batches() -> None:
    own = [row.loss for row in rows(trained(task_of("plain", "untouched", steps=4, rate=1e-10), "untouched"))]
    two = rows(trained(task_of("plain", "untouched", steps=2, rate=1e-10, micro_batches=2), "untouched"))
    assert [row.loss for row in two] == pytest.approx([(own[0] + own[1]) / 2, (own[2] + own[3]) / 2], rel=1e-5)
    assert two[0].tokens == 32


def test_watched_steps_read_what_layers_cast() -> None:
    """Converted layers have scales and noise; an untouched arm has readings of tensors only."""
    lines = trained(task_of("function", "fp8"), "fp8")
    readings = [line for line in lines if isinstance(line, LayerReading) and line.step == 0]
    assert {(line.layer, line.role) for line in readings} >= {
        (layer, role) for layer in ("first", "head") for role in ("input", "weight", "gradient")
    }
    assert all(line.signal_to_noise is not None and 15 < line.signal_to_noise < 60 for line in readings)
    assert any(line.scale != 1 for line in readings)
    plain = [line for line in trained(task_of("function", "untouched"), "untouched") if isinstance(line, LayerReading)]
    assert plain and all(line.signal_to_noise is None for line in plain)
    assert [row.loss for row in rows(trained(replace(task_of("function", "fp8"), stride=1), "fp8"))] == [
        row.loss for row in rows(lines)
    ]


def test_watching_asks_for_no_parametrized_weight() -> None:
    """Reading a spectral-norm weight in training mode advances its power iteration."""
    task = task_of("spectral", "fp32")
    every, none = (rows(trained(replace(task, stride=stride), "fp32")) for stride in (1, 100))
    assert [row.loss for row in every] == [row.loss for row in none]


def test_validation_changes_nothing() -> None:
    task = task_of("function", "fp8-delayed")
    lab = lab_of(task)
    (look,) = lab.validate("fp8-delayed")
    assert isinstance(look, Validation) and look.of == "held-out" and look.tokens == 8 * 16
    assert rows(lab.advance("fp8-delayed", 12)) == rows(trained(task, "fp8-delayed"))
    assert lab_of(task_of("loader", "fp8")).validate("fp8") == ()


def test_a_model_that_changes_its_input_changes_no_batch() -> None:
    (first,), (again,) = (lab_of(task_of("in-place", "fp32")).validate("fp32") for _ in range(2))
    assert first == again


def test_epochs_are_shuffled_anew_and_batches_read_in_any_order() -> None:
    with_seed = UserBatches("own", parse_make_return_value("own", MAKERS["loader"]()), 3, CPU)
    read = [with_seed.read(place)[0] for place in range(11)]
    again = UserBatches("own", parse_make_return_value("own", MAKERS["loader"]()), 3, CPU)
    for place in (9, 2, 10, 0):
        assert torch.equal(again.read(place)[0], read[place])
    assert not torch.equal(read[0], read[5])
    first = torch.cat(read[:5]).sort(0).values
    assert torch.equal(first, torch.cat(read[5:10]).sort(0).values)


def _changing() -> object:
    own = np.random.default_rng()

    def batches(step: int, seed: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(own.standard_normal((8, 16))).float()
        return x, (x @ TRUE).argmax(1)

    return Net(), batches


def _failing(step: int, seed: int) -> tuple[Tensor, Tensor]:
    if step == 1:
        raise RuntimeError("the disk is gone")
    return pairs(step, seed)


def _frozen() -> object:
    return Net().requires_grad_(False), pairs


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "iterator": (lambda: (Net(), iter([pairs(0, 0)] * 20)), "can be read only once"),
    "changing": (_changing, "batch 0 is different when"),
    "failing": (lambda: (Net(), _failing), r"batch 1 cannot be read: RuntimeError: the disk is gone"),
    "empty": (lambda: {"model": Net(), "batches": []}, "first of its batches cannot be read: there is none"),
    "frozen": (_frozen, "no parameter of its model requires"),
    "half": (lambda: (Net().bfloat16(), pairs), "is bfloat16. Make it float32"),
    "word": (lambda: {"model": Net(), "batches": pairs, "optimiser": sgd}, "optimiser.*Did you mean.*optimizer"),
    "schedule": (lambda: {"model": Net(), "batches": pairs, "schedule": halving}, "a schedule without an optimizer"),
    "no-optimizer": (lambda: {"model": Net(), "batches": pairs, "optimizer": lambda m: 3}, "function returns int"),
    "others": (lambda: {"model": Net(), "batches": pairs, "optimizer": lambda m: sgd(Net())}, "not the model's"),
    "plateau": (
        lambda: {"model": Net(), "batches": pairs, "optimizer": sgd,
                 "schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
        "schedule function returns ReduceLROnPlateau",
    ),
    "nothing": (
        lambda: (nn.Sequential(nn.LayerNorm(16)), torch.ones(2, 16)),
        "no layer of Sequential can be",
    ),
    "shape": (lambda: (Net(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long))), "failed"),
}  # fmt: skip


@for_each("name", WRONG)
def test_what_cannot_be_trained_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=WRONG[name][1]):
        Lab(Settings()).examine(task_of(name, "bf16"))


def test_settings_of_the_built_in_optimizer_are_refused_with_an_own_one() -> None:
    with pytest.raises(UsageError, match="--rate is an option of the built-in optimizer"):
        Lab(Settings()).examine(task_of("sgd", "fp32", rate=0.5))


def test_frozen_weights_are_counted_once_and_have_neither_gradients_nor_moments() -> None:
    lab = lab_of(task_of("half frozen", "bf16"))
    trainer = lab._trainers["bf16"]
    frozen = [weight.detach().clone() for weight in trainer.model.first.parameters()]
    lab.advance("bf16", 3)
    assert all(map(torch.equal, frozen, trainer.model.first.parameters()))
    sizes = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in trainer._list_stored_tensors().items()}
    trained_bytes = 4 * sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    assert sizes["frozen"] == 4 * sum(weight.numel() for weight in frozen)
    assert {sizes[name] for name in ("weights", "gradients", "first moment", "second moment")} == {trained_bytes}


def test_every_cast_uses_the_stored_scales(tmp_path: Path) -> None:
    """The reference's casts do not."""
    amaxes = {"input": 4.0, "weight": 0.5, "gradient": 2.0}
    known = tuple(("fp8", layer, role, amax) for layer in ("first", "head") for role, amax in amaxes.items())
    task, usual = (task_of("function", "untouched", "fp8", **settings) for settings in ({"scales": known}, {}))
    lab = lab_of(task)
    plain = lab_of(usual)
    for arm in ("untouched", "fp8"):
        assert (rows(lab.advance(arm, 6)) == rows(plain.advance(arm, 6))) == (arm == "untouched")
    arithmetics: Any = lab._trainers["fp8"].arithmetics
    for arithmetic in arithmetics.values():
        scales = {role.value: float(scale.last_pair.scale) for role, scale in arithmetic.scales.items()}
        assert scales == {"input": 448 / 4, "weight": 448 / 0.5, "gradient": 57344 / 2}
    assert len(arithmetics) == 2
    other = replace(task, settings=replace(task.settings, scales=(("fp8", "elsewhere", "input", 1.0),)))
    with pytest.raises(UsageError, match="scales for elsewhere, and none for first"):
        UserArmModel(other, task.arms[1])


def test_memory_has_no_part_of_the_model_that_the_process_keeps() -> None:
    """Weights, gradients and two moments of AdamW, of which each has a number for each parameter."""
    parameters = 4 * (256 * 256 + 256)
    memory = Lab(Settings()).measure_memory(task_of("large", "untouched")).memory
    assert memory is not None and 4 * parameters <= memory.peak < 4.3 * parameters
