"""Which layer of a case takes which precision, and which scales: a request held against the layers its cases have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, Params, PlannedCase, Request, Scalar, StaticScales, Support
from fp8bench.plan.backends import layered_support, multiplied_by
from fp8bench.plan.checked_workload import answering, sound_layers
from fp8bench.protocols import Layer, TensorScale, Workload, key_of, keys_of
from fp8bench.registry import precisions, workloads

PrecisionMap = tuple[tuple[str, str], ...]
# So many names show how they are made.
_SHOWN = 4


def layers_of(workload: Workload, settings: Iterable[Params], precision_map: PrecisionMap = ()) -> list[Layer]:
    """The layers of all cases of a suite, each once; those that its keys name where only a worker knows them."""
    with answering(workload):
        found = [_layers(workload, dict(params), [key for key, _ in precision_map]) for params in settings]
    return list(dict.fromkeys(layer for layers in found for layer in layers))


def _layers(workload: Workload, params: Mapping[str, Scalar], keys: Iterable[str]) -> tuple[Layer, ...]:
    if workload.examined:
        return tuple(Layer(key, key) for key in keys)
    return sound_layers(workload, workload.layers(params))


def check_keys(precision_map: PrecisionMap, layers: Sequence[Layer], of: str) -> None:
    """Every key of the map must name a layer of what is mapped."""
    known = keys_of(layers)
    for key, _ in precision_map:
        if key not in known:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
            names = ", ".join(layer.name for layer in layers[:_SHOWN])
            shown = f"{kinds}; layers by name ({names}, {len(layers)} in all), and prefixes of names"
            raise UnknownName(f"layer of {of}", key, known, shown if layers else "")


def check_mixed(mode: str, other: str) -> None:
    """Raise where layers of one precision cannot stand in a model of the other."""
    if precisions.get(mode).float32_products != precisions.get(other).float32_products:
        raise UsageError(
            f"--precision-map cannot mix {other} into {mode}: TF32 is one switch for a whole process. Leave {other} "
            f"out of the map, or {mode} out of --dtypes."
        )


def map_for(request: Request, known: Sequence[Layer], modes: Sequence[str]) -> PrecisionMap:
    """The map of a suite with these layers. The reference, which is the first mode, stays pure; all others take it."""
    reference, *others = modes
    keys = keys_of(known)
    layers = [(key, multiplied_by(word, request.backend)) for key, word in request.precision_map if key in keys]
    if layers and not others:
        raise UsageError(
            f"--precision-map would change nothing: {reference} is the reference, which stays pure. Add another "
            "dtype to --dtypes, or another --reference."
        )
    for mode in others:
        for _, other in layers:
            check_mixed(mode, other)
    return tuple(layers)


def mapped_support(
    workload: Workload, params: Mapping[str, Scalar], facts: DeviceFacts, layers: PrecisionMap
) -> Iterator[Support]:
    """How a device does the layers that a map names, key by key; a key may name none in this case."""
    keys = [key for key, _ in layers]
    own = _layers(workload, params, keys) if layers else ()
    for key, word in layers:
        if key not in keys_of(own):
            kinds = " and ".join(dict.fromkeys(layer.kind for layer in own)) or "none that a map could name"
            yield Support(Level.REFUSED, f"no layer is called {key} here, there are {kinds}: leave {key} unmapped")
        for kind in dict.fromkeys(layer.kind for layer in own if key_of(layer, keys) == key):
            yield layered_support(workload, params, precisions.get(word), facts, kind)


def modes_of(workload: Workload, case: Case) -> dict[str, None]:
    keys = dict(case.precision_map)
    own = precisions.get(case.precision)
    found: dict[str, None] = {}
    for layer in sound_layers(workload, workload.layers(dict(case.params))):
        key = key_of(layer, keys)
        high = own.carried_by or case.precision
        found[keys[key] if key is not None else high if layer.high else case.precision] = None
    return found


def with_static_scales(groups: Sequence[Group], rule: StaticScales) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The groups with scales from data where layers can have them, and what to know of it. Raises if none can."""
    # Where the layers of each case have their scales from; nothing where it has no layers.
    taken = {
        case: {precisions.get(mode).tensor_scale for mode in modes_of(workloads.get(case.workload), case)}
        for case in (planned.case for group in groups for planned in group.cases)
    }
    having = {case for case, scales in taken.items() if scales - {TensorScale.NONE}}
    if not having:
        known = [name for name in precisions.names() if precisions.get(name).tensor_scale is not TensorScale.NONE]
        raise UsageError(
            "--static-scales would change nothing: no layer of these suites and dtypes has one float32 scale a tensor. "
            f"Add a dtype that has ({', '.join(known)}), or leave it out."
        )
    changed = tuple(
        replace(group, cases=tuple(_scaled(case, rule) if case.case in having else case for case in group.cases))
        for group in groups
    )
    return changed, tuple(_notes(groups, taken))


def _scaled(planned: PlannedCase, rule: StaticScales) -> PlannedCase:
    """A case with scales from data, or the reason why it cannot have them."""
    case = replace(planned.case, static=rule)
    refused = workloads.get(case.workload).scales_refused(dict(case.params), rule)
    if planned.skip or not refused:
        return replace(planned, case=case)
    return replace(planned, case=case, support=Support(Level.REFUSED, refused), skip=refused)


def _notes(groups: Sequence[Group], taken: Mapping[Case, set[TensorScale]]) -> Iterator[str]:
    leads = {group.cases[group.reference].case for group in groups}
    others = dict.fromkeys(case.mode for case in taken if taken[case] == {TensorScale.NONE} and case not in leads)
    layerless = dict.fromkeys(case.workload for case in taken if not taken[case])
    delayed = dict.fromkeys(case.mode for case in taken if TensorScale.DELAYED in taken[case])
    if others:
        yield f"--static-scales has no effect on {', '.join(others)}, whose tensors do not have one float32 scale each"
    if layerless:
        yield f"--static-scales has no effect on suite {', '.join(layerless)}, which has no layers to find scales for"
    if delayed:
        yield f"scales from data take the place of delayed scaling in {', '.join(delayed)}"
