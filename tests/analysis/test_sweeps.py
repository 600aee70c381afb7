"""Which cases make a sweep, and what each of its precisions is held against."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.break_even import SweptMode, Told, sweeps_of, swept_modes
from fp8bench.analysis.findings import find
from fp8bench.model import Label, Params, Record, Status, Support, Work
from tests.runs import EMULATED, NATIVE, case, samples


def params(**values: object) -> Params:
    return tuple(values.items())  # type: ignore[arg-type]


def test_a_number_that_varies_alone_is_a_sweep() -> None:
    """Smallest first; what else there is must be the same, and two sizes are none."""
    settings = [params(m=m, n=64, product="forward") for m in (64, 16, 32)]
    settings += [params(m=16, n=8, product="forward"), params(m=16, n=64, product="other"), params(m=32, n=64)]
    (sweep,) = sweeps_of(settings)
    assert (sweep.axis, sweep.held, sweep.places) == (
        "m", params(n=64, product="forward"), ((16, 1), (32, 2), (64, 0)),
    )  # fmt: skip


def test_one_product_may_be_in_three_sweeps() -> None:
    """That of the base."""
    sides = [(m, 8, 8) for m in (4, 8, 16)] + [(8, n, 8) for n in (4, 16)] + [(8, 8, k) for k in (4, 16)]
    found = sweeps_of([params(m=m, n=n, k=k) for m, n, k in sides])
    assert {sweep.axis for sweep in found} == set("mnk") and all(len(sweep.places) == 3 for sweep in found)


def test_squares_texts_and_flags_are_none() -> None:
    """Sides that vary together say nothing of one of them."""
    assert sweeps_of([params(m=m, n=m) for m in (1, 2, 4)]) == []
    assert sweeps_of([params(m=m) for m in ("1", "2", "4")]) == []
    assert sweeps_of([params(m=True), params(m=False), params(m=2), params(m=3)]) == []


def group(size: int, fp8: int, support: Support = NATIVE) -> list[Told]:
    """fp32 takes 900 us, bf16 400, fp8 so many: told with what their samples say."""
    records = [
        Record(case("gemm", mode, {"m": size}), how, Status.OK, Work(flops=1e9), mode == "fp32",
               timing=samples(("gemm",), (took,), rounds=24),
               control=samples(("gemm",), (took,), rounds=24) if mode == "fp32" else None)
        for mode, how, took in (("fp32", NATIVE, 900), ("bf16", NATIVE, 400), ("fp8", support, fp8))
    ]  # fmt: skip
    return list(zip(records, find(records, {}), strict=True))


def modes(*groups: list[Told]) -> dict[str, SweptMode]:
    (sweep,) = sweeps_of([one[0][0].case.params for one in groups])
    return {one.mode: one for one in swept_modes(sweep, groups)}


def test_low_precision_is_held_against_bf16_in_the_same_rounds() -> None:
    """Whatever the reference is; bf16 itself is held against that."""
    found = modes(group(16, 800), group(32, 500), group(64, 300), group(128, 200))
    assert (found["bf16"].against, found["fp8"].against) == ("fp32", "bf16") and "fp32" not in found
    assert [round(one.ratio.point, 2) for one in found["fp8"].points] == [2.0, 1.25, 0.75, 0.5]
    made = found["fp8"].found
    assert made is not None and [32 < one.low < one.size < one.high < 64 for one in made.crossings] == [True]
    assert [round(one.ratio.point, 2) for one in found["bf16"].points] == [0.44] * 4


def test_without_a_native_bf16_it_is_held_against_the_reference() -> None:
    groups = [[one for one in group(size, 300) if one[0].case.mode != "bf16"] for size in (16, 32, 64)]
    assert modes(*groups)["fp8"].against == "fp32"


def test_an_emulation_has_no_speed() -> None:
    """On a CPU fp8 is emulated: refused, with the reason, at each size."""
    found = modes(*(group(size, 100, EMULATED) for size in (16, 32, 64)))["fp8"]
    assert found.points == () and found.found is None
    assert found.refused == tuple((size, "emulated here: no speed") for size in (16, 32, 64))


def test_a_time_that_gets_no_verdict_gives_no_point() -> None:
    """A hard label of the case, of what it is held against, or a failure: two sizes are left, and make no curve."""
    first, second, third, fourth = (group(size, 300) for size in (16, 32, 64, 128))
    first[2] = (first[2][0], replace(told(first[2]), hard=(Label.NO_WORK,)))
    second[1] = (second[1][0], replace(told(second[1]), hard=(Label.AA_FAILED,)))
    third[2] = (
        replace(third[2][0], status=Status.FAILED, reason="out of memory"),
        replace(told(third[2]), best_seconds=None),
    )
    found = modes(first, second, third, fourth)["fp8"]
    assert found.refused == ((16, "labelled no-work"), (32, "labelled aa-failed"), (64, "out of memory"))
    assert [one.size for one in found.points] == [128] and found.found is None


def test_cases_that_sat_apart_have_no_rounds_in_common() -> None:
    groups = [group(size, 300) for size in (16, 32, 64)]
    groups[0][2] = (replace(groups[0][2][0], paired_with=samples(("gemm",), (900,))), groups[0][2][1])
    assert modes(*groups)["fp8"].refused == ((16, "no rounds in common with bf16"),)


def test_a_doubted_ratio_counts_and_is_named() -> None:
    groups = [group(size, 300) for size in (16, 32, 64)]
    groups[1][2] = (groups[1][2][0], replace(told(groups[1][2]), labels=(Label.NOISY,), floor=None))
    found = modes(*groups)["fp8"]
    assert len(found.points) == 3 and 32 in found.doubted


def told(one: Told):  # type: ignore[no-untyped-def]
    assert one[1] is not None
    return one[1]
