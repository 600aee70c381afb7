"""A GPT for serving: it stores its weights in a format, has a static cache of keys and values, and turns tokens into
logits.

It is built of the same blocks as all models (`nn/block.py`), but its layers multiply by stored weights. A pass has new
tokens at the positions `at`, `at` + 1 and so on. Each of them attends to the cached keys and values of all positions up
to its position.

Norms are computed in fp32, and everything else in the carrier. `around` can give embedding, norms, stream or logits
another arithmetic, in which the weights of embedding and norms are then stored too. Every token reads all keys and
values from the cache, its own included. So a whole prompt gives the same result as one token at a time.
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
from fp8bench.nn.around import cast_to, start_stream, widen_dtype
from fp8bench.nn.attention import FusedCore, compute_fused_attention, make_rotary_table
from fp8bench.nn.block import Block, build_blocks
from fp8bench.nn.experts import Experts, ServedExperts
from fp8bench.nn.linear import Linear
from fp8bench.nn.parts import Norm, apply_norm
from fp8bench.nn.served import ROUTER_PATH, list_weight_shapes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.storage import CachedHeads, StoredWeight, draw_cached_values
from fp8bench.protocols import Arithmetic, Phases, Role

# A function that returns the fp32 weight with a given name.
ReadWeight = Callable[[str], Tensor]
# A function that stores a layer's fp32 weight in its format. Its first argument is the layer's path.
StoreWeight = Callable[[str, Tensor], StoredWeight]


class LayerKeyValueCache(NamedTuple):
    """The stored keys and values of one layer."""

    keys: CachedHeads
    values: CachedHeads


@dataclass
class CachedLayerPass:
    """One pass of new tokens through one layer, with the layer's cache. The first new token is at position `at`."""

    cache: LayerKeyValueCache
    at: int
    is_calibration: bool

    def store(self, k: Tensor, v: Tensor, phase: Phases) -> tuple[Tensor, Tensor]:
        return self._store_in_cached_heads(self.cache.keys, k, phase), self._store_in_cached_heads(
            self.cache.values, v, phase
        )

    def _store_in_cached_heads(self, heads: CachedHeads, new: Tensor, phase: Phases) -> Tensor:
        if self.is_calibration:
            heads.calibrate(new)
        with phase.cast if heads.needs_decoding else nullcontext():
            heads.write(new, self.at)
            return heads.read(self.at + new.shape[2])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        new_tokens = q.shape[2]
        mask = None
        # torch's causal mask aligns the first new token with the first key, which is wrong after cached tokens.
        if new_tokens > 1 and self.at:
            mask = torch.ones(new_tokens, self.at + new_tokens, dtype=torch.bool, device=q.device).tril(self.at)
        return compute_fused_attention(q, k, v, new_tokens > 1 and not self.at, mask)


@dataclass(eq=False)
class ServedLinear:
    """Multiplies by a stored weight. It is not a module, because a module's call overhead would show in a step of one
    token.
    """

    weight: StoredWeight

    def __call__(self, x: Tensor, phase: Phases) -> Tensor:
        y = self.weight.multiply(x.reshape(-1, x.shape[-1]), phase)
        return y.view(*x.shape[:-1], -1)


class ServedNorm:
    """A norm whose weight was cast once. Its result has the dtype of the carrier."""

    def __init__(self, norm: Norm, weight: Tensor, arithmetic: Arithmetic | None, carrier: torch.dtype) -> None:
        self.weight = weight
        self.arithmetic = arithmetic
        self.carrier = carrier
        self.norm_options = norm.root_mean_square, norm.epsilon
        self.dtype = widen_dtype(carrier) if arithmetic is None else weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        cast_input = cast_to(x, self.arithmetic).to(self.dtype)
        return apply_norm(cast_input, self.weight.to(self.dtype), *self.norm_options).to(self.carrier)


class Decoder(nn.Module):
    """A GPT for serving. `weight(name)` reads each parameter, and `kv` is the format of the cache.

    The two `sizes` are the number of sequences and the number of positions in each sequence's cache. While
    `calibrates` is set, each pass computes the scales of the cache. Later passes keep these scales. In serving, the
    first prompt determines them.
    """

    blocks: Iterable[Block]

    def __init__(
        self,
        config: GPTConfig,
        weight: ReadWeight,
        store_weight: StoreWeight,
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
        self._store_weight = store_weight

        # 1. Make the layers around the blocks.
        self.embedding = self._cast_part_weight("embedding", "embedding")
        device = str(self.embedding.device)
        self.positions = None if config.is_llama_like else self._cast_part_weight("positions", "embedding")
        self.rotation = (
            make_rotary_table(sizes[1], config.head_width).to(device, carrier) if config.is_llama_like else None
        )

        # 2. Make the blocks on the meta device, where they need no memory. Then give each layer its weight, one at a
        # time.
        self.layers: dict[str, StoredWeight] = {}
        self.norms: list[ServedNorm] = []
        self.experts: list[ServedExperts] = []
        with torch.device("meta"):
            self.blocks = build_blocks(config, lambda name: PlainArithmetic(carrier), FusedCore())  # type: ignore[assignment]
            norm = Norm(config.width, config.is_llama_like)
        for path, module in list(self.named_modules()):
            if isinstance(module, Linear):
                self._replace_submodule(path, self._make_linear(path, self._weight(f"{path}.weight")))
            elif isinstance(module, Norm):
                self._replace_submodule(path, self._make_norm(path, module))
        for number, block in enumerate(self.blocks):
            block.residual_arithmetic = self.around.get("residual")
            self._replace_branches(f"blocks.{number}", block)
        self.norm = self._make_norm("norm", norm)
        # A tied head uses the embedding's tensor. That is impossible if the embedding alone is rounded to a
        # precision.
        has_shared_head = config.tied and "embedding" not in self.around
        head_weight = self.embedding if has_shared_head else self._weight("embedding" if config.tied else "head.weight")
        self.head = self._make_linear("head", head_weight)
        del self._weight, self._store_weight

        # 3. Make an empty cache.
        self.calibrates = False
        shape = (sizes[0], config.key_heads, sizes[1], config.head_width)
        self.cache = [
            LayerKeyValueCache(CachedHeads(kv, shape, carrier, device), CachedHeads(kv, shape, carrier, device))
            for _ in range(config.layers)
        ]

    def _cast_part_weight(self, path: str, part: str) -> Tensor:
        arithmetic = self.around.get(part)
        weight = self._weight(path)
        return weight.to(self.carrier) if arithmetic is None else cast_to(weight, arithmetic, Role.WEIGHT)

    def _replace_branches(self, path: str, block: Block) -> None:
        """Replaces attention and feed-forward modules by functions. A module's call costs as much as a small kernel,
        which would show in a step of one token.
        """
        if isinstance(block.mlp, Experts):
            router = self._weight(f"{path}.{ROUTER_PATH}").to(self.carrier)
            expert_forwards = [expert.forward for expert in block.mlp.experts]
            self.experts.append(ServedExperts(router, expert_forwards, self.config.top_k))
        self._replace_submodule(f"{path}.mlp", self.experts[-1] if self.experts else block.mlp.forward)
        self._replace_submodule(f"{path}.attn", block.attn.forward)

    def _replace_submodule(self, path: str, served: Callable[..., Tensor]) -> None:
        owner_path, _, name = path.rpartition(".")
        parent = self.get_submodule(owner_path)
        delattr(parent, name)  # nn.Module accepts no function in place of a module
        vars(parent)[name] = served

    def _make_linear(self, path: str, weight: Tensor) -> ServedLinear:
        self.layers[path] = stored_weight = self._store_weight(path, weight)
        return ServedLinear(stored_weight)

    def _make_norm(self, path: str, norm: Norm) -> ServedNorm:
        weight = self._cast_part_weight(f"{path}.weight", path)
        served_norm = ServedNorm(norm, weight, self.around.get(path), self.carrier)
        self.norms.append(served_norm)
        return served_norm

    def forward(self, tokens: Tensor, at: int, phase: Phases, every: bool = False) -> Tensor:
        """Returns the logits of the last new token, or with `every` those of every new token. They are (batch, new
        tokens, vocabulary).
        """
        end = at + tokens.shape[1]
        x = F.embedding(tokens, self.embedding)
        if self.positions is not None:
            x = x + self.positions[at:end]
        x = start_stream(x, self.carrier, self.around.get("residual"))
        rotary_table_rows = None if self.rotation is None else self.rotation[at:end]
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x = block.forward(x, phase, rotary_table_rows, cache=CachedLayerPass(cache, at, self.calibrates))
        logits = self.head(self.norm(x if every else x[:, -1:]), phase)
        return cast_to(logits, self.around.get("logits"))

    def fill_cache(self, end: int, generator: torch.Generator) -> None:
        """Fills the first `end` positions of the cache with random values like those of a trained model."""
        for cache in self.cache:
            for heads in cache:
                shape = (*heads.codes.shape[:2], end, heads.width)
                for at, values in draw_cached_values(shape, generator, heads is cache.keys):
                    if at == 0:
                        heads.calibrate(values)
                    heads.write(values.to(self.carrier), at)

    @property
    def loads(self) -> dict[int, list[int]]:
        """Returns how many tokens each expert got in the last pass, for each block. The result is empty for a model
        without experts.
        """
        return {number: experts.loads for number, experts in enumerate(self.experts) if experts.loads}

    def list_weights_and_cache(self) -> tuple[object, object]:
        return (self.embedding, self.positions, self.norms, self.experts, self.layers), self.cache

    def weight_bytes(self) -> int:
        tensors = [norm.weight for norm in self.norms] + [experts.router for experts in self.experts]
        for stored_weight in self.layers.values():
            tensors += stored_weight.tensors()
        tensors += [self.embedding] if self.positions is None else [self.embedding, self.positions]
        distinct_tensors = {
            tensor.data_ptr(): tensor for tensor in tensors
        }  # a tied head shares the embedding's memory
        return sum(tensor.nbytes for tensor in distinct_tensors.values())

    def expert_bytes(self) -> int:
        """Returns the bytes of the expert weights that the last pass read."""
        expert_loads = self.loads
        total_bytes = 0
        for path, stored_weight in self.layers.items():
            # Skip layers other than experts. The path of an expert has the number of its block and that of the expert.
            block, _, expert = path.removeprefix("blocks.").partition(".mlp.experts.")
            if expert and expert_loads[int(block)][int(expert.partition(".")[0])]:
                total_bytes += sum(tensor.nbytes for tensor in stored_weight.tensors())
        return total_bytes

    def weight_count(self) -> int:
        return sum(prod(shape) for shape, _ in list_weight_shapes(self.config).values())

    def cache_bytes(self, end: int) -> int:
        return sum(cache.keys.count_bytes(end) + cache.values.count_bytes(end) for cache in self.cache)
