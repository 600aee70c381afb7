"""Conversions that are broken, none of which may pass, and honest ones, none of which may be accused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench import audit_model
from fp8bench.features.audit.model import _find_layer_number_faults
from fp8bench.features.audit.values import AuditedLayer, AuditOutcome, AuditReport
from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import TENSOR
from fp8bench.nn.conversion import Conversion
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU

F = nn.functional


def cast(x: Tensor, fmt: Format = E4M3) -> Tensor:
    return values(x, fmt, TENSOR)


class Product(torch.autograd.Function):
    """An FP8 product whose gradients are multiplied by factors, or left out where one is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factors: tuple[float | None, float | None]) -> Tensor:
        low = cast(x), cast(weight)
        ctx.save_for_backward(*low)
        ctx.factors = factors
        return F.linear(*low)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = cast(gradients[0], E5M2)
        into_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        into_x, into_weight = (
            None if factor is None else factor * into
            for factor, into in zip(ctx.factors, (gradient @ weight, into_weight), strict=True)
        )
        return into_x, into_weight, None


def multiply(x: Tensor, weight: Tensor, into_x: float | None = 1.0, into_weight: float | None = 1.0) -> Tensor:
    result: Tensor = Product.apply(x, weight, (into_x, into_weight))  # type: ignore[no-untyped-call]
    return result


class Fp8Linear(nn.Linear):
    """A layer that computes in the way `how`, honestly by default."""

    def __init__(self, layer: nn.Linear, how: Callable[[Fp8Linear, Tensor], Tensor] | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.how = how
        self.first = layer.weight.detach().clone(), None if layer.bias is None else layer.bias.detach().clone()

    def product(self, x: Tensor, **factors: float | None) -> Tensor:
        y = multiply(x, self.weight, **factors)
        return y if self.bias is None else y + self.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if self.how is None else self.how(self, x)


def wide(layer: Fp8Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def through(x: Tensor) -> Tensor:
    return x + (cast(x) - x).detach()


def only_gradient(y: Tensor) -> Tensor:
    return y - y.detach()


def zeroed(start: int, end: int, y: Tensor) -> Tensor:
    places = torch.arange(y.shape[-1])
    return torch.where((places >= start) & (places < end), 0.0, y)


class BiasGradient(torch.autograd.Function):
    """Adds a bias whose gradient is that of the first row."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        return y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].flatten(0, -2)[0]


BROKEN: dict[str, Callable[[Fp8Linear, Tensor], Tensor]] = {
    "halved": lambda layer, x: layer.product(x) / 2,
    "three percent too large": lambda layer, x: layer.product(x) * 1.03,
    "weights from before a checkpoint": lambda layer, x: multiply(x, layer.first[0]) + layer.bias,
    "bias from before a checkpoint": lambda layer, x: multiply(x, layer.weight) + layer.first[1],
    "no bias": lambda layer, x: multiply(x, layer.weight),
    "bias twice": lambda layer, x: layer.product(x) + layer.bias,
    "bias in other places": lambda layer, x: multiply(x, layer.weight) + layer.bias.roll(1),
    "bias negated": lambda layer, x: multiply(x, layer.weight) - layer.bias,
    "a ReLU": lambda layer, x: layer.product(x).relu(),
    "a GELU": lambda layer, x: F.gelu(layer.product(x)),
    "columns past 200 are zero": lambda layer, x: zeroed(200, 1 << 20, layer.product(x)),
    "one column is zero": lambda layer, x: zeroed(131, 132, layer.product(x)),
    "columns are permuted": lambda layer, x: layer.product(x).roll(1, -1),
    "two columns are exchanged": lambda layer, x: layer.product(x)[..., [1, 0, *range(2, layer.out_features)]],
    "rows are permuted": lambda layer, x: layer.product(x.roll(1, 0)),
    "the last row is the first": lambda layer, x: layer.product(torch.cat((x[:-1], x[:1]))),
    "negated": lambda layer, x: -layer.product(x),
    "a transposed weight": lambda layer, x: multiply(x, layer.weight.t()) + layer.bias,
    "half of the contraction": lambda layer, x: multiply(x[..., :128], layer.weight[:, :128]) + layer.bias,
    "in bf16": lambda layer, x: wide(layer, x.bfloat16().to(x.dtype)),
    "wide": wide,
    "inputs are not cast": lambda layer, x: F.linear(x, through(layer.weight), layer.bias),
    "wide with gradients": lambda layer, x: wide(layer, x) if torch.is_grad_enabled() else layer.product(x),
    "wide without gradients": lambda layer, x: layer.product(x) if torch.is_grad_enabled() else wide(layer, x),
    "wide in evaluation": lambda layer, x: layer.product(x) if layer.training else wide(layer, x),
    "wide in training": lambda layer, x: wide(layer, x) if layer.training else layer.product(x),
    "halved in evaluation": lambda layer, x: layer.product(x) * (1 if layer.training else 0.5),
    "weight gradient doubled": lambda layer, x: layer.product(x, into_weight=2.0),
    "input gradient doubled": lambda layer, x: layer.product(x, into_x=2.0),
    "input gradient five percent too small": lambda layer, x: layer.product(x, into_x=0.95),
    "weight gradient negated": lambda layer, x: layer.product(x, into_weight=-1.0),
    "no input gradient": lambda layer, x: layer.product(x, into_x=None),
    "no weight gradient": lambda layer, x: layer.product(x, into_weight=None),
    "weight gradient of zeros": lambda layer, x: layer.product(x, into_weight=0.0),
    "a detached bias": lambda layer, x: multiply(x, layer.weight) + layer.bias.detach(),
    "the bias gradient of one row": lambda layer, x: BiasGradient.apply(multiply(x, layer.weight), layer.bias),  # type: ignore[no-untyped-call]
    "gradients of the transposed weight": lambda layer, x: layer.product(x.detach()) + only_gradient(x @ layer.weight),
    "nothing": lambda layer, x: torch.zeros_like(wide(layer, x)) * layer.weight.sum() * x.sum(),
    "not finite": lambda layer, x: layer.product(x) / 0,
    "the wrong size": lambda layer, x: layer.product(x)[..., :-1],
    "an error": lambda layer, x: layer.product(x[0, 0, 0]),
}  # fmt: skip
SIDES = 256


def network(*how: Any) -> nn.Module:
    """Layers that compute in these ways; None is honest."""
    torch.manual_seed(0)
    low = [Fp8Linear(nn.Linear(SIDES, SIDES), each) for each in how]
    for layer in low:
        nn.init.normal_(layer.weight, std=SIDES**-0.5)
    return nn.Sequential(*low)


def audited(model: nn.Module) -> AuditReport:
    return audit_model(model, torch.randn(2, 32, SIDES, generator=torch.Generator().manual_seed(0)))


def failures(audit: AuditReport) -> list[tuple[str, str]]:
    return [(finding.code, finding.why) for finding in audit.findings if finding.has_failed]


@pytest.mark.slow
@for_each("name", list(BROKEN))
def test_a_broken_conversion_fails(name: str) -> None:
    assert failures(audited(network(BROKEN[name])))


@for_each(("place", "name"), enumerate(("halved", "in bf16", "weight gradient doubled")))
def test_one_broken_layer_of_three_alike_fails(place: int, name: str) -> None:
    how = [BROKEN[name] if row == place else None for row in range(3)]
    audit = audited(network(*how))
    wrong = [bool(layer.code) or layer.runs != "fp8" for layer in audit.layers]
    assert failures(audit) and wrong == [row == place for row in range(3)]


@pytest.mark.slow
@for_each(
    ("name", "words"),
    [
        ("halved", "its results are 0.50 times"),
        ("no bias", "its bias is not added"),
        ("bias twice", "added 2 times"),
        ("columns past 200 are zero", "56 of 256 checked columns are wrong"),
        ("wide with gradients", "with gradients on it multiplies operands that are not cast, but otherwise as fp8"),
        ("weight gradient doubled", "times the exact gradient"),
        ("no input gradient", "its input gradient does not exist"),
    ],
)
def test_a_failure_names_the_mistake(name: str, words: str) -> None:
    (_, why), *_ = failures(audited(network(BROKEN[name])))
    assert words in why


def test_a_bias_of_zeros_and_an_old_weight_with_the_current_values_are_seen() -> None:
    model = network(BROKEN["no bias"])
    nn.init.zeros_(model[0].bias)  # type: ignore[union-attr, arg-type]
    assert failures(audited(model))[0][1].endswith("its bias is not added")
    model = network(BROKEN["weights from before a checkpoint"])
    model[0].first = model[0].weight.detach().clone(), None  # type: ignore[union-attr, operator]
    assert failures(audited(model))


def test_layers_that_no_batch_reaches_are_checked_too() -> None:
    class Routed(nn.Module):
        def __init__(self, how: Any) -> None:
            super().__init__()
            self.used = network(None)[0]  # type: ignore[index]
            self.unused = network(how)[0]

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    assert audited(Routed(None)).outcome is AuditOutcome.PASS
    assert failures(audited(Routed(BROKEN["halved"]))) and failures(audit_model(network(BROKEN["halved"])))
    assert audit_model(network(None)).outcome is AuditOutcome.PASS


def test_a_model_is_left_as_it_was() -> None:
    model = network(None, None).eval()
    model[1].train()  # type: ignore[union-attr]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    assert audited(model).outcome is AuditOutcome.PASS
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn) and [layer.training for layer in model] == [False, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_for_inference_needs_no_gradients() -> None:
    without = network(lambda layer, x: layer.product(x).detach())
    assert failures(audited(without))
    assert audited(without.eval()).outcome is AuditOutcome.PASS
    assert audited(without.train().requires_grad_(False)).outcome is AuditOutcome.PASS


class Mixed(nn.Module):
    """Layers of several shapes under a tied head."""

    def __init__(self, seed: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sides = (64, 128, 48, 64)
        self.embedding = nn.Embedding(96, 64)
        self.layers = nn.Sequential(*(nn.Linear(*pair, bias=bias) for pair in pairwise(sides)))
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.layers(self.embedding(ids))))


KINDS = ((True, torch.float32), (False, torch.bfloat16))
QUICK = ("fp8", "fp8-rowwise:scale=exact", "nvfp4")
OWN = (
    *QUICK,
    "fp8-rowwise",
    "fp8-block",
    "fp8-e4m3",
    "mxfp8",
    "mxfp8:scale=floor",
    "mxfp6",
    "mxfp4",
    "fp8:accumulator=short",
)


def accused(convert: Callable[[nn.Module], Any], precision: str, seeds: range) -> list[Any]:
    found = []
    for seed in seeds:
        ids = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(seed))
        for bias, dtype in KINDS:
            model = Mixed(seed, bias, dtype)
            undo = convert(model)
            audit = audit_model(model, ids, precision)
            found += failures(audit) + [layer for layer in audit.layers if layer.runs != precision or not layer.low]
            undo()
    return found


def own(precision: str) -> Callable[[nn.Module], Callable[[], None]]:
    def convert(model: nn.Module) -> Callable[[], None]:
        arithmetic = precisions.get(precision).arithmetic(CPU)
        return Conversion(model, lambda layer: arithmetic.layer(layer.name)).__enter__().restore_forward_passes

    return convert


@for_each("precision", QUICK)
def test_our_own_conversion_is_not_accused(precision: str) -> None:
    assert accused(own(precision), precision, range(1)) == []


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(3), marks=pytest.mark.slow), pytest.param(range(3, 20), marks=pytest.mark.nightly)]
)
@for_each("precision", OWN)
def test_our_own_conversion_is_not_accused_at_other_seeds(precision: str, seeds: range) -> None:
    assert accused(own(precision), precision, seeds) == []


@pytest.mark.slow
def test_torchaos_conversion_is_not_accused_at_ten_seeds() -> None:
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.config import Float8LinearConfig

    def convert(model: nn.Module) -> Callable[[], None]:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
        return lambda: None

    assert accused(convert, "fp8", range(10)) == []


def test_convolutions_are_checked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 1))
    images = torch.randn(2, 16, 8, 8)
    undo = own("fp8")(model)
    for batch in (images, images[0]):
        assert audit_model(model, batch, "fp8").outcome is AuditOutcome.PASS
    honest = model[0].forward
    vars(model[0])["forward"] = lambda x: honest(x) / 2
    assert failures(audit_model(model, images, "fp8"))
    undo()


def test_weights_alone_are_no_promised_product() -> None:
    layer = AuditedLayer("l", "a layer", (16, 16), True, "weights alone")
    assert [finding.code for finding in _find_layer_number_faults([layer], "mxfp8")] == ["not-cast"]
    assert not [*_find_layer_number_faults([layer], "")]
