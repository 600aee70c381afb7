"""Figures of one tensor and of its rounding: computed on its device, read by the host once per step.

Values that are not finite are counted, and excluded from other figures. docs/watching.md has the definitions.
"""

from __future__ import annotations

import math
import resource
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.values import LayerReading
from fp8bench.formats.blocks import float_factor
from fp8bench.formats.grids import BF16, FORMATS, FP16, Format
from fp8bench.formats.recipes import ScaleRounding, Scaling
from fp8bench.formats.scaled import blocks_of, largest_magnitude
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.numerics.norms import as_rows
from fp8bench.numerics.tensor_error import decibels
from fp8bench.protocols import Arithmetic, Operand, Role
from fp8bench.units import EXACT_DB

# Figures by name: numbers of the host, or tensors without dimensions on the device.
Number = float | Tensor
Figures = dict[str, Number]

_INFINITY, _MAGNITUDE = 0x7F800000, 0x7FFFFFFF
# A value counts as saturated beyond this factor, which tolerates the rounding of a float32 scale and its inverse.
_SLACK = 1 + 2.0**-21
_LARGEST = {fmt.largest: fmt for fmt in FORMATS.values()}
# Squares of magnitudes between these, and their sums over a row, do not overflow or underflow float32.
_PLAIN = (2.0**-45, 2.0**45)
# A CPU processes this many values at a time, so that they stay in its cache.
_CHUNK = 1 << 17
# A GPU processes this many values at a time: 256 MiB of float32.
_PIECE = 1 << 26
_CARRIERS = {torch.bfloat16: BF16, torch.float16: FP16}


@dataclass(frozen=True)
class TensorCast:
    """How a tensor was cast: the format and scaling of its elements, as far as known. `scale` multiplied it, if it does
    not come from the tensor alone. `left` are the rounded values that a product takes, None if nothing was rounded."""

    fmt: Format | None = None
    scaling: Scaling | None = None
    scale: Tensor | None = None
    left: Tensor | None = None


def reads_at_once(x: Tensor) -> bool:
    """Whether reading a number is almost free, as on a CPU."""
    return x.device.type == "cpu"


def dense(gradient: Tensor) -> Tensor:
    """Returns the stored values of a sparse gradient, or else the gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def cast_of(arithmetic: Arithmetic, operand: Operand, source: Tensor, role: Role) -> TensorCast:
    if operand.data.dtype == source.dtype and operand.data.data_ptr() == source.data_ptr():
        return TensorCast(_CARRIERS.get(source.dtype))
    left = arithmetic.restore(operand, torch.float32)
    if isinstance(arithmetic, RecipeArithmetic):
        treatment = arithmetic.treatments[role]
        return TensorCast(treatment.fmt, treatment.scaling, arithmetic.last_scale(role), left)
    return TensorCast(_CARRIERS.get(operand.data.dtype), left=left)


def figures_of(x: Tensor, cast: TensorCast | None = None) -> Figures:
    """Returns all figures of a tensor, and of its cast if there was one. Nothing waits for a GPU."""
    if not x.numel():
        return {}
    # On a CPU reading a number is free, and the extremes save most of the work.
    rows, cast = as_rows(x), cast or TensorCast()
    quick = _quick(rows, cast) if reads_at_once(x) else None
    return _count_figures(rows, cast) if quick is None else quick


def _quick(x: Tensor, cast: TensorCast) -> Figures | None:
    """Returns the figures of healthy values on a CPU, where the smallest and largest magnitude save most of the work;
    else None. Magnitudes are compared as integers, which order them and have half as many bits for bfloat16. Comparing
    floats with a number takes ten times as long on a CPU."""
    shift = 16 if x.dtype == torch.bfloat16 else 0
    magnitude = _MAGNITUDE >> shift
    flat, rounded = x.reshape(-1), None if cast.left is None else as_rows(cast.left).reshape(-1)
    low, high, nonzero, vanished, squares, total, noise = magnitude, 0, 0, 0, 0.0, 0.0, 0.0
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        values = chunk.to(torch.float32)
        bits = (chunk.view(torch.int16) if shift else values.view(torch.int32)).bitwise_and(magnitude)
        chunk_low, chunk_high = (int(extreme) for extreme in bits.aminmax())
        squares += torch.dot(values, values).item()
        total += values.sum().item()
        nonzero += len(chunk) if chunk_low else int(_ones(bits).sum(dtype=torch.int32))
        if rounded is not None:
            kept = rounded[start : start + _CHUNK].to(torch.float32)
            kept_bits = kept.view(torch.int32).bitwise_and(_MAGNITUDE)
            kept_low, kept_high = (int(extreme) for extreme in kept_bits.aminmax())
            if kept_high >= _INFINITY:
                return None
            if not kept_low:
                # Element by element: the difference of two counts could be negative.
                vanished += int((_ones(bits) - _ones(kept_bits)).clamp_(min=0).sum(dtype=torch.int32))
            difference = kept - values
            noise += torch.dot(difference, difference).item()
        if chunk_high and not chunk_low:
            chunk_low = int(bits.sub_(1).bitwise_and_(magnitude).amin()) + 1  # a zero becomes the largest number
        low, high = min(low, chunk_low or low), max(high, chunk_high)
    count, amax = len(flat), _number(min(high, _INFINITY >> shift), shift)
    # Squares beyond float32 need the slower path.
    if amax and not _PLAIN[0] < amax < _PLAIN[1]:
        return None
    mean = total / count
    variance = squares / count - mean**2
    if variance < mean**2:  # the difference of two nearly equal numbers loses its digits
        return None
    figures: Figures = {
        "count": count,
        "finite": count,
        "nonzero": nonzero,
        "amax": amax,
        "smallest": _number(low if nonzero else 0, shift),
        "mean": mean,
        "variance": variance,
        "kept": count,
    }
    if rounded is not None:
        figures |= {"signal": math.sqrt(squares), "noise": math.sqrt(noise), "vanished": vanished}
    return figures | _range(x.to(torch.float32), amax, cast)


def _count_figures(x: Tensor, cast: TensorCast) -> Figures:
    """Returns the figures of any values, in few kernels and without reading any; large tensors are processed in
    pieces."""
    rounded = None if cast.left is None else as_rows(cast.left)
    rows = max(1, _PIECE // x.shape[1])
    places = [slice(top, top + rows) for top in range(0, len(x), rows)]
    parts = [_piece(x[place], None if rounded is None else rounded[place]) for place in places]
    return (parts[0] if len(parts) == 1 else _merge_pieces(parts)) | _range(x, None, cast)


def _piece(x: Tensor, rounded: Tensor | None) -> Figures:
    values = x.to(torch.float64 if reads_at_once(x) else torch.float32)
    # The difference with itself is 0 for finite values, and NaN for all others.
    finite = values - values == 0
    values = torch.where(finite, values, 0.0)
    magnitudes = values.abs()
    nonzero, both_finite = magnitudes > 0, finite
    variance, mean = torch.var_mean(values, correction=0)
    figures: Figures = {
        "count": x.numel(),
        "finite": finite.sum(),
        "nonzero": nonzero.sum(),
        "amax": magnitudes.amax(),
        "smallest": torch.where(nonzero, magnitudes, math.inf).amin(),
        "mean": mean,
        "variance": variance,
    }
    if rounded is not None:
        rounded = rounded.to(values.dtype)
        both_finite = finite & (rounded - rounded == 0)
        figures |= {
            "signal": torch.linalg.vector_norm(torch.where(both_finite, values, 0.0)),
            "noise": torch.linalg.vector_norm(torch.where(both_finite, rounded - values, 0.0)),
            "vanished": (nonzero & (rounded == 0)).sum(),
        }
    return figures | {"kept": both_finite.sum()}


def _merge_pieces(parts: Sequence[Figures]) -> Figures:
    stacked: dict[str, Tensor] = {}
    for name in parts[0].keys() - {"count"}:
        stacked[name] = torch.stack([torch.as_tensor(part[name]) for part in parts])
    counts = [float(part["count"]) for part in parts]
    shares = torch.tensor(counts, dtype=torch.float64, device=stacked["mean"].device) / sum(counts)
    mean = (shares * stacked["mean"]).sum()
    merged: Figures = {"count": sum(counts), "mean": mean}
    merged["variance"] = (shares * (stacked["variance"] + (stacked["mean"] - mean).square())).sum()
    combine = {
        "amax": torch.amax,
        "smallest": torch.amin,
        "signal": torch.linalg.vector_norm,
        "noise": torch.linalg.vector_norm,
    }
    return {name: combine.get(name, torch.sum)(value) for name, value in stacked.items()} | merged


def _range(x: Tensor, amax: float | None, cast: TensorCast) -> Figures:
    """Returns how much of a format's range the values use. `amax` is their largest magnitude, if all are known to be
    finite."""
    if cast.fmt is None:
        return {}
    figures: Figures = {"largest": cast.fmt.largest}
    if cast.scaling is not None and cast.scaling.rows:
        return figures | _blocks(x, cast.fmt, cast.scaling, amax is not None)
    limit: Number = cast.fmt.largest * _SLACK
    if cast.scale is not None:
        limit = limit / (cast.scale if amax is None else float(cast.scale))
        figures["scale"] = cast.scale
    elif cast.scaling is not None:  # the tensor's own scale: 1 if it is not finite, otherwise nothing saturates
        figures["own_scale"] = float(cast.scaling.rounding is ScaleRounding.POWER_OF_TWO)
        limit = limit if amax is None else math.inf
    return figures | {"saturated": 0 if amax is not None and amax <= limit else _beyond(x.abs(), limit)}


def _blocks(x: Tensor, fmt: Format, scaling: Scaling, waits: bool) -> Figures:
    """Like `_range`, for many scales, skipping those of blocks of zeros and those that round everything to zero."""
    blocks = blocks_of(x.to(torch.float32).abs(), fmt, scaling)
    steps = blocks.steps.to(torch.float64)
    sound = (steps > 0) & (steps < math.inf)
    used = sound & (blocks.peaks > 0)
    fullest = torch.where(sound & (blocks.peaks < math.inf), blocks.peaks / steps, 0.0).amax() / fmt.largest
    saturated: Number = 0
    if not waits or float(fullest) > _SLACK:
        saturated = _beyond(blocks.magnitudes, torch.where(sound, steps * (fmt.largest * _SLACK), math.inf))
    return {
        "fullest": fullest,
        "saturated": saturated,
        "octaves": torch.where(used, -steps.log2(), 0.0).sum() / used.sum(),  # the mean exponent
        "largest_step": torch.where(used, steps, 0.0).amax(),
        "least_step": torch.where(used, steps, math.inf).amin(),
    }


def _beyond(magnitudes: Tensor, limits: Number) -> Tensor:
    return ((magnitudes > limits) & (magnitudes < math.inf)).sum()


def _ones(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).clamp(max=1)


def _number(bits: int, shift: int) -> float:
    value: float = struct.unpack("=f", struct.pack("=i", bits << shift))[0]
    return value


def read(figures: Sequence[Figures]) -> list[dict[str, float]]:
    """Returns figures as numbers. This is the only place that waits for a device."""
    waiting = [value for value in chain.from_iterable(map(dict.values, figures)) if isinstance(value, Tensor)]
    if waiting and waiting[0].device.type != "cpu":
        numbers = iter(torch.stack([value.to(torch.float64) for value in waiting]).tolist())
    else:
        numbers = map(Tensor.item, waiting)
    return [{name: _next_number(value, numbers) for name, value in figure.items()} for figure in figures]


def _next_number(value: Number, numbers: Iterator[float]) -> float:
    return next(numbers) if isinstance(value, Tensor) else value


def reading_of(
    arm: str, seed: int, step: int, layer: str, role: str, figures: Mapping[str, float], scale_before: float | None
) -> LayerReading:
    """Makes a line of the stream from figures that were read; `scale_before` is that of the previous reading."""
    count = figures.get("count", 0)
    if not count:
        return LayerReading(arm, seed, step, layer, role, 0.0, 0.0, 0.0, 0.0, 0.0)
    amax, finite = figures["amax"], figures["finite"]
    mean, deviation = _moments(figures)
    scale = _scale(figures)
    ratio = scale / scale_before if scale_before else 0.0
    drift = abs(math.log2(ratio)) if 0 < ratio < math.inf else None
    in_blocks = bool(figures.get("largest_step"))
    by_own_scale = "own_scale" in figures and finite == count  # with which nothing saturates
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
        1 / figures["largest_step"] if in_blocks else scale,
        1 / figures["least_step"] if in_blocks else scale,
        _lag(figures.get("fullest", amax * scale / figures.get("largest", math.inf))),
        drift,
        figures.get("vanished", 0) / count,
        0.0 if by_own_scale else figures.get("saturated", 0) / count,
        _signal_to_noise(figures),
        (count - figures["kept"]) / count,
    )


def _moments(figures: Mapping[str, float]) -> tuple[float, float]:
    """Returns the moments of the finite values; those in `figures` are of all, with the others taken as 0. NaN without
    any."""
    count, finite = figures["count"], figures["finite"]
    if not finite or figures["variance"] == math.inf:  # the squares are beyond float32
        return math.nan, math.nan
    mean = figures["mean"] * count / finite
    if finite == count:
        return mean, math.sqrt(figures["variance"])
    return mean, math.sqrt(max(0.0, (figures["variance"] + figures["mean"] ** 2) * count / finite - mean**2))


def _scale(figures: Mapping[str, float]) -> float:
    """Returns what values were multiplied by: the geometric mean of many scales, 1 without any."""
    if "own_scale" in figures and figures["finite"] == figures["count"]:
        rounding = ScaleRounding.POWER_OF_TWO if figures["own_scale"] else ScaleRounding.EXACT
        return float(float_factor(torch.tensor(figures["amax"]), _LARGEST[figures["largest"]], rounding))
    octaves = figures.get("octaves", math.nan)
    return figures.get("scale", 2.0**octaves if math.isfinite(octaves) else 1.0)


def _lag(fullest: float) -> float | None:
    if not 0 < fullest < math.inf:
        return None
    return 0.0 if 1 < fullest <= _SLACK else math.log2(fullest)


def _signal_to_noise(figures: Mapping[str, float]) -> float | None:
    if not 0 < figures.get("signal", 0.0) < math.inf:
        return None
    return min(2 * decibels(figures["signal"], figures["noise"]), EXACT_DB)  # of norms, not of their squares


# Scores are computed for this many queries at a time: all scores of a long context would not fit into memory.
_QUERIES = 256
_KIB = 1024


def attention_score(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Returns the largest q k / sqrt(head width) that enters softmax, in the first sequence. Queries may share keys."""
    queries, keys = (tensor[0].detach().to(torch.float32) for tensor in (q, k))
    if len(keys) != len(queries):
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    largest = torch.zeros((), device=q.device)
    for start in range(0, q.shape[2], _QUERIES):
        scores = queries[:, start : start + _QUERIES] @ keys.transpose(-1, -2)
        # Masked scores become 0.
        largest = torch.maximum(largest, largest_magnitude(scores.tril_(start) if causal else scores))
    return largest / math.sqrt(q.shape[-1])


def embedding_spread(weight: Tensor) -> Tensor:
    """Returns the root mean square distance of rows from their mean: 0 if all tokens have the same vector."""
    rows = weight.detach().to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(rows - rows.mean(0))
    return norm / math.sqrt(max(len(rows), 1))


def largest_row(weight: Tensor) -> Tensor:
    """Returns the norm of the largest row of an embedding over that of the median row."""
    norms: Tensor = torch.linalg.vector_norm(weight.detach().to(torch.float32), dim=-1)
    return norms.amax() / norms.median().clamp(min=1e-30)


def batch_norm_drift(x: Tensor, mean: Tensor, channels_last: bool) -> Tensor:
    """Returns how many of the batch's standard deviations a running mean is off, as the root mean square over channels.
    `channels_last`: channels are in the last dimension instead of the second, as in torch's layers."""
    channels = x.detach().to(torch.float32).transpose(0, -1 if channels_last else 1).flatten(1)
    deviation, batch = torch.std_mean(channels, 1, correction=0)
    return ((mean - batch) / deviation).square().mean().sqrt()


def running_mean(module: nn.Module) -> Tensor | None:
    mean: Any = getattr(module, "running_mean", None)
    return mean if isinstance(mean, Tensor) and module.training else None


def begin_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def bytes_in_use(device: torch.device) -> int:
    """Returns the peak of tensors on a GPU since `begin_peak`; on a CPU the peak of the process since its start."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
