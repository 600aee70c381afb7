"""How layers of a user's model cast their operands: real scales where a library keeps them, else virtual casts.

A virtual cast rounds what a layer was given by a recipe, and shows what that recipe would do; the training is the same.
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

from fp8bench.features.train.lab.readings import Figures, TensorCast, figures_of
from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.recipes import ScaleRounding, Scaling, Treatment
from fp8bench.formats.scaled import factor, largest_magnitude, values
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.numerics.norms import as_rows
from fp8bench.protocols import Role
from fp8bench.registry import precisions

Treatments = Mapping[Role, Treatment]
_TENSOR = Scaling(0, 0)
# At most about this many values of a tensor are rounded virtually.
_SAMPLE = 1 << 14
_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
# Places of an operand's scale in Transformer Engine's `fp8_meta`: which of its parts, and the index in it.
_TE_PLACES = {Role.INPUT: ("scaling_fwd", 0), Role.WEIGHT: ("scaling_fwd", 1), Role.GRADIENT: ("scaling_bwd", 0)}


def declared_treatments(precision: str) -> Treatments:
    """Returns how a precision's recipe treats each role; empty for a precision without a recipe."""
    chosen = precisions.get(precision)
    if not isinstance(chosen, RecipePrecision):
        return {}
    recipe = chosen.recipe
    return dict(zip((Role.INPUT, Role.WEIGHT, Role.GRADIENT), recipe.treatments, strict=True))


def multiplies(module: nn.Module) -> bool:
    """Whether the module is a linear layer or a convolution, of torch or of a library."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return False
    layers = (nn.Linear, nn.modules.conv._ConvNd)
    return isinstance(module, layers) or "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"


@dataclass(frozen=True)
class LayerCast:
    """How a layer casts one operand. `kept_scale` returns a scale that the layer keeps. `is_image`: blocks lie along
    the second dimension, which a convolution sums over."""

    fmt: Format
    scaling: Scaling | None
    kept_scale: Callable[[], Tensor] | None = None
    is_image: bool = False

    def cast(self, x: Tensor, whole: Tensor | None = None) -> TensorCast:
        """Rounds the rows of `x`, which is all of `whole` or a sample of its rows."""
        scale = None if self.kept_scale is None else self.kept_scale()
        if scale is None and self.scaling is not None and not self.scaling.rows:
            scale = factor(x if whole is None else whole, self.fmt, self.scaling)[0]
        return TensorCast(self.fmt, self.scaling, scale, values(as_rows(x), self.fmt, self.scaling, scale=scale))

    def figures(self, x: Tensor) -> Figures:
        """Returns all figures of a tensor; those of its rounding are of a sample, because rounding takes longest."""
        rows = as_rows(x.movedim(1, -1) if self.is_image and x.ndim > 2 else x)
        step = max(1, rows.numel() // _SAMPLE)
        # Square blocks need rows that are next to each other.
        squares = self.scaling is not None and self.scaling.rows > 1
        sample = rows[: -(-len(rows) // step)] if squares else rows[::step]
        whole, part = figures_of(x), figures_of(sample, self.cast(sample, rows))
        for name in part.keys() - whole.keys():
            counts = name in ("vanished", "saturated")
            whole[name] = part[name] * (rows.numel() / sample.numel()) if counts else part[name]
        return whole


def find_cast(module: nn.Module, role: Role, declared: Treatments) -> LayerCast | None:
    """Returns how the module casts that operand: by its own scales or configuration, or else as declared; None if it
    does not multiply or nothing was declared."""
    # A plain layer of torch keeps no scales.
    if type(module).__module__.startswith("torch.nn.") and not declared:
        return None
    if not multiplies(module):
        return None
    place, index = _TE_PLACES[role]
    state: Any = getattr(module, "fp8_meta", None)
    kept: Any = state.get(place) if isinstance(state, dict) else None
    if isinstance(getattr(kept, "scale", None), Tensor):
        fmt = E5M2 if role is Role.GRADIENT and "HYBRID" in str(state.get("recipe")) else E4M3
        # The next forward changes the scale, which is read later.
        return LayerCast(fmt, _TENSOR, lambda: kept.scale[index].detach().clone())
    treatment = _torchao_treatment(module, role) or declared.get(role)
    if treatment is None:
        return None
    is_image = isinstance(module, nn.modules.conv._ConvNd) and role is not Role.WEIGHT
    return LayerCast(treatment.fmt, treatment.scaling, None, is_image)


def _torchao_treatment(module: nn.Module, role: Role) -> Treatment | None:
    """Returns what torchao's Float8Linear does: it computes its scale in each call and keeps none."""
    config: Any = getattr(module, "config", None)
    names = {Role.INPUT: "input", Role.WEIGHT: "weight", Role.GRADIENT: "grad_output"}
    cast: Any = getattr(config, f"cast_config_{names[role]}", None)
    fmt = _FORMATS.get(getattr(cast, "target_dtype", torch.float32))
    if fmt is None or "DISABLED" in str(cast.scaling_type):
        return None
    power = getattr(config, "round_scales_to_power_of_2", False)
    rounding = ScaleRounding.POWER_OF_TWO if power else ScaleRounding.EXACT
    rows = int("AXISWISE" in str(cast.scaling_granularity))
    return Treatment(fmt, Scaling(rows, 0, rounding=rounding))


def unpack(x: Tensor) -> tuple[Tensor, TensorCast | None]:
    """Returns the values of a real FP8 tensor of torchao or Transformer Engine and its cast; else the tensor."""
    data = getattr(x, "_data", None) if type(x) not in (Tensor, nn.Parameter) else None
    if not isinstance(data, Tensor) or data.element_size() != 1:
        return x, None
    # torchao keeps what values were multiplied by, Transformer Engine its inverse.
    inverse = getattr(x, "_scale_inv", None)
    scale = inverse.reciprocal() if isinstance(inverse, Tensor) else getattr(x, "_scale", None)
    if not isinstance(scale, Tensor):
        return x, None
    name = str(getattr(x, "_fp8_dtype", data.dtype)).lower()
    fmt = E5M2 if "e5m2" in name else E4M3
    codes = data if data.dtype in _FORMATS else data.view(torch.float8_e5m2 if fmt is E5M2 else torch.float8_e4m3fn)
    plain = codes.to(torch.float32) / scale
    return plain, TensorCast(fmt, None, scale.reshape(()) if scale.numel() == 1 else None)


def kept_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the largest value of each buffer that keeps scales or amax, whether or not its module is compiled."""
    for path, buffer in model.named_buffers():
        name = path.rpartition(".")[2].lower()
        if ("scale" in name or "amax" in name) and buffer.is_floating_point() and buffer.numel():
            yield path.replace("_orig_mod.", ""), largest_magnitude(buffer.detach())


def uses_compiled_code() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return bool(utils is not None and utils.counters["stats"])


@contextmanager
def attention_seen(see: Callable[[Tensor, Tensor, bool, float | None], None]) -> Iterator[None]:
    """Calls `see` with queries, keys, causal and scale of each F.scaled_dot_product_attention that is trained."""
    attend = F.scaled_dot_product_attention

    def attend_and_see(query: Tensor, key: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if torch.is_grad_enabled() and query.requires_grad and query.ndim == key.ndim == 4:
            # value, attn_mask, dropout_p, is_causal
            causal = arguments[3] if len(arguments) > 3 else named.get("is_causal", False)
            see(query, key, bool(causal), named.get("scale"))
        return attend(query, key, *arguments, **named)

    F.scaled_dot_product_attention = attend_and_see
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attend
