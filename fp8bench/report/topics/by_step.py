"""A sampler step by step, its first steps too: what each takes, and how far its latent is from the exact one."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from fp8bench import units
from fp8bench.model import Timing
from fp8bench.model.words import Phase
from fp8bench.report.case_status import emulated
from fp8bench.report.columns import Col, case_cols, table
from fp8bench.report.elements import ChartAxis, ChartPoint, Element, Items, Scatter, Table, Text
from fp8bench.report.page.section import Material, section
from fp8bench.report.panels import Panel, Result, ResultGroup, value_of
from fp8bench.report.topics.tensors import timed_panels

_KINDS = {
    "single": ("one step", "of one step, from the exact latent before it"),
    "single_floor": ("its floor", "the carrier's own products by another kernel: no precision is told from it"),
    "free": ("sampled", "sampled freely from the noise: errors of all steps before are in it"),
    "free_floor": ("its floor", "the same floor, sampled freely"),
}  # fmt: skip
_ERROR = re.compile(rf"({'|'.join(_KINDS)})_step(\d+)_error")
READING = (
    "Errors of the latent are relative to the exact one. An error near its floor says nothing of a precision: other "
    "kernels of its carrier make as much. What one step costs is the precision's; what sampling makes of it is the "
    "trajectory's."
)


class SamplerStep(NamedTuple):
    """`seconds` is None where marks of a step do not tell its sampler's steps apart."""

    group: ResultGroup
    result: Result
    number: int
    seconds: float | None
    errors: Mapping[str, float]


def is_of_step(metric: str) -> bool:
    return _ERROR.fullmatch(metric) is not None


def step_seconds(timing: Timing) -> tuple[float, ...]:
    """The median over all calls of each part of a step that ends in ACCUMULATE (`Workload.part_ends`)."""
    calls = [call for slot in timing.slots for call in slot.calls_ns]
    blocks, phases = timing.segments.blocks, timing.segments.phases
    ends = [block for block, phase in zip(blocks, phases, strict=True) if phase == Phase.ACCUMULATE]
    if not calls or not ends or timing.varying:
        return ()
    parts = [min(bisect_left(ends, block), len(ends) - 1) for block in blocks]
    sums = [[0] * len(ends) for _ in calls]
    for call, own in zip(calls, sums, strict=True):
        for part, cell in zip(parts, call, strict=True):
            own[part] += cell
    return tuple(statistics.median(taken) / 1e9 for taken in zip(*sums, strict=True))


def _of_case(group: ResultGroup, result: Result) -> Iterator[SamplerStep]:
    errors: dict[int, dict[str, float]] = {}
    for measurement in result.record.measurements:
        known, value = _ERROR.fullmatch(measurement.metric), value_of(measurement)
        if known and value is not None:
            errors.setdefault(int(known[2]), {})[known[1]] = value
    seconds = step_seconds(result.record.timing) if errors and result.record.timing else ()
    for number, own in sorted(errors.items()):
        yield SamplerStep(group, result, number, seconds[number - 1] if len(seconds) == len(errors) else None, own)


def by_step(panel: Panel) -> Iterator[Element]:
    """A row for each step of each case; nothing where there is no sampler."""
    if cases := [steps for group, result in panel.members if (steps := list(_of_case(group, result)))]:
        yield _table(panel, [step for steps in cases for step in steps])
        yield Items(
            tuple(Text(_ending(steps)) for steps in cases if all({*step.errors} == {*_KINDS} for step in steps))
        )
        yield Text(READING)


def _ending(steps: Sequence[SamplerStep]) -> str:
    """Which step costs most, and what it comes to beside the floor."""
    worst, last = max(steps, key=lambda step: step.errors["single"]), steps[-1].errors
    name = f"{worst.group.place} {worst.result.mode}".strip()
    beside = f", {last['free'] / last['free_floor']:.2g} times its floor" if last["free_floor"] else ""
    return (
        f"{name}: of one step {units.relative_error(worst.errors['single'])} at most, in step {worst.number}; sampled "
        f"{units.relative_error(last['free'])} at the end{beside}"
    )


def _table(panel: Panel, rows: Sequence[SamplerStep]) -> Table:
    cols: list[Col[SamplerStep]] = [
        *case_cols(),
        Col("step", lambda row: row.number, number=True, show=units.whole),
        # For an emulation with the word that keeps it from being read as a speed.
        Col("time", lambda row: f"{'emulated ' * emulated(row.result)}{units.seconds(row.seconds)}", number=True),
        *(Col(heading, partial(_error, name=name), number=True, show=units.relative_error, hint=hint)
          for name, (heading, hint) in _KINDS.items()),
    ]  # fmt: skip
    return table(f"by-step-of-{panel.case.workload}", "step by step of the sampler", cols, rows)


def _error(row: SamplerStep, name: str) -> float | None:
    return row.errors.get(name)


@section("by-step", "Step by step of a sampler", 101)
def by_step_section(material: Material) -> Iterator[Element]:
    for number, (title, panel) in enumerate(timed_panels(material)):
        if steps := list(by_step(panel)):
            yield from (_chart(f"by-step-{number}-{place}", title, group) for place, group in enumerate(panel.groups))
            yield from steps


def _chart(name: str, title: str, group: ResultGroup) -> Scatter:
    """A line for each case, sampled and of one step; those whose floors are the same share its line."""
    lines: dict[tuple[float, ...], str] = {}
    for result in group.results:
        steps = list(_of_case(group, result))
        for kind, words in (("free", "sampled"), ("single", "one step"), ("free_floor", "floor of sampled")):
            values = tuple(step.errors[kind] for step in steps if kind in step.errors)
            lines.setdefault(values, f"{result.mode} {words}")
    points = tuple(
        ChartPoint(label, str(number), number, value)
        for values, label in lines.items() for number, value in enumerate(values, 1) if value > 0
    )  # fmt: skip
    where = f"{title}{', ' * bool(group.place)}{group.place}"
    description = "Error of the latent after each step; exact ones have no place on a logarithmic axis."
    axes = ChartAxis("step of the sampler"), ChartAxis("relative error of the latent", units.RATIO, log=True)
    return Scatter(name, f"{where}: error by step", description, *axes, points, joined=tuple(lines.values()))
