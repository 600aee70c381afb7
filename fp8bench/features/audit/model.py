"""Audits models after conversion: what runs in low precision, what was left out, and the likely reason."""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8bench.errors import UsageError
from fp8bench.features.audit.layer_numbers import WEIGHTS, WIDE, LayerNumbers, LayerVerdict, describe_casts
from fp8bench.features.audit.operands import promise_of
from fp8bench.features.audit.promises import READINGS
from fp8bench.features.audit.values import Audit, AuditedLayer, AuditFinding, AuditOutcome, fail, remark
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import Signature
from fp8bench.nn.holders import weight_of, weights_of
from fp8bench.nn.model_calls import call_of
from fp8bench.registry import devices, precisions
from fp8bench.report.panels import together
from fp8bench.user_code.named import signed

# Names that libraries give to low-precision layers.
_LOW = re.compile(r"fp8|float8|mxfp|mxlinear|nvfp4|fp4", re.IGNORECASE)
_PACKAGES = ("transformer_engine", "intel_transformer_engine", "torchao")
# FP8 products need both sides of a weight to be multiples of this.
_MULTIPLE = 16
# All layers are checked if their weights have at most this many elements in total.
_MOST_NUMBERS = 1 << 26
# Verdicts on a layer's numbers that are remarks, not failures.
_REMARKS = ("other-rounding", "sampled")
# Reasons that are faults of the converter.
_SILENT = ("stopped", "shared")
_SHOWN = 4


@dataclass(eq=False)
class FoundLayer:
    """A module whose weight is multiplied; `row` has the facts collected until now, `verdict` the result for its
    numbers."""

    module: nn.Module
    weight: Tensor
    row: AuditedLayer
    verdict: LayerVerdict | None = None


def layers_in(model: nn.Module) -> list[FoundLayer]:
    holders = {holder.module: holder for holder in weights_of(model)}
    paths = defaultdict[nn.Module, list[str]](list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path or "model")
    layers = []
    for module, (name, *also) in paths.items():
        weight, holder = weight_of(module), holders.get(module)
        is_matrix = isinstance(weight, Tensor) and weight.dim() >= 2 and not isinstance(module, nn.Embedding)
        low = is_matrix and promises_low(module)
        weight = weight if low or holder is None else holder.weight
        if weight is not None and (low or holder is not None):
            package, kind = type(module).__module__.partition(".")[0], type(weight)
            description = f"{package} {type(module).__name__}" if package in _PACKAGES else type(module).__name__
            description += "" if kind in (Tensor, nn.Parameter) else f", {kind.__name__}"
            row = AuditedLayer(name, description, tuple(weight.shape), low, also=tuple(also))
            layers.append(FoundLayer(module, weight, row))
    return layers


def promises_low(module: nn.Module) -> bool:
    kind, weight = type(module), type(weight_of(module))
    by_name = any(cls.__module__.partition(".")[0] in _PACKAGES or _LOW.search(cls.__name__) for cls in (kind, weight))
    return by_name or hasattr(module, "fp8_meta") or "forward" in vars(module)


def explain_exclusions(model: nn.Module, layers: Sequence[FoundLayer]) -> Callable[[FoundLayer], tuple[str, str]]:
    """Returns a function that gives the likely reason why a layer was not converted: its name, and a sentence."""
    low = [layer for layer in layers if layer.row.low]
    weights = {id(layer.weight): layer.row.name for layer in low}
    by = {type(layer.module).__module__.partition(".")[0] for layer in low}
    # Only these libraries stop a conversion at the first layer whose sides do not fit.
    behind = dict(_behind_odd(model)) if by <= {"transformer_engine", "intel_transformer_engine"} else {}

    def why(layer: FoundLayer) -> tuple[str, str]:
        sides, name = layer.row.weight, layer.row.name
        if layer.row.low:
            return "", ""
        # From the most certain reason to the fallback.
        if id(layer.weight) in weights:
            return "shared", f"the same layer as {weights[id(layer.weight)]}, which was converted there alone"
        if not isinstance(layer.module, nn.Linear):
            return "class", f"converters take torch's Linear, and this is {layer.row.what}"
        if odd := [side for side in sides if side % _MULTIPLE]:
            return "shape", f"{odd[0]} is no multiple of {_MULTIPLE}"
        if name in behind:
            return "stopped", f"behind {behind[name]}: Accelerate stops where sides do not fit"
        return "filter", "a filter (of small, first and last layers), or a converter that never saw it"

    return why


def _behind_odd(model: nn.Module, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields layers that follow one with odd sides in the same module, and that one: there Accelerate's convert_model
    returns early."""
    stopped = ""
    for name, child in model.named_children():
        child_path = f"{path}.{name}".lstrip(".")
        if stopped:
            yield from ((f"{child_path}.{inner}".rstrip("."), stopped) for inner, _ in child.named_modules())
        elif type(child) is nn.Linear and any(side % _MULTIPLE for side in child.weight.shape):
            stopped = child_path
        else:
            yield from _behind_odd(child, child_path)


def find_broken_ties(model: nn.Module, layers: Sequence[FoundLayer]) -> Iterator[AuditFinding]:
    """Names converted layers with the values of an embedding but without its tensor: conversion has broken a tie."""
    tables = [(name, module.weight) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    for layer in (layer for layer in layers if layer.row.low and layer.weight.device.type != "meta"):
        for name, table in tables:
            weight = layer.weight
            if weight is table or weight.shape != table.shape or weight.dtype != table.dtype:
                continue
            # Subclasses of Tensor, and tensors on another device, may not be comparable.
            if type(weight) not in (Tensor, nn.Parameter) or weight.device != table.device:
                continue
            if bool(table.any()) and torch.equal(weight.detach(), table.detach()):
                reason = f"it has the values of {name}, and is another tensor: what was tied is so no longer"
                yield replace(fail("tie-broken", reason), input=layer.row.name)


class ModelCheck:
    """Checks low-precision layers while a model runs: all of a small model; otherwise the first and last of each class
    and shape, and random others within a limit on the total size of weights."""

    def __init__(self, model: nn.Module, layers: Sequence[FoundLayer], facts: DeviceFacts, precision: str) -> None:
        names = dict.fromkeys((*filter(None, (precision,)), *READINGS))
        self.guesses = {name: promise_of(name, facts) for name in names}
        self.model, self.layers, self.precision = model, layers, precision
        self._chosen, self._is_checking = _choose(layers), False
        self._known: dict[Any, str] = {}

    def run(self, batch: Any) -> None:
        """Runs the model on a batch, or raises UsageError. Layers that were not called are checked in a second run,
        inside one that is called, so that they see the model's autocast."""
        handles = [
            layer.module.register_forward_hook(partial(self._look, layer), with_kwargs=True) for layer in self.layers
        ]
        self._call(batch, handles)
        inside = next((layer.module for layer in self.layers if layer.row.low and layer.verdict), None)
        if inside is not None and self._unseen:
            self._call(batch, [inside.register_forward_hook(lambda *_: self.check_unseen())])

    def check_unseen(self) -> None:
        for layer in self._unseen:
            self._check(layer, LayerNumbers(layer.module, layer.weight, self.guesses, self._likely(layer)), None, None)

    @property
    def _unseen(self) -> list[FoundLayer]:
        return [layer for layer in self.layers if layer in self._chosen and layer.row.low and not layer.verdict]

    def _call(self, batch: Any, handles: Sequence[RemovableHandle]) -> None:
        try:
            with torch.no_grad():
                call_of(self.model, batch)()
        finally:
            for handle in handles:
                handle.remove()

    def _likely(self, layer: FoundLayer) -> tuple[str, ...]:
        return self.precision, self._known.get(_class_and_shape(layer), "")

    def _look(
        self, layer: FoundLayer, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> None:
        x = next((value for value in (*arguments, *options.values()) if isinstance(value, Tensor)), None)
        if x is None or self._is_checking:
            return
        outputs, inputs = layer.row.weight[0], layer.row.weight[-1]
        if len(layer.row.weight) == 2 and isinstance(output, Tensor) and output.shape == (*x.shape[:-1], outputs):
            layer.row = replace(
                layer.row, flops=layer.row.flops + 2 * x.numel() // max(x.shape[-1], 1) * inputs * outputs
            )
        custom = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        if layer in self._chosen and not layer.verdict and (layer.row.low or custom):
            numbers = LayerNumbers(module, layer.weight, self.guesses, self._likely(layer), arguments, options)
            self._check(layer, numbers, x, output)

    def _check(self, layer: FoundLayer, numbers: LayerNumbers, x: Tensor | None, output: Any) -> None:
        self._is_checking = True
        try:
            verdict = numbers.check(x, output, alone=layer.row.low)
            # A class with a custom forward pass and an uninformative name is recognized by its numbers.
            if not layer.row.low and verdict.runs in self.guesses:
                layer.row = replace(layer.row, low=True)
                verdict = numbers.check(x, output)
        finally:
            self._is_checking = False
        layer.verdict = verdict
        if verdict.runs:
            self._known.setdefault(_class_and_shape(layer), verdict.runs)

    def finish(self) -> None:
        """Checks the layers that no run has called, and writes all verdicts into the rows."""
        self.check_unseen()
        classes = {type(layer.module) for layer in self.layers if layer.row.low and layer.verdict} - {nn.Linear}
        for layer in self.layers:
            if layer.verdict and (layer.row.low or type(layer.module) in classes):
                runs, code, wrong = layer.verdict
                layer.row = replace(layer.row, low=True, runs=runs, code=code, wrong=wrong)
            elif layer.row.low:
                layer.row = replace(
                    layer.row, code="sampled", wrong="not looked at: others of their class and shape were"
                )


def _class_and_shape(layer: FoundLayer) -> tuple[Any, ...]:
    return type(layer.module), type(layer.weight), layer.row.weight


def _choose(layers: Sequence[FoundLayer]) -> set[FoundLayer]:
    groups = together((_class_and_shape(layer), layer) for layer in layers).values()
    chosen: set[FoundLayer] = set()
    for group in groups:
        chosen |= {group[0], group[-1]}
    numbers = sum(layer.weight.numel() for layer in chosen)
    for layer in random.Random(0).sample(layers, len(layers)):
        if layer not in chosen and numbers + layer.weight.numel() <= _MOST_NUMBERS:
            chosen.add(layer)
            numbers += layer.weight.numel()
    return chosen


@contextmanager
def restore_model(model: nn.Module) -> Iterator[None]:
    """Restores buffers, such as running means, and the random state; expanded buffers are skipped because nobody writes
    them."""
    written = (buffer for buffer in model.buffers() if buffer.layout is not torch.strided or 0 not in buffer.stride())
    buffers = [(buffer, buffer.clone()) for buffer in written]
    devices = {buffer.device for buffer in (*model.parameters(), *model.buffers()) if buffer.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, original in buffers:
                buffer.copy_(original)


def audit_loaded_model(target: str, model: nn.Module, batch: Any, signature: Signature, facts: DeviceFacts) -> Audit:
    started, layers = time.perf_counter(), layers_in(model)
    check, failed = ModelCheck(model, layers, facts, signature.precision), list[AuditFinding]()
    with restore_model(model):
        try:
            if batch is not None:
                check.run(batch)
        except UsageError as error:
            failed.append(AuditFinding("", AuditOutcome.CANNOT_TELL, "raises", str(error)))
        check.finish()
    explain, rows = explain_exclusions(model, layers), []
    for layer in layers:
        rule, reason = explain(layer)
        rows.append(replace(layer.row, rule=rule, reason=reason))
    checks = {
        "conversion": [*_conversion(rows), *find_broken_ties(model, layers)],
        "numbers": [*failed, *_numbers(rows, signature.precision)],
    }
    findings: list[AuditFinding] = []
    for name, found in checks.items():
        findings += [replace(finding, check=name) for finding in found] or [AuditFinding(name)]
    looked_at, seconds = sum(bool(row.runs) for row in rows), time.perf_counter() - started
    return Audit(target, signature, tuple(findings), looked_at, seconds, layers=tuple(rows))


def audit_model(model: nn.Module, batch: Any = None, precision: str = "") -> Audit:
    """Audits a live model that Accelerate, torchao or another converter has been through. Converted layers are checked
    as the model calls them, and by themselves, without and with gradients. The model stays unchanged; scales that
    remember earlier casts see these calls.

    model: the converted model
    batch: what its forward takes; without one layers are checked by themselves alone
    precision: what converted layers should be in; '' for any low precision
    """
    facts = next(device for device in devices.get("cpu").available())
    signature = signed("model", precisions.canonical(precision) if precision else "")
    return audit_loaded_model(type(model).__name__, model, batch, signature, facts)


def _about(rows: Sequence[AuditedLayer], finding: AuditFinding) -> AuditFinding:
    others_named = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return replace(finding, input=", ".join(row.name for row in rows[:_SHOWN]) + others_named)


def _conversion(rows: Sequence[AuditedLayer]) -> Iterator[AuditFinding]:
    if not any(row.low for row in rows):
        yield _about(rows, fail("nothing-converted", f"none of {len(rows)} layers is of a class of low precision"))
        return
    by_rule = together((row.rule, row) for row in rows if row.rule)
    for rule, excluded in sorted(by_rule.items(), key=lambda pair: pair[0] not in _SILENT):
        tell = fail if rule in _SILENT else remark
        yield _about(
            excluded, tell(rule, f"{len(excluded)} of {len(rows)} layers stay as they were: {excluded[0].reason}")
        )


def _numbers(rows: Sequence[AuditedLayer], precision: str) -> Iterator[AuditFinding]:
    low = [row for row in rows if row.low]
    for (runs, code, wrong), same_rows in together(((row.runs, row.code, row.wrong), row) for row in low).items():
        words = f"{len(same_rows)} of {len(low)} converted layers"
        if precision and runs == WEIGHTS and not code:
            yield _about(same_rows, fail("not-cast", f"{words} cast their weights alone, and {precision} was promised"))
        elif precision and runs in READINGS and runs != precision:
            promise = f"{precision} was promised; to promise what was found, give --precision {runs}"
            yield _about(same_rows, fail("other-precision", f"{words} multiply {describe_casts(runs)}, and {promise}"))
        elif code:
            yield _about(same_rows, (remark if code in _REMARKS else fail)(code, f"{words}: {wrong}"))
        elif runs in WIDE:
            yield _about(same_rows, fail("not-cast", f"{words} multiply {describe_casts(runs)}, and promise otherwise"))
        elif not runs:
            yield _about(
                same_rows, fail("unchecked", f"{words} show no product that casts change, so nothing is known of them")
            )


def parse_model(name: str, answer: object) -> tuple[nn.Module, Any]:
    match answer:
        case nn.Module():
            return answer, None
        case (nn.Module() as model, batch, *_):
            return model, batch
    raise UsageError(f"{name} gives {type(answer).__name__}; expected a model, or (model, batch).")
