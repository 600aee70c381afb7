"""Computes figures of one tensor and of its rounding. They are computed on the tensor's device, and the host reads them
once per step. Values that are not finite are counted, and left out of all other figures. docs/watching.md defines the
figures.
"""

from __future__ import annotations

import math
import resource
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fp8bench.features.train.values import LayerReading
from fp8bench.formats.blocks import float_factor
from fp8bench.formats.grids import BF16, FORMATS, FP16, Format
from fp8bench.formats.recipes import ScaleRounding, Scaling
from fp8bench.formats.scaled import largest_magnitude, split_into_blocks
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.numerics.norms import view_as_rows
from fp8bench.numerics.tensor_error import to_decibels
from fp8bench.protocols import Arithmetic, Operand, Role
from fp8bench.units import EXACT_SQNR_DB

# Figures by name. A value is a number on the host, or a scalar tensor on the device.
FigureValue = float | Tensor
FigureValues = dict[str, FigureValue]
IntegerArray = npt.NDArray[np.signedinteger[Any]]

# The bits of a float32 infinity as an integer. The bits of NaN are a larger integer.
_INFINITY_BITS = 0x7F800000
# A value counts as saturated if it exceeds the format's limit by more than this factor. The slack allows for the
# rounding of a float32 scale and its inverse.
_SATURATION_SLACK_FACTOR = 1 + 2.0**-21
_FORMAT_BY_LARGEST_VALUE = {fmt.largest: fmt for fmt in FORMATS.values()}
# For values between these magnitudes, float32 can hold their squares and the sums of squares over a row.
_SQUARABLE_MAGNITUDE_RANGE = (2.0**-45, 2.0**45)
# On a CPU this many values are processed at a time, so that they fit into its cache.
_CPU_CHUNK_VALUES = 1 << 19
# On a GPU this many values are processed at a time: 256 MiB of float32.
_GPU_PIECE_VALUES = 1 << 26
_FORMAT_BY_CARRIER_DTYPE = {torch.bfloat16: BF16, torch.float16: FP16}


@dataclass(frozen=True)
class TensorCast:
    """How a tensor was cast. `fmt` and `scaling` are the format and the scaling of its elements, as far as known.
    `scale` is the factor by which the whole tensor was multiplied. It is None without such a factor, or if the
    factor follows from the tensor's values by `scaling`. `rounded` holds the rounded values that a product reads; None
    if nothing was rounded.
    """

    fmt: Format | None = None
    scaling: Scaling | None = None
    scale: Tensor | None = None
    rounded: Tensor | None = None


def is_read_at_once(x: Tensor) -> bool:
    """Returns whether the host can read the numbers of this tensor without waiting for a device, as on a CPU."""
    return x.device.type == "cpu"


def get_stored_values(gradient: Tensor) -> Tensor:
    """Returns the stored values of a sparse gradient. Any other gradient is returned unchanged."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def describe_cast(arithmetic: Arithmetic, operand: Operand, source: Tensor, role: Role) -> TensorCast:
    if operand.data.dtype == source.dtype and operand.data.data_ptr() == source.data_ptr():
        return TensorCast(_FORMAT_BY_CARRIER_DTYPE.get(source.dtype))
    rounded_values = arithmetic.restore(operand, torch.float32)
    if isinstance(arithmetic, RecipeArithmetic):
        treatment = arithmetic.treatments[role]
        return TensorCast(treatment.fmt, treatment.scaling, arithmetic.last_scale(role), rounded_values)
    return TensorCast(_FORMAT_BY_CARRIER_DTYPE.get(operand.data.dtype), rounded=rounded_values)


def measure_tensor_figures(x: Tensor, cast: TensorCast | None = None) -> FigureValues:
    """Returns all figures of a tensor. If it was cast, also returns the figures of the cast. The host never waits for
    a GPU.
    """
    if not x.numel():
        return {}
    cast = cast or TensorCast()
    # On a CPU, reading the smallest and the largest value needs no wait, and saves most of the work.
    figures = _measure_on_cpu(x, cast.rounded) if is_read_at_once(x) else None
    amax = None if figures is None else float(figures["amax"])
    if figures is None:
        figures = _measure_figures_in_pieces(
            view_as_rows(x), None if cast.rounded is None else view_as_rows(cast.rounded)
        )
    return figures if cast.fmt is None else figures | _measure_range(view_as_rows(x), cast.fmt, amax, cast)


def _measure_on_cpu(x: Tensor, rounded: Tensor | None) -> FigureValues | None:
    """Returns the figures of a tensor on a CPU, and of its `rounded` values, if there are any. Returns None if this
    would be inexact: if some values are not finite, or if sums of their squares lose digits in float32.
    """
    is_bfloat16 = x.dtype == torch.bfloat16
    infinity_bits = _INFINITY_BITS >> 16 if is_bfloat16 else _INFINITY_BITS
    smallest, largest, nonzero_count, vanished_count, square_sum, total, noise = infinity_bits, 0, 0, 0, 0.0, 0.0, 0.0
    value_chunks = _split_into_cpu_chunks(x)
    rounded_chunks = [None] * len(value_chunks) if rounded is None else _split_into_cpu_chunks(rounded)
    for chunk, rounded_chunk in zip(value_chunks, rounded_chunks, strict=True):
        values = chunk.to(torch.float32)
        bits = _view_bits(chunk if is_bfloat16 else values)
        low, high = _find_extreme_magnitudes(bits)
        if low:
            nonzero_count += len(chunk)
        else:
            nonzero_count += int(torch.count_nonzero(values))
            low = _find_smallest_nonzero(bits)
        smallest, largest = min(smallest, low), max(largest, high)
        square_sum += torch.dot(values, values).item()
        total += values.sum().item()
        if rounded_chunk is not None:
            rounded_values = rounded_chunk.to(torch.float32)
            rounded_low, rounded_high = _find_extreme_magnitudes(_view_bits(rounded_values))
            if rounded_high >= _INFINITY_BITS:
                return None
            if not rounded_low:
                vanished_count += int(torch.count_nonzero((values != 0) & (rounded_values == 0)))
            difference = rounded_values - values
            noise += torch.dot(difference, difference).item()
    count, amax = x.numel(), _make_float_from_bits(largest, is_bfloat16)
    # Only `_measure_figures_in_pieces` can measure a tensor whose squares overflow or underflow float32.
    if amax and not _SQUARABLE_MAGNITUDE_RANGE[0] < amax < _SQUARABLE_MAGNITUDE_RANGE[1]:
        return None
    mean = total / count
    variance = square_sum / count - mean**2
    if variance < mean**2:  # the difference of two nearly equal numbers loses its digits
        return None
    figures: FigureValues = {
        "count": count,
        "finite": count,
        "nonzero": nonzero_count,
        "amax": amax,
        "smallest": _make_float_from_bits(smallest, is_bfloat16) if nonzero_count else 0.0,
        "mean": mean,
        "variance": variance,
        "kept": count,
    }
    if rounded is not None:
        figures |= {"signal": math.sqrt(square_sum), "noise": math.sqrt(noise), "vanished": vanished_count}
    return figures


def _measure_figures_in_pieces(x: Tensor, rounded: Tensor | None) -> FigureValues:
    """Returns the figures of `x` and, if `x` was rounded, of its `rounded` values. Needs few kernels, and never waits
    for the device to read a number. Large tensors are processed in pieces.
    """
    rows = max(1, _GPU_PIECE_VALUES // x.shape[1])
    row_slices = [slice(top, top + rows) for top in range(0, len(x), rows)]
    piece_figures = [
        _measure_tensor_piece(x[place], None if rounded is None else rounded[place]) for place in row_slices
    ]
    return piece_figures[0] if len(piece_figures) == 1 else _merge_piece_figures(piece_figures)


def _measure_tensor_piece(x: Tensor, rounded: Tensor | None) -> FigureValues:
    # On a CPU this function gets the tensors that `_measure_on_cpu` cannot measure exactly in float32.
    values = x.to(torch.float64 if is_read_at_once(x) else torch.float32)
    # x - x is 0 for finite values, and NaN for all others.
    finite_mask = values - values == 0
    values = torch.where(finite_mask, values, 0.0)
    magnitudes = values.abs()
    nonzero_mask, both_finite_mask = magnitudes > 0, finite_mask
    variance, mean = torch.var_mean(values, correction=0)
    figures: FigureValues = {
        "count": x.numel(),
        "finite": finite_mask.sum(),
        "nonzero": nonzero_mask.sum(),
        "amax": magnitudes.amax(),
        "smallest": torch.where(nonzero_mask, magnitudes, math.inf).amin(),
        "mean": mean,
        "variance": variance,
    }
    if rounded is not None:
        rounded = rounded.to(values.dtype)
        both_finite_mask = finite_mask & (rounded - rounded == 0)
        figures |= {
            "signal": torch.linalg.vector_norm(torch.where(both_finite_mask, values, 0.0)),
            "noise": torch.linalg.vector_norm(torch.where(both_finite_mask, rounded - values, 0.0)),
            "vanished": (nonzero_mask & (rounded == 0)).sum(),
        }
    return figures | {"kept": both_finite_mask.sum()}


def _merge_piece_figures(parts: Sequence[FigureValues]) -> FigureValues:
    stacked_piece_figures: dict[str, Tensor] = {}
    for name in parts[0].keys() - {"count"}:
        stacked_piece_figures[name] = torch.stack([torch.as_tensor(part[name]) for part in parts])
    counts = [float(part["count"]) for part in parts]
    shares = torch.tensor(counts, dtype=torch.float64, device=stacked_piece_figures["mean"].device) / sum(counts)
    mean = (shares * stacked_piece_figures["mean"]).sum()
    merged_piece_moments: FigureValues = {"count": sum(counts), "mean": mean}
    merged_piece_moments["variance"] = (
        shares * (stacked_piece_figures["variance"] + (stacked_piece_figures["mean"] - mean).square())
    ).sum()
    merge_by_name = {
        "amax": torch.amax,
        "smallest": torch.amin,
        "signal": torch.linalg.vector_norm,
        "noise": torch.linalg.vector_norm,
    }
    return {
        name: merge_by_name.get(name, torch.sum)(value) for name, value in stacked_piece_figures.items()
    } | merged_piece_moments


def _measure_range(x: Tensor, fmt: Format, amax: float | None, cast: TensorCast) -> FigureValues:
    """Returns how much of a format's range the values use. If all values are known to be finite, `amax` is their
    largest magnitude; otherwise it is None.
    """
    figures: FigureValues = {"largest": fmt.largest}
    if cast.scaling is not None and cast.scaling.rows:
        return figures | _measure_blocks(x, fmt, cast.scaling, amax is not None)
    saturation_limit: FigureValue = fmt.largest * _SATURATION_SLACK_FACTOR
    if cast.scale is not None:
        saturation_limit = saturation_limit / (cast.scale if amax is None else float(cast.scale))
        figures["scale"] = cast.scale
    # A scale that is computed from finite values lets none of them saturate. With NaN or infinity, the scale is 1.
    elif cast.scaling is not None:
        figures["own_scale"] = float(cast.scaling.rounding is ScaleRounding.POWER_OF_TWO)
        saturation_limit = saturation_limit if amax is None else math.inf
    return figures | {
        "saturated": 0
        if amax is not None and amax <= saturation_limit
        else _count_values_beyond_limits(x.abs(), saturation_limit)
    }


def _measure_blocks(x: Tensor, fmt: Format, scaling: Scaling, is_on_cpu: bool) -> FigureValues:
    """Returns figures of a tensor with a scale per block: how full the fullest block is, the number of saturated
    values, and the scales. Leaves out blocks of zeros, and scales that round all values of their block to zero.
    """
    blocks = split_into_blocks(x.to(torch.float32).abs(), fmt, scaling)
    decoding_scales = blocks.decoding_scales.to(torch.float64)
    is_usable_scale = (decoding_scales > 0) & (decoding_scales < math.inf)
    has_nonzero_values = is_usable_scale & (blocks.peaks > 0)
    largest_share = (
        torch.where(is_usable_scale & (blocks.peaks < math.inf), blocks.peaks / decoding_scales, 0.0).amax()
        / fmt.largest
    )
    saturated_count: FigureValue = 0
    if not is_on_cpu or float(largest_share) > _SATURATION_SLACK_FACTOR:
        saturated_count = _count_values_beyond_limits(
            blocks.magnitudes,
            torch.where(is_usable_scale, decoding_scales * (fmt.largest * _SATURATION_SLACK_FACTOR), math.inf),
        )
    return {
        "fullest": largest_share,
        "saturated": saturated_count,
        # The mean log2 of the factors before rounding, which are the inverses of the decoding scales.
        "octaves": torch.where(has_nonzero_values, -decoding_scales.log2(), 0.0).sum() / has_nonzero_values.sum(),
        "largest_step": torch.where(has_nonzero_values, decoding_scales, 0.0).amax(),
        "least_step": torch.where(has_nonzero_values, decoding_scales, math.inf).amin(),
    }


def _count_values_beyond_limits(magnitudes: Tensor, limits: FigureValue) -> Tensor:
    return ((magnitudes > limits) & (magnitudes < math.inf)).sum()


def largest_output(x: Tensor) -> FigureValue:
    """Returns the largest magnitude of a layer's output; NaN if a value is NaN."""
    if not is_read_at_once(x) or not x.numel():
        return largest_magnitude(x)
    values = x.detach().to(torch.float32).flatten()
    return _make_float_from_bits(_find_extreme_magnitudes(_view_bits(values))[1])


def _split_into_cpu_chunks(x: Tensor) -> Sequence[Tensor]:
    flat_values = x.detach().flatten()
    # Most tensors fit into a single chunk. Calling torch.split would take as long as all figures of a small tensor.
    return torch.split(flat_values, _CPU_CHUNK_VALUES) if len(flat_values) > _CPU_CHUNK_VALUES else (flat_values,)


def _view_bits(values: Tensor) -> IntegerArray:
    # Tensor.numpy() would prevent FSDP from resizing the tensor's storage later.
    bits: Any = np.from_dlpack(values.view(torch.int16 if values.element_size() == 2 else torch.int32))
    return bits  # type: ignore[no-any-return]


def _find_extreme_magnitudes(bits: IntegerArray) -> tuple[int, int]:
    """Returns the smallest and the largest magnitude of floats that are viewed as signed integers. Magnitudes are
    compared as integers, without the highest bit, which is the sign. On a CPU this is several times as fast as
    computing magnitudes, and needs no memory.
    """
    sign_bit = 1 << (8 * bits.itemsize - 1)
    # The bits of negative floats are larger than those of positive floats as unsigned integers, and smaller as signed
    # ones.
    unsigned_bits = bits.view(f"u{bits.itemsize}")
    smallest_magnitude_bits = min(int(np.minimum.reduce(unsigned_bits)), int(np.minimum.reduce(bits)) + sign_bit)
    largest_magnitude_bits = max(int(np.maximum.reduce(bits)), int(np.maximum.reduce(unsigned_bits)) - sign_bit)
    return smallest_magnitude_bits, largest_magnitude_bits


def _find_smallest_nonzero(bits: IntegerArray) -> int:
    """Returns the smallest magnitude above 0 of floats that are viewed as signed integers. Returns a large integer if
    all are 0.
    """
    magnitudes = (bits & np.iinfo(bits.dtype).max).view(f"u{bits.itemsize}")
    # Subtracting 1 turns a zero into the largest integer, so the minimum ignores zeros.
    return int(np.minimum.reduce(magnitudes - 1)) + 1


def _make_float_from_bits(bits: int, is_bfloat16: bool = False) -> float:
    value: float = struct.unpack("=f", struct.pack("=I", bits << 16 if is_bfloat16 else bits))[0]
    return value


def _transfer_numbers_to_host(tensors: Sequence[Tensor]) -> list[float]:
    # Converting each number would take a kernel, so numbers of the same dtype are stacked first.
    tensor_indices_by_dtype: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        tensor_indices_by_dtype.setdefault(tensor.dtype, []).append(place)
    number_stacks_by_dtype = [
        torch.stack([tensors[place] for place in places]) for places in tensor_indices_by_dtype.values()
    ]
    numbers = torch.cat([some.to(torch.float64) for some in number_stacks_by_dtype]).tolist()
    number_by_index = dict(zip(chain.from_iterable(tensor_indices_by_dtype.values()), numbers, strict=True))
    return [number_by_index[place] for place in range(len(tensors))]


def move_figures_to_host(figures: Sequence[Mapping[Any, FigureValue]]) -> list[dict[Any, float]]:
    """Returns figures as numbers on the host. This is the only function here that waits for a device, and it waits
    once.
    """
    values = chain.from_iterable(figure.values() for figure in figures)
    tensors = [value for value in values if isinstance(value, Tensor)]
    is_on_host = not tensors or is_read_at_once(tensors[0])
    numbers = map(Tensor.item, tensors) if is_on_host else iter(_transfer_numbers_to_host(tensors))
    return [
        {name: next(numbers) if isinstance(value, Tensor) else value for name, value in figure.items()}
        for figure in figures
    ]


def make_layer_reading(
    arm: str, seed: int, step: int, layer: str, role: str, figures: Mapping[str, float], scale_before: float | None
) -> LayerReading:
    """Makes an output line from figures that the host has read. `scale_before` is the scale in the previous reading
    of this tensor.
    """
    count = figures.get("count", 0)
    if not count:
        return LayerReading(arm, seed, step, layer, role, 0.0, 0.0, 0.0, 0.0, 0.0)
    amax, finite = figures["amax"], figures["finite"]
    mean, deviation = _compute_finite_moments(figures)
    scale = _find_rounding_scale(figures)
    ratio = scale / scale_before if scale_before else 0.0
    drift = abs(math.log2(ratio)) if 0 < ratio < math.inf else None
    has_block_scales = bool(figures.get("largest_step"))
    has_scale_from_its_values = (
        "own_scale" in figures and finite == count
    )  # a scale computed from finite values lets no value saturate
    return LayerReading(
        arm,
        seed,
        step,
        layer,
        role,
        amax,
        figures["smallest"] if figures["nonzero"] else 0.0,
        mean,
        deviation,
        (finite - figures["nonzero"]) / count,
        scale,
        1 / figures["largest_step"] if has_block_scales else scale,
        1 / figures["least_step"] if has_block_scales else scale,
        _compute_scale_lag_octaves(figures.get("fullest", amax * scale / figures.get("largest", math.inf))),
        drift,
        figures.get("vanished", 0) / count,
        0.0 if has_scale_from_its_values else figures.get("saturated", 0) / count,
        _compute_signal_to_noise(figures),
        (count - figures["kept"]) / count,
    )


def _compute_finite_moments(figures: Mapping[str, float]) -> tuple[float, float]:
    """Returns the mean and the deviation of the finite values; NaN if there are none. The moments in `figures` count
    NaN and infinity as 0.
    """
    count, finite = figures["count"], figures["finite"]
    if not finite or figures["variance"] == math.inf:  # the squares of the values overflow float32
        return math.nan, math.nan
    mean = figures["mean"] * count / finite
    if finite == count:
        return mean, math.sqrt(figures["variance"])
    return mean, math.sqrt(max(0.0, (figures["variance"] + figures["mean"] ** 2) * count / finite - mean**2))


def _find_rounding_scale(figures: Mapping[str, float]) -> float:
    """Returns the factor by which values were multiplied before rounding: the geometric mean if each block has a scale,
    and 1 if there is no scale.
    """
    if "own_scale" in figures and figures["finite"] == figures["count"]:
        scale_rounding = ScaleRounding.POWER_OF_TWO if figures["own_scale"] else ScaleRounding.EXACT
        return float(
            float_factor(torch.tensor(figures["amax"]), _FORMAT_BY_LARGEST_VALUE[figures["largest"]], scale_rounding)
        )
    mean_log2_scale = figures.get("octaves", math.nan)
    return figures.get("scale", 2.0**mean_log2_scale if math.isfinite(mean_log2_scale) else 1.0)


def _compute_scale_lag_octaves(largest_share: float) -> float | None:
    """Returns by how many octaves (log2) the largest magnitude exceeds the format's range; negative if a part of the
    range is unused. `largest_share` is that magnitude divided by the format's largest value. A share just above 1 comes
    from rounding, and counts as 1. Returns None if the share is 0 or not finite.
    """
    if not 0 < largest_share < math.inf:
        return None
    return 0.0 if 1 < largest_share <= _SATURATION_SLACK_FACTOR else math.log2(largest_share)


def _compute_signal_to_noise(figures: Mapping[str, float]) -> float | None:
    if not 0 < figures.get("signal", 0.0) < math.inf:
        return None
    # `to_decibels` expects squares of norms. Squaring a ratio doubles its decibels.
    return min(2 * to_decibels(figures["signal"], figures["noise"]), EXACT_SQNR_DB)


# Attention scores are computed for this many queries at a time, since all scores of a long context would not fit into
# memory.
_QUERIES_PER_PASS = 256
_BYTES_PER_KIB = 1024


def max_attention_score(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Returns the largest score, q k / sqrt(head width), that enters softmax in the first sequence. With grouped-query
    attention, several heads of queries share keys.
    """
    queries, keys = (tensor[0].detach().to(torch.float32) for tensor in (q, k))
    if len(keys) != len(queries):
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    largest = torch.zeros((), device=q.device)
    for start in range(0, q.shape[2], _QUERIES_PER_PASS):
        scores = queries[:, start : start + _QUERIES_PER_PASS] @ keys.transpose(-1, -2)
        # `tril_` sets masked scores to 0.
        largest = torch.maximum(largest, largest_magnitude(scores.tril_(start) if causal else scores))
    return largest / math.sqrt(q.shape[-1])


def measure_embedding_spread(weight: Tensor) -> Tensor:
    """Returns the root mean square distance of an embedding's rows from their mean: 0 if all tokens have the same
    vector."""
    rows = weight.detach().to(torch.float32)
    deviation_norm: Tensor = torch.linalg.vector_norm(rows - rows.mean(0))
    return deviation_norm / math.sqrt(max(len(rows), 1))


def measure_largest_row_ratio(weight: Tensor) -> Tensor:
    """Returns the norm of an embedding's largest row, divided by that of its median row."""
    row_norms: Tensor = torch.linalg.vector_norm(weight.detach().to(torch.float32), dim=-1)
    # The median is 0 if half of the rows are zero.
    return row_norms.amax() / row_norms.median().clamp(min=1e-30)


def measure_batch_norm_drift(x: Tensor, mean: Tensor, channels_last: bool) -> Tensor:
    """Returns how far a running mean is from the mean of the batch, in standard deviations: the root mean square over
    channels. `channels_last` means that channels are the last dimension. Otherwise they are the second one, as in
    torch's layers.
    """
    channels = x.detach().to(torch.float32).transpose(0, -1 if channels_last else 1).flatten(1)
    deviation, batch = torch.std_mean(channels, 1, correction=0)
    return ((mean - batch) / deviation).square().mean().sqrt()


def find_running_mean(module: nn.Module) -> Tensor | None:
    mean = module._buffers.get("running_mean")
    return mean if isinstance(mean, Tensor) and module.training else None


def reset_peak_memory(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def measure_peak_bytes(device: torch.device) -> int:
    """Returns a peak of memory in bytes. On a GPU, it is the peak since `reset_peak_memory` of the bytes that tensors
    use. On a CPU, it is the peak of the process since its start.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB
