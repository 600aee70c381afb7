"""The audit of a whole model: each converted layer's product is looked at while the model runs once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.audit.conversion import HIGH, UNKNOWN, WEIGHTS, Layer, layers_in, left_out, runs_as, told, untied
from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts
from fp8bench.model.audit import Audit, AuditedLayer, AuditFinding, AuditOutcome, Signature
from fp8bench.nn.model_calls import call_of
from fp8bench.registry import devices, precisions
from fp8bench.user_code.named import signed

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
