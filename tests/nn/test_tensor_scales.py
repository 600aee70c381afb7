"""Scales of whole tensors: delayed ones against a slow definition, static ones from data, and views of recipes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.recipes import ROW, TENSOR, Amax, DelayedScaling, Recipe, ScaleRounding, Treatment
from fp8bench.model import LayerScale, StaticScales
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.nn.tensor_scales import DelayedScale, StaticScale, make_recipe_view
from fp8bench.numerics.tensor_error import tensor_error
from fp8bench.protocols import Role, ScaleBook
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.nn.layers import given, linear, outcome


class Definition:
    """Delayed scales by lists of float32 numbers, as Transformer Engine defines them, and what it leaves open."""

    def __init__(self, delayed: DelayedScaling, fmt: Format) -> None:
        self.delayed, self.fmt = delayed, fmt
        self.amaxes: list[np.float32] = []
        self.scale = np.float32(1)

    def next(self, values: np.ndarray) -> np.float32:
        used, amax = self.scale, np.abs(values).max() if values.size else np.float32(0)
        finite = bool(np.isfinite(amax))
        self.amaxes.append(amax if finite else np.float32(0))
        if len(self.amaxes) % self.delayed.interval == 0 and finite:
            window = self.amaxes[-self.delayed.history :]
            result = max(window) if self.delayed.algorithm is Amax.MAX else window[-1]
            if result > 0:
                with np.errstate(over="ignore"):
                    quotient = min(np.float32(self.fmt.largest) / result, np.float32(2.0**126))
                self.scale = np.float32(quotient) / np.float32(2.0**self.delayed.margin)
        return used


OPTIONS = [
    DelayedScaling(history, algorithm, margin, interval)
    for history, algorithm, margin, interval in itertools.product((1, 3, 8), Amax, (0, 2), (1, 3))
]


def tensors(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(7)
    result = []
    for step in range(count):
        values = (random.standard_normal((3, 5)) * 2.0 ** random.integers(-40, 40)).astype(np.float32)
        if step % 7 == 3:
            values[1, 2] = random.choice([np.inf, -np.inf, np.nan])
        result.append(
            {5: np.zeros((2, 2), np.float32), 6: values[:0], 11: values * np.float32(1e-40)}.get(step, values)
        )
    return result


@for_each("delayed", OPTIONS)
@for_each("fmt", [E4M3, E5M2])
def test_the_scale_of_every_cast_is_the_definition_s(delayed: DelayedScaling, fmt: Format) -> None:
    ours, theirs = DelayedScale(delayed, fmt), Definition(delayed, fmt)
    for values in tensors(40):
        result, inverse = ours.next(torch.from_numpy(values))
        assert inverse.item() == np.float32(1) / result.numpy()
        assert result.dtype == torch.float32 and result.shape == ()
        assert result.item() == theirs.next(values)
    assert ours.scale is not None and ours.scale.item() == theirs.scale


def test_a_cast_that_is_done_again_is_not_entered_again() -> None:
    scale, plain = (DelayedScale(DelayedScaling(history=4), E4M3) for _ in range(2))
    for amax in (2.0, 3.0, 0.5):
        used = scale.next(torch.tensor([amax]))
        assert scale.next(torch.tensor([100.0]), repeat=True) is used
        assert plain.next(torch.tensor([amax])).scale.item() == used.scale.item()
    assert torch.equal(scale.history, plain.history)  # type: ignore[arg-type]
    fresh = DelayedScale(DelayedScaling(), E4M3)
    assert fresh.next(torch.tensor([2.0]), repeat=True).scale.item() == 1.0 and fresh.scale.item() == 224.0  # type: ignore[union-attr]


FIXED = StaticScales(1)
BY_ROW = Treatment(E4M3, ROW)
HYBRID = Recipe(Treatment(E4M3, TENSOR), Treatment(E4M3, TENSOR), Treatment(E5M2, TENSOR))


def of_magnitude(amax: float, count: int = 8) -> Tensor:
    return torch.linspace(-amax, amax / 2, count)


def scale_of(
    rule: StaticScales, known: float | None, rounding: ScaleRounding = ScaleRounding.EXACT
) -> tuple[ScaleBook, StaticScale]:
    book = ScaleBook(rule, None if known is None else {("one", "input"): known})
    scale = StaticScale(book, E4M3, rounding, known)
    book.keep("one", "input", scale.read_state)
    return book, scale


def test_calibrating_casts_with_the_current_scale_and_keeps_the_largest_magnitude() -> None:
    book, scale = scale_of(FIXED, None)
    for amax in (2.0, 7.0, 3.0):
        assert float(scale.next(of_magnitude(amax)).scale) == pytest.approx(E4M3.largest / amax, rel=1e-7)
    for strange in (torch.zeros(3), torch.tensor([math.inf, 90.0]), torch.tensor([math.nan, 90.0]), torch.empty(0)):
        assert float(scale.next(strange).scale) == 1.0
    assert book.states() == (LayerScale("one", "input", 7.0, 64.0, 0),)


@for_each(("rounding", "wanted"), [(ScaleRounding.EXACT, 448 / 5), (ScaleRounding.POWER_OF_TWO, 64.0)])
def test_scales_are_rounded_as_the_recipe_rounds_them(rounding: ScaleRounding, wanted: float) -> None:
    _, scale = scale_of(FIXED, 5.0, rounding)
    assert float(scale.next(of_magnitude(1.0)).scale) == pytest.approx(wanted, rel=1e-7)


def test_every_so_many_steps_a_scale_is_that_of_one_step() -> None:
    book, scale = scale_of(StaticScales(1, refresh=3), 7.0)
    used = []
    for step in range(1, 8):
        book.begin_step()
        used.append([448 / float(scale.next(of_magnitude(float(10 * step + cast))).scale) for cast in (1, 0)])
    result = [tuple(round(amax, 4) for amax in pair) for pair in used]
    assert result == [(7, 7), (7, 7), (31, 30), (31, 31), (31, 31), (61, 60), (61, 61)]
    assert book.states() == (LayerScale("one", "input", 61.0, float(torch.tensor(448.0) / 61), 2),)


@pytest.fixture(params=["processor", "elsewhere"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs on a CPU, and as a device that must not be waited for: its tensors raise when their value is read."""
    if request.param == "processor":
        yield request.param
        return

    class Elsewhere(Tensor):
        device = torch.device("cuda")

        def __bool__(self) -> bool:
            raise AssertionError("somebody waits for the device")

    monkeypatch.setattr("tests.nn.test_tensor_scales.placed", lambda x: x.as_subclass(Elsewhere))
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
    _, scale = scale_of(StaticScales(1, bound=bound), 7.0)
    values = torch.full((8,), -7.0)
    values[:beyond] = torch.tensor([9.0, -14.0, 8.0])[:beyond]
    expected = float(values.abs().max()) if renewed else 7.0
    for x in (values, of_magnitude(1.0)):
        used = scale.next(placed(x))
        assert float(used.scale) == pytest.approx(448 / expected) and torch.equal(used.inverse_scale, 1 / used.scale)
    standing = scale.read_state()
    assert standing is not None and (standing.amax, standing.renewals) == (expected, int(renewed))


def test_a_cast_that_is_done_again_gets_the_scale_that_it_had() -> None:
    book, scale = scale_of(StaticScales(1, refresh=2, bound=0.0), 7.0)
    big, small = of_magnitude(14.0), of_magnitude(3.5)
    first = scale.next(big)
    assert scale.next(small, repeat=True) is first
    book.begin_step()
    book.begin_step()
    watched = scale.next(small)
    assert float(watched.scale) == 128.0 and scale.next(big, repeat=True) is watched
    book.begin_step()
    assert float(scale.next(small).scale) == 128.0 and float(scale.next(small, repeat=True).scale) == 128.0


def layer_of(book: ScaleBook) -> Linear:
    return linear(RecipeArithmetic(HYBRID).scaled_by(book, "one"), 32, 16)


def test_scales_of_the_very_data_give_what_current_scaling_gives() -> None:
    x, pull = given(8, 32, dtype=torch.bfloat16), given(8, 16, seed=3)
    current, calibrating = linear(RecipeArithmetic(HYBRID), 32, 16), ScaleBook(FIXED)
    expected = outcome(current, x, pull)
    assert all(map(torch.equal, outcome(layer_of(calibrating), x, pull), expected))
    result = calibrating.states()
    assert [(tensor.role, tensor.renewals) for tensor in result] == [("input", 0), ("weight", 0), ("gradient", 0)]
    fixed = ScaleBook(FIXED, {(tensor.layer, tensor.role): tensor.amax for tensor in result})
    layer = layer_of(fixed)
    assert all(map(torch.equal, outcome(layer, x, pull), expected))
    assert not torch.equal(outcome(layer, 8 * x, pull)[0], outcome(current, 8 * x, pull)[0])
    assert fixed.states() == result


def test_a_recipe_without_one_scale_a_tensor_stays_as_it_is() -> None:
    book, rows = ScaleBook(FIXED), RecipeArithmetic(Recipe(BY_ROW, BY_ROW, BY_ROW))
    assert rows.scaled_by(book, "one") is rows and book.states() == ()


def normal(scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(48, 160, generator=torch.Generator().manual_seed(seed)) * scale


def cast(mode: str, role: Role, *steps: torch.Tensor) -> torch.Tensor:
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("x")
    for step in steps:
        operand = arithmetic.cast(step, role)
    return arithmetic.restore(operand, torch.float32)


def test_a_delayed_scale_is_that_of_the_steps_before() -> None:
    steps = [normal(2.0**power) for power in range(4)]
    before = list(reversed(steps[:-1]))
    view = make_recipe_view(precisions.get("fp8-delayed"), Role.INPUT, steps[-1], before)
    assert view.factors is not None and view.scale_course is not None
    amax = float(steps[-2].abs().max())
    assert float(view.factors.factor_by_block) == pytest.approx(amax / 448, rel=1e-6)
    assert view.scale_course.lag == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)
    assert view.scale_course.drift == pytest.approx([1.0, 1.0], abs=1e-6)
    result = tensor_error(steps[-1], cast("fp8-delayed", Role.INPUT, *steps), view.fmt, view.factors)
    assert result.utilisation == pytest.approx(2, rel=1e-5) and result.saturated_count
    assert result.max_ulp is not None and result.max_ulp < 0.5 + 2**-18
