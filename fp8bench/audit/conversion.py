"""Models that somebody's converter has been through: what runs in low precision, what was left out, and likely why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8bench.audit.rounded import rounded
from fp8bench.audit.subjects import promised_by
from fp8bench.model import DeviceFacts
from fp8bench.model.audit import AuditedLayer
from fp8bench.nn.conversion.holders import held_in
from fp8bench.numerics.norms import relative_frobenius

# What libraries, and people, call layers of low precision.
_LOW = re.compile(r"fp8|float8|mxfp|mxlinear|nvfp4|fp4", re.IGNORECASE)
_PACKAGES = ("transformer_engine", "intel_transformer_engine", "torchao")
# What FP8 products need of both sides of a weight.
_MULTIPLE = 16
# torchao's filters, made on an H100: up to so many outputs and inputs a layer is left as it is.
_SMALL = ((1024, 4096), (2048, 1 << 62), (1 << 62, 1024))
# The relative error of a product whose operands nobody cast, in bfloat16 at most; of e4m3 it is 3 percent.
_UNCAST = 2.0**-7
# Corners of a product that are enough to see it.
_CORNER = 64
HIGH, UNKNOWN, WEIGHTS = "as it came", "not known", "weights alone"
_HIGH = {HIGH: None, "bf16": torch.bfloat16, "fp16": torch.float16}
_GUESSES = ("fp8", "fp8-e4m3", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "nvfp4")


@dataclass(frozen=True, eq=False)
class Layer:
    """One that products are made with, where it was found; `also` are its other paths."""

    name: str
    module: nn.Module
    weight: Tensor
    low: bool
    kind: str = "linear"
    also: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        package, name = type(self.module).__module__.partition(".")[0], type(self.module).__name__
        wrapped = "" if type(self.weight) in (Tensor, nn.Parameter) else f", {type(self.weight).__name__}"
        return f"{f'{package} ' * (package in _PACKAGES)}{name}{wrapped}"


def layers_in(model: nn.Module) -> list[Layer]:
    """All of them, in the model's order."""
    held = {one.module: one for one in held_in(model)}
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path or "model")
    found = []
    for module, (name, *also) in paths.items():
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, Tensor) and weight.dim() >= 2
        if matrix and promises_low(module):
            found.append(Layer(name, module, weight, True, also=tuple(also)))  # type: ignore[arg-type]
        elif module in held:
            one = held[module]
            found.append(Layer(one.name, module, one.weight, False, one.kind, one.also))
    return found


def promises_low(module: nn.Module) -> bool:
    """By its class, what that brought along, or what its weight is made of."""
    kind, weight = type(module), type(getattr(module, "weight", None))
    own = any(one.__module__.partition(".")[0] in _PACKAGES or _LOW.search(one.__name__) for one in (kind, weight))
    return own or hasattr(module, "fp8_meta") or "forward" in vars(module)


def left_out(model: nn.Module, layers: Sequence[Layer]) -> dict[str, tuple[str, str]]:
    """Of each layer that was not converted a word and a sentence that say likely why."""
    weights = {id(one.weight): one.name for one in layers if one.low}
    linear = [one for one in layers if one.low or isinstance(one.module, nn.Linear)]
    by = {type(one.module).__module__.partition(".")[0] for one in layers if one.low}
    by_torchao = "torchao" in by
    ends = {linear[0].name, linear[-1].name} if by <= {"torchao"} and len(linear) > 1 else set()
    behind = dict(_behind_odd(model)) if by <= {"transformer_engine", "intel_transformer_engine"} else {}
    found = {}
    for one in (one for one in layers if not one.low):
        sides = tuple(one.weight.shape)
        if id(one.weight) in weights:
            found[one.name] = "shared", f"the same layer as {weights[id(one.weight)]}, which was converted there alone"
        elif not isinstance(one.module, nn.Linear):
            found[one.name] = "class", f"converters take torch's Linear, and this is {one.what}"
        elif odd := [side for side in sides if side % _MULTIPLE]:
            found[one.name] = "shape", f"{odd[0]} is no multiple of {_MULTIPLE}"
        elif one.name in behind:
            found[one.name] = (
                "stopped",
                f"behind {behind[one.name]}: Accelerate stops where sides do not fit",
            )
        elif one.name in ends:
            which = "first" if one.name == linear[0].name else "last"
            found[one.name] = "end", f"the {which} linear layer, which Accelerate leaves to torchao's as it is"
        elif by_torchao and any(sides[0] <= outputs and sides[1] <= inputs for outputs, inputs in _SMALL):
            found[one.name] = "small", "torchao's filter takes it for too small to gain, on an H100"
        else:
            found[one.name] = "filter", "a filter, or a converter that never saw it"
    return found


def _behind_odd(model: nn.Module, path: str = "", stopped: str = "") -> Iterator[tuple[str, str]]:
    """Layers that come behind one with odd sides in the same module, and that one: there convert_model returns."""
    for name, child in model.named_children():
        own = f"{path}.{name}".lstrip(".")
        if stopped:
            yield from ((f"{own}.{inner}".rstrip("."), stopped) for inner, _ in child.named_modules())
        elif type(child) is nn.Linear and any(side % _MULTIPLE for side in child.weight.shape):
            stopped = own
        else:
            yield from _behind_odd(child, own)


def untied(model: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    """Converted layers with the values of an embedding whose weight is another: a tie that converting has cut."""
    tables = [(name, one.weight) for name, one in model.named_modules() if isinstance(one, nn.Embedding)]
    for one in (one for one in layers if one.low and one.weight.device.type != "meta"):
        for name, table in tables:
            alike = one.weight is not table and one.weight.shape == table.shape and one.weight.dtype == table.dtype
            if alike and bool(table.any()) and torch.equal(one.weight.detach(), table.detach()):
                yield one.name, name


def runs_as(x: Tensor, weight: Tensor, product: Tensor, facts: DeviceFacts) -> str:
    """The precision in which x times the weight transposed was computed, told by its numbers."""
    x, weight = x.reshape(-1, x.shape[-1]).float(), weight.float()
    product = product.reshape(-1, product.shape[-1])[:_CORNER, :_CORNER]

    def error(a: Tensor, b: Tensor) -> float:
        return relative_frobenius(product, a[:_CORNER].double() @ b[:_CORNER].double().t())

    for name, dtype in _HIGH.items():
        a, b = (x, weight) if dtype is None else (x.to(dtype), weight.to(dtype))
        if error(a, b) < _UNCAST:
            return name
    errors = {}
    for name in _GUESSES:
        first, second, _ = promised_by(name, facts).treatments
        errors[name] = error(rounded(x, first).values, rounded(weight, second).values)
    nearest = min(errors, key=lambda name: errors[name])
    return nearest if errors[nearest] < _UNCAST else UNKNOWN


def told(layer: Layer, runs: str, flops: int, reason: tuple[str, str]) -> AuditedLayer:
    """As a value."""
    return AuditedLayer(
        layer.name, layer.what, tuple(layer.weight.shape), layer.low, runs, flops, reason[1], reason[0], layer.also
    )
