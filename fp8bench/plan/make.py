"""Makes a plan from a request and facts about devices.

A plan depends on nothing else, so plans for any device can be tested on any machine. A case that a device cannot run
stays in the plan, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, Params, Plan, PlannedCase, Request, Support
from fp8bench.model.request import ALL_MEMORY
from fp8bench.plan.asked_suites import find_suites
from fp8bench.plan.checked_workload import (
    expand_cases,
    expand_request,
    get_checked_memory,
    get_checked_support,
    get_checked_work,
    list_checked_axes,
    merge_layers,
    user_errors_as_usage,
)
from fp8bench.plan.precision_map import (
    PrecisionMap,
    add_static_scales,
    check_map_keys,
    describe_backend,
    find_mode_with_backend,
    iterate_layer_supports,
    select_map_entries,
)
from fp8bench.protocols import Layer, Workload
from fp8bench.protocols.axes import CACHE, HOT
from fp8bench.registry import AUTO, backends, devices, precisions, workloads
from fp8bench.units import size

# If only one requested precision is native, this precision is added as the reference, because the native one would have
# nothing to be compared with.
ADDED_REFERENCE = "fp32"
# If a case needs more than this share of a device's memory, a note gives its memory before it runs.
_LARGE_MEMORY_SHARE = 0.1
# One example of each class of devices (CPUs and GPUs). The defaults of axes and the layers depend only on the class.
_EXAMPLE_DEVICES = (DeviceFacts("cpu", 0, "", 0, ""), DeviceFacts("cuda", 0, "", 0, ""))

_NO_XLA_PHASES_REASON = "torch_xla collects a whole step and runs it later as one graph, so phases cannot be timed"
_AMD_REASON = "torch calls AMD's GPUs cuda: use that name"
_REFUSAL_BY_DEVICE_NAME = {
    "tpu": _NO_XLA_PHASES_REASON,
    "xla": _NO_XLA_PHASES_REASON,
    "rocm": _AMD_REASON,
    "hip": _AMD_REASON,
}
# From best to worst: a case has the worst level of its layers.
_SUPPORT_LEVEL_ORDER = (Level.NATIVE, Level.EMULATED, Level.REFUSED)


@dataclass(frozen=True)
class _SuitePlan:
    """One suite of a request, with its precisions (`modes`). The first precision is the reference. `layers` is the
    part of the precision map that applies to this suite. If `may_add_reference` is True, ADDED_REFERENCE is added where
    only one precision is native.
    """

    workload: Workload
    modes: tuple[str, ...]
    layers: PrecisionMap
    may_add_reference: bool = False


def make_plan(request: Request, facts: Sequence[DeviceFacts], corpus: str | None = None, compares: bool = True) -> Plan:
    """Plans all groups of a request, ordered by suite, device and parameters. Raises UsageError for impossible
    requests.

    If `compares` is True, fp32 is added as the reference where only one of the requested precisions is native.
    """
    chosen_devices = choose_devices(request, facts)
    suites = find_suites(request)
    suite_plans = _plan_suites(request, suites, chosen_devices, compares)

    # 1. Plan one group for each suite, device and combination of parameters.
    groups: list[Group] = []
    notes: list[str] = []
    for suite_plan in suite_plans:
        for device in chosen_devices:
            for params in expand_request(suite_plan.workload, request, device, corpus):
                group, note = _plan_case_group(suite_plan, params, device, request.reference is not None)
                groups.append(group)
                notes += [note] if note else []
    # Many groups have the same note.
    notes = list(dict.fromkeys(notes))

    # 2. Note options that have no effect in this plan.
    if request.data is not None and not any(suite_plan.workload.uses_corpus for suite_plan in suite_plans):
        notes.append(f"--data has no effect: suite {request.suite} reads no text")
    modes = list(dict.fromkeys(chain.from_iterable(suite_plan.modes for suite_plan in suite_plans)))
    if request.backend != AUTO and not any(precisions.get(mode).takes_backend for mode in modes):
        names = ", ".join(modes)
        notes.append(
            f"--backend {request.backend} has no effect: only low precisions have a backend, and this run has {names}"
        )

    # 3. Note cases that need much memory, and figures that are missing in a run with several ranks.
    notes += _check_memory(request, suites, chosen_devices)
    for device in chosen_devices:
        notes += _describe_large_cases(groups, device)
    if request.ranks is not None:
        notes.append(
            f"{request.ranks} ranks: each call takes the time of the slowest rank; energy, tapes and ceilings are not "
            "measured"
        )
        if not all(device.accelerated for device in chosen_devices):
            notes.append(
                "ranks on a CPU share its cores and communicate through its memory: this is a functional test; "
                "its times and bandwidths do not predict those of a cluster"
            )

    # 4. Add static scales to cases if they are requested.
    if request.scales is None:
        return Plan(tuple(groups), tuple(notes))
    changed_groups, scale_notes = add_static_scales(groups, request.scales)
    return Plan(changed_groups, (*notes, *scale_notes))


def has_added_reference(plan: Plan) -> bool:
    """Returns whether the plan has the precision ADDED_REFERENCE, which fp8bench may have added. Old versions did not
    add it.
    """
    return any(planned.case.precision == ADDED_REFERENCE for group in plan for planned in group.cases)


def check_request(request: Request) -> tuple[Workload, ...]:
    """Returns the suites of a request. Raises UsageError for unknown names and impossible values. Called before
    anything slow starts.
    """
    suites = find_suites(request)
    if request.memory_limit is not None and not any(suite.batch_axis for suite in suites):
        suites_with_batch = [name for name in workloads.names() if workloads.get(name).batch_axis]
        raise UsageError(
            f"--max-batch: suite {request.suite} has no batch axis. Suites with one: {', '.join(suites_with_batch)}. "
            "In your own suite, set `batch_axis` to the name of the axis."
        )
    suite_plans = _plan_suites(request, suites, _EXAMPLE_DEVICES)
    for suite_plan in suite_plans:
        if (request.ranks or 1) < (min_ranks := suite_plan.workload.least_ranks):
            raise UsageError(f"suite {suite_plan.workload.name} needs {min_ranks} processes. Add --ranks {min_ranks}.")
    _refuse_repeated_names("--dtypes", request.dtypes, ": the reference is already measured twice in every round")
    _refuse_repeated_names("--devices", request.devices)
    for axis, values in request.axes:
        _refuse_repeated_names(f"--set {axis}", values)
    for device_name in request.devices:
        device_kind = device_name.partition(":")[0]
        if reason := _REFUSAL_BY_DEVICE_NAME.get(device_kind):
            raise UsageError(f"device {device_name!r} is not measured: {reason}.")
        devices.find_canonical_name(device_kind)
    # Check the axes on one device only: on another device they have other defaults, but the same names and parsers.
    for suite_plan in suite_plans:
        for params in expand_request(suite_plan.workload, request, _EXAMPLE_DEVICES[0], None):
            get_checked_work(suite_plan.workload, dict(params))
    return suites


def _refuse_repeated_names(option: str, names: Sequence[str], reason: str = "") -> None:
    if repeated_name := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"{option} names {repeated_name} twice. Leave one out{reason}.")


def replace_batch_size(planned: PlannedCase, batch: int, facts: DeviceFacts) -> PlannedCase | None:
    """Returns a case with a different batch size. Returns None if the suite has no batch axis, or if the axis does not
    accept the size.
    """
    case = planned.case
    workload = workloads.get(planned.case.workload)
    with user_errors_as_usage(workload):
        axes = list_checked_axes(workload, facts)
        axis = next((axis for axis in axes if axis.name == workload.batch_axis), None)
        if axis is None:
            return None
        try:
            value = axis.parse(str(batch))
            (params,) = expand_cases(workload, axes, {**dict(case.params), workload.batch_axis: value})
        except (ValueError, UsageError):  # the axis cannot have this batch size, or several cases would have it
            return None
        planned_batch_case = _plan_case(workload, params, facts, case.precision, case.precision_map)
    return replace(planned_batch_case, case=replace(planned_batch_case.case, static=case.static))


def settings_with_batch_search(plan: Plan) -> frozenset[str]:
    """Returns the settings for which the largest batch is searched. If several settings differ only in their batch, it
    is searched only for the first one.
    """
    first_setting_by_case: dict[object, str] = {}
    for group in plan:
        case = group.cases[0].case
        axis = workloads.get(case.workload).batch_axis
        if axis:
            params = tuple(pair for pair in case.params if pair[0] != axis)
            first_setting_by_case.setdefault((case.workload, case.device, params), case.setting)
    return frozenset(first_setting_by_case.values())


def check_batch_limit(limit: int, facts: DeviceFacts) -> None:
    """Raises UsageError if a search for the largest batch within this limit could exhaust the device's memory."""
    if limit == ALL_MEMORY and not facts.accelerated:
        raise UsageError(
            f"--max-batch device would take the memory of other programs on {facts.key}. Give a size, "
            "like --max-batch 2GiB."
        )
    if facts.memory_bytes and limit > facts.memory_bytes:
        raise UsageError(
            f"--max-batch {size(limit)} is more than {facts.key} has ({size(facts.memory_bytes)}). Choose less."
        )


def _check_memory(request: Request, suites: Sequence[Workload], devices_of_request: Sequence[DeviceFacts]) -> list[str]:
    """Returns notes about the search for the largest batch, if it is requested. Raises UsageError if the search could
    exhaust a device's memory.
    """
    limit = request.memory_limit
    if limit is None:
        return []
    for device in devices_of_request:
        check_batch_limit(limit, device)
    limit_text = f"within {size(limit)} of tensors" if limit != ALL_MEMORY else "that fits in the device's memory"
    notes = [f"--max-batch: at the end, the largest batch {limit_text} is searched for"]
    if suites_without_batch := [suite.name for suite in suites if not suite.batch_axis]:
        notes.append(f"--max-batch has no effect on {', '.join(suites_without_batch)}, which have no batch axis")
    return notes


def _describe_large_cases(groups: Sequence[Group], facts: DeviceFacts) -> Iterator[str]:
    """Yields a note for each suite whose largest case takes much of a device's memory."""
    # 1. Collect the cases on this device by suite, unless their memory is unknown (0).
    cases_by_suite: dict[str, list[tuple[float, PlannedCase]]] = {}
    for planned in chain.from_iterable(group.cases for group in groups):
        case = planned.case
        required_bytes = workloads.get(case.workload).memory(dict(case.params), precisions.get(case.precision))
        if required_bytes and case.device == facts.key:
            cases_by_suite.setdefault(case.workload, []).append((required_bytes, planned))
    # 2. In each suite find the largest case that runs, and count the skipped cases that would need too much memory.
    for suite, cases in cases_by_suite.items():
        largest_case_bytes = 0.0
        largest_case_text = "does not fit"
        too_large_case_count = 0
        for required_bytes, planned in cases:
            if planned.runs and required_bytes > largest_case_bytes:
                largest_case_bytes = required_bytes
                largest_case_text = f"({planned.case.mode}) takes about {size(required_bytes)}"
            elif not planned.runs and required_bytes > facts.memory_bytes > 0:
                too_large_case_count += 1
        # 3. Describe the suite only if a case is skipped or takes much memory.
        if too_large_case_count or largest_case_bytes > _LARGE_MEMORY_SHARE * facts.memory_bytes > 0:
            skipped_cases_text = (
                f"; {too_large_case_count} of {len(cases)} cases take more and are skipped"
                if too_large_case_count
                else ""
            )
            capacity_text = f"{facts.key} has {size(facts.memory_bytes)}"
            yield f"{Plan.MEMORY}the largest case of {suite} {largest_case_text}, {capacity_text}{skipped_cases_text}"


def _plan_suites(
    request: Request, suites: Sequence[Workload], facts: Sequence[DeviceFacts], compares: bool = True
) -> list[_SuitePlan]:
    # Each axis in the request must belong to at least one requested suite. Suites that do not have it ignore it.
    axes = list(chain.from_iterable(list_checked_axes(workload, _EXAMPLE_DEVICES[0]) for workload in suites))
    names = {axis.name for axis in axes} | {axis.alias for axis in axes if axis.alias}
    for name, _ in request.axes:
        if name not in names:
            raise UnknownName(f"axis of suite {request.suite}", name, names)
    if request.backend not in (AUTO, *backends.names()):
        raise UnknownName("backend", request.backend, [AUTO, *backends.names()])
    layers = [_find_layers(request, workload, facts) for workload in suites]
    check_map_keys(request.precision_map, list(chain.from_iterable(layers)), f"suite {request.suite}")
    suite_plans = []
    for workload, suite_layers in zip(suites, layers, strict=True):
        with user_errors_as_usage(workload):
            suite_plans.append(_plan_suite(request, workload, suite_layers, compares))
    return suite_plans


def _find_layers(request: Request, workload: Workload, facts: Sequence[DeviceFacts]) -> list[Layer]:
    """Returns the layers of all cases of a suite, or [] if the request has no precision map."""
    if not request.precision_map:
        return []
    keys = [key for key, _ in request.precision_map]
    settings = chain.from_iterable(expand_request(workload, request, device, None) for device in facts)
    return merge_layers(workload, settings, keys)


def _plan_suite(request: Request, workload: Workload, layers: Sequence[Layer], compares: bool) -> _SuitePlan:
    """Chooses the precisions of one suite, with the reference first. They are those of the request, or the defaults of
    the suite if the request has none. With `compares`, a reference may be added.
    """
    default_dtypes = workload.history.dtypes if request.grid and workload.history else workload.dtypes
    names = [find_mode_with_backend(word, request.backend) for word in (request.dtypes or default_dtypes)]
    if request.reference is not None:
        reference = find_mode_with_backend(request.reference, request.backend)
    else:
        # The highest precision has the lowest rank.
        reference = min(names, key=lambda name: precisions.get(name).rank)
    modes = (reference, *(name for name in dict.fromkeys(names) if name != reference))
    has_precision_choice = request.reference is None and len(request.dtypes) > 1 and not request.grid
    may_add_reference = compares and has_precision_choice and workload.fused and ADDED_REFERENCE not in modes
    return _SuitePlan(workload, modes, select_map_entries(request, layers, modes), may_add_reference)


def choose_devices(request: Request, facts: Sequence[DeviceFacts]) -> list[DeviceFacts]:
    return list(dict.fromkeys(find_device(name, facts) for name in request.devices or ("",)))


def find_device(name: str, facts: Sequence[DeviceFacts]) -> DeviceFacts:
    """Returns a device of this machine by its key. 'cuda' means the first CUDA device, and '' means the first GPU or,
    on a machine without GPUs, the CPU.
    """
    if not name:
        return next((fact for fact in facts if fact.accelerated), facts[0])
    facts_by_device_key = {fact.key: fact for fact in facts}
    key = f"{name}:0" if name != "cpu" and ":" not in name else name
    if key not in facts_by_device_key:
        torch_build = facts[0].torch
        reason = f" (torch {torch_build} is built for CPUs only)" if torch_build.endswith("+cpu") else ""
        raise UnknownName("device on this machine", name, facts_by_device_key, ", ".join(facts_by_device_key) + reason)
    return facts_by_device_key[key]


def _plan_case_group(suite_plan: _SuitePlan, params: Params, facts: DeviceFacts, is_named: bool) -> tuple[Group, str]:
    """Plans the cases with the parameters `params`, one for each precision. Also returns a note if a reference was
    added (otherwise ''). A reference that the user named (`is_named`) stays the reference even if it is emulated.
    """
    cases_without_map = [_plan_case(suite_plan.workload, params, facts, name, ()) for name in suite_plan.modes]
    reference = _choose_reference(cases_without_map, is_named)
    native_indices = [index for index, planned in enumerate(cases_without_map) if _is_native(planned)]
    added_reference_cases: list[PlannedCase] = []
    note = ""
    if suite_plan.may_add_reference and len(native_indices) == 1:
        added_reference_case = _plan_case(suite_plan.workload, params, facts, ADDED_REFERENCE, ())
        if _is_native(added_reference_case):
            added_reference_cases = [added_reference_case]
            reference = native_indices[0]
            name = suite_plan.modes[reference]
            reason = f"on {facts.key} {name} would have had nothing native to compare with"
            note = f"{ADDED_REFERENCE} was added as the reference: {reason} (--reference {name} leaves it out)"
    # The reference has no precision map. If a reference was added, the only native case has none either.
    cases = [
        planned if index == reference else _apply_precision_map(suite_plan, planned, facts)
        for index, planned in enumerate(cases_without_map)
    ]
    return Group((*added_reference_cases, *cases), 0 if added_reference_cases else reference), note


def _is_native(planned: PlannedCase) -> bool:
    return planned.runs and planned.support.is_native


def _apply_precision_map(suite_plan: _SuitePlan, planned: PlannedCase, facts: DeviceFacts) -> PlannedCase:
    case = planned.case
    return (
        _plan_case(suite_plan.workload, case.params, facts, case.precision, suite_plan.layers)
        if suite_plan.layers
        else planned
    )


def _plan_case(workload: Workload, params: Params, facts: DeviceFacts, name: str, layers: PrecisionMap) -> PlannedCase:
    case = Case(workload.name, params, name, facts.key, layers, workload.version, ranks=facts.ranks)
    values = dict(params)
    precision = precisions.get(name)
    # 1. Find the lowest support level among the case's precision and its layers.
    case_and_layer_supports = [
        get_checked_support(workload, values, precision, facts),
        *iterate_layer_supports(workload, values, facts, layers, name),
    ]
    support = max(case_and_layer_supports, key=lambda support: _SUPPORT_LEVEL_ORDER.index(support.level))
    support = replace(support, backend=describe_backend(name, support.level, facts))
    if facts.unusable:
        support = Support(Level.REFUSED, facts.unusable)
    # 2. Skip cases that the device refuses, that do not fit into its memory, or whose cache state cannot be set up.
    work = get_checked_work(workload, values)
    expected_memory_bytes = get_checked_memory(workload, values, precision)
    cache = CACHE.of(values)
    skip_reason = ""
    if support.level is Level.REFUSED:
        skip_reason = support.reason
    elif facts.memory_bytes and max(work.least_memory, expected_memory_bytes) > facts.memory_bytes:
        memory_need_text = f"take about {size(expected_memory_bytes)}"
        if work.least_memory > facts.memory_bytes:
            memory_need_text = f"need at least {size(work.least_memory)}"
        skip_reason = (
            f"its tensors {memory_need_text} and {facts.key} has {size(facts.memory_bytes)}: choose smaller sizes"
        )
    elif cache != HOT and not facts.cache_bytes:
        skip_reason = f"cache={cache}: the size of the last-level cache of {facts.key} is unknown; choose cache={HOT}"
    return PlannedCase(case, support, work, skip_reason)


def _choose_reference(cases: Sequence[PlannedCase], is_named: bool) -> int:
    """Returns the index of the reference. The first case is the reference if it runs and is native, or if it runs and
    the user named it (`is_named`).

    Otherwise the reference is the native case with the highest precision, because an emulated reference has no
    meaningful speed. If no case is native, it is the case with the highest precision. Only cases that run count.
    """
    if cases[0].runs and (is_named or cases[0].support.is_native):
        return 0
    runnable_case_indices = [index for index, planned in enumerate(cases) if planned.runs]
    native_indices = [index for index in runnable_case_indices if cases[index].support.is_native]
    precision_rank_by_index = {
        index: precisions.get(cases[index].case.precision).rank for index in native_indices or runnable_case_indices
    }
    return min(precision_rank_by_index, key=precision_rank_by_index.__getitem__, default=0)
