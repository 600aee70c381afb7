"""Gradients, weights and updates in low precision: stored from one micro-batch or step to the next in few kernels,
without blocking the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.readings import dense
from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.native_codes import codes, current_scale
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.moments import Storage, in_arithmetic, scaled_storage
from fp8bench.protocols import Operand

# As in FP8-LM: a scale is halved if more than this share of values saturates, otherwise it doubles over 1000 steps.
MOST_SATURATED = 1e-5
_GROWTH = 2 ** (1 / 1000)


Tensors = Sequence[Tensor]
# A model's parameters by their paths.
Parameters = Mapping[str, nn.Parameter]


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns the gradient; zeros if backward found none, as for an expert without tokens."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Gradients:
    """Gradients in float32, accumulated by autograd. They are kept until the next step begins."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def of(self, parameters: Tensors) -> list[Tensor]:
        return list(map(gradient_of, parameters))

    def fill(self) -> list[Tensor]:
        for parameter in self._parameters:
            parameter.grad = gradient_of(parameter)
        return self.of(self._parameters)

    def accept(self) -> None:
        """Takes gradients in the parameters' `grad` that do not come from a backward."""

    def norms(self) -> list[Tensor]:
        return list(torch._foreach_norm(list(map(dense, self.of(self._parameters)))))

    def give(self, parameters: Tensors) -> None:
        """Puts the gradients into the parameters' `grad` for an update."""
        for parameter, gradient in zip(parameters, self.of(parameters), strict=True):
            parameter.grad = gradient

    def take_back(self, parameters: Tensors) -> None:
        """Frees what `give` has restored."""

    def end(self) -> None:
        """Called when the weights are updated."""

    def stored_tensors(self) -> list[Tensor]:
        return self.of(self._parameters)

    def memory(self) -> list[Tensor]:
        return []


class LowGradients(Gradients):
    """Gradients in low precision: each is added and rounded as it arrives, so that only one at a time is float32."""

    def __init__(self, parameters: Sequence[nn.Parameter], micro_batches: int, fp8: bool) -> None:
        self._parameters = parameters
        self._sums: dict[Tensor, _BFloat16 | AutomaticScale] = {}
        self._begun: set[Tensor] = set()
        for parameter in parameters:
            values = parameter.detach()
            self._sums[parameter] = AutomaticScale(values, micro_batches) if fp8 else _BFloat16(values)
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._begun.clear()

    def _take(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sums[parameter].add(parameter.grad, parameter not in self._begun)
        self._begun.add(parameter)
        parameter.grad = None

    def accept(self) -> None:
        for parameter in self._parameters:
            self._take(parameter)

    def of(self, parameters: Tensors) -> list[Tensor]:
        return [
            self._sums[parameter].restore() if parameter in self._begun else torch.zeros_like(parameter)
            for parameter in parameters
        ]

    def take_back(self, parameters: Tensors) -> None:
        for parameter in parameters:
            parameter.grad = None

    def norms(self) -> list[Tensor]:
        return [self.of([parameter])[0].norm() for parameter in self._parameters]

    def end(self) -> None:
        for total in self._sums.values():
            total.end()

    def stored_tensors(self) -> list[Tensor]:
        return [*chain.from_iterable(total.operand.tensors for total in self._sums.values())]

    def memory(self) -> list[Tensor]:
        return [scale.share for scale in self._sums.values() if isinstance(scale, AutomaticScale)]


class _BFloat16:
    def __init__(self, like: Tensor) -> None:
        self.operand = Operand(torch.zeros_like(like, dtype=torch.bfloat16))

    def add(self, gradient: Tensor, first: bool) -> None:
        self.operand = Operand((gradient if first else gradient + self.operand.data).to(torch.bfloat16))

    def restore(self) -> Tensor:
        return self.operand.data.to(torch.float32)

    def end(self) -> None:
        """Does nothing, because the scale is fixed."""


class AutomaticScale:
    """E4M3 codes under one scale for all micro-batches of a step, like the scale that all devices share in FP8-LM. It
    maps the magnitude expected from the first micro-batch to `share` of the format's largest value. The share is halved
    after a step with too many larger values, and grows back to 1. Gradients that are not finite are restored as NaN."""

    def __init__(self, like: Tensor, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._codes, self._inverse = codes(like * 0, E4M3), like.new_ones(())
        self._scale, self._saturated = like.new_ones(()), torch.zeros((), dtype=torch.int64, device=like.device)
        self.share = like.new_ones(())

    @property
    def operand(self) -> Operand:
        return Operand(self._codes, self._inverse)

    def add(self, gradient: Tensor, first: bool) -> None:
        total = gradient if first else gradient + self.restore()
        amax = largest_magnitude(total)
        if first:
            scale, _ = current_scale(amax * self._micro_batches, E4M3, ScaleRounding.EXACT)
            self._scale, self._saturated = scale * self.share, torch.zeros_like(self._saturated)
        self._saturated = self._saturated + torch.count_nonzero(total.abs() > E4M3.largest / self._scale)
        self._codes = codes(total, E4M3, self._scale)
        self._inverse = torch.where(amax.isfinite(), self._scale.reciprocal(), torch.nan)

    def restore(self) -> Tensor:
        return self._codes.to(torch.float32) * self._inverse

    def end(self) -> None:
        # FP8-LM adapts its scale like this: down at once, up slowly.
        too_many = self._saturated > MOST_SATURATED * self._codes.numel() * self._micro_batches
        share = torch.where(too_many, self.share / 2, (self.share * _GROWTH).clamp(max=1.0))
        self.share = torch.where(self._inverse.isfinite(), share, self.share)


class Weights:
    """Float32 weights, which are the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        """Prepares storage; `layers` are the parameters that low-precision products read."""
        self._parameters, self._layers = parameters, layers

    @contextmanager
    def present(self) -> Iterator[None]:
        """Gives the parameters their values during the body."""
        yield

    def draws(self, seed: int) -> None:
        """Seeds the random rounding, if there is any."""

    def raise_precision(self) -> None:
        """Gives the parameters the values from which an update begins."""

    def round(self, parameters: Tensors) -> None:
        """Rounds parameters that a step has changed, and stores them."""

    def stored_tensors(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]


class HalfWeights(Weights):
    """fp16 weights with one scale per tensor, as in FP8-LM; between steps the float32 parameters use no memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        super().__init__(parameters, layers)
        self._storage = self._make_storage()
        self._masters: dict[Tensor, Operand] = {}
        self._sizes = {parameter: parameter.untyped_storage().nbytes() for parameter in parameters}
        self.round(parameters)
        self._release()

    def _make_storage(self) -> Storage:
        """Scales are powers of two, so that rounding a rounded weight again, as in a skipped step, changes nothing."""
        return scaled_storage(FP16, ScaleRounding.POWER_OF_TWO)

    @contextmanager
    def present(self) -> Iterator[None]:
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(self._sizes[parameter])
            self._show_master(parameter)
        try:
            yield
        finally:
            self._release()

    def _show_master(self, parameter: Tensor) -> None:
        """Gives a parameter the value of its stored weights."""
        parameter.detach().copy_(self._storage.restore(self._masters[parameter]))

    def _release(self) -> None:
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(0)

    def round(self, parameters: Tensors) -> None:
        for parameter in parameters:
            self._masters[parameter] = self._storage.keep(parameter.detach())
            self._show_master(parameter)

    def stored_tensors(self) -> list[Tensor]:
        return [*chain.from_iterable(self._masters[parameter].tensors for parameter in self._parameters)]


class EightBitWeights(HalfWeights):
    """fp16 weights, from which updates begin, and E4M3 copies that forward and backward use, as in MS-AMP's O3."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter]) -> None:
        self._eight, self._codes = scaled_storage(E4M3, ScaleRounding.POWER_OF_TWO), dict[Tensor, Operand]()
        super().__init__(parameters, layers)

    @contextmanager
    def present(self) -> Iterator[None]:
        with super().present():
            for parameter in self._layers:
                parameter.detach().copy_(self._eight.restore(self._codes[parameter]))
            yield

    def raise_precision(self) -> None:
        for parameter in self._layers:
            self._show_master(parameter)

    def round(self, parameters: Tensors) -> None:
        super().round(parameters)
        layers = set(map(id, self._layers))
        for parameter in parameters:
            if id(parameter) in layers:
                self._codes[parameter] = self._eight.keep(parameter.detach())

    def stored_tensors(self) -> list[Tensor]:
        return [*super().stored_tensors(), *chain.from_iterable(self._codes[layer].tensors for layer in self._layers)]


class StochasticWeights(HalfWeights):
    """bf16 weights, rounded up or down at random so that small updates are not lost; seeded for each step."""

    def _make_storage(self) -> Storage:
        self._drawn = torch.Generator(self._parameters[0].device)
        self._drawn.manual_seed(0)
        return Storage(
            lambda x: Operand(stochastic_bf16(x, self._drawn)), lambda operand: operand.data.to(torch.float32)
        )

    def draws(self, seed: int) -> None:
        self._drawn.manual_seed(seed)


def stochastic_bf16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds float32 stochastically: adds sixteen random bits below the last bit that is kept, and truncates."""
    # Sixteen bits are dropped: a random number of equally many bits decides the direction.
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # A carry out of the random bits rounds up, with a probability equal to the dropped fraction.
    cut = ((x.contiguous().view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


MASTERS = {
    "fp32": Weights,
    "fp16-scaled": HalfWeights,
    "fp16-fp8": EightBitWeights,
    "bf16-stochastic": StochasticWeights,
}


def rounded_update(fmt: str) -> Callable[[Tensors, Tensors], None] | None:
    """Returns a function that rounds the updates of weights, and applies the rounded ones; None for fp32."""
    if fmt == "fp32":
        return None
    storage = scaled_storage(E4M3) if fmt == "fp8" else in_arithmetic(PlainArithmetic(torch.bfloat16))

    @torch.no_grad()
    def round_updates(starts: Tensors, ends: Tensors) -> None:
        for old, new in zip(starts, ends, strict=True):
            update = storage.restore(storage.keep((new - old).to(torch.float32)))
            new.copy_(old + update.to(old.dtype))

    return round_updates


def state_storages(fmt: str) -> tuple[Storage, Storage] | None:
    """Returns the storages of first and second moments between steps; None for fp32. FP8-LM has E4M3 and scaled
    fp16."""
    if fmt == "fp32":
        return None
    if fmt == "fp8lm":
        return scaled_storage(E4M3), scaled_storage(FP16)
    plain = in_arithmetic(PlainArithmetic(torch.bfloat16))
    return plain, plain
