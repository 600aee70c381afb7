"""Words that several reports share: names of suites, devices, phases and metrics, descriptions and notes of runs, and
the joining of words. Also counts the missing records of a run, and selects the tone of several cases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Case, DeviceFacts, Phase, Record, Run, Scalar, Status
from fp8bench.model.specs import METRICS
from fp8bench.model.words import UNTOUCHED
from fp8bench.protocols.axes import CACHE, COLD, HOT
from fp8bench.registry import workloads
from fp8bench.report.elements import Tone
from fp8bench.report.panels import NamedCase, ResultGroup, describe_params, find_device, join_parts, together

COMMIT_LETTERS = 8
# These values mean that a parameter is off, or that torch chooses its value.
_OFF_OR_AUTO_PARAM_VALUES = frozenset({"no", "auto", "none"})
# The parameter that identifies the data that a case reads.
_DATA_PARAM_NAME = "data"
# Shortens 'Intel(R) Xeon(R) CPU @ 2.20GHz' to 'Intel Xeon'.
_TRADEMARKS_PATTERN = re.compile(r"\((?:R|TM|C)\)| (?:CPU|Processor)\b| @ .*")


def list_suites(run: Run) -> list[str]:
    """Returns the names of a run's suites. A model of the user has the name 'net.py:make' instead of 'model'."""
    return list(dict.fromkeys(str(dict(case.params).get("make", case.workload)) for case in _list_cases(run)))


def list_devices(run: Run) -> list[str]:
    """Returns the names of a run's devices, as 'AMD EPYC'. If the facts of a device are lost, its key is used, as
    'cpu'.
    """
    names = {facts.key: describe_devices([facts]) for facts in run.devices}
    return list(dict.fromkeys(names.get(case.device, case.device) for case in _list_cases(run)))


def _list_cases(run: Run) -> list[Case]:
    planned_cases = chain.from_iterable(group.cases for group in run.plan)
    return [record.case for record in run.records] + [planned.case for planned in planned_cases]


def environment_fact(run: Run, name: str) -> str:
    """Returns a fact of the run's environment as text, or '' if it is unknown."""
    value = run.environment.get(name)
    return "" if value is None else str(value)


def describe_commit(run: Run, shorten: bool = True) -> str:
    """Returns the commit of a run, as '0a1b2c3d', with a note on uncommitted changes. Returns '' outside a
    repository.
    """
    commit = environment_fact(run, "commit")
    commit = commit[:COMMIT_LETTERS] if shorten else commit
    return f"{commit} with uncommitted changes" if commit and run.environment.get("dirty") else commit


def describe_attention(record: Record) -> str:
    """Returns the torch kernels that computed attention, as 'flash', or '' if unknown or without attention."""
    return " and ".join(record.products.attention) if record.products is not None else ""


def describe_cache(record: Record, devices: Sequence[DeviceFacts]) -> str:
    """Returns how the last-level cache was prepared before calls. Returns '' if the cache was left hot, which is the
    default.
    """
    cache = CACHE.of(dict(record.case.params))
    facts = find_device(devices, record.case.device)
    if cache == HOT or facts is None:
        return ""
    cache_size_text = units.size(facts.cache_bytes)
    if cache == COLD:
        return f"the last-level cache ({cache_size_text}) was overwritten twice before every call"
    if record.rotation is None:
        return ""
    if record.rotation.states == 1:
        return "memory had room for one state only, so nothing rotated and the cache is hot"
    states_text = f"{record.rotation.states} states of {units.size(record.rotation.state_bytes)}"
    return f"calls rotated through {states_text}; the last-level cache has {cache_size_text}"


def describe_graph_replays(record: Record) -> str:
    """Returns why steps were not replayed as a CUDA graph. If they were, returns what the replays leave out, and each
    phase's share of a replay. Returns '' if there is nothing to report.
    """
    replays = record.replays
    if replays is None:
        return ""
    if replays.why:
        return f"not replayed: {replays.why}"
    replayed_seconds = sum(seconds for _, seconds in replays.phases)
    phase_shares_text = ", ".join(f"{phase} {seconds / replayed_seconds:.0%}" for phase, seconds in replays.phases)
    loading_text = (
        f"replayed without loading {replays.loaded}, which are already on the device" if replays.loaded else ""
    )
    return join_parts(
        loading_text, f"phases of a replay: {phase_shares_text}" if phase_shares_text else "", separator="; "
    )


def format_run_start(run: Run) -> str:
    """Returns the start of a run as '2026-01-05 12:00 UTC'. If the stored text is not a date, returns this text."""
    try:
        start_time = datetime.fromisoformat(run.started)
    except ValueError:
        return run.started
    return f"{(start_time if start_time.tzinfo is None else start_time.astimezone(UTC)):%Y-%m-%d %H:%M} UTC"


def describe_status_counts(run: Run) -> str:
    """Returns how many cases have each status, as '10 measured, 1 skipped, 1 failed'."""
    record_status_counts = Counter(record.status for record in run.records)
    word_by_status = {Status.OK: "measured", Status.SKIPPED: "skipped", Status.FAILED: "failed"}
    return (
        ", ".join(
            f"{record_status_counts[status]} {word}"
            for status, word in word_by_status.items()
            if record_status_counts[status]
        )
        or "none"
    )


def many(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: '1 case', '12 cases'. Only a noun with an irregular plural needs `plural`."""
    return f"{units.whole(number)} {noun if number == 1 else plural or noun + 's'}"


def shorten_line(text: str, max_length: int) -> str:
    """Returns the text on one line of at most `max_length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_length else f"{line[: max_length - 3]}..."


def list_run_notes(run: Run) -> list[str]:
    resumption_notes = (f"it was resumed at {resumption.started}" for resumption in run.resumptions)
    device_idle_notes = (
        f"{device} idles before each slot, so its clock may rise, and steps may begin faster than in a long "
        f"loop (products to fill its queue could not be captured: {overheads.why_idle})"
        for device, overheads in run.overheads
        if overheads.why_idle
    )
    return [*run.plan.notes, *resumption_notes, *device_idle_notes, *run.notes]


def count_missing_records(run: Run) -> tuple[int, int]:
    """Returns the number of planned cases without a record, and the number of all planned cases."""
    planned_cases = chain.from_iterable(group.cases for group in run.plan)
    planned_case_ids = {planned.case.id for planned in planned_cases}
    return len(planned_case_ids - {record.case.id for record in run.records}), len(planned_case_ids)


def describe_missing_records(run: Run) -> str:
    """Returns how many planned cases have no record, and how to measure them. Returns '' if every case has a record."""
    num_missing, num_planned = count_missing_records(run)
    if not num_missing:
        return ""
    explanation = f"{num_missing} of {num_planned} cases have no record"
    explanation = f"{explanation}: lines are broken or gone" if run.finished else f"stopped early: {explanation}"
    return f"{explanation}; --resume {run.id} measures them"


def name_setting(group: ResultGroup) -> str:
    """Names the setting of a group by the parameters that distinguish it, as '256 x 256 x 256'. Without other groups in
    the panel, names it by the sizes of the group.
    """
    return group.setting_name or describe_sizes(group.case)


def find_usual_params(case: Case, devices: Iterable[DeviceFacts]) -> dict[str, Scalar]:
    """Returns the parameters of a case that descriptions leave out, such as those with the suite's default."""
    facts = find_device(devices, case.device)
    usual_values_by_param: dict[str, tuple[str, ...]] = {}
    with suppress(UsageError):  # the suite is unknown if its module is not imported
        for axis in workloads.get(case.workload).axes(facts) if facts is not None else ():
            # If an axis has several default values, none of them is usual. So join them to a text that equals no value.
            usual_values_by_param[axis.name] = tuple(",".join(values) for values in (axis.default, axis.quick))
    return {
        name: value
        for name, value in case.params
        if name == _DATA_PARAM_NAME or str(value) in (*_OFF_OR_AUTO_PARAM_VALUES, *usual_values_by_param.get(name, ()))
    }


def describe_devices(devices: Iterable[DeviceFacts]) -> str:
    """Returns the distinct device names without trademarks: 'Intel Xeon and H200'."""
    return join_words(_TRADEMARKS_PATTERN.sub("", facts.name).strip() for facts in devices)


def describe_sizes(case: Case) -> str:
    """Returns the numeric parameters of a case in words, as '2 x 96 tokens'."""
    # isinstance would also accept bool, which is a subclass of int.
    return describe_params((name, value) for name, value in case.params if type(value) in (int, float))


def join_words(words: Iterable[str], max_words: int = 5) -> str:
    """Returns distinct words as 'a, b and c'. If there are more than `max_words`, returns 'a, b and 7 more'."""
    distinct_words = list(dict.fromkeys(words))
    if len(distinct_words) > max_words:
        distinct_words[max_words - 1 :] = [f"{len(distinct_words) - max_words + 1} more"]
    return " and ".join(filter(None, (", ".join(distinct_words[:-1]), *distinct_words[-1:])))


def join_remarks(
    remarks_by_name: Iterable[tuple[str, Iterable[str]]], join: Callable[[Iterable[str]], str] = join_words
) -> Iterator[str]:
    """Yields each distinct remark with the names to which it applies, as 'bf16 and fp8: 3 calls were not counted'."""
    remark_name_pairs: list[tuple[str, str]] = []
    for name, remarks in remarks_by_name:
        remark_name_pairs += [(remark, name) for remark in remarks]
    for remark, names in together(remark_name_pairs).items():
        yield f"{join(names)}: {remark}"


_PHASE_WORDS = {
    Phase.DATA_LOAD: "data loading",
    Phase.GEMM: "matmul",
    Phase.ACCUMULATE: "accumulation",
    Phase.OPTIMIZER_STEP: "optimizer",
    UNATTRIBUTED: "other",
}


def phase_words(phase: str) -> str:
    """Returns the name of a phase for readers, as 'optimizer' for 'optimizer_step'. A custom phase keeps its name."""
    return _PHASE_WORDS.get(phase, phase.replace("_", " "))


def name_work_outside_phases(case: NamedCase) -> str:
    """Names the time outside of phases in the steps of a user's model: 'forward and backward', or 'forward'. Returns ''
    for all other cases.
    """
    # 'untouched' is the name of a user's unchanged model, so other suites never have this reference. In a user's model,
    # only data loading, casts and the optimizer are phases. All other time is forward and backward.
    if case.group.reference != UNTOUCHED:
        return ""
    return "forward" if ("pass", "forward") in case.record.case.params else "forward and backward"


def phase_sort_key(phase: str) -> tuple[float, str]:
    """Returns the sort key of a phase. Built-in phases come first in their usual order, then custom phases, then
    unattributed time.
    """
    # CELL_PHASES has the built-in phases in the order of tables, and UNATTRIBUTED at its end.
    unattributed_phase_position = CELL_PHASES.index(UNATTRIBUTED)
    return float(CELL_PHASES.index(phase)) if phase in CELL_PHASES else unattributed_phase_position - 0.5, phase


def make_figure_heading(name: str) -> str:
    """Returns the heading of a metric. If it has none, returns its name in words, as 'gradient error' or 'time of
    matmul'.
    """
    spec = METRICS.get(name)
    if spec is not None and spec.heading:
        return spec.heading
    phase = name.removeprefix("time_")
    return f"time of {phase_words(phase)}" if phase in CELL_PHASES else name.replace("_", " ")


# The common tone (such as good or bad) is one that at least this share of the cases has.
TONE_MAJORITY_SHARE = 0.75


def find_majority_tone(tones: Iterable[Tone]) -> Tone:
    """Returns the tone that a large majority of cases has. Returns the plain tone if no tone has such a majority, or if
    good and bad tones occur.
    """
    case_count_by_tone = Counter(tones)
    ((tone, count), *_) = case_count_by_tone.most_common() or [(Tone.PLAIN, 0)]
    has_good_and_bad_tones = case_count_by_tone[Tone.GOOD] and case_count_by_tone[Tone.BAD]
    return Tone.PLAIN if has_good_and_bad_tones or count < TONE_MAJORITY_SHARE * case_count_by_tone.total() else tone
