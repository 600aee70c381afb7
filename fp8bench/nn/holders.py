"""Finds the weights that a model multiplies by. For each weight it finds whether the weight can be converted, and if
not, why. It also replaces the products with stacked weights.

A parameter of three dimensions is a stack: it holds a matrix for each expert. In general it cannot be known how a
module distributes tokens to its experts. So its forward pass runs unchanged, while torch's functions are watched. A
slice, a selection of matrices or a cast of the parameter is recognised by the call that made it, and all products with
it are replaced: with one matrix, a batch of matrices, or groups.
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
from fp8bench.model.step import find_transformer_part
from fp8bench.protocols import Layer, find_map_key, list_map_keys

LINEAR_KIND = "linear"
CONV1D_KIND = "conv1d"
CONV2D_KIND = "conv2d"
EXPERTS_KIND = "experts"
HEAD_KIND = "head"
# Layers whose products this package cannot compute.
_UNSUPPORTED_LAYERS = (
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
# The kinds of layers that have no product: embeddings, norms, the head's output, and the residual stream, which has
# no module.
EMBED_KIND = "embed"
NORM_KIND = "norm"
LOGITS_KIND = "logits"
RESIDUAL_LAYER_KIND = "residual"
_NORM_CLASSES = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.RMSNorm)
# Usual last parts of a head's path. They are used if neither the model nor a tied embedding identifies the head.
_HEAD_NAMES = ("head", "lm_head", "classifier", "score")
# A convolution with more channel groups is not converted, because it would become too many small products.
MAX_GROUPS = 64
_MAX_LISTED_NAMES = 4


@dataclass(frozen=True, eq=False)
class ProductWeight:
    """A weight that a model multiplies by: a parameter of a module.

    `name` is the module's path, and `module_aliases` has further paths of the same module. If a module has several
    such parameters, all these names end in the parameter's name. If a weight cannot be converted, `reason` is a
    sentence that explains why, and `rule` is a short code for it.
    """

    name: str
    kind: str
    module: nn.Module
    parameter: str = "weight"
    module_aliases: tuple[str, ...] = ()
    head: bool = False
    reason: str = ""
    rule: str = ""

    @property
    def shown_kind(self) -> str:
        return HEAD_KIND if self.head else self.kind

    @property
    def group(self) -> str:
        return "" if self.head else find_transformer_part(self.name)

    def layer(self, keys: Collection[str] = ()) -> Layer:
        """Returns the weight as a `Layer`, whose name or kind a precision map may have as a key. If the weight has
        several paths, the layer gets the path that the longest of the map's `keys` matches.
        """
        layers = list(_make_layers(self))
        key_layer_pairs = [(find_map_key(layer, keys) or "", layer) for layer in layers]
        matching_layers = [(len(key), layer) for key, layer in key_layer_pairs if key not in (layer.kind, layer.group)]
        return max(matching_layers, key=lambda pair: pair[0])[1] if matching_layers else layers[0]

    @property
    def weight(self) -> torch.Tensor:
        return get_weight(self.module, self.parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        weight = self.weight
        return () if is_lazy(weight) else tuple(weight.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Returns the numbers of output and input features of one forward product with this weight. If the weight is
        a stack of matrices or a convolution with groups, that is the product with one matrix or one group.
        """
        first, *other_sides = self.shape
        if self.kind == CONV1D_KIND:
            return other_sides[0], first
        if self.kind == CONV2D_KIND:
            return first // int(getattr(self.module, "groups", 1)), other_sides[0] * other_sides[1] * other_sides[2]
        return (other_sides[0], other_sides[1]) if self.kind == EXPERTS_KIND else (first, other_sides[0])


def get_weight(module: nn.Module, name: str = "weight") -> Any:
    """Returns a tensor of a module, or None. Reading it changes nothing, even if the module has a parametrization,
    such as spectral norm, that updates itself whenever its tensor is read in training mode.
    """
    parametrizations = getattr(module, "parametrizations", {})
    if name not in parametrizations:
        return getattr(module, name, None)
    # Read the weight in eval mode, because some parametrizations update themselves in training mode.
    training_modes = [(part, part.training) for part in parametrizations[name].modules()]
    parametrizations[name].eval()
    try:
        return getattr(module, name)
    finally:
        for part, mode in training_modes:
            part.training = mode


def find_product_weights(model: nn.Module, skip: Sequence[str] = ()) -> tuple[ProductWeight, ...]:
    """Returns every weight that a model multiplies by, in the model's order. Weights that match a pattern of `skip`
    are not converted. A pattern is a path or a kind ('head', '*.router', 'model.layers.0').

    Raises UnknownName for a pattern that matches no weight.
    """
    # A layer that occurs twice has several paths but one weight.
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    attention_children = {
        child for parent in paths if isinstance(parent, nn.MultiheadAttention) for child in parent.children()
    }
    output_layer = _find_output_layer(model, paths)
    holders = [
        replace(product_weight, head=product_weight.module is output_layer)
        for module, names in paths.items()
        for product_weight in _list_module_weights(module, names, module in attention_children)
    ]
    # Refuse a pattern without a match, which is probably a typing error.
    for pattern in skip:
        if not any(_matches_pattern(product_weight, pattern) for product_weight in holders):
            keys = list_map_keys([layer for product_weight in holders for layer in _make_layers(product_weight)])
            raise UnknownName(
                "layer of this model", pattern, keys, f"{_describe_layers(holders)}, and patterns of them ('*.router')"
            )
    return tuple(_apply_skip_patterns(product_weight, skip) for product_weight in holders)


def list_surrounding_layers(model: nn.Module, holders: Sequence[ProductWeight]) -> list[tuple[Layer, nn.Module]]:
    surrounding_layers = [
        (Layer(f"{product_weight.name}.{LOGITS_KIND}", LOGITS_KIND, product=False), product_weight.module)
        for product_weight in holders
        if product_weight.head
    ]
    for path, module in model.named_modules():
        norm_weight = get_weight(module)
        is_norm = isinstance(module, _NORM_CLASSES)
        if not is_norm and "norm" in type(module).__name__.lower():
            # The weight of a library's norm has one dimension, and the norm has no other modules inside.
            is_norm = isinstance(norm_weight, Tensor) and norm_weight.dim() == 1 and not list(module.children())
        layer_kind = EMBED_KIND if isinstance(module, nn.Embedding) else NORM_KIND if is_norm else ""
        if layer_kind:
            surrounding_layers.append((Layer(path, layer_kind, product=False), module))
    return surrounding_layers


def check_precision_map(keys: Collection[str], holders: Sequence[ProductWeight], around: Sequence[Layer] = ()) -> None:
    # The valid keys are kinds of layers, names of layers, and prefixes of names.
    existing_keys = list_map_keys(
        [*(layer for product_weight in holders for layer in _make_layers(product_weight)), *around]
    )
    for key in keys:
        if key == RESIDUAL_LAYER_KIND and key not in existing_keys:
            raise UsageError(
                f"--precision-map {key}=...: the residual stream inside your model cannot be observed. "
                "Remove this key: only embed, norm, logits and output can have a precision."
            )
        if key not in existing_keys:
            raise UnknownName(
                "layer of this model",
                key,
                existing_keys,
                _describe_layers(holders, [layer.kind for layer in around]),
            )


def _make_layers(product_weight: ProductWeight) -> Iterator[Layer]:
    yield from (
        Layer(name, product_weight.shown_kind, group=product_weight.group)
        for name in (product_weight.name, *product_weight.module_aliases)
    )


def _describe_layers(holders: Sequence[ProductWeight], around: Sequence[str] = ()) -> str:
    kind_and_group_names = (
        kind_name for product_weight in holders for kind_name in (product_weight.shown_kind, product_weight.group)
    )
    kinds = ", ".join(dict.fromkeys(filter(None, (*kind_and_group_names, *around))))
    names = ", ".join(product_weight.name for product_weight in holders[:_MAX_LISTED_NAMES])
    return f"{kinds}; layers by name ({names}, {len(holders)} in all), and prefixes of names" if holders else ""


def _matches_pattern(product_weight: ProductWeight, pattern: str) -> bool:
    if pattern in (product_weight.kind, product_weight.shown_kind, type(product_weight.module).__name__):
        return True
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        for name in (product_weight.name, *product_weight.module_aliases)
    )


def _apply_skip_patterns(product_weight: ProductWeight, skip: Sequence[str]) -> ProductWeight:
    pattern = next((pattern for pattern in skip if _matches_pattern(product_weight, pattern)), None)
    if pattern is None or product_weight.reason:
        return product_weight
    return replace(product_weight, reason=f"left out by '{pattern}'", rule="skipped")


def _list_module_weights(module: nn.Module, paths: Sequence[str], in_attention: bool) -> Iterator[ProductWeight]:
    kind, base = classify_module(module)
    if base is not None:
        # torch's attention module passes its weights to a function directly, so no forward pass can be replaced.
        first_path, *module_aliases = paths
        product_weight = ProductWeight(
            first_path or type(module).__name__, kind, module, module_aliases=tuple(module_aliases)
        )
        rule, reason = _check_module_forward(product_weight, base) or _check_weight(product_weight) or ("", "")
        if in_attention:
            rule = "not-called"
            reason = "torch's attention module reads its weight without calling the layer"
        yield replace(product_weight, rule=rule, reason=reason)
    elif isinstance(module, _UNSUPPORTED_LAYERS):
        reason = f"fp8bench cannot compute the products of {type(module).__name__}"
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and "weight" in attribute:
                product_weight = _make_parameter_weight(module, paths, attribute, type(module).__name__)
                yield replace(product_weight, rule="class", reason=reason)
    elif not type(module).__module__.startswith("torch.nn."):
        for attribute, parameter in module.named_parameters(recurse=False):
            # A parameter with three dimensions probably has a matrix for each of several experts.
            if is_lazy(parameter):
                continue
            if parameter.dim() == 3 and min(parameter.shape) > 1 and parameter.is_floating_point():
                product_weight = _make_parameter_weight(module, paths, attribute, EXPERTS_KIND)
                rule, reason = _check_replacement(product_weight) or _check_weight(product_weight) or ("", "")
                yield replace(product_weight, rule=rule, reason=reason)


def _make_parameter_weight(module: nn.Module, paths: Sequence[str], attribute: str, kind: str) -> ProductWeight:
    first_parameter_path, *further_parameter_paths = (f"{path}.{attribute}".lstrip(".") for path in paths)
    return ProductWeight(first_parameter_path, kind, module, attribute, tuple(further_parameter_paths))


def classify_module(module: nn.Module) -> tuple[str, type[nn.Module] | None]:
    transformers = sys.modules.get("transformers.pytorch_utils")
    kinds: list[tuple[str, type[nn.Module] | None]] = [(LINEAR_KIND, nn.Linear), (CONV2D_KIND, nn.Conv2d)]
    kinds.append((CONV1D_KIND, getattr(transformers, "Conv1D", None)))
    return next(((kind, base) for kind, base in kinds if base is not None and isinstance(module, base)), ("", None))


def _check_module_forward(product_weight: ProductWeight, base: type[nn.Module]) -> tuple[str, str] | None:
    module_class = type(product_weight.module)
    if any(getattr(module_class, name, None) is not getattr(base, name, None) for name in ("forward", "_conv_forward")):
        return "forward", f"{module_class.__name__} overrides forward, and a conversion would replace that forward pass"
    return _check_replacement(product_weight)


def _check_replacement(product_weight: ProductWeight) -> tuple[str, str] | None:
    if "forward" in vars(product_weight.module):
        return "forward", "its forward pass is already replaced"
    return None


def _check_weight(product_weight: ProductWeight) -> tuple[str, str] | None:
    weight = product_weight.weight
    if is_lazy(weight):
        return "shape", "its weight has no shape before the first forward pass: call the model once in make()"
    if not weight.is_floating_point():
        return "dtype", f"its weight is already quantised to {str(weight.dtype).removeprefix('torch.')}"
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return "dtype", f"its weight is a {type(weight).__name__}, which is a tensor subclass"
    # Each group is a separate product. With hundreds of products the launches would hide the effect of a precision.
    groups = int(getattr(product_weight.module, "groups", 1))
    if groups > MAX_GROUPS:
        return "groups", f"its {groups} channel groups are separate small products: at most {MAX_GROUPS} are converted"
    return None


def _find_output_layer(model: nn.Module, paths: dict[nn.Module, list[str]]) -> nn.Module | None:
    """Returns the model's output layer: the layer that the model declares, a layer tied to an embedding, or a layer
    with a usual name.
    """
    get_output_layer = getattr(model, "get_output_embeddings", None)
    declared_output_layer = get_output_layer() if callable(get_output_layer) else None
    if isinstance(declared_output_layer, nn.Module) and declared_output_layer in paths:
        return declared_output_layer
    # A layer that shares an embedding's weight is a head, whatever its name is.
    embedding_ids = {id(path.weight) for path in paths if isinstance(path, nn.Embedding)}
    layers = [path for path in paths if classify_module(path)[0]]
    tied_layer = next((layer for layer in layers if id(get_weight(layer)) in embedding_ids), None)
    # If a head has several layers, the last one has a path such as 'classifier.1'.
    head_named_layers = [layer for layer in layers if set(paths[layer][0].split(".")[-2:]) & set(_HEAD_NAMES)]
    return tied_layer or (head_named_layers[-1] if head_named_layers else None)


def refuse_meta_parameters(model: nn.Module) -> None:
    meta_parameter_name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta_parameter_name is not None:
        raise UsageError(
            f"{meta_parameter_name} is on the meta device and has no values: load the model's weights in make()"
        )


# A function that is called for each product with a parameter. It gets the parameter's name, whether the product can
# be replaced, and the function that computes the product.
ObserveWeightProduct = Callable[[str, bool, Callable[[], Any]], Any]

_LINEAR_FUNCTIONS = {F.linear}
_MATMUL_FUNCTIONS = {
    torch.mm,
    torch.bmm,
    torch.matmul,
    Tensor.mm,
    Tensor.bmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
}
_GROUPED_FUNCTIONS = {
    getattr(owner, name) for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(owner, name)
}
# Argument names of functions that may be called with keywords.
_ARGUMENT_NAMES = {
    F.linear: ("input", "weight", "bias"),
    **dict.fromkeys(_GROUPED_FUNCTIONS, ("mat_a", "mat_b", "offs")),
}
# Functions whose products cannot be replaced.
_UNREPLACEABLE_FUNCTIONS = {torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm, torch.einsum, F.bilinear}
_REPLACEABLE_FUNCTIONS = _LINEAR_FUNCTIONS | _MATMUL_FUNCTIONS | _GROUPED_FUNCTIONS


class WeightMultiplier(Protocol):
    """Computes products with one parameter, as a replacement for torch's matrix products."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns x (..., K) times a transposed weight (N, K)."""

    def multiply_groups(self, x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Multiplies groups of rows of x (M, K) by transposed weights (N, K). The first sizes[0] rows are multiplied
        by the first weight, and so on.
        """


class StackedWeightWatch(TorchFunctionMode):
    """Intercepts products with a module's stacked parameters during its forward pass. `products` maps a parameter's
    name to the WeightMultiplier that computes its products. Without `products`, the callback `around` gets each
    product, and torch computes it.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        products: Mapping[str, WeightMultiplier] | None = None,
        around: ObserveWeightProduct | None = None,
    ) -> None:
        super().__init__()
        self._products = products
        self._around = around
        # The parameters, and all tensors that were computed from one parameter alone. This is a list, because
        # torch.compile cannot trace the hash of a tensor.
        self._tracked = list(parameters.items())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Make keyword arguments positional, so that the weight is searched for in `args` only.
        args, keyword_args = _make_keywords_positional(func, args, kwargs or {})
        position = next((position for position, arg in enumerate(args) if self._find_parameter_name(arg)), None)
        if position is None:
            return func(*args, **keyword_args)
        name = self._find_parameter_name(args[position])
        # The call multiplies by the weight: replace this product, or pass it to the callback `_around`.
        if func in _REPLACEABLE_FUNCTIONS or func in _UNREPLACEABLE_FUNCTIONS:
            is_replaceable_product = _is_replaceable_product(func, args, keyword_args, position)
            if is_replaceable_product and self._products is not None:
                return _replace_product_call(func, args, position, self._products[name])
            run = partial(func, *args, **keyword_args)
            return run() if self._around is None else self._around(name, is_replaceable_product, run)
        # A call that is not a product runs unchanged. Its result may be a view or cast of the weight, so track it.
        result = func(*args, **keyword_args)
        self._track_derived_tensors(name, position, args, result)
        return result

    def _find_parameter_name(self, value: Any) -> str:
        return (
            next((name for name, tensor in self._tracked if tensor is value), "") if isinstance(value, Tensor) else ""
        )

    def _track_derived_tensors(self, name: str, position: int, args: tuple[Any, ...], result: Any) -> None:
        has_other_float_tensor = any(
            isinstance(arg, Tensor) and arg.is_floating_point() for index, arg in enumerate(args) if index != position
        )
        if has_other_float_tensor:
            return
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if (
                isinstance(tensor, Tensor)
                and tensor.dim() > 1
                and tensor.is_floating_point()
                and not self._find_parameter_name(tensor)
            ):
                self._tracked.append((name, tensor))


def _make_keywords_positional(
    func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    unbound_keywords = dict(named)
    names = _ARGUMENT_NAMES.get(func, ())
    while len(args) < len(names) and names[len(args)] in unbound_keywords:
        args = (*args, unbound_keywords.pop(names[len(args)]))
    return args, unbound_keywords


def _is_replaceable_product(func: Any, args: tuple[Any, ...], named: Mapping[str, Any], position: int) -> bool:
    """Returns whether a call is a product of x and a weight that can be replaced. `args[position]` is the weight, and
    `named` are the keyword arguments.
    """
    # A call cannot be replaced if its function cannot be, if it has keyword arguments, or if it multiplies by a number.
    if (
        func in _UNREPLACEABLE_FUNCTIONS
        or any(value is not None for value in named.values())
        or not all(isinstance(arg, Tensor) for arg in args[:2])
    ):
        return False
    weight = args[position]
    operand = args[1 - position]
    # Each function accepts the weight only at some positions, and only with some numbers of dimensions.
    if func in _LINEAR_FUNCTIONS:
        return position == 1 and weight.dim() == 2
    if func in _GROUPED_FUNCTIONS:
        return (
            position == 1 and len(args) == 3 and (operand.dim(), weight.dim()) == (2, 3) and isinstance(args[2], Tensor)
        )
    is_stack_product = weight.dim() == 3 and (
        operand.dim() == 2 or (operand.dim() == 3 and len(operand) == len(weight))
    )
    is_weight_right_operand = position == (0 if func is Tensor.__rmatmul__ else 1)
    return is_stack_product or (weight.dim() == 2 and (is_weight_right_operand or operand.dim() > 1))


def _replace_product_call(func: Any, args: tuple[Any, ...], position: int, multiplier: WeightMultiplier) -> Tensor:
    if func in _LINEAR_FUNCTIONS:
        y = multiplier.linear(args[0], args[1])
        return y if len(args) < 3 or args[2] is None else y + args[2].to(y.dtype)
    if func in _GROUPED_FUNCTIONS:
        return _multiply_groups(args[0], args[1], args[2].tolist(), multiplier)
    left_operand, right_operand = (args[1], args[0]) if func is Tensor.__rmatmul__ else args
    if right_operand is args[position]:
        # A product with the weight on the left is the transpose of one with the weight on the right.
        return _multiply_by_right_weight(left_operand, right_operand, multiplier)
    return _multiply_by_right_weight(right_operand.mT, left_operand.mT, multiplier).mT


def _multiply_by_right_weight(x: Tensor, weight: Tensor, multiplier: WeightMultiplier) -> Tensor:
    """Returns x (..., M, K) times a weight (K, N), or times a stack of weights (E, K, N). With a stack, x is (E, M,
    K), or (M, K) if all experts read the same rows.
    """
    if weight.dim() == 2:
        return multiplier.linear(x, weight.mT)
    expanded_input = x.expand(len(weight), *x.shape[-2:])
    y = multiplier.multiply_groups(
        expanded_input.flatten(0, 1), weight.mT.unbind(), [expanded_input.shape[1]] * len(weight)
    )
    return y.view(*expanded_input.shape[:2], -1)


def _multiply_groups(x: Tensor, weight: Tensor, ends: list[int], multiplier: WeightMultiplier) -> Tensor:
    """Multiplies groups of rows of x (M, K) by the matrices of a weight (E, K, N). Each of `ends` is the row at which
    a group ends. The host waits for the device to read `ends`.
    """
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    y = multiplier.multiply_groups(x[: sum(sizes)], weight.mT.unbind(), sizes)
    # Rows after the last group are not multiplied. Their results are zeros.
    return F.pad(y, (0, 0, 0, len(x) - len(y)))
