"""FP8 inside users' models: real scales of libraries are read, and other layers are measured in a declared recipe."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.lab.own_casts import find_cast, find_recipe_treatments, unpack_fp8
from fp8bench.features.train.lab.readings import measure_tensor_figures
from fp8bench.features.train.values import LayerReading, StepFigure, StreamLine
from fp8bench.protocols import Role
from tests.counts import for_each

Lines = list[StreamLine]


class OwnLinear(nn.Linear):
    """A subclass that casts by itself, as FP8 layers of users do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.float8_e4m3fn).to(x.dtype), self.weight, self.bias)


class Attention(nn.Module):
    """Has a layer of each kind, and keeps its logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = OwnLinear(width, 3 * width), nn.Linear(width, width)
        self.conv, self.norm = nn.Conv1d(width, width, 1), nn.LayerNorm(3 * width)
        self.register_buffer("input_scale", torch.tensor([2.0, 8.0]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.norm(self.qkv(x)).chunk(3, -1))
        self.logits = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).detach()
        x = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.conv(x.transpose(1, 2)).square().mean()  # type: ignore[no-any-return]


def watched(model: nn.Module, precision: str, data: Tensor, steps: int = 1, **options: Any) -> Lines:
    lines = Lines()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with fp8bench.watch(model, optimizer, told=lines.extend, stride=1, precision=precision, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).backward()
            optimizer.step()
    return lines


def reading(lines: Lines, layer: str, role: str) -> LayerReading:
    return next(line for line in lines if isinstance(line, LayerReading) and (line.layer, line.role) == (layer, role))


def test_every_layer_is_measured_in_the_declared_recipe() -> None:
    """The oracle casts by torch's own FP8."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 8, 16)
    x[0, 0, :4] = torch.tensor([1e-6, 2e-6, -1e-6, 300.0])
    lines = watched(model, "fp8", x)
    operands = {("qkv", "input"): x, ("qkv", "weight"): model.qkv.weight, ("conv", "weight"): model.conv.weight}
    for (layer, role), operand in operands.items():
        values = operand.detach()
        found, scale = reading(lines, layer, role), 448 / float(values.abs().max())
        cast = (values * scale).to(torch.float8_e4m3fn).to(torch.float32)
        assert found.scale == pytest.approx(scale) and found.saturated == 0
        assert found.underflow == pytest.approx(float(((cast == 0) & (values != 0)).double().mean()))
        noise = (cast / scale - values).double().square().sum() / values.double().square().sum()
        assert found.signal_to_noise == pytest.approx(-10 * math.log10(float(noise)), abs=0.01)
    assert reading(lines, "qkv", "input").underflow > 0
    assert reading(lines, "qkv", "gradient").scale > 1 and reading(lines, "out", "gradient").signal_to_noise
    plain = watched(Attention(), "bf16", x)
    assert reading(plain, "qkv", "input").scale == 1 and reading(plain, "qkv", "input").signal_to_noise is None


@for_each("precision", ["fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_any_recipe_can_be_declared(precision: str) -> None:
    lines = watched(Attention(32), precision, torch.randn(2, 8, 32))
    for role in ("input", "weight", "gradient"):
        assert (reading(lines, "qkv", role).signal_to_noise or 0) > 10


def test_attention_logits_and_kept_scales_are_figures() -> None:
    """A score belongs to the module whose forward is running, not to the norm that was called last."""
    model, x = Attention(), 3 * torch.randn(2, 8, 16)
    figures = {
        (line.name, line.layer): line.value for line in watched(model, "fp32", x) if isinstance(line, StepFigure)
    }
    assert figures["attention_score", ""] == pytest.approx(float(model.logits[0].abs().max()))
    assert figures["kept_scale", "input_scale"] == 8
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_real_scales_of_transformer_engine_are_read() -> None:
    """With fakes: a layer with `fp8_meta`, and a tensor with codes and the inverse of its scale."""
    layer = OwnLinear(4, 4)
    forward = types.SimpleNamespace(scale=torch.tensor([64.0, 16.0, 1.0]))
    layer.fp8_meta = {  # type: ignore[assignment]
        "scaling_fwd": forward,
        "scaling_bwd": types.SimpleNamespace(scale=torch.tensor([1024.0])),
        "recipe": "Format.HYBRID",
    }
    x = torch.tensor([[1.0, 8.0, 1e-6, -2.0]])
    for role, scale, saturated in ((Role.INPUT, 64.0, 1), (Role.WEIGHT, 16.0, 0), (Role.GRADIENT, 1024.0, 0)):
        cast = find_cast(layer, role, {})
        assert cast is not None
        result = cast.cast(x)
        assert result.scale is not None and float(result.scale) == scale and result.rounded is not None
        assert int((result.rounded.abs() < x.abs() * 0.9).sum()) == saturated + int(role is not Role.GRADIENT)
    lines = watched(nn.Sequential(layer, nn.Flatten(0), nn.Linear(4, 1), nn.Flatten(0)), "fp32", x)
    assert reading(lines, "0", "input").scale == 64 and reading(lines, "0", "input").saturated == 0.25

    class Codes(Tensor):
        _data: Tensor
        _scale_inv: Tensor

    codes = torch.zeros(2, 2).as_subclass(Codes)
    codes._data = torch.tensor([[1.0, 2.0], [448.0, 0.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    codes._scale_inv = torch.tensor([0.5])
    plain, kept = unpack_fp8(codes)
    assert plain.tolist() == [[0.5, 1.0], [224.0, 0.0]] and kept is not None and float(kept.scale or 0) == 2


def test_large_tensors_are_rounded_by_a_sample() -> None:
    """Its scale is that of all values, and its shares are close to those of all."""
    x = torch.randn(2048, 64) * torch.logspace(-6, 0, 2048)[:, None]
    x[1] = 50.0
    layer = nn.Linear(64, 4)
    found = find_cast(layer, Role.INPUT, find_recipe_treatments("fp8"))
    assert found is not None
    sampled, whole = found.list_figures(x), measure_tensor_figures(x, found.cast(x))
    assert sampled["count"] == whole["count"] and float(sampled["scale"]) == float(whole["scale"])
    assert float(sampled["vanished"]) == pytest.approx(float(whole["vanished"]), rel=0.05) and whole["vanished"] > 0


@pytest.mark.slow
@for_each("recipe", ["tensorwise", "rowwise"])
def test_torchaos_layers_are_read_without_a_declaration(recipe: str) -> None:
    """Scale and values are those that torchao computes."""
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    torch.manual_seed(0)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    model = float8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 16)), config=config)
    x = torch.randn(16, 32)
    cast = config.cast_config_input
    axis = -1 if recipe == "rowwise" else None
    real = hp_tensor_to_float8_dynamic(
        x, cast.target_dtype, LinearMMConfig(), gemm_input_role=GemmInputRole.INPUT,
        scaling_granularity=cast.scaling_granularity, axiswise_dim=axis,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )  # fmt: skip
    found = find_cast(model[0], Role.INPUT, {})
    assert found is not None
    assert torch.allclose(found.cast(x).rounded, real.to_original_precision(), rtol=1e-6)  # type: ignore[arg-type]
    values, kept = unpack_fp8(real)
    assert torch.equal(values, real.to_original_precision())
    assert (kept is not None and kept.scale is not None) == (recipe == "tensorwise")
    gradient = find_cast(model[0], Role.GRADIENT, {})
    assert gradient is not None and gradient.fmt is not None
    assert find_cast(nn.Linear(4, 4), Role.INPUT, {}) is None


@pytest.mark.slow
def test_watched_steps_of_a_compiled_model_run_eagerly_on_request() -> None:
    """It is compiled no more often than without watching; on request its layers are seen in watched steps."""
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    x = torch.randn(2, 8, 16)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = OwnLinear(16, 16), nn.Linear(16, 4)
            self.register_buffer("amax_history", torch.tensor([1.0, 5.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x))).square().mean()  # type: ignore[no-any-return]

    for eager in (False, True):
        torch._dynamo.reset()
        before = stats["unique_graphs"]
        model = torch.compile(Net(), backend="eager")
        model(x).backward()
        lines = watched(model, "fp8", x, steps=3, eager=eager)
        model(x).backward()
        assert stats["unique_graphs"] == before + 1
        seen = {(line.layer, line.role) for line in lines if isinstance(line, LayerReading)}
        assert (("first", "input") in seen) == eager and ("first", "weight") in seen
        kept = [line.value for line in lines if isinstance(line, StepFigure) and line.name == "kept_scale"]
        assert kept == [5.0] * 3
        assert (reading(lines, "first", "weight").signal_to_noise is not None) == eager
