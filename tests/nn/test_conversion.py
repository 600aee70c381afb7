"""Conversions: which layers are converted, and that the model is the same afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UnknownName, UsageError
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.holders import check_precision_map, find_product_weights
from fp8bench.protocols import Layer
from fp8bench.registry import precisions
from tests.facts import CPU
from tests.nn.converted_models import FP32, Experts, converted, everything_in, outcome

FP8 = precisions.get("fp8").arithmetic(CPU)


class Doubled(nn.Linear):
    """A linear layer that overrides forward."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class Renamed(nn.Linear):
    """A subclass with torch's forward pass."""


class Model(nn.Module):
    """Every kind of weight, one layer that has two names, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.picture = nn.Conv2d(1, 4, 3, padding=1)
        self.experts = Experts("bmm", 3, 16, 16)
        self.router = nn.Linear(16, 3)
        self.out = nn.Linear(16, 48, bias=False)
        self.out.weight = self.table.weight
        self.first.register_forward_hook(lambda module, given, result: result)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.again(torch.relu(self.first(self.table(tokens))))
        x = self.picture(x[:, None]).mean(1)
        x = x + (self.experts(x[None].expand(3, *x.shape).flatten(1, 2)).view(3, *x.shape)).mean(0)
        result: Tensor = self.out(x * self.router(x).sigmoid().sum(-1, keepdim=True))
        return result


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


TOKENS = torch.arange(20).view(2, 10)


def step(model: nn.Module) -> None:
    model(TOKENS).square().mean().backward()


def test_all_is_as_it_was(model: Model) -> None:
    before, optimizer = everything_in(model), torch.optim.SGD(model.parameters(), lr=0.0)
    with converted(model, FP8) as conversion:
        assert {holder.kind for holder in conversion.converted_weights} == {"linear", "conv2d", "experts"}
        assert "forward" in vars(model.first)
        step(model)
        optimizer.step()
        held = [id(parameter) for parameter in model.parameters()]
        assert model.out.weight is model.table.weight and list(model.state_dict()) == before["state"]
    for parameter in model.parameters():
        parameter.grad = None
    after = everything_in(model)
    assert [id(parameter) for parameter in model.parameters()] == held
    versions = {name: (*tensor[:2], *tensor[3:]) for name, tensor in before["tensors"].items()}
    assert versions == {name: (*tensor[:2], *tensor[3:]) for name, tensor in after["tensors"].items()}
    assert {**before, "tensors": 0} == {**after, "tensors": 0}


def test_a_weight_that_changes_when_it_is_asked_for_is_asked_for_as_often_as_before() -> None:
    """In training mode each read of a spectral-norm weight advances its power iteration."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4))
    other, x = copy.deepcopy(model), torch.randn(4, 16)
    with converted(model, FP32):
        given = model(x)
    assert torch.equal(given, other(x))


def test_all_is_as_it_was_after_an_error(model: Model) -> None:
    before = everything_in(model)
    converted(model, FP8)
    assert everything_in(model) == before, "making one changes nothing"
    for error in (KeyboardInterrupt, RuntimeError, SystemExit):
        with pytest.raises(error), converted(model, FP8):  # noqa: PT012
            model(TOKENS)
            raise error
        assert everything_in(model) == before
    with pytest.raises(RuntimeError), converted(model, FP8):
        model.experts(torch.ones(3, 5, 7))
    assert everything_in(model) == before
    assert torch.overrides._get_current_function_mode() is None


def test_a_layer_of_two_names_is_one_layer(model: Model) -> None:
    (first,) = (holder for holder in find_product_weights(model) if holder.name == "first")
    assert first.module_aliases == ("again",) and "again" not in [holder.name for holder in find_product_weights(model)]
    for name in ("first", "again"):
        (skipped,) = (holder for holder in find_product_weights(model, [name]) if holder.rule == "skipped")
        assert skipped.name == "first" and skipped.reason == f"left out by '{name}'"
    with converted(model, FP8):
        assert model.again.forward is model.first.forward


LEFT_OUT = {
    "head": ["out"],
    "*.stack": ["experts.stack"],
    "experts": ["experts.stack", "experts.position"],
    "conv2d": ["picture"],
    "Conv2d": ["picture"],
    "r*": ["router"],
}


def test_what_is_left_out(model: Model) -> None:
    skipped = {
        word: [holder.name for holder in find_product_weights(model, [word]) if holder.rule == "skipped"]
        for word in LEFT_OUT
    }
    assert skipped == LEFT_OUT and [holder.name for holder in find_product_weights(model) if holder.head] == ["out"]
    for alone, skip, names in (
        (nn.Linear(4, 4), [], ["Linear"]),
        (nn.LSTM(4, 4), [], ["weight_ih_l0", "weight_hh_l0"]),
        (Experts("bmm"), ["stack"], ["stack", "position"]),
    ):
        assert [holder.name for holder in find_product_weights(alone, skip)] == names


def test_what_fits_nothing_is_refused(model: Model) -> None:
    with pytest.raises(UnknownName, match=r"'rooter'.*Did you mean 'router'"):
        find_product_weights(model, ["rooter"])
    with pytest.raises(UnknownName, match=r"'pictures'.*Did you mean 'picture'"):
        check_precision_map(["first", "head", "experts", "pictures"], find_product_weights(model))
    with pytest.raises(UnknownName, match="Known: linear, norm; layers"):
        Conversion(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lambda layer: FP8, keys=["embed"])
    with pytest.raises(UsageError, match=r"no layer of ReLU .*no layer with a matrix product"):
        converted(nn.ReLU())
    with pytest.raises(UsageError, match="meta device"):
        converted(nn.Linear(4, 4, device="meta"))


def test_layers_are_chosen_by_name_and_kind(model: Model) -> None:
    asked: list[Layer] = []

    def choose(layer: Layer) -> PlainArithmetic | None:
        asked.append(layer)
        return None if layer.kind == "head" else FP32

    conversion = Conversion(model, choose, skip=["picture"])
    assert asked == [
        Layer("first", "linear"),
        Layer("experts.stack", "experts", group="mlp"),
        Layer("experts.position", "experts", group="mlp"),
        Layer("router", "linear"),
        Layer("out", "head"),
    ]
    assert [(holder.name, holder.rule) for holder in conversion.product_weights if holder.reason] == [
        ("picture", "skipped"),
        ("out", "kept"),
    ]


def test_a_forward_pass_of_its_own_is_not_lost() -> None:
    model = nn.Sequential(Doubled(16, 16), Renamed(16, 16))
    own, renamed = find_product_weights(model)
    assert own.rule == "forward" and own.reason.startswith("Doubled overrides forward")
    assert not renamed.reason
    x = torch.randn(4, 16)
    with converted(model):
        plain = model(x)
    assert torch.equal(plain, model(x))


def test_a_forward_pass_that_was_replaced_is_kept() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    before = everything_in(model)
    with converted(model) as conversion:
        assert [holder.name for holder in conversion.converted_weights] == ["1"]
    assert "replaced" in conversion.product_weights[0].reason
    assert everything_in(model) == before


def test_what_cannot_be_converted_says_why() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(16, 2),
            "line": nn.Conv1d(4, 4, 3),
            "back": nn.ConvTranspose2d(4, 4, 3),
            "memory": nn.LSTM(8, 8),
            "wide": nn.Conv2d(128, 128, 3, groups=128),
            "lazy": nn.LazyLinear(4),
            "whole": nn.Linear(16, 16, device="cpu"),
        }
    )
    model["whole"].weight = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
    held = find_product_weights(model)
    assert {holder.name: holder.rule for holder in held if holder.name != "memory.weight_hh_l0"} == {
        "attention.in_proj_weight": "class",
        "attention.out_proj": "not-called",
        "line.weight": "class",
        "memory.weight_ih_l0": "class",
        "back.weight": "class",
        "wide": "groups",
        "lazy": "shape",
        "whole": "dtype",
    }
    assert all(holder.reason for holder in held)
    with pytest.raises(UsageError, match=r"no layer of ModuleDict .* \(2 weights: .* LSTM; 1 weight: "):
        converted(model)


def test_rows_are_filled_up_for_native_products() -> None:
    """Zeros change neither the output nor any gradient. Sides are not padded."""
    odd = nn.Sequential(nn.Linear(16, 37), nn.Linear(37, 32), nn.Linear(32, 16))
    reasons = [holder.reason.partition(" ")[0] for holder in converted(odd, multiples=(16, 16)).product_weights]
    assert reasons == ["N=37", "K=37", ""]
    model = nn.Sequential(nn.Linear(32, 16))
    x = torch.randn(2, 5, 32)
    with converted(model, FP8):
        plain = outcome(model, x)
    with converted(model, FP8, multiples=(16, 16)):
        filled = outcome(model, x)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, filled, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
def test_a_compiled_model_is_one_graph_and_gives_the_same() -> None:
    x = torch.randn(3, 4, 4, 4)
    ahead = (nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Flatten(2), nn.Linear(16, 16))
    model = nn.Sequential(*ahead, nn.ReLU(), Experts("bmm", 3, 16, 16), nn.Linear(16, 16))
    torch._dynamo.reset()
    with converted(model, FP8):
        plain = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        result = compiled(x)
        result.sum().backward()
    torch.testing.assert_close(result, plain, rtol=0, atol=1e-6)
    assert all(
        parameter.grad is not None for parameter in (*model[0].parameters(), *model[2].parameters(), model[4].stack)
    )
    torch._dynamo.reset()
