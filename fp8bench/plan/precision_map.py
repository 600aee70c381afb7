"""Which layer of a case takes which precision, and which scales: a request held against the layers its cases have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, PlannedCase, Request, Scalars, StaticScales, Support
from fp8bench.plan.checked_workload import layers_of, products_of, support_of
from fp8bench.protocols import Layer, Precision, TensorScale, Workload, around_refused, key_of, keys_of
from fp8bench.protocols.workload import words_for
from fp8bench.registry import AUTO, backends, precisions, workloads


def multiplied_by(word: str, backend: str) -> str:
    """The mode of a dtype, by that backend if it takes one and names none itself."""
    precision = precisions.get(word)
    if backend == AUTO or not precision.takes_backend or "backend=" in word:
        return precision.mode
    return precision.by(backends.get(backend)).mode


def who_multiplies(mode: str, level: Level, facts: DeviceFacts) -> str:
    """The backend of a case with its version: 'torchao 0.18.0', 'emulated (torch 2.13.0)'; '' if it does not run."""
    if level is Level.REFUSED:
        return ""
    chosen = precisions.get(mode).backend
    backend = chosen or backends.get("torch" if level is Level.NATIVE else "emulated")
    version = f"{backend.package} {facts.version_of(backend.package)}"
    return version if backend.name == backend.package else f"{backend.name} ({version})"


PrecisionMap = tuple[tuple[str, str], ...]
# So many names show how they are made.
_SHOWN = 4


def check_keys(precision_map: PrecisionMap, layers: Sequence[Layer], of: str) -> None:
    known = keys_of(layers)
    names = [layer.name for layer in layers if layer.product]
    for key, word in precision_map:
        if key not in known:
            kinds = ", ".join(dict.fromkeys(word for layer in layers for word in words_for(layer)))
            shown = f"{kinds}; layers by name ({', '.join(names[:_SHOWN])}, {len(names)} in all), and prefixes of names"
            raise UnknownName(f"layer of {of}", key, known, shown if layers else "")
        around = any(not layer.product and key_of(layer, [key]) for layer in layers)
        if around and (why := around_refused(precisions.get(word), key)):
            raise UsageError(f"--precision-map {key}={word}: {why}.")


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
    workload: Workload, params: Scalars, facts: DeviceFacts, layers: PrecisionMap, mode: str
) -> Iterator[Support]:
    """How a device does the layers that a map names, in a case of that mode, key by key; a key may name none in it."""
    keys = [key for key, _ in layers]
    own = layers_of(workload, params, keys) if layers else ()
    for key, word in layers:
        if key not in keys_of(own):
            kinds = " and ".join(dict.fromkeys(layer.kind for layer in own)) or "none that a map could name"
            yield Support(Level.REFUSED, f"no layer is called {key} here, there are {kinds}: leave {key} unmapped")
        for kind, product in dict.fromkeys((layer.kind, layer.product) for layer in own if key_of(layer, keys) == key):
            support = support_of(workload, params, precisions.get(word), facts, kind)
            if not product and precisions.get(mode).unit_scaled:
                yield Support(Level.REFUSED, f"what stands around products of {mode} is unit-scaled: leave {key} out")
            yield support if product else around_support(precisions.get(word), support, key)


def around_support(precision: Precision, support: Support, key: str) -> Support:
    """How a device does what stands around products: nothing computes it in less than a dtype of torch's."""
    if support.is_native and precision.carried_by:
        return Support(Level.EMULATED, f"{key} is rounded to {precision.mode} and computed in float32")
    return support


def modes_of(workload: Workload, case: Case) -> dict[str, None]:
    keys = dict(case.precision_map)
    own = precisions.get(case.precision)
    modes: dict[str, None] = {}
    for layer in products_of(workload, dict(case.params)):
        key = key_of(layer, keys)
        high = own.carried_by or case.precision
        modes[keys[key] if key is not None else high if layer.high else case.precision] = None
    return modes


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
    if rule.source:
        names = {layer for _, layer, *_ in rule.known}
        takes = {layer.name for case in having for layer in workloads.get(case.workload).layers(dict(case.params))}
        if not names & takes:
            raise UsageError(
                f"--scales-from {rule.source}: it has scales of {', '.join(sorted(names)[:_SHOWN]) or 'nothing'}, and "
                f"no layer here is called so ({', '.join(sorted(takes)[:_SHOWN])}). Choose a run of this model."
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
