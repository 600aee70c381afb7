"""Scales from data: what they come from, when they are renewed, and that nobody waits for a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import ROW, TENSOR, Recipe, ScaleRounding, Treatment
from fp8bench.model import LayerScale, StaticScales
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.nn.tensor_scales import StaticScale
from fp8bench.protocols import ScaleBook, SilentPhases
from tests.counts import for_each

FIXED = StaticScales(1)
BY_ROW = Treatment(E4M3, ROW)
HYBRID = Recipe(Treatment(E4M3, TENSOR), Treatment(E4M3, TENSOR), Treatment(E5M2, TENSOR))


def of_magnitude(amax: float, count: int = 8) -> Tensor:
    """Values of both signs whose largest magnitude is that, of a negative one."""
    return torch.linspace(-amax, amax / 2, count)


def scale_of(
    rule: StaticScales, known: float | None, rounding: ScaleRounding = ScaleRounding.EXACT
) -> tuple[ScaleBook, StaticScale]:
    """A book with one scale of E4M3, whose amax is known; None: it calibrates."""
    book = ScaleBook(rule, None if known is None else {("one", "input"): known})
    scale = StaticScale(book, E4M3, rounding, known)
    book.keep("one", "input", scale.state)
    return book, scale


def test_calibrating_casts_with_the_current_scale_and_keeps_the_largest_magnitude() -> None:
    """Zeros, infinities and NaN do not count."""
    book, scale = scale_of(FIXED, None)
    for amax in (2.0, 7.0, 3.0):
        assert float(scale.next(of_magnitude(amax)).scale) == pytest.approx(E4M3.largest / amax, rel=1e-7)
    for strange in (torch.zeros(3), torch.tensor([math.inf, 90.0]), torch.tensor([math.nan, 90.0]), torch.empty(0)):
        assert float(scale.next(strange).scale) == 1.0
    assert book.states() == (LayerScale("one", "input", 7.0, 64.0, 0),)


def test_a_scale_that_is_known_stays() -> None:
    """Whatever comes, and without looking at it."""
    book, scale = scale_of(FIXED, 7.0)
    for amax in (7.0, 0.5, 900.0, math.inf):
        assert float(scale.next(of_magnitude(amax)).scale) == 64.0
    assert book.states() == (LayerScale("one", "input", 7.0, 64.0, 0),)


@for_each(("rounding", "wanted"), [(ScaleRounding.EXACT, 448 / 5), (ScaleRounding.POWER_OF_TWO, 64.0)])
def test_scales_are_rounded_as_the_recipe_rounds_them(rounding: ScaleRounding, wanted: float) -> None:
    """Down to a power of two, so that nothing saturates."""
    _, scale = scale_of(FIXED, 5.0, rounding)
    assert float(scale.next(of_magnitude(1.0)).scale) == pytest.approx(wanted, rel=1e-7)


def test_every_so_many_steps_a_scale_is_that_of_one_step() -> None:
    book, scale = scale_of(StaticScales(1, refresh=3), 7.0)
    used = []
    for step in range(1, 8):
        book.begin_step()
        used.append([448 / float(scale.next(of_magnitude(float(10 * step + cast))).scale) for cast in (1, 0)])
    assert [[round(amax, 4) for amax in pair] for pair in used] == [
        [7, 7],
        [7, 7],
        [31, 30],
        [31, 31],
        [31, 31],
        [61, 60],
        [61, 61],
    ]
    assert book.states() == (LayerScale("one", "input", 61.0, float(torch.tensor(448.0) / 61), 2),)


@pytest.fixture(params=["processor", "elsewhere"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """On a processor, and as on a device whose answers nobody waits for: tensors then say that they lie elsewhere, and
    to take a value from one is an error."""
    if request.param == "processor":
        yield request.param
        return

    class Elsewhere(Tensor):
        device = torch.device("cuda")

        def __bool__(self) -> bool:
            raise AssertionError("somebody waits for the device")

    monkeypatch.setattr("tests.nn.test_static_scale.placed", lambda x: x.as_subclass(Elsewhere))
    monkeypatch.setattr("fp8bench.nn.tensor_scales.largest_magnitude", lambda x: x.abs().max())
    yield request.param


def placed(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("bound", "beyond", "renewed"), [(0.25, 2, False), (0.25, 3, True), (0.0, 0, False), (0.0, 1, True)]
)
def test_a_scale_is_renewed_where_more_than_the_bound_saturates(
    bound: float, beyond: int, renewed: bool, device: str
) -> None:
    """Of eight values so many lie beyond the range; then this very cast has its current scale, and those after it."""
    _, scale = scale_of(StaticScales(1, bound=bound), 7.0)
    values = torch.full((8,), -7.0)
    values[:beyond] = torch.tensor([9.0, -14.0, 8.0])[:beyond]
    wanted = float(values.abs().max()) if renewed else 7.0
    for x in (values, of_magnitude(1.0)):
        used = scale.next(placed(x))
        assert float(used.scale) == pytest.approx(448 / wanted) and torch.equal(used.inverse, 1 / used.scale)
    standing = scale.state()
    assert standing is not None and (standing.amax, standing.renewals) == (wanted, int(renewed))


def test_a_cast_that_is_done_again_gets_the_scale_that_it_had() -> None:
    book, scale = scale_of(StaticScales(1, refresh=2, bound=0.0), 7.0)
    big, small = of_magnitude(14.0), of_magnitude(3.5)
    first = scale.next(big)
    assert scale.next(small, again=True) is first
    book.begin_step()
    book.begin_step()
    watched = scale.next(small)
    assert float(watched.scale) == 128.0 and scale.next(big, again=True) is watched
    book.begin_step()
    assert float(scale.next(small).scale) == 128.0 and float(scale.next(small, again=True).scale) == 128.0


def layer_of(book: ScaleBook) -> Linear:
    torch.manual_seed(0)
    arithmetic = RecipeArithmetic(HYBRID).scaled_by(book, "one")
    return Linear(32, 16, arithmetic)


def trained(layer: Linear, *inputs: Tensor) -> list[Tensor]:
    """Outputs, and gradients of all."""
    found = []
    for x in inputs:
        own = x.clone().requires_grad_()
        y = layer(own, SilentPhases())
        y.square().sum().backward()
        assert own.grad is not None and layer.weight.grad is not None
        found += [y.detach(), own.grad, layer.weight.grad]
        layer.weight.grad = None
    return found


def test_scales_of_the_very_data_give_what_current_scaling_gives() -> None:
    """Bit for bit, in all three products: a layer that was calibrated on one batch, and casts it."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.manual_seed(0)
    current = Linear(32, 16, RecipeArithmetic(HYBRID))
    calibrating = ScaleBook(FIXED)
    for mine, wanted in zip(trained(layer_of(calibrating), x), trained(current, x), strict=True):
        assert torch.equal(mine, wanted)
    found = calibrating.states()
    assert [(one.role, one.renewals) for one in found] == [("input", 0), ("weight", 0), ("gradient", 0)]
    fixed = ScaleBook(FIXED, {(one.layer, one.role): one.amax for one in found})
    layer = layer_of(fixed)
    for mine, wanted in zip(trained(layer, x), trained(current, x), strict=True):
        assert torch.equal(mine, wanted)
    larger, current_larger = trained(layer, 8 * x), trained(current, 8 * x)
    assert not torch.equal(larger[0], current_larger[0])
    assert fixed.states() == found


def test_a_recipe_without_one_scale_a_tensor_stays_as_it_is() -> None:
    book, rows = ScaleBook(FIXED), RecipeArithmetic(Recipe(BY_ROW, BY_ROW, BY_ROW))
    assert rows.scaled_by(book, "one") is rows and book.states() == ()
