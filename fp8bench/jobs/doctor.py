"""Describes what this machine can do natively, emulated or not at all, and why; and the overhead of the harness here.

Yields lines; the command line prints them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fp8bench import __version__
from fp8bench.errors import UsageError, WorkerError, WorkerHung
from fp8bench.jobs.device_units import describe_units
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import START_SECONDS, ProcessWorker, Worker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.measure.sensors.device_state import device_lines, driver_state
from fp8bench.measure.sensors.meter import meter_for
from fp8bench.model import DeviceFacts, Level, Request, Scalar
from fp8bench.model.raw import Settings
from fp8bench.model.run import CEILINGS, SWITCHES_SET
from fp8bench.plan.asked_suites import known_suites, suites_of
from fp8bench.plan.checked_workload import axes_of, layers_of_all
from fp8bench.plan.make import make_plan
from fp8bench.plan.resolve import switches_of
from fp8bench.protocols import Precision
from fp8bench.registry import AUTO, backends, devices, precisions, workloads
from fp8bench.report.words.naming import shorten_line
from fp8bench.store.series import check_grid
from fp8bench.units import seconds, size

# Compiling takes half a minute without torch's cache; a doctor's answer should not.
_COMPILER_SECONDS = 4.0


def examine(calibrate: bool) -> Iterator[str]:
    with ThreadPoolExecutor() as threads, ProcessWorker(Settings()) as worker:
        facts = worker.probe()
        # Trying a device's sources of energy takes up to 3 s, while the worker imports backends.
        meters = threads.map(meter_for, facts)
        environment = gather(worker.software(), __version__, 1)
        yield f"fp8bench {__version__}, Python {environment.get('python')}, torch {environment.get('torch')}"
        yield f"machine   {environment.get('machine')}, {environment.get('system')}"
        yield from _processor(environment.facts)
        yield f"switches  {environment.get(SWITCHES_SET) or 'all as torch and the system set them'}"
        for fact in facts:
            yield ""
            yield from _device(fact)
            yield from (f"  backend {line}" for line in backend_lines(worker, fact))
            with next(meters) as meter:
                yield from (f"  {line}" for line in device_lines(meter))
        if not any(fact.accelerated for fact in facts):
            yield ""
            yield f"GPU       none: torch {environment.get('torch')} sees no CUDA device; {driver_state()}"
        yield f"compiler  {compiler_state(worker, facts, COMPILE_SECONDS if calibrate else _COMPILER_SECONDS)}"
        if calibrate:
            yield ""
            for fact in (fact for fact in facts if not fact.unusable):
                yield from _overheads(worker, fact)


def _processor(facts: Mapping[str, Scalar | None]) -> Iterator[str]:
    load, count = facts["load_1min"], facts["cpu_count"]
    busy = isinstance(load, float) and isinstance(count, int) and load > 0.7 * count
    yield f"cores     {count}, load {load}" + (": busy, expect wider intervals" if busy else "")
    governor = facts["cpu_governor"]
    yield f"clocks    governor {governor}" if governor else "clocks    governor not readable (a virtual machine?)"
    quota = facts["cgroup_cpu_max"]
    if quota and not str(quota).startswith("max"):
        yield f"quota     cgroup cpu.max is {quota}: slots may be cut short"


def _device(facts: DeviceFacts) -> Iterator[str]:
    details = [size(facts.memory_bytes)]
    if facts.capability is not None:
        details.append(f"compute capability {facts.capability[0]}.{facts.capability[1]}")
    if facts.cuda or facts.hip:
        details.append(f"CUDA {facts.cuda}" if facts.cuda else f"HIP {facts.hip}")
    yield f"{facts.key}: {facts.name} ({', '.join(details)})"
    if facts.unusable:
        yield f"  nothing runs on it: {facts.unusable}"
        return
    yield f"  units     {describe_units(facts)}"
    supports = {name: precisions.get(name).support(facts) for name in by_rank()}
    longest = max(map(len, supports))
    for name, support in supports.items():
        if support.is_native:
            yield f"  {name:<{longest}} {support.level.value:<9} {support.reason}"
    for level, words in ((Level.EMULATED, "values rounded, products in fp32"), (Level.REFUSED, "")):
        names = [name for name, support in supports.items() if support.level is level]
        reasons = {supports[name].reason for name in names}
        explanation = words or "; ".join(sorted(reasons))
        if names:
            yield f"  {level.value:<{longest}} {', '.join(names)}: {explanation}"


def backend_lines(worker: Worker, facts: DeviceFacts) -> Iterator[str]:
    """Yields a line for each backend: its version and what it multiplies on the device, or why it cannot."""
    for name in backends.names():
        backend = backends.get(name)
        version = facts.version_of(backend.package)
        reason = backend.missing(version) or worker.within(START_SECONDS).backend(name)
        if reason:
            yield f"{name:<9} {reason}"
            continue
        by_backend = {
            name: precisions.get(name).by(backend) for name in by_rank() if precisions.get(name).takes_backend
        }
        supports = {text: precision.support(facts) for text, precision in by_backend.items()}
        takes = [text for text, support in supports.items() if support.level is not Level.REFUSED]
        refusals = [support.reason for text, support in supports.items() if text not in takes]
        yield f"{name:<9} {backend.package} {version}: {', '.join(takes) if takes else f'nothing here: {refusals[0]}'}"


def by_rank() -> list[str]:
    return sorted(precisions.names(), key=lambda name: precisions.get(name).rank)


def compiler_state(worker: Worker, facts: Sequence[DeviceFacts], limit: float) -> str:
    """Returns whether quantisers compile on each device, as far as that is known within `limit` seconds; uncompiled
    ones run eagerly, and slowly."""
    if why_eager := switches_of(os.environ).why_eager:
        return f"not tried: {why_eager}"
    states = []
    for fact in (fact for fact in facts if not fact.unusable):
        try:
            states.append(f"{fact.key}: {worker.within(limit).compiler(fact)}")
        except WorkerHung:
            waits = "the first run waits for it, as doctor --calibrate does"
            states.append(f"{fact.key}: takes more than {limit:g} s, as when torch's cache has no kernel yet; {waits}")
        except WorkerError as error:
            states.append(f"{fact.key}: compiling ended the worker: {error}")
    return "; ".join(states)


def _overheads(worker: Worker, facts: DeviceFacts) -> Iterator[str]:
    cost = worker.within(START_SECONDS).overheads(facts)
    yield f"what looking costs on {facts.key} (best of many)"
    yield f"  phase marker on    {seconds(cost.marker_on)}   (goal 600 ns on a CPU)"
    yield f"  phase marker off   {seconds(cost.marker_off)}   (goal 200 ns)"
    yield f"  one clock stamp    {seconds(cost.stamp)}"
    if cost.event_pair is not None:
        yield f"  event pair, device {seconds(cost.event_pair)}"


def listing(subject: str, imports: tuple[str, ...], name: str | None = None) -> Iterator[str]:
    """Yields the lines of `list SUBJECT`, with the support and axes of this machine."""
    if subject == "suites":
        yield from (f"{name:<14} {_summary(name)}" for name in known_suites())
        return
    if subject == CEILINGS:
        yield f"{subject}: {_summary(subject)}. It has no axes; `--devices` and `--threads` say of what"
        return
    with ProcessWorker(Settings(imports=imports)) as worker:
        facts = worker.probe()
    if subject == "devices":
        for fact in facts:
            yield f"{fact.key:<8} {fact.name}, {size(fact.memory_bytes)}"
        present = {fact.kind for fact in facts}
        missing = [kind for kind in devices.names() if kind not in present]
        yield from (f"{kind:<8} none on this machine" for kind in missing)
    elif subject == "backends":
        yield from (f"{name:<8} {backends.get(name).summary}" for name in backends.names())
        yield "what each takes on this machine: fp8bench doctor"
    elif subject == "dtypes":
        yield from _dtypes(facts) if name is None else _dtype(precisions.get(name), facts)
    else:
        chosen = next((fact for fact in facts if fact.accelerated), facts[0])
        for suite in suites_of(Request(subject)):
            yield from _axes(suite.name, chosen)


def _summary(name: str) -> str:
    if name == CEILINGS:
        return "what a device does at most: products, bytes and launches a second, in several runs"
    least = workloads.get(name).least_ranks
    return workloads.get(name).summary + (f" (takes --ranks {least} or more)" if least > 1 else "")


def _axes(name: str, facts: DeviceFacts) -> Iterator[str]:
    yield f"{name}: {workloads.get(name).summary}"
    yield f"axes, with the values {facts.key} takes by default (--set AXIS=A,B):"
    for axis in axes_of(workloads.get(name), facts):
        yield f"  {axis.name:<14} {','.join(axis.default):<44} {axis.description}"
    plan = make_plan(Request(name, devices=(facts.key,)), (facts,))
    layers = layers_of_all(workloads.get(name), [group.cases[0].case.params for group in plan])
    if layers:
        kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
        products = [layer.name for layer in layers if layer.product]
        names = f"{products[0]} to {products[-1]}" if len(products) > 1 else products[0]
        yield f"layers for --precision-map: by kind {kinds}; by name {names}, or a prefix of names"
    grid = workloads.get(name).history
    if grid is None:
        return
    try:
        check_grid(workloads.get(name))
    except UsageError as error:
        yield str(error)
        return
    axes = grid.gpu if facts.accelerated else grid.cpu
    values = " ".join(f"{axis}={','.join(values)}" for axis, values in axes.items())
    yield f"the history keeps {values} in {', '.join(grid.dtypes)} (--grid measures just these)"


# A longer line leaves no room for a summary.
_ROOM = 58


def _dtypes(facts: tuple[DeviceFacts, ...]) -> Iterator[str]:
    """Yields a line for each dtype with its level on each device, short enough for any terminal."""
    for name in by_rank():
        precision = precisions.get(name)
        levels = ", ".join(f"{precision.support(fact).level} on {fact.key}" for fact in facts)
        also = f"  (also {', '.join(_aliases(name))})" if _aliases(name) else ""
        line = f"{name:<12} {levels}{also}"
        yield f"{line}  {shorten_line(precision.summary, 78 - len(line))}" if len(line) < _ROOM else line
    yield "what one is made of, and its options: fp8bench list dtypes NAME"


def _dtype(precision: Precision, facts: tuple[DeviceFacts, ...]) -> Iterator[str]:
    aliases = _aliases(precision.name)
    also = f" (also {', '.join(aliases)})" if aliases else ""
    yield f"{precision.name}{also}: {precision.summary}"
    for fact in facts:
        support = precision.support(fact)
        note = "" if support.is_native and not support.reason else f": {support.reason}"
        yield f"    on {fact.key} {support.level.value}{note}"
    words = [f"{option.name}={option.default}" for option in precision.options]
    for word, option in zip(words, precision.options, strict=True):
        also = f" (also {', '.join(option.aliases)})" if option.aliases else ""
        yield f"    :{word:<{max(map(len, words))}}  {option.description}{also}"
    if precision.takes_backend:
        yield f"    :backend={AUTO}  who multiplies: {', '.join((AUTO, *backends.names()))}"
    if precision.options:
        yield "options stand behind a precision's name, any number of them: fp8-delayed:history=16:margin=1"


def _aliases(name: str) -> list[str]:
    return [alias for alias, canonical in precisions.aliases().items() if canonical == name]
