"""A user's own training loop, watched: nothing in it changes or stays attached, and its figures are those that torch
finds."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.errors import StoreError, UnknownName, UsageError
from fp8bench.features.train.lab import readings, watched_step
from fp8bench.features.train.lab.loop_figures import (
    compute_fingerprint,
    measure_input_figures,
    measure_predictions,
    sample_tensor_values,
)
from fp8bench.features.train.lab.own_loop import UserLoopRecorder, find_loss_in_output, unwrap_optimizer
from fp8bench.features.train.lab.watched_step import is_watched_step
from fp8bench.features.train.values import (
    GRADIENTS_LEFT,
    MOMENTS_GONE,
    OTHERS_TRAIN,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
)
from tests.counts import for_each
from tests.features.train.lab.labs import hooks_of


class Net(nn.Module):
    """A module of no framework, with a layer that is used twice, which returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8)
        self.shared = nn.Linear(8, 8)
        self.again = self.shared
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.again(torch.relu(self.shared(self.table(tokens))))
        result: Tensor = self.head(self.norm(x))
        return result

    def forward(self, tokens: Tensor) -> Any:
        return F.cross_entropy(self.logits(tokens), tokens)


class Logits(Net):
    """Returns logits, as most modules do; the loss is computed outside."""

    def forward(self, tokens: Tensor) -> Any:
        return {"logits": self.logits(tokens)}


Lines = list[StreamLine]


def trained(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, parts: int = 1, scaler: Any = None
) -> list[float]:
    """A typical loop with accumulation, clipping, a GradScaler, and an external loss if the module returns none."""
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        total = 0.0
        for _ in range(parts):
            tokens = torch.randint(10, (16,), generator=generator)
            output = net(tokens)
            loss = (F.cross_entropy(output["logits"], tokens) if isinstance(output, dict) else output) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += float(loss.detach())
        if scaler is None:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def watched(
    steps: int,
    make: Callable[[Any], torch.optim.Optimizer] = adam,
    net: nn.Module | None = None,
    parts: int = 1,
    **options: Any,
) -> tuple[list[float], Lines]:
    net, lines = Net() if net is None else net, Lines()
    optimizer = make(net.parameters())
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=2, **options):
        losses = trained(net, optimizer, steps, parts, options.get("scaler"))
    assert hooks_of(net) == 0 and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert torch.autograd.backward.__module__ == "torch.autograd"
    return losses, lines


def of(kind: type, lines: Sequence[StreamLine]) -> list[Any]:
    return [line for line in lines if isinstance(line, kind)]


def named(lines: Sequence[StreamLine], name: str) -> list[StepFigure]:
    return [line for line in of(StepFigure, lines) if line.name == name]


def half_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=256.0)


@for_each("parts", [1, 3])
def test_the_loop_is_the_same_and_says_everything(parts: int) -> None:
    """There is a row for each step in order, and readings of every second step."""
    losses, lines = watched(5, parts=parts)
    net = Net()
    assert losses == trained(net, adam(net.parameters()), 5, parts)
    rows = of(StepRow, lines)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4] and all(row.rate == 0.01 for row in rows)
    if parts == 1:
        assert [row.loss for row in rows] == losses
    assert all(0 < row.gradient_norm <= 1.0001 and row.parameter_norm > 1 for row in rows)
    assert [math.isnan(row.update_ratio) for row in rows] == [False, True, False, True, False]
    assert [row.seconds > 0 for row in rows] == [False, True, False, True, False]
    keys = {(line.layer, line.role) for line in of(LayerReading, lines)}
    both = {(layer, role) for layer in ("shared", "head") for role in ("input", "weight", "gradient")}
    assert keys == both | {("table", "weight"), ("table", "gradient")}
    figures = {(line.name, line.layer) for line in of(StepFigure, lines)}
    assert {("update_ratio", "head"), ("embedding_spread", "table"), ("memory", "")} <= figures
    assert {line.step for line in of(LayerReading, lines)} == {0, 2, 4}


@for_each("parts", [1, 4])
@for_each("scaled", [False, True])
def test_a_loss_that_is_made_outside_is_what_backward_begins_with(parts: int, scaled: bool) -> None:
    """Bit for bit if there is one part, and recording changes nothing in the training."""
    alone = Logits()
    expected = trained(alone, adam(alone.parameters()), 6, parts, half_scaler() if scaled else None)
    losses, lines = watched(6, net=Logits(), parts=parts, scaler=half_scaler() if scaled else None)
    rows = of(StepRow, lines)
    assert losses == expected and [row.loss for row in rows] == pytest.approx(expected, rel=1e-6) and len(rows) == 6
    assert not of(TrainingEvent, lines)


def test_a_closure_a_fused_optimizer_and_a_scaler() -> None:
    """Gradients may be made inside the optimizer's step, or be scaled or skipped by a GradScaler."""
    plain, lines = watched(4, lambda some: torch.optim.SGD(some, lr=0.1), health=False)
    net, told = Net(), Lines()
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(torch.randint(10, (16,), generator=generator))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        return loss

    with fp8bench.watch(net, optimizer, told=told.extend, stride=2):
        for _ in range(4):
            optimizer.step(closure)  # type: ignore[arg-type]
    by_closure, by_loop = (
        [(row.step, row.loss, row.gradient_norm, row.parameter_norm) for row in of(StepRow, some)]
        for some in (told, lines)
    )
    assert by_closure == by_loop and [loss for _, loss, *_ in by_closure] == plain
    _, scaled = watched(4, scaler=half_scaler())
    _, fused = watched(4, lambda some: torch.optim.AdamW(some, lr=0.01, fused=True), scaler=half_scaler())
    for row, other in zip(of(StepRow, scaled), of(StepRow, fused), strict=True):
        assert row.loss_scale == 256 and row.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)


def test_lines_are_kept_step_by_step_and_survive_what_ends_the_loop(tmp_path: Path) -> None:
    """Lines are JSON. At the end, rows still waiting are written too, and no hook stays attached."""
    net, path = Net(), tmp_path / "steps.jsonl"
    optimizer = adam(net.parameters())
    before_the_end = []

    def loop() -> None:
        trained(net, optimizer, 5)
        before_the_end.extend(path.read_text().splitlines())
        net(torch.zeros(4, dtype=torch.int64)).backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fp8bench.watch(net, optimizer, path, stride=3):
        loop()
    assert len(before_the_end) > 20, "the watched steps are there before the end"
    assert hooks_of(net) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"]["step"] for line in lines if "step" in line] == [0, 1, 2, 3, 4]
    assert {next(iter(line)) for line in lines} == {"step", "reading", "figure"}
    with pytest.raises(StoreError, match="File exists"), fp8bench.watch(net, optimizer, path):
        pass


@pytest.mark.slow
def test_inside_a_compiled_module_nobody_looks() -> None:
    """Its loss, norms, weights and updates are recorded, without additional compilation."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]  # a reset keeps the counts of earlier tests
    plain = Net()
    losses, lines = watched(4, net=torch.compile(Net(), backend="eager"))
    assert losses == trained(plain, adam(plain.parameters()), 4) == [row.loss for row in of(StepRow, lines)]
    assert {(line.layer, line.role) for line in of(LayerReading, lines)} == {
        (layer, "weight") for layer in ("table", "shared", "head")
    }
    assert graphs["unique_graphs"] == before + 1


def test_a_loss_that_nobody_can_find_is_said() -> None:
    """A step without a loss has no row, but all its other lines."""
    net, lines = nn.Linear(4, 3), Lines()
    optimizer = adam(net.parameters())
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=1) as loop:
        for step in range(2):
            squares = net(torch.ones(2, 4)).square()
            if step:
                loop.loss(squares.mean())
            squares.backward(torch.full((2, 3), 1 / 6))
            optimizer.step()
            optimizer.zero_grad()
    assert [row.step for row in of(StepRow, lines)] == [1]
    assert {line.step for line in of(LayerReading, lines)} == {0, 1}
    loss = torch.tensor(2.0)
    assert (
        find_loss_in_output(loss) is loss
        and find_loss_in_output((loss, torch.ones(3))) is loss
        and find_loss_in_output({"loss": loss}) is loss
    )
    assert (
        find_loss_in_output(torch.ones(3)) is None
        and find_loss_in_output({"logits": loss}) is None
        and find_loss_in_output(torch.tensor(1)) is None
    )


def test_bad_options_are_refused() -> None:
    net = Net()
    for options, error, words in (({"stride": 0}, UsageError, "stride"), ({"precision": "fp9"}, UnknownName, "fp8")):
        with pytest.raises(error, match=words), fp8bench.watch(net, adam(net.parameters()), **options):  # type: ignore[arg-type]
            pass
    net.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that requires"), fp8bench.watch(net, adam([torch.ones(1)])):
        pass


def test_other_backwards_give_no_loss() -> None:
    """These are a second model in the loop, a checkpoint's inner backward, and autograd.grad."""
    net, other, lines = Logits(), Logits(), Lines()
    optimizer = adam(net.parameters())
    tokens = torch.arange(10)
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=1):
        for _ in range(2):
            F.cross_entropy(other(tokens)["logits"], tokens).backward()
            logits = net(tokens)["logits"]
            x = torch.utils.checkpoint.checkpoint(torch.tanh, logits, use_reentrant=True)
            loss = F.cross_entropy(x, tokens)
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    first, _ = of(StepRow, lines)
    expected = F.cross_entropy(torch.tanh(Logits()(tokens)["logits"]), tokens)
    assert first.loss == pytest.approx(float(expected.detach()))


def test_updates_without_rows_are_reported_once_with_the_reason() -> None:
    def said(make: Callable[[Logits], None], foreign: bool = False) -> list[str]:
        net, lines = Logits(), Lines()
        optimizer = adam((Logits() if foreign else net).parameters())
        with fp8bench.watch(net, optimizer, told=lines.extend, stride=100, health=False):
            for step in range(8):
                if step == 2:
                    make(net)
                tokens = torch.arange(10)
                loss = F.cross_entropy(net(tokens)["logits"], tokens)
                if not getattr(net, "forgets", False):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [event.words for event in of(TrainingEvent, lines)]

    (evaluating,) = said(lambda net: net.train(False) and None)
    assert evaluating.startswith("rows have stopped since step 2: in 3 updates") and "eval mode" in evaluating
    (forgotten,) = said(lambda net: setattr(net, "forgets", True))
    assert "no parameter had a gradient" in forgotten
    (others,) = said(lambda net: None, foreign=True)
    assert others.startswith("there are no rows") and "no parameter of this module" in others
    assert said(lambda net: None) == []


def test_the_loop_of_the_docs_pasted_into_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step has its row, and an alarm is a line on stderr."""
    text = (Path(__file__).resolve().parents[4] / "docs" / "watching.md").read_text(encoding="utf-8")
    code = text.split("## Your own loop")[1].split("```python")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(12)]
    batches.append((torch.full((16, 8), math.nan), batches[0][1]))
    given = {"model": model, "optimizer": adam(model.parameters()), "data": batches}
    exec(code, {**given, "criterion": F.cross_entropy})
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert sum("step" in line for line in lines) == 13
    assert "fp8bench: own, step 12: the loss is nan" in capsys.readouterr().err


def words(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).remainder(11).reshape(shape)


def test_predictions_of_a_cross_entropy() -> None:
    """The scale of the loss does not matter; other losses have no such figures."""
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(8, 5)).requires_grad_(), torch.arange(8) % 5
    loss = F.cross_entropy(logits, targets)
    p = logits.detach().softmax(-1)
    expected = {
        "classes": 5.0,
        "entropy": float(-(p * p.log()).sum(-1).mean()),
        "logit_range": float((p.log().amax(-1) - p.log().amin(-1)).amax()),
    }
    images = F.cross_entropy(logits.t()[None, :, :, None], targets[None, :, None])
    for root in (loss, loss * 1024 / 4, (loss / 2).to(torch.float64), images):
        assert {name: float(value) for name, value in measure_predictions(root).items()} == pytest.approx(expected)
    squares = F.mse_loss(logits, logits.detach() + 1), loss + logits.square().mean()
    for root in (logits.sum(), torch.tensor(1.0), *squares):
        assert measure_predictions(root) == {}


@for_each("copies", [0, 1, 3, 15])
def test_copies_in_a_batch_are_counted(copies: int) -> None:
    """The oracle compares all pairs; examples come in any order and dtype."""
    for drawn in (torch.randn(16, 3, 5), torch.randint(0, 9000, (16, 40)), torch.randn(16, 20).bfloat16()):
        drawn[1 : copies + 1] = drawn[0]
        x = drawn[torch.randperm(16)]
        twins = sum(any(bool((x[a] == x[b]).all()) for b in range(16) if a != b) for a in range(16)) / 16
        figures = measure_input_figures(({"input_ids": x},))
        assert float(figures["duplicates"]) == twins == ((copies + 1) / 16 if copies else 0.0)
        values = x.double()
        assert float(figures["input_mean"]) == pytest.approx(float(values.mean()))
        assert float(figures["input_deviation"]) == pytest.approx(float(values.std()))


def test_different_inputs_have_different_fingerprints() -> None:
    """Any value counts; large inputs are sampled."""
    x = torch.randn(64, 3000)
    same, changed = x.clone(), x.clone()
    changed[5] += 1e-3
    fingerprints = [
        float(compute_fingerprint([sample_tensor_values(tensor)]))
        for tensor in (x, same, changed, words(4, 5), words(4, 5).flip(0))
    ]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 4


@for_each("stride", [1, 2, 10])
def test_one_step_of_each_stride_is_watched_in_any_phase(stride: int) -> None:
    steps = [step for step in range(40 * stride) if is_watched_step(step, stride)]
    assert steps[0] == 0 and [step // stride for step in steps] == list(range(40))
    assert {step % stride for step in steps} == set(range(stride))


Change = Callable[[nn.Module, torch.optim.Optimizer, int], object]


def loop(
    steps: int, change: Change = lambda *_: None, zero: Change = lambda module, optimizer, step: optimizer.zero_grad()
) -> Lines:
    """A loop that runs `change` before each step; `zero` clears gradients before backward."""
    torch.manual_seed(0)
    module, lines = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), Lines()
    groups = [{"params": module[0].parameters(), "lr": 1e-4}, {"params": module[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    with fp8bench.watch(module, optimizer, told=lines.extend, stride=4):
        for step in range(steps):
            change(module, optimizer, step)
            loss = F.cross_entropy(module(torch.randn(8, 4)), torch.arange(8) % 3)
            zero(module, optimizer, step)
            loss.backward()
            optimizer.step()
    return lines


def test_a_forgotten_zero_grad_is_seen_in_its_first_step() -> None:
    """Setting gradients to None or zeros, or clearing them by custom code, all count."""
    (figure,) = named(loop(12, zero=lambda module, optimizer, step: step < 5 and optimizer.zero_grad()), GRADIENTS_LEFT)
    assert figure.step == 5
    for well in (
        lambda module, optimizer, step: optimizer.zero_grad(set_to_none=False),
        lambda module, optimizer, step: step and [weight.grad.mul_(0.5) for weight in module.parameters()],
    ):
        assert not named(loop(12, zero=well), GRADIENTS_LEFT)


def test_lost_moments_and_other_optimizers_are_seen() -> None:
    def forgets(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 6:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})

    (figure,) = named(loop(12, forgets), MOMENTS_GONE)
    assert figure.step == 6
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    other = torch.optim.SGD([foreign], lr=0.1)
    assert len(named(loop(8, lambda *_: other.step()), OTHERS_TRAIN)) == 1
    lines = loop(8)
    assert not named(lines, MOMENTS_GONE) and not named(lines, OTHERS_TRAIN)
    assert {(line.layer, line.value) for line in named(lines, "rate_share")} == {("0", 0.01), ("0.bias", 0.01)}
    assert all(row.rate == 1e-2 for row in of(StepRow, lines))
    watched = {figure.step for figure in named(lines, "examples")}
    assert watched == {figure.step for figure in named(lines, "input_mean")} and len(watched) == 2


def test_a_layer_frozen_on_the_way_does_not_end_the_training() -> None:
    def freezes(module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 5:
            for parameter in module[2].parameters():
                parameter.requires_grad_(False)
                parameter.grad = None

    (event,) = of(TrainingEvent, loop(40, freezes))
    assert (event.rule, event.layer) == ("layer-stands-still", "2")


@for_each("to_none", [False, True])
@for_each("early", [False, True])
def test_a_step_that_the_scaler_skips_has_its_own_row(to_none: bool, early: bool) -> None:
    """However and whenever gradients are cleared. Three in a row are an event."""
    torch.manual_seed(0)
    net, lines = nn.Linear(4, 3), Lines()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    skipped, losses, scales = (1, 4, 5, 6), [], []
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=3, scaler=scaler, health=False):
        for step in range(9):
            for _ in range(2):
                loss = F.cross_entropy(net(torch.randn(6, 4)), torch.arange(6) % 3) / 2
                if early and len(losses) % 2 == 0:
                    optimizer.zero_grad(set_to_none=to_none)
                losses.append(float(loss.detach()))
                scaler.scale(loss).backward()
            if step in skipped:
                assert net.weight.grad is not None
                net.weight.grad[0, 0] = math.inf
            scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            if not early:
                optimizer.zero_grad(set_to_none=to_none)
    rows = of(StepRow, lines)
    assert [row.step for row in rows] == [*range(9)]
    assert tuple(row.step for row in rows if row.skipped) == skipped
    assert [row.loss for row in rows] == pytest.approx([a + b for a, b in zip(losses[::2], losses[1::2], strict=True)])
    assert [row.loss_scale for row in rows] == scales
    (event,) = of(TrainingEvent, lines)
    assert event.step == 6 and "3 steps in a row had a backward and no update" in event.words


def test_discarded_gradients_and_parts_of_a_loss() -> None:
    """Without a scaler a discarded batch has no row, and the next batch has its true loss.

    If the module knows the number of all items, parts add up.
    """

    class Parts(nn.Linear):
        def forward(self, x: Tensor, num_items_in_batch: int | None = None) -> Any:
            return {"loss": super().forward(x).square().sum() / (num_items_in_batch or x.numel())}

    net, lines, losses = Parts(4, 3), Lines(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=2):
        for step in range(6):
            parts = [torch.randn(rows, 4) for rows in (2, 5)]
            outputs = [net(part, num_items_in_batch=7)["loss"] for part in parts]
            for loss in outputs:
                loss.backward()
            if step != 3:
                losses.append(float(sum(outputs).detach()))
                optimizer.step()
            optimizer.zero_grad()
    assert [row.loss for row in of(StepRow, lines)] == pytest.approx(losses) and not of(TrainingEvent, lines)


def test_wrapped_optimizers_are_unwrapped() -> None:
    """For example Accelerate's wrapper, which has no hooks; its scaler is found too."""

    class Prepared:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.scaler = optimizer, half_scaler()

    assert unwrap_optimizer(Prepared(inner := adam(Net().parameters()))) is inner
    with pytest.raises(UsageError, match="str is not an optimizer of torch"):
        unwrap_optimizer("adam")
    net, lines = Net(), Lines()
    prepared = Prepared(adam(net.parameters()))
    with fp8bench.watch(net, prepared, told=lines.extend):  # type: ignore[arg-type]
        trained(net, prepared.optimizer, 3, scaler=prepared.scaler)
    assert [row.loss_scale for row in of(StepRow, lines)] == [256.0] * 3


def test_a_fault_ends_watching_and_a_users_error_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    plain = Net()
    expected = trained(plain, adam(plain.parameters()), 4)
    for place in ("_record_module_inputs", "_read_gradients", "_end_step", "_end_backward", "_pass_stream_lines"):
        with monkeypatch.context() as changed:
            changed.setattr(UserLoopRecorder, place, fail)
            losses, lines = watched(4)
        (event,) = of(TrainingEvent, lines)
        assert (
            losses == expected and "watching ends here, and the training goes on: RuntimeError: planted" in event.words
        )
    net = Net()
    with (
        pytest.raises(RuntimeError, match="planted"),
        fp8bench.watch(net, optimizer := adam(net.parameters()), told=fail),
    ):
        trained(net, optimizer, 1)


def test_gradients_are_not_kept_after_the_loop_has_freed_them() -> None:
    net = Net()
    optimizer = adam(net.parameters())
    with fp8bench.watch(net, optimizer, told=lambda lines: None, stride=1):
        trained(net, optimizer, 1)
        net(torch.arange(10)).backward()
        optimizer.step()
        gradient = weakref.ref(net.head.weight.grad)  # type: ignore[arg-type]
        optimizer.zero_grad()
        assert gradient() is None


class SharedInput(nn.Module):
    """Two frozen layers with the same input, and a third one after it was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.q.requires_grad_(False)
        self.k.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.q(x) + self.k(x)
        x.mul_(2)
        result: Tensor = (both + self.v(x)).square().mean()
        return result


def test_an_input_that_layers_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, read = SharedInput(), list[Tensor]()
    figures_of = readings.measure_tensor_figures

    def note(x: Tensor, cast: Any = None) -> Any:
        read.append(x)
        return figures_of(x, cast)

    monkeypatch.setattr(watched_step, "measure_tensor_figures", note)
    lines = list[StreamLine]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    with fp8bench.watch(model, optimizer, told=lines.extend, stride=100):
        model(x.clone()).backward()
        optimizer.step()
    inputs = {line.layer: line.amax for line in lines if isinstance(line, LayerReading) and line.role == "input"}
    largest = float(x.abs().max())
    assert inputs == {"q": largest, "k": largest, "v": 2 * largest}
    assert sum(tensor.shape == x.shape for tensor in read) == 2 + 1, "two inputs and a gradient"
