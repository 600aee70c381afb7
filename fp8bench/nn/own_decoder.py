"""Serves any causal model of a user with a static cache.

`OwnDecoder` gives it the interface of `Decoder`. Its forward pass takes token ids and `past_key_values` like Hugging
Face's models, which get their own StaticCache. Others get StaticKeys: they call `past_key_values.update(keys, values,
layer)` with new ones (batch, heads, new tokens, width), get back all of them, and ask for the position of their first
token: `past_key_values.get_seq_length()`. Keys and values are rounded to their format before they are put into the
cache, which stays in the carrier.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.model import DeviceFacts
from fp8bench.nn.holders import CONV1D, EXPERTS, LINEAR, ProductWeight, weights_of
from fp8bench.nn.kept import (
    DTYPES,
    KeptHeads,
    KeptWeight,
    draw_cached_values,
    kept_weight,
)
from fp8bench.nn.model_calls import short_words
from fp8bench.nn.own_model import seed_generators
from fp8bench.nn.served import ServedArm, ServedShape
from fp8bench.protocols import Phases, SilentPhases

_LONGEST = 1 << 20
_TRIED = 8
_CLOSE = 1e-3


_CACHE = "past_key_values"


class OwnLayer:
    """The cache of one layer of a user's own model; `at` is where new keys and values go."""

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.at = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.keys.numel():
            self.keys = keys.new_zeros(*keys.shape[:2], self.positions, keys.shape[3])
            self.values = values.new_zeros(*values.shape[:2], self.positions, values.shape[3])
        end = self.at + keys.shape[2]
        self.keys[:, :, self.at : end] = keys
        self.values[:, :, self.at : end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(eq=False)
class StaticKeys:
    """The `past_key_values` of a user's own model."""

    positions: int
    at: int = 0
    layers: list[OwnLayer] = field(default_factory=list)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.at

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer:
            self.layers.append(OwnLayer(self.positions))
        return self.layers[layer].update(keys, values)


def make_model(maker: Callable[[], Any], name: str, seed: int, facts: DeviceFacts) -> tuple[nn.Module, Tensor | None]:
    """A maker's model, drawn from the seed, and its tokens (texts, positions), if it gives any."""
    # The maker is foreign code: whatever it raises is reported with its name.
    try:
        with seed_generators(seed, facts):
            answer = maker()
    except Fp8benchError:
        raise
    except Exception as error:
        raise UsageError(f"{name} fails: {short_words(error)}.") from error
    model, ids = (*answer, None)[:2] if isinstance(answer, tuple) else (answer, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} gives {type(model).__name__}. Let it return a model, or (model, token ids).")
    if ids is not None and not (
        isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() and len(ids) and ids.shape[1] > 2
    ):
        raise UsageError(
            f"{name} gives no tokens with its model. Give whole numbers of shape (texts, positions), with 3 "
            "positions or more."
        )
    return model, ids


class OwnDecoder:
    """A user's own model behind a cache. `sizes` are the number of sequences, and of positions in each one's cache.
    Raises UsageError for a model that takes no cache."""

    def __init__(self, name: str, model: nn.Module, arm: ServedArm, sizes: tuple[int, int], device: str) -> None:
        self.name = name
        self.carrier = DTYPES[arm.carrier]
        self.device = device
        self.model = model.to(device, self.carrier).eval().requires_grad_(False)
        self.phase: Phases = SilentPhases()
        self.calibrates = False
        # Without a cache argument every token would read the whole prompt again, unlike a server.
        self._asks = inspect.signature(model.forward).parameters
        if _CACHE not in self._asks:
            raise UsageError(
                f"{name}: forward of {type(model).__name__} takes no {_CACHE}, and a model without a cache is not "
                f"served. Let it call {_CACHE}.update(keys, values, layer), as Hugging Face's causal models do."
            )
        self.held = kept_layers(name, model)
        theirs: Any = sys.modules.get("transformers")
        is_theirs = theirs is not None and isinstance(model, theirs.PreTrainedModel)
        # Hugging Face's models take their own kind of cache.
        self.cache: Any = theirs.StaticCache(model.config, sizes[1]) if is_theirs else StaticKeys(sizes[1])
        self.vocabulary = self._begin(sizes[0])
        self.kept: dict[str, KeptWeight] = {}
        self._keep_weights(arm)
        self._keep_keys(arm)

    def forward(self, tokens: Tensor, at: int, phase: Phases, every: bool = False) -> Tensor:
        # 1. The cache begins at this position again: Hugging Face's layers count in a tensor, ours in a number.
        self.phase = phase
        for part in (self.cache, *self.cache.layers):
            if isinstance(length := getattr(part, "cumulative_length", None), Tensor):
                length.fill_(at)
            elif hasattr(part, "at"):
                part.at = at

        # 2. Call the model with what its forward takes.
        named: dict[str, Any] = {_CACHE: self.cache, "use_cache": True, "logits_to_keep": 0 if every else 1}
        if "cache_position" in self._asks:
            named["cache_position"] = torch.arange(at, at + tokens.shape[1], device=tokens.device)
        try:
            out = self.model(tokens, **{name: value for name, value in named.items() if name in self._asks})
        except IndexError as error:
            raise UsageError(
                f"{self.name}: tokens at positions {at} to {at + tokens.shape[1] - 1} fail: {short_words(error)}. It "
                "has fewer positions or ids: give shorter --contexts, and (model, token ids) with texts of its own."
            ) from error

        # 3. Find the logits in what it gives.
        if isinstance(out, Mapping):
            if "logits" not in out:
                raise UsageError(
                    f"{self.name} gives {', '.join(map(str, out))}. Let it give logits: a tensor, a tuple that begins "
                    "with it, or the name 'logits'."
                )
            out = out["logits"]
        logits: Tensor = out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out[0]
        return logits if every else logits[:, -1:]

    def _begin(self, batch: int) -> int:
        """Runs one token, so that the cache has its tensors; returns the number of ids."""
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        try:
            # A first token shows the vocabulary, and that the cache is written.
            with torch.no_grad():
                vocabulary = self.forward(tokens, 0, self.phase).shape[2]
        except (torch.OutOfMemoryError, UsageError):
            raise
        except Exception as error:
            raise UsageError(f"{self.name}: a token with a cache fails: {short_words(error)}.") from error
        layers = self.cache.layers
        if not layers or not all(isinstance(layer.keys, Tensor) and layer.keys.numel() for layer in layers):
            raise UsageError(f"{self.name}: forward puts nothing into the cache that it gets. Call {_CACHE}.update.")
        # Sliding windows drop keys, so that the bytes of the cache depend on more than the context.
        if any(getattr(layer, "is_sliding", False) for layer in layers):
            raise UsageError(f"{self.name}: some layers see a sliding window alone, whose bytes are not counted here.")
        return vocabulary

    def _keep_weights(self, arm: ServedArm) -> None:
        for held in self.held:
            module = held.module
            # A layer that the map leaves out keeps the carrier's product.
            format_of = arm.carrier if self.layer_of(held) is None else arm.weight_format
            if format_of in DTYPES:
                vars(module)["forward"] = self._product(module.forward)
                continue
            weight = held.weight.float()
            stored = kept_weight(weight.t() if held.kind == CONV1D else weight, format_of, arm.low_inputs)
            self.kept[held.name] = stored
            vars(module)["forward"] = self._product(stored, getattr(module, "bias", None))

    def layer_of(self, held: ProductWeight) -> int | None:
        """The number of the block that a linear layer is in, if it is in any."""
        # The first number in its path is the layer's, as in Hugging Face's names.
        match = None if held.head else re.search(r"(?:^|\.)(\d+)(?:\.|$)", held.name)
        if match is None:
            return None
        number = int(match[1])
        layers = len(self.cache.layers)
        if number >= layers:
            raise UsageError(
                f"{self.name}: {held.name} would be in layer {number}, and the cache has layers 0 to {layers - 1}. "
                "Keep the blocks, and nothing else, in a list: each calls the cache once."
            )
        return number

    def _product(self, by: Callable[[Tensor], Tensor] | KeptWeight, bias: Tensor | None = None) -> Callable[..., Any]:
        def product(x: Tensor) -> Tensor:
            if callable(by):
                with self.phase.gemm:
                    return by(x)
            y = by.times(x.reshape(-1, x.shape[-1]), self.phase).view(*x.shape[:-1], -1)
            return y if bias is None else y + bias

        return product

    def _keep_keys(self, arm: ServedArm) -> None:
        self.heads: list[tuple[KeptHeads, KeptHeads]] = []
        for layer in self.cache.layers:
            keys = KeptHeads(arm.kv_format, (*layer.keys.shape,), self.carrier, self.device)
            values = KeptHeads(arm.kv_format, (*layer.values.shape,), self.carrier, self.device)
            self.heads.append((keys, values))
            if keys.restores:
                layer.update = self._round_update(layer.update, (keys, values))

    def _round_update(self, update: Callable[..., Any], pair: tuple[KeptHeads, KeptHeads]) -> Callable[..., Any]:
        def update_rounded_values(keys: Tensor, values: Tensor, *more: Any, **named: Any) -> Any:
            with self.phase.cast:
                for heads, new in zip(pair, (keys, values), strict=True):
                    if self.calibrates:
                        heads.calibrate(new)
                    heads.put(new, 0)
                # Attention reads what the cache would give back, not what was written.
                both = [heads.read(keys.shape[2]) for heads in pair]
            return update(*both, *more, **named)

        return update_rounded_values

    def fill(self, end: int, generator: torch.Generator) -> None:
        for layer, pair in zip(self.cache.layers, self.heads, strict=True):
            for heads, tensor in zip(pair, (layer.keys, layer.values), strict=True):
                shape = (*tensor.shape[:2], end, tensor.shape[3])
                for at, drawn in draw_cached_values(shape, generator, tensor is layer.keys):
                    if at == 0:
                        heads.calibrate(drawn)
                    heads.put(drawn.to(self.carrier), 0)
                    tensor[:, :, at : at + drawn.shape[2]] = heads.read(drawn.shape[2])

    def weight_bytes(self) -> int:
        replaced = {id(held.weight) for held in self.held if held.name in self.kept}
        tensors: list[Tensor] = [parameter for parameter in self.model.parameters() if id(parameter) not in replaced]
        for weight in self.kept.values():
            tensors += weight.tensors()
        return sum(tensor.nbytes for tensor in tensors)

    def weight_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def weights_and_cache(self) -> tuple[object, object]:
        return (list(self.model.parameters()), self.kept), [(layer.keys, layer.values) for layer in self.cache.layers]


def kept_layers(name: str, model: nn.Module) -> tuple[ProductWeight, ...]:
    """The linear layers that are called as such. Raises UsageError for experts, whose reads are not counted."""
    held = weights_of(model)
    if any(holder.kind == EXPERTS for holder in held):
        raise UsageError(f"{name} has a stack of experts, and which of them a step reads is not counted here.")
    return tuple(holder for holder in held if holder.kind in (LINEAR, CONV1D) and not holder.reason)


def served_positions(model: nn.Module) -> int:
    return int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or _LONGEST)


class QueryHeads(TorchFunctionMode):
    """Sees how many heads the queries of torch's attention have, which may be more than keys have; 0 before a call."""

    heads = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.heads = (args[0] if args else named["query"]).shape[1]
        return func(*args, **named)


def shape_of_own(name: str, model: nn.Module, seed: int, facts: DeviceFacts) -> ServedShape:
    """Returns the shape of a model after checking its cache: token by token must give the logits of a whole prompt."""
    decoder = OwnDecoder(name, model, ServedArm("fp32"), (1, _TRIED), facts.key)
    generator = torch.Generator(facts.key).manual_seed(seed)
    # Without gradients, and on one text: whether the cache is right needs no statistics.
    tokens = torch.randint(decoder.vocabulary, (1, _TRIED), generator=generator, device=facts.key)
    with torch.no_grad():
        with QueryHeads() as query:
            at_once = decoder.forward(tokens, 0, SilentPhases(), every=True)
        parts = [decoder.forward(tokens[:, at : at + 1], at, SilentPhases()) for at in range(_TRIED)]
    # 1. Finite logits, or any comparison would fail for another reason.
    if bool(at_once.isnan().any()):
        raise UsageError(f"{name}: its logits have NaN in fp32: are its weights finite?")
    one_by_one = torch.cat(parts, 1)
    finite = at_once.isfinite()  # models mask ids that they have not by -inf
    # 2. The same logits token by token as at once, up to rounding.
    same = torch.equal(one_by_one[~finite], at_once[~finite])
    off = float((one_by_one - at_once)[finite].norm() / at_once[finite].norm()) if same else math.inf
    if not off <= _CLOSE:
        raise UsageError(
            f"{name}: token by token its logits are {off:.2g} off those of the same prompt at once: its cache does not "
            "keep what a prompt gives, or its tokens see later ones."
        )
    keys = decoder.cache.layers[0].keys
    layers = len(decoder.cache.layers)
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or query.heads or keys.shape[1]
    shapes = tuple(_shapes(model, decoder))
    return ServedShape(decoder.vocabulary, served_positions(model), layers, heads, keys.shape[1], keys.shape[3], shapes)


def _shapes(model: nn.Module, decoder: OwnDecoder) -> list[tuple[str, tuple[int, ...]]]:
    """Lists parameters by the names that bytes are counted by. A head tied to the embedding counts in addition."""
    held_by = {id(held.weight): held for held in decoder.held}
    tables = [id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    shapes = []
    for name, parameter in model.named_parameters():
        held = held_by.get(id(parameter))
        shape = tuple(parameter.shape)
        if id(parameter) in tables:
            shapes.append((f"{'embedding' if id(parameter) == tables[0] else 'positions'}.{name}", shape))
        if held is None and id(parameter) not in tables:
            shapes.append((f"other.{name}", shape))
        elif held is not None:
            layer = decoder.layer_of(held)
            shapes.append((f"head.{name}" if layer is None else f"blocks.{layer}.{name}", held.sides))
    return shapes
