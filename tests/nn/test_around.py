"""Norms, embeddings, streams and logits in separate precisions, compared with plain torch and by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8bench.features.train.lab.models import build_model, list_elementwise_layers, list_layers, make_config
from fp8bench.features.train.request import TrainerSettings
from fp8bench.model import Scalar
from fp8bench.nn.around import cast_to, set_surrounding_arithmetics
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.convolution import BatchNorm
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parts import Norm
from fp8bench.nn.served import list_weight_shapes
from fp8bench.nn.storage import draw_weights
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import workloads
from tests.counts import for_each, paired
from tests.nn.layers import arithmetic_of
from tests.workloads.steps import small


def rounded_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.tensor(torch.finfo(dtype).max) / x.abs().max()
    return (x * scale).to(dtype).float() * scale.reciprocal()


e4m3, e5m2 = (partial(rounded_to, dtype=tensor) for tensor in (torch.float8_e4m3fn, torch.float8_e5m2))


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_in_a_dtype_is_torchs_own_layer_of_it_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = Norm(48, root_mean_square=False), torch.randn(5, 48) * 3
    nn.init.normal_(norm.weight, 1.0)
    theirs = nn.LayerNorm(48, bias=False).to(dtype)
    theirs.weight.data.copy_(norm.weight)
    norm.arithmetic = arithmetic_of({torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype])
    own, other = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    y, expected = norm(own), theirs(other)
    assert torch.equal(y, expected.float())
    assert not torch.equal(y, F.layer_norm(x, (48,), norm.weight.detach()))
    gradients = torch.autograd.grad(y.square().sum(), (own, norm.weight))
    references = torch.autograd.grad(expected.float().square().sum(), (other, theirs.weight))
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, reference.float())


def test_a_norm_in_fp8_is_float32_of_rounded_values_and_its_gradients_are_rounded() -> None:
    torch.manual_seed(0)
    norm, x, pull = Norm(64, root_mean_square=True), torch.randn(6, 64, requires_grad=True), torch.randn(6, 64)
    nn.init.normal_(norm.weight, 1.0)
    norm.arithmetic = arithmetic_of("fp8")
    y = norm(x)
    rounded, weight = (e4m3(tensor.detach()).requires_grad_() for tensor in (x, norm.weight))
    expected = F.rms_norm(rounded, (64,), weight, 1e-5)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(y, (x, norm.weight), pull)
    references = torch.autograd.grad(expected, (rounded, weight), pull)
    assert all(map(torch.equal, gradients, map(e5m2, references)))


@for_each("channels_apart", [False, True])
def test_a_batch_norm_in_fp16_keeps_its_statistics_in_it(channels_apart: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(16).half()
    if channels_apart:
        ours: nn.Module = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
        Conversion(
            ours, lambda layer: arithmetic_of("fp16") if layer.kind == "norm" else arithmetic_of("fp32"), keys=("norm",)
        ).__enter__()
        norm: nn.Module = ours[1]  # type: ignore[index]
    else:
        norm = BatchNorm(16, running=True)
        model = nn.Module()
        model.norm = norm
        model.around = {}  # type: ignore[assignment]
        set_surrounding_arithmetics(model, {"norm": arithmetic_of("fp16")})

    def same(x: torch.Tensor) -> bool:
        y = norm(x) if channels_apart else norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.equal(y, theirs(x.half()).float())

    assert all(same(torch.randn(3, 16, 4, 4) * 2 + 5) for _ in range(5))
    assert torch.equal(norm.running_mean.half(), theirs.running_mean)  # type: ignore[operator,arg-type]
    assert torch.equal(norm.running_var.half(), theirs.running_var)  # type: ignore[operator,arg-type]
    norm.eval(), theirs.eval()
    assert same(torch.randn(3, 16, 4, 4))


def _model(arch: str, map_: dict[str, str], mode: str = "bf16") -> LanguageModel:
    settings = TrainerSettings(arch=arch, batch=2, sequence=32)
    config = make_config(settings, 256)
    torch.manual_seed(3)
    model = build_model(settings, config, lambda name: arithmetic_of(mode), arithmetic_of(mode).carrier)
    named = {layer.name: layer for layer in list_elementwise_layers(arch, config)}
    set_surrounding_arithmetics(
        model, {name: arithmetic_of(map_[layer.kind]) for name, layer in named.items() if layer.kind in map_}
    )
    return model


@pytest.mark.parametrize(("arch", "mode"), paired(("gpt", "mlp", "cnn", "moe"), ("fp32", "fp8", "mxfp4")))
def test_every_part_of_every_model_takes_it_and_still_learns(arch: str, mode: str) -> None:
    tokens = torch.arange(64).view(2, 32) % 256
    plain, config = _model(arch, {}), make_config(TrainerSettings(arch=arch), 256)
    usual, layers = plain(tokens, tokens, SilentPhases()), list_elementwise_layers(arch, config)
    norms = {path for path, module in plain.named_modules() if isinstance(module, Norm | BatchNorm)}
    assert {layer.name for layer in layers if layer.kind == "norm"} == norms
    assert not any(layer.product for layer in layers) and all(layer.product for layer in list_layers(arch, config))
    for kind in ("embed", "norm", "residual", "logits"):
        model = _model(arch, {kind: mode})
        loss = model(tokens, tokens, SilentPhases())
        loss.backward()
        assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        # All but the stream is float32 anyway, or has bf16 values in float32.
        same = mode == "fp32" and kind != "residual"
        assert torch.equal(loss, usual) == same, kind


# Suites whose models have more than products, each at its smallest, with their additional kinds.
ALL_KINDS = ("embed", "norm", "residual", "logits")
SUITES: dict[str, tuple[str, dict[str, Scalar], tuple[str, ...]]] = {
    "moe": ("moe", {"layers": 2, "load": "uniform", "pass": "decode"}, ("norm", "residual")),
    "resnet": ("vision", {"layout": "contiguous", "pass": "forward"}, ("norm", "residual", "logits")),
    "vit": ("vision", {"model": "vit", "patch": 8, "pass": "forward"}, ALL_KINDS),
    "two-input": ("vision", {"model": "two-input", "patch": 8, "layers": 1, "pass": "forward"}, ALL_KINDS),
    "dit": ("diffusion", {"width": 32, "pass": "training"}, ("embed", "norm", "residual")),
    "unet": ("diffusion", {"denoiser": "unet", "width": 32, "pass": "training"}, ("norm", "residual")),
    "prefill": ("prefill", {"size": "nano-llama", "context": 8}, ALL_KINDS),
    "decode": ("decode", {"size": "nano", "context": 8}, ALL_KINDS),
}


def mapped(setup: Setup, map_: dict[str, str]) -> Setup:
    case = replace(setup.case, precision_map=tuple(map_.items()))
    return replace(setup, case=case, layers={key: arithmetic_of(word) for key, word in map_.items()})


def outcome_of(setup: Setup) -> torch.Tensor:
    state = workloads.get(setup.case.workload).prepare(setup)
    if setup.case.workload == "vision":
        state.loader.preload_batches(1)
        inputs, _ = state.loader.next()
        with torch.no_grad():
            return state.model.logits(inputs, SilentPhases())  # type: ignore[no-any-return]
    if setup.case.workload in ("prefill", "decode"):
        state.step(SilentPhases())
        return state.logits  # type: ignore[no-any-return]
    return state.outcome()[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "mode"), paired([*SUITES], ["fp16", "fp8", "mxfp4"]))
def test_every_part_of_a_suites_model_takes_it(name: str, mode: str) -> None:
    suite, changes, kinds = SUITES[name]
    setup = small(suite, "fp32", **changes)
    usual = outcome_of(setup)
    for kind in kinds:
        result = outcome_of(mapped(setup, {kind: mode}))
        assert result.isfinite().all() and result.shape == usual.shape
        assert not torch.equal(result.float(), usual), kind
        assert torch.equal(outcome_of(mapped(setup, {kind: "fp32"})).float(), usual), kind


@pytest.mark.parametrize("size", ["nano", "nano-llama"])
def test_a_served_model_is_the_model_that_is_trained_in_the_same_map(size: str) -> None:
    workload = workloads.get("prefill")
    for map_ in ({}, {"embed": "fp8", "norm": "fp16", "logits": "fp8"}, {"embed": "fp16", "norm": "fp8"}):
        setup = mapped(small("prefill", "fp32", size=size, context=8), map_)
        state = workload.prepare(setup)
        config = state.model.config
        model = GPT(config, lambda name: arithmetic_of("fp32"), torch.float32).eval()
        draw = draw_weights(list_weight_shapes(config), 0, "cpu")
        model.load_state_dict({name: draw(name) for name in list_weight_shapes(config)}, strict=False)
        set_surrounding_arithmetics(model, setup.around(workload.around(setup.params)))
        with torch.no_grad():
            expected = cast_to(model.logits(state.tokens, SilentPhases()), setup.layers.get("logits"))
            assert torch.equal(state.model.forward(state.tokens, 0, SilentPhases(), every=True), expected), map_
    streams: list[torch.dtype] = []
    state = workload.prepare(mapped(setup, {"residual": "fp16"}))
    for block in state.model.blocks:
        block.norm_mlp = lambda x, norm=block.norm_mlp: streams.append(x.dtype) or norm(x)
    state.model.forward(state.tokens, 0, SilentPhases())
    assert streams == [torch.float16] * config.layers
