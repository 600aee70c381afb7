"""Memory by what it is for, and the largest batches: the tables of the terminal, sentences, rows, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp8bench.model import Capacity, Measurement, MemoryUse, PhaseMemory, Provenance, Record, Status
from fp8bench.report.data.run import tidy_rows
from fp8bench.report.elements import Stacks, Table
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.memory import capacity_tables, device_peak_ratio, list_phases_at_peak, peak_ratio
from fp8bench.report.topics.memory import memory_table as memory_of
from fp8bench.report.topics.own_batch import LargestBatch, own_batch_table
from tests.materials import Made, built, of_kind, part, told
from tests.runs import EMULATED, NATIVE, case, gemm, memory, render, render_whole, run_of, transformer
from tests.told_before import Told, as_before

MIB = 1 << 20
FP32 = {"weights": 40 * MIB, "gradients": 40 * MIB, "optimizer": 80 * MIB, "activations": 140 * MIB}
FP16 = {
    "weights": 40 * MIB,
    "low_precision_weights": 20 * MIB,
    "gradients": 40 * MIB,
    "optimizer": 80 * MIB,
    "activations": 20 * MIB,
}
FP8 = {
    "weights": 40 * MIB,
    "low_precision_weights": 40 * MIB,
    "optimizer": 80 * MIB,
    "activations": 70 * MIB,
    "low_precision_activations": 70 * MIB,
    "workspace": 45 * MIB - 9,
    "other": 9,
}
GIB = 1 << 30


def use(roles: Mapping[str, int], phases: Sequence[tuple[str, int]] = (), **more: object) -> MemoryUse:
    """Memory by these roles, with the peak in the first of these phases."""
    peak = sum(roles.values())
    known = tuple(PhaseMemory(phase, peak if not n else size) for n, (phase, size) in enumerate(phases))
    return replace(MemoryUse(peak, tuple(roles.items()), known), **more)  # type: ignore[arg-type]


def with_uses(*uses: MemoryUse) -> Made:
    """A transformer run with these memory uses: bf16 the reference, fp16, and emulated fp8."""
    run, findings = transformer()
    records = []
    for record, own_use in zip(run.records, uses, strict=True):
        others = (measurement for measurement in record.measurements if measurement.metric != "peak_memory")
        records.append(replace(record, memory=own_use, measurements=(*others, memory(own_use.peak))))
    return replace(run, records=tuple(records)), findings


def usual() -> Made:
    gemm_phase = [("gemm", 0), ("cast", 5 * MIB)]
    return with_uses(
        use(FP32, gemm_phase, resident=600 * MIB),
        use(FP16, gemm_phase),
        use(FP8, [("cast", 0), ("elementwise", 60 * MIB)], resident=700 * MIB),
    )


def on_device(size: int) -> Measurement:
    return Measurement("device_peak_memory", "B", (float(size),), Provenance.DERIVED)


def on_a_device(size: int) -> Made:
    """A transformer run whose emulated case would take this much on a device."""
    run, findings = usual()
    *others, fp8 = run.records
    return replace(run, records=(*others, replace(fp8, measurements=(*fp8.measurements, on_device(size))))), findings


def table_of(made: Made) -> list[str]:
    return told(memory_of(group_into_panels(*made)[0]), 140)


@as_before
def test_memory() -> Told:
    yield "what a device would hold stands beside the peak of emulated cases", table_of(on_a_device(150 * MIB))
    yield "and in the answer", render(*on_a_device(150 * MIB))
    yield "where nobody can say there is no column", table_of(usual())
    far = with_uses(use(FP32), use({"weights": MIB, "data": 3 * MIB}), use(FP8))
    yield "cases far apart are shares, with their sizes in their names", of_kind(part("memory", far), Stacks)
    unknown = with_uses(use(FP32), MemoryUse(200 * MIB, why="nobody listened"), use(FP8))
    yield (
        "a case of which nobody knows is all rest",
        [*of_kind(part("memory", unknown), Stacks), *table_of(unknown)],
    )


def test_the_phase_of_the_highest_point_is_the_innermost() -> None:
    """Memory held when a product ends is still held by the surrounding phase."""
    phases = [PhaseMemory(name, 10) for name in ("unattributed", "elementwise", "gemm", "cast")]
    assert list_phases_at_peak(MemoryUse(10, phases=(*phases, PhaseMemory("data_load", 3))))[0] == "cast"
    assert list_phases_at_peak(MemoryUse(10)) == []


def fits(
    batch: int | None, why: str = "tensors need 1.63 MiB more", limit: int | None = GIB, axis: str = "batch"
) -> Capacity:
    beyond = None if batch is None else batch + 1
    return Capacity(axis, limit, batch, 1, 192 * (batch or 0), GIB - 7 if batch else None, beyond, why, 5)


def made(*capacities: tuple[str, Capacity | None], **sizes: int) -> Made:
    """One group: the first is the reference; fp8 is emulated."""
    records = [
        Record(
            case("transformer", mode, {"size": "nano", "batch": 2, **sizes}),
            EMULATED if mode == "fp8" else NATIVE,
            Status.OK,
            is_reference=number == 0,
            capacity=own_capacity,
        )
        for number, (mode, own_capacity) in enumerate(capacities)
    ]
    return run_of(records), {}


USUAL = made(("fp32", fits(376)), ("bf16", fits(606, "tensors need 963 KiB more")), ("fp8", fits(288)))


def lines(case: Made, width: int = 120) -> list[str]:
    return told([element for panel in group_into_panels(*case) for element in capacity_tables(panel)], width)


@as_before
def test_largest_batches() -> Told:
    derived = made(("fp32", fits(376)), ("bf16", fits(606)), ("fp8", replace(fits(288), on_device=1203)))
    yield "the batch of a device is derived beside that of an emulation", lines(derived)
    none = made(("fp32", fits(0, "tensors need 3.00 MiB more")), ("bf16", fits(None, "a batch of 4 ended it: no")))
    yield "no batch at all and no answer are told apart, and compared with nothing", lines(none)
    yield "an axis that ends first says so", lines(made(("fp32", replace(fits(4096, ""), beyond=None))))
    tokens = made(("fp32", fits(64, limit=None, axis="tokens")), ("bf16", fits(96, limit=None, axis="tokens")))
    yield "the device's own end, and an axis of another name", lines(tokens)
    yield "an emulated reference compares with nothing", lines(made(("fp8", fits(10)), ("bf16", fits(20))))
    first, second = (made(("fp32", fits(n)), ("bf16", fits(2 * n)), sequence=n) for n in (64, 128))
    other = made(("fp32", None), ("bf16", None), sequence=64, batch=8)[0].records
    groups = run_of([*first[0].records, *other, *second[0].records]), first[1]
    yield "groups are told apart by all but their batch", lines(groups)


def test_who_did_not_ask_for_a_batch_sees_nothing() -> None:
    assert lines(gemm()) == [] and built("memory", gemm()) is None
    assert "largest batch" not in render_whole(*gemm())
    assert not [row for row in tidy_rows(*gemm()) if str(row["metric"]).startswith("max_batch")]


def test_a_native_case_is_not_compared_with_the_cost_of_emulation() -> None:
    """With an emulated reference the bytes on a device count, compared only with others on a device."""
    run, findings = on_a_device(100 * MIB)
    bf16, *others = run.records
    reference = replace(bf16, support=EMULATED, measurements=(*bf16.measurements, on_device(200 * MIB)))
    (panel,) = group_into_panels(replace(run, records=(reference, *others)), findings)
    cases = {case.mode: case for case in panel.named_cases}
    assert peak_ratio(cases["fp16"]) is None
    assert (device_peak_ratio(cases["bf16"]), device_peak_ratio(cases["fp8"])) == (1.0, 0.5)


def test_each_precision_at_its_own_batch() -> None:
    """Next to the common batch, and at equal tokens per step, where bf16 accumulates two micro-batches."""
    search = replace(fits(16), tokens=4096, seconds=(9.0, 2.0, 2.0, 2.0, 9.0, 2.0, 2.0, 2.0))
    bf16 = LargestBatch("bf16", search, 1000.0, 0.5)
    fp16 = LargestBatch("fp16", replace(fits(32), tokens=8192, seconds=(2.0,) * 8), None, 0.5)
    assert (bf16.rate, fp16.rate, bf16.seconds) == (2048, 4096, 2.0)
    assert (bf16.compute_accumulated_rate(8192), fp16.compute_accumulated_rate(8192)) == (8192 / 3.5, 8192 / 2)
    table, _ = own_batch_table([bf16, fp16, LargestBatch("fp8", replace(fits(20), tokens=4096), None, None)])
    assert isinstance(table, Table) and [row[0].text for row in table.rows] == ["bf16", "fp16"]
    assert table.rows[0][-2].value == 1e9 / 2048 / 3600
