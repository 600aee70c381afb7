"""The GPT against a plain model with the same weights; its phases, FLOPs and layer sizes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import ChooseArithmetic, Linear
from fp8bench.nn.sizes import SIZES, GPTConfig, get_default_token_count, list_features, list_model_features
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU

PLAIN = GPTConfig(61, 32, 2, 4, 4, 80, batch=2, sequence=12)
MODERN = GPTConfig(61, 32, 2, 4, 2, 48, batch=2, sequence=12, is_llama_like=True)


def model_of(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(3)
    arithmetic = PlainArithmetic(dtype)
    return GPT(config, lambda name: arithmetic, dtype).to(dtype)


def by_kind(attn: Arithmetic, mlp: Arithmetic, head: Arithmetic) -> ChooseArithmetic:
    kinds = {"attn": attn, "mlp": mlp, "head": head}
    return lambda name: next(item for kind, item in kinds.items() if kind in name.split("."))


def text(config: GPTConfig, length: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(config.vocabulary, (config.batch, (length or config.sequence) + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def independent_loss(config: GPTConfig, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """A GPT in loops and explicit formulas: no module, no fused attention, no chunked rotation."""
    length, head_width = tokens.shape[1], config.width // config.heads
    x = weights["embedding"][tokens]
    if not config.is_llama_like:
        x = x + weights["positions"][:length]
    for layer in range(config.layers):
        own = {name.removeprefix(f"blocks.{layer}."): tensor for name, tensor in weights.items()}
        h = norm(config, x, own["norm_attn.weight"])
        q_weight, k_weight, v_weight = own["attn.qkv.weight"].split(
            [config.width, config.key_heads * head_width, config.key_heads * head_width]
        )
        heads = []
        for head in range(config.heads):
            shared = head // (config.heads // config.key_heads)
            q = h @ q_weight[head * head_width : (head + 1) * head_width].T
            k = h @ k_weight[shared * head_width : (shared + 1) * head_width].T
            v = h @ v_weight[shared * head_width : (shared + 1) * head_width].T
            if config.is_llama_like:
                q, k = turned(q), turned(k)
            scores = q @ k.mT / math.sqrt(head_width)
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ own["attn.out.weight"].T
        h = norm(config, x, own["norm_mlp.weight"])
        up = h @ own["mlp.up.weight"].T
        if config.is_llama_like:
            gate, value = up[..., : config.hidden], up[..., config.hidden :]
            up = gate * torch.sigmoid(gate) * value
        else:
            up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + up @ own["mlp.down.weight"].T
    logits = norm(config, x, weights["norm.weight"]) @ weights["embedding" if config.tied else "head.weight"].T
    chosen = logits.log_softmax(-1).gather(-1, targets[..., None])
    return -chosen.mean()


def norm(config: GPTConfig, x: Tensor, weight: Tensor) -> Tensor:
    if not config.is_llama_like:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    angles = torch.arange(x.shape[-2])[:, None] * 500000.0 ** (-torch.arange(half) / half)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
    return torch.cat((pairs.real, pairs.imag), -1)


@for_each("config", [PLAIN, MODERN, replace(MODERN, tied=True)])
@for_each(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-6)])
def test_loss_and_gradients_are_those_of_an_independent_model(
    config: GPTConfig, dtype: torch.dtype, tolerance: float
) -> None:
    model, (tokens, targets) = model_of(config, dtype), text(config)
    loss = model(tokens, targets, SilentPhases())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    weights = {name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()}
    exact = independent_loss(config, weights, tokens, targets)
    references = torch.autograd.grad(exact, list(weights.values()))
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=tolerance)
    for name, gradient, reference in zip(weights, gradients, references, strict=True):
        assert relative_frobenius(gradient.double(), reference) < tolerance, name


@for_each("mode", ["fp32", "bf16", "fp8", "fp8-delayed", "mxfp8", "nvfp4"])
@for_each("cached", [False, True])
def test_a_tied_weight_gets_the_gradients_of_both_its_uses(mode: str, cached: bool) -> None:
    """Those of an untied model with the same values, for its embedding and its head, which multiplies in `mode`."""
    gradients = []
    for tied in (True, False):
        low = precisions.get(mode).arithmetic(CPU)
        high = PlainArithmetic(low.carrier)
        torch.manual_seed(3)
        config = replace(PLAIN, vocabulary=64, tied=tied)
        model = GPT(config, by_kind(high, high, low), low.carrier)
        with torch.no_grad():
            model.head.weight.copy_(model.embedding)
        with CachedWeights(model).cast(SilentPhases()) if cached else nullcontext():
            model(*text(config), SilentPhases()).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    tied_grad, whole = gradients[0], gradients[1]
    expected = whole.pop("head.weight") + whole["embedding"]
    torch.testing.assert_close(tied_grad.pop("embedding"), expected, rtol=1e-6, atol=1e-9)
    del whole["embedding"]
    torch.testing.assert_close(tied_grad, whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", SIZES)
def test_the_weights_of_the_plan_are_those_of_the_model(name: str) -> None:
    config = SIZES[name]
    arithmetic = PlainArithmetic(torch.float32)
    with torch.device("meta"):
        model = GPT(config, lambda name: arithmetic, torch.float32)
    built = {path: (*module.weight.shape,) for path, module in model.named_modules() if isinstance(module, Linear)}
    sides = {path.rpartition(".")[2]: shape for path, shape in built.items()}
    assert sides == list_features(config) and list(list_model_features(name).values()) == list(sides.values())
    head = built.pop("head")
    assert sum(outputs * inputs for outputs, inputs in built.values()) == config.layers * config.block_weights
    assert head == (config.vocabulary, config.width) and get_default_token_count(name) == config.batch * config.sequence
    total = sum(parameter.numel() for parameter in model.parameters())
    documented_sizes = {"nano": 1.0e6, "micro": 3.3e6, "gpt2-124m": 124e6, "gpt-350m": 354e6, "llama-1b": 1.236e9}
    assert documented_sizes[name] == pytest.approx(total, rel=0.01)
    assert total == pytest.approx(config.weights, rel=0.02)
    assert (model.head.weight is model.embedding) == config.tied == (name not in ("nano", "micro"))
