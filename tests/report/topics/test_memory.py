"""Memory by what it is for, and the largest batches: the tables of the terminal, sentences, rows, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from fp8bench.model import (
    Capacity,
    Finding,
    Measurement,
    MemoryRole,
    MemoryUse,
    PhaseMemory,
    Provenance,
    Record,
    Run,
    Status,
)
from fp8bench.report.data.run import rows, widened
from fp8bench.report.elements import Bars, ChartAxis, Stacks, Table, Tone
from fp8bench.report.panels import panels_of
from fp8bench.report.topics.memory import capacity, highest_in, sentences
from fp8bench.report.topics.memory import memory as memory_of
from tests.counts import for_each
from tests.materials import Made, built, of_kind, part, strange, told
from tests.runs import EMULATED, NATIVE, case, gemm, memory, render, render_whole, run_of, transformer

MIB = 1 << 20
FP32 = {"weights": 40 * MIB, "gradients": 40 * MIB, "optimizer": 80 * MIB, "activations": 140 * MIB}
FP16 = {"weights": 40 * MIB, "low_precision_weights": 20 * MIB, "gradients": 40 * MIB, "optimizer": 80 * MIB,
        "activations": 20 * MIB}  # fmt: skip
FP8 = {"weights": 40 * MIB, "low_precision_weights": 40 * MIB, "optimizer": 80 * MIB, "activations": 70 * MIB,
       "low_precision_activations": 70 * MIB, "workspace": 45 * MIB - 9, "other": 9}  # fmt: skip
GIB = 1 << 30


def use(roles: Mapping[str, int], phases: Sequence[tuple[str, int]] = (), **more: object) -> MemoryUse:
    """Of these roles, the highest point in the first of these phases."""
    peak = sum(roles.values())
    known = tuple(PhaseMemory(phase, peak if not n else size) for n, (phase, size) in enumerate(phases))
    return replace(MemoryUse(peak, tuple(roles.items()), known), **more)  # type: ignore[arg-type]


def with_uses(*uses: MemoryUse | None, made: Made | None = None) -> Made:
    """The run of a transformer: bf16 the reference, fp16, and fp8 that is emulated, with these."""
    run, findings = made or transformer()
    records = []
    for record, one in zip(run.records, uses, strict=True):
        others = tuple(found for found in record.measurements if found.metric != "peak_memory")
        records.append(replace(record, memory=one, measurements=others if one is None else (*others, memory(one.peak))))
    return replace(run, records=tuple(records)), findings


def usual() -> Made:
    """Three cases that tell something."""
    gemm_phase = [("gemm", 0), ("cast", 5 * MIB)]
    return with_uses(
        use(FP32, gemm_phase, resident=600 * MIB), use(FP16, gemm_phase),
        use(FP8, [("cast", 0), ("elementwise", 60 * MIB)], resident=700 * MIB),
    )  # fmt: skip


def said(run: Run, findings: Mapping[str, Finding]) -> list[str]:
    """The sentences of the first panel."""
    panel = panels_of(run, findings)[0]
    return list(sentences(panel, panel.members))


def on_a_device(size: int | None, why: str = "") -> Made:
    """The usual run, whose fp8 would hold so much on a device."""
    run, findings = usual()
    *others, last = run.records
    assert last.memory is not None
    derived = Measurement("device_peak_memory", "B", (float(size),), Provenance.DERIVED) if size is not None else None
    measurements = (*last.measurements, *([derived] if derived else []))
    memory_use = replace(last.memory, on_device=size, off_device=why)
    return replace(run, records=(*others, replace(last, memory=memory_use, measurements=measurements))), findings


def test_what_a_device_would_hold_stands_beside_the_peak() -> None:
    """Of emulated cases alone, as a share of the reference's; in sentences, the table and the answer."""
    made = on_a_device(150 * MIB)
    lines = [" ".join(line.split()) for line in told(memory_of(panels_of(*made)[0]), 140)]
    assert lines[1].startswith("case peak vs bf16 on a device weights")
    assert lines[3].startswith("fp16 200 0.667x - 40.0") and lines[4].startswith("fp8 345 1.150x 0.500x (150 MiB) 40.0")
    assert (
        "its peak is the cost of emulation, and on hardware with its formats it would be 0.500x (150 MiB), derived"
        in (said(*made)[1])
    )
    text = " ".join(render(*made).split())
    assert "on a device" in text and "(on a device: derived)" in text
    fields = [row for row in rows(*made) if row["metric"] == "device_peak_memory"]
    assert [(row["precision"], row["provenance"]) for row in fields] == [("fp8", "derived")]


def test_where_nobody_can_say_there_is_a_reason_and_no_column() -> None:
    made = on_a_device(None, "no cast was seen")
    assert "(on a device: unknown, no cast was seen)" in said(*made)[1]
    assert "on a device" not in " ".join(told(memory_of(panels_of(*made)[0]), 120)[:5])
    assert "on a device" not in render(*usual())


def test_a_native_precision_that_saves_nothing_is_explained_too() -> None:
    """By its roles alone; what has gone is told as well."""
    less = {role: size for role, size in FP16.items() if role != "activations"}
    (found,) = said(*with_uses(use(FP16), use(less | {"low_precision_weights": 44 * MIB}), None))
    assert found == (
        "fp16 takes 1.020x of bf16's memory: nothing is saved; weights, gradients and optimizer state stay (160 MiB), "
        "low-precision copies of weights are 2.200x (44.0 MiB), activations go (20.0 MiB)."
    )


def test_of_several_groups_the_largest_is_explained() -> None:
    """By its name; a ratio that says nothing is not told."""
    run, findings = gemm()
    small, large = {"weights": MIB, "workspace": 1}, {"weights": 8 * MIB, "workspace": 8}
    uses = [
        use(small), use({"weights": MIB // 2}), use(small), None,
        None, None, None, None,
        use(large), use({"weights": 4 * MIB, "workspace": 8}), use({"weights": 8 * MIB, "workspace": MIB}), None,
    ]  # fmt: skip
    bf16, fp8 = said(*with_uses(*uses, made=(run, findings)))
    panel = panels_of(run, findings)[0]
    name = panel.groups[2].place
    assert bf16 == f"bf16 takes 0.500x of fp32's memory: at {name} weights are 0.500x (4.00 MiB)."
    assert fp8.startswith("fp8 takes 1.000x to 1.125x of fp32's memory: nothing is saved, because it is emulated")
    assert fp8.endswith(f"; at {name} weights stay (8.00 MiB), workspace adds 1.00 MiB.")


@for_each("uses", [(None, None, None), (use({"weights": 5}), use({"weights": 3}), None)])
def test_one_role_or_none_has_no_table(uses: tuple[MemoryUse | None, ...]) -> None:
    """It would say what the peak says already."""
    made = with_uses(*uses)
    assert not told(memory_of(panels_of(*made)[0]))
    assert "by what they are for" not in render_whole(*made)
    assert ("peak_memory" in render_whole(*made)) == (uses[0] is not None)


def test_the_phase_of_the_highest_point_is_the_innermost() -> None:
    """What is held when a product ends is still held by the phase around it."""
    phases = [PhaseMemory(name, 10) for name in ("unattributed", "elementwise", "gemm", "cast")]
    assert highest_in(MemoryUse(10, phases=(*phases, PhaseMemory("data_load", 3))))[0] == "cast"
    assert highest_in(MemoryUse(10)) == []


def test_rows_by_role_and_by_phase() -> None:
    """Roles are derived, highest points measured; what could not be had has its reason."""
    run, findings = with_uses(
        use(FP32, [("gemm", 0), ("cast", 7)], reserved=999, process=5, why="no resident memory: nobody may"), None, None
    )
    found = [row for row in rows(run, findings) if row["mode"] == "bf16" and "memory" in str(row["metric"])]
    shown = [(row["phase"], row["metric"], row["unit"], row["median_in_unit"], row["provenance"]) for row in found]
    assert shown == [
        ("step", "peak_memory", "B", 300.0 * MIB, "measured"),
        *(("step", f"memory_{role}", "B", float(size), "derived") for role, size in FP32.items()),
        ("gemm", "peak_memory", "B", 300.0 * MIB, "measured"),
        ("cast", "peak_memory", "B", 7.0, "measured"),
        ("step", "reserved_memory", "B", 999.0, "measured"),
        ("step", "process_memory", "B", 5.0, "measured"),
        ("step", "resident_memory", "B", None, None),
    ]
    assert found[-1]["why"] == "no resident memory: nobody may"
    wide = widened(rows(run, findings))[1][0]
    assert (wide["memory_optimizer_B"], wide["cast_peak_memory_B"], wide["reserved_memory_B"]) == (80 * MIB, 7, 999)
    assert "memory_optimizer" in {row["metric"] for row in rows(run, findings)}


def test_a_case_that_failed_says_nothing_of_its_memory() -> None:
    """Whatever it had."""
    run, findings = usual()
    failed = replace(run, records=tuple(replace(one, status=Status.FAILED) for one in run.records))
    assert not any("memory_" in str(row["metric"]) for row in rows(failed, findings))


def test_cases_far_apart_are_shown_as_shares() -> None:
    """With their sizes in their names."""
    made = with_uses(use(FP32), use({"weights": MIB, "data": 3 * MIB}), use(FP8))
    (stacks,) = of_kind(part("memory", made), Stacks)
    assert stacks.axis.unit == "%" and stacks.rows[1][0] == "fp16, 4.00 MiB"
    assert [sum(values) for _, values in stacks.rows] == pytest.approx([100.0] * 3)
    assert stacks.rows[1][1][stacks.parts.index("data")] == 75.0


def test_a_case_of_which_nobody_knows_is_all_rest() -> None:
    """Beside others that are known; its peak is measured all the same, and has no explanation."""
    made = with_uses(use(FP32), MemoryUse(200 * MIB, why="nobody listened"), use(FP8))
    (stacks,) = of_kind(part("memory", made), Stacks)
    label, values = stacks.rows[1]
    assert (label, values[-1], sum(values)) == ("fp16", 200 * MIB, 200 * MIB) and stacks.parts[-1] == "the rest"
    assert said(*made)[0] == "fp16 takes 0.667x of bf16's memory."
    assert " ".join(told(memory_of(panels_of(*made)[0]), 120)[3].split()) == ("fp16 200 0.667x - - - - - - - - -")


def test_every_role_has_a_title_and_words() -> None:
    """So that nobody meets an underscore."""
    from fp8bench.report.words.legend import MEMORY_TITLES, MEMORY_WORDS

    assert set(MEMORY_TITLES) == set(MEMORY_WORDS) == set(MemoryRole)
    assert len(set(MEMORY_TITLES.values())) == len(MemoryRole)


def with_memory(*peaks: int) -> Made:
    """Three groups of fp32, bf16 and so on with these peaks."""
    run, findings = gemm()
    records = tuple(
        replace(one, measurements=(memory(peak),)) for one, peak in zip(run.records, 3 * peaks, strict=True)
    )
    return replace(run, records=records), findings


def test_bars_of_every_case() -> None:
    (bars,) = of_kind(part("memory", transformer()), Bars)
    assert bars.axis == ChartAxis("peak memory", "B")
    ((heading, marks),) = bars.groups
    assert heading == "" and [(one.label, one.value) for one in marks] == [
        ("bf16", 300 * MIB), ("fp16", 200 * MIB), ("fp8 (emulated)", 345 * MIB),
    ]  # fmt: skip
    assert [one.tone for one in marks] == [Tone.PLAIN, Tone.PLAIN, Tone.DOUBT]
    assert [one.hint for one in marks] == ["300 MiB", "200 MiB, 0.667x of bf16's", "345 MiB, 1.150x of bf16's"]


def test_what_saves_nothing_is_said_with_the_reason_that_is_known() -> None:
    """Emulated values are kept in wider tensors, which the support says; of a native case no more is known."""
    (bars,) = of_kind(part("memory", transformer()), Bars)
    assert bars.description == (
        "fp16 takes 0.667x of bf16's memory. fp8 takes 1.150x of bf16's memory: nothing is saved, because it is "
        "emulated (no hardware for FP8: values rounded, products in fp32): its peak is the cost of emulation."
    )


def test_groups_are_counted() -> None:
    found = part("memory", with_memory(100, 99, 50, 100))
    (bars,) = of_kind(found, Bars)
    assert bars.groups[0][0] == "m=256 n=256 k=256" and len(bars.groups) == 3
    assert bars.description.startswith("bf16 takes 0.990x of fp32's memory. fp8 takes 0.500x")
    assert "nvfp4 takes 1.000x of fp32's memory: nothing is saved." in bars.description


def test_a_peak_that_is_no_number_has_no_share() -> None:
    marks = [mark for bars in of_kind(part("memory", strange()), Bars) for _, group in bars.groups for mark in group]
    assert {mark.hint for mark in marks if mark.value == float("inf")} == {"inf TiB"}


def fits(
    batch: int | None, why: str = "tensors need 1.63 MiB more", limit: int | None = GIB, axis: str = "batch"
) -> Capacity:
    """A search that came to that."""
    beyond = None if batch is None else batch + 1
    return Capacity(axis, limit, batch, 1, 192 * (batch or 0), GIB - 7 if batch else None, beyond, why, 5)


def made(*found: tuple[str, Capacity | None], **sizes: int) -> Made:
    """One group: the first is the reference; fp8 is emulated."""
    records = [
        Record(
            case("transformer", mode, {"size": "nano", "batch": 2, **sizes}), EMULATED if mode == "fp8" else NATIVE,
            Status.OK, is_reference=number == 0, capacity=one,
        )
        for number, (mode, one) in enumerate(found)
    ]  # fmt: skip
    return run_of(records), {}


USUAL = made(("fp32", fits(376)), ("bf16", fits(606, "tensors need 963 KiB more")), ("fp8", fits(288)))


def lines(one: Made, width: int = 100) -> list[str]:
    return told([element for panel in panels_of(*one) for element in capacity(panel)], width)


def test_the_batch_of_a_device_is_derived_beside_it() -> None:
    """Over what fits of the reference; of emulated cases alone, and a sentence says what it is."""
    run, findings = made(("fp32", fits(376)), ("bf16", fits(606)), ("fp8", replace(fits(288), on_device=1203)))
    found = [" ".join(line.split()) for line in told(capacity(panels_of(run, findings)[0]), 120)]
    assert "vs fp32 on a device tokens a step" in found[1] and "emulated 1203, 3.20x" in found[4]
    assert any("derived by a line" in line for line in found)
    figures = {row["metric"]: row for row in rows(run, findings) if row["precision"] == "fp8"}
    assert (figures["device_max_batch"]["median_in_unit"], figures["device_max_batch"]["provenance"]) == (
        1203.0,
        "derived",
    )


def test_who_did_not_ask_sees_nothing() -> None:
    assert lines(gemm()) == [] and built("memory", gemm()) is None
    assert "largest batch" not in render_whole(*gemm())
    assert not [row for row in rows(*gemm()) if str(row["metric"]).startswith("max_batch")]


def test_no_batch_at_all_and_no_answer_are_told_apart() -> None:
    """A zero is known; what is not known is a dash with the reason. Nothing is compared with either."""
    shown = lines(
        made(("fp32", fits(0, "tensors need 3.00 MiB more")), ("bf16", fits(None, "a batch of 4 ended it: no")))
    )
    assert shown[2:] == [
        "  fp32     none  reference              -            -  1: tensors need 3.00 MiB more",
        "  bf16        -  -                      -            -  a batch of 4 ended it: no",
    ]


def test_an_axis_that_ends_first_says_so() -> None:
    whole = replace(fits(4096, ""), beyond=None)
    assert "none: the suite takes no more" in lines(made(("fp32", whole)))[2]


def test_the_device_s_own_end_and_an_axis_of_another_name() -> None:
    shown = lines(made(("fp32", fits(64, limit=None, axis="tokens")), ("bf16", fits(96, limit=None, axis="tokens"))))
    assert shown[0] == "largest batch (tokens) that fits into the device's memory"
    assert shown[-1] == "  bf16 fits 1.50x of fp32's tokens into the device's memory."


def test_an_emulated_reference_compares_with_nothing() -> None:
    shown = lines(made(("fp8", fits(10)), ("bf16", fits(20))))
    assert not [line for line in shown if "2.00x" in line]


def test_groups_are_told_apart_by_all_but_their_batch() -> None:
    first, second = (made(("fp32", fits(n)), ("bf16", fits(2 * n)), sequence=n) for n in (64, 128))
    other = [replace(one, capacity=None) for one in made(("fp32", None), ("bf16", None), sequence=64)[0].records]
    other = [
        replace(one, case=replace(one.case, params=tuple((k, 8 if k == "batch" else v) for k, v in one.case.params)))
        for one in other
    ]
    run = run_of([*first[0].records, *other, *second[0].records])
    shown = lines((run, {}))
    assert [line for line in shown if line.startswith("sequence")] == ["sequence=64", "sequence=128"]
    assert "  bf16 fits 2.00x of fp32's batch into 1.00 GiB at sequence=128." in shown
    assert "batch=" not in "".join(shown)


def test_two_runs_have_tables_of_different_names() -> None:
    tables = of_kind(part("memory", USUAL, USUAL), Table)
    assert len({table.name for table in tables}) == 2


def test_the_rows_of_what_is_unknown_are_empty() -> None:
    found = [row for row in rows(*made(("fp32", fits(None, "it crashed", None)))) if "max_batch" in str(row["metric"])]
    assert [(row["metric"], row["median_in_unit"], row["why"]) for row in found] == [("max_batch", None, "it crashed")]
