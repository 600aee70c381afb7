"""Models of images against plain loops, layouts, FLOPs by hand, and mistakes that are planted."""

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
from fp8bench.nn.vision import InferenceState, compute_outcome
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


def by_places(x: Tensor, weight: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """Convolves (B, H, W, I) with weights (O, window x I), position by position."""
    around = functional.pad(x, (0, 0, padding, padding, padding, padding))
    count = (x.shape[1] + 2 * padding - side) // stride + 1
    rows = []
    for up in range(0, count * stride, stride):
        windows = [around[:, up : up + side, across : across + side] for across in range(0, count * stride, stride)]
        rows.append(torch.stack([window.flatten(1) @ weight.t() for window in windows], 1))
    return torch.stack(rows, 1)


def normed(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Applies batch norm channel by channel, with the batch's or stored statistics."""
    channels = []
    for number in range(x.shape[-1]):
        values = x[..., number]
        kept = f"{name}.running_mean" not in weights
        mean = values.mean() if kept else weights[f"{name}.running_mean"][number]
        variance = (values - mean).square().mean() if kept else weights[f"{name}.running_var"][number]
        scaled = (values - mean) / (variance + 1e-5).sqrt()
        channels.append(scaled * weights[f"{name}.weight"][number] + weights[f"{name}.bias"][number])
    return torch.stack(channels, -1)


def resnet_by_loops(images: Tensor, weights: Weights) -> Tensor:
    x = normed(by_places(images, weights["stem.weight"], 7, 2, 3), weights, "norm").relu()
    around = functional.pad(x, (0, 0, 1, 1, 1, 1), value=-math.inf)
    places = range(0, x.shape[1], 2)
    x = torch.stack([torch.stack([around[:, i : i + 3, j : j + 3].amax((1, 2)) for j in places], 1) for i in places], 1)
    for block in range(int(SMALL["vision"]["layers"])):
        path = f"blocks.{block}"

        def through(name: str, y: Tensor, side: int = 1, path: str = path) -> Tensor:
            weight = weights[f"{path}.{name}.weight"]
            return normed(by_places(y, weight, side, 1, side // 2), weights, f"{path}.norms.{name}")

        hidden = through("spatial", through("reduce", x).relu(), 3).relu()
        shortcut = through("shortcut", x) if block == 0 else x
        x = (shortcut + through("expand", hidden)).relu()
    return x.mean((1, 2)) @ weights["head.weight"].t()


def layer_normed(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def block_by_loops(x: Tensor, weights: Weights, path: str, causal: bool) -> Tensor:
    width = x.shape[-1]
    head = 16
    q, k, v = (layer_normed(x, weights[f"{path}.norm_attn.weight"]) @ weights[f"{path}.attn.qkv.weight"].t()).split(
        width, -1
    )
    mixed = []
    for place in range(x.shape[1]):
        seen = place + 1 if causal else x.shape[1]
        parts = []
        for begin in range(0, width, head):
            one = slice(begin, begin + head)
            scores = (q[:, place, None, one] * k[:, :seen, one]).sum(-1) / math.sqrt(head)
            parts.append((scores.softmax(-1)[..., None] * v[:, :seen, one]).sum(1))
        mixed.append(torch.cat(parts, -1))
    x = x + torch.stack(mixed, 1) @ weights[f"{path}.attn.out.weight"].t()
    hidden = layer_normed(x, weights[f"{path}.norm_mlp.weight"]) @ weights[f"{path}.mlp.up.weight"].t()
    return x + functional.gelu(hidden, approximate="tanh") @ weights[f"{path}.mlp.down.weight"].t()


def tokens_by_loops(images: Tensor, weights: Weights, path: str = "") -> Tensor:
    patch = int(SMALL["vision"]["patch"])
    x = by_places(images, weights[f"{path}patches.weight"], patch, patch, 0).flatten(1, 2)
    x = x + weights[f"{path}positions"]
    for block in range(int(SMALL["vision"]["layers"])):
        x = block_by_loops(x, weights, f"{path}blocks.{block}", causal=False)
    return layer_normed(x, weights[f"{path}norm.weight"])


def vit_by_loops(images: Tensor, weights: Weights) -> Tensor:
    return tokens_by_loops(images, weights).mean(1) @ weights["head.weight"].t()


def two_input_by_loops(images: Tensor, weights: Weights, text: Tensor) -> Tensor:
    words = torch.stack([weights["embedding"][row] for row in text]) + weights["positions"]
    x = torch.cat((tokens_by_loops(images, weights, "image.") @ weights["project.weight"].t(), words), 1)
    for block in range(int(SMALL["vision"]["layers"])):
        x = block_by_loops(x, weights, f"blocks.{block}", causal=True)
    return layer_normed(x[:, -text.shape[1] :], weights["norm.weight"]) @ weights["head.weight"].t()


BY_LOOPS: dict[str, Callable[..., Tensor]] = {
    "resnet": resnet_by_loops,
    "vit": vit_by_loops,
    "two-input": two_input_by_loops,
}


def agrees(model: str, layout: str, passing: str) -> bool:
    state, other = (state_of(model, layout=layout, **{"pass": passing}) for _ in range(2))
    ours, gradients = compute_outcome(state, False)
    (images, *text), targets = other.loader.next()
    weights: Weights = {}
    for name, weight in other.model.named_parameters():
        weights[name] = weight if weight.dim() < 4 else weight.permute(0, 2, 3, 1).flatten(1)
    if passing == "forward":
        weights |= dict(other.model.named_buffers())
    logits = BY_LOOPS[model](images, weights, *text)
    if isinstance(other, InferenceState):
        return torch.allclose(ours, logits, rtol=1e-4, atol=1e-5)
    loss = -logits.flatten(0, -2).log_softmax(-1).gather(1, targets.reshape(-1, 1)).mean()
    wanted = torch.autograd.grad(loss, other.parameters)
    return torch.allclose(ours, loss, rtol=1e-5) and joint_relative_frobenius(gradients, wanted) < 1e-5


@pytest.mark.slow
@for_each("passing", ["training", "forward"])
@for_each("layout", LAYOUTS)
@for_each("model", MODELS)
def test_it_is_what_plain_loops_compute(model: str, layout: str, passing: str) -> None:
    assert agrees(model, layout, passing)


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
    logits, gradients = compute_outcome(state, False)
    assert gradients == []
    with pytest.MonkeyPatch.context() as patch:
        kept_weights(patch)
        other = state_of(model, "fp8", layout=layout, **{"pass": "forward"})
    assert cast_again(other.model.modules()) == count
    assert torch.equal(compute_outcome(other, False)[0], logits)


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
