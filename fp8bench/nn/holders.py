"""The weights of any model that products are made with: which can be converted, why others cannot, and their products.

A parameter of three dimensions holds a matrix for each expert. How a module deals out tokens to its experts cannot be
known, so its forward pass runs unchanged while torch's functions are watched. A slice of such a parameter, a choice of
its matrices, or a cast of it is recognised by the call that made it, and products with it are replaced. This works for
one matrix at a time, for products of many matrices, and for grouped products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model.step import part_of
from fp8bench.protocols import Layer, key_of, keys_of

LINEAR = "linear"
CONV1D = "conv1d"
CONV2D = "conv2d"
EXPERTS = "experts"
HEAD = "head"
# Layers that torch multiplies in ways that have no counterpart here.
_OTHERS = (
    nn.Conv1d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Bilinear,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
# Layers around products: embeddings and norms, the head's output, and the residual stream, which has no module.
EMBED = "embed"
NORM = "norm"
LOGITS = "logits"
RESIDUAL = "residual"
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)
# The last word of a head's path, used if neither the model nor a tied embedding identifies the layer.
_HEADS = ("head", "lm_head", "classifier", "score")
# More groups of channels would be too many small products, one after the other.
MOST_GROUPS = 64
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class ProductWeight:
    """A weight of a model: the parameter of that name of a module.

    `name` is its path, `also` has further paths of the same module; where a module has several such parameters the path
    ends in the parameter's name. One that cannot be converted has a `reason`, a sentence, and a `rule`, a word for it.
    """

    name: str
    kind: str
    module: nn.Module
    parameter: str = "weight"
    also: tuple[str, ...] = ()
    head: bool = False
    reason: str = ""
    rule: str = ""

    @property
    def shown_kind(self) -> str:
        return HEAD if self.head else self.kind

    @property
    def group(self) -> str:
        return "" if self.head else part_of(self.name)

    def layer(self, keys: Collection[str] = ()) -> Layer:
        """The layer of precision maps, under that of its paths which the longest key of the map names."""
        layers = list(_layers(self))
        keyed = [(key_of(layer, keys) or "", layer) for layer in layers]
        named = [(len(key), layer) for key, layer in keyed if key not in (layer.kind, layer.group)]
        return max(named, key=lambda pair: pair[0])[1] if named else layers[0]

    @property
    def weight(self) -> torch.Tensor:
        return weight_of(self.module, self.parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        weight = self.weight
        return () if is_lazy(weight) else tuple(weight.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs of the forward product, of each matrix or group."""
        first, *others_sides = self.shape
        if self.kind == CONV1D:
            return others_sides[0], first
        if self.kind == CONV2D:
            return first // int(getattr(self.module, "groups", 1)), others_sides[0] * others_sides[1] * others_sides[2]
        return (others_sides[0], others_sides[1]) if self.kind == EXPERTS else (first, others_sides[0])


def weight_of(module: nn.Module, name: str = "weight") -> Any:
    """Returns a tensor of a module, or None. A parametrization that changes when its tensor is read in training mode,
    like spectral norm's vectors, is not changed."""
    parametrized = getattr(module, "parametrizations", {})
    if name not in parametrized:
        return getattr(module, name, None)
    # Some parametrizations change in training when they are read; looking must change nothing.
    modes = [(part, part.training) for part in parametrized[name].modules()]
    parametrized[name].eval()
    try:
        return getattr(module, name)
    finally:
        for part, mode in modes:
            part.training = mode


def weights_of(model: nn.Module, skip: Sequence[str] = ()) -> tuple[ProductWeight, ...]:
    """Every weight of a model that products are made with, in the model's order.

    `skip` are patterns of paths or kinds ('head', '*.router', 'model.layers.0') to leave unchanged. Raises UnknownName
    for a pattern that fits nothing.
    """
    # Layers that occur twice have several paths but one weight.
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    inside = {child for parent in paths if isinstance(parent, nn.MultiheadAttention) for child in parent.children()}
    head = _head_of(model, paths)
    holders = [
        replace(held, head=held.module is head)
        for module, names in paths.items()
        for held in _of_module(module, names, module in inside)
    ]
    # A pattern that fits nothing is a typing error more often than not.
    for pattern in skip:
        if not any(_fits(held, pattern) for held in holders):
            keys = keys_of([layer for held in holders for layer in _layers(held)])
            raise UnknownName(
                "layer of this model", pattern, keys, f"{_describe_layers(holders)}, and patterns of them ('*.router')"
            )
    return tuple(_skip(held, skip) for held in holders)


def layers_around(model: nn.Module, holders: Sequence[ProductWeight]) -> list[tuple[Layer, nn.Module]]:
    parts = [(Layer(f"{held.name}.{LOGITS}", LOGITS, product=False), held.module) for held in holders if held.head]
    for path, module in model.named_modules():
        gain = weight_of(module)
        norm = isinstance(module, _NORMS)
        if not norm and "norm" in type(module).__name__.lower():
            # A library's own norm has nothing but a weight for each feature.
            norm = isinstance(gain, Tensor) and gain.dim() == 1 and not list(module.children())
        kind = EMBED if isinstance(module, nn.Embedding) else NORM if norm else ""
        if kind:
            parts.append((Layer(path, kind, product=False), module))
    return parts


def check_map(keys: Collection[str], holders: Sequence[ProductWeight], around: Sequence[Layer] = ()) -> None:
    # Kinds, names and prefixes of names are all keys.
    existing = keys_of([*(layer for held in holders for layer in _layers(held)), *around])
    for key in keys:
        if key == RESIDUAL and key not in existing:
            raise UsageError(
                f"--precision-map {key}=...: a model of your own adds to its residual stream where nobody can see it. "
                "Leave it out; embed, norm, logits and output can be given a precision."
            )
        if key not in existing:
            raise UnknownName(
                "layer of this model", key, existing, _describe_layers(holders, [layer.kind for layer in around])
            )


def _layers(held: ProductWeight) -> Iterator[Layer]:
    yield from (Layer(name, held.shown_kind, group=held.group) for name in (held.name, *held.also))


def _describe_layers(holders: Sequence[ProductWeight], around: Sequence[str] = ()) -> str:
    words = (word for held in holders for word in (held.shown_kind, held.group))
    kinds = ", ".join(dict.fromkeys(filter(None, (*words, *around))))
    names = ", ".join(held.name for held in holders[:_SHOWN])
    return f"{kinds}; layers by name ({names}, {len(holders)} in all), and prefixes of names" if holders else ""


def _fits(held: ProductWeight, pattern: str) -> bool:
    if pattern in (held.kind, held.shown_kind, type(held.module).__name__):
        return True
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in (held.name, *held.also))


def _skip(held: ProductWeight, skip: Sequence[str]) -> ProductWeight:
    pattern = next((pattern for pattern in skip if _fits(held, pattern)), None)
    if pattern is None or held.reason:
        return held
    return replace(held, reason=f"left out by '{pattern}'", rule="skipped")


def _of_module(module: nn.Module, paths: Sequence[str], in_attention: bool) -> Iterator[ProductWeight]:
    kind, base = kind_of(module)
    if base is not None:
        # torch's attention passes its weights to a function directly, bypassing any forward that could be replaced.
        first, *also = paths
        held = ProductWeight(first or type(module).__name__, kind, module, also=tuple(also))
        rule, reason = _forward_objection(held, base) or _weight_objection(held) or ("", "")
        if in_attention:
            rule = "not-called"
            reason = "torch's own attention reads its weight and never calls it"
        yield replace(held, rule=rule, reason=reason)
    elif isinstance(module, _OTHERS):
        reason = f"there is no product of ours for {type(module).__name__}"
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and "weight" in attribute:
                held = _of_parameter(module, paths, attribute, type(module).__name__)
                yield replace(held, rule="class", reason=reason)
    elif not type(module).__module__.startswith("torch.nn."):
        for attribute, parameter in module.named_parameters(recurse=False):
            # Its shape suggests a matrix for each of several experts.
            if is_lazy(parameter):
                continue
            if parameter.dim() == 3 and min(parameter.shape) > 1 and parameter.is_floating_point():
                held = _of_parameter(module, paths, attribute, EXPERTS)
                rule, reason = _replacement_objection(held) or _weight_objection(held) or ("", "")
                yield replace(held, rule=rule, reason=reason)


def _of_parameter(module: nn.Module, paths: Sequence[str], attribute: str, kind: str) -> ProductWeight:
    first, *also = (f"{path}.{attribute}".lstrip(".") for path in paths)
    return ProductWeight(first, kind, module, attribute, tuple(also))


def kind_of(module: nn.Module) -> tuple[str, type[nn.Module] | None]:
    transformers = sys.modules.get("transformers.pytorch_utils")
    kinds: list[tuple[str, type[nn.Module] | None]] = [(LINEAR, nn.Linear), (CONV2D, nn.Conv2d)]
    kinds.append((CONV1D, getattr(transformers, "Conv1D", None)))
    return next(((kind, base) for kind, base in kinds if base is not None and isinstance(module, base)), ("", None))


def _forward_objection(held: ProductWeight, base: type[nn.Module]) -> tuple[str, str] | None:
    kind = type(held.module)
    if any(getattr(kind, name, None) is not getattr(base, name, None) for name in ("forward", "_conv_forward")):
        return "forward", f"{kind.__name__} has a forward pass of its own, which a conversion would replace"
    return _replacement_objection(held)


def _replacement_objection(held: ProductWeight) -> tuple[str, str] | None:
    if "forward" in vars(held.module):
        return "forward", "its forward pass has been replaced already"
    return None


def _weight_objection(held: ProductWeight) -> tuple[str, str] | None:
    weight = held.weight
    if is_lazy(weight):
        return "shape", "its weight has no shape before the first forward pass: call the model once in make()"
    if not weight.is_floating_point():
        return "dtype", f"its weight is {str(weight.dtype).removeprefix('torch.')}, quantised already"
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return "dtype", f"its weight is a {type(weight).__name__}, a kind of tensor of its own"
    # Each group is a separate product, and hundreds of launches would hide the effect of a precision.
    groups = int(getattr(held.module, "groups", 1))
    if groups > MOST_GROUPS:
        return "groups", f"{groups} groups of channels are as many small products: at most {MOST_GROUPS} are converted"
    return None


def _head_of(model: nn.Module, paths: dict[nn.Module, list[str]]) -> nn.Module | None:
    """Returns the layer of the model's output: the declared one, one tied to an embedding, or one with such a name."""
    says = getattr(model, "get_output_embeddings", None)
    declared = says() if callable(says) else None
    if isinstance(declared, nn.Module) and declared in paths:
        return declared
    # A head that shares an embedding's weight is one whatever it is called.
    tables = {id(path.weight) for path in paths if isinstance(path, nn.Embedding)}
    layers = [path for path in paths if kind_of(path)[0]]
    tied = next((layer for layer in layers if id(weight_of(layer)) in tables), None)
    # The last layer of a head that has several has a path like 'classifier.1'.
    so_called = [layer for layer in layers if set(paths[layer][0].split(".")[-2:]) & set(_HEADS)]
    return tied or (so_called[-1] if so_called else None)


def refuse_meta(model: nn.Module) -> None:
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise UsageError(f"{meta} is on the meta device, without numbers: give the model its weights in make()")


# Called for each product with a parameter: the parameter's name, whether the product is x times a weight in a form that
# can be replaced, and what computes it.
Around = Callable[[str, bool, Callable[[], Any]], Any]

_LINEAR = {F.linear}
_PRODUCTS = {
    torch.mm,
    torch.bmm,
    torch.matmul,
    Tensor.mm,
    Tensor.bmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
}
_GROUPED = {getattr(owner, name) for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(owner, name)}
# Names of arguments that some callers give by name.
_NAMES = {F.linear: ("input", "weight", "bias"), **dict.fromkeys(_GROUPED, ("mat_a", "mat_b", "offs"))}
# Products that cannot be replaced.
_SUMS = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm, torch.einsum, F.bilinear}
KNOWN = _LINEAR | _PRODUCTS | _GROUPED


class Multiplier(Protocol):
    """Makes the products with a parameter."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., K) times weight (N, K) transposed."""

    def multiply_groups(self, x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """x (M, K), its first sizes[0] rows times the first of the weights (N, K) transposed, and so on."""


class Stacked(TorchFunctionMode):
    """Watches a module's forward pass. `products` replace those of its parameters, by name, that are x times a weight;
    without them torch computes all, and `around` is called for each."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        products: Mapping[str, Multiplier] | None = None,
        around: Around | None = None,
    ) -> None:
        super().__init__()
        self._products = products
        self._around = around
        # Also has what was computed from one parameter alone. A list: torch.compile cannot trace a hash of a tensor.
        self._known = list(parameters.items())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Weights come as positions, so that one look finds them.
        args, named = _by_place(func, args, kwargs or {})
        place = next((place for place, arg in enumerate(args) if self._name(arg)), None)
        if place is None:
            return func(*args, **named)
        name = self._name(args[place])
        # A call that is recognised is multiplied in the precision, or shown to whoever counts.
        if func in KNOWN or func in _SUMS:
            is_product = _may_be_told(func, args, named, place)
            if is_product and self._products is not None:
                return _product(func, args, place, self._products[name])
            run = partial(func, *args, **named)
            return run() if self._around is None else self._around(name, is_product, run)
        # Any other call runs unchanged; its result may still be the weight in a different shape.
        result = func(*args, **named)
        self._note(name, place, args, result)
        return result

    def _name(self, value: Any) -> str:
        return next((name for name, tensor in self._known if tensor is value), "") if isinstance(value, Tensor) else ""

    def _note(self, name: str, place: int, args: tuple[Any, ...], result: Any) -> None:
        has_other_tensor = any(
            isinstance(arg, Tensor) and arg.is_floating_point() for at, arg in enumerate(args) if at != place
        )
        if has_other_tensor:
            return
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if (
                isinstance(tensor, Tensor)
                and tensor.dim() > 1
                and tensor.is_floating_point()
                and not self._name(tensor)
            ):
                self._known.append((name, tensor))


def _by_place(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    remaining = dict(named)
    names = _NAMES.get(func, ())
    while len(args) < len(names) and names[len(args)] in remaining:
        args = (*args, remaining.pop(names[len(args)]))
    return args, remaining


def _may_be_told(func: Any, args: tuple[Any, ...], named: Mapping[str, Any], place: int) -> bool:
    """Whether a call is x times a weight, the weight being the argument at `place`."""
    # Calls with sums, keyword arguments or plain numbers do not multiply two tensors.
    if (
        func in _SUMS
        or any(value is not None for value in named.values())
        or not all(isinstance(arg, Tensor) for arg in args[:2])
    ):
        return False
    weight = args[place]
    operand = args[1 - place]
    # Each function names its weight at another place; a weight elsewhere is an operand like any other.
    if func in _LINEAR:
        return place == 1 and weight.dim() == 2
    if func in _GROUPED:
        return place == 1 and len(args) == 3 and (operand.dim(), weight.dim()) == (2, 3) and isinstance(args[2], Tensor)
    is_batched = weight.dim() == 3 and (operand.dim() == 2 or (operand.dim() == 3 and len(operand) == len(weight)))
    right = place == (0 if func is Tensor.__rmatmul__ else 1)
    return is_batched or (weight.dim() == 2 and (right or operand.dim() > 1))


def _product(func: Any, args: tuple[Any, ...], place: int, by: Multiplier) -> Tensor:
    if func in _LINEAR:
        y = by.linear(args[0], args[1])
        return y if len(args) < 3 or args[2] is None else y + args[2].to(y.dtype)
    if func in _GROUPED:
        return _multiply_groups(args[0], args[1], args[2].tolist(), by)
    first, second = (args[1], args[0]) if func is Tensor.__rmatmul__ else args
    if second is args[place]:
        # A product from the left is the transpose of one from the right.
        return _right(first, second, by)
    return _right(second.mT, first.mT, by).mT


def _right(x: Tensor, weight: Tensor, by: Multiplier) -> Tensor:
    """x (..., M, K) times weight (K, N); or weight (E, K, N), where x is (E, M, K), or (M, K) for all experts."""
    if weight.dim() == 2:
        return by.linear(x, weight.mT)
    every = x.expand(len(weight), *x.shape[-2:])
    y = by.multiply_groups(every.flatten(0, 1), weight.mT.unbind(), [every.shape[1]] * len(weight))
    return y.view(*every.shape[:2], -1)


def _multiply_groups(x: Tensor, weight: Tensor, ends: list[int], by: Multiplier) -> Tensor:
    """Rows of x (M, K) up to each of `ends` times their own matrix of (E, K, N). The host waits for the ends."""
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    y = by.multiply_groups(x[: sum(sizes)], weight.mT.unbind(), sizes)
    # No group owns the rows behind the last end.
    return F.pad(y, (0, 0, 0, len(x) - len(y)))
