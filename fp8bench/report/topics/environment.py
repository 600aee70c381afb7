"""The conditions of a run, remarks on them, and how to measure and render it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from fp8bench import units
from fp8bench.analysis.energy import NO_SOURCE
from fp8bench.model import DeviceFacts, Label, Record, Run, Timing
from fp8bench.model.run import MARKS_SHARE, SWITCHES_SET
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import Code, Elements, Facts, Items, Table, Text, Texts, Tone
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.panels import join_parts
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import commit_of, counts, fact, join_words, many, notes_of, when

_MOST = 20
_VARIABLE = "env_"
_DIRTY = " with uncommitted changes"
_LOST = "the header of its file is lost: its request, plan and machine are unknown"


@section("environment", "Environment, and how to reproduce", 900)
def environment_section(material: Material) -> Elements:
    if material.alone:
        yield Facts(tuple(_facts(material.entries[0])))
    elif material.entries:
        yield _machines(material.entries)
    else:
        return
    for entry in material.entries:
        yield from _remarks(entry)
    yield Text("How to measure it again", Tone.STRONG)
    for entry in material.entries:
        yield from _label(entry)
        commands = [entry.run.command, *(resumption.command for resumption in entry.run.resumptions)]
        if any(commands):
            yield Code("\n".join(filter(None, commands)))
        else:
            yield Text("The command is lost with the header of the file.", Tone.DOUBT)


def _machines(entries: Sequence[Entry]) -> Table:
    """Returns a row for each fact that any run has, and a column for each run."""
    cols: Cols[str] = [Col("fact", str)]
    names: dict[str, str] = {}
    for entry in entries:
        facts = dict(_facts(entry))
        names |= facts
        cols.append(Col(entry.label, facts.get))
    return table("machines", "The conditions of each run", cols, names)


def _label(entry: Entry) -> Texts:
    if entry.label:
        yield Text(entry.label, Tone.STRONG)


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    run = entry.run
    get = partial(fact, run)
    timings = list(_timings(run.records))
    devices = _devices_of(run)
    pairs: list[tuple[str, str]] = []
    for facts in devices:
        pairs += _device_facts(run, facts)
    total = get("cpu_count")
    usable = get("cpu_affinity")
    processors = f"{usable} of {total}" if usable and total and usable != total else total
    # Vector widths of compiled quantisers, if they could be chosen.
    widths = set().union(*(timing.vector_bits for timing in timings))
    slots = chain.from_iterable(timing.slots for timing in timings)
    seconds = sum(slot.wall_seconds for slot in slots)
    pairs += [
        ("torch", _with(get("torch"), "git ", get("torch_git")[:8])),
        ("CUDA", join_words(facts.cuda for facts in devices if facts.cuda)),
        ("cuDNN", get("cudnn")),
        ("cuBLASLt", get("cublaslt")),
        ("ROCm", join_words(facts.hip for facts in devices if facts.hip)),
        ("Python", _with(get("python"), "", get("python_implementation"))),
        ("machine", get("machine")),
        ("system", get("system")),
        ("processors", join_parts(processors, _prefix("governor ", get("cpu_governor")))),
        ("compiled quantisers", _prefix("vector bits: ", ", ".join(map(str, sorted(widths))))),
        ("threads", get("threads") or (str(run.request.threads) if run.started else "")),
        ("switches", get(SWITCHES_SET)),
        ("load at start", _with(get("load_1min"), "mean of ", "1 minute")),
        ("commit", get("commit") + (_DIRTY if commit_of(run).endswith(_DIRTY) else "")),
        ("started", when(run)),
        ("timed", f"{units.clock(seconds)} inside timed slots" if seconds else ""),
        ("cases", counts(run)),
        ("fp8bench", get("fp8bench")),
        ("numpy", get("numpy")),
        ("seed", str(run.request.seed) if run.started else ""),  # a lost header had the request in it
        ("code of --import", _prefix("sha256 ", get("imports_sha256"))),
    ]
    for name, value in sorted(run.environment.facts.items()):
        # Variables of the environment that change what torch or a library does.
        if name.startswith(_VARIABLE):
            pairs.append((name.removeprefix(_VARIABLE), str(value)))
    pairs.append(("samples", run.path or "this run was not stored"))
    return ((name, text) for name, text in pairs if text)


def _devices_of(run: Run) -> list[DeviceFacts]:
    keys = {record.case.device for record in run.records}
    return [facts for facts in run.devices if facts.key in keys]


def _device_facts(run: Run, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    key = facts.key
    # Only GPUs have a compute capability.
    capability = _prefix(", compute capability ", ".".join(map(str, facts.capability or ())))
    cache = f", last cache {units.size(facts.cache_bytes)}" if facts.cache_bytes else ""
    yield f"device {key}", f"{facts.name}, {units.size(facts.memory_bytes)}{capability}{cache}"
    driver = fact(run, f"{key} driver")
    newest = fact(run, f"{key} cuda_driver")
    yield f"driver {key}", f"{driver}, CUDA up to {newest}" if driver and newest else driver
    # A lowered cap explains a low speed, so the default is named as well.
    cap = run.environment.get(f"{key} power_cap")
    if isinstance(cap, float | int):
        default = run.environment.get(f"{key} power_cap_default")
        is_changed = isinstance(default, float | int) and default != cap
        yield f"power cap {key}", f"{cap:g} W" + (f" of {default:g} W" if is_changed else "")
    modes = (("ECC ", "ecc"), ("MIG ", "mig"), ("persistence mode ", "persistence"))
    yield f"modes {key}", join_parts(*(_prefix(word, fact(run, f"{key} {name}")) for word, name in modes))
    yield f"phase marks {key}", _marks_cost(run, key)
    source = fact(run, f"{key} energy_source")
    if source not in ("", NO_SOURCE):
        period = run.environment.get(f"{key} energy_period")
        often = f", changes every {units.seconds(period)}" if isinstance(period, float) else ""
        yield f"energy {key}", f"{source}{often}"


def _marks_cost(run: Run, key: str) -> str:
    """Returns the largest share of a GPU's step that its time stamps take, with the case; '' on a CPU."""
    overheads = dict(run.overheads).get(key)
    if overheads is None or overheads.event_pair is None:
        return ""
    shares = []
    for record in run.records:
        timing = record.timing
        calls = [sum(call) for slot in timing.slots for call in slot.calls_ns] if timing is not None else []
        if timing is not None and record.case.device == key and calls:
            stamps = sum(count for _, count in timing.entries) - 1
            share = 1e9 * overheads.stamp_cost * stamps / max(1, min(calls))
            shares.append((share, record.case.mode, record.case.ranks))
    if not shares:
        return ""
    share, mode, ranks = max(shares)
    cost = f"at most {share:.2%} of a step ({mode})"
    if share <= MARKS_SHARE:
        return cost
    if ranks > 1:
        return f"{cost}: more than {MARKS_SHARE:.1%}, but steps of several ranks are all marked"
    return (
        f"{cost}: more than {MARKS_SHARE:.1%}, so only one step in several is marked, and each step after it is "
        "divided into phases in the same proportions"
    )


def _prefix(word: str, text: str) -> str:
    return f"{word}{text}" if text else ""


def _with(text: str, word: str, more: str) -> str:
    return f"{text} ({word}{more})" if text and more else text


def _timings(records: Iterable[Record]) -> Iterator[Timing]:
    for record in records:
        yield from filter(None, (record.timing, record.control, record.paired_with))


def _remarks(entry: Entry) -> Elements:
    run = entry.run
    remarks = [Text(f"note: {note}") for note in notes_of(run)]
    remarks += [Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles]
    num_hidden = len(remarks) - _MOST
    if num_hidden > 0:
        remarks[_MOST:] = [Text(f"and {many(num_hidden, 'more note')} and troubles in the run's file")]
    remarks = [*_labels(entry), *remarks]
    if not run.started and not run.devices:
        remarks.insert(0, Text(_LOST, Tone.BAD))
    if remarks:
        yield from _label(entry)
        yield Items(tuple(remarks))


def _labels(entry: Entry) -> Texts:
    results = chain.from_iterable(panel.members for panel in entry.panels)
    measured = [result for result in results if result.is_ok]
    for label in Label:
        labelled = [result for result in measured if label in result.labels]
        if labelled:
            reasons = join_words(filter(None, (result.reason(label) for result in labelled)))
            name = f"{label} ({len(labelled)} of {many(len(measured), 'case')})"
            words = explain_label(label, name, f" ({reasons})" if reasons else "")
            yield Text(words, Tone.DOUBT if label.casts_doubt else Tone.PLAIN)
