"""Checks precision maps and static scales against the layers of cases, and applies them to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, PlannedCase, Request, Scalars, StaticScales, Support
from fp8bench.plan.checked_workload import checked_layers, checked_products, get_checked_support
from fp8bench.protocols import Layer, TensorScale, Workload, explain_missing_product, find_map_key, list_map_keys
from fp8bench.protocols.workload import list_layer_kind_keys
from fp8bench.registry import AUTO, backends, precisions, workloads


def find_mode_with_backend(dtype: str, backend: str) -> str:
    """Returns the mode (a precision with options) that a dtype has with this backend. The mode does not change if the
    dtype already names a backend, or if its precision takes none.
    """
    precision = precisions.get(dtype)
    if backend == AUTO or not precision.takes_backend or "backend=" in dtype:
        return precision.mode
    precision_with_backend = precision.by(backends.get(backend))
    return precision_with_backend.mode


def describe_backend(mode: str, level: Level, facts: DeviceFacts) -> str:
    """Returns the backend of a mode with its version, like 'torchao 0.18.0'. If the mode names no backend, it is torch
    for native support and the emulation otherwise (`level`). Returns '' if the device refuses the mode.
    """
    if level is Level.REFUSED:
        return ""
    precision_backend = precisions.get(mode).backend
    backend = precision_backend or backends.get("torch" if level is Level.NATIVE else "emulated")
    version = f"{backend.package} {facts.version_of(backend.package)}"
    return version if backend.name == backend.package else f"{backend.name} ({version})"


PrecisionMap = tuple[tuple[str, str], ...]
# An error lists at most this many names as examples.
_MAX_EXAMPLE_NAMES = 4


def check_map_keys(precision_map: PrecisionMap, layers: Sequence[Layer], owner: str) -> None:
    """Raises UsageError if a key of the map names no layer, or names elementwise operations that do not support the
    key's precision.
    """
    keys = list_map_keys(layers)
    names = [layer.name for layer in layers if layer.product]
    for key, precision in precision_map:
        if key not in keys:
            kinds = ", ".join(dict.fromkeys(chain.from_iterable(map(list_layer_kind_keys, layers))))
            examples = ", ".join(names[:_MAX_EXAMPLE_NAMES])
            choices_text = f"{kinds}; layers by name ({examples}, {len(names)} in all), and prefixes of names"
            raise UnknownName(f"layer of {owner}", key, keys, choices_text if layers else "")
        # Some precisions need a product or earlier casts, which elementwise operations do not have.
        matches_elementwise_layer = any(not layer.product and find_map_key(layer, [key]) for layer in layers)
        if matches_elementwise_layer and (reason := explain_missing_product(precisions.get(precision), key)):
            raise UsageError(f"--precision-map {key}={precision}: {reason}.")


def check_precisions_can_mix(mode: str, other_mode: str) -> None:
    """Raises UsageError if one model cannot have layers of both precisions."""
    if precisions.get(mode).float32_products != precisions.get(other_mode).float32_products:
        raise UsageError(
            f"--precision-map cannot mix {other_mode} into {mode}: TF32 is one switch for a whole process. Leave "
            f"{other_mode} out of the map, or {mode} out of --dtypes."
        )


def select_map_entries(request: Request, layers_of_suite: Sequence[Layer], modes: Sequence[str]) -> PrecisionMap:
    """Returns the entries of the request's precision map that apply to a suite with these layers. The entries apply to
    all modes except the first one, which is the reference.
    """
    reference, *candidates = modes
    keys = list_map_keys(layers_of_suite)
    precision_map_entries = [
        (key, find_mode_with_backend(precision, request.backend))
        for key, precision in request.precision_map
        if key in keys
    ]
    if precision_map_entries and not candidates:
        raise UsageError(
            f"--precision-map would have no effect: {reference} is the reference, which takes no map. Add another "
            "dtype to --dtypes, or another --reference."
        )
    for mode in candidates:
        for _, mapped_mode in precision_map_entries:
            check_precisions_can_mix(mode, mapped_mode)
    return tuple(precision_map_entries)


def iterate_layer_supports(
    workload: Workload, params: Scalars, facts: DeviceFacts, map_entries: PrecisionMap, mode: str
) -> Iterator[Support]:
    """Yields how a device supports the precisions of a precision map (`map_entries`) in a case of this mode: once for
    each key and each kind of layer that the key names. A key that names no layer yields a refusal.
    """
    keys = [key for key, _ in map_entries]
    case_layers = checked_layers(workload, params, keys) if map_entries else ()
    for key, name in map_entries:
        precision = precisions.get(name)
        if key not in list_map_keys(case_layers):
            kinds = " and ".join(dict.fromkeys(layer.kind for layer in case_layers)) or "none that a map could name"
            reason = f"no layer is called {key} in this case, only {kinds}: leave {key} out of the map"
            yield Support(Level.REFUSED, reason)
        layers_mapped_by_key = [layer for layer in case_layers if find_map_key(layer, keys) == key]
        for layer_kind, is_product in dict.fromkeys((layer.kind, layer.product) for layer in layers_mapped_by_key):
            support = get_checked_support(workload, params, precision, facts, layer_kind)
            if not is_product and precisions.get(mode).unit_scaled:
                reason = f"{mode} also unit-scales elementwise operations: leave {key} out of the map"
                yield Support(Level.REFUSED, reason)
            # No device computes elementwise operations in a format that is narrower than torch's dtypes.
            if not is_product and support.is_native and precision.carried_by:
                support = Support(Level.EMULATED, f"{key} is rounded to {precision.mode} and computed in float32")
            yield support


def list_layer_precisions(workload: Workload, case: Case) -> dict[str, None]:
    """Returns the modes in which the layers of a case compute, each mode once."""
    mode_by_map_key = dict(case.precision_map)
    # By default, layers with the flag `high` compute in the precision of the values between products.
    high_layer_precision = precisions.get(case.precision).carried_by or case.precision
    modes: dict[str, None] = {}
    for layer in checked_products(workload, dict(case.params)):
        key = find_map_key(layer, mode_by_map_key)
        default_layer_mode = high_layer_precision if layer.high else case.precision
        modes[default_layer_mode if key is None else mode_by_map_key[key]] = None
    return modes


def add_static_scales(groups: Sequence[Group], rule: StaticScales) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Returns the groups with static scales in all cases that support them, and notes about the other cases. Raises
    UsageError if no case supports static scales.

    Static scales are float32 scales of tensors that are derived from data in untimed steps or in an earlier run.
    """
    # 1. Find the kinds of scales that the layers of each case use. The set of a case without layers is empty.
    scale_kinds_by_case: dict[Case, set[TensorScale]] = {}
    for planned in chain.from_iterable(group.cases for group in groups):
        modes = list_layer_precisions(workloads.get(planned.case.workload), planned.case)
        scale_kinds_by_case[planned.case] = {precisions.get(mode).tensor_scale for mode in modes}

    # 2. Check that at least one case supports static scales, and that scales from an earlier run fit the layers.
    cases_with_scales = {case for case, kinds in scale_kinds_by_case.items() if kinds - {TensorScale.NONE}}
    if not cases_with_scales:
        names = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "--static-scales would have no effect: no layer of these suites and dtypes has one float32 scale a tensor. "
            f"Add a precision with such scales ({', '.join(names)}), or leave the option out."
        )
    if rule.source:
        _check_scales_source(rule, cases_with_scales)

    # 3. Give static scales to the cases that support them.
    groups_with_static_scales = []
    for group in groups:
        cases = (
            _with_static_scales(planned, rule) if planned.case in cases_with_scales else planned
            for planned in group.cases
        )
        groups_with_static_scales.append(replace(group, cases=tuple(cases)))
    return tuple(groups_with_static_scales), tuple(_describe_scalings(groups, scale_kinds_by_case))


def _check_scales_source(rule: StaticScales, cases: Iterable[Case]) -> None:
    """Raises UsageError if no layer of these cases has the name of a layer in the run that static scales are taken
    from.
    """
    # `rule.known` lists the tensors whose largest magnitudes the earlier run stored.
    available_names = {layer for _mode, layer, _role, _amax in rule.known}
    required_names: set[str] = set()
    for case in cases:
        required_names |= {layer.name for layer in workloads.get(case.workload).layers(dict(case.params))}
    if not available_names & required_names:
        raise UsageError(
            f"--scales-from {rule.source}: it has scales of {_list_examples(available_names) or 'no layer'}, and the "
            f"layers here have other names ({_list_examples(required_names)}). Choose a run of this model."
        )


def _list_examples(names: set[str]) -> str:
    return ", ".join(sorted(names)[:_MAX_EXAMPLE_NAMES])


def _with_static_scales(planned: PlannedCase, rule: StaticScales) -> PlannedCase:
    """Returns a case with the static scales of `rule`. If the workload refuses these scales, the case is skipped."""
    case = replace(planned.case, static=rule)
    reason = workloads.get(case.workload).scales_refused(dict(case.params), rule)
    # A case that is skipped already keeps its first reason.
    if planned.skip or not reason:
        return replace(planned, case=case)
    return replace(planned, case=case, support=Support(Level.REFUSED, reason), skip=reason)


def _describe_scalings(groups: Sequence[Group], scales_by_case: Mapping[Case, set[TensorScale]]) -> Iterator[str]:
    reference_cases = {group.cases[group.reference].case for group in groups}
    suites_without_layers = dict.fromkeys(case.workload for case, kinds in scales_by_case.items() if not kinds)
    delayed_modes = dict.fromkeys(case.mode for case, kinds in scales_by_case.items() if TensorScale.DELAYED in kinds)
    cases_without_scales = [case for case, kinds in scales_by_case.items() if kinds == {TensorScale.NONE}]
    modes_without_scales = dict.fromkeys(case.mode for case in cases_without_scales if case not in reference_cases)
    if modes_without_scales:
        yield (
            f"--static-scales has no effect on {', '.join(modes_without_scales)}, which has no float32 scale per tensor"
        )
    if suites_without_layers:
        yield (
            f"--static-scales has no effect on suite {', '.join(suites_without_layers)}, "
            "which has no layers with scales"
        )
    if delayed_modes:
        yield f"static scales replace delayed scaling in {', '.join(delayed_modes)}"
