"""Tensor scales that come from earlier casts (delayed) or from calibration data (static). Scales stay on the device,
unless the host asks for one as a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8bench.formats.blocks import float_factor
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.matrix_codes import DelayedScaleCodes
from fp8bench.formats.native_codes import compute_current_scale, delayed_codes, delayed_scale
from fp8bench.formats.recipes import DelayedScaling, Recipe, ScaleRounding, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.numerics.tensor_error import BlockFactors, DelayedScaleFigures, compute_factors, measure_scale_course
from fp8bench.protocols import Precision, Role, ScaleBook
from fp8bench.protocols.arithmetic import ScaleState


class ScaleAndInverse(NamedTuple):
    """A tensor's scale and its inverse, both float32 scalars on the tensor's device."""

    scale: Tensor
    inverse_scale: Tensor


class ScaleSource(Protocol):
    """A source of scales for casts. The scale may depend on earlier tensors, or on other ranks' tensors."""

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
        """Returns the scale for a cast of `x`. With `repeat` it returns the last scale again. `amax` is the largest
        magnitude of `x`, if the caller has it.
        """

    @property
    def last_pair(self) -> ScaleAndInverse | None:
        """Returns the scale of the last cast, or None if no scale exists yet."""


class DelayedScale:
    """The delayed scale of one role in one layer, with its history.

    As in Transformer Engine, a cast uses the scale computed after the previous casts, and then records the largest
    magnitude of its tensor. The first scale is 1. A history of zeros does not change the scale. A cast with infinities
    or NaN records 0. `scale` is for the next cast. `history` is a ring of largest magnitudes, filled from its front.
    Both `scale` and `history` are float32 on the device, and None before the first cast.
    """

    # Whether the scale depends only on tensors of this rank. If so, the cast can find the largest magnitude by itself.
    is_local: ClassVar[bool] = True

    def __init__(self, delayed: DelayedScaling, fmt: Format) -> None:
        self._delayed = delayed
        self._fmt = fmt
        self._cast_count: Tensor | None = None
        self.scale: Tensor | None = None
        self.history: Tensor | None = None
        self.last_pair: ScaleAndInverse | None = None

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
        """Returns the scale for a cast of `x` and records its largest magnitude. With `repeat`, for a recomputed
        block, it returns the previous scale and records nothing.
        """
        if repeat and self.last_pair is not None:
            return self.last_pair
        amax = largest_magnitude(x) if amax is None else amax
        self.last_pair = ScaleAndInverse(
            *delayed_scale(amax, *self._get_scale_state(x.device), self._fmt, self._delayed)
        )
        return self.last_pair

    def cast(self, x: Tensor, repeat: bool, both: bool) -> DelayedScaleCodes | None:
        """Casts `x`, finds its largest magnitude and updates the scale, all in one pass. With `both`, also returns the
        codes of the transpose. Returns None if one pass is impossible: the scale depends on other ranks, or `repeat`
        asks for the previous scale.
        """
        if not self.is_local or (repeat and self.last_pair is not None):
            return None
        cast = delayed_codes(x, *self._get_scale_state(x.device), self._fmt, self._delayed, both)
        self.last_pair = ScaleAndInverse(cast.scale, cast.inverse_scale)
        return cast

    def _get_scale_state(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        # Only the first cast shows on which device the tensors are.
        if self.scale is None or self.history is None or self._cast_count is None:
            self.scale = torch.ones((), dtype=torch.float32, device=device)
            self.history = torch.zeros(self._delayed.history, dtype=torch.float32, device=device)
            self._cast_count = torch.zeros((), dtype=torch.int32, device=device)
        return self.history, self._cast_count, self.scale

    def memory(self) -> dict[str, Tensor]:
        """Returns the tensors on which later casts depend, by name: {} before the first cast."""
        if self.scale is None or self.history is None or self._cast_count is None:
            return {}
        return {"scale": self.scale, "history": self.history, "casts": self._cast_count}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        self.scale, self.history, self._cast_count = map(memory.get, ("scale", "history", "casts"))


def backward_is_running() -> bool:
    """Returns whether this thread runs autograd's backward. It is False while a graph is compiled, because backward
    is traced separately.
    """
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def largest_magnitudes(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Returns the largest magnitude of each tensor, in one call on a GPU."""
    if not tensors or tensors[0].device.type == "cpu":
        return [largest_magnitude(tensor) for tensor in tensors]  # _foreach_norm would take 37 times as long on a CPU
    return torch._foreach_norm(tensors, math.inf, dtype=torch.float32)


def make_static_scales(book: ScaleBook, layer: str, treatments: Mapping[Role, Treatment]) -> dict[Role, StaticScale]:
    scales = {}
    for role, treatment in treatments.items():
        assert treatment.scaling is not None
        calibrated_amaxes = book.known or {}
        found_amax = calibrated_amaxes.get((layer, role.value))
        scales[role] = StaticScale(book, treatment.fmt, treatment.scaling.rounding, found_amax)
        # The book later calls this function to read the state of the scale.
        book.keep(layer, role.value, scales[role].read_state)
    return scales


class StaticScale:
    """The static scale of one role in one layer. `ScaleBook` decides when the scale is computed again.

    While the book is `watching`, each cast uses the tensor's current scale and records the tensor's largest magnitude.
    The first cast after that computes the static scale from the largest recorded magnitude. Magnitudes of 0, infinity
    or NaN do not count. A scale that is given and never renewed changes no state, so that torch can compile a graph
    around it.
    """

    def __init__(self, book: ScaleBook, fmt: Format, rounding: ScaleRounding, found_amax: float | None = None) -> None:
        """Computes the scale at once if an earlier calibration found the largest magnitude (`found_amax`). Such a scale
        is on torch's default device.
        """
        self._book = book
        self._fmt = fmt
        self._rounding = rounding
        self._amax: Tensor | None = None
        self._scale: ScaleAndInverse | None = None
        self._renewals: Tensor | None = None
        self._recorded_amax: Tensor | None = None
        self._used_scale: ScaleAndInverse | None = None
        if found_amax is not None:
            self._set_scale_from_amax(torch.full((), found_amax, dtype=torch.float32))

    def next(self, x: Tensor, repeat: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
        # A recomputed block gets the same scale again, so that both casts give the same codes.
        if repeat and self._used_scale is not None:
            return self._used_scale
        # While the scales are calibrated, use the tensor's current scale and record its largest magnitude.
        if self._book.watching:
            amax = largest_magnitude(x) if amax is None else amax
            finite_amax = torch.where(amax.isfinite(), amax, 0.0)
            self._recorded_amax = (
                finite_amax if self._recorded_amax is None else torch.maximum(self._recorded_amax, finite_amax)
            )
            self._used_scale = ScaleAndInverse(*compute_current_scale(amax, self._fmt, self._rounding))
            return self._used_scale
        # Otherwise use the static scale. If it does not exist yet, make it from the recorded magnitude or from this
        # tensor.
        if self._recorded_amax is not None:
            self._set_scale_from_amax(self._recorded_amax)
        elif self._scale is None:
            self._set_scale_from_amax(largest_magnitude(x) if amax is None else amax)
        assert self._scale is not None
        saturation_bound = self._book.rule.bound
        if saturation_bound is not None:
            self._renew_saturated_scale(x, self._scale.scale, saturation_bound)
        # With a saturation bound, every cast may change the scale. Store this scale, because a recomputed block must
        # use it again.
        if saturation_bound is not None:
            self._used_scale = self._scale
        # Otherwise drop the scale of the last calibrating cast. Without such a scale assign nothing, so that torch can
        # compile a graph around this cast.
        elif self._used_scale is not None:
            self._used_scale = None
        return self._scale

    @property
    def last_pair(self) -> ScaleAndInverse | None:
        return self._used_scale or self._scale

    def memory(self) -> dict[str, Tensor]:
        """Returns the tensors on which later casts depend. A scale that is never renewed has none."""
        # Stored checkpoints have the recorded magnitude under the name 'entered'.
        state_tensors = {"amax": self._amax, "renewals": self._renewals, "entered": self._recorded_amax}
        return {name: tensor for name, tensor in state_tensors.items() if tensor is not None and self._is_renewed}

    def recall(self, memory: Mapping[str, Tensor]) -> None:
        if self._is_renewed:
            self._amax, self._renewals, self._recorded_amax = map(memory.get, ("amax", "renewals", "entered"))
            self._scale = None if self._amax is None else _make_scale_pair(self._compute_scale_factor(self._amax))
            self._used_scale = None

    @property
    def _is_renewed(self) -> bool:
        return bool(self._book.rule.refresh) or self._book.rule.bound is not None

    def read_state(self) -> ScaleState | None:
        """Returns the state of the scale, or None if no scale exists yet. If casts have recorded a magnitude, first
        computes the scale from it.
        """
        if self._recorded_amax is not None:
            self._set_scale_from_amax(self._recorded_amax)
        if self._amax is None or self._scale is None or self._renewals is None:
            return None
        return ScaleState(float(self._amax), float(self._scale.scale), int(self._renewals))

    def _set_scale_from_amax(self, amax: Tensor) -> None:
        """Computes the scale from the largest magnitude `amax`. The first time does not count as a renewal."""
        self._recorded_amax = None
        if self._scale is None:
            self._amax, self._scale = amax, _make_scale_pair(self._compute_scale_factor(amax))
            self._renewals = torch.zeros((), dtype=torch.int64, device=amax.device)
        else:
            self._renew_scale(amax, torch.ones_like(amax, dtype=torch.bool))

    def _renew_saturated_scale(self, x: Tensor, scale: Tensor, bound: float) -> None:
        """Makes a new scale from the tensor `x` if more than the fraction `bound` of its values would saturate with
        this scale.
        """
        # A GPU must not wait for the host, which therefore cannot read how many values saturate. So on a GPU always
        # compute both scales, and select one of them on the device.
        host_decides_renewal = x.device.type == "cpu"
        # Divide a tensor by a tensor, as float_factor does. On a GPU a number divided by a tensor becomes a product
        # with the reciprocal.
        largest_unsaturated_magnitude = torch.full_like(scale, self._fmt.largest) / scale
        amax = largest_magnitude(x)
        if host_decides_renewal and amax <= largest_unsaturated_magnitude:
            return
        saturated_count = torch.count_nonzero(x.detach().to(torch.float32).abs() > largest_unsaturated_magnitude)
        is_saturation_above_bound = saturated_count > bound * x.numel()
        if not host_decides_renewal or is_saturation_above_bound:
            self._renew_scale(amax, is_saturation_above_bound)

    def _renew_scale(self, amax: Tensor, is_due: Tensor) -> None:
        assert self._amax is not None and self._scale is not None and self._renewals is not None
        # Keep the old scale if the magnitude is 0, infinity or NaN.
        is_scale_renewed = is_due & amax.isfinite() & (amax > 0)
        self._amax = torch.where(is_scale_renewed, amax, self._amax)
        self._scale = _make_scale_pair(
            torch.where(is_scale_renewed, self._compute_scale_factor(amax), self._scale.scale)
        )
        self._renewals = self._renewals + is_scale_renewed

    def _compute_scale_factor(self, amax: Tensor) -> Tensor:
        return float_factor(amax, self._fmt, self._rounding)


def _make_scale_pair(scale: Tensor) -> ScaleAndInverse:
    return ScaleAndInverse(scale, scale.reciprocal())


@dataclass(frozen=True)
class TensorRecipeView:
    """How a recipe casts one tensor: the element format, the scale factors (None if unknown), and how a delayed scale
    followed earlier tensors.
    """

    fmt: Format | None = None
    factors: BlockFactors | None = None
    scale_course: DelayedScaleFigures | None = None


def make_recipe_view(precision: Precision, role: Role, x: Tensor, earlier: Sequence[Tensor] = ()) -> TensorRecipeView:
    """Returns the format and the scale with which a precision would cast `x`, after casts of the tensors `earlier` in
    previous steps (newest first). For a precision without a recipe, returns only a format.
    """
    recipe = getattr(precision, "recipe", None)
    # A format without a recipe has no scale.
    if not isinstance(recipe, Recipe):
        return TensorRecipeView(FORMATS.get(precision.name))
    treatment = dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))[role]
    if recipe.delayed is None:
        return TensorRecipeView(treatment.fmt, compute_factors(x, treatment.fmt, treatment.scaling))
    steps = [*reversed(earlier), x]
    delayed_scale_source = DelayedScale(recipe.delayed, treatment.fmt)
    scales = [delayed_scale_source.next(step) for step in steps]
    # The first step's scale is the initial 1. It is shown only if `x` is the only step.
    compared_step_slice = slice(1, None) if earlier else slice(None)
    amaxes = [float(step.abs().max()) for step in steps[compared_step_slice]]
    scale_course = measure_scale_course(
        [float(pair.scale) for pair in scales[compared_step_slice]], amaxes, treatment.fmt
    )
    return TensorRecipeView(
        treatment.fmt, compute_factors(x, treatment.fmt, treatment.scaling, scales[-1].scale), scale_course
    )
