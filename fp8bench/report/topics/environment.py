"""What a run was measured under, what to know about that, and how to measure and render it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8bench import units
from fp8bench.analysis.energy import NO_SOURCE
from fp8bench.model import DeviceFacts, Label, Record, Run, Timing
from fp8bench.model.run import SWITCHES_SET
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Code, Element, Facts, Items, Text, Tone
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import commit_of, counts, fact, join_words, many, notes_of, when

_MOST = 20
_VARIABLE = "env_"
_DIRTY = " with uncommitted changes"
_OF_GPUS = (("cuDNN", "cudnn"), ("cuBLASLt", "cublaslt"))
_LOST = "the header of its file is lost: what was asked, planned and run on is not known"


@section("environment", "Environment, and how to reproduce", 900)
def environment_section(material: Material) -> Iterator[Element]:
    if not material.entries:
        return
    if material.alone:
        yield Facts(tuple(_facts(material.entries[0])))
    else:  # a column for each run
        facts = [dict(_facts(entry)) for entry in material.entries]
        cols: list[Col[str]] = [Col("fact", lambda name: name)]
        cols += [Col(entry.label, own.get) for entry, own in zip(material.entries, facts, strict=True)]
        yield table("machines", "What each run was made under", cols, dict.fromkeys(n for own in facts for n in own))
    for entry in material.entries:
        yield from _remarks(entry)
    yield Text("How to measure it again", Tone.STRONG)
    for entry in material.entries:
        yield from [Text(entry.label, Tone.STRONG)] if entry.label else []
        known = filter(None, (entry.run.command, *(resumption.command for resumption in entry.run.resumptions)))
        lost = Text("The command is lost with the header of the file.", Tone.DOUBT)
        yield Code(commands) if (commands := "\n".join(known)) else lost


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    run = entry.run
    pairs = [pair for facts in _devices_of(run) for pair in _device_facts(run, facts)]
    total, own, governor = (fact(run, name) for name in ("cpu_count", "cpu_affinity", "cpu_governor"))
    processors = f"{own} of {total}" if own and total and own != total else total
    # Vector widths of compiled quantisers, if they could be chosen.
    bits = ", ".join(map(str, sorted({bit for timing in _timings(run.records) for bit in timing.vector_bits})))
    pairs += [
        ("torch", _with(fact(run, "torch"), "git ", fact(run, "torch_git")[:8])),
        ("CUDA", join_words(list(dict.fromkeys(facts.cuda for facts in _devices_of(run) if facts.cuda)))),
        *((name, fact(run, key)) for name, key in _OF_GPUS),
        ("ROCm", join_words(list(dict.fromkeys(facts.hip for facts in _devices_of(run) if facts.hip)))),
        ("Python", _with(fact(run, "python"), "", fact(run, "python_implementation"))),
        ("machine", fact(run, "machine")),
        ("system", fact(run, "system")),
        ("processors", ", ".join(filter(None, (processors, f"governor {governor}" if governor else "")))),
        ("compiled quantisers", f"vectors of {bits} bits" if bits else ""),
        ("threads", fact(run, "threads") or (str(run.request.threads) if run.started else "")),
        ("switches", fact(run, SWITCHES_SET)),
        ("load at start", _with(fact(run, "load_1min"), "mean of ", "1 minute" if fact(run, "load_1min") else "")),
        ("commit", fact(run, "commit") + (_DIRTY if commit_of(run).endswith(_DIRTY) else "")),
        ("started", when(run)),
        (
            "timed",
            f"{units.clock(seconds)} inside timed slots"
            if (seconds := sum(slot.wall_seconds for timing in _timings(run.records) for slot in timing.slots))
            else "",
        ),
        ("cases", counts(run)),
        ("fp8bench", fact(run, "fp8bench")),
        ("numpy", fact(run, "numpy")),
        ("seed", str(run.request.seed) if run.started else ""),  # a header that is lost took the request with it
        ("code of --import", f"sha256 {imports}" if (imports := fact(run, "imports_sha256")) else ""),
        *(
            (name.removeprefix(_VARIABLE), str(value))
            for name, value in sorted(run.environment.facts.items())
            if name.startswith(_VARIABLE)
        ),
        ("samples", run.path or "this run was not stored"),
    ]
    return ((name, text) for name, text in pairs if text)


def _devices_of(run: Run) -> list[DeviceFacts]:
    keys = {record.case.device for record in run.records}
    return [facts for facts in run.devices if facts.key in keys]


def _device_facts(run: Run, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    key = facts.key

    def told(name: str) -> str:
        return fact(run, f"{key} {name}")

    capability = f", compute capability {facts.capability[0]}.{facts.capability[1]}" if facts.capability else ""
    cache = f", last cache {units.size(facts.cache_bytes)}" if facts.cache_bytes else ""
    yield f"device {key}", f"{facts.name}, {units.size(facts.memory_bytes)}{capability}{cache}"
    driver, newest = told("driver"), told("cuda_driver")
    yield f"driver {key}", f"{driver}, CUDA up to {newest}" if driver and newest else driver
    cap, default, period = (
        run.environment.get(f"{key} {name}") for name in ("power_cap", "power_cap_default", "energy_period")
    )
    if isinstance(cap, float | int):
        of = f" of {default:g} W" if isinstance(default, float | int) and default != cap else ""
        yield f"power cap {key}", f"{cap:g} W{of}"
    modes = (("ECC", "ecc"), ("MIG", "mig"), ("persistence mode", "persistence"))
    yield f"modes {key}", ", ".join(f"{word} {mode}" for word, name in modes if (mode := told(name)))
    if (source := told("energy_source")) not in ("", NO_SOURCE):
        often = f", changes every {units.seconds(period)}" if isinstance(period, float) else ""
        yield f"energy {key}", f"{source}{often}"


def _with(text: str, word: str, more: str) -> str:
    return f"{text} ({word}{more})" if text and more else text


def _timings(records: Iterable[Record]) -> Iterator[Timing]:
    for record in records:
        yield from (timing for timing in (record.timing, record.control, record.paired_with) if timing is not None)


def _remarks(entry: Entry) -> Iterator[Element]:
    run = entry.run
    lost = [] if run.started or run.devices else [Text(_LOST, Tone.BAD)]
    told = [Text(f"note: {note}") for note in notes_of(run)]
    told += [Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles]
    notes = told[:_MOST]
    if len(told) > _MOST:
        notes.append(Text(f"and {many(len(told) - _MOST, 'more note')} and troubles in the run's file"))
    remarks = (*lost, *_labels(entry), *notes)
    if remarks:
        yield from [Text(entry.label, Tone.STRONG)] if entry.label else []
        yield Items(remarks)


def _labels(entry: Entry) -> Iterator[Text]:
    measured = [result for panel in entry.panels for result in panel.results if result.record.is_ok]
    for label in Label:
        number = sum(label in result.labels for result in measured)
        if number:
            reasons = list(dict.fromkeys(reason for result in measured if (reason := result.reason(label))))
            words = explain_label(
                label,
                f"{label} ({number} of {many(len(measured), 'case')})",
                f" ({join_words(reasons)})" if reasons else "",
            )
            yield Text(words, Tone.DOUBT if label.casts_doubt else Tone.PLAIN)
