"""A GPT for serving: weights kept in a format, a static cache of keys and values, tokens in, logits out.

Per block, with x the stream of new tokens at positions `at`, `at` + 1, ...:

    q, k, v  = split(W_qkv norm(x)),   q and k turned by their positions' angles where the model is Llama's
    cache[at : at + new] = kept(k), kept(v)
    x += W_out softmax(q K^T / sqrt(d)) V,     K and V as the cache returns them for positions 0 .. at + new - 1
    x += W_down f(W_up norm(x)),               or the same of the experts that each token is sent to

Norms are computed in fp32, all else in the carrier, unless `around` gives embedding, norms, stream or logits another
arithmetic, which then also holds the weights of embedding and norms. Every token reads all keys and values, its own
too, as the cache kept them: so a whole prompt gives what token by token gives. Grouped queries share a head of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8bench.formats.blocks import block_elements, nvfp4_tensor_scale
from fp8bench.formats.codes import decode, encode, pack, unpack
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import fused_attention, rotate, rotations
from fp8bench.nn.experts import routed
from fp8bench.nn.gpt import gelu, silu_gate
from fp8bench.nn.linear import cast_marker
from fp8bench.nn.served import KV_FORMATS, ROUTER, WEIGHT_FORMATS, KeptFormat, Shapes, int4_format, served_shapes
from fp8bench.nn.sizes import GPTConfig, feed_parts
from fp8bench.protocols import Arithmetic, Phases, Role

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class BlockCodes:
    """Encodes rows of numbers in MX's or NVFP4's blocks: packed codes and block scales; `above` is a tensor's scale."""

    def __init__(self, kept: KeptFormat, above: Tensor | None = None) -> None:
        assert isinstance(kept.shared, int) and kept.scaling is not None
        self.block, self.scaling, self.above = kept.shared, kept.scaling, above

    def encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        columns = x.shape[-1]
        filled = F.pad(x.to(torch.float32), (0, -columns % self.block))
        (elements,), scales, _ = block_elements([filled.reshape(-1, self.block)], E2M1, self.scaling, self.above)
        codes = pack(encode(elements.view(filled.shape)[..., :columns].contiguous(), E2M1, checked=False), E2M1)
        assert self.scaling.scale is not None
        return codes, encode(scales, self.scaling.scale, checked=False).view(*x.shape[:-1], -1)

    def decoded(self, codes: Tensor, scales: Tensor, columns: int) -> Tensor:
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
    saturate later. Scales of tokens and blocks come with each token. With `grown` set there is no static cache: each
    `put` concatenates the new positions to a copy of all before, as a cache does that begins empty.
    """

    grown: Tensor | None = None

    def __init__(self, name: str, shape: tuple[int, int, int, int], carrier: torch.dtype, device: str) -> None:
        plain = DTYPES.get(name)
        self.kept = KV_FORMATS.get(name, KeptFormat(64))
        self.carrier, self.width = carrier, shape[-1]
        self.scale: Tensor | None = None
        self.scales: Tensor | None = None
        self.blocks = BlockCodes(self.kept) if isinstance(self.kept.shared, int) and self.kept.shared else None
        columns, dtype = self.width, plain or torch.float8_e4m3fn
        if self.blocks is not None:
            columns, dtype = -(-self.width // 2), torch.uint8
            self.scales = torch.zeros(*shape[:3], -(-self.width // self.blocks.block), dtype=dtype, device=device)
        self.codes = torch.zeros(*shape[:3], columns, dtype=torch.uint8, device=device)
        if dtype is not torch.uint8:
            self.codes = torch.zeros(shape, dtype=dtype, device=device)
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
            self.codes[:, :, place], self.scales[:, :, place] = self.blocks.encoded(x)
        elif self.kept.fmt is None:
            self.codes[:, :, place] = x
        else:
            scale = self.scale
            if self.kept.shared == "row":
                assert self.scales is not None
                scale = E4M3.largest / x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
                self.scales[:, :, place] = scale.reciprocal()
            wide = x.float() if scale is None else x.float() * scale
            self.codes[:, :, place] = wide.clamp(-E4M3.largest, E4M3.largest).to(self.codes.dtype)

    def read(self, end: int) -> Tensor:
        """The first `end` positions in the carrier; no copy if that is the format."""
        codes = self.codes[:, :, :end] if self.grown is None else self.grown
        if self.blocks is not None:
            assert self.scales is not None
            return self.blocks.decoded(codes, self.scales[:, :, :end], self.width).to(self.carrier)
        if self.scales is not None:
            return (codes.float() * self.scales[:, :, :end]).to(self.carrier)
        return codes.to(self.carrier) if self.scale is None else (codes.float() / self.scale).to(self.carrier)

    @property
    def restores(self) -> bool:
        return self.codes.dtype is not self.carrier

    def bytes(self, end: int) -> int:
        parts = [self.codes[:, :, :end]] + ([] if self.scales is None else [self.scales[:, :, :end]])
        above = self.scale if self.blocks is None else self.blocks.above
        return sum(part.numel() * part.element_size() for part in [*parts, *([] if above is None else [above])])


class KeptWeight(Protocol):
    """A layer's weight in some format; `times` multiplies inputs (tokens, features) in the carrier by it."""

    def times(self, x: Tensor, phase: Phases) -> Tensor: ...
    def tensors(self) -> list[Tensor]: ...
    def restored(self) -> Tensor: ...


class OwnWeight:
    """The weight as an arithmetic casts it, once; inputs are cast in each step."""

    def __init__(self, weight: Tensor, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.operand = arithmetic.cast(weight, Role.WEIGHT)

    def times(self, x: Tensor, phase: Phases) -> Tensor:
        arithmetic = self.arithmetic
        # A plain arithmetic's values are in the carrier already, so there is no cast to time.
        with nullcontext() if arithmetic.plain and x.dtype is arithmetic.carrier else cast_marker(arithmetic, phase):
            operand = arithmetic.cast(x.to(arithmetic.carrier), Role.INPUT)
        with phase.gemm:
            return arithmetic.product(operand, self.operand, arithmetic.carrier).to(x.dtype)

    def tensors(self) -> list[Tensor]:
        return self.operand.tensors

    def restored(self) -> Tensor:
        return self.arithmetic.restore(self.operand, torch.float32)


class IntegerWeight:
    """int8 with a bf16 scale a row, or int4 with a scale and a zero a group. Codes are made with the rounded scale."""

    def __init__(self, weight: Tensor, name: str, low_inputs: bool) -> None:
        outputs, inputs = weight.shape
        self.name, self.low_inputs = name, low_inputs
        self.group = inputs if name == "int8" else int(int4_format(inputs).shared)
        largest = 127 if name == "int8" else 7
        groups = weight.float().view(outputs, -1, self.group)
        self.scales = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=2.0**-100).to(torch.bfloat16)
        whole = (groups / self.scales.float()).round().clamp(-largest - 1, largest).view(outputs, inputs)
        if name == "int8":
            self.codes = whole.to(torch.int8)
        else:  # torch's kernel wants unsigned codes: 8 is zero
            codes = (whole + 8).to(torch.int32)
            self.codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
            self.zeros = torch.zeros_like(self.scales)
        self.native: tuple[Tensor, ...] = ()
        if name == "int8" and weight.device.type == "cpu":
            self.native = self.codes, self.scales.view(-1)
        elif weight.device.type == "cpu" and outputs % 16 == 0:
            beside = torch.cat((self.scales, self.zeros), -1).transpose(0, 1).contiguous()
            self.native = torch._convert_weight_to_int4pack_for_cpu(codes, 1), beside

    def times(self, x: Tensor, phase: Phases) -> Tensor:
        if self.native and x.dtype is torch.bfloat16 and not self.low_inputs:
            with phase.gemm:
                if self.name == "int8":
                    return torch._weight_int8pack_mm(x, *self.native)
                packed, beside = self.native
                return torch._weight_int4pack_mm_for_cpu(x, packed, self.group, beside)
        with phase.cast:
            weight = self.restored().to(x.dtype)
            inputs = rounded_rows(x) if self.low_inputs else x
        with phase.gemm:
            return F.linear(inputs, weight)

    def restored(self) -> Tensor:
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
        self.kept, self.low_inputs, self.columns = WEIGHT_FORMATS[name], low_inputs, weight.shape[1]
        self.parts = self._encoded(weight)

    def times(self, x: Tensor, phase: Phases) -> Tensor:
        with phase.cast:
            weight = self._decoded(self.parts).to(x.dtype)
            inputs = self._decoded(self._encoded(x)).to(x.dtype) if self.low_inputs else x
        with phase.gemm:
            return F.linear(inputs, weight)

    def restored(self) -> Tensor:
        return self._decoded(self.parts)

    def _encoded(self, matrix: Tensor) -> list[Tensor]:
        if self.kept.fmt is E4M3:
            scale = matrix.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / E4M3.largest
            codes = (matrix.float() / scale).clamp(-E4M3.largest, E4M3.largest).to(torch.float8_e4m3fn)
            return [codes, scale]
        above = [nvfp4_tensor_scale(largest_magnitude(matrix))] if self.kept.above else []
        return [*BlockCodes(self.kept, *above).encoded(matrix), *above]

    def _decoded(self, parts: list[Tensor]) -> Tensor:
        codes, scales, *above = parts
        if self.kept.fmt is E4M3:
            return codes.float() * scales
        return BlockCodes(self.kept, *above).decoded(codes, scales, self.columns)

    def tensors(self) -> list[Tensor]:
        return self.parts


def rounded_rows(x: Tensor) -> Tensor:
    """Activations rounded to int8 with a scale a token, as W8A8 and W4A8 have them."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 127
    return ((x.float() / scale).round() * scale).to(x.dtype)


def kept_weight(weight: Tensor, name: str, low_inputs: bool) -> KeptWeight:
    return (IntegerWeight if name in ("int8", "int4") else FloatWeight)(weight.contiguous(), name, low_inputs)


# Takes a layer's path and its fp32 weight.
Keep = Callable[[str, Tensor], KeptWeight]


class Decoder:
    """A GPT with `weight(name)` for each name of its parameters; `kv` is the format of its cache."""

    def __init__(
        self, config: GPTConfig, weight: Callable[[str], Tensor], keep: Keep, kv: str, carrier: torch.dtype,
        sizes: tuple[int, int], around: Mapping[str, Arithmetic] | None = None,
    ) -> None:  # fmt: skip
        """`sizes` are the number of sequences, and of positions in each sequence's cache."""
        self.config, self.carrier, self.vocabulary = config, carrier, config.vocabulary
        self.around = around or {}

        def kept(path: str, part: str) -> Tensor:
            own = self.around.get(part)
            return weight(path).to(carrier) if own is None else cast_to(weight(path), own, Role.WEIGHT)

        self.embedding = kept("embedding", "embedding")
        device = str(self.embedding.device)
        self.positions = None if config.modern else kept("positions", "embedding")
        self.rotation = rotations(sizes[1], config.head_width).to(device, carrier) if config.modern else None
        self.layers: dict[str, KeptWeight] = {}
        self.norms: dict[str, Tensor] = {}
        self.routers = [weight(f"blocks.{b}.{ROUTER}").to(carrier) for b in range(config.layers) if config.experts]
        # How many tokens each layer's experts had in the last pass.
        self.loads: dict[int, list[int]] = {}
        for block in range(config.layers):
            for norm in ("norm_attn", "norm_mlp"):
                self.norms[f"blocks.{block}.{norm}"] = kept(f"blocks.{block}.{norm}.weight", f"blocks.{block}.{norm}")
            for part in ("attn.qkv", "attn.out", *feed_parts(config.experts)):
                self.layers[f"{block}.{part}"] = keep(f"blocks.{block}.{part}", weight(f"blocks.{block}.{part}.weight"))
        self.norms["norm"] = kept("norm.weight", "norm")
        self.layers["head"] = keep("head", self._head(weight))
        shape = (sizes[0], config.key_heads, sizes[1], config.head_width)
        heads = [KeptHeads(kv, shape, carrier, device) for _ in range(2 * config.layers)]
        self.cache = list(zip(heads[::2], heads[1::2], strict=True))
        # Whether `forward` finds the scales that stay, in a first prompt.
        self.calibrates = False

    def _head(self, weight: Callable[[str], Tensor]) -> Tensor:
        """A tied head is the embedding itself, unless that is rounded by a precision that the head does not have."""
        if not self.config.tied:
            return weight("head.weight")
        return weight("embedding") if "embedding" in self.around else self.embedding

    def forward(self, tokens: Tensor, at: int, phase: Phases, every: bool = False) -> Tensor:
        """Logits of the last of (batch, new) tokens, or of `every` one: (batch, new, vocabulary)."""
        new = tokens.shape[1]
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x + self.positions[at : at + new]
        x = start_stream(x, self.carrier, self.around.get("residual"))
        for block in range(self.config.layers):
            x = self._block(x, block, at, phase)
        last = x if every else x[:, -1:]
        return cast_to(self._times(self._norm(last, "norm"), "head", phase), self.around.get("logits"))

    def _block(self, x: Tensor, block: int, at: int, phase: Phases) -> Tensor:
        config, (batch, new, width) = self.config, x.shape
        ends = (width, config.key_heads * config.head_width, config.key_heads * config.head_width)
        qkv = self._times(self._norm(x, f"blocks.{block}.norm_attn"), f"{block}.attn.qkv", phase)
        parts = torch.split_with_sizes(qkv, ends, -1)
        q, k, v = (part.view(batch, new, -1, config.head_width).transpose(1, 2) for part in parts)
        if self.rotation is not None:
            q, k = (rotate(part, self.rotation[at : at + new]) for part in (q, k))
        keys, values = self._kept(block, k, v, at, phase)
        with phase.attention:
            mixed = attended(q, keys, values, at)
        x = self._added(x, self._times(mixed.transpose(1, 2).reshape(batch, new, width), f"{block}.attn.out", phase))
        normed = self._norm(x, f"blocks.{block}.norm_mlp")
        if not config.experts:
            return self._added(x, self._fed(normed, f"{block}.mlp", phase))
        through = partial(self._fed, phase=phase)
        mixed, self.loads[block] = routed(normed, self.routers[block], config.top_k, f"{block}.mlp.experts", through)
        return self._added(x, mixed)

    def _added(self, x: Tensor, more: Tensor) -> Tensor:
        return cast_to(x + more.to(x.dtype), self.around.get("residual"))

    def _fed(self, x: Tensor, path: str, phase: Phases) -> Tensor:
        hidden = self._times(x, f"{path}.up", phase)
        between = silu_gate(*hidden.chunk(2, -1)) if self.config.modern else gelu(hidden)
        return self._times(between, f"{path}.down", phase)

    def _kept(self, block: int, k: Tensor, v: Tensor, at: int, phase: Phases) -> list[Tensor]:
        read = []
        for heads, new in zip(self.cache[block], (k, v), strict=True):
            if self.calibrates:
                heads.calibrate(new)
            with phase.cast if heads.restores else nullcontext():
                heads.put(new, at)
                read.append(heads.read(at + new.shape[2]))
        return read

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, own = self.norms[name], self.around.get(name)
        wide = torch.promote_types(self.carrier, torch.float32) if own is None else weight.dtype
        given, weight = cast_to(x, own).to(wide), weight.to(wide)
        if self.config.modern:
            return F.rms_norm(given, weight.shape, weight, 1e-5).to(self.carrier)
        return F.layer_norm(given, weight.shape, weight, None, 1e-5).to(self.carrier)

    def _times(self, x: Tensor, name: str, phase: Phases) -> Tensor:
        y = self.layers[name].times(x.reshape(-1, x.shape[-1]), phase)
        return y.view(*x.shape[:-1], -1)

    def fill(self, end: int, generator: torch.Generator) -> None:
        for pair in self.cache:
            for which, heads in enumerate(pair):
                shape = (*heads.codes.shape[:2], end, heads.width)
                for at, drawn in drawn_like_trained(shape, generator, which == 0):
                    if at == 0:
                        heads.calibrate(drawn)
                    heads.put(drawn.to(self.carrier), at)

    def weight_bytes(self) -> int:
        tensors = [self.embedding, *([] if self.positions is None else [self.positions])]
        tensors += [*self.norms.values(), *self.routers]
        tensors += [tensor for layer in self.layers.values() for tensor in layer.tensors()]
        once = {tensor.data_ptr(): tensor for tensor in tensors}
        return sum(tensor.numel() * tensor.element_size() for tensor in once.values())

    def weights_and_cache(self) -> tuple[object, object]:
        return (self.embedding, self.positions, self.norms, self.routers, self.layers), self.cache

    def expert_bytes(self) -> int:
        used = [f"{b}.mlp.experts.{e}." for b, rows in self.loads.items() for e, count in enumerate(rows) if count]
        kept = (tensor for path in used for part in ("up", "down") for tensor in self.layers[path + part].tensors())
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def parameters(self) -> int:
        return sum(prod(shape) for shape, _ in served_shapes(self.config).values())

    def cache_bytes(self, end: int) -> int:
        return sum(heads.bytes(end) for pair in self.cache for heads in pair)


def drawn_like_trained(
    shape: tuple[int, ...], generator: torch.Generator, are_keys: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yields random keys or values of (batch, heads, positions, width) like a trained model's: keys of a few channels
    are four times larger. They come in pieces with their first positions, so that no whole fp32 copy need fit."""
    *ends, positions, width = shape
    piece = min(positions, 4096)
    for at in range(0, positions, piece or 1):
        drawn = torch.randn(*ends, piece, width, generator=generator, device=generator.device)
        if are_keys:
            drawn[..., ::16] *= 4
        yield at, drawn[:, :, : positions - at]


def attended(q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
    new, mask = q.shape[2], None
    if new > 1 and at:
        mask = torch.ones(new, at + new, dtype=torch.bool, device=q.device).tril(at)
    return fused_attention(q, k, v, new > 1 and not at, mask)


def drawn_weights(shapes: Shapes, seed: int, device: str) -> Callable[[str], Tensor]:
    """Random fp32 weights, each made on request: a whole fp32 model need not fit beside the kept one."""
    places = {name: place for place, name in enumerate(shapes)}

    def weight(name: str) -> Tensor:
        shape, spread = shapes[name]
        if not spread:
            return torch.ones(shape, device=device)
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + places[name])
        return torch.randn(shape, generator=generator, device=device).mul_(spread)

    return weight
