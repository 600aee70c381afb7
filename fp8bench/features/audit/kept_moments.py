"""What is left of a moment between two steps, by the word that says how it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from fp8bench.features.audit.data import rounded
from fp8bench.features.audit.subjects import promised_by
from fp8bench.features.audit.values import FlatMoments
from fp8bench.formats.grids import E4M3, E5M2, FP16
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import Treatment
from fp8bench.formats.scalings import ROUNDINGS, ScaleRounding
from fp8bench.model import DeviceFacts
from fp8bench.nn.moments import scaled

Cast = Callable[[Tensor], Tensor]
_FLOATS = {"e4m3": E4M3, "e5m2": E5M2}
# The smallest scale that 8-bit optimizers divide by.
_LEAST_SCALE = 1e-12
_SCALE_BYTES = 4


def same(x: Tensor) -> Tensor:
    """Kept as it is."""
    return x


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest."""
    return x.to(dtype).to(torch.float64)


def half(rounding: ScaleRounding = ScaleRounding.EXACT) -> Cast:
    """float16 under one scale a tensor."""
    storage = scaled(FP16, rounding)
    return lambda x: storage.restore(storage.keep(x.to(torch.float32))).to(torch.float64)


def kept(word: str, facts: DeviceFacts, signed: bool = True) -> tuple[Cast, float]:
    """The values that are left, and the bytes that one takes; of the second moment not `signed`."""
    flat = FlatMoments.of(word)
    if flat is not None:
        fmt = _FLOATS.get(flat.codes)
        bits = 4 if flat.codes == "dynamic4" else 8
        known = _linear(signed) if flat.codes == "linear8" else dynamic_map(bits, signed)
        round_one = partial(_float_codes, treatment=Treatment(fmt)) if fmt else partial(_mapped, known=known)
        return partial(_flat, block=flat.block, largest=fmt.largest if fmt else 1.0, codes=round_one), (
            bits / 8 + _SCALE_BYTES / flat.block
        )
    if word in ("fp32", "bf16"):
        dtype = torch.float32 if word == "fp32" else torch.bfloat16
        return partial(as_dtype, dtype=dtype), dtype.itemsize
    if word == "fp16":
        return half(), torch.float16.itemsize
    treatment = promised_by(word, facts).treatments[1]  # a moment lies as its weight does
    assert treatment is not None
    return partial(_recipe, treatment=treatment), treatment.fmt.bits / 8


def otherwise_scaled(word: str, facts: DeviceFacts) -> Iterator[tuple[Cast, str]]:
    """A precision's casts under scales that are rounded in another way, and how."""
    treatment = None if FlatMoments.of(word) else promised_by(word, facts).treatments[1]
    if treatment is None or treatment.scaling is None:
        return
    for rounding in ROUNDINGS[treatment.scaling.scale]:
        if rounding is not treatment.scaling.rounding:
            other = replace(treatment, scaling=replace(treatment.scaling, rounding=rounding))
            yield partial(_recipe, treatment=other), rounding.value


def _recipe(x: Tensor, treatment: Treatment) -> Tensor:
    return rounded(x.to(torch.float32), treatment).values.to(torch.float64)


def _flat(x: Tensor, block: int, largest: float, codes: Cast) -> Tensor:
    """Under a scale for each run of the tensor; the last one may be short."""
    line = x.to(torch.float32).flatten()
    runs = torch.nn.functional.pad(line, (0, -len(line) % block)).view(-1, block)
    scales = runs.abs().amax(1, keepdim=True).clamp(min=_LEAST_SCALE) / largest
    return (codes(runs / scales) * scales).flatten()[: len(line)].view(x.shape).to(torch.float64)


def _float_codes(x: Tensor, treatment: Treatment) -> Tensor:
    return values(x, treatment.fmt)


def _mapped(x: Tensor, known: Tensor) -> Tensor:
    """The nearest value of the map; halfway between two the upper one."""
    return known[torch.bucketize(x, (known[1:] + known[:-1]) / 2, right=True)]


@cache
def dynamic_map(bits: int, both: bool) -> Tensor:
    """The values of Dettmers's dynamic data type, with negative ones or not: powers of ten, and within one of them
    as many equal steps as the bits leave that its exponent does not take. Without a sign four bits are sixteen equal
    steps, and none of them is zero (torchao's 4-bit optimizers)."""
    if bits == 4 and not both:
        return torch.linspace(0, 1, 17)[1:]
    octaves = bits - 1
    found = [0.0, 1.0]
    for place in range(octaves):
        steps = 2 ** (place + (not both))
        edges = torch.linspace(0.1, 1, steps + 1)
        middles = (10.0 ** (place - octaves + 1) * ((edges[1:] + edges[:-1]) / 2)).tolist()
        found += [*middles, *(-one for one in middles if both)]
    return torch.tensor(sorted(found))


def _linear(both: bool) -> Tensor:
    """Equal steps of eight bits."""
    return torch.arange(-127, 128) / 127 if both else torch.arange(256) / 255
