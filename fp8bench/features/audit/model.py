"""Audits converted models. Finds the layers that run in low precision and the layers that were left out, with the
likely reason for each of the latter.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8bench.errors import UsageError
from fp8bench.features.audit.layer_numbers import WEIGHTS_ONLY, WIDE_DTYPES, LayerNumbers, LayerVerdict, describe_casts
from fp8bench.features.audit.operands import find_promised_casts
from fp8bench.features.audit.readings import USUAL_PRECISIONS
from fp8bench.features.audit.values import (
    AuditedLayer,
    AuditFinding,
    AuditOutcome,
    AuditReport,
    make_failure,
    make_remark,
)
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import CallablePromise
from fp8bench.nn.holders import find_product_weights, get_weight
from fp8bench.nn.model_calls import make_call
from fp8bench.registry import devices, precisions
from fp8bench.report.panels import together
from fp8bench.user_code.named import make_signature

# Class names that libraries give to low-precision layers.
_LOW_PRECISION_NAME_PATTERN = re.compile(r"fp8|float8|mxfp|mxlinear|nvfp4|fp4", re.IGNORECASE)
_CONVERTER_PACKAGES = ("transformer_engine", "intel_transformer_engine", "torchao")
# FP8 products need both sides of a weight to be multiples of this number.
_REQUIRED_SIDE_MULTIPLE = 16
# Further layers are checked until the checked weights have this many elements in total.
_CHECKED_ELEMENTS = 1 << 26
# Codes of verdicts on a layer's numbers that are remarks, not failures.
_REMARK_CODES = ("other-rounding", "sampled")
# Reasons for an unconverted layer that are faults of the converter.
_CONVERTER_FAULT_RULES = ("stopped", "shared")
_MAX_SHOWN_LAYER_NAMES = 4


@dataclass(eq=False)
class FoundLayer:
    """A module that multiplies by a weight. `row` has its facts for the report, and `verdict` judges its numbers."""

    module: nn.Module
    weight: Tensor
    row: AuditedLayer
    verdict: LayerVerdict | None = None


def find_layers(model: nn.Module) -> list[FoundLayer]:
    holder_by_module = {weight_holder.module: weight_holder for weight_holder in find_product_weights(model)}
    paths = defaultdict[nn.Module, list[str]](list)
    # 1. Collect all paths to each module. A module that is used at several places has several.
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path or "model")
    # 2. Keep modules whose class promises low precision, and those that hold the weight of a product.
    layers = []
    for module, (name, *other_names) in paths.items():
        weight = get_weight(module)
        weight_holder = holder_by_module.get(module)
        is_matrix = isinstance(weight, Tensor) and weight.dim() >= 2 and not isinstance(module, nn.Embedding)
        is_low_precision = is_matrix and has_low_precision_class(module)
        weight = weight if is_low_precision or weight_holder is None else weight_holder.weight
        if weight is not None and (is_low_precision or weight_holder is not None):
            package = type(module).__module__.partition(".")[0]
            kind = type(weight)
            # Name the package of a converter, because its class may have the name of one of torch, such as Linear.
            description = (
                f"{package} {type(module).__name__}" if package in _CONVERTER_PACKAGES else type(module).__name__
            )
            description += "" if kind in (Tensor, nn.Parameter) else f", {kind.__name__}"
            row = AuditedLayer(name, description, tuple(weight.shape), is_low_precision, also=tuple(other_names))
            layers.append(FoundLayer(module, weight, row))
    return layers


def has_low_precision_class(module: nn.Module) -> bool:
    kind = type(module)
    weight_class = type(get_weight(module))
    has_low_precision_name = any(
        cls.__module__.partition(".")[0] in _CONVERTER_PACKAGES or _LOW_PRECISION_NAME_PATTERN.search(cls.__name__)
        for cls in (kind, weight_class)
    )
    # Transformer Engine sets `fp8_meta`. A converter may also replace `forward` on the instance.
    return has_low_precision_name or hasattr(module, "fp8_meta") or "forward" in vars(module)


def make_exclusion_explainer(model: nn.Module, layers: Sequence[FoundLayer]) -> Callable[[FoundLayer], tuple[str, str]]:
    """Returns a function that finds the likely reason why a layer was not converted: the name of a rule, and a
    sentence.
    """
    low_precision_layers = [layer for layer in layers if layer.row.low]
    layer_name_by_weight_id = {id(layer.weight): layer.row.name for layer in low_precision_layers}
    converter_packages = {type(layer.module).__module__.partition(".")[0] for layer in low_precision_layers}
    # Only with these libraries, Accelerate stops a conversion at the first layer whose sides are not multiples of 16.
    uses_accelerate = converter_packages <= {"transformer_engine", "intel_transformer_engine"}
    unaligned_layer_by_name = dict(_find_layers_after_stop(model)) if uses_accelerate else {}

    def explain_exclusion(layer: FoundLayer) -> tuple[str, str]:
        weight_shape = layer.row.weight
        name = layer.row.name
        if layer.row.low:
            return "", ""
        # Try the most certain reason first, and the fallback last.
        if id(layer.weight) in layer_name_by_weight_id:
            converted_name = layer_name_by_weight_id[id(layer.weight)]
            return "shared", f"it shares its weight with {converted_name}, and only that layer was converted"
        if not isinstance(layer.module, nn.Linear):
            return "class", f"converters only replace torch's Linear, and this is {layer.row.what}"
        if unaligned_sides := [side for side in weight_shape if side % _REQUIRED_SIDE_MULTIPLE]:
            return "shape", f"{unaligned_sides[0]} is not a multiple of {_REQUIRED_SIDE_MULTIPLE}"
        if name in unaligned_layer_by_name:
            unaligned_layer = unaligned_layer_by_name[name]
            return "stopped", f"it comes after {unaligned_layer}: Accelerate stops at a layer whose sides do not fit"
        return "filter", "the converter skipped it (small, first or last layer), or never reached it"

    return explain_exclusion


def _find_layers_after_stop(model: nn.Module, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the layers that Accelerate's convert_model skips because they follow an unaligned Linear in the same
    module, each with the path of that Linear. A Linear is unaligned if a side of its weight is not a multiple of 16.
    """
    unaligned_layer = ""
    for name, child in model.named_children():
        child_module_path = f"{path}.{name}".lstrip(".")
        if unaligned_layer:
            yield from (
                (f"{child_module_path}.{inner_path}".rstrip("."), unaligned_layer)
                for inner_path, _ in child.named_modules()
            )
        elif type(child) is nn.Linear and any(side % _REQUIRED_SIDE_MULTIPLE for side in child.weight.shape):
            unaligned_layer = child_module_path
        else:
            yield from _find_layers_after_stop(child, child_module_path)


def find_broken_ties(model: nn.Module, layers: Sequence[FoundLayer]) -> Iterator[AuditFinding]:
    """Yields a failure for each converted layer that was tied to an embedding: it has the same values, but no longer
    shares the tensor.
    """
    embedding_tables = [
        (name, module.weight) for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    ]
    # Values of Tensor subclasses may not be comparable.
    low_precision_layers = [layer for layer in layers if layer.row.low and type(layer.weight) in (Tensor, nn.Parameter)]
    for layer, (name, table) in product(low_precision_layers, embedding_tables):
        weight = layer.weight
        is_comparable = weight.device == table.device and weight.device.type != "meta" and weight.dtype == table.dtype
        if weight is not table and is_comparable and table.any() and torch.equal(weight, table):
            reason = f"it has the values of {name} but no longer shares its tensor, so training will separate the two"
            yield replace(make_failure("tie-broken", reason), input=layer.row.name)


class ModelCheck:
    """Checks the numbers of low-precision layers while the model runs. In a large model only some layers are checked:
    the first and the last one of each class and shape, and random ones until the checked weights reach a limit.
    """

    def __init__(self, model: nn.Module, layers: Sequence[FoundLayer], facts: DeviceFacts, precision: str) -> None:
        names = dict.fromkeys((precision, *USUAL_PRECISIONS))
        self.guesses = {name: find_promised_casts(name, facts) for name in names if name}
        self.model = model
        self.layers = layers
        self.precision = precision
        self._chosen = _choose_layers(layers)
        self._is_checking = False
        self._precision_by_class: dict[Any, str] = {}

    def run(self, batch: Any) -> None:
        """Runs the model on a batch, and checks the chosen layers that it calls. Then runs it again to check the
        remaining ones from a hook of a called layer, so that the model's autocast applies to them. Raises UsageError if
        the model fails.
        """
        hook_handles = [
            layer.module.register_forward_hook(partial(self._inspect_layer_call, layer), with_kwargs=True)
            for layer in self.layers
        ]
        self._call_model(batch, hook_handles)
        called_module = next((layer.module for layer in self.layers if layer.row.low and layer.verdict), None)
        if called_module is not None and self._uncalled_layers:
            self._call_model(batch, [called_module.register_forward_hook(lambda *_: self.check_uncalled_layers())])

    def check_uncalled_layers(self) -> None:
        for layer in self._uncalled_layers:
            self._check_layer(layer)

    @property
    def _uncalled_layers(self) -> list[FoundLayer]:
        return [layer for layer in self.layers if layer in self._chosen and layer.row.low and not layer.verdict]

    def _call_model(self, batch: Any, hook_handles: Sequence[RemovableHandle]) -> None:
        try:
            with torch.no_grad():
                make_call(self.model, batch, has_loss=True)()
        finally:
            for handle in hook_handles:
                handle.remove()

    def _inspect_layer_call(
        self, layer: FoundLayer, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> None:
        x = next((value for value in (*arguments, *options.values()) if isinstance(value, Tensor)), None)
        # A check calls the layer, which runs this hook again.
        if x is None or self._is_checking:
            return
        output_size = layer.row.weight[0]
        input_size = layer.row.weight[-1]
        if len(layer.row.weight) == 2 and isinstance(output, Tensor) and output.shape == (*x.shape[:-1], output_size):
            flops = 2 * x.numel() // max(x.shape[-1], 1) * input_size * output_size
            layer.row = replace(layer.row, flops=layer.row.flops + flops)
        has_custom_forward = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        if layer in self._chosen and not layer.verdict and (layer.row.low or has_custom_forward):
            self._check_layer(layer, x, output, arguments, options)

    def _check_layer(
        self,
        layer: FoundLayer,
        x: Tensor | None = None,
        output: Any = None,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> None:
        likely_precisions = self.precision, self._precision_by_class.get(_get_class_and_shape(layer), "")
        layer_numbers = LayerNumbers(layer.module, layer.weight, self.guesses, likely_precisions, arguments, options)
        self._is_checking = True
        try:
            verdict = layer_numbers.check(x, output, also_alone=layer.row.low)
            # A layer whose class has a custom forward pass and an unknown name is recognized by its numbers.
            if not layer.row.low and verdict.runs in self.guesses:
                layer.row = replace(layer.row, low=True)
                verdict = layer_numbers.check(x, output)
        finally:
            self._is_checking = False
        layer.verdict = verdict
        if verdict.runs:
            self._precision_by_class.setdefault(_get_class_and_shape(layer), verdict.runs)

    def write_verdicts(self) -> None:
        """Checks the layers that the model never called, and writes all verdicts into the rows of the report."""
        self.check_uncalled_layers()
        low_precision_layer_types = {type(layer.module) for layer in self.layers if layer.row.low and layer.verdict} - {
            nn.Linear
        }
        for layer in self.layers:
            if layer.verdict and (layer.row.low or type(layer.module) in low_precision_layer_types):
                runs, fault_code, wrong_text = layer.verdict
                layer.row = replace(layer.row, low=True, runs=runs, code=fault_code, wrong=wrong_text)
            elif layer.row.low:
                reason = "not checked: other layers of their class and shape were"
                layer.row = replace(layer.row, code="sampled", wrong=reason)


def _get_class_and_shape(layer: FoundLayer) -> tuple[Any, ...]:
    return type(layer.module), type(layer.weight), layer.row.weight


def _choose_layers(layers: Sequence[FoundLayer]) -> set[FoundLayer]:
    groups = together((_get_class_and_shape(layer), layer) for layer in layers).values()
    chosen_layers = set()
    for group in groups:
        chosen_layers |= {group[0], group[-1]}
    chosen_element_count = sum(layer.weight.numel() for layer in chosen_layers)
    for layer in random.Random(0).sample(layers, len(layers)):
        if layer not in chosen_layers and chosen_element_count + layer.weight.numel() <= _CHECKED_ELEMENTS:
            chosen_layers.add(layer)
            chosen_element_count += layer.weight.numel()
    return chosen_layers


@contextmanager
def restore_model(model: nn.Module) -> Iterator[None]:
    """Restores buffers, such as running means, and the random state after the `with` block. Expanded buffers are not
    restored, because nothing writes to them."""
    buffers = [
        (buffer, buffer.clone())
        for buffer in model.buffers()
        if buffer.layout is not torch.strided or 0 not in buffer.stride()
    ]
    cuda_devices = {buffer.device for buffer in (*model.parameters(), *model.buffers()) if buffer.device.type == "cuda"}
    try:
        with torch.random.fork_rng(cuda_devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, buffer_copy in buffers:
                buffer.copy_(buffer_copy)


def audit_loaded_model(
    target: str, model: nn.Module, batch: Any, signature: CallablePromise, facts: DeviceFacts
) -> AuditReport:
    start_seconds = time.perf_counter()
    layers = find_layers(model)
    # 1. Check the numbers of the converted layers.
    check = ModelCheck(model, layers, facts, signature.precision)
    call_failures = []
    with restore_model(model):
        try:
            if batch is not None:
                check.run(batch)
        except UsageError as error:
            call_failures.append(AuditFinding("", AuditOutcome.CANNOT_TELL, "raises", str(error)))
        check.write_verdicts()
    # 2. Explain why the other layers were left out.
    explain_exclusion = make_exclusion_explainer(model, layers)
    rows = []
    for layer in layers:
        rule, reason = explain_exclusion(layer)
        rows.append(replace(layer.row, rule=rule, reason=reason))
    # 3. Collect the findings. A check without findings has passed.
    findings_by_check = {
        "conversion": [*_find_conversion_faults(rows), *find_broken_ties(model, layers)],
        "numbers": [*call_failures, *_find_layer_number_faults(rows, signature.precision)],
    }
    findings = []
    for name, found in findings_by_check.items():
        findings += [replace(finding, check=name) for finding in found] or [AuditFinding(name)]
    judged_layer_count = sum(bool(row.runs) for row in rows)
    seconds = time.perf_counter() - start_seconds
    return AuditReport(target, signature, tuple(findings), judged_layer_count, seconds, layers=tuple(rows))


def audit_model(model: nn.Module, batch: Any = None, precision: str = "") -> AuditReport:
    """Audits a model that Accelerate, torchao or another converter has changed. Converted layers are checked as the
    model calls them, and alone on random inputs, with and without gradients. The model stays unchanged, except that
    scales which remember earlier casts see these calls.

    model: the converted model
    batch: what its forward takes; without one, layers are only checked alone
    precision: the precision that converted layers should run in; '' for any low precision
    """
    facts = next(device for device in devices.get("cpu").available())
    signature = make_signature("model", precisions.find_canonical_name(precision) if precision else "")
    return audit_loaded_model(type(model).__name__, model, batch, signature, facts)


def _name_layers(rows: Sequence[AuditedLayer], finding: AuditFinding) -> AuditFinding:
    omitted_count_suffix = (
        f" and {len(rows) - _MAX_SHOWN_LAYER_NAMES} more" if len(rows) > _MAX_SHOWN_LAYER_NAMES else ""
    )
    return replace(finding, input=", ".join(row.name for row in rows[:_MAX_SHOWN_LAYER_NAMES]) + omitted_count_suffix)


def _find_conversion_faults(rows: Sequence[AuditedLayer]) -> Iterator[AuditFinding]:
    if not any(row.low for row in rows):
        reason = f"none of {len(rows)} layers has a low-precision class"
        yield _name_layers(rows, make_failure("nothing-converted", reason))
        return
    rows_by_rule = together((row.rule, row) for row in rows if row.rule)
    # Faults of the converter come first.
    for rule, excluded_layers in sorted(rows_by_rule.items(), key=lambda pair: pair[0] not in _CONVERTER_FAULT_RULES):
        make_finding = make_failure if rule in _CONVERTER_FAULT_RULES else make_remark
        reason = f"{len(excluded_layers)} of {len(rows)} layers were not converted: {excluded_layers[0].reason}"
        yield _name_layers(excluded_layers, make_finding(rule, reason))


def _find_layer_number_faults(rows: Sequence[AuditedLayer], precision: str) -> Iterator[AuditFinding]:
    low_precision_rows = [row for row in rows if row.low]
    for (fault_code, reason), same_rows in together(
        (_explain_layer_fault(row, precision), row) for row in low_precision_rows
    ).items():
        if fault_code:
            make_finding = make_remark if fault_code in _REMARK_CODES else make_failure
            count_text = f"{len(same_rows)} of {len(low_precision_rows)} converted layers"
            yield _name_layers(same_rows, make_finding(fault_code, count_text + reason))


def _explain_layer_fault(row: AuditedLayer, precision: str) -> tuple[str, str]:
    """Returns a fault code for a converted layer, and the end of a sentence that begins with "N converted layers" and
    describes the fault. Both are '' if the layer runs as promised.
    """
    if precision and row.runs == WEIGHTS_ONLY and not row.code:
        return "not-cast", f" cast only their weights, but {precision} was promised"
    if precision and row.runs in USUAL_PRECISIONS and row.runs != precision:
        promised_precision_text = f"{precision} was promised; to promise {row.runs}, give --precision {row.runs}"
        return "other-precision", f" multiply {describe_casts(row.runs)}, but {promised_precision_text}"
    if row.code:
        return row.code, f": {row.wrong}"
    if row.runs in WIDE_DTYPES:
        return "not-cast", f" multiply {describe_casts(row.runs)}, but their class promises low precision"
    if not row.runs:
        return "unchecked", " ran no product that a cast would change, so the precision of these layers is unknown"
    return "", ""


def parse_model(name: str, answer: object) -> tuple[nn.Module, Any]:
    match answer:
        case nn.Module():
            return answer, None
        case (nn.Module() as model, batch, *_):
            return model, batch
    raise UsageError(f"{name} returns {type(answer).__name__}; expected a model or (model, batch).")
