"""torchao's layers, which it emulates on a CPU, against fp8bench's of the same recipe."""

from __future__ import annotations

import logging
import warnings
from importlib import metadata
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fp8bench.errors import BackendMissing
from fp8bench.nn.linear import Linear
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Role
from fp8bench.registry import backends, precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.formats.scaling_definitions import gaussian
from tests.nn.layers import Outcome, linear, outcome

IS_HERE = find_spec("torchao") is not None  # imported only by tests, because it takes seconds
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_HERE, reason="needs torchao, which is the backend")]
PACKAGES = (("torchao", metadata.version("torchao")),) if IS_HERE else ()
HERE = CPU.__class__(**{**vars(CPU), "packages": PACKAGES})
MODES = ("fp8", "fp8-rowwise", "fp8-rowwise:weight-gradient=bf16")


def outcome_of(mode: str) -> Outcome:
    layer = linear(precisions.get(mode).arithmetic(HERE).layer("one"), 128, 96)
    with torch.no_grad():  # rows of very different sizes, so that one scale per tensor is worse
        layer.weight.mul_(torch.logspace(-4, 2, 96)[:, None])
    x = (gaussian(64, 128) * torch.logspace(-2, 2, 64)[:, None]).to(torch.bfloat16)
    pull = gaussian(64, 96, seed=5) * torch.logspace(4, -2, 96)  # small rows count as much
    assert [name for name, _ in layer.named_parameters()] == ["weight"] and layer.weight.dtype == torch.float32
    return outcome(layer, x, pull)


@for_each("mode", MODES)
def test_its_layers_compute_what_ours_do(mode: str) -> None:
    """Up to bfloat16 rounding.

    Exception: for the input gradient of `rowwise_with_gw_hp` torchao uses one weight scale per tensor, fp8bench one per
    row.
    """
    theirs, ours = outcome_of(f"{mode}:backend=torchao"), outcome_of(mode)
    tolerances = [4e-3, 4e-3, 4e-3]
    if mode.endswith("bf16"):  # with one scale the small rows become zero
        assert relative_frobenius(theirs[1].double(), ours[1].double()) > 0.1
        tolerances[1] = 0.5
    for result, expected, tolerance in zip(theirs, ours, tolerances, strict=True):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert relative_frobenius(result.double(), expected.double()) < tolerance


@for_each("mode", MODES)
def test_its_single_products_are_those_of_its_layers(mode: str) -> None:
    arithmetic = precisions.get(f"{mode}:backend=torchao").arithmetic(HERE)
    weight = nn.Parameter(gaussian(96, 128) * torch.logspace(-4, 2, 96)[:, None])
    x, gradient = gaussian(64, 128).bfloat16().requires_grad_(), gaussian(64, 96, seed=5).bfloat16()
    multiply, single = arithmetic.whole(weight), arithmetic.separate()
    assert multiply is not None
    y = multiply(x)
    results = [y, *torch.autograd.grad(y, (x, weight), gradient)]
    w, x = weight.detach(), x.detach()
    turned = [
        single.cast_transpose(tensor.t(), role)
        for tensor, role in ((w, Role.WEIGHT), (gradient, Role.GRADIENT), (x, Role.INPUT))
    ]
    pairs = (
        (single.cast(x, Role.INPUT), single.cast(w, Role.WEIGHT)),
        (single.cast(gradient, Role.GRADIENT), turned[0]),
        (turned[1], turned[2]),
    )
    for pair, result in zip(pairs, results, strict=True):
        assert relative_frobenius(single.product(*pair, torch.bfloat16).double(), result.double()) < 4e-3


def test_it_has_layers_and_no_products_and_draws_nothing() -> None:
    arithmetic = precisions.get("fp8:backend=torchao").arithmetic(HERE)
    with pytest.raises(TypeError, match="torchao has no separate cast or product"):
        arithmetic.cast(gaussian(16, 16), Role.INPUT)
    with pytest.raises(TypeError, match="product"):
        arithmetic.product(*[None] * 3)  # type: ignore[arg-type]
    states = []
    for mode in ("fp8", "fp8:backend=torchao"):
        torch.manual_seed(1)
        Linear(16, 16, precisions.get(mode).arithmetic(HERE))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_package_that_does_not_import_gives_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(BackendMissing, match="torchao is installed and cannot be imported"):
        backends.get("torchao").imported()


def test_its_warnings_are_suppressed() -> None:
    before = logging.root.manager.disable, list(warnings.filters)
    backends.get("torchao").imported()
    assert (logging.root.manager.disable, list(warnings.filters)) == before
