"""Text models other than transformers, against plain ones in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.sizes import CONTEXT_TOKENS, LINE_TOKENS, GPTConfig
from fp8bench.nn.text_models import TextCNN, WindowMLP
from fp8bench.protocols import SilentPhases
from tests.counts import for_each
from tests.nn.layers import as_torch

CONFIG = GPTConfig(61, 16, 2, 4, 4, 24, batch=2, sequence=4 * LINE_TOKENS)
EXACT = PlainArithmetic(torch.float64)


def model_of(kind: type[LanguageModel], config: GPTConfig = CONFIG) -> LanguageModel:
    torch.manual_seed(3)
    return kind(config, lambda name: EXACT, EXACT.carrier).double()


def text(length: int = CONFIG.sequence) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(61, (2, length + 1), generator=torch.Generator().manual_seed(4))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_mlp(weights: dict[str, Tensor], tokens: Tensor, modern: bool) -> Tensor:
    rows = []
    for row in tokens.tolist():
        for place in range(len(row)):
            seen = [
                weights["embedding"][row[at]] if at >= 0 else torch.zeros(16).double()
                for at in range(place - CONTEXT_TOKENS + 1, place + 1)
            ]
            x = torch.cat(seen) @ weights["window.weight"].T
            for block in range(CONFIG.layers):
                up = plain_norm(x, weights[f"norms.{block}.weight"], modern) @ weights[f"blocks.{block}.up.weight"].T
                up = functional.silu(up[:24]) * up[24:] if modern else functional.gelu(up, approximate="tanh")
                x = x + up @ weights[f"blocks.{block}.down.weight"].T
            rows.append(plain_norm(x, weights["norm.weight"], modern) @ weights["head.weight"].T)
    return torch.stack(rows)


def plain_norm(x: Tensor, weight: Tensor, modern: bool) -> Tensor:
    x = x if modern else x - x.mean()
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def plain_cnn(weights: dict[str, Tensor], tokens: Tensor, _: bool) -> Tensor:
    """torch's convolution of an image padded by two zero rows at the top and left; statistics by hand."""
    x = weights["embedding"][tokens].view(2, -1, LINE_TOKENS, 16).permute(0, 3, 1, 2)

    def normed(y: Tensor, name: str) -> Tensor:
        mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), unbiased=False, keepdim=True)
        scale, shift = (weights[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        return (y - mean) / (variance + 1e-5).sqrt() * scale + shift

    for block in range(CONFIG.layers):
        y = x
        for part in ("first", "second"):
            window = as_torch_differentiably(weights[f"blocks.{block}.{part}.weight"])
            y = functional.conv2d(functional.pad(y, (2, 0, 2, 0)), window)
            y = normed(y, f"blocks.{block}.norm_{part}")
            y = functional.relu(y) if part == "first" else y
        x = x + y
    rows = x.permute(0, 2, 3, 1).reshape(-1, 16)
    return torch.stack([plain_norm(row, weights["norm.weight"], False) for row in rows]) @ weights["head.weight"].T


def as_torch_differentiably(weight: Tensor) -> Tensor:
    made = weight.view(len(weight), 3, 3, -1).permute(0, 3, 1, 2)
    assert torch.equal(made, as_torch(weight))
    return made


@for_each(("kind", "modern"), [(WindowMLP, False), (WindowMLP, True), (TextCNN, False)])
def test_loss_and_gradients_are_those_of_a_plain_model(kind: type[LanguageModel], modern: bool) -> None:
    model, (tokens, targets) = model_of(kind, replace(CONFIG, is_llama_like=modern)), text()
    loss = model(tokens, targets, SilentPhases())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    plain = plain_mlp if kind is WindowMLP else plain_cnn
    exact = functional.cross_entropy(plain(weights, tokens, modern), targets.flatten())
    references = torch.autograd.grad(exact, list(weights.values()))
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-12)
    torch.testing.assert_close(gradients, references, rtol=1e-8, atol=1e-13)
