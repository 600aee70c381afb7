"""Checks precision maps and static scales against the layers of cases, and applies them to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, PlannedCase, Request, Scalars, StaticScales, Support
from fp8bench.plan.checked_workload import checked_layers, checked_products, checked_support
from fp8bench.protocols import Layer, TensorScale, Workload, explain_missing_product, key_of, list_map_keys
from fp8bench.protocols.workload import kind_keys
from fp8bench.registry import AUTO, backends, precisions, workloads


def find_mode(dtype: str, backend: str) -> str:
    """Returns the mode (a precision with options) of a dtype with this backend. A dtype that already names a backend,
    or that takes none, is unchanged.
    """
    precision = precisions.get(dtype)
    if backend == AUTO or not precision.takes_backend or "backend=" in dtype:
        return precision.mode
    return precision.by(backends.get(backend)).mode


def describe_backend(mode: str, level: Level, facts: DeviceFacts) -> str:
    """Returns the backend of a case with its version, like 'torchao 0.18.0'; '' if the case does not run."""
    if level is Level.REFUSED:
        return ""
    named_backend = precisions.get(mode).backend
    backend = named_backend or backends.get("torch" if level is Level.NATIVE else "emulated")
    version = f"{backend.package} {facts.version_of(backend.package)}"
    return version if backend.name == backend.package else f"{backend.name} ({version})"


PrecisionMap = tuple[tuple[str, str], ...]
# The most names that an error lists as examples.
_MAX_EXAMPLES = 4


def check_keys(precision_map: PrecisionMap, layers: Sequence[Layer], owner: str) -> None:
    """Raises UsageError if a key matches no layer, or if its precision is one that an elementwise operation cannot
    use.
    """
    keys = list_map_keys(layers)
    names = [layer.name for layer in layers if layer.product]
    for key, precision in precision_map:
        if key not in keys:
            kinds = ", ".join(dict.fromkeys(chain.from_iterable(map(kind_keys, layers))))
            examples = ", ".join(names[:_MAX_EXAMPLES])
            choices_text = f"{kinds}; layers by name ({examples}, {len(names)} in all), and prefixes of names"
            raise UnknownName(f"layer of {owner}", key, keys, choices_text if layers else "")
        has_elementwise = any(not layer.product and key_of(layer, [key]) for layer in layers)
        if has_elementwise and (reason := explain_missing_product(precisions.get(precision), key)):
            raise UsageError(f"--precision-map {key}={precision}: {reason}.")


def check_can_mix(mode: str, other: str) -> None:
    """Raises UsageError if one model cannot have layers of both precisions."""
    if precisions.get(mode).float32_products != precisions.get(other).float32_products:
        raise UsageError(
            f"--precision-map cannot mix {other} into {mode}: TF32 is one switch for a whole process. Leave {other} "
            f"out of the map, or {mode} out of --dtypes."
        )


def select_map_entries(request: Request, layers_of_suite: Sequence[Layer], modes: Sequence[str]) -> PrecisionMap:
    """Returns the entries of a precision map that apply to a suite with these layers. They apply to all modes except
    the first one, which is the reference.
    """
    reference, *candidates = modes
    keys = list_map_keys(layers_of_suite)
    layers = [(key, find_mode(precision, request.backend)) for key, precision in request.precision_map if key in keys]
    if layers and not candidates:
        raise UsageError(
            f"--precision-map would have no effect: {reference} is the reference, which takes no map. Add another "
            "dtype to --dtypes, or another --reference."
        )
    for mode in candidates:
        for _, mapped in layers:
            check_can_mix(mode, mapped)
    return tuple(layers)


def iterate_layer_supports(
    workload: Workload, params: Scalars, facts: DeviceFacts, layers: PrecisionMap, mode: str
) -> Iterator[Support]:
    """Yields for each key of a precision map how the device supports the key's precision, in cases of a mode. A key
    names layers, or a kind of layers.
    """
    keys = [key for key, _ in layers]
    case_layers = checked_layers(workload, params, keys) if layers else ()
    for key, name in layers:
        precision = precisions.get(name)
        if key not in list_map_keys(case_layers):
            kinds = " and ".join(dict.fromkeys(layer.kind for layer in case_layers)) or "none that a map could name"
            reason = f"no layer is called {key} in this case, only {kinds}: leave {key} out of the map"
            yield Support(Level.REFUSED, reason)
        mapped = [layer for layer in case_layers if key_of(layer, keys) == key]
        for kind, is_product in dict.fromkeys((layer.kind, layer.product) for layer in mapped):
            support = checked_support(workload, params, precision, facts, kind)
            if not is_product and precisions.get(mode).unit_scaled:
                reason = f"{mode} also unit-scales elementwise operations: leave {key} out of the map"
                yield Support(Level.REFUSED, reason)
            # Devices compute an elementwise operation in a dtype of torch, and not in a narrower format.
            if not is_product and support.is_native and precision.carried_by:
                support = Support(Level.EMULATED, f"{key} is rounded to {precision.mode} and computed in float32")
            yield support


def list_layer_precisions(workload: Workload, case: Case) -> dict[str, None]:
    """Returns the precisions (modes) of a case's layers, each once."""
    mapped = dict(case.precision_map)
    high_precision = precisions.get(case.precision).carried_by or case.precision
    modes: dict[str, None] = {}
    for layer in checked_products(workload, dict(case.params)):
        key = key_of(layer, mapped)
        unmapped = high_precision if layer.high else case.precision
        modes[unmapped if key is None else mapped[key]] = None
    return modes


def add_static_scales(groups: Sequence[Group], rule: StaticScales) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Returns the groups, with static scales in all cases that support them, and notes. Raises UsageError if no case
    supports static scales.
    """
    # 1. Find the kinds of scales that each case's layers use. A case without layers has an empty set.
    scalings_by_case: dict[Case, set[TensorScale]] = {}
    for planned in chain.from_iterable(group.cases for group in groups):
        modes = list_layer_precisions(workloads.get(planned.case.workload), planned.case)
        scalings_by_case[planned.case] = {precisions.get(mode).tensor_scale for mode in modes}

    # 2. Check that some case supports static scales. Check also that scales from an earlier run fit the layers.
    scaled_cases = {case for case, kinds in scalings_by_case.items() if kinds - {TensorScale.NONE}}
    if not scaled_cases:
        names = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "--static-scales would have no effect: no layer of these suites and dtypes has one float32 scale a tensor. "
            f"Add a precision with such scales ({', '.join(names)}), or leave the option out."
        )
    if rule.source:
        _check_source(rule, scaled_cases)

    # 3. Apply the rule to the cases that support it.
    changed = []
    for group in groups:
        cases = (
            _with_static_scales(planned, rule) if planned.case in scaled_cases else planned for planned in group.cases
        )
        changed.append(replace(group, cases=tuple(cases)))
    return tuple(changed), tuple(_describe_scalings(groups, scalings_by_case))


def _check_source(rule: StaticScales, cases: Iterable[Case]) -> None:
    """Checks the run from which scales are taken. Raises UsageError if it shares no layer name with these cases."""
    available_names = {layer for _, layer, *_ in rule.known}
    required_names: set[str] = set()
    for case in cases:
        required_names |= {layer.name for layer in workloads.get(case.workload).layers(dict(case.params))}
    if not available_names & required_names:
        raise UsageError(
            f"--scales-from {rule.source}: it has scales of {_list_examples(available_names) or 'no layer'}, and the "
            f"layers here have other names ({_list_examples(required_names)}). Choose a run of this model."
        )


def _list_examples(names: set[str]) -> str:
    return ", ".join(sorted(names)[:_MAX_EXAMPLES])


def _with_static_scales(planned: PlannedCase, rule: StaticScales) -> PlannedCase:
    """Returns a case with static scales. The case is skipped if its workload refuses them."""
    case = replace(planned.case, static=rule)
    reason = workloads.get(case.workload).scales_refused(dict(case.params), rule)
    if planned.skip or not reason:
        return replace(planned, case=case)
    return replace(planned, case=case, support=Support(Level.REFUSED, reason), skip=reason)


def _describe_scalings(groups: Sequence[Group], scalings: Mapping[Case, set[TensorScale]]) -> Iterator[str]:
    references = {group.cases[group.reference].case for group in groups}
    layerless = dict.fromkeys(case.workload for case, kinds in scalings.items() if not kinds)
    delayed = dict.fromkeys(case.mode for case, kinds in scalings.items() if TensorScale.DELAYED in kinds)
    without_scales = [case for case, kinds in scalings.items() if kinds == {TensorScale.NONE}]
    unscaled = dict.fromkeys(case.mode for case in without_scales if case not in references)
    if unscaled:
        yield f"--static-scales has no effect on {', '.join(unscaled)}, which has no float32 scale per tensor"
    if layerless:
        yield f"--static-scales has no effect on suite {', '.join(layerless)}, which has no layers with scales"
    if delayed:
        yield f"static scales replace delayed scaling in {', '.join(delayed)}"
