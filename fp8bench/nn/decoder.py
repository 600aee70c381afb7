"""A GPT for serving: weights kept in a format, a static cache of keys and values, tokens in, logits out.

Its blocks are those of every model (`nn/block.py`), with layers that multiply by kept weights. New tokens at positions
`at`, `at` + 1, ... read the keys and values of positions 0 to their last one, as the cache returns them.

Norms are computed in fp32, all else in the carrier, unless `around` gives embedding, norms, stream or logits another
arithmetic, which then also holds the weights of embedding and norms. Every token reads all keys and values, its own
too, as the cache kept them: so a whole prompt gives what token by token gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.around import cast_to, start_stream, wide_dtype
from fp8bench.nn.attention import FusedCore, fused_attention, rotations
from fp8bench.nn.block import Block, build_blocks
from fp8bench.nn.experts import Experts, ServedExperts
from fp8bench.nn.kept import KeptHeads, KeptWeight, draw_cached_values
from fp8bench.nn.linear import Linear
from fp8bench.nn.parts import Norm, normalise
from fp8bench.nn.served import ROUTER, served_shapes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases, Role

# Gives the fp32 weight of a name.
Weights = Callable[[str], Tensor]
# Keeps a layer's fp32 weight, which comes with the layer's path.
Keep = Callable[[str, Tensor], KeptWeight]


class LayerCache(NamedTuple):
    """The cache of one layer."""

    keys: KeptHeads
    values: KeptHeads


@dataclass
class CachedPass:
    """One pass of new tokens, which begin at position `at`, through the cache of one layer."""

    cache: LayerCache
    at: int
    calibrates: bool

    def store(self, k: Tensor, v: Tensor, phase: Phases) -> tuple[Tensor, Tensor]:
        return self._store(self.cache.keys, k, phase), self._store(self.cache.values, v, phase)

    def _store(self, heads: KeptHeads, new: Tensor, phase: Phases) -> Tensor:
        if self.calibrates:
            heads.calibrate(new)
        with phase.cast if heads.restores else nullcontext():
            heads.put(new, self.at)
            return heads.read(self.at + new.shape[2])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new = q.shape[2]
        mask = None
        if new > 1 and self.at:
            mask = torch.ones(new, self.at + new, dtype=torch.bool, device=q.device).tril(self.at)
        return fused_attention(q, k, v, new > 1 and not self.at, mask)


@dataclass(eq=False)
class ServedLinear:
    """Multiplies by a stored weight. Not a module: the cost of a module's call would show in a step of one token."""

    weight: KeptWeight

    def __call__(self, x: Tensor, phase: Phases) -> Tensor:
        y = self.weight.times(x.reshape(-1, x.shape[-1]), phase)
        return y.view(*x.shape[:-1], -1)


class ServedNorm:
    """A norm whose weight was cast once; the result is in the carrier."""

    def __init__(self, norm: Norm, weight: Tensor, arithmetic: Arithmetic | None, carrier: torch.dtype) -> None:
        self.weight = weight
        self.arithmetic = arithmetic
        self.carrier = carrier
        self.form = norm.root_mean_square, norm.epsilon
        self.dtype = wide_dtype(carrier) if arithmetic is None else weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        wide = cast_to(x, self.arithmetic).to(self.dtype)
        return normalise(wide, self.weight.to(self.dtype), *self.form).to(self.carrier)


class Decoder(nn.Module):
    """A GPT with `weight(name)` for each name of its parameters; `kv` is the format of its cache.

    `sizes` are the number of sequences, and of positions in each sequence's cache. With `calibrates` a pass finds the
    scales that stay, as a first prompt does.
    """

    blocks: Iterable[Block]

    def __init__(
        self,
        config: GPTConfig,
        weight: Weights,
        keep: Keep,
        kv: str,
        carrier: torch.dtype,
        sizes: tuple[int, int],
        around: Mapping[str, Arithmetic] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.carrier = carrier
        self.vocabulary = config.vocabulary
        self.around = around or {}
        self._weight = weight
        self._keep = keep

        # 1. The layers around the blocks.
        self.embedding = self._cast_once("embedding", "embedding")
        device = str(self.embedding.device)
        self.positions = None if config.modern else self._cast_once("positions", "embedding")
        self.rotation = rotations(sizes[1], config.head_width).to(device, carrier) if config.modern else None

        # 2. Blocks without memory, whose layers then get their weights, one at a time.
        self.layers: dict[str, KeptWeight] = {}
        self.norms: list[ServedNorm] = []
        self.experts: list[ServedExperts] = []
        with torch.device("meta"):
            self.blocks = build_blocks(config, lambda name: PlainArithmetic(carrier), FusedCore())  # type: ignore[assignment]
            norm = Norm(config.width, config.modern)
        for path, module in list(self.named_modules()):
            if isinstance(module, Linear):
                self._replace(path, self._served_linear(path, self._weight(f"{path}.weight")))
            elif isinstance(module, Norm):
                self._replace(path, self._served_norm(path, module))
        for number, block in enumerate(self.blocks):
            block.residual = self.around.get("residual")
            self._serve_parts(f"blocks.{number}", block)
        self.norm = self._served_norm("norm", norm)
        # A tied head is the embedding itself, unless that is rounded by a precision that the head does not have.
        shared = config.tied and "embedding" not in self.around
        head = self.embedding if shared else self._weight("embedding" if config.tied else "head.weight")
        self.head = self._served_linear("head", head)
        del self._weight, self._keep

        # 3. An empty cache.
        self.calibrates = False
        shape = (sizes[0], config.key_heads, sizes[1], config.head_width)
        self.cache = [
            LayerCache(KeptHeads(kv, shape, carrier, device), KeptHeads(kv, shape, carrier, device))
            for _ in range(config.layers)
        ]

    def _cast_once(self, path: str, part: str) -> Tensor:
        arithmetic = self.around.get(part)
        weight = self._weight(path)
        return weight.to(self.carrier) if arithmetic is None else cast_to(weight, arithmetic, Role.WEIGHT)

    def _serve_parts(self, path: str, block: Block) -> None:
        """Replaces attention and the feed-forward part by functions: a module's call costs as much as a small kernel,
        which a step of one token would show."""
        if isinstance(block.mlp, Experts):
            router = self._weight(f"{path}.{ROUTER}").to(self.carrier)
            experts = [expert.forward for expert in block.mlp.experts]
            self.experts.append(ServedExperts(router, experts, self.config.top_k))
        self._replace(f"{path}.mlp", self.experts[-1] if self.experts else block.mlp.forward)
        self._replace(f"{path}.attn", block.attn.forward)

    def _replace(self, path: str, served: Callable[..., Tensor]) -> None:
        owner, _, name = path.rpartition(".")
        parent = self.get_submodule(owner)
        delattr(parent, name)
        vars(parent)[name] = served

    def _served_linear(self, path: str, weight: Tensor) -> ServedLinear:
        self.layers[path] = stored = self._keep(path, weight)
        return ServedLinear(stored)

    def _served_norm(self, path: str, norm: Norm) -> ServedNorm:
        weight = self._cast_once(f"{path}.weight", path)
        served = ServedNorm(norm, weight, self.around.get(path), self.carrier)
        self.norms.append(served)
        return served

    def forward(self, tokens: Tensor, at: int, phase: Phases, every: bool = False) -> Tensor:
        """Returns logits of the last of (batch, new) tokens, or of `every` one: (batch, new, vocabulary)."""
        end = at + tokens.shape[1]
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x + self.positions[at:end]
        x = start_stream(x, self.carrier, self.around.get("residual"))
        rotation = None if self.rotation is None else self.rotation[at:end]
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x = block.forward(x, phase, rotation, cache=CachedPass(cache, at, self.calibrates))
        logits = self.head(self.norm(x if every else x[:, -1:]), phase)
        return cast_to(logits, self.around.get("logits"))

    def fill(self, end: int, generator: torch.Generator) -> None:
        """Fills the first positions of the cache with random values like a trained model's."""
        for cache in self.cache:
            for heads in cache:
                shape = (*heads.codes.shape[:2], end, heads.width)
                for at, values in draw_cached_values(shape, generator, heads is cache.keys):
                    if at == 0:
                        heads.calibrate(values)
                    heads.put(values.to(self.carrier), at)

    @property
    def loads(self) -> dict[int, list[int]]:
        """The number of tokens of each expert in the last pass, by block; empty for a model without experts."""
        return {number: experts.loads for number, experts in enumerate(self.experts) if experts.loads}

    def weights_and_cache(self) -> tuple[object, object]:
        return (self.embedding, self.positions, self.norms, self.experts, self.layers), self.cache

    def weight_bytes(self) -> int:
        tensors = [norm.weight for norm in self.norms] + [experts.router for experts in self.experts]
        for stored in self.layers.values():
            tensors += stored.tensors()
        tensors += [self.embedding] if self.positions is None else [self.embedding, self.positions]
        once = {tensor.data_ptr(): tensor for tensor in tensors}  # a tied head is the embedding
        return sum(tensor.nbytes for tensor in once.values())

    def expert_bytes(self) -> int:
        """The bytes of the experts that the last pass read."""
        loads = self.loads
        total = 0
        for path, stored in self.layers.items():
            # Paths of experts name the block and the expert; others are read in every pass.
            block, _, expert = path.removeprefix("blocks.").partition(".mlp.experts.")
            if expert and loads[int(block)][int(expert.partition(".")[0])]:
                total += sum(tensor.nbytes for tensor in stored.tensors())
        return total

    def weight_count(self) -> int:
        return sum(prod(shape) for shape, _ in served_shapes(self.config).values())

    def cache_bytes(self, end: int) -> int:
        return sum(cache.keys.bytes(end) + cache.values.bytes(end) for cache in self.cache)
