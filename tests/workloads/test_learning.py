"""The small fixed training: what its figure is of, and that faults of a format show in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch import Tensor

from fp8bench.formats import blocks, operators, quantise
from fp8bench.formats.grids import E4M3, Format
from fp8bench.model import Scalar
from fp8bench.model.specs import LOSS_BAND
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Setup
from fp8bench.registry import precisions
from fp8bench.workloads import learning
from fp8bench.workloads.learning import Learning
from tests.workloads.steps import CPU, H200, setup_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    learning._train_reference_loss.cache_clear()
    yield
    learning._train_reference_loss.cache_clear()
    torch.set_num_threads(threads)


def setup_for(corpus: Corpus, precision: str, **changes: Scalar) -> Setup:
    params: dict[str, Scalar] = {"width": 32, "steps": 2, "draws": 2, "data": corpus.identity, **changes}
    return setup_of("learning", params, precision, corpus=corpus.path)


def losses(corpus: Corpus, precision: str, draw: int, steps: int = 2) -> list[float]:
    return Learning().prepare(replace(setup_for(corpus, precision), draw=draw)).losses(steps)


def test_it_is_the_mean_loss_of_all_draws_over_the_references(corpus: Corpus) -> None:
    found = {mode: Learning().error(setup_for(corpus, mode))["relative_loss"] for mode in ("bf16", "fp8")}
    means = {mode: fmean(losses(corpus, mode, 0) + losses(corpus, mode, 1)) for mode in ("fp32", "bf16", "fp8")}
    assert found == {"bf16": means["bf16"] / means["fp32"], "fp8": means["fp8"] / means["bf16"]}
    assert found["fp8"] != 1 and abs(found["fp8"] - 1) < 0.01
    assert losses(corpus, "bf16", 0)[0] != losses(corpus, "bf16", 1)[0]


def test_a_layer_that_is_mapped_takes_the_other_precision(corpus: Corpus) -> None:
    bf16 = precisions.get("bf16").arithmetic(CPU)
    setup = setup_for(corpus, "fp8")
    assert Learning().error(replace(setup, layers=dict.fromkeys(("attn", "mlp"), bf16))) == {"relative_loss": 1.0}


def test_a_loss_that_is_not_finite_is_no_figure(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_LEARNING_RATE", 1e30)
    setup = setup_for(corpus, "fp8", steps=6)
    assert math.isinf(learning._train_mean_loss(setup))


def test_every_width_fits_every_native_product() -> None:
    (width,) = (axis for axis in Learning().axes(H200) if axis.name == "width")
    most = max(side for mode in precisions.names() for side in precisions.get(mode).multiples)
    assert width.default == ("256",) and all(int(one) % most == 0 for one in ("32", "64", "128", "256", "512"))
    assert [axis.default for axis in Learning().axes(CPU)] == [("64",), ("60",), ("4",)]


def octave_off(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = blocks.float_factor
    for name in ("formats.blocks", "formats.scaled", "formats.fused"):
        monkeypatch.setattr(f"fp8bench.{name}.float_factor", lambda *given: 2 * sound(*given), raising=False)


def towards_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = quantise.round_to_grid

    def cut(magnitudes: Tensor, fmt: Format, random: Tensor | None = None) -> Tensor:
        nearest = sound(magnitudes, fmt, random)
        if fmt is not E4M3:
            return nearest
        exponents = nearest.log2().floor().clamp(min=fmt.min_exponent)
        return torch.where(nearest > magnitudes, nearest - torch.exp2(exponents - fmt.mantissa_bits), nearest)

    monkeypatch.setattr(quantise, "round_to_grid", cut)


@pytest.mark.slow
def test_a_fault_of_a_format_moves_it_beyond_its_band(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the history, the gate and `history regressions` use that band.

    Kernels compiled by other tests do not contain the planted fault.
    """

    def moved() -> float:
        monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
        return Learning().error(setup_for(corpus, "fp8", width=64, steps=60, draws=4))["relative_loss"]

    sound = moved()
    for plant in (octave_off, towards_zero):
        with monkeypatch.context() as planted:
            plant(planted)
            assert moved() > sound * (1 + LOSS_BAND), plant.__name__
