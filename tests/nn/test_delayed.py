"""Delayed scaling against a slow definition of its own, and blocks that are computed again in backward."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.recipes import Amax, Delayed
from fp8bench.nn.linear import Linear
from fp8bench.nn.tensor_scales import DelayedScale, backward_is_running
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU


class Definition:
    """The same by lists of float32 numbers: as Transformer Engine has it, and what it leaves open."""

    def __init__(self, delayed: Delayed, fmt: Format) -> None:
        self.delayed, self.fmt = delayed, fmt
        self.amaxes: list[np.float32] = []
        self.scale = np.float32(1)

    def next(self, values: np.ndarray) -> np.float32:
        used, amax = self.scale, np.abs(values).max() if values.size else np.float32(0)
        finite = bool(np.isfinite(amax))
        self.amaxes.append(amax if finite else np.float32(0))
        if len(self.amaxes) % self.delayed.interval == 0 and finite:
            window = self.amaxes[-self.delayed.history :]
            found = max(window) if self.delayed.algorithm is Amax.MAX else window[-1]
            if found > 0:
                with np.errstate(over="ignore"):
                    quotient = min(np.float32(self.fmt.largest) / found, np.float32(2.0**126))
                self.scale = np.float32(quotient) / np.float32(2.0**self.delayed.margin)
        return used


OPTIONS = [
    Delayed(history, algorithm, margin, interval)
    for history, algorithm, margin, interval in itertools.product((1, 3, 8), Amax, (0, 2), (1, 3))
]


def tensors(count: int) -> list[np.ndarray]:
    """Of magnitudes that come and go over many octaves, some of zeros, with infinities or NaN, or empty."""
    random = np.random.default_rng(7)
    found = []
    for step in range(count):
        values = (random.standard_normal((3, 5)) * 2.0 ** random.integers(-40, 40)).astype(np.float32)
        if step % 7 == 3:
            values[1, 2] = random.choice([np.inf, -np.inf, np.nan])
        found.append({5: np.zeros((2, 2), np.float32), 6: values[:0], 11: values * np.float32(1e-40)}.get(step, values))
    return found


@for_each("delayed", OPTIONS, ids=str)
@for_each("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_the_scale_of_every_cast_is_the_definition_s(delayed: Delayed, fmt: Format) -> None:
    """Bit for bit over forty casts."""
    ours, theirs = DelayedScale(delayed, fmt), Definition(delayed, fmt)
    for values in tensors(40):
        found, inverse = ours.next(torch.from_numpy(values))
        assert inverse.item() == np.float32(1) / found.numpy()
        assert found.dtype == torch.float32 and found.shape == ()
        assert found.item() == theirs.next(values)
    assert ours.scale is not None and ours.scale.item() == theirs.scale


def test_a_scale_is_known_before_its_tensor_is() -> None:
    """1 at first; then what the casts before it asked for, so that what outgrows it saturates."""
    scale = DelayedScale(Delayed(history=2), E4M3)
    course = [scale.next(torch.tensor([amax])).scale.item() for amax in (4.0, 1.0, 1.0, 1.0, 8.0, 8.0)]
    assert course == [1.0, 112.0, 112.0, 448.0, 448.0, 56.0]


def test_a_cast_that_is_done_again_is_not_entered_again() -> None:
    """It gets the scale that it had, whatever it holds."""
    scale, plain = (DelayedScale(Delayed(history=4), E4M3) for _ in range(2))
    for amax in (2.0, 3.0, 0.5):
        used = scale.next(torch.tensor([amax]))
        assert scale.next(torch.tensor([100.0]), again=True) is used
        assert plain.next(torch.tensor([amax])).scale.item() == used.scale.item()
    assert torch.equal(scale.history, plain.history)  # type: ignore[arg-type]
    fresh = DelayedScale(Delayed(), E4M3)
    assert fresh.next(torch.tensor([2.0]), again=True).scale.item() == 1.0 and fresh.scale.item() == 224.0  # type: ignore[union-attr]


def test_backward_is_known_where_it_runs() -> None:
    """And nowhere else; what a hook computes in it runs there too."""
    seen: list[bool] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            seen.append(backward_is_running())
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            seen.append(backward_is_running())
            return gradients[0]

    Spy.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert seen == [False, True] and not backward_is_running()


class Pair(nn.Module):
    """Two layers, in a mode of their own each, computed again in backward or not."""

    def __init__(self, mode: str, again: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        arithmetic = precisions.get(mode).arithmetic(CPU)
        self.first, self.second = Linear(48, 32, arithmetic.layer("first")), Linear(32, 16, arithmetic.layer("second"))
        self.again = again

    def both(self, x: Tensor) -> Tensor:
        hidden = self.first(x, SilentPhases()).relu()
        y: Tensor = self.second(hidden, SilentPhases())
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.again == "never":
            return self.both(x)
        y: Tensor = checkpoint(self.both, x, use_reentrant=self.again == "reentrant", preserve_rng_state=False)
        return y


@for_each("again", ["saved tensors", "reentrant"])
@for_each("mode", ["fp8-delayed:history=2:margin=1", "nvfp4:hadamard=off", "fp8-delayed:interval=2"])
def test_blocks_that_are_computed_again_have_the_gradients_of_those_that_are_not(mode: str, again: str) -> None:
    """Over several steps of different magnitudes: a second cast with a newer scale would show in the first of them."""
    outcomes: list[list[Tensor]] = []
    for how in ("never", again):
        pair, found = Pair(mode, how), []
        for step in range(5):
            x = torch.randn(20, 48, generator=torch.Generator().manual_seed(step)) * 4.0**step
            x.requires_grad_(True)
            y = pair(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(step + 9)).to(y.dtype))
            assert x.grad is not None and pair.first.weight.grad is not None and pair.second.weight.grad is not None
            found += [y.detach(), x.grad, pair.first.weight.grad.clone(), pair.second.weight.grad.clone()]
        outcomes.append(found)
    for plain, recomputed in zip(*outcomes, strict=True):
        assert torch.equal(plain, recomputed)
