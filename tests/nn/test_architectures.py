"""Ten architectures of transformers and diffusers: coverage by hand, conversion and undoing, errors in their order."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.model.step import Coverage
from fp8bench.nn.holders import find_product_weights
from fp8bench.nn.model_calls import find_loss, iterate_named_tensors, make_call
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.tape.coverage import measure_coverage
from tests.counts import for_each, sampled
from tests.nn.converted_models import FP32, converted
from tests.nn.layers import arithmetic_of
from tests.tapes import tape_in_phases, tape_of

pytestmark = pytest.mark.slow

NAMES = ("llama", "gpt2", "bert", "vit", "mixtral", "t5", "mamba", "unet", "dit", "resnet")
each_model = pytest.mark.parametrize("name", sampled(("gpt2", "mixtral", "unet"), NAMES))


@cache
def architectures() -> ModuleType:
    from tests import architectures

    return architectures


class Case:
    """A model with its batch, and the coverage of a training step of it."""

    def __init__(self, name: str) -> None:
        self.model, self.batch = architectures().made(name)
        self.call = make_call(self.model, self.batch)
        self.words = find_loss(self.model, self.batch, self.call())[1]
        held = find_product_weights(self.model)
        self.coverage: Coverage = measure_coverage(self.model, held, self.step, multiple=16)

    def step(self) -> None:
        loss, _ = find_loss(self.model, self.batch, self.call())
        loss.backward()

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.step()
        result = {
            name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None
        }
        self.model.zero_grad()
        return result


@cache
def case(name: str) -> Case:
    return Case(name)


def counted_by_outputs(model: nn.Module, call: Callable[[], Any]) -> dict[str, int]:
    """FLOPs of a training step from the shapes of outputs, whose every number is a sum over weights."""
    actual: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(module: Any, given: tuple[Tensor, ...], result: Tensor) -> None:
            sums = math.prod(module.weight.shape[1:]) if type(module).__name__ != "Conv1D" else module.weight.shape[0]
            directions = 1 + module.weight.requires_grad + given[0].requires_grad
            actual[name] = actual.get(name, 0) + 2 * result.numel() * sums * directions

        return hook

    layers = [
        (name, item) for name, item in model.named_modules() if type(item).__name__ in ("Linear", "Conv2d", "Conv1D")
    ]
    hooks = [layer.register_forward_hook(count(name)) for name, layer in layers]
    call()
    for hook in hooks:
        hook.remove()
    return actual


@each_model
def test_each_holders_products_are_those_of_its_outputs(name: str) -> None:
    own = case(name)
    counted = counted_by_outputs(own.model, own.call)
    held = {holder.name: holder.flops for holder in own.coverage.holders if holder.kind != "experts" and holder.flops}
    assert held == counted
    assert own.coverage.flops == tape_of(own.step).flops
    assert own.coverage.share > 0.9 and not own.coverage.unknown
    assert "loss that forward gives" in own.words or name in ("unet", "dit")


def test_what_is_not_covered_says_why() -> None:
    mamba = {holder.name: holder.rule for holder in case("mamba").coverage.holders if not holder.converted}
    assert mamba["backbone.layers.0.mixer.dt_proj"] == "not-called"
    assert mamba["backbone.layers.0.mixer.conv1d.weight"] == "class"
    narrow = next(holder for holder in case("mamba").coverage.holders if holder.name.endswith("x_proj"))
    assert narrow.native == "native products take contractions and columns in multiples of 16: pad N=20 to 32"
    routers = [item for item in case("mixtral").coverage.others if item.module.endswith("gate")]
    assert [item.weight for item in routers] == [f"model.layers.{block}.mlp.gate.weight" for block in range(2)]


@for_each("way", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_covered_whichever_way_transformers_multiplies_them(way: str) -> None:
    model, batch = architectures().made("mixtral")
    model.set_experts_implementation(way)
    call = make_call(model, batch)

    def step() -> None:
        find_loss(model, batch, call())[0].backward()

    coverage = measure_coverage(model, find_product_weights(model), step)
    # Each token passes through two experts of four, each with three products, in forward and for both gradients.
    shapes = architectures()
    assert coverage.by_kind()["experts"][0] == 3 * 2 * shapes.TOKENS * shapes.LAYERS * 2 * 3 * 64 * 128
    with converted(model, FP32) as conversion:

        def marked(phase: Any) -> None:
            conversion.phase = phase
            step()

        gemm = tape_in_phases(marked).of("gemm")
    assert gemm is not None and gemm.flops == coverage.converted_flops


@each_model
def test_errors_are_in_the_order_of_formats(name: str) -> None:
    own = case(name)
    plain, gradients, errors = output_of(own), own.gradients(), {}
    for mode in ("fp8", "nvfp4"):
        with converted(own.model, arithmetic_of(mode)):
            result = own.gradients()
            assert set(result) == set(gradients) and all(tensor.isfinite().all() for tensor in result.values())
            errors[mode] = relative_frobenius(output_of(own), plain)
    assert 0.001 < errors["fp8"] < 0.5 * errors["nvfp4"] < 0.75


def output_of(own: Case) -> Tensor:
    with torch.no_grad():
        return next(tensor for _, tensor in iterate_named_tensors(own.call()) if tensor.dim() > 1)
