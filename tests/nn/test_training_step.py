"""A small training: tensors captured from it, and optimizers and references without torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8bench.nn.attention import recomputed
from fp8bench.nn.sizes import CAPTURED, CAPTURED_STEPS, SIZES, TRAINED_BATCH, TRAINED_SIZE
from fp8bench.nn.training_step import Course, captured, eager
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Role, float32_products
from suites.trials import ran


@pytest.fixture(scope="module")
def found(corpus: Corpus) -> dict[str, Course]:
    return dict(captured(corpus.path, 0))


@pytest.mark.slow
def test_there_is_one_for_each_layer_kind_and_role(found: dict[str, Course], corpus: Corpus) -> None:
    assert (
        list(found)
        == list(CAPTURED)
        == [f"{kind}-{role}" for kind in ("attn", "mlp", "head") for role in ("input", "weight", "gradient")]
    )
    assert all(captured(corpus.path, 0)[name] is course for name, course in found.items())
    for name, course in found.items():
        assert len(course) == CAPTURED_STEPS
        for tensor in course:
            assert tensor.shape == (CAPTURED[name].rows, CAPTURED[name].columns)
            assert tensor.dtype == torch.float32 and tensor.device.type == "cpu" and not tensor.requires_grad
            assert tensor.isfinite().all() and tensor.abs().max() > 0


def test_they_are_what_training_makes_of_them(found: dict[str, Course]) -> None:
    for name, course in found.items():
        change = float((course[-1] - course[-2]).norm() / course[-1].norm())
        assert (0 < change < 0.2) if CAPTURED[name].role is Role.WEIGHT else change > 0.3
        assert (float(course[-1].std()) < 1e-3) == (CAPTURED[name].role is Role.GRADIENT)
    tokens, config = TRAINED_BATCH * SIZES[TRAINED_SIZE].sequence, SIZES[TRAINED_SIZE]
    # The loss' gradient: probabilities less the target, over the tokens; each row sums to zero.
    head = found["head-gradient"][-1]
    assert head.shape == (tokens, config.vocabulary) and float(head.sum(1).abs().max()) < 1e-7
    assert float(head.min()) == pytest.approx(-1 / tokens, rel=0.1)


def test_the_training_learns(found: dict[str, Course]) -> None:
    head = found["head-gradient"][-1].double() * TRAINED_BATCH * SIZES[TRAINED_SIZE].sequence
    right = 1 + head.min(1).values
    assert float(right.log().mean()) > -3.2


def test_they_come_from_the_text_and_the_seed_alone(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8bench.nn.training_step.TRAINING_STEPS", CAPTURED_STEPS)
    anew = captured.__wrapped__
    one = anew(corpus.path, 0)
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad(), float32_products("high"):
        again = anew(corpus.path, 0)
        assert torch.get_float32_matmul_precision() == "high" and not torch.is_grad_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], again[name], strict=True))
    other = anew(corpus.path, 1)
    assert not any(torch.equal(one[name][-1], other[name][-1]) for name in one)


STEPS = """
import pathlib, sys, tempfile, torch
from fp8bench.nn.attention import recomputed
from fp8bench.nn.training_step import eager
weight = torch.nn.Parameter(torch.ones(4, 4))
optimizer = eager(torch.optim.AdamW)([weight], lr=0.1, fused=True)
for _ in range(2):
    recomputed(lambda x: (x @ weight).tanh(), torch.ones(2, 4, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
loaded = {"torch._dynamo", "torch._inductor", "sympy"} & {*sys.modules}
import fp8bench.nn.training_step as module
from fp8bench.plan.corpus import prepare_corpus
module.TRAINING_STEPS = module.CAPTURED_STEPS = 2
module.captured(prepare_corpus(None, pathlib.Path(tempfile.mkdtemp())).path, 0)
sys.exit(" ".join(sorted(loaded | {"torch._dynamo"} & {*sys.modules})) or 0)
"""


@pytest.mark.slow
def test_nobody_imports_the_compiler() -> None:
    """Its many objects would slow down every later garbage collection."""
    ran((sys.executable, "-c", STEPS))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_steps_are_torchs_to_the_bit(kind: type[torch.optim.Optimizer]) -> None:
    result = []
    for made in (kind, eager(kind)):
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
        result.append([*layer.parameters(), *(tensor for kept in optimizer.state.values() for tensor in kept.values())])
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

    plain, again = gradients(lambda run, *inputs: run(*inputs)), gradients(recomputed)
    assert len(plain) == 4 and all(map(torch.equal, plain, again))
