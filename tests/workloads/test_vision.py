"""Models of images against plain functions, layouts, FLOPs by hand, and mistakes that are planted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fp8bench.errors import UsageError
from fp8bench.model import Level, Scalar
from fp8bench.nn import convolution
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.image_models import ResNet
from fp8bench.nn.training_step import TrainingState
from fp8bench.nn.vision import InferenceState, compute_batch_results
from fp8bench.numerics.norms import joint_relative_frobenius
from fp8bench.protocols import Setup
from fp8bench.registry import precisions
from fp8bench.workloads.vision import Vision
from tests.counts import for_each
from tests.facts import B200
from tests.tapes import tape_in_phases
from tests.workloads.steps import CPU, H200, SMALL, cast_again, kept_weights, setup_of, weight_bytes

MODELS = ("resnet", "vit", "two-input")
LAYOUTS = ("contiguous", "channels_last")
Weights = dict[str, Tensor]


def params_of(model: str, **changes: Scalar) -> dict[str, Scalar]:
    (params,) = Vision().expand({**SMALL["vision"], "model": model, "layout": "channels_last"} | changes)
    return dict(params)


def setup_for(model: str, precision: str = "fp32", **changes: Scalar) -> Setup:
    return setup_of("vision", params_of(model, **changes), precision)


def state_of(model: str, precision: str = "fp32", **changes: Scalar) -> TrainingState | InferenceState:
    return Vision().prepare(setup_for(model, precision, **changes))


# The same models with torch's own functions, from images (B, C, H, W).


def convolved(x: Tensor, weight: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    if weight.dim() == 2:  # (outputs, window x inputs), the pixels of a window first
        side = math.isqrt(weight.shape[1] // x.shape[1])
        weight = weight.unflatten(1, (side, side, -1)).permute(0, 3, 1, 2)
    return functional.conv2d(x, weight, stride=stride, padding=padding)


def through(x: Tensor, weights: Weights, name: str, norm: str, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolves, then applies batch norm with the batch's or stored statistics."""
    x = convolved(x, weights[f"{name}.weight"], stride, padding)
    mean, variance = (weights.get(f"{norm}.running_{word}") for word in ("mean", "var"))
    weight, bias = (weights[f"{norm}.{word}"] for word in ("weight", "bias"))
    return functional.batch_norm(x, mean, variance, weight, bias, training=mean is None)


def plain_resnet(images: Tensor, weights: Weights) -> Tensor:
    x = functional.max_pool2d(through(images, weights, "stem", "norm", 2, 3).relu(), 3, 2, padding=1)
    for number in range(int(SMALL["vision"]["layers"])):
        block = f"blocks.{number}"
        hidden = through(x, weights, f"{block}.reduce", f"{block}.norms.reduce").relu()
        hidden = through(hidden, weights, f"{block}.spatial", f"{block}.norms.spatial", padding=1).relu()
        shortcut = x if number else through(x, weights, f"{block}.shortcut", f"{block}.norms.shortcut")
        x = (shortcut + through(hidden, weights, f"{block}.expand", f"{block}.norms.expand")).relu()
    return functional.linear(x.mean((2, 3)), weights["head.weight"])


def normed(x: Tensor, weights: Weights, name: str) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"])


def plain_block(x: Tensor, weights: Weights, path: str, causal: bool) -> Tensor:
    def times(name: str, y: Tensor) -> Tensor:
        return functional.linear(y, weights[f"{path}.{name}.weight"])

    parts = times("attn.qkv", normed(x, weights, f"{path}.norm_attn")).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in parts)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    x = x + times("attn.out", mixed.transpose(1, 2).flatten(2))
    up = times("mlp.up", normed(x, weights, f"{path}.norm_mlp"))
    return x + times("mlp.down", functional.gelu(up, approximate="tanh"))


def plain_tokens(images: Tensor, weights: Weights, path: str = "") -> Tensor:
    patches = convolved(images, weights[f"{path}patches.weight"], int(SMALL["vision"]["patch"]))
    x = patches.flatten(2).transpose(1, 2) + weights[f"{path}positions"]
    for block in range(int(SMALL["vision"]["layers"])):
        x = plain_block(x, weights, f"{path}blocks.{block}", causal=False)
    return normed(x, weights, f"{path}norm")


def plain_vit(images: Tensor, weights: Weights) -> Tensor:
    return functional.linear(plain_tokens(images, weights).mean(1), weights["head.weight"])


def plain_two_input(images: Tensor, weights: Weights, text: Tensor) -> Tensor:
    words = functional.embedding(text, weights["embedding"]) + weights["positions"]
    x = torch.cat((functional.linear(plain_tokens(images, weights, "image."), weights["project.weight"]), words), 1)
    for block in range(int(SMALL["vision"]["layers"])):
        x = plain_block(x, weights, f"blocks.{block}", causal=True)
    return functional.linear(normed(x[:, -text.shape[1] :], weights, "norm"), weights["head.weight"])


PLAIN: dict[str, Callable[..., Tensor]] = {"resnet": plain_resnet, "vit": plain_vit, "two-input": plain_two_input}


@for_each("passing", ["training", "forward"])
@for_each("layout", LAYOUTS)
@for_each("model", MODELS)
def test_it_is_what_plain_functions_compute(model: str, layout: str, passing: str) -> None:
    state, other = (state_of(model, layout=layout, **{"pass": passing}) for _ in range(2))
    ours, gradients = compute_batch_results(state, False)
    (images, *text), targets = other.loader.next()
    weights = dict(other.model.named_parameters())
    if passing == "forward":
        weights |= dict(other.model.named_buffers())
    logits = PLAIN[model](images.permute(0, 3, 1, 2), weights, *text)
    if isinstance(other, InferenceState):
        torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
        return
    loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-8)
    assert joint_relative_frobenius(gradients, torch.autograd.grad(loss, other.parameters)) < 1e-5


@pytest.mark.slow
@for_each("precision", ["fp32", "bf16", "fp8", "nvfp4:hadamard=on"])
@for_each("model", MODELS)
def test_a_layout_changes_no_number(model: str, precision: str) -> None:
    for passing in ("training", "forward"):
        errors = [Vision().error(setup_for(model, precision, layout=layout, **{"pass": passing})) for layout in LAYOUTS]
        low = precision not in ("fp32", "bf16")
        for name, error in errors[0].items():
            assert error == pytest.approx(errors[1][name], rel=0.2 if low else 0.05, abs=1e-6), name


@pytest.mark.slow
@for_each("precision", ["fp32", "bf16", "fp8"])
@for_each("model", MODELS)
def test_the_flops_are_those_of_the_tape(model: str, precision: str) -> None:
    """In training torch's fused attention computes the scores again."""
    for passing, again in (("forward", 1.0), ("training", 1.05)):
        work = Vision().work(params_of(model, **{"pass": passing})).flops
        tape = tape_in_phases(state_of(model, precision, **{"pass": passing}).step)
        assert work <= tape.flops <= again * work


@for_each("precision", ["fp32", "bf16"])
@for_each("passing", ["training", "forward"])
@for_each("layout", LAYOUTS)
@for_each("model", MODELS)
def test_a_layout_stays_through_a_whole_step(model: str, layout: str, passing: str, precision: str) -> None:
    state = state_of(model, precision, layout=layout, **{"pass": passing})
    assert Vision().check(state) == ""


def _converted(function: Callable[..., Tensor], layout: torch.memory_format) -> Callable[..., Tensor]:
    return lambda *arguments, **options: function(*arguments, **options).contiguous(memory_format=layout)


def test_a_layout_that_is_converted_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a convolution, and between layers, where the next one would restore it."""
    with monkeypatch.context() as patches:
        patches.setattr(convolution, "_shape_images", _converted(convolution._shape_images, torch.contiguous_format))
        assert "layout=channels_last" in Vision().check(state_of("resnet"))
    relu = functional.relu
    state = state_of("resnet")
    assert isinstance(state.model, ResNet)
    monkeypatch.setattr(functional, "relu", lambda x: relu(x).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1))
    assert "layout=channels_last" in Vision().check(state)
    monkeypatch.undo()
    assert Vision().check(state) == ""


def test_windows_of_one_place_do_not_say_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch chooses by a window's strides, and returned channels last."""
    images = convolution._shape_images

    def as_they_come(matrix: Tensor, shape: tuple[int, ...], layout: torch.memory_format) -> Tensor:
        return matrix.reshape(*shape[:3], -1).permute(0, 3, 1, 2).contiguous()

    monkeypatch.setattr(convolution, "_shape_images", as_they_come)
    state = state_of("resnet", layout="contiguous")
    for layer in state.model.modules():
        if isinstance(layer, convolution.Convolution) and layer.geometry.size == (1, 1):
            layer.weight.data = layer.weight.data.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert "layout=contiguous" in Vision().check(state)
    monkeypatch.setattr(convolution, "_shape_images", images)
    assert Vision().check(state) == ""


def test_batch_norm_in_the_other_mode_is_found() -> None:
    state = state_of("resnet")
    state.model.eval()
    assert "batch norm norm uses its running statistics" in Vision().check(state)
    state = state_of("resnet", **{"pass": "forward"})
    state.model.train()
    assert "batch norm norm uses the batch" in Vision().check(state)
    assert {norm.training for norm in state_of("resnet").model.modules() if isinstance(norm, BatchNorm)} == {True}


@for_each("model", MODELS)
@for_each("layout", LAYOUTS)
def test_inference_casts_no_weight_in_its_step_and_keeps_no_other(model: str, layout: str) -> None:
    state = state_of(model, "fp8", layout=layout, **{"pass": "forward"})
    count = len(Vision().layers(params_of(model)))
    assert weight_bytes(state.model.modules()) == 4 * count  # one number each
    logits, gradients = compute_batch_results(state, False)
    assert gradients == []
    with pytest.MonkeyPatch.context() as patch:
        kept_weights(patch)
        other = state_of(model, "fp8", layout=layout, **{"pass": "forward"})
    assert cast_again(other.model.modules()) == count
    assert torch.equal(compute_batch_results(other, False)[0], logits)


def test_what_is_native_and_what_is_not() -> None:
    sizes: dict[str, Scalar] = {"image": 32, "patch": 8, "width": 64, "batch": 16, "text": 16}
    resnet = params_of("resnet", **sizes)
    vit = params_of("vit", **sizes)
    fp8 = precisions.get("fp8")
    support = Vision().support(resnet, fp8, H200)
    assert support.level is Level.EMULATED and "no convolution in fp8" in support.reason
    assert Vision().support(vit, fp8, H200).level is Level.NATIVE
    assert Vision().layer_support("stem", vit, fp8, H200).level is Level.EMULATED
    refused = Vision().layer_support("head", vit, fp8, H200)  # a thousand classes
    assert refused.level is Level.REFUSED and "sides 64 and 1000" in refused.reason
    odd = Vision().support(params_of("vit", **{**sizes, "batch": 3, "patch": 16}), fp8, H200)
    assert odd.level is Level.REFUSED and "12 rows" in odd.reason
    rotated = precisions.get("nvfp4:hadamard=on")
    assert Vision().support(params_of("resnet", **{**sizes, "width": 128}), rotated, B200).level is Level.NATIVE
    assert Vision().support(resnet, rotated, B200).level is Level.REFUSED  # of 16 channels
    assert Vision().support(resnet, fp8, CPU).level is Level.EMULATED


def test_what_cannot_be_is_refused() -> None:
    for model, changes, word in (
        ("vit", {"patch": 5}, "image=16 is not a multiple of patch=5"),
        ("resnet", {"width": 24}, "width=24"),
        ("resnet", {"batch": 1, "image": 4}, "one value per channel"),
    ):
        with pytest.raises(UsageError, match=word):
            params_of(model, **changes)
    params_of("resnet", batch=1, image=4, **{"pass": "forward"})
