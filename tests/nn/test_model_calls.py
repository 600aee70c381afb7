"""How a model takes a batch and where its loss is found, and the messages where that cannot be guessed."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.model_calls import find_loss, make_call
from tests.counts import for_each

X = torch.ones(2, 4)
Named = namedtuple("Named", "x mask")


class Two(nn.Module):
    """Takes one thing and may take another."""

    def __init__(self, result: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.result = result

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
        y = self.layer(x) * scale
        return self.result(y if mask is None else y * mask)


@dataclass
class Output:
    """An output as libraries return it."""

    logits: Tensor
    loss: Tensor | None = None


@for_each(
    "batch",
    [X, (X,), [X, torch.ones(4)], {"x": X}, UserDict(x=X, mask=None), Named(X, None), ((X,), {"scale": 1.0})],
)
def test_batches_of_all_sorts(batch: Any) -> None:
    model = Two()
    assert torch.equal(make_call(model, batch)(), model(X))


@for_each(
    ("batch", "words"),
    [
        ({"y": X}, "missing a required argument: 'x'"),
        ((X, X, X), "too many positional arguments"),
        (3, "a batch of type int"),
        (None, "a batch of type NoneType"),
        ({"x": X.to("meta")}, "^x is on meta, but the model is on cpu"),
        (torch.ones(2, 5), "forward of Two fails on this batch: RuntimeError: mat1 and mat2"),
    ],
)
def test_a_batch_that_cannot_be_taken_is_asked_for_shortly(batch: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make_call(Two(), batch)()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@for_each("batch", [(X, 3), [X, 3, 4], {"x": X, "y": 3}, UserDict(x=X, y=3)])
def test_with_a_loss_forward_gets_the_part_of_a_batch_that_it_accepts(batch: Any) -> None:
    model = nn.Linear(4, 4)
    model.forward = lambda x: x @ model.weight.t()  # type: ignore[method-assign]
    assert torch.equal(make_call(model, batch, has_loss=True)(), model(X))
    with pytest.raises(UsageError, match="whose first items or keywords forward accepts"):
        make_call(model, batch)


def loss(result: Callable[[Tensor], Any], own: Callable[..., Any] | None = None) -> tuple[Tensor, str]:
    model = Two(result)
    return find_loss(model, {"x": X}, make_call(model, X)(), own)


@for_each(
    ("result", "words"),
    [
        (lambda y: Output(y, y.sum()), "the loss that forward gives"),
        (lambda y: {"logits": y, "loss": y.sum()}, "the loss that forward gives"),
        (lambda y: y.sum(), "the single number that forward gives"),
        (lambda y: (y.sum(), y), "the single number that forward gives as 0"),
        (lambda y: y, "first floating output (float32[2,4])"),
        (Output, "first floating output (logits, float32[2,4])"),
        (lambda y: (torch.ones(3, dtype=torch.int64), [y]), "first floating output (1.0, float32[2,4])"),
    ],
)
def test_a_loss_is_found(result: Callable[[Tensor], Any], words: str) -> None:
    actual, said = loss(result)
    assert said.endswith(words) and actual.numel() == 1
    actual.backward()


def test_a_loss_of_ones_own() -> None:
    assert loss(lambda y: y, lambda y: y.sum())[1] == "the loss that make() gives"
    result, _ = loss(lambda y: y, lambda y, batch: (y - batch["x"]).abs().sum())
    assert result.numel() == 1
    target = torch.full((2, 4), 7.0)
    assert loss(lambda y: y, lambda y, target=target: y.sum() * 0 + target.mean())[0].item() == 7.0

    class OfOutput(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y.sum()

    assert loss(lambda y: y, OfOutput())[0].numel() == 1
    with torch.no_grad():
        assert loss(lambda y: y)[0].numel() == 1


@for_each(
    ("result", "own", "words"),
    [
        (lambda y: y, lambda y: y, r"a tensor of shape \[2, 4\]"),
        (lambda y: {"a": y}, lambda y: y["no"], "fails on the output: KeyError"),
        (lambda y: [y.argmax()], None, "without a floating-point tensor"),
        (lambda y: y.detach().sum(), None, "no gradient flows"),
    ],
)
def test_what_is_no_loss_is_refused(result: Callable[[Tensor], Any], own: Callable[..., Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        loss(result, own)
