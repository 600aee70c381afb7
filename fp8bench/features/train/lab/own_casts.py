"""Finds how layers of a user's model cast their operands. A library may store the scales of a layer. Otherwise a
virtual cast measures what a recipe would do: it rounds a copy of an operand, and does not change the training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8bench.features.train.lab.readings import FigureValues, TensorCast, measure_tensor_figures
from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.recipes import ScaleRounding, Scaling, Treatment
from fp8bench.formats.scaled import factor, largest_magnitude, values
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.numerics.norms import view_as_rows
from fp8bench.protocols import Role
from fp8bench.registry import precisions

TreatmentByRole = Mapping[Role, Treatment]
_TENSOR_SCALING = Scaling(0, 0)
# A virtual cast (described above) rounds only a sample of about this many values, because rounding is slow.
_SAMPLED_VALUE_COUNT = 1 << 14
_FORMAT_BY_DTYPE = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
# Where Transformer Engine stores the scale of an operand: a key of `fp8_meta`, and an index into the entry's `scale`.
_TRANSFORMER_ENGINE_SCALES = {
    Role.INPUT: ("scaling_fwd", 0),
    Role.WEIGHT: ("scaling_fwd", 1),
    Role.GRADIENT: ("scaling_bwd", 0),
}


def find_recipe_treatments(precision: str) -> TreatmentByRole:
    """Returns how a precision's recipe treats inputs, weights and gradients; {} for a precision without a recipe."""
    recipe_precision = precisions.get(precision)
    if not isinstance(recipe_precision, RecipePrecision):
        return {}
    recipe = recipe_precision.recipe
    return dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))


def is_product_layer(module: nn.Module) -> bool:
    """Returns whether the module is a linear layer or a convolution, of torch or of a library."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return False
    layers = (nn.Linear, nn.modules.conv._ConvNd)
    # The Conv1D of transformers is a linear layer.
    return isinstance(module, layers) or "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"


@dataclass(frozen=True)
class OperandCast:
    """How a layer casts one operand. `stored_scale` returns the scale that the layer stores, if there is one.
    `is_image` means that the operand is an image. Its block scales are along the second dimension, the channels.
    """

    fmt: Format
    scaling: Scaling | None
    stored_scale: Callable[[], Tensor] | None = None
    is_image: bool = False

    def cast(self, x: Tensor, full_tensor: Tensor | None = None) -> TensorCast:
        """Rounds `x`, which is `full_tensor` or a sample of its rows. A scale for the whole tensor is computed from
        `full_tensor`.
        """
        scale = None if self.stored_scale is None else self.stored_scale()
        if scale is None and self.scaling is not None and not self.scaling.rows:
            scale, _inverse_scale = factor(x if full_tensor is None else full_tensor, self.fmt, self.scaling)
        rounded_rows = values(view_as_rows(x), self.fmt, self.scaling, scale=scale)
        return TensorCast(self.fmt, self.scaling, scale, rounded_rows)

    def list_figures(self, x: Tensor) -> FigureValues:
        """Returns all figures of a tensor. Figures that need its rounded values come from a sample, because rounding is
        slow.
        """
        rows = view_as_rows(x.movedim(1, -1) if self.is_image and x.ndim > 2 else x)
        row_stride = max(1, rows.numel() // _SAMPLED_VALUE_COUNT)
        # Square blocks need adjacent rows, so sample consecutive rows.
        has_square_blocks = self.scaling is not None and self.scaling.rows > 1
        sample = rows[: -(-len(rows) // row_stride)] if has_square_blocks else rows[::row_stride]
        figures, sample_figures = measure_tensor_figures(x), measure_tensor_figures(sample, self.cast(sample, rows))
        for name in sample_figures.keys() - figures.keys():
            sample_figure = sample_figures[name]
            # Counts are extrapolated from the sample to the whole tensor.
            is_count = name in ("vanished", "saturated")
            figures[name] = sample_figure * (rows.numel() / sample.numel()) if is_count else sample_figure
        return figures


def find_cast(module: nn.Module, role: Role, declared: TreatmentByRole) -> OperandCast | None:
    """Returns how a module casts an operand: by its stored scales or configuration, or else by the recipe in
    `declared`. Returns None for modules other than linear layers and convolutions, or if nothing is known about the
    casts.
    """
    # Layers of torch.nn do not store scales.
    if type(module).__module__.startswith("torch.nn.") and not declared:
        return None
    if not is_product_layer(module):
        return None
    key, index = _TRANSFORMER_ENGINE_SCALES[role]
    fp8_meta: Any = getattr(module, "fp8_meta", None)
    scale_meta_entry: Any = fp8_meta.get(key) if isinstance(fp8_meta, dict) else None
    if isinstance(getattr(scale_meta_entry, "scale", None), Tensor):
        # Transformer Engine's hybrid recipe casts gradients to E5M2, and other operands to E4M3.
        fmt = E5M2 if role is Role.GRADIENT and "HYBRID" in str(fp8_meta.get("recipe")) else E4M3
        # The next forward pass overwrites this scale, so a copy is returned.
        return OperandCast(fmt, _TENSOR_SCALING, lambda: scale_meta_entry.scale[index].detach().clone())
    treatment = _find_torchao_treatment(module, role) or declared.get(role)
    if treatment is None:
        return None
    is_image = isinstance(module, nn.modules.conv._ConvNd) and role is not Role.WEIGHT
    return OperandCast(treatment.fmt, treatment.scaling, None, is_image)


def _find_torchao_treatment(module: nn.Module, role: Role) -> Treatment | None:
    """Returns how torchao's Float8Linear casts an operand; None for any other layer. Float8Linear computes its scale in
    each call, and does not store it.
    """
    config: Any = getattr(module, "config", None)
    names = {Role.INPUT: "input", Role.WEIGHT: "weight", Role.GRADIENT: "grad_output"}
    cast_config: Any = getattr(config, f"cast_config_{names[role]}", None)
    fmt = _FORMAT_BY_DTYPE.get(getattr(cast_config, "target_dtype", torch.float32))
    if fmt is None or "DISABLED" in str(cast_config.scaling_type):
        return None
    has_power_of_two_scales = getattr(config, "round_scales_to_power_of_2", False)
    scale_rounding = ScaleRounding.POWER_OF_TWO if has_power_of_two_scales else ScaleRounding.EXACT
    # `Scaling` takes 1 for a scale per row, and 0 for one scale of the whole tensor.
    rows = 1 if "AXISWISE" in str(cast_config.scaling_granularity) else 0
    return Treatment(fmt, Scaling(rows, 0, rounding=scale_rounding))


def unpack_fp8(x: Tensor) -> tuple[Tensor, TensorCast | None]:
    """Returns the values and the cast of an FP8 tensor of torchao or Transformer Engine. Any other tensor is returned
    unchanged, with None as its cast.
    """
    data = getattr(x, "_data", None) if type(x) not in (Tensor, nn.Parameter) else None
    if not isinstance(data, Tensor) or data.element_size() != 1:
        return x, None
    # torchao keeps the scale that multiplied the values, Transformer Engine its inverse.
    scale_inverse = getattr(x, "_scale_inv", None)
    scale = scale_inverse.reciprocal() if isinstance(scale_inverse, Tensor) else getattr(x, "_scale", None)
    if not isinstance(scale, Tensor):
        return x, None
    name = str(getattr(x, "_fp8_dtype", data.dtype)).lower()
    fmt = E5M2 if "e5m2" in name else E4M3
    codes = (
        data if data.dtype in _FORMAT_BY_DTYPE else data.view(torch.float8_e5m2 if fmt is E5M2 else torch.float8_e4m3fn)
    )
    unscaled_values = codes.to(torch.float32) / scale
    return unscaled_values, TensorCast(fmt, None, scale.reshape(()) if scale.numel() == 1 else None)


def find_stored_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the path and the largest value of each buffer that stores scales or largest magnitudes. Buffers inside
    compiled modules are found too.
    """
    for path, buffer in model.named_buffers():
        name = path.rpartition(".")[2].lower()
        if ("scale" in name or "amax" in name) and buffer.is_floating_point() and buffer.numel():
            yield path.replace("_orig_mod.", ""), largest_magnitude(buffer.detach())


def has_compiled_code() -> bool:
    """Returns whether torch.compile has compiled anything in this process."""
    dynamo_utils: Any = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo_utils is not None and dynamo_utils.counters["stats"])


@contextmanager
def observe_attention(observe: Callable[[Tensor, Tensor, bool, float | None], None]) -> Iterator[None]:
    """Calls `observe` for each F.scaled_dot_product_attention that needs gradients, with its queries, keys, causal
    flag and scale.
    """
    torch_attention = F.scaled_dot_product_attention

    def attend_and_observe(query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if torch.is_grad_enabled() and query.requires_grad and query.ndim == key.ndim == 4:
            # positional arguments after query and key: value, attn_mask, dropout_p, is_causal
            causal = arguments[3] if len(arguments) > 3 else named.get("is_causal", False)
            observe(query, key, bool(causal), named.get("scale"))
        return torch_attention(query, key, *arguments, **named)

    F.scaled_dot_product_attention = attend_and_observe
    try:
        yield
    finally:
        F.scaled_dot_product_attention = torch_attention
