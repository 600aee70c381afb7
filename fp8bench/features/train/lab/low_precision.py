"""Stores gradients, weights and updates in low precision between micro-batches and between steps. This takes few
kernels and never blocks the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.readings import get_stored_values
from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.native_codes import codes, compute_current_scale
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.moments import MomentStorageMethod, make_arithmetic_storage, make_scaled_storage
from fp8bench.protocols import Operand

# A gradient's scale is halved if more than this share of its values saturates, as in FP8-LM. Otherwise it grows by a
# factor that doubles it within 1000 steps.
MAX_SATURATED_SHARE = 1e-5
_SCALE_GROWTH = 2 ** (1 / 1000)


TensorSequence = Sequence[Tensor]
# A model's parameters by their paths.
NamedParameters = Mapping[str, nn.Parameter]


def get_gradient_or_zeros(parameter: Tensor) -> Tensor:
    """Returns a parameter's gradient. Returns zeros if the backward did not reach the parameter, such as that of an
    expert without tokens.
    """
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Gradients:
    """Stores gradients in float32. Autograd adds new gradients to the stored ones, which exist until the next step
    begins.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def get_gradients(self, parameters: TensorSequence) -> list[Tensor]:
        return list(map(get_gradient_or_zeros, parameters))

    def fill_missing_gradients(self) -> list[Tensor]:
        for parameter in self._parameters:
            parameter.grad = get_gradient_or_zeros(parameter)
        return self.get_gradients(self._parameters)

    def store_gradients(self) -> None:
        """Stores gradients that were put into the parameters' `grad` without a backward."""

    def norms(self) -> list[Tensor]:
        return list(torch._foreach_norm(list(map(get_stored_values, self.get_gradients(self._parameters)))))

    def restore_gradients(self, parameters: TensorSequence) -> None:
        """Puts the stored gradients into the parameters' `grad` for an update."""
        for parameter, gradient in zip(parameters, self.get_gradients(parameters), strict=True):
            parameter.grad = gradient

    def free_gradients(self, parameters: TensorSequence) -> None:
        """Frees the float32 gradients that `restore_gradients` has put into `grad` of the parameters."""

    def finish_step(self) -> None:
        """Adapts scales after an update. Does nothing for float32."""

    def stored_tensors(self) -> list[Tensor]:
        return self.get_gradients(self._parameters)

    def list_scale_shares(self) -> list[Tensor]:
        return []


class LowPrecisionGradients(Gradients):
    """Stores gradients in low precision. As soon as backward computes a float32 gradient, it is added to the stored
    gradient and rounded. So only one float32 gradient at a time uses memory.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], micro_batches: int, fp8: bool) -> None:
        self._parameters = parameters
        self._stored_gradients: dict[Tensor, _BFloat16 | AutomaticScale] = {}
        self._received_gradients: set[Tensor] = set()
        for parameter in parameters:
            values = parameter.detach()
            self._stored_gradients[parameter] = AutomaticScale(values, micro_batches) if fp8 else _BFloat16(values)
            parameter.register_post_accumulate_grad_hook(self._store_gradient)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._received_gradients.clear()

    def _store_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._stored_gradients[parameter].add(parameter.grad, parameter not in self._received_gradients)
        self._received_gradients.add(parameter)
        parameter.grad = None

    def store_gradients(self) -> None:
        for parameter in self._parameters:
            self._store_gradient(parameter)

    def get_gradients(self, parameters: TensorSequence) -> list[Tensor]:
        return [
            self._stored_gradients[parameter].restore()
            if parameter in self._received_gradients
            else torch.zeros_like(parameter)
            for parameter in parameters
        ]

    def free_gradients(self, parameters: TensorSequence) -> None:
        for parameter in parameters:
            parameter.grad = None

    def norms(self) -> list[Tensor]:
        return [self.get_gradients([parameter])[0].norm() for parameter in self._parameters]

    def finish_step(self) -> None:
        for total in self._stored_gradients.values():
            total.finish_step()

    def stored_tensors(self) -> list[Tensor]:
        return [*chain.from_iterable(total.operand.tensors for total in self._stored_gradients.values())]

    def list_scale_shares(self) -> list[Tensor]:
        return [scale.share for scale in self._stored_gradients.values() if isinstance(scale, AutomaticScale)]


class _BFloat16:
    def __init__(self, like: Tensor) -> None:
        self.operand = Operand(torch.zeros_like(like, dtype=torch.bfloat16))

    def add(self, gradient: Tensor, is_first: bool) -> None:
        self.operand = Operand((gradient if is_first else gradient + self.operand.data).to(torch.bfloat16))

    def restore(self) -> Tensor:
        return self.operand.data.to(torch.float32)

    def finish_step(self) -> None:
        """Does nothing: bfloat16 needs no scale."""


class AutomaticScale:
    """Stores a gradient in E4M3. All micro-batches of a step share one scale, as all devices do in FP8-LM. The
    first micro-batch sets the scale: it maps the micro-batch's largest value, times the number of micro-batches, to
    `share` of the format's largest value. If too many values of a step saturate, `share` is halved. Otherwise `share`
    grows slowly back to 1. A gradient that is not finite is restored as NaN.
    """

    def __init__(self, like: Tensor, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._codes = codes(like * 0, E4M3)
        self._inverse = like.new_ones(())
        self._scale = like.new_ones(())
        self._saturated = torch.zeros((), dtype=torch.int64, device=like.device)
        self.share = like.new_ones(())

    @property
    def operand(self) -> Operand:
        return Operand(self._codes, self._inverse)

    def add(self, gradient: Tensor, is_first: bool) -> None:
        total = gradient if is_first else gradient + self.restore()
        amax = largest_magnitude(total)
        if is_first:
            scale, _ = compute_current_scale(amax * self._micro_batches, E4M3, ScaleRounding.EXACT)
            self._scale = scale * self.share
            self._saturated = torch.zeros_like(self._saturated)
        self._saturated = self._saturated + torch.count_nonzero(total.abs() > E4M3.largest / self._scale)
        self._codes = codes(total, E4M3, self._scale)
        self._inverse = torch.where(amax.isfinite(), self._scale.reciprocal(), torch.nan)

    def restore(self) -> Tensor:
        return self._codes.to(torch.float32) * self._inverse

    def finish_step(self) -> None:
        # FP8-LM adapts its scale in the same way: down at once, up slowly.
        has_too_many_saturated_values = (
            self._saturated > MAX_SATURATED_SHARE * self._codes.numel() * self._micro_batches
        )
        adjusted_scale_share = torch.where(
            has_too_many_saturated_values, self.share / 2, (self.share * _SCALE_GROWTH).clamp(max=1.0)
        )
        self.share = torch.where(self._inverse.isfinite(), adjusted_scale_share, self.share)


class Weights:
    """Stores weights in float32, as the parameters themselves. Subclasses store them in low precision."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        """`layers` are the parameters that matrix products in low precision read. Only some subclasses need them."""
        self._parameters = parameters
        self._layers = layers

    @contextmanager
    def materialise(self) -> Iterator[None]:
        """Puts the stored weights into the parameters inside the `with` block."""
        yield

    def seed_rounding(self, seed: int) -> None:
        """Sets the seed with which weights are rounded at random. Does nothing if they are rounded to nearest."""

    def load_high_precision(self) -> None:
        """Puts the high-precision values into the parameters, so that an update can be added to them."""

    def round_weights(self, parameters: TensorSequence) -> None:
        """Rounds parameters after an update, and stores them."""

    def stored_tensors(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]


class HalfWeights(Weights):
    """Stores weights in fp16 with one scale per tensor, as in FP8-LM. The float32 parameters use memory only during a
    step."""

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter] = ()) -> None:
        super().__init__(parameters, layers)
        self._storage = self._make_moment_storage()
        self._masters: dict[Tensor, Operand] = {}
        self._sizes = {parameter: parameter.untyped_storage().nbytes() for parameter in parameters}
        self.round_weights(parameters)
        self._free_parameter_memory()

    def _make_moment_storage(self) -> MomentStorageMethod:
        """Returns storage with power-of-two scales. With such scales, rounding a rounded weight again, for example in
        a skipped step, changes nothing.
        """
        return make_scaled_storage(FP16, ScaleRounding.POWER_OF_TWO)

    @contextmanager
    def materialise(self) -> Iterator[None]:
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(self._sizes[parameter])
            self._restore_weight(parameter)
        try:
            yield
        finally:
            self._free_parameter_memory()

    def _restore_weight(self, parameter: Tensor) -> None:
        """Puts a stored weight into its parameter."""
        parameter.detach().copy_(self._storage.restore(self._masters[parameter]))

    def _free_parameter_memory(self) -> None:
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(0)

    def round_weights(self, parameters: TensorSequence) -> None:
        for parameter in parameters:
            self._masters[parameter] = self._storage.store(parameter.detach())
            self._restore_weight(parameter)

    def stored_tensors(self) -> list[Tensor]:
        return [*chain.from_iterable(self._masters[parameter].tensors for parameter in self._parameters)]


class EightBitWeights(HalfWeights):
    """Stores weights in fp16, to which updates are added. Forward and backward use E4M3 copies of layers' weights, as
    in MS-AMP's O3.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Parameter]) -> None:
        self._fp8_storage = make_scaled_storage(E4M3, ScaleRounding.POWER_OF_TWO)
        self._codes = dict[Tensor, Operand]()
        super().__init__(parameters, layers)

    @contextmanager
    def materialise(self) -> Iterator[None]:
        with super().materialise():
            for parameter in self._layers:
                parameter.detach().copy_(self._fp8_storage.restore(self._codes[parameter]))
            yield

    def load_high_precision(self) -> None:
        for parameter in self._layers:
            self._restore_weight(parameter)

    def round_weights(self, parameters: TensorSequence) -> None:
        super().round_weights(parameters)
        layers = set(map(id, self._layers))
        for parameter in parameters:
            if id(parameter) in layers:
                self._codes[parameter] = self._fp8_storage.store(parameter.detach())

    def stored_tensors(self) -> list[Tensor]:
        return [*super().stored_tensors(), *chain.from_iterable(self._codes[layer].tensors for layer in self._layers)]


class StochasticWeights(HalfWeights):
    """Stores weights in bf16, rounded up or down at random so that small updates are not lost. The seed of the rounding
    is set in each step.
    """

    def _make_moment_storage(self) -> MomentStorageMethod:
        self._generator = torch.Generator(self._parameters[0].device)
        self._generator.manual_seed(0)
        return MomentStorageMethod(
            lambda x: Operand(round_to_bf16_randomly(x, self._generator)),
            lambda operand: operand.data.to(torch.float32),
        )

    def seed_rounding(self, seed: int) -> None:
        self._generator.manual_seed(seed)


def round_to_bf16_randomly(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds float32 to bfloat16 up or down at random, so that the mean is the unrounded value."""
    # Add 16 random bits to the 16 bits that bfloat16 does not have.
    random_bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # A carry out of these 16 bits rounds up. Its probability is the dropped fraction.
    truncated_values = ((x.contiguous().view(torch.int32) + random_bits) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), truncated_values, x).to(torch.bfloat16)


WEIGHTS_BY_MASTER = {
    "fp32": Weights,
    "fp16-scaled": HalfWeights,
    "fp16-fp8": EightBitWeights,
    "bf16-stochastic": StochasticWeights,
}


def make_update_rounding(fmt: str) -> Callable[[TensorSequence, TensorSequence], None] | None:
    """Returns a function that rounds the updates of weights to a format, and applies the rounded updates. Returns
    None for fp32.
    """
    if fmt == "fp32":
        return None
    low_precision_storage = (
        make_scaled_storage(E4M3) if fmt == "fp8" else make_arithmetic_storage(PlainArithmetic(torch.bfloat16))
    )

    @torch.no_grad()
    def apply_rounded_updates(old_weights: TensorSequence, new_weights: TensorSequence) -> None:
        for old, new in zip(old_weights, new_weights, strict=True):
            rounded_update = low_precision_storage.restore(low_precision_storage.store((new - old).to(torch.float32)))
            new.copy_(old + rounded_update.to(old.dtype))

    return apply_rounded_updates


def make_state_storages(fmt: str) -> tuple[MomentStorageMethod, MomentStorageMethod] | None:
    """Returns the storages of an optimizer's first and second moments between steps; None for fp32. In FP8-LM, first
    moments are stored in E4M3, and second moments in fp16 with a scale.
    """
    if fmt == "fp32":
        return None
    if fmt == "fp8lm":
        return make_scaled_storage(E4M3), make_scaled_storage(FP16)
    bf16_storage = make_arithmetic_storage(PlainArithmetic(torch.bfloat16))
    return bf16_storage, bf16_storage
