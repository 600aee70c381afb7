"""A small training: tensors captured from it, and optimizers and references without torch's compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8bench.nn.attention import recompute
from fp8bench.nn.captured import StepTensors, capture_tensors
from fp8bench.nn.sizes import CAPTURED, CAPTURED_MODEL_BATCH, CAPTURED_MODEL_SIZE, SIZES
from fp8bench.nn.training_step import skip_compiler_wrappers
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Role


@pytest.fixture(scope="module")
def found(corpus: Corpus) -> dict[str, StepTensors]:
    return dict(capture_tensors(corpus.path, 0))


def test_they_are_what_training_makes_of_them(found: dict[str, StepTensors]) -> None:
    for name, course in found.items():
        change = float((course[-1] - course[-2]).norm() / course[-1].norm())
        assert (0 < change < 0.2) if CAPTURED[name].role is Role.WEIGHT else change > 0.3
        assert (float(course[-1].std()) < 1e-3) == (CAPTURED[name].role is Role.GRADIENT)
    tokens, config = CAPTURED_MODEL_BATCH * SIZES[CAPTURED_MODEL_SIZE].sequence, SIZES[CAPTURED_MODEL_SIZE]
    # The loss's gradient: probabilities minus the target, divided by tokens; each row sums to zero.
    head = found["head-gradient"][-1]
    assert head.shape == (tokens, config.vocabulary) and float(head.sum(1).abs().max()) < 1e-7
    assert float(head.min()) == pytest.approx(-1 / tokens, rel=0.1)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_steps_are_torchs_to_the_bit(kind: type[torch.optim.Optimizer]) -> None:
    result = []
    for made in (kind, skip_compiler_wrappers(kind)):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = made(layer.parameters(), lr=0.1, weight_decay=0.1)  # type: ignore[call-arg]
        heard: list[object] = []
        optimizer.register_step_pre_hook(lambda *given, heard=heard: heard.append(given))
        for _ in range(3):
            layer(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(heard) == 3 and isinstance(optimizer, kind) and type(optimizer).__name__ == kind.__name__
        result.append(
            [*layer.parameters(), *(tensor for stored in optimizer.state.values() for tensor in stored.values())]
        )
    assert all(
        torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)) for ours, theirs in zip(*result, strict=True)
    )


def test_what_is_computed_again_has_the_same_gradients() -> None:
    def gradients(computed: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8, dtype=torch.float64)
        x, y = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        inner = computed(lambda a, b: computed(lambda c: layer(c).tanh() * 3, a * b) - b, x, y)
        (inner.square().mean() / 7).backward()
        return [parameter.grad for parameter in (x, y, *layer.parameters()) if parameter.grad is not None]

    plain, again = gradients(lambda run, *inputs: run(*inputs)), gradients(recompute)
    assert len(plain) == 4 and all(map(torch.equal, plain, again))
