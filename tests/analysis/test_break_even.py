"""Which cases make a sweep, and from which size a precision begins to pay: planted curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from fp8bench.analysis.break_even import (
    BreakEven,
    JudgedCase,
    SweptMode,
    TimeRatioAtSize,
    break_even,
    find_sweeps,
    iterate_swept_modes,
)
from fp8bench.analysis.findings import find
from fp8bench.model import Interval, Label, Params, Record, Status, Support, Work
from tests.counts import counts, for_each
from tests.runs import EMULATED, NATIVE, case, samples

SIZES = tuple(1 << power for power in range(4, 15))
# log(speed-up) over log2(size).
Curve = Callable[[float], float]


def saturating(octaves: float) -> float:
    """Bound by casts at small sizes, 30% faster at large ones."""
    return 0.3 * math.tanh((octaves - 9.7) / 2) + 0.02


def hump(octaves: float) -> float:
    """Faster only at middle sizes."""
    return 0.3 - 0.05 * (octaves - 9.3) ** 2


def sized(
    curve: Curve, sizes: Sequence[int] = SIZES, noise: float = 0.003, seed: int | None = None
) -> list[TimeRatioAtSize]:
    """Ratios with 99% intervals of that standard error; a seed adds noise of that size."""
    draws = np.zeros(len(sizes)) if seed is None else np.random.default_rng(seed).normal(0, noise, len(sizes))
    points = [-curve(math.log2(size)) + float(draw) for size, draw in zip(sizes, draws, strict=True)]
    ends = [[math.exp(point + side * 2.576 * noise) for side in (0, -1, 1)] for point in points]
    return [TimeRatioAtSize(size, Interval(*end, 0.99)) for size, end in zip(sizes, ends, strict=True)]


def found(points: Sequence[TimeRatioAtSize]) -> BreakEven:
    made = break_even(points)
    assert made is not None
    return made


def true_sizes(curve: Curve) -> list[float]:
    octaves = np.linspace(4, 14, 20_001)
    values = np.array([curve(float(one)) for one in octaves])
    return [float(2 ** octaves[at]) for at in np.flatnonzero(np.diff(np.sign(values)))]


def test_one_crossing_is_found_between_two_sizes() -> None:
    made = found(sized(saturating)[::-1])
    (crossing,) = made.crossings
    (truth,) = true_sizes(saturating)
    assert crossing.becomes_faster and crossing.low < truth < crossing.high
    assert crossing.size == pytest.approx(truth, rel=0.05) and crossing.high / crossing.low < 1.25
    assert [stretch.is_faster for stretch in made.stretches] == [False, None, True]
    assert (made.stretches[0].first_size, made.stretches[-1].last_size) == (16, 1 << 14)
    assert made.within_noise == () and made.level == 0.99


def test_a_precision_may_be_faster_in_the_middle_or_after_a_leap() -> None:
    first, last = found(sized(hump)).crossings
    assert first.becomes_faster and not last.becomes_faster
    assert [one.low < truth < one.high for one, truth in zip((first, last), true_sizes(hump), strict=True)] == [
        True
    ] * 2
    made = found(sized(lambda octaves: -0.004 if octaves == 9 else 0.2))
    assert made.crossings == () and made.within_noise == (512,)
    assert [stretch.is_faster for stretch in made.stretches] == [True, None, True]
    assert 256 <= made.stretches[1].first_size < 512 < made.stretches[1].last_size <= 1024
    made = found(sized(lambda octaves: min(0.0, 0.1 * (octaves - 12))))  # beyond the last size nothing is known
    assert [stretch.is_faster for stretch in made.stretches] == [False, None] and made.crossings == ()
    # From some size on the library uses another kernel, which a straight line cannot predict.
    (crossing,) = found(sized(lambda octaves: 0.3 if octaves > 9.1 else -0.1)).crossings
    assert (crossing.low, crossing.high) == (512, 1024)


@for_each(("speed", "pays"), [(1.5, True), (0.7, False), (1.001, None)])
def test_a_precision_may_be_faster_everywhere_or_nowhere(speed: float, pays: bool | None) -> None:
    made = found(sized(lambda _: math.log(speed)))
    assert made.crossings == () and [stretch.is_faster for stretch in made.stretches] == [pays]
    assert made.within_noise == (SIZES if pays is None else ())


@for_each(("noise", "curve"), [(0.001, saturating), (0.01, saturating), (0.03, saturating), (0.01, hump)])
@counts(60, 1000)
def test_intervals_hold_the_truth_in_99_of_100(noise: float, curve: Curve, count: int) -> None:
    truths = true_sizes(curve)
    drawn = [found(sized(curve, noise=noise, seed=seed)).crossings for seed in range(count)]
    held = [
        len(own) == len(truths) and all(one.low <= truth <= one.high for one, truth in zip(own, truths, strict=True))
        for own in drawn
    ]
    assert sum(held) >= count - max(1, count // 100)


def test_two_sizes_are_not_a_curve() -> None:
    assert break_even(sized(saturating, SIZES[:2])) is None
    points = sized(saturating)
    low = points[3]._replace(ratio=Interval(1.2, 1.1, 1.3, 0.0))
    assert found([*points[:3], low, *points[4:]]).level == 0.0


def params(**values: object) -> Params:
    return tuple(values.items())  # type: ignore[arg-type]


def test_settings_that_differ_in_one_number_form_a_sweep() -> None:
    settings = [params(m=m, n=64, product="forward") for m in (64, 16, 32)]
    settings += [params(m=16, n=8, product="forward"), params(m=16, n=64, product="other"), params(m=32, n=64)]
    (sweep,) = find_sweeps(settings)
    assert (sweep.axis, sweep.fixed_params, sweep.indexed_sizes) == (
        "m",
        params(n=64, product="forward"),
        ((16, 1), (32, 2), (64, 0)),
    )
    sides = [(m, 8, 8) for m in (4, 8, 16)] + [(8, n, 8) for n in (4, 16)] + [(8, 8, k) for k in (4, 16)]
    found = find_sweeps([params(m=m, n=n, k=k) for m, n, k in sides])
    assert {sweep.axis for sweep in found} == set("mnk") and all(len(sweep.indexed_sizes) == 3 for sweep in found)
    assert find_sweeps([params(m=m, n=m) for m in (1, 2, 4)]) == []
    assert find_sweeps([params(m=m) for m in ("1", "2", "4")]) == []
    assert find_sweeps([params(m=True), params(m=False), params(m=2), params(m=3)]) == []


def group(size: int, fp8: int, support: Support = NATIVE) -> list[JudgedCase]:
    """fp32 takes 900 us, bf16 400 us, fp8 `fp8` us; includes intervals from samples."""
    records = [
        Record(
            case("gemm", mode, {"m": size}),
            how,
            Status.OK,
            Work(flops=1e9),
            mode == "fp32",
            timing=samples(("gemm",), (took,), rounds=24),
            control=samples(("gemm",), (took,), rounds=24) if mode == "fp32" else None,
        )
        for mode, how, took in (("fp32", NATIVE, 900), ("bf16", NATIVE, 400), ("fp8", support, fp8))
    ]
    return list(zip(records, find(records, {}), strict=True))


def modes(*groups: list[JudgedCase]) -> dict[str, SweptMode]:
    (sweep,) = find_sweeps([one[0][0].case.params for one in groups])
    return {one.mode: one for one in iterate_swept_modes(sweep, groups)}


def test_low_precisions_are_compared_with_bf16() -> None:
    found = modes(group(16, 800), group(32, 500), group(64, 300), group(128, 200))
    assert (found["bf16"].base_mode, found["fp8"].base_mode) == ("fp32", "bf16") and "fp32" not in found
    assert [round(point.ratio.point, 2) for point in found["fp8"].points] == [2.0, 1.25, 0.75, 0.5]
    made = found["fp8"].break_even
    assert [32 < place.low < place.size < place.high < 64 for place in made.crossings] == [True]
    assert [round(point.ratio.point, 2) for point in found["bf16"].points] == [0.44] * 4


def test_sizes_without_a_ratio_have_a_reason() -> None:
    groups = [[one for one in group(size, 300) if one[0].case.mode != "bf16"] for size in (16, 32, 64)]
    assert modes(*groups)["fp8"].base_mode == "fp32"
    found = modes(*(group(size, 100, EMULATED) for size in (16, 32, 64)))["fp8"]
    assert found.points == () and found.break_even is None
    assert found.missing_ratios == tuple((size, "emulated on this device, so it has no speed") for size in (16, 32, 64))
    groups = [group(size, 300) for size in (16, 32, 64)]
    groups[0][2] = (replace(groups[0][2][0], paired_with=samples(("gemm",), (900,))), groups[0][2][1])
    assert modes(*groups)["fp8"].missing_ratios == ((16, "no rounds in common with bf16"),)
    groups = [group(size, 300) for size in (16, 32, 64)]
    groups[1][2] = (groups[1][2][0], replace(told(groups[1][2]), labels=(Label.NOISY,), floor=None))
    found = modes(*groups)["fp8"]
    assert len(found.points) == 3 and 32 in found.doubted_sizes


def test_a_case_without_a_verdict_gives_no_point() -> None:
    first, second, third, fourth = (group(size, 300) for size in (16, 32, 64, 128))
    first[2] = (first[2][0], replace(told(first[2]), hard=(Label.NO_WORK,)))
    second[1] = (second[1][0], replace(told(second[1]), hard=(Label.AA_FAILED,)))
    third[2] = (
        replace(third[2][0], status=Status.FAILED, reason="out of memory"),
        replace(told(third[2]), best_seconds=None),
    )
    found = modes(first, second, third, fourth)["fp8"]
    assert found.missing_ratios == ((16, "labelled no-work"), (32, "labelled aa-failed"), (64, "out of memory"))
    assert [point.size for point in found.points] == [128] and found.break_even is None


def told(one: JudgedCase):  # type: ignore[no-untyped-def]
    assert one[1] is not None
    return one[1]
