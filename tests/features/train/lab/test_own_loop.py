"""A training loop of anybody's, watched: nothing in it changes, nothing is called in it, nothing stays in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8bench
from fp8bench.errors import StoreError, UnknownName, UsageError
from fp8bench.features.train.lab.own_loop import loss_of
from fp8bench.features.train.values import LayerReading, StepFigure, StepRow, StreamLine, TrainingEvent
from tests.counts import for_each
from tests.features.train.lab.labs import hooks_of


class Net(nn.Module):
    """A module of nobody's framework, with a layer that is used twice, and the loss as its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 8)
        self.shared = nn.Linear(8, 8)
        self.again = self.shared
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.again(torch.relu(self.shared(x)))
        return nn.functional.cross_entropy(self.head(self.norm(x)), tokens)


Lines = list[StreamLine]


def trained(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_batches: int = 1, scaler: Any = None
) -> list[float]:
    """A loop as people write it: accumulation, clipping, a GradScaler."""
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = net(torch.randint(10, (16,), generator=generator)) / micro_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) * micro_batches)
    return losses


def watched(steps: int, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[list[float], Lines]:
    net, lines = Net(), Lines()
    optimizer = make(net.parameters())
    loop = {name: options.pop(name) for name in ("micro_batches",) if name in options}
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=2, **options):
        losses = trained(net, optimizer, steps, scaler=options.get("scaler"), **loop)
    assert hooks_of(net) == 0 and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    return losses, lines


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def of(kind: type, lines: Sequence[StreamLine]) -> list[Any]:
    return [line for line in lines if isinstance(line, kind)]


@for_each("micro_batches", [1, 3])
def test_the_loop_is_the_same_and_says_everything(micro_batches: int) -> None:
    """A row a step, in the order of the steps; readings of every second one."""
    losses, lines = watched(5, adam, micro_batches=micro_batches)
    net = Net()
    assert losses == trained(net, adam(net.parameters()), 5, micro_batches)
    rows = of(StepRow, lines)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4] and all(row.rate == 0.01 for row in rows)
    if micro_batches == 1:
        assert [row.loss for row in rows] == losses
    assert all(0 < row.gradient_norm <= 1.0001 and row.parameter_norm > 1 for row in rows)
    assert [math.isnan(row.update_ratio) for row in rows] == [False, True, False, True, False]
    assert [row.seconds > 0 for row in rows] == [False, True, False, True, False]
    keys = {(line.layer, line.role) for line in of(LayerReading, lines)}
    both = {(layer, role) for layer in ("shared", "head") for role in ("input", "weight", "gradient")}
    assert keys == both | {("table", "weight"), ("table", "gradient")}
    figures = {(line.name, line.layer) for line in of(StepFigure, lines)}
    assert {("update_ratio", "head"), ("embedding_spread", "table"), ("memory", "")} <= figures
    assert (("noise_scale", "") in figures) == (micro_batches > 1)
    assert {line.step for line in of(LayerReading, lines)} == {0, 2, 4}


def test_a_closure_a_fused_optimizer_and_a_scaler() -> None:
    """Gradients that are made inside the optimizer's step; those that a GradScaler has scaled, or skips."""
    plain, lines = watched(4, lambda some: torch.optim.SGD(some, lr=0.1), health=False)
    net, told = Net(), Lines()
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    with fp8bench.watch(net, optimizer, told=told.extend, stride=2):
        for _ in range(4):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = net(torch.randint(10, (16,), generator=generator))
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
    strip = [(row.step, row.loss, row.gradient_norm, row.parameter_norm) for row in of(StepRow, told)]
    assert strip == [(row.step, row.loss, row.gradient_norm, row.parameter_norm) for row in of(StepRow, lines)]
    assert [row.loss for row in of(StepRow, told)] == plain
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    _, scaled = watched(4, adam, scaler=scaler)
    _, fused = watched(
        4,
        lambda some: torch.optim.AdamW(some, lr=0.01, fused=True),
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0),
    )
    for one, other in zip(of(StepRow, scaled), of(StepRow, fused), strict=True):
        assert one.loss_scale == 256 and one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)


def test_lines_are_kept_step_by_step_and_survive_what_ends_the_loop(tmp_path: Path) -> None:
    """As JSON, one a line; rows that were not told yet, too, and nothing stays attached."""
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
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["step"]["step"] for one in found if "step" in one] == [0, 1, 2, 3, 4]
    assert {next(iter(one)) for one in found} == {"step", "reading", "figure"}
    with pytest.raises(StoreError, match="File exists"), fp8bench.watch(net, optimizer, path):
        pass


def test_alarms_are_lines_among_the_others() -> None:
    """A weight that becomes infinite is found in the step in which it does."""
    net, lines = Net(), Lines()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=1):
        trained(net, optimizer, 3)
        with torch.no_grad():
            net.head.weight[0, 0] = math.inf
        trained(net, optimizer, 1)
    alarms = of(TrainingEvent, lines)
    assert alarms and {line.step for line in alarms} == {3}
    assert {dict(line.values)["rule"] for line in alarms} >= {"not-finite", "tensor-not-finite"}


@pytest.mark.slow
def test_inside_a_compiled_module_nobody_looks() -> None:
    """Its loss, norms, weights and updates are there, and it is compiled as often as without."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]  # a reset keeps the counts of the tests before
    net, lines = Net(), Lines()
    compiled = torch.compile(net, backend="eager")
    optimizer = adam(net.parameters())
    with fp8bench.watch(compiled, optimizer, told=lines.extend, stride=2):
        losses = trained(compiled, optimizer, 4)
    plain = Net()
    assert losses == trained(plain, adam(plain.parameters()), 4)
    assert {(line.layer, line.role) for line in of(LayerReading, lines)} == {
        (layer, "weight") for layer in ("table", "shared", "head")
    }
    assert [row.loss for row in of(StepRow, lines)] == losses
    assert graphs["unique_graphs"] == before + 1


def test_a_loss_that_the_module_does_not_give_back_is_said() -> None:
    """Without it a step has no row, and everything else."""
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


def test_what_a_loss_looks_like() -> None:
    loss = torch.tensor(2.0)
    assert loss_of(loss) is loss and loss_of((loss, torch.ones(3))) is loss and loss_of({"loss": loss}) is loss
    assert loss_of(torch.ones(3)) is None and loss_of({"logits": loss}) is None and loss_of(torch.tensor(1)) is None


@for_each(
    ("options", "error", "words"),
    [
        ({"stride": 0}, UsageError, "stride is a whole number from 1 on, not 0"),
        ({"precision": "fp9"}, UnknownName, "fp8"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    net = Net()
    with pytest.raises(error, match=words), fp8bench.watch(net, adam(net.parameters()), **options):
        pass
    net.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that is trained"), fp8bench.watch(net, adam([torch.ones(1)])):
        pass


class Logits(Net):
    """What most modules give back; the loss is made outside."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.again(torch.relu(self.shared(self.table(tokens))))
        return {"logits": self.head(self.norm(x))}


def usual_loop(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, parts: int = 1, scaler: Any = None
) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(parts):
            tokens = torch.randint(10, (16,), generator=generator)
            loss = nn.functional.cross_entropy(net(tokens)["logits"], tokens) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += float(loss.detach())
        (optimizer.step() if scaler is None else scaler.step(optimizer))
        if scaler is not None:
            scaler.update()
        losses.append(total)
    return losses


@for_each("parts", [1, 4])
@for_each("scaled", [False, True])
def test_a_loss_that_is_made_outside_is_what_backward_begins_with(parts: int, scaled: bool) -> None:
    """To the bit for one part; nothing in the training changes by it."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None for _ in range(2)]
    alone, net, lines = Logits(), Logits(), Lines()
    expected = usual_loop(alone, adam(alone.parameters()), 6, parts, scalers[0])
    optimizer = adam(net.parameters())
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=2, scaler=scalers[1]):
        assert usual_loop(net, optimizer, 6, parts, scalers[1]) == expected
    rows = of(StepRow, lines)
    assert [row.loss for row in rows] == pytest.approx(expected, rel=1e-6) and len(rows) == 6
    assert not of(TrainingEvent, lines) and hooks_of(net) == 0
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_other_backwards_are_no_loss_of_this_module() -> None:
    """A second model in the loop, a checkpoint's own backward inside, and autograd.grad."""
    net, other, lines = Logits(), Logits(), Lines()
    optimizer = adam(net.parameters())
    tokens = torch.arange(10)
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=1):
        for _ in range(2):
            nn.functional.cross_entropy(other(tokens)["logits"], tokens).backward()
            logits = net(tokens)["logits"]
            x = torch.utils.checkpoint.checkpoint(torch.tanh, logits, use_reentrant=True)
            loss = nn.functional.cross_entropy(x, tokens)
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    first, _ = of(StepRow, lines)
    expected = nn.functional.cross_entropy(torch.tanh(Logits()(tokens)["logits"]), tokens)
    assert first.loss == pytest.approx(float(expected.detach()))


def silent(make: Callable[[Logits], None], steps: int = 8) -> list[str]:
    lines = Lines()
    net = Logits()
    optimizer = adam(net.parameters())
    with fp8bench.watch(net, optimizer, told=lines.extend, stride=100, health=False):
        for step in range(steps):
            if step == 2:
                make(net)
            tokens = torch.arange(10)
            loss = nn.functional.cross_entropy(net(tokens)["logits"], tokens)
            if not getattr(net, "forgets", False):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [event.words for event in of(TrainingEvent, lines)]


def test_updates_without_rows_are_said_once_with_the_reason() -> None:
    (evaluating,) = silent(lambda net: net.train(False) and None)
    assert evaluating.startswith("rows have stopped since step 2: in 3 updates the module was in eval mode")
    (forgotten,) = silent(lambda net: setattr(net, "forgets", True))
    assert "no parameter had a gradient" in forgotten
    assert silent(lambda net: None) == []
    net, lines = Logits(), Lines()
    optimizer = adam(Logits().parameters())
    with fp8bench.watch(net, optimizer, told=lines.extend, health=False):
        usual_loop(net, optimizer, 5)
    (event,) = of(TrainingEvent, lines)
    assert event.words.startswith("there are no rows: in 3 updates the optimizer changed no parameter of this module")


def test_the_loop_of_the_docs_pasted_into_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step has its row; an alarm is a line on stderr, because nobody takes it."""
    text = (Path(__file__).resolve().parents[4] / "docs" / "watching.md").read_text(encoding="utf-8")
    code = text.split("## A loop of one's own")[1].split("```python")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(12)]
    batches.append((torch.full((16, 8), math.nan), batches[0][1]))
    given = {"model": model, "optimizer": adam(model.parameters()), "data": batches}
    exec(code, {**given, "criterion": nn.functional.cross_entropy})
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert sum("step" in line for line in lines) == 13
    assert "fp8bench: own, step 12: the loss is nan" in capsys.readouterr().err
