"""Audits models that some converter has been through: what runs in low precision, what was left out, and likely why."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.audit.operands import promised_by, rounded
from fp8bench.features.audit.values import Audit, AuditedLayer, AuditFinding, AuditOutcome, fail, remark
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import Signature
from fp8bench.nn.holders import weight_of, weights_of
from fp8bench.nn.model_calls import call_of
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.registry import devices, precisions
from fp8bench.report.panels import together
from fp8bench.user_code.named import signed

# Names that libraries give to layers of low precision.
_LOW = re.compile(r"fp8|float8|mxfp|mxlinear|nvfp4|fp4", re.IGNORECASE)
_PACKAGES = ("transformer_engine", "intel_transformer_engine", "torchao")
# FP8 products need both sides of a weight to be multiples of this.
_MULTIPLE = 16
# torchao's filters, tuned on an H100, leave layers with at most so many outputs and inputs as they are.
_SMALL = ((1024, 4096), (2048, 1 << 62), (1 << 62, 1024))
# The most relative error of a product whose operands were not cast, in bfloat16; e4m3 has 3%.
_UNCAST = 2.0**-7
# Rows and columns of a product that are looked at.
_CORNER = 64
HIGH, UNKNOWN, WEIGHTS = "as it came", "not known", "weights alone"
_HIGH = {HIGH: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Reasons that are mistakes of the converter.
_SILENT = ("stopped", "shared")
_SHOWN = 4
_GUESSES = ("fp8", "fp8-e4m3", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4", "nvfp4")


@dataclass(eq=False)
class FoundLayer:
    """A module whose weight is multiplied; `row` is what is known of it by now."""

    module: nn.Module
    weight: Tensor
    row: AuditedLayer


def layers_in(model: nn.Module) -> list[FoundLayer]:
    holders = {holder.module: holder for holder in weights_of(model)}
    paths = defaultdict[nn.Module, list[str]](list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path or "model")
    layers = []
    for module, (name, *also) in paths.items():
        weight, holder = weight_of(module), holders.get(module)
        low = isinstance(weight, Tensor) and weight.dim() >= 2 and promises_low(module)
        weight = weight if low or holder is None else holder.weight
        if weight is not None and (low or holder is not None):
            package, kind = type(module).__module__.partition(".")[0], type(weight)
            what = f"{package} {type(module).__name__}" if package in _PACKAGES else type(module).__name__
            what += "" if kind in (Tensor, nn.Parameter) else f", {kind.__name__}"
            row = AuditedLayer(name, what, tuple(weight.shape), low, also=tuple(also))
            layers.append(FoundLayer(module, weight, row))
    return layers


def promises_low(module: nn.Module) -> bool:
    kind, weight = type(module), type(weight_of(module))
    own = any(cls.__module__.partition(".")[0] in _PACKAGES or _LOW.search(cls.__name__) for cls in (kind, weight))
    return own or hasattr(module, "fp8_meta") or "forward" in vars(module)


def left_out(model: nn.Module, layers: Sequence[FoundLayer]) -> Callable[[FoundLayer], tuple[str, str]]:
    """Returns what says the name of the likely reason why a layer was not converted, and a sentence."""
    low = [layer for layer in layers if layer.row.low]
    weights = {id(layer.weight): layer.row.name for layer in low}
    linear = [layer.row.name for layer in layers if layer.row.low or isinstance(layer.module, nn.Linear)]
    by = {type(layer.module).__module__.partition(".")[0] for layer in low}
    ends = {linear[-1]: "last", linear[0]: "first"} if by <= {"torchao"} and len(linear) > 1 else {}
    behind = dict(_behind_odd(model)) if by <= {"transformer_engine", "intel_transformer_engine"} else {}

    def why(layer: FoundLayer) -> tuple[str, str]:
        sides, name = layer.row.weight, layer.row.name
        if layer.row.low:
            return "", ""
        if id(layer.weight) in weights:
            return "shared", f"the same layer as {weights[id(layer.weight)]}, which was converted there alone"
        if not isinstance(layer.module, nn.Linear):
            return "class", f"converters take torch's Linear, and this is {layer.row.what}"
        if odd := [side for side in sides if side % _MULTIPLE]:
            return "shape", f"{odd[0]} is no multiple of {_MULTIPLE}"
        if name in behind:
            return "stopped", f"behind {behind[name]}: Accelerate stops where sides do not fit"
        if name in ends:
            return "end", f"the {ends[name]} linear layer, which Accelerate leaves to torchao's as it is"
        if "torchao" in by and any(sides[0] <= most and sides[1] <= more for most, more in _SMALL):
            return "small", "torchao's filter takes it for too small to gain, on an H100"
        return "filter", "a filter, or a converter that never saw it"

    return why


def _behind_odd(model: nn.Module, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields layers behind one with odd sides in the same module, and that one: there Accelerate's convert_model
    returns."""
    stopped = ""
    for name, child in model.named_children():
        own = f"{path}.{name}".lstrip(".")
        if stopped:
            yield from ((f"{own}.{inner}".rstrip("."), stopped) for inner, _ in child.named_modules())
        elif type(child) is nn.Linear and any(side % _MULTIPLE for side in child.weight.shape):
            stopped = own
        else:
            yield from _behind_odd(child, own)


def untied(model: nn.Module, layers: Sequence[FoundLayer]) -> Iterator[AuditFinding]:
    """Names converted layers that have the values of an embedding but not its tensor: converting has cut a tie."""
    tables = [(name, module.weight) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    for layer in (layer for layer in layers if layer.row.low and layer.weight.device.type != "meta"):
        for name, table in tables:
            weight = layer.weight
            alike = weight is not table and weight.shape == table.shape and weight.dtype == table.dtype
            if alike and bool(table.any()) and torch.equal(weight.detach(), table.detach()):
                yield replace(
                    fail(
                        "tie-broken",
                        f"it has the values of {name}, and is another tensor: what was tied is so no longer",
                    ),
                    input=layer.row.name,
                )


def _runs_as(layer: FoundLayer, x: Tensor, output: Tensor, facts: DeviceFacts) -> str:
    """Returns the precision of a layer's product, recognised by its numbers; '' where casts change nothing, as those of
    zeros and small whole numbers."""
    product, bias = output.detach().cpu().double(), getattr(layer.module, "bias", None)
    if isinstance(bias, Tensor) and bias.numel():
        product = product - bias.detach().cpu().double()
    product = product.reshape(-1, product.shape[-1])[:_CORNER, :_CORNER]
    wrapped = hasattr(layer.weight, "__tensor_flatten__")
    weight = (layer.weight.dequantize() if wrapped else layer.weight).detach().cpu().float()
    x = x.detach().cpu().reshape(-1, x.shape[-1]).float()

    def error(a: Tensor, b: Tensor) -> float:
        return relative_frobenius(product, a[:_CORNER].double() @ b[:_CORNER].double().t())

    high = (name for name, dtype in _HIGH.items() if error(x.to(dtype), weight.to(dtype)) < _UNCAST)
    wide, errors = next(high, UNKNOWN), {}
    for name in _GUESSES:
        first, second, _ = promised_by(name, facts).treatments
        errors[name] = error(rounded(x, first).values, rounded(weight, second).values)
    nearest = min(errors, key=lambda name: errors[name])
    if errors[nearest] < _UNCAST:
        return nearest if wide == UNKNOWN else ""
    return WEIGHTS if wrapped and wide in _HIGH else wide


def run_once(model: nn.Module, batch: Any, layers: Sequence[FoundLayer], facts: DeviceFacts) -> None:
    """Runs the model with hooks on all layers, which fill in `runs` and `flops`; raises UsageError where it fails.
    Of each class and shape one product is looked at."""
    known: dict[tuple[Any, ...], str] = {}

    def look(layer: FoundLayer, _: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        x = next((tensor for tensor in given if isinstance(tensor, Tensor)), None)
        if x is None or not x.numel() or not isinstance(output, Tensor) or layer.weight.dim() != 2:
            return
        outputs, inputs = layer.weight.shape
        if x.shape[-1] != inputs or output.shape != (*x.shape[:-1], outputs):
            return
        row = layer.row = replace(layer.row, flops=layer.row.flops + 2 * x.numel() * outputs)
        if not row.runs and (
            row.low or (isinstance(layer.module, nn.Linear) and type(layer.module).forward is not nn.Linear.forward)
        ):
            key = type(layer.module), type(layer.weight), x.shape, layer.weight.shape
            if not known.get(key):
                known[key] = _runs_as(layer, x, output, facts)
            low = row.low or known[key] in _GUESSES  # a class of anybody's own is known by its numbers alone
            layer.row = replace(row, low=low, runs=known[key] if low else "")

    # Running means move in a model that trains. An expanded buffer cannot be written, by the model either.
    written = (buffer for buffer in model.buffers() if buffer.layout is not torch.strided or 0 not in buffer.stride())
    buffers = [(buffer, buffer.clone()) for buffer in written]
    handles = [layer.module.register_forward_hook(partial(look, layer)) for layer in layers]
    try:
        with torch.no_grad():
            call_of(model, batch)()
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def audited_model(target: str, model: nn.Module, batch: Any, signature: Signature, facts: DeviceFacts) -> Audit:
    started, layers = time.perf_counter(), layers_in(model)
    failed = []
    try:
        if batch is not None:
            run_once(model, batch, layers, facts)
    except UsageError as error:
        failed.append(AuditFinding("", AuditOutcome.CANNOT_TELL, "raises", str(error)))
    why, rows = left_out(model, layers), []
    for layer in layers:
        rule, reason = why(layer)
        rows.append(replace(layer.row, rule=rule, reason=reason))
    checks = {"conversion": [*_conversion(rows), *untied(model, layers)]}
    if batch is not None:
        checks["numbers"] = failed or list(_numbers(rows, signature.precision))
    findings = [replace(finding, check=name) for name, own in checks.items() for finding in own or [AuditFinding()]]
    looked_at, seconds = sum(bool(row.runs) for row in rows), time.perf_counter() - started
    return Audit(target, signature, tuple(findings), looked_at, seconds, layers=tuple(rows))


def audit_model(model: nn.Module, batch: Any = None, precision: str = "") -> Audit:
    """Audits a live model that Accelerate, torchao or another converter has been through. With a `batch`, products
    of converted layers are looked at; `precision` is what they should be in, '' for any low one. The model is run
    once without gradients, and stays as it was."""
    facts = next(device for device in devices.get("cpu").available())
    signature = signed("model", precisions.canonical(precision) if precision else "")
    return audited_model(type(model).__name__, model, batch, signature, facts)


def _of(rows: Sequence[AuditedLayer], finding: AuditFinding) -> AuditFinding:
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return replace(finding, input=", ".join(row.name for row in rows[:_SHOWN]) + more)


def _conversion(rows: Sequence[AuditedLayer]) -> Iterator[AuditFinding]:
    if not any(row.low for row in rows):
        yield _of(rows, fail("nothing-converted", f"none of {len(rows)} layers is of a class of low precision"))
        return
    by_rule = together((row.rule, row) for row in rows if row.rule)
    for rule, alike in sorted(by_rule.items(), key=lambda pair: pair[0] not in _SILENT):
        tell = fail if rule in _SILENT else remark
        yield _of(alike, tell(rule, f"{len(alike)} of {len(rows)} layers stay as they were: {alike[0].reason}"))


def _numbers(rows: Sequence[AuditedLayer], precision: str) -> Iterator[AuditFinding]:
    low = [row for row in rows if row.low]
    for runs, alike in together((row.runs, row) for row in low).items():
        words = f"{len(alike)} of {len(low)} converted layers"
        if runs in _HIGH:
            how = "their operands as they came" if runs == HIGH else f"in {runs}"
            yield _of(alike, fail("not-cast", f"{words} multiply {how}, and promise otherwise"))
        elif runs == "":
            words += " were not called on this batch, or show no single product that casts change"
            yield _of(alike, remark("not-seen", words))
        elif runs == UNKNOWN:
            yield _of(alike, remark("unknown", f"{words} multiply in a precision that is not known here"))
        elif precision and runs not in (WEIGHTS, precision):
            words += f" multiply as {runs} does, and {precision} was promised"
            yield _of(alike, fail("other-precision", words))
    if low and not any(row.runs for row in low):
        yield AuditFinding("", AuditOutcome.CANNOT_TELL, "not-seen", "no converted layer could be looked at")


def given_model(name: str, answer: object) -> tuple[nn.Module, Any]:
    match answer:
        case nn.Module():
            return answer, None
        case (nn.Module() as model, batch, *_):
            return model, batch
    raise UsageError(f"{name} gives {type(answer).__name__}; expected a model, or (model, batch).")
