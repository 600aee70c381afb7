"""The weights of any model that products are made with: which of them can be converted, and why others cannot."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8bench.errors import UnknownName, UsageError
from fp8bench.protocols import Layer, key_of, keys_of

LINEAR, CONV1D, CONV2D, EXPERTS, HEAD = "linear", "conv1d", "conv2d", "experts", "head"
# What torch multiplies by in ways that are none of ours.
_OTHERS = (
    nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear, nn.RNNBase,
    nn.RNNCellBase, nn.MultiheadAttention,
)  # fmt: skip
# The last words of a head's path, where neither the model nor a tied embedding says which layer it is.
_HEADS = ("head", "lm_head", "classifier", "score")
# More groups than that would be as many small products, one after the other.
MOST_GROUPS = 64
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Held:
    """A weight of a model: the parameter of that name of a module.

    `name` is its path, `also` are the other paths of the same module; of a module with several such parameters the
    path ends in the parameter's name. What cannot be converted has a `reason`, a sentence, and a `rule`, a word for it.
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

    def layer(self, keys: Collection[str] = ()) -> Layer:
        """As precision maps know it: by that of its paths which the longest key of the map names."""
        layers = list(_layers(self))
        keyed = [(key_of(one, keys) or "", one) for one in layers]
        named = [(len(key), one) for key, one in keyed if key != one.kind]
        return max(named, key=lambda pair: pair[0])[1] if named else layers[0]

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.module, self.parameter)
        return weight

    @property
    def shape(self) -> tuple[int, ...]:
        """() of a weight that has none before the first forward pass."""
        weight = self.weight
        return () if is_lazy(weight) else tuple(weight.shape)

    @property
    def sides(self) -> tuple[int, int]:
        """Outputs and inputs of its forward product, of each matrix or group."""
        first, *rest = self.shape
        if self.kind == CONV1D:
            return rest[0], first
        if self.kind == CONV2D:
            return first // int(getattr(self.module, "groups", 1)), rest[0] * rest[1] * rest[2]
        return (rest[0], rest[1]) if self.kind == EXPERTS else (first, rest[0])


def held_in(model: nn.Module, skip: Sequence[str] = (), allow: Sequence[str] = ()) -> tuple[Held, ...]:
    """Every weight of a model that products are made with, in the model's order.

    `skip` are patterns of paths or kinds ('head', '*.router', 'model.layers.0') that stay as they are, `allow` the same
    for classes derived from torch's layers whose forward passes of their own are to be replaced. Raises UnknownName for
    a pattern that fits nothing.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    inside = {own for one in paths if isinstance(one, nn.MultiheadAttention) for own in one.children()}
    head = _head_of(model, paths)
    found = [
        replace(one, head=one.module is head)
        for module, names in paths.items()
        for one in _of_module(module, names, module in inside, allow)
    ]
    for pattern in (*skip, *allow):
        _check_pattern(pattern, found)
    return tuple(_skipped(one, skip) for one in found)


def check_map(keys: Collection[str], found: Sequence[Held]) -> None:
    """Raise UnknownName for a key of a precision map that names no layer of the model."""
    known = keys_of([layer for one in found for layer in _layers(one)])
    for key in keys:
        if key not in known:
            raise UnknownName("layer of this model", key, known, _known(found))


def _layers(one: Held) -> Iterator[Layer]:
    yield from (Layer(name, one.shown_kind) for name in (one.name, *one.also))


def _known(found: Sequence[Held]) -> str:
    kinds = ", ".join(dict.fromkeys(one.shown_kind for one in found))
    names = ", ".join(one.name for one in found[:_SHOWN])
    return f"{kinds}; layers by name ({names}, {len(found)} in all), and prefixes of names" if found else ""


def _fits(one: Held, pattern: str) -> bool:
    if pattern in (one.kind, one.shown_kind, type(one.module).__name__):
        return True
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in (one.name, *one.also))


def _check_pattern(pattern: str, found: Sequence[Held]) -> None:
    if not any(_fits(one, pattern) for one in found):
        known = keys_of([layer for one in found for layer in _layers(one)])
        raise UnknownName("layer of this model", pattern, known, f"{_known(found)}, and patterns of them ('*.router')")


def _skipped(one: Held, skip: Sequence[str]) -> Held:
    pattern = next((pattern for pattern in skip if _fits(one, pattern)), None)
    if pattern is None or one.reason:
        return one
    return replace(one, reason=f"left out by '{pattern}'", rule="skipped")


def _of_module(module: nn.Module, paths: Sequence[str], in_attention: bool, allow: Sequence[str]) -> Iterator[Held]:
    kind, base = _kind_of(module)
    if base is not None:
        first, *also = paths
        held = Held(first or type(module).__name__, kind, module, also=tuple(also))
        rule, reason = _forward_refused(held, base, allow) or _weight_refused(held) or ("", "")
        if in_attention:
            rule, reason = "not-called", "torch's own attention reads its weight and never calls it"
        yield replace(held, rule=rule, reason=reason)
    elif isinstance(module, _OTHERS):
        reason = f"there is no product of ours for {type(module).__name__}"
        if isinstance(module, nn.MultiheadAttention):
            reason += ": torch multiplies by its parameters in one function, in which nothing can take their place"
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and "weight" in own:
                held = _of_parameter(module, paths, own, type(module).__name__)
                yield replace(held, rule="class", reason=reason)
    elif not type(module).__module__.startswith("torch.nn."):
        for own, parameter in module.named_parameters(recurse=False):
            if _is_stack(parameter):
                held = _of_parameter(module, paths, own, EXPERTS)
                rule, reason = _replaced(held) or _weight_refused(held) or ("", "")
                yield replace(held, rule=rule, reason=reason)


def _of_parameter(module: nn.Module, paths: Sequence[str], own: str, kind: str) -> Held:
    first, *also = (f"{path}.{own}".lstrip(".") for path in paths)
    return Held(first, kind, module, own, tuple(also))


def _is_stack(parameter: nn.Parameter) -> bool:
    """A matrix for each of several experts, as far as its shape tells."""
    if is_lazy(parameter):
        return False
    return parameter.dim() == 3 and min(parameter.shape) > 1 and parameter.is_floating_point()


def _kind_of(module: nn.Module) -> tuple[str, type[nn.Module] | None]:
    """Which of ours takes its place, and the class whose forward pass that is."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    kinds: list[tuple[str, type[nn.Module] | None]] = [(LINEAR, nn.Linear), (CONV2D, nn.Conv2d)]
    kinds.append((CONV1D, getattr(transformers, "Conv1D", None)))
    return next(((kind, base) for kind, base in kinds if base is not None and isinstance(module, base)), ("", None))


def _forward_refused(held: Held, base: type[nn.Module], allow: Sequence[str]) -> tuple[str, str] | None:
    kind = type(held.module)
    own = any(getattr(kind, name, None) is not getattr(base, name, None) for name in ("forward", "_conv_forward"))
    if own and not any(_fits(held, pattern) for pattern in allow):
        return "forward", f"{kind.__name__} has a forward pass of its own, which would be lost: allow it by name"
    return _replaced(held)


def _replaced(held: Held) -> tuple[str, str] | None:
    if "forward" in vars(held.module):
        return "forward", "somebody has replaced its forward pass already"
    return None


def _weight_refused(held: Held) -> tuple[str, str] | None:
    weight = held.weight
    if is_lazy(weight):
        return "shape", "its weight has no shape before the first forward pass: call the model once in make()"
    if not weight.is_floating_point():
        return "dtype", f"its weight is {str(weight.dtype).removeprefix('torch.')}, quantised already"
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return "dtype", f"its weight is a {type(weight).__name__}, a kind of tensor of its own"
    groups = int(getattr(held.module, "groups", 1))
    if groups > MOST_GROUPS:
        return "groups", f"{groups} groups of channels are as many small products: at most {MOST_GROUPS} are converted"
    return None


def _head_of(model: nn.Module, paths: dict[nn.Module, list[str]]) -> nn.Module | None:
    """The layer that gives the model's last output: what the model says it is, a tied one, or one so called."""
    says = getattr(model, "get_output_embeddings", None)
    said = says() if callable(says) else None
    if isinstance(said, nn.Module) and said in paths:
        return said
    tables = {id(one.weight) for one in paths if isinstance(one, nn.Embedding)}
    layers = [one for one in paths if _kind_of(one)[0]]
    tied = next((one for one in layers if id(getattr(one, "weight", None)) in tables), None)
    # 'classifier.1' too: the last layer of a head that is more than one.
    so_called = [one for one in layers if set(paths[one][0].split(".")[-2:]) & set(_HEADS)]
    return tied or (so_called[-1] if so_called else None)


def refuse_meta(model: nn.Module) -> None:
    """Raise where a model has no numbers to compute with."""
    meta = next((name for name, one in model.named_parameters() if one.is_meta), None)
    if meta is not None:
        raise UsageError(f"{meta} is on the meta device, without numbers: give the model its weights in make()")
