"""What is said of the largest batches that fit: one place for the terminal, the report and the tidy rows."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.metric import capacity_ratio
from fp8bench.model import Capacity
from fp8bench.report.case_status import emulated
from fp8bench.report.panels import Panel, Result, ResultGroup, show_params
from fp8bench.report.words.naming import listed

EMULATED = "emulated"


def searched(panel: Panel) -> Iterator[tuple[ResultGroup, Result, Capacity]]:
    """The cases whose largest batch was looked for, one group of those that differ in batch alone."""
    for group, result in panel.members:
        if result.record.capacity is not None:
            yield group, result, result.record.capacity


def title(found: Capacity) -> str:
    """'largest batch that fits into 2.00 GiB'; the axis where it is called otherwise."""
    axis = "" if found.axis == "batch" else f" ({found.axis})"
    return f"largest batch{axis} that fits into {room(found)}"


def room(found: Capacity) -> str:
    return "the device's memory" if found.limit is None else units.size(found.limit)


def place_of(panel: Panel, group: ResultGroup, found: Capacity) -> str:
    """What tells a group from the others, its own batch aside."""
    return show_params(pair for pair in group.case.params if pair not in panel.shared and pair[0] != found.axis)


def show_batch(found: Capacity) -> str:
    """'376', 'none' where not even the smallest fits, '-' where the search came to no answer."""
    if found.batch is None:
        return units.NONE
    return str(found.batch) if found.batch else "none"


def share_within(group: ResultGroup, result: Result) -> float | None:
    """How many times the reference's batch a case fits; None where that says nothing."""
    return capacity_ratio(result.record, group.lead.record if group.lead is not None else None)


def sentences(panel: Panel) -> Iterator[str]:
    """'bf16 fits 1.61x of fp32's batch into 1.00 GiB.'; and of emulated cases why they say nothing."""
    several = len({group.case.setting for group, _, _ in searched(panel)}) > 1
    for group, result, found in searched(panel):
        share = share_within(group, result)
        if share is not None:
            place = place_of(panel, group, found) if several else ""
            where = f" at {place}" if place else ""
            word = "batch" if found.axis == "batch" else found.axis
            yield f"{result.mode} fits {units.speed_up(share)} of {group.reference}'s {word} into {room(found)}{where}."
    wide = dict.fromkeys(result.mode for _, result, _ in searched(panel) if emulated(result))
    if wide:
        verb = "is" if len(wide) == 1 else "are"
        yield (
            f"{listed(list(wide))} {verb} emulated, with values of a small format kept in wider ones: what fits here "
            "says nothing about a device that has the format."
        )
