"""Models that somebody's converter has been through: what runs in low precision, what was left out, and likely why."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.audit.data import rounded
from fp8bench.features.audit.subjects import promised_by
from fp8bench.features.audit.values import Audit, AuditedLayer, AuditFinding, AuditOutcome
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import Signature
from fp8bench.nn.conversion.holders import held_in
from fp8bench.nn.model_calls import call_of
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.registry import devices, precisions
from fp8bench.user_code.named import signed

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
_HIGH_DTYPES = {HIGH: None, "bf16": torch.bfloat16, "fp16": torch.float16}
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

    for name, dtype in _HIGH_DTYPES.items():
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


_COVERAGE, _NUMBERS = "conversion", "numbers"
_HIGH = (HIGH, "bf16", "fp16")
# Layers that were left as they are by a mistake of their converter.
_SILENT = ("stopped", "shared")
_SHOWN = 4


class Seen:
    """What was computed by layers: the precision of one product of each class and shape, FLOPs and calls of all."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self._known: dict[tuple[Any, ...], str] = {}
        self.runs: dict[nn.Module, str] = {}
        self.flops: dict[nn.Module, int] = {}

    @contextmanager
    def listening(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Hooks on all of them, which are gone afterwards."""
        by_module = {one.module: one for one in layers}

        def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            self._look(by_module[module], given, output)

        handles = [one.module.register_forward_hook(hook) for one in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, layer: Layer, given: tuple[Any, ...], output: Any) -> None:
        x = next((one for one in given if isinstance(one, Tensor)), None)
        if x is None or not isinstance(output, Tensor) or layer.weight.dim() != 2:
            return
        outputs, inputs = layer.weight.shape
        if x.shape[-1] != inputs or output.shape != (*x.shape[:-1], outputs):
            return
        rows = x.numel() // inputs
        self.flops[layer.module] = self.flops.get(layer.module, 0) + 2 * rows * inputs * outputs
        if layer.low and layer.module not in self.runs:
            key = type(layer.module), type(layer.weight), x.shape, layer.weight.shape
            if key not in self._known:
                product, bias = output.detach().cpu().double(), getattr(layer.module, "bias", None)
                if isinstance(bias, Tensor) and bias.numel():
                    product = product - bias.detach().cpu().double()
                wrapped = hasattr(layer.weight, "__tensor_flatten__")
                weight = layer.weight.dequantize() if wrapped else layer.weight
                runs = runs_as(x.detach().cpu(), weight.detach().cpu(), product, self._facts)
                self._known[key] = WEIGHTS if wrapped and runs in _HIGH else runs
            self.runs[layer.module] = self._known[key]


def audited_model(target: str, model: nn.Module, batch: Any, signature: Signature, facts: DeviceFacts) -> Audit:
    """Of a model as it is now, run once on a batch where there is one. The model stays as it was."""
    started, seen = time.perf_counter(), Seen(facts)
    layers = layers_in(model)
    failed = [] if batch is None else list(_run(model, batch, layers, seen))
    reasons = left_out(model, layers)
    rows = tuple(
        told(one, seen.runs.get(one.module, ""), seen.flops.get(one.module, 0), reasons.get(one.name, ("", "")))
        for one in layers
    )
    checks = {_COVERAGE: [*_conversion(rows), *_ties(model, layers)]}
    if batch is not None:
        checks[_NUMBERS] = failed or list(_numbers(rows, signature.precision))
    findings = [one for name, found in checks.items() for one in found or [AuditFinding(name, AuditOutcome.PASS)]]
    return Audit(target, signature, tuple(findings), len(seen.runs), time.perf_counter() - started, layers=rows)


def _run(model: nn.Module, batch: Any, layers: Sequence[Layer], seen: Seen) -> Iterator[AuditFinding]:
    """Once; what went wrong."""
    try:
        with seen.listening(layers), torch.no_grad():
            call_of(model, batch)()
    except UsageError as error:
        yield AuditFinding(_NUMBERS, AuditOutcome.CANNOT_TELL, "raises", str(error))


def audit_model(model: nn.Module, batch: Any = None, precision: str = "") -> Audit:
    """A live model that Accelerate, torchao or anybody else has converted: what is low, what was left out, and why.

    With a `batch` products of converted layers are looked at; `precision` is what they should be in, '' any low one.
    The model is run once without gradients, and stays as it was.
    """
    facts = next(one for one in devices.get("cpu").available())
    signature = signed("model", precisions.canonical(precision) if precision else "")
    return audited_model(type(model).__name__, model, batch, signature, facts)


def _conversion(rows: Sequence[AuditedLayer]) -> Iterator[AuditFinding]:
    if not any(one.low for one in rows):
        yield _fail(_COVERAGE, "nothing-converted", f"none of {len(rows)} layers is of a class of low precision", rows)
        return
    for code in _SILENT:
        if silent := [one for one in rows if one.rule == code]:
            yield _fail(
                _COVERAGE, code, f"{silent[0].reason}; {len(silent)} such layers were left as they were", silent
            )
    others = [one for one in rows if one.rule and one.rule not in _SILENT]
    for rule in dict.fromkeys(one.rule for one in others):
        alike = [one for one in others if one.rule == rule]
        why = f"{len(alike)} of {len(rows)} layers stay as they were: {alike[0].reason}"
        yield AuditFinding(_COVERAGE, AuditOutcome.PASS, rule, why, _names(alike))


def _ties(model: nn.Module, layers: Sequence[Layer]) -> Iterator[AuditFinding]:
    for name, table in untied(model, layers):
        words = f"it has the values of {table}, and is another tensor: what was tied is so no longer"
        yield AuditFinding(_COVERAGE, AuditOutcome.FAIL, "tie-broken", words, name)


def _numbers(rows: Sequence[AuditedLayer], precision: str) -> Iterator[AuditFinding]:
    low = [one for one in rows if one.low]
    if high := [one for one in low if one.runs in _HIGH]:
        yield _fail(
            _NUMBERS, "not-cast", f"a {high[0].what} multiplies {_as(high[0].runs)}, and promises otherwise", high
        )
    wrong = [one for one in low if precision and one.runs not in ("", UNKNOWN, WEIGHTS, precision, *_HIGH)]
    if wrong:
        words = f"a {wrong[0].what} multiplies as {wrong[0].runs} does, and {precision} was promised"
        yield _fail(_NUMBERS, "other-precision", words, wrong)
    for code, words in (("", "were not called on this batch, or show no single product"),
                        (UNKNOWN, "multiply in a precision that is none of those that are known here")):  # fmt: skip
        if some := [one for one in low if one.runs == code]:
            why = f"{len(some)} of {len(low)} converted layers {words}"
            yield AuditFinding(_NUMBERS, AuditOutcome.PASS, "not-seen" if not code else "unknown", why, _names(some))
    if low and all(one.runs == "" for one in low):
        yield AuditFinding(_NUMBERS, AuditOutcome.CANNOT_TELL, "not-seen", "no converted layer could be looked at")


def _as(runs: str) -> str:
    return "its operands as they came" if runs == HIGH else f"in {runs}"


def _fail(check: str, code: str, why: str, rows: Sequence[AuditedLayer]) -> AuditFinding:
    return AuditFinding(check, AuditOutcome.FAIL, code, why, _names(rows))


def _names(rows: Sequence[AuditedLayer]) -> str:
    names = [one.name for one in rows]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def given_model(name: str, answer: object) -> tuple[nn.Module, Any]:
    """The model and the batch that a maker gave; a model alone has none."""
    match answer:
        case nn.Module():
            return answer, None
        case (nn.Module() as model, batch, *_):
            return model, batch
    raise UsageError(f"{name} gives {type(answer).__name__}; expected a model, or (model, batch).")
