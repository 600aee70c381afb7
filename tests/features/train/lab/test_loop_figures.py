"""What is seen of a loop that has no reference: against what torch finds itself, and habits that are ill or well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.lab.loop_figures import data_figures, predictions_of, sign_of_inputs
from fp8bench.features.train.lab.watched_step import is_watched
from fp8bench.features.train.values import (
    GRADIENTS_LEFT,
    MOMENTS_GONE,
    OTHERS_TRAIN,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
)
from tests.counts import for_each


class Tied(nn.Module):
    """A table that reads words, and says them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.table(x)))
        return result


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.tanh(self.layer(x)))
        return result


def words(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).remainder(11).reshape(shape)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), lambda: torch.randn(3, 7, 6), ("0", "1")),
    "a layer used twice": (Twice, lambda: torch.randn(7, 6), ("layer",)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"),
                              nn.Conv2d(4, 5, (1, 2), dilation=(1, 2))),
        lambda: torch.randn(2, 3, 9, 9), ("0", "1"),
    ),
    "one example": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3)), lambda: torch.randn(3, 9), ("0",)),
    "a table": (lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=2)), lambda: words(4, 5), ("0",)),
    "a sparse table": (lambda: nn.Sequential(nn.Embedding(11, 6, sparse=True)), lambda: words(4, 5), ("0",)),
    "tied": (Tied, lambda: words(3, 4), ("table",)),
    "groups": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=2)), lambda: torch.randn(2, 4, 9), ()),
}  # fmt: skip


def cosines(
    name: str, parts: int = 1, change: Callable[[Tensor], Tensor] | None = None, **cast: Any
) -> dict[str, float]:
    """Those that a watched step tells of a module of the table."""
    make, batch, _ = MODULES[name]
    torch.manual_seed(3)
    module, lines = make(), list[StreamLine]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if change is not None:
        next(iter(module.parameters())).register_hook(change)  # type: ignore[no-untyped-call]
    with fp8bench.watch(module, optimizer, told=lines.extend, health=False):
        for _ in range(parts):
            with torch.autocast("cpu", **cast) if cast else torch.enable_grad():
                loss = module(batch()).float().square().mean()
            loss.backward()
        optimizer.step()
    return {line.layer: line.value for line in lines if isinstance(line, StepFigure) and line.name == "gradient_cosine"}


@for_each("parts", [1, 3])
@for_each("name", MODULES)
def test_gradients_of_weights_are_those_of_their_layers(name: str, parts: int) -> None:
    seen = cosines(name, parts)
    assert tuple(seen) == MODULES[name][2]
    assert all(value == pytest.approx(1, abs=1e-5) for value in seen.values())


@for_each("name", [name for name in MODULES if MODULES[name][2] and name != "a sparse table"])
def test_a_gradient_that_is_turned_or_gone_is_seen(name: str) -> None:
    layer = MODULES[name][2][0]
    assert cosines(name, 2, torch.neg)[layer] == pytest.approx(-1, abs=1e-5)
    assert cosines(name, 2, torch.zeros_like)[layer] == 0
    assert cosines(name, 2, lambda gradient: gradient.clamp(-1e-3, 1e-3))[layer] > 0.3


def test_rounding_turns_them_by_little() -> None:
    assert cosines("linear", dtype=torch.bfloat16)["0"] == pytest.approx(1, abs=1e-3)


def test_predictions_of_a_cross_entropy() -> None:
    """Whatever scales the loss; of other losses nothing is known."""
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(8, 5)).requires_grad_(), torch.arange(8) % 5
    loss = F.cross_entropy(logits, targets)
    p = logits.detach().softmax(-1)
    expected = {"classes": 5.0, "entropy": float(-(p * p.log()).sum(-1).mean()),
                "logit_range": float((p.log().amax(-1) - p.log().amin(-1)).amax())}  # fmt: skip
    images = F.cross_entropy(logits.t()[None, :, :, None], targets[None, :, None])
    for root in (loss, loss * 1024 / 4, (loss / 2).to(torch.float64), images):
        assert {name: float(value) for name, value in predictions_of(root).items()} == pytest.approx(expected)
    for root in (
        logits.sum(),
        F.mse_loss(logits, logits.detach() + 1),
        loss + logits.square().mean(),
        torch.tensor(1.0),
    ):
        assert predictions_of(root) == {}


@for_each("copies", [0, 1, 3, 15])
def test_copies_in_a_batch_are_counted(copies: int) -> None:
    """Each example that has a twin, by a comparison of all pairs; wherever the twins stand, in any dtype."""
    for drawn in (torch.randn(16, 3, 5), torch.randint(0, 9000, (16, 40)), torch.randn(16, 20).bfloat16()):
        drawn[1 : copies + 1] = drawn[0]
        x = drawn[torch.randperm(16)]
        twins = sum(any(bool((x[a] == x[b]).all()) for b in range(16) if a != b) for a in range(16)) / 16
        found = data_figures(({"input_ids": x},))
        assert float(found["duplicates"]) == twins == ((copies + 1) / 16 if copies else 0.0)
        values = x.double()
        assert float(found["input_mean"]) == pytest.approx(float(values.mean()))
        assert float(found["input_deviation"]) == pytest.approx(float(values.std()))


def test_little_is_said_of_little_data() -> None:
    """Of few examples, of few values, of masks and of nothing; what is not finite is no copy of anything."""
    few = (torch.zeros(4, 20), torch.zeros(20, 4), torch.zeros(20))
    assert all(data_figures(x).keys() == {"input_mean", "input_deviation"} for x in few)
    assert data_figures(torch.zeros(9, 9, dtype=torch.bool)) == data_figures(()) == data_figures("text") == {}
    assert float(data_figures(torch.full((9, 9), math.nan))["duplicates"]) == 0.0
    large = torch.randn(8, 3, 224, 224)
    large[7] = large[0]
    assert float(data_figures(large)["duplicates"]) == 0.25


def test_a_loop_tells_of_its_batches() -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[StreamLine] = []
    with fp8bench.watch(model, optimizer, told=told.extend, stride=5):
        for step in range(10):
            model(torch.full((8, 8), float(step)) + torch.arange(8.0)[:, None] // 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    figures = [one for one in told if isinstance(one, StepFigure)]
    watched = {one.step for one in figures if one.name == "examples"}
    assert {one.step for one in figures if one.name == "duplicates"} == watched and len(watched) == 2
    assert {one.value for one in figures if one.name == "duplicates"} == {1.0}
    assert [one.value for one in figures if one.name == "input_mean"] == [step + 1.5 for step in sorted(watched)]


def test_inputs_are_told_apart() -> None:
    """By any of their values, whatever holds them; large ones by many of theirs."""
    x = torch.randn(64, 3000)
    same, changed = x.clone(), x.clone()
    changed[5] += 1e-3
    assert sign_of_inputs((x,)) == sign_of_inputs(({"x": same},)) and sign_of_inputs((x,))[1] == 64
    assert sign_of_inputs((x,))[0] != sign_of_inputs((changed,))[0]
    assert sign_of_inputs((words(4, 5),))[0] != sign_of_inputs((words(4, 5).flip(0),))[0]
    assert sign_of_inputs(("no tensor",)) == (None, 0)


@for_each("stride", [1, 2, 10])
def test_one_step_of_each_stride_is_watched_in_any_phase(stride: int) -> None:
    watched = [step for step in range(40 * stride) if is_watched(step, stride)]
    assert watched[0] == 0 and [step // stride for step in watched] == list(range(40))
    assert {step % stride for step in watched} == set(range(stride))


def loop(
    steps: int,
    zero: Callable[[torch.optim.Optimizer, int], object] = lambda optimizer, step: optimizer.zero_grad(),
    change: Callable[[nn.Module, torch.optim.Optimizer, int], object] = lambda *_: None,
    other: torch.optim.Optimizer | None = None,
) -> list[StreamLine]:
    """A loop whose gradients are cleared as `zero` does it, before backward."""
    torch.manual_seed(0)
    module, lines = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), list[StreamLine]()
    groups = [{"params": module[0].parameters(), "lr": 1e-4}, {"params": module[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    with fp8bench.watch(module, optimizer, told=lines.extend, stride=4):
        for step in range(steps):
            change(module, optimizer, step)
            loss = F.cross_entropy(module(torch.randn(8, 4)), torch.arange(8) % 3)
            zero(optimizer, step)
            loss.backward()
            optimizer.step()
            if other is not None:
                other.step()
    return lines


def named(lines: list[StreamLine], name: str) -> list[StepFigure]:
    return [line for line in lines if isinstance(line, StepFigure) and line.name == name]


def test_zero_grad_that_is_forgotten_is_seen_in_the_first_step() -> None:
    """However it is done it is none: to nothing, to zeros, or by what a step does of its own."""
    (figure,) = named(loop(12, lambda optimizer, step: step < 5 and optimizer.zero_grad()), GRADIENTS_LEFT)
    assert figure.step == 5
    for well in (
        lambda optimizer, step: optimizer.zero_grad(set_to_none=False),
        lambda optimizer, step: (
            [one.grad.mul_(0.5) for group in optimizer.param_groups for one in group["params"]] if step else None
        ),
    ):
        assert not named(loop(12, well), GRADIENTS_LEFT)


def test_moments_that_are_gone_and_others_that_train() -> None:
    def forgets(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 6:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})

    (figure,) = named(loop(12, change=forgets), MOMENTS_GONE)
    assert figure.step == 6
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    assert len(named(loop(8, other=torch.optim.SGD([foreign], lr=0.1)), OTHERS_TRAIN)) == 1
    lines = loop(8)
    assert not named(lines, MOMENTS_GONE) and not named(lines, OTHERS_TRAIN)
    assert {(line.layer, line.value) for line in named(lines, "rate_share")} == {("0", 0.01), ("0.bias", 0.01)}
    assert all(row.rate == 1e-2 for row in lines if isinstance(row, StepRow))


def test_a_layer_that_is_frozen_on_the_way_ends_nobodys_training() -> None:
    def freezes(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 5:
            for parameter in module[2].parameters():  # type: ignore[index]
                parameter.requires_grad_(False)
                parameter.grad = None

    events = [line for line in loop(40, change=freezes) if isinstance(line, TrainingEvent)]
    assert [dict(event.values)["rule"] for event in events] == ["layer-stands-still"] and events[0].layer == "2"


def test_what_another_loss_has_left_in_gradients_is_no_part_of_them() -> None:
    """A rival's gradients are cleared after those that its generator's loss had left: they point another way."""
    torch.manual_seed(0)
    model, judge, lines = (
        nn.Linear(4, 2),
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
        list[StreamLine](),
    )
    own, other = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, judge))
    with fp8bench.watch(judge, other, told=lines.extend, stride=2):
        for _ in range(12):
            points = model(torch.randn(16, 4))
            other.zero_grad()
            (F.softplus(-judge(torch.randn(16, 2) + 1)) + F.softplus(judge(points.detach()))).mean().backward()
            other.step()
            own.zero_grad()
            F.softplus(-judge(points)).mean().backward()
            own.step()
    seen = named(lines, "gradient_cosine")
    assert len(seen) == 12 and all(figure.value == pytest.approx(1, abs=1e-5) for figure in seen)
    assert not [line for line in lines if isinstance(line, TrainingEvent)]
