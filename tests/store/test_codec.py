"""Values to plain JSON and back."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench import model
from fp8bench.model import (
    Ack,
    Capacity,
    Case,
    Ceiling,
    Ceilings,
    Comparison,
    DeviceFacts,
    DeviceWatch,
    Direction,
    EnergyUse,
    EnergyWindow,
    Environment,
    Evidence,
    Fault,
    Figure,
    Finding,
    Fresh,
    GivenTensors,
    Group,
    HeldBlock,
    Interval,
    Label,
    LayerScale,
    Level,
    Limit,
    Measurement,
    MemoryCourse,
    MemoryRole,
    MemoryUse,
    Noise,
    OperatorTime,
    Overheads,
    Phase,
    PhaseMemory,
    Plan,
    PlannedCase,
    Point,
    Products,
    Provenance,
    Rate,
    Record,
    Replays,
    Request,
    Reruns,
    Resumption,
    Rotation,
    Run,
    Segments,
    Series,
    SlotSample,
    StaticScales,
    Status,
    StepEffect,
    Support,
    SustainedTurn,
    TensorStatistics,
    Timing,
    Trend,
    Verdict,
    Work,
)
from fp8bench.model.codec import Malformed, decode, encode
from fp8bench.model.consumed import PhaseEnergy
from fp8bench.model.ranks import FailedRank, Overlap, RankMemory, Scaling, Sent, Transfer
from fp8bench.model.run import OperationBits
from fp8bench.model.step import (
    Coverage,
    HeldProduct,
    Holder,
    OperatorCount,
    OtherProduct,
    PhaseCount,
    Share,
    ShareKind,
    Shares,
    SharesFrom,
    Tape,
)
from fp8bench.model.stopping import ClockLook, Settling
from tests.counts import for_each

CASE = Case(
    "gemm", (("m", 64), ("ratio", 0.5), ("product", "forward"), ("flag", True)), "fp8", "cuda:0", (("mlp", "bf16"),),
    "2", StaticScales(8, 100, 0.001, "a1b2", (("fp8", "up", "input", 1.5),)),
)  # fmt: skip
SUPPORT = Support(Level.EMULATED, "no hardware", "torchao 0.18.0")
TIMING = Timing(
    Segments((Phase.CAST, Phase.GEMM, "unattributed"), (0, 0, 1)),
    (SlotSample(0, ((1, 2, 3), (4, 5, 6)), 0.25, 0.125), SlotSample(1, ((7, 8, 9),), 0.5, 0.5, 0.0625, 0.25, 3, 0.01)),
    entries=(("gemm", 2), ("unattributed", 1)),
    varying=True,
    eager="--quick",
    fused=True,
    vector_bits=(256, 512),
)
MEASUREMENT = Measurement("product_error", "ratio", (0.5, math.inf, -math.inf), Provenance.DERIVED, "cast", "words")
STATISTICS = TensorStatistics("attn", "input", 640, 3.5, (("e4m3", 0.0, 0.25), ("e2m1", 0.5, 1.0)))
ENERGY = EnergyUse(
    "counter",
    (EnergyWindow(40, 1.25, 300.5, 11, 0.004, 1.98e9, 61.0, 4), EnergyWindow(1, 2.0, 3.0, 4)),
    81.5,
    82.0,
    "why",
    (PhaseEnergy("gemm", (EnergyWindow(1, 2.0, 3.0, 4),), "why"),),
    (700.0, 600.0),
)
SETTLING = Settling((ClockLook(0.5, 1.9e9, 61.0), ClockLook(1.0, None, None)), True, 30.0)
WATCH = DeviceWatch(
    7, 2.5, 0x44, (("thermal", 0.5),), 1.7e9, 1.2e9, 2.6e9, 83.0, "the memory clock is unknown", SETTLING
)
MEMORY = MemoryUse(
    300, ((MemoryRole.WEIGHTS, 200), (MemoryRole.WORKSPACE, 100)), (PhaseMemory("gemm", 300, 512),), 512, 1024, 2048,
    "why", 4096.0, (RankMemory(0, 300, ((MemoryRole.WEIGHTS, 300),)),), 150, "why",
    ((MemoryRole.WEIGHTS, 200),),
)  # fmt: skip
HELD = (HeldBlock(4096, 300, "gemm", True, True, True, True, (MemoryRole.WEIGHTS,)),)
COURSE_OF_MEMORY = MemoryCourse(300, HELD, MEMORY.phases, 512, "why", 150, HELD)
CAPACITY = Capacity("batch", 1 << 30, 376, 2, 72192, 1072641096, 378, "tensors need 1.6 MiB more", 5)
RATE = Rate(Limit.PRODUCT, "fp32", (1e11, 2e11), 6, (256, 256, 512), "why")
TAPE = Tape(
    (OperatorCount("gemm", "aten::mm", True, ("bf16[2,3]", "bf16[3,4]"), ("bf16[2,4]",), 5, None, 52, "bf16", 1),),
    (PhaseCount("gemm", 48, 52, 1, 5, (("bf16", 48),), (("bf16", 52),)),), 2, "compiled",
)  # fmt: skip
COVERAGE = Coverage(
    (Holder("a", "linear", (8, 4), (HeldProduct(2, 8, 4, 3, True),), 384, 1, True, "why", "shape", "K=4", ("b",)),),
    (OtherProduct("bmm", "attn", None, 2, "why", "w"),), 384, "the mean", ("not alike",),
)  # fmt: skip
SHARES = Shares((Share(ShareKind.GEMM, "blocks.0.mlp", True, 0.25, 3, "conv"),), 0.5, SharesFrom.KERNELS, 2)
TRANSFER, OVERLAP = Transfer(8.0, 2.0, 1.5, 1.75, True), Overlap((0.5,), (0.25,), (0.625,), (0.75, 0.5))
SENT, SCALING = Sent(1, "all_reduce", "uint8", 3, 24.5), Scaling((0.5, 0.25), (0.125,), (0.75,))
GIVEN = GivenTensors((4, 8), 2, -0.5, 64.25, 3)
RECORD = Record(
    CASE, SUPPORT, Status.OK, Work(1e9, 7, 3e6, 2e6, 1.5), True, "why", "trace", TIMING, TIMING, TIMING, False,
    (MEASUREMENT,), "time", (STATISTICS,), "gemm/a.json.gz", (OperatorTime("gemm", "aten::mm", 2.5, 0.5, True),),
    (LayerScale("blocks.0.mlp.up", "input", 3.5, 128.0, 2),), ENERGY, WATCH, MEMORY, CAPACITY, 0.125,
    Ceiling(1e12, 2e11, (RATE,), "H200"), Products(3, False, ("bfloat16",), 7, ("flash",), given=(GIVEN,)),
    StepEffect(False, "what was seen"),
    (SustainedTurn(25, (0.5, 0.25), SETTLING, 1.7e9, 650.0),), Fresh(TIMING, TIMING, TIMING, 3),
    Rotation(4, 1 << 20), Replays(TIMING, "why"), TAPE, COVERAGE, SHARES, TRANSFER,
    OVERLAP, (SENT,), SCALING, FailedRank(1, 2, "slot", "gemm", 21, 0.5), 1 << 40, Reruns(0.5, 3, 7),
    (Interval(1.5, 1.0, 2.0, 0.99),),
)  # fmt: skip
FACTS = DeviceFacts(
    "cuda", 1, "H200", 1 << 37, "2.13.0", (9, 0), "13.0", None, "sm_90", "GPU-0", "0:1:0", "",
    (("torchao", "0.18.0"),), True, 60 << 20, 1,
)  # fmt: skip
REQUEST = Request(
    "gemm", ("fp8",), ("cuda:1",), "bf16", (("shape", ("64", "1x2x3")),), (("mlp", "bf16"),), "file", True, 2.5, 3, 4,
    5, ("module",), True, 12.5, True, "traces", 8, 100, 0.5, False, "step", True, 1 << 30, "torch", 2.5, True, True,
    counters=True,
)  # fmt: skip
PLAN = Plan(
    (Group((PlannedCase(CASE, SUPPORT, Work(1.0, 2), "skip"), PlannedCase(CASE, SUPPORT, Work())), 1),), ("note",)
)
RESUMPTION = Resumption("2026-01-01T01:00:00+00:00", "fp8bench suite --resume abc", Environment({"load": 1.5}))
RUN = Run(
    "abc", "2026-01-01T00:00:00+00:00", "fp8bench suite gemm", REQUEST, PLAN,
    Environment({"a": None, "b": 1, "c": 0.5, "d": "text", "e": True}), (FACTS,),
    (("cpu", Overheads(1e-7, 2e-7, 3e-8, None)), ("cuda:1", Overheads(1.0, 2.0, 3.0, 4.0))),
    (RECORD, Record(CASE, SUPPORT, Status.FAILED, reason="crash")), "path", True, ("line 3",), ("a note",),
    (RESUMPTION,), "asv", "8f3a2c1d/4",
    (OperationBits("cpu", "float32", "product", ("0a", "0b")),), 12.5,
)  # fmt: skip
FINDING = Finding(
    CASE, Verdict.SLOWER, 1.0, 1.5, 0.1, Interval(1.1, 1.05, 1.2, 0.99), 1.2, 0.01, (("gemm", 0.5),), ("cast",),
    (Label.NOISY, Label.DRIFT), "why",
)  # fmt: skip
SERIES = Series("gemm.Gemm.track_time", "gemm", "time", "seconds", ("dtype", "n"), (("fp8",), (512, "1x2x3")), "1.1")
POINT = Point(SERIES.name, ("fp8", 512), "1.1", (0.5, 0.25), Status.FAILED, "why", True)
FIGURE = Figure("66fd6b5c", 1767268800000, "1.1", 2, 48, 0.5, 0.25, None, True, Status.SKIPPED, "why")
COURSE = Trend(SERIES, ("fp8", 512), {"machine": "box", "ram": None}, "/venv/bin/python", (FIGURE,))
COMPARISON = Comparison(
    CASE.id, "gemm", "time", "s", Direction.WORSE, Evidence.HISTORY, 1.0, 1.5, Interval(1.5, 1.4, 1.6, 0.99), 0.001,
    ("noisy",), "why", "66fd6b5c", "0a1b2c3d", True,
)  # fmt: skip
ACK = Ack(
    "1a2b", SERIES.name, ("fp8", 512), "box", "/venv/bin/python", "1.1", Direction.WORSE, "66fd6b5c", "0a1b2c3d", 1.0,
    1.5, "2026-01-05T12:00:00+00:00", "why",
)  # fmt: skip
VALUES: list[Any] = [
    SHARES, *SHARES.parts, TRANSFER, OVERLAP, SENT, SCALING, RECORD.failed_rank, MEMORY.ranks[0], RUN, RECORD, PLAN,
    REQUEST, FACTS, TIMING, MEASUREMENT, STATISTICS, FINDING, CASE, SUPPORT, Work(), RESUMPTION,
    RUN.environment,
    Overheads(0.1, 0.2, 0.3), Interval(1, 2, 3, 0.99), Segments((), ()), SlotSample(0, (), 0.0, 0.0),
    PLAN.groups[0], PLAN.groups[0].cases[0], SERIES, POINT, FIGURE, COURSE, Fault("path", "what", "remedy", False),
    COMPARISON, ACK,
    RECORD.operators[0], RECORD.scales[0], CASE.static, ENERGY, ENERGY.windows[1], ENERGY.phases[0], WATCH, MEMORY,
    MEMORY.phases[0],
    CAPACITY, COURSE_OF_MEMORY, COURSE_OF_MEMORY.held[0], RECORD.ceiling, RECORD.products, RECORD.reruns, GIVEN,
    Ceilings((RATE,), "2026-01-01T00:00:00+00:00", (("threads", 1), ("driver", "590")), "H200"), RECORD.effect,
    Noise(0.01, 3, 2, 1), RECORD.sustained[0], RECORD.fresh,
    RECORD.rotation, RECORD.replays, RATE, TAPE, TAPE.operators[0], TAPE.phases[0], SETTLING, SETTLING.looks[0],
]  # fmt: skip


def there_and_back(value: Any) -> Any:
    return decode(type(value), json.loads(json.dumps(encode(value), allow_nan=False)))


@for_each("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_survives_the_trip(value: Any) -> None:
    """Equal, and with the same types all the way down."""
    again = there_and_back(value)
    assert again == value
    assert encode(again) == encode(value)
    assert hash(again) == hash(value) if not isinstance(value, Environment | Resumption | Run | Trend) else True


def test_every_dataclass_of_the_model_is_among_them() -> None:
    """A value added later is tested on the day it is added."""
    known = {type(value) for value in VALUES}
    missing = [name for name in model.__all__ if is_dataclass(kind := getattr(model, name)) and kind not in known]
    assert not missing


def test_the_full_run_leaves_no_field_at_its_default() -> None:
    """Else the trip would prove nothing for that field."""
    for value in (RUN, REQUEST, RECORD, MEASUREMENT, TIMING):
        at_default = {field.name for field in fields(value) if getattr(value, field.name) == field.default}
        # A request without isolation has no limit for a case, one without energy none of phases, and one of
        # several ranks no passes, one with scales of its own takes no other run's: see below.
        expected = {"isolation", "energy_of", "ranks", "scales_from", "known_scales"} if value is REQUEST else set()
        assert at_default == expected, (type(value), at_default)
    alone = Request("gemm", isolation=False, energy_of="phases")
    assert there_and_back(alone) == alone and not alone.isolation and alone.energy_of == "phases"
    scaled = Request("gemm", scales_from="a1b2", known_scales=(("fp8", "up", "input", 1.5),))
    assert there_and_back(scaled) == scaled and scaled.scales is not None and scaled.scales.source == "a1b2"
    several = Request("gemm", ranks=4, energy=False)
    assert there_and_back(several) == several and several.ranks == 4


@for_each("number", [math.inf, -math.inf])
def test_infinities_survive_as_their_names(number: float) -> None:
    """JSON has no word for them."""
    assert encode(number) == str(number)
    assert there_and_back(Work(flops=number)).flops == number


def test_nan_survives_as_its_name() -> None:
    """A gradient error may be NaN."""
    samples = there_and_back(Measurement("m", "ratio", (math.nan, 1.0))).samples
    assert math.isnan(samples[0]) and samples[1] == 1.0


def test_floats_survive_bit_by_bit() -> None:
    """JSON writes the shortest text that reads back as the same number."""
    samples = (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0)
    again = there_and_back(Measurement("m", "s", samples)).samples
    assert [one.hex() for one in again] == [one.hex() for one in samples]


def test_whole_numbers_where_floats_are_expected_become_floats() -> None:
    """Other programs write 1 for 1.0."""
    again = decode(Work, {"flops": 3})
    assert type(again.flops) is float and again.flops == 3.0


def test_unknown_keys_are_ignored_and_missing_ones_take_defaults() -> None:
    """A newer minor version's file still reads."""
    plain = encode(RECORD)
    plain["of_the_future"] = {"a": [1]}
    plain["case"]["colour"] = "red"
    del plain["measurements"], plain["control"]
    again = decode(Record, plain)
    assert again.case == RECORD.case and again.measurements == () and again.control is None


@for_each(
    ("path", "value", "place"),
    [
        (("case",), None, "Record.case"),
        (("case",), [], "Record.case"),
        (("case", "precision"), 8, "Record.case.precision"),
        (("case", "params"), "m=64", "Record.case.params"),
        (("case", "params", 0), ["m"], r"Record.case.params\[\]"),
        (("case", "params", 0, 1), None, r"Record.case.params\[\]"),
        (("status",), "great", "Record.status: 'great' is no Status"),
        (("support", "level"), [], "Record.support.level"),
        (("is_reference",), 1, "Record.is_reference"),
        (("work", "tokens"), 1.5, "Record.work.tokens"),
        (("work", "tokens"), True, "Record.work.tokens"),
        (("work", "flops"), "many", "Record.work.flops"),
        (("work", "flops"), True, "Record.work.flops"),
        (("work", "flops"), 10**400, "Record.work.flops"),
        (("timing", "slots", 0, "calls_ns"), [[1, 2.5]], r"Record.timing"),
        (("timing",), 3, "Record.timing"),
        (("measurements",), {}, "Record.measurements"),
    ],
)
def test_a_wrong_type_is_malformed_and_the_place_is_named(path: tuple[Any, ...], value: Any, place: str) -> None:
    """So that a person finds it in the line."""
    plain = encode(RECORD)
    inside = plain
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(Malformed, match=place):
        decode(Record, plain)


def test_a_missing_field_without_default_is_malformed() -> None:
    """There is nothing to put in its place."""
    plain = encode(RECORD)
    del plain["case"]["workload"]
    with pytest.raises(Malformed, match=r"Record\.case: .*workload"):
        decode(Record, plain)


def test_true_is_no_number_in_raw_samples() -> None:
    """bool is a kind of int in Python, not in a file."""
    plain = encode(SlotSample(0, ((1, 2),), 0.0, 0.0))
    plain["calls_ns"][0][1] = True
    with pytest.raises(Malformed):
        decode(SlotSample, plain)


def test_what_is_alike_is_one_value_and_what_is_equal_is_not_alike() -> None:
    """To Python 1, 1.0 and True are equal keys."""
    assert there_and_back(CASE) is there_and_back(CASE)
    for _ in range(2):
        assert type(decode(Work, {"flops": 1, "tokens": 1}).flops) is float
        for wrong in (True, 1.0, "1"):
            with pytest.raises(Malformed, match="tokens"):
                decode(Work, {"flops": 1, "tokens": wrong})
    assert str(decode(Work, {"flops": -0.0}).flops) == "-0.0" and str(decode(Work, {"flops": 0.0}).flops) == "0.0"


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["inf", "nan", "ok", "native"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(plain: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    inside = enumerate(plain) if isinstance(plain, list) else plain.items() if isinstance(plain, dict) else ()
    return [place for key, value in inside for place in [(*path, key), *places(value, (*path, key))]]


RUN_PLAIN = encode(RUN)
RUN_PLACES = places(RUN_PLAIN)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(RUN_PLACES), anything, st.booleans())
def test_whatever_is_changed_it_decodes_or_is_malformed(place: tuple[Any, ...], value: Any, remove: bool) -> None:
    """Never another exception: a run file comes from a disk, and disks err."""
    plain = copy.deepcopy(RUN_PLAIN)
    inside = plain
    for key in place[:-1]:
        inside = inside[key]
    if remove:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    with contextlib.suppress(Malformed):
        assert isinstance(decode(Run, plain), Run)


@settings(max_examples=100, deadline=None)
@given(anything)
def test_anything_decodes_as_a_run_or_is_malformed(plain: Any) -> None:
    """Also where nothing fits."""
    with pytest.raises(Malformed, match=r"^Run"):
        decode(Run, plain)
