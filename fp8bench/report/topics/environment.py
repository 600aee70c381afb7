"""Reports the conditions of a run, remarks on these conditions, and the command that measures the run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from fp8bench import units
from fp8bench.analysis.energy import NO_SOURCE
from fp8bench.model import DeviceFacts, Label, Run
from fp8bench.model.run import MARKS_SHARE, SWITCHES_SET
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import Code, Elements, NameValuePairs, Table, Text, TextList, Texts, Tone
from fp8bench.report.page.section import LabelledRun, Material, section
from fp8bench.report.panels import join_parts, list_cases
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import (
    describe_commit,
    describe_status_counts,
    environment_fact,
    format_run_start,
    join_words,
    list_run_notes,
    many,
)

_MAX_REMARKS = 20
_ENV_VARIABLE_PREFIX = "env_"
_LOST_RUN_HEADER_TEXT = "the header of its file is lost: its request, plan and machine are unknown"


@section("environment", "Environment, and how to reproduce", 900)
def environment_section(material: Material) -> Elements:
    if material.is_single_run:
        yield NameValuePairs(tuple(_list_environment_facts(material.entries[0])))
    elif material.entries:
        yield _conditions_table(material.entries)
    else:
        return
    for entry in material.entries:
        yield from _list_remarks(entry)
    yield Text("How to measure it again", Tone.STRONG)
    for entry in material.entries:
        yield from _show_run_label(entry)
        commands = [entry.run.command, *(resumption.command for resumption in entry.run.resumptions)]
        if any(commands):
            yield Code("\n".join(filter(None, commands)))
        else:
            yield Text("The command is lost with the header of the file.", Tone.DOUBT)


def _conditions_table(entries: Sequence[LabelledRun]) -> Table:
    """Returns a table of the conditions of each run. It has a row for each condition, and a column for each run."""
    cols: ColumnList[str] = [Col("fact", str)]
    names: dict[str, str] = {}
    for entry in entries:
        facts = dict(_list_environment_facts(entry))
        names |= facts
        cols.append(Col(entry.label, facts.get))
    return table("machines", "The conditions of each run", cols, names)


def _show_run_label(entry: LabelledRun) -> Texts:
    if entry.label:
        yield Text(entry.label, Tone.STRONG)


def _list_environment_facts(entry: LabelledRun) -> Iterator[tuple[str, str]]:
    run = entry.run
    get_fact = partial(environment_fact, run)
    measured_device_keys = {record.case.device for record in run.records}
    devices = [facts for facts in run.devices if facts.key in measured_device_keys]
    name_fact_pairs = list(chain.from_iterable(_device_facts(run, facts) for facts in devices))
    num_processors = get_fact("cpu_count")
    usable_processors = get_fact("cpu_affinity")
    if num_processors and usable_processors not in ("", num_processors):
        num_processors = f"{usable_processors} of {num_processors}"
    # The vector widths of compiled quantisers in bits, on CPUs that have several vector widths.
    vector_bits: set[int] = set()
    seconds = 0.0
    for record in run.records:
        for timing in filter(None, (record.timing, record.control, record.paired_with)):
            vector_bits.update(timing.vector_bits)
            seconds += sum(slot.wall_seconds for slot in timing.slots)
    name_fact_pairs += [
        ("torch", _append_text_in_brackets(get_fact("torch"), "git ", get_fact("torch_git")[:8])),
        ("CUDA", join_words(facts.cuda for facts in devices if facts.cuda)),
        ("cuDNN", get_fact("cudnn")),
        ("cuBLASLt", get_fact("cublaslt")),
        ("ROCm", join_words(facts.hip for facts in devices if facts.hip)),
        ("Python", _append_text_in_brackets(get_fact("python"), "", get_fact("python_implementation"))),
        ("machine", get_fact("machine")),
        ("system", get_fact("system")),
        ("processors", join_parts(num_processors, _add_prefix_to_text("governor ", get_fact("cpu_governor")))),
        ("compiled quantisers", _add_prefix_to_text("vector bits: ", ", ".join(map(str, sorted(vector_bits))))),
        ("threads", get_fact("threads") or (str(run.request.threads) if run.started else "")),
        ("switches", get_fact(SWITCHES_SET)),
        ("load at start", _append_text_in_brackets(get_fact("load_1min"), "mean of ", "1 minute")),
        ("commit", describe_commit(run, shorten=False)),
        ("started", format_run_start(run)),
        ("timed", f"{units.clock(seconds)} inside timed slots" if seconds else ""),
        ("cases", describe_status_counts(run)),
        ("fp8bench", get_fact("fp8bench")),
        ("numpy", get_fact("numpy")),
        # the header of the run's file has the seed, and this header may be lost
        ("seed", str(run.request.seed) if run.started else ""),
        ("code of --import", _add_prefix_to_text("sha256 ", get_fact("imports_sha256"))),
    ]
    # Environment variables that change the behaviour of torch or of a library.
    name_fact_pairs += [
        (name.removeprefix(_ENV_VARIABLE_PREFIX), str(value))
        for name, value in sorted(run.environment.facts.items())
        if name.startswith(_ENV_VARIABLE_PREFIX)
    ]
    name_fact_pairs.append(("samples", run.path or "this run was not stored"))
    return ((name, text) for name, text in name_fact_pairs if text)


def _device_facts(run: Run, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    key = facts.key
    # Only GPUs have a compute capability.
    capability_text = _add_prefix_to_text(", compute capability ", ".".join(map(str, facts.capability or ())))
    cache_text = f", last cache {units.size(facts.cache_bytes)}" if facts.cache_bytes else ""
    yield f"device {key}", f"{facts.name}, {units.size(facts.memory_bytes)}{capability_text}{cache_text}"
    driver_version = environment_fact(run, f"{key} driver")
    newest_cuda_version = environment_fact(run, f"{key} cuda_driver")
    yield (
        f"driver {key}",
        f"{driver_version}, CUDA up to {newest_cuda_version}"
        if driver_version and newest_cuda_version
        else driver_version,
    )
    # A lowered power cap may be the cause of a low speed, so show the default cap next to it.
    power_cap = run.environment.get(f"{key} power_cap")
    if isinstance(power_cap, float | int):
        default_power_cap = run.environment.get(f"{key} power_cap_default")
        is_power_cap_changed = isinstance(default_power_cap, float | int) and default_power_cap != power_cap
        yield f"power cap {key}", f"{power_cap:g} W" + (f" of {default_power_cap:g} W" if is_power_cap_changed else "")
    prefix_by_device_mode = {"ecc": "ECC ", "mig": "MIG ", "persistence": "persistence mode "}
    modes = (
        _add_prefix_to_text(prefix, environment_fact(run, f"{key} {name}"))
        for name, prefix in prefix_by_device_mode.items()
    )
    yield f"modes {key}", join_parts(*modes)
    yield f"phase marks {key}", _describe_time_stamp_cost(run, key)
    energy_source = environment_fact(run, f"{key} energy_source")
    if energy_source not in ("", NO_SOURCE):
        energy_counter_period = run.environment.get(f"{key} energy_period")
        period_text = (
            f", changes every {units.seconds(energy_counter_period)}"
            if isinstance(energy_counter_period, float)
            else ""
        )
        yield f"energy {key}", f"{energy_source}{period_text}"


def _describe_time_stamp_cost(run: Run, key: str) -> str:
    """Returns the largest share of a GPU step that is spent on time stamps between phases, or '' on a CPU."""
    device_stamp_overheads = dict(run.overheads).get(key)
    if device_stamp_overheads is None or device_stamp_overheads.event_pair is None:
        return ""
    time_stamp_cost_shares = []
    for record in run.records:
        timing = record.timing
        call_nanoseconds = [sum(call) for slot in timing.slots for call in slot.calls_ns] if timing is not None else []
        if timing is not None and record.case.device == key and call_nanoseconds:
            # A step that enters n phases has n - 1 time stamps between them.
            num_time_stamps = sum(count for _, count in timing.entries) - 1
            time_stamp_cost_share = (
                # The shortest call has the largest share. max() prevents a division by 0.
                1e9 * device_stamp_overheads.stamp_cost * num_time_stamps / max(1, min(call_nanoseconds))
            )
            time_stamp_cost_shares.append((time_stamp_cost_share, record.case.mode, record.case.ranks))
    if not time_stamp_cost_shares:
        return ""
    time_stamp_cost_share, mode, ranks = max(time_stamp_cost_shares)
    cost_text = f"at most {time_stamp_cost_share:.2%} of a step ({mode})"
    if time_stamp_cost_share <= MARKS_SHARE:
        return cost_text
    if ranks > 1:
        return f"{cost_text}: more than {MARKS_SHARE:.1%}, but steps of several ranks are all marked"
    return (
        f"{cost_text}: more than {MARKS_SHARE:.1%}, so only one step in several is marked, and each step after it is "
        "divided into phases in the same proportions"
    )


def _add_prefix_to_text(word: str, text: str) -> str:
    return f"{word}{text}" if text else ""


def _append_text_in_brackets(text: str, word: str, addition: str) -> str:
    return f"{text} ({word}{addition})" if text and addition else text


def _list_remarks(entry: LabelledRun) -> Elements:
    run = entry.run
    remarks = [Text(f"note: {note}") for note in list_run_notes(run)]
    remarks += [Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles]
    num_omitted_remarks = len(remarks) - _MAX_REMARKS
    if num_omitted_remarks > 0:
        remarks[_MAX_REMARKS:] = [Text(f"and {many(num_omitted_remarks, 'more note')} and troubles in the run's file")]
    remarks = [*_explain_labels(entry), *remarks]
    if not run.started and not run.devices:
        remarks.insert(0, Text(_LOST_RUN_HEADER_TEXT, Tone.BAD))
    if remarks:
        yield from _show_run_label(entry)
        yield TextList(tuple(remarks))


def _explain_labels(entry: LabelledRun) -> Texts:
    measured_cases = [case for case in list_cases(entry.panels) if case.is_ok]
    for label in Label:
        reasons = [case.reason(label) for case in measured_cases if label in case.labels]
        if reasons:
            name = f"{label} ({len(reasons)} of {many(len(measured_cases), 'case')})"
            label_reasons_text = join_words(filter(None, reasons))
            explanation = explain_label(label, name, f" ({label_reasons_text})" if label_reasons_text else "")
            yield Text(explanation, Tone.DOUBT if label.casts_doubt else Tone.PLAIN)
