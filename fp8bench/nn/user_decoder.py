"""Serves any causal model of a user with a static cache.

`UserDecoder` gives the model the interface of `Decoder`. The model's forward pass takes token ids and
`past_key_values`, as Hugging Face's models do. Hugging Face's models get their own StaticCache. Other models get a
StaticKeys object and call two of its methods. `past_key_values.update(keys, values, layer)` stores new keys and
values (batch, heads, new tokens, width), and returns those of all tokens. `past_key_values.get_seq_length()` returns
the position of their first token. Keys and values are rounded to their format before they are stored in the cache,
whose dtype is the carrier.
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
from fp8bench.nn.holders import CONV1D_KIND, EXPERTS_KIND, LINEAR_KIND, ProductWeight, find_product_weights
from fp8bench.nn.model_calls import shorten_error
from fp8bench.nn.own_model import seed_generators
from fp8bench.nn.served import ServedArm, ServedShape
from fp8bench.nn.storage import (
    DTYPES,
    CachedHeads,
    StoredWeight,
    draw_cached_values,
    store_weight,
)
from fp8bench.protocols import Phases, SilentPhases

# The number of positions of a model whose configuration does not give one.
_DEFAULT_POSITION_COUNT = 1 << 20
# The length of the prompt that checks a model's cache.
_CHECKED_TOKEN_COUNT = 8
# The largest relative difference of fp32 logits that counts as rounding.
_LOGITS_TOLERANCE = 1e-3


_CACHE_ARGUMENT = "past_key_values"


class StaticLayerCache:
    """The cache of one layer of a user's model. `at` is the position at which the next keys and values are stored."""

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
    """A cache with room for a fixed number of `positions` per sequence (a static cache). A user's model gets it as its
    argument `past_key_values`, and adds the keys and values of new tokens to it. `at` is the position of the first new
    token.
    """

    positions: int
    at: int = 0
    layers: list[StaticLayerCache] = field(default_factory=list)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.at

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer:
            self.layers.append(StaticLayerCache(self.positions))
        return self.layers[layer].update(keys, values)


def make_model(maker: Callable[[], Any], name: str, seed: int, facts: DeviceFacts) -> tuple[nn.Module, Tensor | None]:
    """Calls a user's function with seeded random generators. Returns the model that it makes, and its tokens (texts,
    positions) if it makes any.
    """
    # The function is the user's code, so name it in the report of any error.
    try:
        with seed_generators(seed, facts):
            answer = maker()
    # An error of fp8bench already has a message for the user.
    except Fp8benchError:
        raise
    except Exception as error:
        raise UsageError(f"{name} fails: {shorten_error(error)}.") from error
    model, ids = (*answer, None)[:2] if isinstance(answer, tuple) else (answer, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} returns {type(model).__name__}. It must return a model, or (model, token ids).")
    if ids is not None and not (
        isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point() and len(ids) and ids.shape[1] > 2
    ):
        raise UsageError(
            f"{name} returns invalid tokens with its model. They must be integers of shape (texts, positions), with 3 "
            "or more positions."
        )
    return model, ids


class UserDecoder:
    """A user's model with a static cache. The two `sizes` are the number of sequences and the number of positions in
    each sequence's cache. Raises UsageError for a model that takes no cache.
    """

    def __init__(self, name: str, model: nn.Module, arm: ServedArm, sizes: tuple[int, int], device: str) -> None:
        self.name = name
        self.carrier = DTYPES[arm.carrier]
        self.device = device
        self.model = model.to(device, self.carrier).eval().requires_grad_(False)
        self.phase: Phases = SilentPhases()
        self.calibrates = False
        # Refuse a model without a cache. Every token would read the whole prompt again, unlike on a server.
        self._forward_parameters = inspect.signature(model.forward).parameters
        if _CACHE_ARGUMENT not in self._forward_parameters:
            raise UsageError(
                f"{name}: forward of {type(model).__name__} takes no {_CACHE_ARGUMENT}, and a model without a cache "
                f"cannot be served. Call {_CACHE_ARGUMENT}.update(keys, values, layer) in forward, as Hugging Face's "
                "causal models do."
            )
        self.product_weights = find_linear_weights(name, model)
        # A model from transformers has imported the package already, so do not import it for other models.
        transformers: Any = sys.modules.get("transformers")
        is_transformers_model = transformers is not None and isinstance(model, transformers.PreTrainedModel)
        # Hugging Face's models require their own cache class.
        self.cache: Any = (
            transformers.StaticCache(model.config, sizes[1]) if is_transformers_model else StaticKeys(sizes[1])
        )
        self.vocabulary = self._start_cache(sizes[0])
        self.stored_weights: dict[str, StoredWeight] = {}
        self._store_weights(arm)
        self._store_attention_keys(arm)

    def forward(self, tokens: Tensor, at: int, phase: Phases, every: bool = False) -> Tensor:
        # 1. Set the position in the cache: Hugging Face's layers store it in a tensor, StaticKeys in a number.
        self.phase = phase
        for part in (self.cache, *self.cache.layers):
            if isinstance(length := getattr(part, "cumulative_length", None), Tensor):
                length.fill_(at)
            elif hasattr(part, "at"):
                part.at = at

        # 2. Call the model with the arguments that its forward accepts.
        named_arguments: dict[str, Any] = {
            _CACHE_ARGUMENT: self.cache,
            "use_cache": True,
            "logits_to_keep": 0 if every else 1,
        }
        if "cache_position" in self._forward_parameters:
            named_arguments["cache_position"] = torch.arange(at, at + tokens.shape[1], device=tokens.device)
        try:
            out = self.model(
                tokens, **{name: value for name, value in named_arguments.items() if name in self._forward_parameters}
            )
        except IndexError as error:
            raise UsageError(
                f"{self.name}: tokens at positions {at} to {at + tokens.shape[1] - 1} fail: {shorten_error(error)}. It "
                "has fewer positions or ids: choose shorter --contexts, or return (model, token ids) with valid ids."
            ) from error

        # 3. Find the logits in the result.
        if isinstance(out, Mapping):
            if "logits" not in out:
                raise UsageError(
                    f"{self.name} returns {', '.join(map(str, out))}. It must return logits: as a tensor, as the first "
                    "item of a tuple, or under the name 'logits'."
                )
            out = out["logits"]
        logits: Tensor = out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out[0]
        return logits if every else logits[:, -1:]

    def _start_cache(self, batch: int) -> int:
        """Runs one token, so that the cache allocates its tensors. Returns the size of the vocabulary."""
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        try:
            # Running one token shows the size of the vocabulary, and whether the model writes to the cache.
            with torch.no_grad():
                vocabulary = self.forward(tokens, 0, self.phase).shape[2]
        except (torch.OutOfMemoryError, UsageError):
            raise
        except Exception as error:
            raise UsageError(f"{self.name}: running one token with a cache fails: {shorten_error(error)}.") from error
        layers = self.cache.layers
        if not layers or not all(isinstance(layer.keys, Tensor) and layer.keys.numel() for layer in layers):
            raise UsageError(
                f"{self.name}: forward puts nothing into the cache that it gets. Call {_CACHE_ARGUMENT}.update."
            )
        # Sliding windows drop keys, so the cache's bytes would depend on more than the context.
        if any(getattr(layer, "is_sliding", False) for layer in layers):
            raise UsageError(f"{self.name}: some layers have a sliding window, whose bytes `infer` cannot count.")
        return vocabulary

    def _store_weights(self, arm: ServedArm) -> None:
        for product_weight in self.product_weights:
            module = product_weight.module
            # A layer outside of all blocks has its weight in the carrier dtype, not in the requested weight format.
            format_name = arm.carrier if self.find_block_number(product_weight) is None else arm.weight_format
            if format_name in DTYPES:
                vars(module)["forward"] = self._make_product(module.forward)
                continue
            weight = product_weight.weight.float()
            # Hugging Face's Conv1D stores the transpose of a linear layer's weight.
            stored_weight = store_weight(
                weight.t() if product_weight.kind == CONV1D_KIND else weight, format_name, arm.low_inputs
            )
            self.stored_weights[product_weight.name] = stored_weight
            vars(module)["forward"] = self._make_product(stored_weight, getattr(module, "bias", None))

    def find_block_number(self, product_weight: ProductWeight) -> int | None:
        """Returns the number of the block that contains a linear layer, or None."""
        # The first number in the path is the block's number, as in Hugging Face's names.
        block_number_match = None if product_weight.head else re.search(r"(?:^|\.)(\d+)(?:\.|$)", product_weight.name)
        if block_number_match is None:
            return None
        number = int(block_number_match[1])
        layers = len(self.cache.layers)
        if number >= layers:
            raise UsageError(
                f"{self.name}: by its path {product_weight.name} is in block {number}, but the cache has {layers} "
                "layers. Only the blocks may be in a list, and each block must call the cache once."
            )
        return number

    def _make_product(
        self, multiplier: Callable[[Tensor], Tensor] | StoredWeight, bias: Tensor | None = None
    ) -> Callable[..., Any]:
        def product(x: Tensor) -> Tensor:
            if callable(multiplier):
                with self.phase.gemm:
                    return multiplier(x)
            y = multiplier.multiply(x.reshape(-1, x.shape[-1]), self.phase).view(*x.shape[:-1], -1)
            return y if bias is None else y + bias

        return product

    def _store_attention_keys(self, arm: ServedArm) -> None:
        self.heads: list[tuple[CachedHeads, CachedHeads]] = []
        for layer in self.cache.layers:
            keys = CachedHeads(arm.kv_format, (*layer.keys.shape,), self.carrier, self.device)
            values = CachedHeads(arm.kv_format, (*layer.values.shape,), self.carrier, self.device)
            self.heads.append((keys, values))
            if keys.needs_decoding:
                layer.update = self._round_update(layer.update, (keys, values))

    def _round_update(self, update: Callable[..., Any], pair: tuple[CachedHeads, CachedHeads]) -> Callable[..., Any]:
        def update_rounded_values(keys: Tensor, values: Tensor, *more: Any, **named: Any) -> Any:
            with self.phase.cast:
                for heads, new in zip(pair, (keys, values), strict=True):
                    if self.calibrates:
                        heads.calibrate(new)
                    # `heads` only rounds the values, so their position in it does not matter.
                    heads.write(new, 0)
                # Attention must read the rounded values that the cache returns.
                rounded = [heads.read(keys.shape[2]) for heads in pair]
            return update(*rounded, *more, **named)

        return update_rounded_values

    def fill_cache(self, end: int, generator: torch.Generator) -> None:
        for layer, pair in zip(self.cache.layers, self.heads, strict=True):
            for heads, tensor in zip(pair, (layer.keys, layer.values), strict=True):
                shape = (*tensor.shape[:2], end, tensor.shape[3])
                for begin_position, drawn in draw_cached_values(shape, generator, tensor is layer.keys):
                    # The first piece determines the scales of the whole cache.
                    if begin_position == 0:
                        heads.calibrate(drawn)
                    heads.write(drawn.to(self.carrier), 0)
                    tensor[:, :, begin_position : begin_position + drawn.shape[2]] = heads.read(drawn.shape[2])

    def weight_bytes(self) -> int:
        replaced_weight_ids = {
            id(product_weight.weight)
            for product_weight in self.product_weights
            if product_weight.name in self.stored_weights
        }
        tensors: list[Tensor] = [
            parameter for parameter in self.model.parameters() if id(parameter) not in replaced_weight_ids
        ]
        for weight in self.stored_weights.values():
            tensors += weight.tensors()
        return sum(tensor.nbytes for tensor in tensors)

    def weight_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def list_weights_and_cache(self) -> tuple[object, object]:
        return (list(self.model.parameters()), self.stored_weights), [
            (layer.keys, layer.values) for layer in self.cache.layers
        ]


def find_linear_weights(name: str, model: nn.Module) -> tuple[ProductWeight, ...]:
    """Returns the weights of linear layers that the model calls as layers. Raises UsageError for stacked
    experts, because the bytes that a step reads of them cannot be counted.
    """
    product_weights = find_product_weights(model)
    if any(product_weight.kind == EXPERTS_KIND for product_weight in product_weights):
        raise UsageError(f"{name} has stacked experts, and `infer` cannot count which of them a step reads.")
    return tuple(
        product_weight
        for product_weight in product_weights
        if product_weight.kind in (LINEAR_KIND, CONV1D_KIND) and not product_weight.reason
    )


def count_token_positions(model: nn.Module) -> int:
    return int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or _DEFAULT_POSITION_COUNT)


class QueryHeads(TorchFunctionMode):
    """Watches torch's attention and records its number of query heads, which may exceed the number of key heads. It is
    0 until attention is called.
    """

    heads = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named_arguments = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.heads = (args[0] if args else named_arguments["query"]).shape[1]
        return func(*args, **named_arguments)


def check_user_model(name: str, model: nn.Module, seed: int, facts: DeviceFacts) -> ServedShape:
    """Checks that a model's cache works, and returns the shape of the model. The cache works if a prompt gives the
    same logits token by token and as a whole.
    """
    user_decoder = UserDecoder(name, model, ServedArm("fp32"), (1, _CHECKED_TOKEN_COUNT), facts.key)
    generator = torch.Generator(facts.key).manual_seed(seed)
    # One text without gradients suffices to check the cache.
    tokens = torch.randint(user_decoder.vocabulary, (1, _CHECKED_TOKEN_COUNT), generator=generator, device=facts.key)
    with torch.no_grad():
        with QueryHeads() as query:
            prompt_logits = user_decoder.forward(tokens, 0, SilentPhases(), every=True)
        logits_by_token = [
            user_decoder.forward(tokens[:, position : position + 1], position, SilentPhases())
            for position in range(_CHECKED_TOKEN_COUNT)
        ]
    # 1. Refuse NaN, because comparisons with NaN always fail.
    if bool(prompt_logits.isnan().any()):
        raise UsageError(f"{name}: its logits have NaN in fp32: are its weights finite?")
    token_logits = torch.cat(logits_by_token, 1)
    is_finite = prompt_logits.isfinite()  # models mask unused ids with -inf
    # 2. Compare the logits of single tokens with those of the whole prompt, up to rounding.
    has_equal_infinities = torch.equal(token_logits[~is_finite], prompt_logits[~is_finite])
    relative_error = (
        float((token_logits - prompt_logits)[is_finite].norm() / prompt_logits[is_finite].norm())
        if has_equal_infinities
        else math.inf
    )
    if not relative_error <= _LOGITS_TOLERANCE:
        raise UsageError(
            f"{name}: token by token the logits differ by {relative_error:.2g} from those of the whole prompt: "
            "the cache does not return what it stored, or tokens attend to later tokens."
        )
    keys = user_decoder.cache.layers[0].keys
    layers = len(user_decoder.cache.layers)
    # The cache shows only the number of key heads, and there may be more query heads.
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or query.heads or keys.shape[1]
    shapes = tuple(_list_weight_shapes(model, user_decoder))
    return ServedShape(
        user_decoder.vocabulary, count_token_positions(model), layers, heads, keys.shape[1], keys.shape[3], shapes
    )


def _list_weight_shapes(model: nn.Module, decoder: UserDecoder) -> list[tuple[str, tuple[int, ...]]]:
    """Lists the shapes of a model's parameters, under the names by which `step_bytes` counts their bytes. If the head
    is tied to the embedding, its weight is listed under both names.
    """
    holders = {id(product_weight.weight): product_weight for product_weight in decoder.product_weights}
    embedding_ids = [id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    shapes = []
    for name, parameter in model.named_parameters():
        product_weight = holders.get(id(parameter))
        shape = tuple(parameter.shape)
        if id(parameter) in embedding_ids:
            # The first embedding is that of the tokens. Any other counts as an embedding of positions.
            shapes.append((f"{'embedding' if id(parameter) == embedding_ids[0] else 'positions'}.{name}", shape))
        if product_weight is None and id(parameter) not in embedding_ids:
            shapes.append((f"other.{name}", shape))
        elif product_weight is not None:
            layer = decoder.find_block_number(product_weight)
            shapes.append((f"head.{name}" if layer is None else f"blocks.{layer}.{name}", product_weight.sides))
    return shapes
