"""The names of runs, suites, cases, phases and figures in reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Case, DeviceFacts, Phase, Record, Run, Scalar, Status
from fp8bench.model.specs import METRICS
from fp8bench.protocols.axes import CACHE, COLD, HOT
from fp8bench.registry import workloads
from fp8bench.report.elements import Tone
from fp8bench.report.panels import ResultGroup, describe_params

COMMIT_LETTERS = 8
# Values for "off" or "torch decides", and the parameter that names the texts.
_OFF = frozenset({"no", "auto", "none"})
_TEXTS = "data"
# 'Intel(R) Xeon(R) CPU @ 2.20GHz' is an Intel Xeon.
_TRADEMARKS = re.compile(r"\((?:R|TM|C)\)| (?:CPU|Processor)\b| @ .*")


def suites_of(run: Run) -> tuple[str, ...]:
    return tuple(dict.fromkeys(case.workload for case in _cases(run)))


def devices_of(run: Run) -> tuple[str, ...]:
    """Returns the names of its devices, as 'AMD EPYC'; the key if the facts are lost."""
    names = {facts.key: describe_devices([facts]) for facts in run.devices}
    return tuple(dict.fromkeys(names.get(case.device, case.device) for case in _cases(run)))


def _cases(run: Run) -> list[Case]:
    cases = [record.case for record in run.records]
    for group in run.plan:
        cases += [planned.case for planned in group.cases]
    return cases


def fact(run: Run, name: str) -> str:
    """Returns a fact of its environment as text; '' if unknown."""
    value = run.environment.get(name)
    return "" if value is None else str(value)


def commit_of(run: Run) -> str:
    """Returns '0a1b2c3d', with a note if files had changed; '' outside a repository."""
    commit = fact(run, "commit")[:COMMIT_LETTERS]
    return f"{commit} with uncommitted changes" if commit and run.environment.get("dirty") else commit


def attention_of(record: Record) -> str:
    """Returns the kernels of torch that computed attention, as 'flash'; '' if unknown or none."""
    return " and ".join(record.products.attention) if record.products is not None else ""


def cache_of(record: Record, devices: Sequence[DeviceFacts]) -> str:
    """Returns what was done to the last cache; '' for the usual hot one."""
    cache = CACHE.of(dict(record.case.params))
    facts = next((device for device in devices if device.key == record.case.device), None)
    if cache == HOT or facts is None:
        return ""
    size = units.size(facts.cache_bytes)
    if cache == COLD:
        return f"the last cache ({size}) was overwritten twice before every call"
    if record.rotation is None:
        return ""
    if record.rotation.states == 1:
        return "memory had room for one state only, so nothing rotated and the cache is hot"
    states = f"{record.rotation.states} states of {units.size(record.rotation.state_bytes)}"
    return f"calls rotated through {states}; the last cache has {size}"


def replays_of(record: Record) -> str:
    """Returns why its steps were not replayed, or what replays leave out; '' if neither applies."""
    replays = record.replays
    if replays is None:
        return ""
    if replays.why:
        return f"not replayed: {replays.why}"
    words = []
    if replays.loaded:
        words.append(f"replayed without loading {replays.loaded}, which are already on the device")
    if replays.phases:
        total = sum(seconds for _, seconds in replays.phases)
        shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in replays.phases)
        words.append(f"phases of a replay: {shares}")
    return "; ".join(words)


def when(run: Run) -> str:
    """Returns '2026-01-05 12:00 UTC'; the text itself if it is not a date."""
    try:
        started = datetime.fromisoformat(run.started)
    except ValueError:
        return run.started
    return f"{(started if started.tzinfo is None else started.astimezone(UTC)):%Y-%m-%d %H:%M} UTC"


def counts(run: Run) -> str:
    """Returns '10 measured, 1 skipped, 1 failed'."""
    number = Counter(record.status for record in run.records)
    words = {Status.OK: "measured", Status.SKIPPED: "skipped", Status.FAILED: "failed"}
    return ", ".join(f"{number[status]} {word}" for status, word in words.items() if number[status]) or "none"


def many(number: int, noun: str) -> str:
    """Returns '1 case', '12 cases'."""
    return f"{units.whole(number)} {noun}{'' if number == 1 else 's'}"


def shorten_line(text: str, most: int) -> str:
    """Returns the text on one line of at most `most` letters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def notes_of(run: Run) -> list[str]:
    resumed = (f"it was resumed at {resumption.started}" for resumption in run.resumptions)
    idle = (
        f"{device} idles before each slot, and its clock may rise meanwhile: steps may begin faster than in a long "
        f"loop (products to fill its queue could not be captured: {overheads.why_idle})"
        for device, overheads in run.overheads
        if overheads.why_idle
    )
    return [*run.plan.notes, *resumed, *idle, *run.notes]


def count_missing(run: Run) -> tuple[int, int]:
    """Returns the numbers of planned cases without a record and of all planned cases."""
    planned: set[str] = set()
    for group in run.plan:
        planned.update(case.case.id for case in group.cases)
    return len(planned - {record.case.id for record in run.records}), len(planned)


def missing_of(run: Run) -> str:
    """Returns how much of the plan has no record, and what to do; '' if nothing is missing."""
    missing, planned = count_missing(run)
    if not missing:
        return ""
    words = f"{missing} of {planned} cases have no record"
    words = f"{words}: lines are broken or gone" if run.finished else f"stopped early: {words}"
    return f"{words}; --resume {run.id} measures them"


def setting_of(group: ResultGroup) -> str:
    """Returns the parameters that distinguish a group, as '256 x 256 x 256'; the sizes if it is alone."""
    return group.place or sizes(group.case)


def usual_params(case: Case, devices: Iterable[DeviceFacts]) -> dict[str, Scalar]:
    """Returns the parameters of a case that are its suite's defaults, off, or left to torch."""
    params = dict(case.params)
    usual = {name: value for name, value in params.items() if name == _TEXTS or str(value) in _OFF}
    facts = next((facts for facts in devices if facts.key == case.device), None)
    try:
        axes = workloads.get(case.workload).axes(facts) if facts is not None else ()
    except UsageError:  # a suite that is not imported here
        return usual
    defaults = set[tuple[str, ...]]()
    for axis in axes:
        defaults |= {(axis.name, *axis.default), (axis.name, *axis.quick)}
    return usual | {name: value for name, value in params.items() if (name, str(value)) in defaults}


def describe_devices(devices: Iterable[DeviceFacts]) -> str:
    """Returns names without trademarks, each once: 'Intel Xeon and H200'."""
    return join_words(_TRADEMARKS.sub("", facts.name).strip() for facts in devices)


def sizes(case: Case) -> str:
    """Returns the numbers among its parameters, as '2 x 96 tokens'."""
    return describe_params(
        pair for pair in case.params if isinstance(pair[1], int | float) and not isinstance(pair[1], bool)
    )


def join_words(words: Iterable[str], most: int = 5) -> str:
    """Returns 'a, b and c', each word once; 'a, b and 7 more' if there are too many."""
    shown = list(dict.fromkeys(words))
    if len(shown) > most:
        shown[most - 1 :] = [f"{len(shown) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


_PHASE_WORDS = {
    Phase.DATA_LOAD: "data loading",
    Phase.GEMM: "matmul",
    Phase.ACCUMULATE: "accumulation",
    Phase.OPTIMIZER_STEP: "optimizer",
    UNATTRIBUTED: "other",
}


def phase_words(phase: str) -> str:
    """Returns 'optimizer' for 'optimizer_step'; a custom phase keeps its name."""
    return _PHASE_WORDS.get(phase, phase.replace("_", " "))


def phase_order(phase: str) -> tuple[float, str]:
    """Sorts our phases in their order, then others, and unattributed time last."""
    last = CELL_PHASES.index(UNATTRIBUTED)
    return float(CELL_PHASES.index(phase)) if phase in CELL_PHASES else last - 0.5, phase


def figure_words(name: str) -> str:
    """Returns the heading of a figure, else its name in words: 'gradient error', 'time of matmul'."""
    spec = METRICS.get(name)
    if spec is not None and spec.heading:
        return spec.heading
    phase = name.removeprefix("time_")
    return f"time of {phase_words(phase)}" if phase in CELL_PHASES else name.replace("_", " ")


# The share of cases that makes "most".
MOSTLY = 0.75


def common_tone(tones: Iterable[Tone]) -> Tone:
    """Returns the tone of most, unless some mean the opposite."""
    counts = Counter(tones)
    if counts[Tone.GOOD] and counts[Tone.BAD]:
        return Tone.PLAIN
    return next((tone for tone, number in counts.items() if number >= MOSTLY * counts.total()), Tone.PLAIN)
