"""Checks precision maps and static scales against the layers that cases have, and applies them to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, PlannedCase, Request, Scalars, StaticScales, Support
from fp8bench.plan.checked_workload import layers_of, products_of, support_of
from fp8bench.protocols import Layer, Precision, TensorScale, Workload, around_objection, key_of, keys_of
from fp8bench.protocols.workload import words_for
from fp8bench.registry import AUTO, backends, precisions, workloads


def multiplied_by(word: str, backend: str) -> str:
    """Returns the mode of a dtype with that backend; the dtype unchanged if it takes no backend or already names
    one."""
    precision = precisions.get(word)
    if backend == AUTO or not precision.takes_backend or "backend=" in word:
        return precision.mode
    return precision.by(backends.get(backend)).mode


def who_multiplies(mode: str, level: Level, facts: DeviceFacts) -> str:
    """Returns the backend of a case with its version, like 'torchao 0.18.0'; '' if the case does not run."""
    if level is Level.REFUSED:
        return ""
    chosen = precisions.get(mode).backend
    backend = chosen or backends.get("torch" if level is Level.NATIVE else "emulated")
    version = f"{backend.package} {facts.version_of(backend.package)}"
    return version if backend.name == backend.package else f"{backend.name} ({version})"


PrecisionMap = tuple[tuple[str, str], ...]
# The number of names that an error lists as examples.
_SHOWN = 4


def check_keys(precision_map: PrecisionMap, layers: Sequence[Layer], of: str) -> None:
    """Raises UsageError for a key that no layer has, or a precision that an elementwise operation refuses."""
    keys = keys_of(layers)
    names = [layer.name for layer in layers if layer.product]
    for key, word in precision_map:
        if key not in keys:
            kinds = ", ".join(dict.fromkeys(chain.from_iterable(map(words_for, layers))))
            shown = f"{kinds}; layers by name ({', '.join(names[:_SHOWN])}, {len(names)} in all), and prefixes of names"
            raise UnknownName(f"layer of {of}", key, keys, shown if layers else "")
        around = any(not layer.product and key_of(layer, [key]) for layer in layers)
        if around and (reason := around_objection(precisions.get(word), key)):
            raise UsageError(f"--precision-map {key}={word}: {reason}.")


def check_mixed(mode: str, other: str) -> None:
    """Raises UsageError if one model cannot mix layers of these precisions."""
    if precisions.get(mode).float32_products != precisions.get(other).float32_products:
        raise UsageError(
            f"--precision-map cannot mix {other} into {mode}: TF32 is one switch for a whole process. Leave {other} "
            f"out of the map, or {mode} out of --dtypes."
        )


def map_for(request: Request, known: Sequence[Layer], modes: Sequence[str]) -> PrecisionMap:
    """Returns the map of a suite with these layers. All modes take it except the first, the reference."""
    reference, *candidates = modes
    keys = keys_of(known)
    layers = [(key, multiplied_by(word, request.backend)) for key, word in request.precision_map if key in keys]
    if layers and not candidates:
        raise UsageError(
            f"--precision-map would have no effect: {reference} is the reference, which stays pure. Add another "
            "dtype to --dtypes, or another --reference."
        )
    for mode in candidates:
        for _, mapped in layers:
            check_mixed(mode, mapped)
    return tuple(layers)


def mapped_support(
    workload: Workload, params: Scalars, facts: DeviceFacts, layers: PrecisionMap, mode: str
) -> Iterator[Support]:
    """Yields how a device supports the layers that each key of a map names, in a case of that mode."""
    keys = [key for key, _ in layers]
    case_layers = layers_of(workload, params, keys) if layers else ()
    for key, word in layers:
        if key not in keys_of(case_layers):
            kinds = " and ".join(dict.fromkeys(layer.kind for layer in case_layers)) or "none that a map could name"
            yield Support(Level.REFUSED, f"no layer is called {key} here, there are {kinds}: leave {key} unmapped")
        mapped = [layer for layer in case_layers if key_of(layer, keys) == key]
        for kind, is_product in dict.fromkeys((layer.kind, layer.product) for layer in mapped):
            support = support_of(workload, params, precisions.get(word), facts, kind)
            if is_product:
                yield support
                continue
            if precisions.get(mode).unit_scaled:
                yield Support(Level.REFUSED, f"{mode} unit-scales the operations around products: leave {key} out")
            yield around_support(precisions.get(word), support, key)


def around_support(precision: Precision, support: Support, key: str) -> Support:
    """Returns the support of an elementwise operation. Devices compute it in a dtype of torch, never in a narrower
    format."""
    if support.is_native and precision.carried_by:
        return Support(Level.EMULATED, f"{key} is rounded to {precision.mode} and computed in float32")
    return support


def modes_of(workload: Workload, case: Case) -> dict[str, None]:
    """Returns the modes of a case's layers, each once."""
    mapped = dict(case.precision_map)
    high = precisions.get(case.precision).carried_by or case.precision
    modes: dict[str, None] = {}
    for layer in products_of(workload, dict(case.params)):
        key = key_of(layer, mapped)
        unmapped = high if layer.high else case.precision
        modes[unmapped if key is None else mapped[key]] = None
    return modes


def with_static_scales(groups: Sequence[Group], rule: StaticScales) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Returns the groups with static scales in all cases that support them, and notes. Raises UsageError if no case
    does."""
    # 1. Find how the layers of each case are scaled; a case without layers has an empty set.
    scalings: dict[Case, set[TensorScale]] = {}
    for group in groups:
        for planned in group.cases:
            modes = modes_of(workloads.get(planned.case.workload), planned.case)
            scalings[planned.case] = {precisions.get(mode).tensor_scale for mode in modes}

    # 2. Check that some case takes them, and that scales from an earlier run fit the layers here.
    scaled = {case for case, kinds in scalings.items() if kinds - {TensorScale.NONE}}
    if not scaled:
        names = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "--static-scales would have no effect: no layer of these suites and dtypes has one float32 scale a tensor. "
            f"Add a dtype that has ({', '.join(names)}), or leave it out."
        )
    if rule.source:
        _check_source(rule, scaled)

    # 3. Apply the rule to these cases.
    changed = []
    for group in groups:
        cases = (_with_rule(planned, rule) if planned.case in scaled else planned for planned in group.cases)
        changed.append(replace(group, cases=tuple(cases)))
    return tuple(changed), tuple(_describe_scalings(groups, scalings))


def _check_source(rule: StaticScales, cases: Iterable[Case]) -> None:
    """Raises UsageError if the run that scales are taken from shares no layer name with these cases."""
    available = {layer for _, layer, *_ in rule.known}
    needed: set[str] = set()
    for case in cases:
        needed |= {layer.name for layer in workloads.get(case.workload).layers(dict(case.params))}
    if not available & needed:
        raise UsageError(
            f"--scales-from {rule.source}: it has scales of {', '.join(sorted(available)[:_SHOWN]) or 'nothing'}, and "
            f"no layer here has such a name ({', '.join(sorted(needed)[:_SHOWN])}). Choose a run of this model."
        )


def _with_rule(planned: PlannedCase, rule: StaticScales) -> PlannedCase:
    """Returns a case with static scales; it is skipped if its workload refuses them."""
    case = replace(planned.case, static=rule)
    reason = workloads.get(case.workload).scales_refused(dict(case.params), rule)
    if planned.skip or not reason:
        return replace(planned, case=case)
    return replace(planned, case=case, support=Support(Level.REFUSED, reason), skip=reason)


def _describe_scalings(groups: Sequence[Group], scalings: Mapping[Case, set[TensorScale]]) -> Iterator[str]:
    references = {group.cases[group.reference].case for group in groups}
    unscaled: dict[str, None] = {}
    layerless: dict[str, None] = {}
    delayed: dict[str, None] = {}
    for case, kinds in scalings.items():
        if not kinds:
            layerless[case.workload] = None
        if kinds == {TensorScale.NONE} and case not in references:
            unscaled[case.mode] = None
        if TensorScale.DELAYED in kinds:
            delayed[case.mode] = None
    if unscaled:
        yield f"--static-scales has no effect on {', '.join(unscaled)}, whose tensors have no float32 scale each"
    if layerless:
        yield f"--static-scales has no effect on suite {', '.join(layerless)}, which has no layers to find scales for"
    if delayed:
        yield f"scales from data take the place of delayed scaling in {', '.join(delayed)}"
