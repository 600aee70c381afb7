"""Values to plain JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench import model
from fp8bench.model import Case, Measurement, Record, Request, Run, SlotSample, Work
from fp8bench.model.codec import MalformedValueError, decode, encode
from tests.counts import for_each

# Mutually exclusive fields of a request, tested one at a time.
ALONE = {"isolation": False, "energy_of": "phases", "ranks": 4, "scales_from": "a1b2", "known_scales": ()}
REQUEST = Request(
    "gemm",
    ("fp8",),
    ("cuda:1",),
    "bf16",
    (("shape", ("64", "1x2x3")),),
    (("mlp", "bf16"),),
    "file",
    True,
    True,
    2.5,
    3,
    4,
    5,
    ("module",),
    True,
    12.5,
    True,
    "traces",
    8,
    100,
    0.5,
    False,
    "step",
    1 << 30,
    "torch",
    2.5,
    True,
    True,
    counters=True,
)


def made(hint: Any, default: Any = None) -> Any:
    """A value of a type with no field at its default, at any depth: all must survive."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Request:
        return REQUEST
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{field.name: made(hints[field.name], field.default) for field in fields(hint)})
    if kind in (Union, UnionType):
        return made(next(choice for choice in inner if choice is not NoneType), default)
    if kind is tuple:
        return (made(inner[0]),) if inner[1:] == (...,) else tuple(map(made, inner))
    if kind is not None and issubclass(kind, Mapping):
        return {"a": None, "b": 1, "c": 0.5, "d": "text", "e": True}
    if issubclass(hint, Enum):
        return next(member for member in hint if member != default)
    return not default if hint is bool else {int: 7, float: 2.5, str: "größer"}[hint]


KINDS = [kind for name in model.__all__ if is_dataclass(kind := getattr(model, name))]
CASE, RECORD, RUN = made(Case), made(Record), made(Run)


def there_and_back(value: Any) -> Any:
    return decode(type(value), json.loads(json.dumps(encode(value), allow_nan=False)))


@for_each("kind", KINDS)
def test_every_value_survives_the_trip(kind: type) -> None:
    value = made(kind)
    again = there_and_back(value)
    assert again == value and repr(again) == repr(value)  # 1, 1.0 and True are equal


def test_options_that_exclude_each_other_survive_too() -> None:
    assert {field.name for field in fields(Request) if getattr(REQUEST, field.name) == field.default} == set(ALONE)
    for changes in (
        {"isolation": False, "energy_of": "phases"},
        {"ranks": 4, "energy": False},
        {"scales_from": "a1b2", "known_scales": (("fp8", "up", "input", 1.5),)},
    ):
        assert there_and_back(request := replace(Request("gemm"), **changes)) == request  # type: ignore[arg-type]


def test_floats_survive_bit_by_bit() -> None:
    samples = (math.nan, math.inf, -math.inf, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0)
    again = there_and_back(Measurement("m", "s", samples)).samples
    assert [number.hex() for number in again] == [number.hex() for number in samples]
    assert encode(-math.inf) == "-inf"


def test_other_numbers_unknown_keys_and_missing_ones() -> None:
    again = decode(Work, {"flops": 3})
    assert type(again.flops) is float and again.flops == 3.0
    plain = encode(RECORD)
    plain["of_the_future"] = {"a": [1]}
    plain["case"]["colour"] = "red"
    del plain["measurements"], plain["control"]
    again = decode(Record, plain)
    assert again.case == RECORD.case and again.measurements == () and again.control is None
    plain = encode(RECORD)
    del plain["case"]["workload"]
    with pytest.raises(MalformedValueError, match=r"Record\.case: .*workload"):
        decode(Record, plain)
    plain = encode(SlotSample(0, ((1, 2),), 0.0, 0.0))
    plain["calls_ns"][0][1] = True
    with pytest.raises(MalformedValueError):
        decode(SlotSample, plain)


@for_each(
    ("path", "value", "place"),
    [
        (("case",), None, "Record.case"),
        (("case",), [], "Record.case"),
        (("case", "precision"), 8, "Record.case.precision"),
        (("case", "params"), "m=64", "Record.case.params"),
        (("case", "params", 0), ["m"], r"Record.case.params\[\]"),
        (("case", "params", 0, 1), None, r"Record.case.params\[\]"),
        (("status",), "great", "Record.status: 'great' is not a Status"),
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
    plain = encode(RECORD)
    inside = plain
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    with pytest.raises(MalformedValueError, match=place):
        decode(Record, plain)


def test_identical_values_share_one_object() -> None:
    assert there_and_back(CASE) is there_and_back(CASE)
    for _ in range(2):
        assert type(decode(Work, {"flops": 1, "tokens": 1}).flops) is float
        for wrong in (True, 1.0, "1"):
            with pytest.raises(MalformedValueError, match="tokens"):
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


@given(anything)
def test_anything_decodes_as_a_run_or_is_malformed(plain: Any) -> None:
    with pytest.raises(MalformedValueError, match=r"^Run"):
        decode(Run, plain)


def test_fields_of_other_versions_are_ignored() -> None:
    assert decode(Request, {**encode(Request("gemm")), "gone": 1}) == Request("gemm")
