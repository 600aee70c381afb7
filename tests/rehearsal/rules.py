"""Calls that a GPU refuses or waits in, although torch allows them on tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from fp8bench.formats.grids import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format
from fp8bench.formats.hardware import DEVICE_CLASSES, DeviceClass
from fp8bench.formats.product_rules import Product, ScalingScheme, explain_missing_product_kind, list_product_objections
from fp8bench.formats.recipes import ScaleRounding, Scaling, Treatment
from fp8bench.model import DeviceFacts

WAITS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "unique_dim",
        "_unique2",
        "bincount",
        "unique_consecutive",
    )
}
COPIES = ("aten::_to_copy", "aten::copy_")
FORMATS: Mapping[torch.dtype, Format] = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float8_e5m2fnuz: E5M2FNUZ,
    torch.float4_e2m1fn_x2: E2M1,
}
# CUDA only moves and converts tensors of 8 bits and less, and fp8bench's operators write them.
DONE_WITH_CODES = {
    f"aten::{name}"
    for name in ("_to_copy", "copy_", "clone", "cat", "empty_like", "fill_", "zero_", "detach", "alias", "view", "t",
                 "transpose", "permute", "expand", "slice", "select", "split", "as_strided", "_unsafe_view",
                 "unsqueeze", "squeeze", "unbind", "stack", "_scaled_mm_v2", "_scaled_grouped_mm", "new_empty",
                 "_reshape_alias")
}  # fmt: skip
_OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_SCALINGS = {
    ScalingType.TensorWise: Scaling(0, 0),
    ScalingType.RowWise: Scaling(1, 0),
    ScalingType.BlockWise1x16: Scaling(1, 16, E4M3, ScaleRounding.NEAREST),
    ScalingType.BlockWise1x32: Scaling(1, 32, E8M0, ScaleRounding.RCEIL),
    ScalingType.BlockWise1x128: Scaling(1, 128),
    ScalingType.BlockWise128x128: Scaling(128, 128),
}


def broken_rule(
    name: str,
    args: Any,
    kwargs: Mapping[str, Any],
    given: Sequence[Tensor],
    facts: DeviceFacts,
    pinned: Mapping[int, Tensor],
) -> str:
    """Why a GPU refuses a call or waits in it; otherwise ''."""
    if name in WAITS and any(one.is_meta for one in given):
        return "the host waits for the device"
    if name in COPIES and kwargs.get("device", torch.device("meta")).type == "meta":
        return _copy_waits(args, kwargs, pinned)
    coded = [one.dtype for one in given if one.is_meta and one.dtype in FORMATS]
    if coded and name not in DONE_WITH_CODES and not name.startswith("fp8bench::"):
        return f"CUDA does not do it to {coded[0]}"
    product = product_of(name, args)
    if product is None:
        return ""
    fast = args[11:] == (True,)  # torch omits arguments with default values
    if fast and product.scheme not in (ScalingScheme.TENSOR, ScalingScheme.ROW):
        return f"sums of {product.scheme} are never fast"
    device = class_of(facts)
    lacking = explain_missing_product_kind(product, device)
    return lacking or "; ".join(one.why for one in list_product_objections(product, device))


def _copy_waits(args: Any, kwargs: Mapping[str, Any], pinned: Mapping[int, Tensor]) -> str:
    """Whether a copy from the host waits: unless it is non-blocking and from pinned memory."""
    *target, source = (one for one in args if isinstance(one, Tensor))
    if source.is_meta or not all(one.is_meta for one in target) or (not target and "device" not in kwargs):
        return ""
    is_non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    fixed = source.untyped_storage().data_ptr() in pinned
    if is_non_blocking and fixed:
        return ""
    return "the host waits for a copy from its own memory: pin it, and make it non_blocking"


def class_of(facts: DeviceFacts) -> DeviceClass:
    (device_class,) = (
        one
        for one in DEVICE_CLASSES
        if (one.arch == facts.arch if facts.hip else one.capability is not None and one.capability == facts.capability)
    )
    return device_class


def product_of(name: str, args: Any) -> Product | None:
    if name == "aten::_scaled_grouped_mm":  # its rules are those of rows, or of MX blocks
        a, b, scale, *_, output, _ = (*args, False)[:9]
        in_blocks = scale.dtype == torch.float8_e8m0fnu
        kinds_a = kinds_b = [(ScalingType.BlockWise1x32 if in_blocks else ScalingType.RowWise).value]
    elif name == "aten::_scaled_mm_v2":
        a, b, _, kinds_a, _, _, kinds_b, _, _, output, *_ = args
    else:
        return None
    packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    sides = a.shape[0], b.shape[-1], a.shape[-1] * packed
    treatments = (
        Treatment(FORMATS[one.dtype], _SCALINGS[ScalingType(kinds[0])]) for one, kinds in ((a, kinds_a), (b, kinds_b))
    )
    return Product(*sides, *treatments, output=_OUTPUTS[output], row_major=b.stride(-2) != 1)
