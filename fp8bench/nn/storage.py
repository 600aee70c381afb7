"""Stores the weights of served models, and the keys and values of their caches, in number formats.

It also draws random weights and cached values. It draws them in pieces, because an fp32 copy of all of them may not
fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8bench.formats.blocks import block_elements, nvfp4_tensor_scale
from fp8bench.formats.codes import decode, encode, pack_codes, unpack_codes
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.recipes import count_blocks
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.linear import choose_cast_marker
from fp8bench.nn.served import KV_FORMATS, WEIGHT_FORMATS, StorageFormat, WeightShapes, make_int4_storage_format
from fp8bench.protocols import Arithmetic, Phases, Role

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class BlockEncoder:
    """Encodes and decodes rows of numbers in the blocks of MX or NVFP4. An encoded row consists of packed 4-bit codes
    and the scales of its blocks. In NVFP4, `tensor_scale` is one more scale for the whole tensor.
    """

    def __init__(self, number_format: StorageFormat, tensor_scale: Tensor | None = None) -> None:
        # An integer `scale_sharing` is the number of elements in a block.
        assert isinstance(number_format.scale_sharing, int) and number_format.scaling is not None
        self.block = number_format.scale_sharing
        self.scaling = number_format.scaling
        self.tensor_scale = tensor_scale

    def encode_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        columns = x.shape[-1]
        padded_rows = F.pad(x.to(torch.float32), (0, -columns % self.block))
        blocks = padded_rows.reshape(-1, self.block)
        (block_values,), scales, _ = block_elements([blocks], E2M1, self.scaling, self.tensor_scale)
        elements = block_values.view(padded_rows.shape)[..., :columns]
        codes = pack_codes(encode(elements.contiguous(), E2M1), E2M1)
        assert self.scaling.scale is not None
        return codes, encode(scales, self.scaling.scale).view(*x.shape[:-1], -1)

    def decode_rows(self, codes: Tensor, scales: Tensor, columns: int) -> Tensor:
        assert self.scaling.scale is not None
        elements = decode(unpack_codes(codes, E2M1, columns).contiguous(), E2M1)
        decoded_scales = decode(scales.contiguous(), self.scaling.scale)
        values = elements * decoded_scales.repeat_interleave(self.block, -1)[..., :columns]
        return values if self.tensor_scale is None else values * self.tensor_scale


def _find_row_magnitudes(x: Tensor) -> Tensor:
    """Returns the largest magnitude of each row, or a small number for a row of zeros, so that one can divide by the
    result.
    """
    return x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100)


def _compute_scale(amax: Tensor) -> Tensor:
    """Returns the scale that maps the largest magnitude to the largest E4M3 number. The scale is 1 for zeros: some
    heads of a prompt have only zeros.
    """
    return torch.where(amax == 0, 1.0, E4M3.largest / amax)


class CachedHeads:
    """The cached keys or the cached values of one layer: (batch, key heads, positions, head width) in a format.

    `calibrate` computes the scales that hold for the whole cache: one for the tensor or one for each head, as the
    format requires. They do not change afterwards, so larger values saturate. Scales of tokens and of blocks are
    computed for each token and stored with it.

    If `dynamic_cache_tensor` is set, the cache is dynamic instead of static. Each `write` then makes a new
    `dynamic_cache_tensor`: all previous positions, which it copies from `codes`, and the new ones. It does not change
    `codes`.
    """

    dynamic_cache_tensor: Tensor | None = None

    def __init__(self, name: str, shape: tuple[int, int, int, int], carrier: torch.dtype, device: str) -> None:
        self.number_format = KV_FORMATS.get(name, StorageFormat(64))  # only the exact model uses fp64
        self.carrier = carrier
        self.width = shape[-1]
        self.scale: Tensor | None = None
        self.scales: Tensor | None = None
        self.blocks = (
            BlockEncoder(self.number_format)
            if isinstance(self.number_format.scale_sharing, int) and self.number_format.scale_sharing
            else None
        )
        # Two 4-bit codes share a byte. Any other format has its own dtype.
        columns = self.width
        dtype = DTYPES.get(name, torch.float8_e4m3fn)
        if self.blocks is not None:
            columns = count_blocks(self.width, 2)
            dtype = torch.uint8
            self.scales = torch.zeros(
                *shape[:3], count_blocks(self.width, self.blocks.block), dtype=dtype, device=device
            )
        self.codes = torch.zeros(*shape[:3], columns, dtype=dtype, device=device)
        # Row scales start at 1, so that positions without a token decode to zero.
        if self.number_format.scale_sharing == "row":
            self.scales = torch.ones(*shape[:3], 1, device=device)

    def calibrate(self, x: Tensor) -> None:
        if self.number_format.scale_sharing == "all":
            self.scale = _compute_scale(largest_magnitude(x)).view(1, 1, 1, 1)
        elif self.number_format.scale_sharing == "head":
            self.scale = _compute_scale(x.float().abs().amax((0, 2, 3))).view(1, -1, 1, 1)
        elif self.blocks is not None and self.number_format.tensor_scale_bytes:
            self.blocks.tensor_scale = nvfp4_tensor_scale(largest_magnitude(x))

    def write(self, x: Tensor, at: int) -> None:
        positions = slice(at, at + x.shape[2])
        if self.dynamic_cache_tensor is not None:
            # Each step starts from the same `codes`, and not from the tensor of the previous step.
            self.dynamic_cache_tensor = torch.cat((self.codes[:, :, :at], x), 2)
        elif self.blocks is not None:
            assert self.scales is not None
            self.codes[:, :, positions], self.scales[:, :, positions] = self.blocks.encode_rows(x)
        # A cache in fp32, bf16 or fp64 stores values directly. In FP8 they are scaled, saturated and cast.
        elif self.number_format.fmt is None:
            self.codes[:, :, positions] = x
        else:
            scale = self.scale
            if self.number_format.scale_sharing == "row":
                assert self.scales is not None
                scale = E4M3.largest / _find_row_magnitudes(x)
                self.scales[:, :, positions] = scale.reciprocal()
            scaled_values = x.float() if scale is None else x.float() * scale
            self.codes[:, :, positions] = scaled_values.clamp(-E4M3.largest, E4M3.largest).to(self.codes.dtype)

    def read(self, end: int) -> Tensor:
        """Returns the first `end` positions in the model's dtype (the carrier), without a copy if they are stored in
        it.
        """
        codes = self.codes[:, :, :end] if self.dynamic_cache_tensor is None else self.dynamic_cache_tensor
        if self.blocks is not None:
            assert self.scales is not None
            return self.blocks.decode_rows(codes, self.scales[:, :, :end], self.width).to(self.carrier)
        if self.scales is not None:
            return (codes.float() * self.scales[:, :, :end]).to(self.carrier)
        return codes.to(self.carrier) if self.scale is None else (codes.float() / self.scale).to(self.carrier)

    @property
    def needs_decoding(self) -> bool:
        return self.codes.dtype is not self.carrier

    def count_bytes(self, end: int) -> int:
        total_bytes = self.codes[:, :, :end].nbytes
        if self.scales is not None:
            total_bytes += self.scales[:, :, :end].nbytes
        outer_scale = self.scale if self.blocks is None else self.blocks.tensor_scale
        return total_bytes if outer_scale is None else total_bytes + outer_scale.nbytes


class PrecastWeight:
    """A weight that is cast once by `arithmetic`, which defines how a precision casts and multiplies. Inputs are cast
    in each step.
    """

    def __init__(self, weight: Tensor, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.operand = arithmetic.cast(weight, Role.WEIGHT)

    def multiply(self, x: Tensor, phase: Phases) -> Tensor:
        arithmetic = self.arithmetic
        # If the inputs already have the dtype of a plain arithmetic, as usual, no cast is timed.
        with (
            nullcontext()
            if arithmetic.plain and x.dtype is arithmetic.carrier
            else choose_cast_marker(arithmetic, phase)
        ):
            operand = arithmetic.cast(x.to(arithmetic.carrier), Role.INPUT)
        with phase.gemm:
            return arithmetic.product(operand, self.operand, arithmetic.carrier).to(x.dtype)

    def tensors(self) -> list[Tensor]:
        return self.operand.tensors

    def restore(self) -> Tensor:
        return self.arithmetic.restore(self.operand, torch.float32)


class IntegerWeight:
    """An int8 weight with a bf16 scale for each row, or an int4 weight with a scale and a zero point for each group.
    The scale is rounded to bf16 first, and the codes are computed with the rounded scale. With `low_inputs`, inputs are
    also rounded, to int8.
    """

    def __init__(self, weight: Tensor, name: str, low_inputs: bool) -> None:
        outputs, inputs = weight.shape
        self.name = name
        self.low_inputs = low_inputs
        # The number of consecutive columns that share a scale.
        self.group = inputs if name == "int8" else int(make_int4_storage_format(inputs).scale_sharing)
        largest = 127 if name == "int8" else 7
        groups = weight.float().view(outputs, -1, self.group)
        # A group of zeros gets a small scale, because its values are divided by the scale.
        self.scales = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=2.0**-100).to(torch.bfloat16)
        rounded_codes = (groups / self.scales.float()).round().clamp(-largest - 1, largest).view(outputs, inputs)
        if name == "int8":
            self.codes = rounded_codes.to(torch.int8)
        else:  # torch's kernel requires unsigned codes, in which 8 is zero
            codes = (rounded_codes + 8).to(torch.int32)
            self.codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
            self.zeros = torch.zeros_like(self.scales)
        # The weight in the form that torch's CPU kernel takes, or () if it takes only other formats or shapes.
        self.native: tuple[Tensor, ...] = ()
        if name == "int8" and weight.device.type == "cpu":
            self.native = self.codes, self.scales.view(-1)
        elif weight.device.type == "cpu" and outputs % 16 == 0:
            scales_and_zeros = torch.cat((self.scales, self.zeros), -1).transpose(0, 1).contiguous()
            self.native = torch._convert_weight_to_int4pack_for_cpu(codes, 1), scales_and_zeros

    def multiply(self, x: Tensor, phase: Phases) -> Tensor:
        # torch's CPU kernels decode weights while they multiply. On other devices the weights are decoded first.
        if self.native and x.dtype is torch.bfloat16 and not self.low_inputs:
            with phase.gemm:
                if self.name == "int8":
                    return torch._weight_int8pack_mm(x, *self.native)
                packed, scales_and_zeros = self.native
                return torch._weight_int4pack_mm_for_cpu(x, packed, self.group, scales_and_zeros)
        with phase.cast:
            weight = self.restore().to(x.dtype)
            inputs = x
            # W8A8 and W4A8 round activations to int8 with a scale for each token.
            if self.low_inputs:
                scale = _find_row_magnitudes(x) / 127
                inputs = ((x.float() / scale).round() * scale).to(x.dtype)
        with phase.gemm:
            return F.linear(inputs, weight)

    def restore(self) -> Tensor:
        codes = self.codes.float()
        if self.name == "int4":
            int4_code_pairs = torch.stack((self.codes.bitwise_and(15), self.codes.bitwise_right_shift(4)), -1)
            codes = int4_code_pairs.flatten(1).float() - 8
        return (codes.view(len(codes), -1, self.group) * self.scales.float()).view(codes.shape)

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales, *([self.zeros] if self.name == "int4" else [])]


class DecodedFloatWeight:
    """A weight in fp8 with a scale for each row, MXFP4 or NVFP4. It is decoded before each product: the results are
    right, but the speed is not that of the format. With `low_inputs`, inputs are rounded to the same format.
    """

    def __init__(self, weight: Tensor, name: str, low_inputs: bool) -> None:
        self.number_format = WEIGHT_FORMATS[name]
        self.low_inputs = low_inputs
        self.columns = weight.shape[1]
        self.parts = self._encode_matrix(weight)

    def multiply(self, x: Tensor, phase: Phases) -> Tensor:
        with phase.cast:
            weight = self._decode_matrix(self.parts).to(x.dtype)
            inputs = self._decode_matrix(self._encode_matrix(x)).to(x.dtype) if self.low_inputs else x
        with phase.gemm:
            return F.linear(inputs, weight)

    def restore(self) -> Tensor:
        return self._decode_matrix(self.parts)

    def _encode_matrix(self, matrix: Tensor) -> list[Tensor]:
        if self.number_format.fmt is E4M3:
            scale = _find_row_magnitudes(matrix) / E4M3.largest
            codes = (matrix.float() / scale).clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
            return [codes, scale]
        if not self.number_format.tensor_scale_bytes:
            return [*BlockEncoder(self.number_format).encode_rows(matrix)]
        tensor_scale = nvfp4_tensor_scale(largest_magnitude(matrix))
        return [*BlockEncoder(self.number_format, tensor_scale).encode_rows(matrix), tensor_scale]

    def _decode_matrix(self, parts: list[Tensor]) -> Tensor:
        codes, scales, *tensor_scale = parts
        if self.number_format.fmt is E4M3:
            return codes.float() * scales
        return BlockEncoder(self.number_format, *tensor_scale).decode_rows(codes, scales, self.columns)

    def tensors(self) -> list[Tensor]:
        return self.parts


# A layer's stored weight. `multiply` multiplies inputs (tokens, features) in the carrier by it.
StoredWeight = PrecastWeight | IntegerWeight | DecodedFloatWeight


def store_weight(weight: Tensor, name: str, low_inputs: bool) -> StoredWeight:
    return (IntegerWeight if name in ("int8", "int4") else DecodedFloatWeight)(weight.contiguous(), name, low_inputs)


def draw_cached_values(
    shape: tuple[int, ...], generator: torch.Generator, are_keys: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yields random keys or values (batch, heads, positions, width) in pieces, so that no fp32 copy of the whole
    cache is needed. Each piece comes with its first position.

    The numbers resemble those of a trained model: in keys, every 16th channel is four times larger.
    """
    *leading_sides, positions, width = shape
    positions_per_draw = min(positions, 4096)
    # range needs a positive step, even without positions.
    for begin_position in range(0, positions, positions_per_draw or 1):
        values = torch.randn(*leading_sides, positions_per_draw, width, generator=generator, device=generator.device)
        if are_keys:
            values[..., ::16] *= 4
        yield begin_position, values[:, :, : positions - begin_position]


def draw_weights(shapes: WeightShapes, seed: int, device: str) -> Callable[[str], Tensor]:
    """Returns a function that takes a weight's name and draws the random fp32 weight. So the whole model need not fit
    into memory in fp32.
    """
    # Each weight has its own generator. So its numbers do not depend on which weights were drawn before.
    index_by_weight_name = {name: place for place, name in enumerate(shapes)}

    def weight(name: str) -> Tensor:
        shape, deviation = shapes[name]
        if not deviation:
            return torch.ones(shape, device=device)
        # The factor is larger than the number of weights, so no two seeds share a generator.
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + index_by_weight_name[name])
        return torch.randn(shape, generator=generator, device=device).mul_(deviation)

    return weight
