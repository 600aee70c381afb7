"""Request and device facts in, plan out: a pure function, so that plans for any device are tested on any machine.

What a device cannot do becomes a case with a reason, never a missing row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, Params, Plan, PlannedCase, Request, Support
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

# What is added as the reference where the precisions that were named leave nothing to compare.
ADDED = "fp32"
# From such a share of a device's memory on is said what cases take.
_SAID_FROM = 0.1
# What a device of either class may be, where only the class matters: defaults of axes, and which layers there are.
_CLASSES = (DeviceFacts("cpu", 0, "", 0, ""), DeviceFacts("cuda", 0, "", 0, ""))

_XLA = (
    "torch reaches it through torch_xla, which collects a step and runs it as one graph later, so that no phase of it"
)
_NOT_MEASURED = {
    **dict.fromkeys(("tpu", "xla"), f"{_XLA} could be timed"),
    **dict.fromkeys(("rocm", "hip"), "torch calls AMD's GPUs cuda: give that name"),
}
_WORST_LAST = (Level.NATIVE, Level.EMULATED, Level.REFUSED)


@dataclass(frozen=True)
class _Part:
    """One suite of a request: its workload, the precisions it gets with the reference first, and its map.

    `layers` holds those keys of the map that name a layer of some case of the suite; `may_add` says that a
    reference may be added.
    """

    workload: Workload
    modes: tuple[str, ...]
    layers: PrecisionMap
    may_add: bool = False


def make_plan(request: Request, facts: Sequence[DeviceFacts], corpus: str | None = None, compares: bool = True) -> Plan:
    """All groups of a request, in order of suite, device and parameters. Raises UsageError for what cannot be meant.

    Where precisions are to be compared and those that were named leave nothing to compare, fp32 is added.
    """
    chosen = devices_asked(request, facts)
    suites = suites_of(request)
    parts = _parts(request, suites, chosen, compares)
    groups = []
    added: dict[str, None] = {}
    for part in parts:
        own = [
            _group(part, params, device, request.reference is not None)
            for device in chosen
            for params in parameters_of(part.workload, request, device, corpus)
        ]
        groups += own
        added |= dict.fromkeys(_added(part, group) for group in own)
    notes = [note for note in added if note]
    if request.data is not None and not any(part.workload.uses_corpus for part in parts):
        notes.append(f"--data has no effect: suite {request.suite} reads no text")
    modes = dict.fromkeys(mode for part in parts for mode in part.modes)
    if request.backend != AUTO and not any(precisions.get(mode).takes_backend for mode in modes):
        notes.append(
            f"--backend {request.backend} has no effect: it is for low precisions, and these are {', '.join(modes)}"
        )
    notes += _check_memory(request, suites, chosen)
    notes += [told for device in chosen for told in _what_fits(groups, device)]
    if request.ranks is not None:
        notes += _of_ranks(request.ranks, chosen)
    if request.scales is None:
        return Plan(tuple(groups), tuple(notes))
    changed, more = with_static_scales(groups, request.scales)
    return Plan(changed, (*notes, *more))


def has_reference_added(plan: Plan) -> bool:
    """Whether fp32 may have been added to a plan. One made before it ever was is made again without it."""
    return any(planned.case.precision == ADDED for group in plan for planned in group.cases)


def check_names(request: Request) -> tuple[Workload, ...]:
    """The request's suites. Raises for unknown names and impossible values before anything slow is started."""
    suites = suites_of(request)
    if request.max_batch and not any(suite.batch_axis for suite in suites):
        having = [name for name in workloads.names() if workloads.get(name).batch_axis]
        raise UsageError(
            f"--max-batch: suite {request.suite} has no batch. Suites that have one: {', '.join(having)}; one of your "
            "own names the axis that is its batch in `batch_axis`."
        )
    parts = _parts(request, suites, _CLASSES)
    for part in parts:
        if (request.ranks or 1) < (least := part.workload.least_ranks):
            raise UsageError(f"suite {part.workload.name} takes {least} processes together: `suite --ranks {least}`.")
    _refuse_repeated("--dtypes", request.dtypes, ": the reference is measured twice in every round anyway")
    _refuse_repeated("--devices", request.devices)
    for axis, values in request.axes:
        _refuse_repeated(f"--set {axis}", values)
    for word in request.devices:
        kind = word.partition(":")[0]
        if why := _NOT_MEASURED.get(kind):
            raise UsageError(f"device {word!r} is not measured: {why}.")
        devices.canonical(kind)
    # Names and parsers of axes are the same on every device, only their defaults differ.
    for part in parts:
        for params in parameters_of(part.workload, request, _CLASSES[0], None):
            work_of(part.workload, dict(params))
    return suites


def _refuse_repeated(option: str, words: Sequence[str], why: str = "") -> None:
    if twice := next((word for word in words if words.count(word) > 1), ""):
        raise UsageError(f"{option} names {twice} twice. Leave one out{why}.")


def with_batch(planned: PlannedCase, batch: int, facts: DeviceFacts) -> PlannedCase | None:
    """The same case with another batch; None where its axis does not take that, or the suite that combination."""
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
        other = _case(workload, expanded[0], facts, case.precision, case.precision_map)
    return replace(other, case=replace(other.case, static=case.static))


def searched_for_batches(plan: Plan) -> frozenset[str]:
    """The settings of the groups whose largest batch is looked for: one of those that differ in nothing but batch."""
    first: dict[object, str] = {}
    for group in plan:
        case = group.cases[0].case
        axis = workloads.get(case.workload).batch_axis
        if axis:
            rest = tuple(pair for pair in case.params if pair[0] != axis)
            first.setdefault((case.workload, case.device, rest), case.setting)
    return frozenset(first.values())


def check_limit(limit: int | None, facts: DeviceFacts) -> None:
    """Raise where a search for the largest batch cannot end at that limit, or at a device's own end."""
    if limit is None and not facts.accelerated:
        raise UsageError(
            f"--max-batch on {facts.key} needs --memory-limit SIZE (2GiB, say): up to its own end the search would "
            "take the memory of everything else on this machine."
        )
    if limit is not None and facts.memory_bytes and limit > facts.memory_bytes:
        raise UsageError(
            f"--memory-limit {size(limit)} is more than {facts.key} has ({size(facts.memory_bytes)}). Choose less."
        )


def _of_ranks(ranks: int, chosen: Sequence[DeviceFacts]) -> list[str]:
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
    """Raise where --max-batch cannot be done on a device; what it will do, in words."""
    if not request.max_batch:
        return []
    limit = request.memory_limit
    for device in chosen:
        check_limit(limit, device)
    where = f"within {size(limit)} of tensors" if limit is not None else "up to the end of the device's memory"
    notes = [f"--max-batch: after all else, the largest batch {where} is looked for"]
    without = [suite.name for suite in suites if not suite.batch_axis]
    return [*notes, f"--max-batch has no effect on {', '.join(without)}: no batch there"] if without else notes


def _what_fits(groups: Sequence[Group], facts: DeviceFacts) -> Iterator[str]:
    """What the largest case of a suite takes, where that is no small part of a device's memory, before it is begun."""
    by_suite: dict[str, list[tuple[float, PlannedCase]]] = {}
    for planned in (case for group in groups for case in group.cases if case.case.device == facts.key):
        named, precision = dict(planned.case.params), precisions.get(planned.case.precision)
        if takes := workloads.get(planned.case.workload).memory(named, precision):
            by_suite.setdefault(planned.case.workload, []).append((takes, planned))
    for suite, cases in by_suite.items():
        running = [(takes, case) for takes, case in cases if case.runs]
        too_large = sum(takes > facts.memory_bytes > 0 and not case.runs for takes, case in cases)
        most, largest = max(running, key=lambda pair: pair[0], default=(0.0, None))
        if too_large or most > _SAID_FROM * facts.memory_bytes > 0:
            takes_most = f"({largest.case.mode}) takes about {size(most)}" if largest else "does not fit"
            left_out = f"; {too_large} of {len(cases)} cases take more and are skipped" if too_large else ""
            has = f"{facts.key} has {size(facts.memory_bytes)}"
            yield f"{Plan.MEMORY}the largest case of {suite} {takes_most}, {has}{left_out}"


def _parts(
    request: Request, suites: Sequence[Workload], facts: Sequence[DeviceFacts], compares: bool = True
) -> list[_Part]:
    known = {axis.name for workload in suites for axis in axes_of(workload, _CLASSES[0])}
    for name, _ in request.axes:  # each must be one of some suite; the others do without it
        if name not in known:
            raise UnknownName(f"axis of suite {request.suite}", name, known)
    if request.backend not in (AUTO, *backends.names()):
        raise UnknownName("backend", request.backend, [AUTO, *backends.names()])
    # The layers of all cases of a suite; none is asked for where there is no map.
    mapped = facts if request.precision_map else ()
    keys = [key for key, _ in request.precision_map]
    layers = [
        layers_of_all(
            workload, [params for device in mapped for params in parameters_of(workload, request, device, None)], keys
        )
        for workload in suites
    ]
    check_keys(request.precision_map, [layer for own in layers for layer in own], f"suite {request.suite}")
    parts = []
    for workload, own in zip(suites, layers, strict=True):
        with answering(workload):
            parts.append(_part(request, workload, own, compares))
    return parts


def _part(request: Request, workload: Workload, layers: Sequence[Layer], compares: bool) -> _Part:
    """Precisions of one suite: those asked for, else its own; the reference first."""
    own = workload.history.dtypes if request.grid and workload.history else workload.dtypes
    names = [multiplied_by(word, request.backend) for word in (request.dtypes or own)]
    if request.reference is not None:
        names.append(multiplied_by(request.reference, request.backend))
        lead = names[-1]
    else:
        lead = min(names, key=lambda name: precisions.get(name).rank)
    modes = (lead, *(name for name in dict.fromkeys(names) if name != lead))
    named = request.reference is None and len(request.dtypes) > 1 and not request.grid
    may_add = compares and named and workload.fused and ADDED not in modes
    return _Part(workload, modes, map_for(request, layers, modes), may_add)


def devices_asked(request: Request, facts: Sequence[DeviceFacts]) -> list[DeviceFacts]:
    return list(dict.fromkeys(device_named(word, facts) for word in request.devices or ("",)))


def device_named(word: str, facts: Sequence[DeviceFacts]) -> DeviceFacts:
    """One of a machine's devices by its key; 'cuda' is the first of its kind, '' the first GPU, else the processor."""
    if not word:
        return next((fact for fact in facts if fact.accelerated), facts[0])
    known = {fact.key: fact for fact in facts}
    key = f"{word}:0" if word != "cpu" and ":" not in word else word
    if key not in known:
        build = facts[0].torch
        why = f" (torch {build} is a build for processors alone)" if build.endswith("+cpu") else ""
        raise UnknownName("device on this machine", word, known, ", ".join(known) + why)
    return known[key]


def _group(part: _Part, params: Params, facts: DeviceFacts, firm: bool) -> Group:
    pure = [_case(part.workload, params, facts, name, ()) for name in part.modes]
    native = [planned for planned in pure if _is_native(planned)]
    added = _case(part.workload, params, facts, ADDED, ()) if part.may_add and len(native) == 1 else None
    if added is not None and _is_native(added):
        mapped = [planned if planned in native else _mapped(part, planned, facts) for planned in pure]
        return Group((added, *mapped), 0)
    lead = _lead(pure, firm)
    cases = (planned if index == lead else _mapped(part, planned, facts) for index, planned in enumerate(pure))
    return Group(tuple(cases), lead)


def _added(part: _Part, group: Group) -> str:
    """What to know of a reference that nobody named; '' where there is none."""
    reference, *others = group.cases
    if not part.may_add or reference.case.precision != ADDED:
        return ""
    kept = next(planned.case.precision for planned in others if _is_native(planned))
    return (
        f"{ADDED} was added as the reference: on {reference.case.device} {kept} would have had nothing native to "
        f"compare with (--reference {kept} leaves it out)"
    )


def _is_native(planned: PlannedCase) -> bool:
    return planned.runs and planned.support.is_native


def _mapped(part: _Part, planned: PlannedCase, facts: DeviceFacts) -> PlannedCase:
    case = planned.case
    return _case(part.workload, case.params, facts, case.precision, part.layers) if part.layers else planned


def _case(workload: Workload, params: Params, facts: DeviceFacts, name: str, layers: PrecisionMap) -> PlannedCase:
    case = Case(workload.name, params, name, facts.key, layers, workload.version, ranks=facts.ranks)
    named = dict(params)
    # A case is as native as the least native of its layers.
    supports = (
        support_of(workload, named, precisions.get(name), facts),
        *mapped_support(workload, named, facts, layers, name),
    )
    support = max(supports, key=lambda support: _WORST_LAST.index(support.level))
    support = replace(support, backend=who_multiplies(name, support.level, facts))
    if facts.unusable:
        support = Support(Level.REFUSED, facts.unusable)
    work = work_of(workload, named)
    skip = support.reason if support.level is Level.REFUSED else ""
    expected = memory_of(workload, named, precisions.get(name))
    if not skip and facts.memory_bytes and max(work.least_memory, expected) > facts.memory_bytes:
        surely = work.least_memory > facts.memory_bytes
        takes = f"need at least {size(work.least_memory)}" if surely else f"take about {size(expected)}"
        skip = f"its tensors {takes} and {facts.key} has {size(facts.memory_bytes)}: choose smaller sizes"
    return PlannedCase(case, support, work, skip or _unknown_cache(case, facts))


def _unknown_cache(case: Case, facts: DeviceFacts) -> str:
    """Why the cache cannot be what the case says, '' where it can."""
    cache = CACHE.of(dict(case.params))
    if cache == HOT or facts.cache_bytes:
        return ""
    return f"cache={cache}: nobody says how large the last cache of {facts.key} is; choose cache={HOT}"


def _lead(cases: Sequence[PlannedCase], firm: bool) -> int:
    """The reference's place: the first, or that of the highest native precision that can run.

    An emulated reference has no speed to compare with, so it takes the user's word (`firm`) to have one beside native
    cases.
    """
    if cases[0].runs and (firm or cases[0].support.is_native):
        return 0
    able = [index for index, planned in enumerate(cases) if planned.runs]
    native = [index for index in able if cases[index].support.is_native]
    return min(native or able, key=lambda index: precisions.get(cases[index].case.precision).rank, default=0)
