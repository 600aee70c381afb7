"""Describes which precisions this machine supports natively, emulated or not at all, and why. Also describes the
overhead of measuring here.

The functions yield lines, which the command line prints.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fp8bench import __version__
from fp8bench.errors import UsageError, WorkerError, WorkerHung
from fp8bench.jobs.device_units import describe_units
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, ProcessWorker, Worker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.measure.sensors.device_state import describe_driver, format_device_lines
from fp8bench.measure.sensors.meter import open_meter
from fp8bench.model import DeviceFacts, Level, Request, Scalar
from fp8bench.model.raw import Settings
from fp8bench.model.run import CEILINGS, SWITCHES_SET
from fp8bench.plan.asked_suites import find_suites, known_suites
from fp8bench.plan.checked_workload import list_checked_axes, merge_layers
from fp8bench.plan.make import make_plan
from fp8bench.plan.resolve import read_switches
from fp8bench.protocols import Precision, Workload
from fp8bench.registry import AUTO, backends, devices, precisions, workloads
from fp8bench.store.series import check_history_grid
from fp8bench.units import seconds, size

# The most seconds to wait for a compilation. Without torch's cache it takes half a minute, but `fp8bench doctor`
# should answer sooner.
_COMPILE_LIMIT_SECONDS = 4.0


def examine(calibrate: bool) -> Iterator[str]:
    """Yields the lines of `fp8bench doctor`. With `calibrate`, waits longer for quantisers to compile, and describes
    the overhead of measuring, such as the time of a phase marker.
    """
    with ThreadPoolExecutor() as threads, ProcessWorker(Settings()) as worker:
        facts = worker.probe()
        # Finding the energy sources of a device takes up to 3 s. This happens while the worker imports backends.
        device_meters = threads.map(open_meter, facts)  # in the order of `facts`
        environment = gather(worker.software(), __version__, threads=1)
        yield f"fp8bench {__version__}, Python {environment.get('python')}, torch {environment.get('torch')}"
        yield f"machine   {environment.get('machine')}, {environment.get('system')}"
        yield from _describe_processor(environment.facts)
        yield f"switches  {environment.get(SWITCHES_SET) or 'all as torch and the system set them'}"
        for device in facts:
            yield ""
            yield from _describe_device(device)
            yield from (f"  backend {line}" for line in describe_backends(worker, device))
            with next(device_meters) as meter:
                yield from (f"  {line}" for line in format_device_lines(meter))
        if not any(device.accelerated for device in facts):
            yield ""
            yield f"GPU       none: torch {environment.get('torch')} sees no CUDA device; {describe_driver()}"
        yield f"compiler  {describe_compiler(worker, facts, COMPILE_SECONDS if calibrate else _COMPILE_LIMIT_SECONDS)}"
        if calibrate:
            yield ""
            for device in (device for device in facts if not device.unusable):
                yield from _describe_overheads(worker, device)


def _describe_processor(facts: Mapping[str, Scalar | None]) -> Iterator[str]:
    one_minute_load = facts["load_1min"]
    count = facts["cpu_count"]
    is_processor_busy = isinstance(one_minute_load, float) and isinstance(count, int) and one_minute_load > 0.7 * count
    yield f"cores     {count}, load {one_minute_load}" + (": busy, expect wider intervals" if is_processor_busy else "")
    cpu_governor = facts["cpu_governor"]
    yield (
        f"clocks    governor {cpu_governor}" if cpu_governor else "clocks    governor not readable (a virtual machine?)"
    )
    processor_quota = facts["cgroup_cpu_max"]
    if processor_quota and not str(processor_quota).startswith("max"):
        yield f"quota     cgroup cpu.max is {processor_quota}: slots may be cut short"


def _describe_device(facts: DeviceFacts) -> Iterator[str]:
    # 1. Name the device and its units. A device that cannot be used gets the reason in place of units and precisions.
    device_details = [size(facts.memory_bytes)]
    if facts.capability is not None:
        device_details.append(f"compute capability {facts.capability[0]}.{facts.capability[1]}")
    if facts.cuda or facts.hip:
        device_details.append(f"CUDA {facts.cuda}" if facts.cuda else f"HIP {facts.hip}")
    yield f"{facts.key}: {facts.name} ({', '.join(device_details)})"
    if facts.unusable:
        yield f"  nothing runs on it: {facts.unusable}"
        return
    yield f"  units     {describe_units(facts)}"
    # 2. Give each native precision a line with its reason. The other precisions share a line for each level.
    support_by_precision = {precision.name: precision.support(facts) for precision in list_precisions_by_rank()}
    precision_name_width = max(map(len, support_by_precision))
    for name, support in support_by_precision.items():
        if support.is_native:
            yield f"  {name:<{precision_name_width}} {support.level.value:<9} {support.reason}"
    for level in (Level.EMULATED, Level.REFUSED):
        reasons = {name: support.reason for name, support in support_by_precision.items() if support.level is level}
        if level is Level.EMULATED:
            explanation = "values rounded, products in fp32"
        else:
            explanation = "; ".join(sorted(set(reasons.values())))
        if reasons:
            yield f"  {level.value:<{precision_name_width}} {', '.join(reasons)}: {explanation}"


def describe_backends(worker: Worker, facts: DeviceFacts) -> Iterator[str]:
    """Yields a line for each backend: its version and the precisions that it supports on the device, or why it
    supports none.
    """
    for name in backends.names():
        backend = backends.get(name)
        version = facts.version_of(backend.package)
        # `missing` and `backend` return why the backend cannot be used, or ''. `backend` also imports it.
        reason = backend.missing(version) or worker.with_time_limit(START_SECONDS).backend(name)
        if reason:
            yield f"{name:<9} {reason}"
            continue
        support_by_precision = {
            precision.name: precision.by(backend).support(facts)
            for precision in list_precisions_by_rank()
            if precision.takes_backend
        }
        usable_precisions = [
            precision for precision, support in support_by_precision.items() if support.level is not Level.REFUSED
        ]
        text = ", ".join(usable_precisions) or f"nothing here: {next(iter(support_by_precision.values())).reason}"
        yield f"{name:<9} {backend.package} {version}: {text}"


def list_precisions_by_rank() -> list[Precision]:
    return sorted(map(precisions.get, precisions.names()), key=lambda precision: precision.rank)


def describe_compiler(worker: Worker, facts: Sequence[DeviceFacts], limit: float) -> str:
    """Returns a text that says for each device whether quantisers (emulated casts) compile on it. A device whose
    worker does not answer within `limit` seconds counts as too slow. Quantisers that do not compile run eagerly, and
    slowly.
    """
    if eager_reason := read_switches(os.environ).why_eager:
        return f"not tried: {eager_reason}"
    compiled_device_texts = []
    for device in (device for device in facts if not device.unusable):
        try:
            compiled_device_texts.append(f"{device.key}: {worker.with_time_limit(limit).compiler(device)}")
        except WorkerHung:
            advice = "The first run compiles them, or fp8bench doctor --calibrate does it now"
            compiled_device_texts.append(
                f"{device.key}: kernels are probably not compiled yet (no answer in {limit:g} s). {advice}"
            )
        except WorkerError as error:
            compiled_device_texts.append(f"{device.key}: compiling ended the worker: {error}")
    return "; ".join(compiled_device_texts)


def _describe_overheads(worker: Worker, facts: DeviceFacts) -> Iterator[str]:
    measuring_overheads = worker.with_time_limit(START_SECONDS).overheads(facts)
    yield f"overhead of measuring on {facts.key} (best of many)"
    yield f"  phase marker on    {seconds(measuring_overheads.marker_on)}   (goal 600 ns on a CPU)"
    yield f"  phase marker off   {seconds(measuring_overheads.marker_off)}   (goal 200 ns)"
    yield f"  one clock stamp    {seconds(measuring_overheads.stamp)}"
    if measuring_overheads.event_pair is not None:
        yield f"  event pair, device {seconds(measuring_overheads.event_pair)}"


def describe_subject(subject: str, imports: tuple[str, ...], name: str | None = None) -> Iterator[str]:
    """Yields the lines of `fp8bench list SUBJECT`, with the support and the axes that this machine has."""
    # 1. Describe subjects that do not depend on the machine. No worker is needed for them.
    if subject == "suites":
        for suite in known_suites():
            yield f"{suite:<14} {_describe_suite(suite)}"
        return
    if subject == CEILINGS:
        yield f"{subject}: {_describe_suite(subject)}. It has no axes, only `--devices` and `--threads`"
        return
    # 2. Describe the subject for the devices that a worker finds.
    with ProcessWorker(Settings(imports=imports)) as worker:
        facts = worker.probe()
    if subject == "devices":
        for device in facts:
            yield f"{device.key:<8} {device.name}, {size(device.memory_bytes)}"
        present_device_kinds = {device.kind for device in facts}
        for device_kind in devices.names():
            if device_kind not in present_device_kinds:
                yield f"{device_kind:<8} none on this machine"
    elif subject == "backends":
        for backend in backends.names():
            yield f"{backend:<8} {backends.get(backend).summary}"
        yield "precisions of each backend on this machine: fp8bench doctor"
    elif subject == "precisions":
        yield from _list_precisions(facts) if name is None else _describe_precision(precisions.get(name), facts)
    else:
        device = next((device for device in facts if device.accelerated), facts[0])
        for workload in find_suites(Request(subject)):
            yield from _describe_axes(workload, device)


def _describe_suite(name: str) -> str:
    if name == CEILINGS:
        return "peak rates of a device: products, bytes and launches a second, in several runs"
    workload = workloads.get(name)
    needs_ranks = f" (takes --ranks {workload.least_ranks} or more)" if workload.least_ranks > 1 else ""
    return f"{workload.summary}{needs_ranks}"


def _describe_axes(workload: Workload, facts: DeviceFacts) -> Iterator[str]:
    yield f"{workload.name}: {workload.summary}"
    yield f"axes, with their default values on {facts.key} (--set AXIS=A,B):"
    for axis in list_checked_axes(workload, facts):
        yield f"  {axis.name:<14} {','.join(axis.default):<44} {axis.description}"
    # A case's layers depend on its parameters, so list the layers of the default cases. The cases of a group have the
    # same parameters.
    plan = make_plan(Request(workload.name, devices=(facts.key,)), (facts,))
    first_cases = [group.cases[0].case for group in plan]
    layers = merge_layers(workload, [case.params for case in first_cases])
    if layers:
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        products = [layer.name for layer in layers if layer.product]
        names = " to ".join(dict.fromkeys((products[0], products[-1]))) if products else ""
        # In a map, the beginning of a name does not match layers without a product.
        by_name = f"by name {names}, or a prefix of names" if products else "by full name"
        yield f"layers for --precision-map: by kind {kinds}; {by_name}"
    grid = workload.history
    if grid is None:
        return
    try:
        check_history_grid(workload)
    except UsageError as error:
        yield str(error)
        return
    grid_axes = grid.gpu if facts.accelerated else grid.cpu
    axes_text = " ".join(f"{axis}={','.join(values)}" for axis, values in grid_axes.items())
    yield f"the history keeps {axes_text} in {', '.join(grid.dtypes)} (--grid measures only these)"


_MAX_LINE_LENGTH = 78


def _list_precisions(facts: tuple[DeviceFacts, ...]) -> Iterator[str]:
    """Yields for each precision a line that shows how each device supports it, and the wrapped lines of its summary."""
    for precision in list_precisions_by_rank():
        support_levels_text = ", ".join(f"{precision.support(device).level.value} on {device.key}" for device in facts)
        aliases = _format_precision_aliases(precision.name)
        yield f"{precision.name:<12} {support_levels_text}{f'  (also {aliases})' if aliases else ''}"
        yield from textwrap.wrap(precision.summary, _MAX_LINE_LENGTH, initial_indent="  ", subsequent_indent="  ")
    yield "definition and options of a precision: fp8bench list precisions NAME"


def _describe_precision(precision: Precision, facts: tuple[DeviceFacts, ...]) -> Iterator[str]:
    aliases = _format_precision_aliases(precision.name)
    yield f"{precision.name}{f' (also {aliases})' if aliases else ''}: {precision.summary}"
    for device in facts:
        support = precision.support(device)
        support_note = "" if support.is_native and not support.reason else f": {support.reason}"
        yield f"    on {device.key} {support.level.value}{support_note}"
    option_by_text = {f"{option.name}={option.default}": option for option in precision.options}
    width = max(map(len, option_by_text), default=0)
    for option_text, option in option_by_text.items():
        option_alias_note = f" (also {', '.join(option.aliases)})" if option.aliases else ""
        yield f"    :{option_text:<{width}}  {option.description}{option_alias_note}"
    if precision.takes_backend:
        yield f"    :backend={AUTO}  library that computes products: {', '.join((AUTO, *backends.names()))}"
    if precision.options:
        yield "options follow a precision's name, any number of them: fp8-delayed:history=16:margin=1"


def _format_precision_aliases(name: str) -> str:
    return ", ".join(alias for alias, canonical in precisions.aliases().items() if canonical == name)
