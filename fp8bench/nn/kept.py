"""Weights of served models, and the keys and values of their caches, stored in a format.

Random weights and cached values are drawn here too, piece by piece, since no whole fp32 copy need fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8bench.formats.blocks import block_elements, nvfp4_tensor_scale
from fp8bench.formats.codes import decode, encode, pack, unpack
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.linear import cast_marker
from fp8bench.nn.served import KV_FORMATS, WEIGHT_FORMATS, KeptFormat, Shapes, int4_format
from fp8bench.protocols import Arithmetic, Phases, Role

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class BlockCodes:
    """Encodes rows of numbers in MX's or NVFP4's blocks: packed codes and block scales; `above` is a tensor's scale."""

    def __init__(self, number_format: KeptFormat, above: Tensor | None = None) -> None:
        assert isinstance(number_format.shared, int) and number_format.scaling is not None
        self.block = number_format.shared
        self.scaling = number_format.scaling
        self.above = above

    def encode_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        columns = x.shape[-1]
        filled = F.pad(x.to(torch.float32), (0, -columns % self.block))
        (elements,), scales, _ = block_elements([filled.reshape(-1, self.block)], E2M1, self.scaling, self.above)
        codes = pack(encode(elements.view(filled.shape)[..., :columns].contiguous(), E2M1, checked=False), E2M1)
        assert self.scaling.scale is not None
        return codes, encode(scales, self.scaling.scale, checked=False).view(*x.shape[:-1], -1)

    def decode_rows(self, codes: Tensor, scales: Tensor, columns: int) -> Tensor:
        assert self.scaling.scale is not None
        elements = decode(unpack(codes, E2M1, columns).contiguous(), E2M1, checked=False)
        wide = decode(scales.contiguous(), self.scaling.scale, checked=False)
        values = elements * wide.repeat_interleave(self.block, -1)[..., :columns]
        return values if self.above is None else values * self.above


def _scale_for(amax: Tensor) -> Tensor:
    """1 for a prompt of zeros, as some heads are."""
    return torch.where(amax == 0, 1.0, E4M3.largest / amax)


class KeptHeads:
    """The keys of one layer, or its values: (batch, key heads, positions, head width), in a format.

    `calibrate` finds the scales of tensors and heads, and the one above NVFP4's blocks; they stay, and larger values
    saturate later. Scales of tokens and blocks come with each token. With `grown` set the cache is not static: each
    `put` concatenates the new positions to a copy of all before, as a cache does that begins empty.
    """

    grown: Tensor | None = None

    def __init__(self, name: str, shape: tuple[int, int, int, int], carrier: torch.dtype, device: str) -> None:
        plain = DTYPES.get(name)
        self.kept = KV_FORMATS.get(name, KeptFormat(64))
        self.carrier = carrier
        self.width = shape[-1]
        self.scale: Tensor | None = None
        self.scales: Tensor | None = None
        self.blocks = BlockCodes(self.kept) if isinstance(self.kept.shared, int) and self.kept.shared else None
        # Two codes of half a byte share a byte; any other format has its dtype.
        columns = self.width
        dtype = plain or torch.float8_e4m3fn
        if self.blocks is not None:
            columns = -(-self.width // 2)
            dtype = torch.uint8
            self.scales = torch.zeros(*shape[:3], -(-self.width // self.blocks.block), dtype=dtype, device=device)
        self.codes = torch.zeros(*shape[:3], columns, dtype=torch.uint8, device=device)
        if dtype is not torch.uint8:
            self.codes = torch.zeros(shape, dtype=dtype, device=device)
        # Scales of rows begin at 1, so that empty places decode to zero.
        if self.kept.shared == "row":
            self.scales = torch.ones(*shape[:3], 1, device=device)

    def calibrate(self, x: Tensor) -> None:
        if self.kept.shared == "all":
            self.scale = _scale_for(largest_magnitude(x)).view(1, 1, 1, 1)
        elif self.kept.shared == "head":
            self.scale = _scale_for(x.float().abs().amax((0, 2, 3))).view(1, -1, 1, 1)
        elif self.blocks is not None and self.kept.above:
            self.blocks.above = nvfp4_tensor_scale(largest_magnitude(x))

    def put(self, x: Tensor, at: int) -> None:
        place = slice(at, at + x.shape[2])
        if self.grown is not None:
            self.grown = torch.cat((self.codes[:, :, :at], x), 2)
        elif self.blocks is not None:
            assert self.scales is not None
            self.codes[:, :, place], self.scales[:, :, place] = self.blocks.encode_rows(x)
        # A carrier needs no code, everything else is scaled, cut off at the largest code and cast.
        elif self.kept.fmt is None:
            self.codes[:, :, place] = x
        else:
            scale = self.scale
            if self.kept.shared == "row":
                assert self.scales is not None
                # A row of zeros would divide by zero: its scale stops at a bound instead.
                scale = E4M3.largest / x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
                self.scales[:, :, place] = scale.reciprocal()
            wide = x.float() if scale is None else x.float() * scale
            self.codes[:, :, place] = wide.clamp(-E4M3.largest, E4M3.largest).to(self.codes.dtype)

    def read(self, end: int) -> Tensor:
        """The first `end` positions in the carrier; no copy if that is the format."""
        codes = self.codes[:, :, :end] if self.grown is None else self.grown
        if self.blocks is not None:
            assert self.scales is not None
            return self.blocks.decode_rows(codes, self.scales[:, :, :end], self.width).to(self.carrier)
        if self.scales is not None:
            return (codes.float() * self.scales[:, :, :end]).to(self.carrier)
        return codes.to(self.carrier) if self.scale is None else (codes.float() / self.scale).to(self.carrier)

    @property
    def restores(self) -> bool:
        return self.codes.dtype is not self.carrier

    def bytes(self, end: int) -> int:
        total = self.codes[:, :, :end].nbytes
        if self.scales is not None:
            total += self.scales[:, :, :end].nbytes
        above = self.scale if self.blocks is None else self.blocks.above
        return total if above is None else total + above.nbytes


class OwnWeight:
    """The weight as an arithmetic casts it, once; inputs are cast in each step."""

    def __init__(self, weight: Tensor, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.operand = arithmetic.cast(weight, Role.WEIGHT)

    def times(self, x: Tensor, phase: Phases) -> Tensor:
        arithmetic = self.arithmetic
        # A plain arithmetic's values are in the carrier already, without a cast to time.
        with nullcontext() if arithmetic.plain and x.dtype is arithmetic.carrier else cast_marker(arithmetic, phase):
            operand = arithmetic.cast(x.to(arithmetic.carrier), Role.INPUT)
        with phase.gemm:
            return arithmetic.product(operand, self.operand, arithmetic.carrier).to(x.dtype)

    def tensors(self) -> list[Tensor]:
        return self.operand.tensors

    def restore(self) -> Tensor:
        return self.arithmetic.restore(self.operand, torch.float32)


class IntegerWeight:
    """int8 with a bf16 scale a row, or int4 with a scale and a zero a group. Codes are made with the rounded scale."""

    def __init__(self, weight: Tensor, name: str, low_inputs: bool) -> None:
        outputs, inputs = weight.shape
        self.name = name
        self.low_inputs = low_inputs
        self.group = inputs if name == "int8" else int(int4_format(inputs).shared)
        largest = 127 if name == "int8" else 7
        groups = weight.float().view(outputs, -1, self.group)
        self.scales = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=2.0**-100).to(torch.bfloat16)
        rounded = (groups / self.scales.float()).round().clamp(-largest - 1, largest).view(outputs, inputs)
        if name == "int8":
            self.codes = rounded.to(torch.int8)
        else:  # torch's kernel wants unsigned codes: 8 is zero
            codes = (rounded + 8).to(torch.int32)
            self.codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
            self.zeros = torch.zeros_like(self.scales)
        self.native: tuple[Tensor, ...] = ()
        if name == "int8" and weight.device.type == "cpu":
            self.native = self.codes, self.scales.view(-1)
        elif weight.device.type == "cpu" and outputs % 16 == 0:
            scales_and_zeros = torch.cat((self.scales, self.zeros), -1).transpose(0, 1).contiguous()
            self.native = torch._convert_weight_to_int4pack_for_cpu(codes, 1), scales_and_zeros

    def times(self, x: Tensor, phase: Phases) -> Tensor:
        # torch's kernels for CPUs restore weights while they multiply; other devices do it ahead.
        if self.native and x.dtype is torch.bfloat16 and not self.low_inputs:
            with phase.gemm:
                if self.name == "int8":
                    return torch._weight_int8pack_mm(x, *self.native)
                packed, scales_and_zeros = self.native
                return torch._weight_int4pack_mm_for_cpu(x, packed, self.group, scales_and_zeros)
        with phase.cast:
            weight = self.restore().to(x.dtype)
            inputs = x
            # W8A8 and W4A8 round activations to int8 with a scale a token.
            if self.low_inputs:
                scale = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 127
                inputs = ((x.float() / scale).round() * scale).to(x.dtype)
        with phase.gemm:
            return F.linear(inputs, weight)

    def restore(self) -> Tensor:
        codes = self.codes.float()
        if self.name == "int4":
            both = torch.stack((self.codes.bitwise_and(15), self.codes.bitwise_right_shift(4)), -1)
            codes = both.flatten(1).float() - 8
        return (codes.view(len(codes), -1, self.group) * self.scales.float()).view(codes.shape)

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales, *([self.zeros] if self.name == "int4" else [])]


class FloatWeight:
    """fp8 with a scale a row, MXFP4 or NVFP4, restored before each product: the numbers are right, not the speed."""

    def __init__(self, weight: Tensor, name: str, low_inputs: bool) -> None:
        self.kept = WEIGHT_FORMATS[name]
        self.low_inputs = low_inputs
        self.columns = weight.shape[1]
        self.parts = self._encode(weight)

    def times(self, x: Tensor, phase: Phases) -> Tensor:
        with phase.cast:
            weight = self._decode(self.parts).to(x.dtype)
            inputs = self._decode(self._encode(x)).to(x.dtype) if self.low_inputs else x
        with phase.gemm:
            return F.linear(inputs, weight)

    def restore(self) -> Tensor:
        return self._decode(self.parts)

    def _encode(self, matrix: Tensor) -> list[Tensor]:
        if self.kept.fmt is E4M3:
            scale = matrix.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / E4M3.largest
            codes = (matrix.float() / scale).clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
            return [codes, scale]
        above = [nvfp4_tensor_scale(largest_magnitude(matrix))] if self.kept.above else []
        return [*BlockCodes(self.kept, *above).encode_rows(matrix), *above]

    def _decode(self, parts: list[Tensor]) -> Tensor:
        codes, scales, *above = parts
        if self.kept.fmt is E4M3:
            return codes.float() * scales
        return BlockCodes(self.kept, *above).decode_rows(codes, scales, self.columns)

    def tensors(self) -> list[Tensor]:
        return self.parts


# A layer's weight in some format; `times` multiplies inputs (tokens, features) in the carrier by it.
KeptWeight = OwnWeight | IntegerWeight | FloatWeight


def kept_weight(weight: Tensor, name: str, low_inputs: bool) -> KeptWeight:
    return (IntegerWeight if name in ("int8", "int4") else FloatWeight)(weight.contiguous(), name, low_inputs)


def draw_cached_values(
    shape: tuple[int, ...], generator: torch.Generator, are_keys: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yields random keys or values of (batch, heads, positions, width) like a trained model's: keys of a few channels
    are four times larger. They come in pieces with their first positions, so that no whole fp32 copy need fit."""
    *ends, positions, width = shape
    piece = min(positions, 4096)
    for at in range(0, positions, piece or 1):
        values = torch.randn(*ends, piece, width, generator=generator, device=generator.device)
        if are_keys:
            values[..., ::16] *= 4
        yield at, values[:, :, : positions - at]


def draw_weights(shapes: Shapes, seed: int, device: str) -> Callable[[str], Tensor]:
    """Returns a function that draws a random fp32 weight on request: the whole fp32 model need not fit into memory."""
    # A generator for each weight, so that a weight does not depend on those drawn before it.
    places = {name: place for place, name in enumerate(shapes)}

    def weight(name: str) -> Tensor:
        shape, spread = shapes[name]
        if not spread:
            return torch.ones(shape, device=device)
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + places[name])
        return torch.randn(shape, generator=generator, device=device).mul_(spread)

    return weight
