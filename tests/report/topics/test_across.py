"""Runs side by side: only like with like, speed-ups without a verdict, and no speed for emulations."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import DeviceFacts, Label, Level, Support, Verdict
from fp8bench.report.elements import Bars, Table, Text, Tone
from fp8bench.report.topics.history import NO_VERDICT
from tests.materials import Made, nothing, of_kind, part, recased
from tests.runs import gemm, judged, run_of, transformer

FASTER = (Verdict.FASTER, 0.5)


def elsewhere(made: Made, name: str = "NVIDIA H200", slower: float = 1.0) -> Made:
    """The same run on another device, every time so many times as long."""
    run, findings = recased(made, lambda case: replace(case, device="cuda:0"))
    moved = {
        key: replace(one, best_seconds=one.best_seconds and one.best_seconds * slower) for key, one in findings.items()
    }
    gpu = DeviceFacts("cuda", 0, name, 139 << 30, "2.13.0")
    return run_of([*run.records], id="other", devices=(gpu,)), moved


def rows(*made: Made) -> list[list[str]]:
    (table,) = of_kind(part("across", *made), Table)
    return [[field.text for field in row] for row in table.rows]


def test_the_chart_claims_nothing() -> None:
    made = judged(FASTER, FASTER), elsewhere(judged(FASTER, (*FASTER, Label.NOISY)), slower=0.5)
    (chart,) = of_kind(part("across", *made), Bars)
    assert [heading for heading, _ in chart.groups] == ["gemm m=64 fp32", "gemm m=64 bf16", "gemm m=128 fp32",
                                                        "gemm m=128 bf16"]  # fmt: skip
    marks = [found[0] for _, found in chart.groups]
    assert [(mark.label, mark.value, mark.low, mark.tone) for mark in marks] == [
        ("NVIDIA H200", 2.0, None, Tone.PLAIN), ("NVIDIA H200", 2.0, None, Tone.PLAIN),
        ("NVIDIA H200", 2.0, None, Tone.PLAIN), ("NVIDIA H200", 2.0, None, Tone.DOUBT),
    ]  # fmt: skip
    assert all(mark.hint.startswith(NO_VERDICT) for mark in marks) and "noisy" in marks[3].hint
    assert chart.description == f"NVIDIA H200 against AMD EPYC 7B13, in 4 cases: from 2.00x to 2.00x; {NO_VERDICT}."


def test_an_emulation_has_a_cost_and_no_ratio() -> None:
    run, findings = gemm()
    native = tuple(
        replace(one, support=Support(Level.NATIVE, "")) if one.case.precision == "fp8" else one for one in run.records
    )
    made = (run, findings), elsewhere((replace(run, records=native), findings))
    emulated = [row for row in rows(*made) if row[0] == "fp8"]
    assert [row[-1] for row in emulated] == ["-", "-"]
    (table,) = of_kind(part("across", *made), Table)
    first = next(row for row in table.rows if row[0].text == "fp8")
    assert first[3].tone is Tone.DOUBT and first[3].hint == "emulated: cost, not speed"
    (chart,) = of_kind(part("across", *made), Bars)
    assert not [heading for heading, _ in chart.groups if "fp8" in heading]


def test_only_like_with_like() -> None:
    """Another version of a workload, or another parameter, is another case."""
    run, findings = recased(judged(FASTER), lambda case: replace(case, version="2"))
    assert part("across", judged(FASTER), (replace(run, id="2"), findings)).elements == (
        Text("No case was timed in more than one of these runs."),
    )
    found = part("across", judged(FASTER, FASTER), elsewhere(judged(FASTER)))
    assert Text("2 timed cases are in one of them only.") in found.elements


def test_the_order_of_parameters_does_not_matter() -> None:
    run, findings = recased(judged(FASTER), lambda case: replace(case, params=case.params[::-1]))
    assert len(rows(judged(FASTER), (replace(run, id="2"), findings))) == 2


def test_three_runs_are_held_against_the_first() -> None:
    made = judged(FASTER), elsewhere(judged(FASTER), "B200", 0.5), elsewhere(judged(FASTER), "A100", 2.0)
    assert [row[3:] for row in rows(*made)] == [
        ["1.00 ms", "500 us", "2.00x", "2.00 ms", "0.500x"],
        ["500 us", "250 us", "2.00x", "1.00 ms", "0.500x"],
    ]


def test_a_case_that_the_first_run_lacks_has_no_ratio() -> None:
    made = judged(FASTER), elsewhere(judged(FASTER, FASTER), "B200"), elsewhere(judged(FASTER, FASTER), "A100")
    assert rows(*made)[2] == ["fp32", "gemm", "m=128", "-", "1.00 ms", "-", "1.00 ms", "-"]


def test_devices_of_one_run_are_columns_too() -> None:
    run, findings = judged(FASTER)
    gpu, moved = elsewhere((run, findings))
    both = run_of([*run.records, *gpu.records], id="both", devices=(*run.devices, *gpu.devices))
    (table,) = of_kind(part("across", (both, findings | moved), transformer()), Table)
    both_devices = "AMD EPYC 7B13, NVIDIA H200"
    titles = [column.title for column in table.columns]
    assert titles[3:6] == [f"{both_devices} cpu", f"{both_devices} cuda:0", "speed-up"]
    assert [[field.text for field in row][3:6] for row in table.rows] == [
        ["1.00 ms", "1.00 ms", "1.00x"], ["500 us", "500 us", "1.00x"],
    ]  # fmt: skip


def test_runs_without_a_timed_case_have_nothing_in_common() -> None:
    assert part("across", nothing(), nothing()).elements == (Text("No case was timed in more than one of these runs."),)
