"""Vendors' peaks: read from the resource, found by a device's name, and held against what cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date

from fp8bench.analysis.datasheet import Datasheet, datasheet_of, datasheets, kind_of_path
from tests.counts import for_each

# How many times the products of the second a device does of the first, by how wide they are; and what may deviate.
RATIOS = {"fp16/bf16": 1.0, "bf16/tf32": 2.0, "fp8/bf16": 2.0, "fp6/fp8": 1.0, "fp4/fp8": 2.0}
ROUNDING = 0.02
# No vendor says more of operands with 2:4 structure than twice what it says of all others.
SPARSE = 2.0
# What has been quoted in the wrong place: (device, path) -> TFLOP/s.
MISQUOTED = {("H200", "tf32"): 312.0, ("H100", "tf32"): 312.0, ("A100", "fp8"): 624.0, ("H200", "fp8"): 3958.0}
# Twice the widest step that any device has had from one path to the next wider one.
FP32_TO_BF16 = 34.0


def faults(one: Datasheet) -> Iterator[str]:
    """What is wrong with an entry, in words."""
    yield from peak_faults(one)
    yield from told_faults(one)


def peak_faults(one: Datasheet) -> Iterator[str]:
    """Of its peaks beside each other."""
    for ratio, expected in RATIOS.items():
        above, below = ratio.split("/")
        if above in one.dense and below in one.dense:
            found = one.dense[above] / one.dense[below]
            if ratio not in one.exceptions and abs(found / expected - 1) > ROUNDING:
                yield f"{ratio} is {found:.2f}, not {expected:g}"
    for path, peak in one.sparse.items():
        if path not in one.dense:
            yield f"a sparse peak of {path} and no dense one"
        elif abs(peak / one.dense[path] / SPARSE - 1) > ROUNDING:
            yield f"sparse {path} is {peak / one.dense[path]:.2f} times dense"
    widest = one.dense.get("bf16", 0.0) / one.dense["fp32"] if "fp32" in one.dense else 0.0
    if widest > FP32_TO_BF16:
        yield f"bf16 is {widest:.0f} times fp32: a sparse peak?"
    for (name, path), peak in MISQUOTED.items():
        if name in one.name and abs(one.dense.get(path, 0.0) / 1e12 - peak) < 1:
            yield f"{peak:g} is no peak of {path} on {one.name}"


def told_faults(one: Datasheet) -> Iterator[str]:
    """Of its bandwidth, and of what it says of itself."""
    if not 1e11 < one.bandwidth < 1e13:
        yield f"a bandwidth of {one.bandwidth:g} B/s"
    if one.capacity is not None and not 1.5e10 < one.capacity < 1e12:
        yield f"a capacity of {one.capacity:g} B"
    if one.link is not None and not 2.5e10 < one.link < one.bandwidth:
        yield f"a link of {one.link:g} B/s"
    if not one.source or not date(2020, 1, 1) <= date.fromisoformat(one.date) <= date(2100, 1, 1):
        yield "no source, or no date"
    if not {*one.unverified} <= {"dense", "sparse", "bandwidth", "watts"}:
        yield f"unverified what? {one.unverified}"
    if not {*one.exceptions} <= {*RATIOS} or not all(one.exceptions.values()):
        yield "an exception without a rule or a reason"
    if not one.source.startswith("https://") and "dense" not in one.unverified:
        yield "a source that nobody can open, and verified"


@for_each("one", datasheets(), ids=lambda one: str(one.name))
def test_no_entry_is_impossible(one: Datasheet) -> None:
    assert not list(faults(one))


H200 = datasheet_of("NVIDIA H200")
assert H200 is not None


@for_each(
    ("dense", "fault"),
    [
        ({"tf32": 312e12}, "312 is no peak of tf32"),  # quoted for an H200: the A100's, sparse
        ({"tf32": 989e12}, "bf16/tf32 is 1.00"),  # sparse as dense, of one path
        ({"fp8": 3958e12}, "3958 is no peak of fp8"),
        ({path: 2 * peak for path, peak in H200.dense.items() if path != "fp32"}, "sparse tf32 is 1.00 times dense"),
        ({"fp8": 989.5e12}, "fp8/bf16 is 1.00"),
        ({"fp4": 1979e12}, "fp4/fp8 is 1.00"),
        ({"fp16": 1979e12}, "fp16/bf16 is 2.00"),
        ({"fp32": 6.7e12}, "bf16 is 148 times fp32"),
    ],
)
def test_lies_are_refused(dense: Mapping[str, float], fault: str) -> None:
    """Each is an entry that somebody has published."""
    assert H200 is not None
    assert any(one.startswith(fault) for one in faults(replace(H200, dense={**H200.dense, **dense})))


def test_sparse_peaks_of_all_paths_are_refused_even_alone() -> None:
    """Where an entry has no sparse peaks to hold them against."""
    assert H200 is not None
    doubled = {path: 2 * peak if path != "fp32" else peak for path, peak in H200.dense.items()}
    assert list(faults(replace(H200, dense=doubled, sparse={}, name="an H200")))


def test_bandwidths_are_bytes() -> None:
    """A device of 864 GB/s, and one whose entry is a thousand times too large."""
    assert H200 is not None
    assert list(faults(replace(H200, bandwidth=4.8e15))) and list(faults(replace(H200, bandwidth=4.8e9)))
    assert list(faults(replace(H200, capacity=141.0))) and list(faults(replace(H200, link=9e14)))


@for_each(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM, 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GB200", "GB200, one GPU"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA L40", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA Unheard Of", None),
        ("AMD EPYC", None),
    ],
)
def test_devices_by_their_names(device: str, name: str | None) -> None:
    found = datasheet_of(device)
    assert (found.name if found is not None else None) == name


def test_peaks_are_dense_and_in_flops() -> None:
    """By the words of a path or of a precision; what nobody says is None."""
    assert H200 is not None
    assert H200.peak("e4m3fn") == H200.peak("fp8-rowwise") == H200.peak("fp8") == 1979e12
    assert H200.peak("tf32") == 494.5e12 and H200.peak("bf16") == 989.5e12 and H200.bandwidth == 4.8e12
    assert H200.peak("nvfp4") is None and H200.peak("") is None and kind_of_path("int8") == ""
    assert H200.told("dense", "bandwidth") == "datasheet"
    unsure = datasheet_of("NVIDIA H200 NVL")
    assert unsure is not None and unsure.told("dense", "bandwidth") == "datasheet, unverified"
    assert unsure.told("bandwidth") == "datasheet"
