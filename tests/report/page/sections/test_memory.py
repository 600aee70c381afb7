"""Peak memory as bars, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.report.elements import Axis, Bars, Tone
from tests.materials import Made, of_kind, part, strange
from tests.runs import gemm, memory, transformer

MIB = 1 << 20


def with_memory(*peaks: int) -> Made:
    """Three groups of fp32, bf16 and so on with these peaks."""
    run, findings = gemm()
    records = tuple(
        replace(one, measurements=(memory(peak),)) for one, peak in zip(run.records, 3 * peaks, strict=True)
    )
    return replace(run, records=records), findings


def test_bars_of_every_case() -> None:
    (bars,) = of_kind(part("memory", transformer()), Bars)
    assert bars.axis == Axis("peak memory", "B")
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


def test_the_lead_is_what_the_measurement_says_of_itself() -> None:
    assert part("memory", transformer()).lead.startswith("Memory at the highest point of a step;")


def test_a_peak_that_is_no_number_has_no_share() -> None:
    marks = [mark for bars in of_kind(part("memory", strange()), Bars) for _, group in bars.groups for mark in group]
    assert {mark.hint for mark in marks if mark.value == float("inf")} == {"inf TiB"}
