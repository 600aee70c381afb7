"""Makes a plan from a request and facts about devices.

This is a pure function, so plans for any device can be tested on any machine. A case that a device cannot run stays in
the plan with the reason; it is never left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, Params, Plan, PlannedCase, Request, Support
from fp8bench.model.request import ALL_MEMORY
from fp8bench.plan.asked_suites import suites_of
from fp8bench.plan.checked_workload import (
    answering,
    axes_of,
    cases_of,
    layers_of_all,
    memory_of,
    parameters_of,
    support_of,
    work_of,
)
from fp8bench.plan.precision_map import (
    PrecisionMap,
    check_keys,
    map_for,
    mapped_support,
    multiplied_by,
    who_multiplies,
    with_static_scales,
)
from fp8bench.protocols import Layer, Workload
from fp8bench.protocols.axes import CACHE, HOT
from fp8bench.registry import AUTO, backends, devices, precisions, workloads
from fp8bench.units import size

# The reference added if only one requested precision is native, so that it has something to be compared with.
ADDED = "fp32"
# Cases that take more than this share of a device's memory are announced before they run.
_LARGE_SHARE = 0.1
# One device of each class, for what depends on nothing else: defaults of axes, and which layers exist.
_CLASSES = (DeviceFacts("cpu", 0, "", 0, ""), DeviceFacts("cuda", 0, "", 0, ""))

_XLA = "torch_xla collects a whole step and runs it later as one graph, so phases cannot be timed"
_AMD = "torch calls AMD's GPUs cuda: use that name"
_NOT_MEASURED = {"tpu": _XLA, "xla": _XLA, "rocm": _AMD, "hip": _AMD}
_WORST_LAST = (Level.NATIVE, Level.EMULATED, Level.REFUSED)


@dataclass(frozen=True)
class _Part:
    """One suite of a request with its precisions, the reference first.

    `layers` is the part of the precision map that names layers of this suite. `may_add` allows `ADDED` as reference.
    """

    workload: Workload
    modes: tuple[str, ...]
    layers: PrecisionMap
    may_add: bool = False


def make_plan(request: Request, facts: Sequence[DeviceFacts], corpus: str | None = None, compares: bool = True) -> Plan:
    """Plans all groups of a request, in the order of suite, device and parameters. Raises UsageError.

    With `compares`, fp32 is added as the reference where the named precisions leave nothing to compare.
    """
    chosen = choose_devices(request, facts)
    suites = suites_of(request)
    parts = _parts(request, suites, chosen, compares)

    # 1. Plan one group for each suite, device and combination of parameters.
    groups: list[Group] = []
    notes: list[str] = []
    for part in parts:
        for device in chosen:
            for params in parameters_of(part.workload, request, device, corpus):
                group = _group(part, params, device, request.reference is not None)
                groups.append(group)
                notes += _describe_new_reference(part, group)
    notes = list(dict.fromkeys(notes))

    # 2. Name the options that change nothing here.
    if request.data is not None and not any(part.workload.uses_corpus for part in parts):
        notes.append(f"--data has no effect: suite {request.suite} reads no text")
    modes = list(dict.fromkeys(mode for part in parts for mode in part.modes))
    if request.backend != AUTO and not any(precisions.get(mode).takes_backend for mode in modes):
        names = ", ".join(modes)
        notes.append(f"--backend {request.backend} has no effect: it is for low precisions, and these are {names}")

    # 3. Note what needs much memory, and what several ranks cannot measure.
    notes += _check_memory(request, suites, chosen)
    for device in chosen:
        notes += _describe_large_cases(groups, device)
    if request.ranks is not None:
        notes += _describe_ranks(request.ranks, chosen)

    # 4. Give cases static scales if they are requested.
    if request.scales is None:
        return Plan(tuple(groups), tuple(notes))
    changed, scale_notes = with_static_scales(groups, request.scales)
    return Plan(changed, (*notes, *scale_notes))


def has_reference_added(plan: Plan) -> bool:
    """Whether `ADDED` may have been added to a plan. Plans of old versions, which never did this, have no fp32."""
    cases = chain.from_iterable(group.cases for group in plan)
    return any(planned.case.precision == ADDED for planned in cases)


def check_names(request: Request) -> tuple[Workload, ...]:
    """Returns the suites of a request. Raises for unknown names and impossible values, before anything slow starts."""
    suites = suites_of(request)
    if request.memory_limit is not None and not any(suite.batch_axis for suite in suites):
        having = [name for name in workloads.names() if workloads.get(name).batch_axis]
        raise UsageError(
            f"--max-batch: suite {request.suite} has no batch. Suites that have one: {', '.join(having)}. In a suite "
            "that you write, set `batch_axis` to the name of the axis."
        )
    parts = _parts(request, suites, _CLASSES)
    for part in parts:
        if (request.ranks or 1) < (least := part.workload.least_ranks):
            raise UsageError(f"suite {part.workload.name} needs {least} processes. Add --ranks {least}.")
    _refuse_repetition("--dtypes", request.dtypes, ": the reference is already measured twice in every round")
    _refuse_repetition("--devices", request.devices)
    for axis, values in request.axes:
        _refuse_repetition(f"--set {axis}", values)
    for word in request.devices:
        kind = word.partition(":")[0]
        if reason := _NOT_MEASURED.get(kind):
            raise UsageError(f"device {word!r} is not measured: {reason}.")
        devices.canonical(kind)
    # The defaults of axes differ between devices; their names and parsers do not, so one device is enough.
    for part in parts:
        for params in parameters_of(part.workload, request, _CLASSES[0], None):
            work_of(part.workload, dict(params))
    return suites


def _refuse_repetition(option: str, words: Sequence[str], reason: str = "") -> None:
    if twice := next((word for word in words if words.count(word) > 1), ""):
        raise UsageError(f"{option} names {twice} twice. Leave one out{reason}.")


def with_batch(planned: PlannedCase, batch: int, facts: DeviceFacts) -> PlannedCase | None:
    """Returns a case with a different batch size; None where the axis or the suite does not accept it."""
    case, workload = planned.case, workloads.get(planned.case.workload)
    with answering(workload):
        axes = axes_of(workload, facts)
        axis = next((axis for axis in axes if axis.name == workload.batch_axis), None)
        try:
            value = axis.parse(str(batch)) if axis is not None else None
            if value is None:
                return None
            expanded = cases_of(workload, axes, {**dict(case.params), workload.batch_axis: value})
        except (ValueError, UsageError):
            return None
        if len(expanded) != 1:
            return None
        resized = _case(workload, expanded[0], facts, case.precision, case.precision_map)
    return replace(resized, case=replace(resized.case, static=case.static))


def searched_for_batches(plan: Plan) -> frozenset[str]:
    """Returns the settings of the groups whose largest batch is searched: one setting of those that differ only in
    batch."""
    first: dict[object, str] = {}
    for group in plan:
        case = group.cases[0].case
        axis = workloads.get(case.workload).batch_axis
        if axis:
            params = tuple(pair for pair in case.params if pair[0] != axis)
            first.setdefault((case.workload, case.device, params), case.setting)
    return frozenset(first.values())


def check_limit(limit: int, facts: DeviceFacts) -> None:
    """Raises UsageError if a search for the largest batch has no safe limit on this device."""
    if limit == ALL_MEMORY and not facts.accelerated:
        raise UsageError(
            f"--max-batch device would take the memory of all other programs on {facts.key}. Give a size, "
            "like --max-batch 2GiB."
        )
    if facts.memory_bytes and limit > facts.memory_bytes:
        raise UsageError(
            f"--max-batch {size(limit)} is more than {facts.key} has ({size(facts.memory_bytes)}). Choose less."
        )


def _describe_ranks(ranks: int, chosen: Sequence[DeviceFacts]) -> list[str]:
    notes = [
        f"{ranks} ranks: the slowest rank's time counts, call by call; no energy, tapes and ceilings: they are of one"
    ]
    if not all(device.accelerated for device in chosen):
        notes.append(
            "ranks on a CPU share its cores, and what they send goes through its memory: that is a functional test; "
            "its times and bandwidths say nothing about a cluster"
        )
    return notes


def _check_memory(request: Request, suites: Sequence[Workload], chosen: Sequence[DeviceFacts]) -> list[str]:
    """Describes the search for the largest batch. Raises UsageError if a device cannot do it."""
    limit = request.memory_limit
    if limit is None:
        return []
    for device in chosen:
        check_limit(limit, device)
    where = f"within {size(limit)} of tensors" if limit != ALL_MEMORY else "up to the end of the device's memory"
    notes = [f"--max-batch: after all else, the largest batch {where} is looked for"]
    if without := [suite.name for suite in suites if not suite.batch_axis]:
        notes.append(f"--max-batch has no effect on {', '.join(without)}: no batch there")
    return notes


def _describe_large_cases(groups: Sequence[Group], facts: DeviceFacts) -> Iterator[str]:
    """Yields a note for each suite whose largest case takes much of a device's memory."""
    by_suite: dict[str, list[tuple[float, PlannedCase]]] = {}
    for group in groups:
        for planned in group.cases:
            case = planned.case
            if case.device != facts.key:
                continue
            needed = workloads.get(case.workload).memory(dict(case.params), precisions.get(case.precision))
            if needed:
                by_suite.setdefault(case.workload, []).append((needed, planned))
    for suite, cases in by_suite.items():
        running = [(needed, planned) for needed, planned in cases if planned.runs]
        too_large = sum(needed > facts.memory_bytes > 0 and not planned.runs for needed, planned in cases)
        most, largest = max(running, key=lambda pair: pair[0], default=(0.0, None))
        if too_large or most > _LARGE_SHARE * facts.memory_bytes > 0:
            takes_most = f"({largest.case.mode}) takes about {size(most)}" if largest else "does not fit"
            skipped = f"; {too_large} of {len(cases)} cases take more and are skipped" if too_large else ""
            has = f"{facts.key} has {size(facts.memory_bytes)}"
            yield f"{Plan.MEMORY}the largest case of {suite} {takes_most}, {has}{skipped}"


def _parts(
    request: Request, suites: Sequence[Workload], facts: Sequence[DeviceFacts], compares: bool = True
) -> list[_Part]:
    # At least one requested suite must have each axis; suites without it ignore it.
    axes = list(chain.from_iterable(axes_of(workload, _CLASSES[0]) for workload in suites))
    names = {axis.name for axis in axes} | {axis.alias for axis in axes if axis.alias}
    for name, _ in request.axes:
        if name not in names:
            raise UnknownName(f"axis of suite {request.suite}", name, names)
    if request.backend not in (AUTO, *backends.names()):
        raise UnknownName("backend", request.backend, [AUTO, *backends.names()])
    layers = [_layers(request, workload, facts) for workload in suites]
    check_keys(request.precision_map, list(chain.from_iterable(layers)), f"suite {request.suite}")
    parts = []
    for workload, suite_layers in zip(suites, layers, strict=True):
        with answering(workload):
            parts.append(_part(request, workload, suite_layers, compares))
    return parts


def _layers(request: Request, workload: Workload, facts: Sequence[DeviceFacts]) -> list[Layer]:
    """Returns the layers of all cases of a suite; none where no precision map asks for them."""
    if not request.precision_map:
        return []
    keys = [key for key, _ in request.precision_map]
    settings = chain.from_iterable(parameters_of(workload, request, device, None) for device in facts)
    return layers_of_all(workload, settings, keys)


def _part(request: Request, workload: Workload, layers: Sequence[Layer], compares: bool) -> _Part:
    """Chooses the precisions of one suite: those requested, else the suite's; the reference first."""
    defaults = workload.history.dtypes if request.grid and workload.history else workload.dtypes
    names = [multiplied_by(word, request.backend) for word in (request.dtypes or defaults)]
    if request.reference is not None:
        reference = multiplied_by(request.reference, request.backend)
    else:
        reference = min(names, key=lambda name: precisions.get(name).rank)
    modes = (reference, *(name for name in dict.fromkeys(names) if name != reference))
    has_choice = request.reference is None and len(request.dtypes) > 1 and not request.grid
    may_add = compares and has_choice and workload.fused and ADDED not in modes
    return _Part(workload, modes, map_for(request, layers, modes), may_add)


def choose_devices(request: Request, facts: Sequence[DeviceFacts]) -> list[DeviceFacts]:
    return list(dict.fromkeys(device_named(word, facts) for word in request.devices or ("",)))


def device_named(word: str, facts: Sequence[DeviceFacts]) -> DeviceFacts:
    """Returns a device by its key. 'cuda' means the first one, '' the first GPU or, without one, the CPU."""
    if not word:
        return next((fact for fact in facts if fact.accelerated), facts[0])
    by_key = {fact.key: fact for fact in facts}
    key = f"{word}:0" if word != "cpu" and ":" not in word else word
    if key not in by_key:
        build = facts[0].torch
        reason = f" (torch {build} is built for CPUs only)" if build.endswith("+cpu") else ""
        raise UnknownName("device on this machine", word, by_key, ", ".join(by_key) + reason)
    return by_key[key]


def _group(part: _Part, params: Params, facts: DeviceFacts, firm: bool) -> Group:
    """Plans the cases of one setting. With `firm`, the first precision stays the reference even if it is emulated."""
    pure = [_case(part.workload, params, facts, name, ()) for name in part.modes]
    native = [planned for planned in pure if _is_native(planned)]
    if part.may_add and len(native) == 1:
        added = _case(part.workload, params, facts, ADDED, ())
        if _is_native(added):
            mapped = [planned if planned in native else _with_map(part, planned, facts) for planned in pure]
            return Group((added, *mapped), 0)
    reference = _choose_reference(pure, firm)
    cases = [planned if index == reference else _with_map(part, planned, facts) for index, planned in enumerate(pure)]
    return Group(tuple(cases), reference)


def _describe_new_reference(part: _Part, group: Group) -> list[str]:
    """Explains a reference that nobody requested."""
    reference, *candidates = group.cases
    if not part.may_add or reference.case.precision != ADDED:
        return []
    native = next(planned.case.precision for planned in candidates if _is_native(planned))
    reason = f"on {reference.case.device} {native} would have had nothing native to compare with"
    return [f"{ADDED} was added as the reference: {reason} (--reference {native} leaves it out)"]


def _is_native(planned: PlannedCase) -> bool:
    return planned.runs and planned.support.is_native


def _with_map(part: _Part, planned: PlannedCase, facts: DeviceFacts) -> PlannedCase:
    case = planned.case
    return _case(part.workload, case.params, facts, case.precision, part.layers) if part.layers else planned


def _case(workload: Workload, params: Params, facts: DeviceFacts, name: str, layers: PrecisionMap) -> PlannedCase:
    case = Case(workload.name, params, name, facts.key, layers, workload.version, ranks=facts.ranks)
    values, precision = dict(params), precisions.get(name)
    # 1. A case is as native as the least native of its layers.
    supports = [support_of(workload, values, precision, facts), *mapped_support(workload, values, facts, layers, name)]
    support = max(supports, key=lambda support: _WORST_LAST.index(support.level))
    support = replace(support, backend=who_multiplies(name, support.level, facts))
    if facts.unusable:
        support = Support(Level.REFUSED, facts.unusable)
    # 2. Skip what the device refuses, what does not fit into its memory, and what its cache cannot be set up for.
    work = work_of(workload, values)
    skip = support.reason if support.level is Level.REFUSED else ""
    expected = memory_of(workload, values, precision)
    if not skip and facts.memory_bytes and max(work.least_memory, expected) > facts.memory_bytes:
        is_certain = work.least_memory > facts.memory_bytes
        needed = f"need at least {size(work.least_memory)}" if is_certain else f"take about {size(expected)}"
        skip = f"its tensors {needed} and {facts.key} has {size(facts.memory_bytes)}: choose smaller sizes"
    return PlannedCase(case, support, work, skip or _unknown_cache(case, facts))


def _unknown_cache(case: Case, facts: DeviceFacts) -> str:
    """Returns why the requested state of the cache cannot be set up; '' if it can."""
    cache = CACHE.of(dict(case.params))
    if cache == HOT or facts.cache_bytes:
        return ""
    return f"cache={cache}: the size of the last-level cache of {facts.key} is not known; choose cache={HOT}"


def _choose_reference(cases: Sequence[PlannedCase], firm: bool) -> int:
    """Returns the index of the reference: the first case, or the highest native precision that can run.

    An emulated reference has no meaningful speed, so it is used next to native cases only if the user named it
    (`firm`).
    """
    if cases[0].runs and (firm or cases[0].support.is_native):
        return 0
    runnable = [index for index, planned in enumerate(cases) if planned.runs]
    native = [index for index in runnable if cases[index].support.is_native]
    return min(native or runnable, key=lambda index: precisions.get(cases[index].case.precision).rank, default=0)
