"""A model of a user's own as a workload: copies, steps, errors; what untouched means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import NotRepeatable, UnknownName, UsageError
from fp8bench.model import Case, MemoryUse, Scalar
from fp8bench.model.raw import Settings
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench
from fp8bench.workloads.model import LOADED_MODELS, MODEL_MAKERS_IN_PROCESS, Model
from tests.counts import for_each
from tests.facts import CPU

Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    MODEL_MAKERS_IN_PROCESS.clear()
    LOADED_MODELS.clear()


def setup_of(
    make: Make, precision: str = "untouched", layers: tuple[tuple[str, str], ...] = (), **more: Scalar
) -> Setup:
    if MODEL_MAKERS_IN_PROCESS.get("Net") is not make:
        LOADED_MODELS.clear()
    MODEL_MAKERS_IN_PROCESS["Net"] = make
    params = {"make": "Net", "pass": "training", "optimizer": "adamw", "compile": "no", **more}
    chosen = precisions.get(precision)
    arithmetic = chosen.arithmetic(CPU)
    exceptions = {key: precisions.get(word).arithmetic(CPU) for key, word in layers}
    case = Case("model", tuple(params.items()), precision, "cpu", layers)
    return Setup(case, CPU, 3, arithmetic, arithmetic, exceptions, chosen.loss_scale)


class Net(nn.Module):
    """Two layers, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.5))  # type: ignore[no-any-return]


class Mean(nn.Module):
    """Gives one number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def make() -> Any:
    return Net(), torch.randn(8, 32), lambda y: y.abs().mean()


def test_untouched_is_what_the_model_gives_bit_for_bit() -> None:
    state = Model().prepare(setup_of(make))
    found = state.outcome()
    model = state.model
    batch = state._batch
    assert not any("forward" in vars(one) or one._forward_hooks for one in model.modules())
    with torch.random.fork_rng():
        torch.manual_seed(3)
        output = model(batch)
        output.abs().mean().backward()
    assert torch.equal(found.outputs[0], output) and found.loss is not None
    assert all(torch.equal(found.gradients[name], one.grad) for name, one in model.named_parameters())


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_a_model_in_its_own_dtypes_stays_so(kind: str) -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                return super().forward(x)

    def bf16() -> Any:
        model = Own()
        return (
            (model.bfloat16(), torch.randn(8, 32, dtype=torch.bfloat16))
            if kind == "bf16"
            else (model, torch.randn(8, 32))
        )

    for precision in ("untouched", "fp32", "mxfp8"):
        state = Model().prepare(setup_of(bf16, precision))
        (output,) = state.outcome().outputs
        assert output.dtype is torch.bfloat16
        wanted = torch.bfloat16 if kind == "bf16" else torch.float32
        assert {one.dtype for one in state.model.parameters()} == {wanted}
        assert {one.dtype for one in state.outcome().gradients.values()} == {wanted}
        state.step(SilentPhases())


def test_all_arms_have_the_same_weights_and_draws() -> None:
    first, second = (Model().prepare(setup_of(make)) for _ in range(2))
    assert first.model is not second.model
    LOADED_MODELS.clear()
    torch.manual_seed(12345)
    third = Model().prepare(setup_of(make))
    for other in (second, third):
        assert all(map(torch.equal, first.model.parameters(), other.model.parameters()))
        assert torch.equal(first.outcome().outputs[0], other.outcome().outputs[0])  # dropout included


class Changing(nn.Module):
    """Doubles its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0))  # type: ignore[no-any-return]


def test_a_model_may_change_its_batch() -> None:
    """Every step begins from the original batch; the loss gets the tensors that forward got."""
    seen: list[float] = []

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        seen.append(float(batch.mean()))
        return output.mean()

    state = Model().prepare(setup_of(lambda: (Changing(), torch.ones(4, 8), loss)))
    for _ in range(3):
        state.step(SilentPhases())
    assert seen == [2.0, 2.0, 2.0] and torch.equal(state._batch, torch.ones(4, 8))
    calm = Model().prepare(setup_of(make))
    calm.step(SilentPhases())
    assert not calm._copies, "a batch that nobody changes is copied once"


@for_each("batch", [(torch.ones(4, 8), torch.zeros(4, 8)), {"input": torch.ones(4, 8), "1": torch.zeros(4, 8)}])
def test_forward_gets_a_part_of_the_batch_and_the_loss_all_of_it(batch: Any) -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1 if isinstance(batch, tuple) else "1"]).square().mean()

    state = Model().prepare(setup_of(lambda: (nn.Linear(8, 8), batch, loss)))
    state.step(SilentPhases())
    assert state.loss_words == "the loss that make() gives"


def test_another_draw_has_other_weights_and_the_same_batch() -> None:
    def drawn() -> Any:
        torch.rand(1)
        return Changing(), torch.randn(4, 8), lambda y: y.square().mean()

    setup = setup_of(drawn)
    batch = Model().prepare(setup)._batch
    torch.manual_seed(setup.seed + 1)
    model, *_ = drawn()
    loss = float(model(batch.clone()).detach().square().mean())
    assert Model().losses(replace(setup, draw=1), 1) == pytest.approx([loss])


def test_a_model_that_does_not_repeat_itself_has_no_error() -> None:
    """The difference between its runs would count as a precision's error."""
    outside = torch.Generator().manual_seed(1)

    class Drawing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn(x.shape, generator=outside))

    setup = setup_of(lambda: (Drawing(), torch.randn(8, 32)), "bf16")
    with pytest.raises(NotRepeatable):
        Model().error(setup)
    told = Bench(Settings(seed=3, threads=1)).error(setup.case, CPU)
    assert isinstance(told, str) and "different numbers from the same seed" in told
    assert Model().gradient_error(setup, replace(setup, case=replace(setup.case, precision="untouched"))) is None


class Penalty(nn.Module):
    """A loss with the gradient of a first layer's output in it."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.first(x).square().sum(), x, create_graph=True)
        return slope.square().mean()


@pytest.mark.parametrize("first", [nn.Linear(16, 16), nn.Conv2d(16, 16, 1)])
def test_what_is_differentiated_twice_is_refused(first: nn.Module) -> None:
    """A copy's products would have no second derivative, and the error would be that of another loss."""
    shape = (4, 16) if isinstance(first, nn.Linear) else (2, 16, 4, 4)
    setup = setup_of(lambda: (Penalty(first), torch.randn(shape)), "bf16")
    with pytest.raises(UsageError, match="differentiated twice"):
        Model().examine(setup)
    Model().examine(setup_of(lambda: (Penalty(first), torch.randn(shape))))


class Routed(nn.Module):
    """The second expert gets a token only if a score is exact, and then the output's shape differs."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 1, bias=False)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        nn.init.constant_(self.score.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.score(x).sum().item() == 16 * (1 + 2**-10):
            return y + self.second(x)  # type: ignore[no-any-return]
        return y[:, :8]  # type: ignore[no-any-return]


def test_steps_that_reach_other_weights_are_compared_whole() -> None:
    """A gradient that only one of them has is an error of its full size; outputs of different shapes have none."""
    setup = setup_of(lambda: (Routed(), torch.full((1, 16), 1 + 2**-10), lambda y: y.sum()), "bf16")
    errors = Model().error(setup)
    assert "output_error" not in errors and errors["gradient_error"] > 0.3


def test_a_forward_that_gives_only_the_loss_has_no_output_error() -> None:
    errors = Model().error(setup_of(lambda: (nn.Sequential(Net(), nn.Flatten(0), Mean()), torch.randn(8, 32)), "bf16"))
    assert errors.keys() == {"loss_error", "gradient_error"}


@pytest.mark.parametrize("name", ["adamw", "sgd", "none"])
def test_an_optimizer_moves_the_weights_of_the_copy_alone(name: str) -> None:
    setup = setup_of(make, optimizer=name)
    state = Model().prepare(setup)
    kept = next(iter(LOADED_MODELS.values())).model
    state.step(SilentPhases())
    moved = [not torch.equal(*pair) for pair in zip(kept.parameters(), state.model.parameters(), strict=True)]
    assert all(moved) if name != "none" else not any(moved)
    assert all(one.grad is None for one in state.model.parameters())


def test_memory_has_no_part_of_the_model_that_the_process_keeps() -> None:
    """A step of SGD on one row needs the weights and their gradients, and hardly anything else."""
    case = setup_of(lambda: (nn.Linear(256, 256), torch.randn(1, 256)), optimizer="sgd").case
    parameters = 4 * (256 * 256 + 256)
    for _ in range(2):
        memory = Bench(Settings()).memory(case, CPU, leaks=False)
        assert isinstance(memory, MemoryUse) and 2 * parameters <= memory.peak < 2.1 * parameters
        assert "other" not in dict(memory.roles)


def test_maps_and_filters_leave_layers_as_they_came() -> None:
    for changes in ({"layers": (("up", "untouched"),)}, {"skip": "up"}, {"skip": "*p;nosuch"}):
        setup = setup_of(make, "fp8", **changes)  # type: ignore[arg-type]
        if "nosuch" in str(changes):
            with pytest.raises(UnknownName, match="nosuch"):
                Model().examine(setup)
            continue
        state = Model().prepare(setup)
        assert "forward" not in vars(state.model.up) and "forward" in vars(state.model.down)
        covered = Model().covered(setup)
        assert covered is not None and [bool(one.reason) for one in covered.held] == [True, False]
    with pytest.raises(UnknownName, match="layer of this model 'lm_head'"):
        Model().examine(setup_of(make, "fp8", (("lm_head", "bf16"),)))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: (nn.Sequential(nn.ReLU(), nn.LayerNorm(8)), torch.randn(4, 8)), "can be converted"),
        (lambda: (Net(), (torch.randn(4, 32), 3)), "takes"),
        (lambda: (Net(), torch.randn(4, 32), lambda y: y), "one number"),
        (lambda: (Net().requires_grad_(False), torch.randn(4, 32)), "--forward"),
        (lambda: 3, "returns int; expected (model, batch)"),
    ],
)
def test_what_cannot_be_profiled_is_a_sentence(given: Make, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        Model().examine(setup_of(given, "fp8"))
    assert sentence in str(refused.value)


def deep() -> Any:
    sides = (32, 64, 96, 64, 40, 32)
    layers = [nn.Linear(one, other) for one, other in pairwise(sides)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU()))), torch.randn(16, 32)


def test_accelerate_prepares_a_model_by_its_own_hand() -> None:
    pytest.importorskip("accelerate")
    convert = pytest.importorskip("torchao.float8").convert_to_float8_training
    setup = setup_of(deep, "accelerate-fp8")
    state = Model().prepare(setup)
    assert [type(one).__name__ for one in state.model[::2]] == [
        "Linear",
        "Float8Linear",
        "Float8Linear",
        "Linear",
        "Linear",
    ]
    covered = Model().covered(setup)
    assert covered is not None
    assert [one.reason for one in covered.held] == [
        "Accelerate skips the first and the last linear layer",
        "",
        "",
        "Accelerate skips layers whose sides are not multiples of 16",
        "Accelerate skips layers whose sides are not multiples of 16",
    ]
    torch.manual_seed(3)
    own = Model().prepare(setup_of(deep)).model
    convert(own, module_filter_fn=lambda module, name: name in ("2", "4"))
    with torch.autocast("cpu", torch.bfloat16):
        (wanted,) = own(state._batch).float()[None]
    found = state.outcome()
    torch.testing.assert_close(found.outputs[0], wanted, rtol=0.02, atol=2e-3)
    before = [one.detach().clone() for one in state.model.parameters()]
    state.step(SilentPhases())
    assert all(not torch.equal(*pair) for pair in zip(before, state.model.parameters(), strict=True))
    errors = Model().error(setup)
    assert 1e-4 < errors["output_error"] < 0.1 and 1e-3 < errors["gradient_error"] < 0.3
    assert not any(type(one).__name__ == "Float8Linear" for one in Model().prepare(setup_of(deep)).model.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo force disabled:UserWarning")  # torch's
def test_a_compiled_step_gives_what_the_model_gives() -> None:
    errors = Model().error(setup_of(make, compile="yes"))
    assert errors["output_error"] < 1e-5 and errors["gradient_error"] < 1e-4

    class Off(Net):
        forward = torch.compiler.disable(Net.forward)  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="compiled no part"):
        Model().prepare(setup_of(lambda: (Off(), torch.randn(8, 32)), compile="yes"))
