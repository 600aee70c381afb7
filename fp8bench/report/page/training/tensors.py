"""What was read of tensors by layer: magnitudes and scales over the steps, and where a format does worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from fp8bench import units
from fp8bench.model.training import ArmRole, KeptTraining, LayerReading
from fp8bench.protocols import Role
from fp8bench.report.elements import Axis, Column, Element, Field, Heat, Table, Text
from fp8bench.report.words.naming import listed

# Steps of a map, and arms that have maps.
_PLACES, _ARMS = 20, 3
_Told = tuple[tuple[str, float, str], ...]
_MAPS: tuple[tuple[str, str, Callable[[LayerReading], float]], ...] = (
    ("amax", "largest magnitudes", lambda one: one.amax),
    ("scale", "scales", lambda one: one.scale),
)
_COLUMNS = (
    Column("arm"), Column("tensors"),
    Column("least SNR", number=True, hint="of what was rounded, against the same unrounded", unit="dB"),
    Column("where"),
    Column("most underflow", number=True, hint="values that became zero", unit="%"), Column("where"),
    Column("most saturated", number=True, hint="values that were clipped", unit="%"), Column("where"),
    Column("largest lag", number=True, hint="octaves above (+) or below the format's largest value"), Column("where"),
)  # fmt: skip


def worst_readings(kept: KeptTraining) -> Iterator[Element]:
    """For each arm and role the layer and step with the worst figure, over all seeds."""
    rows = []
    for arm in kept.training.arms:
        if arm.role is not ArmRole.CANDIDATE:
            continue
        for role in Role:
            own = [one for one in kept.of(LayerReading) if one.arm == arm.name and one.role == role]
            figures = (
                _worst(own, lambda one: one.signal_to_noise, units.decibels, least=True),
                _worst(own, lambda one: one.underflow, units.percent),
                _worst(own, lambda one: one.saturated, units.percent),
                _worst(own, lambda one: one.lag, lambda value: f"{value:+.2f}"),
            )
            if any(figures):
                fields = [field for figure in figures for field in figure or (Field(units.NONE), Field(""))]
                rows.append((Field(arm.name), Field(role.value), *fields))
    if rows:
        yield Table("worst", "Where each arm's format does worst", _COLUMNS, tuple(rows))


def _worst(
    readings: Sequence[LayerReading], value: Callable[[LayerReading], float | None], show: Callable[[float], str],
    least: bool = False,
) -> tuple[Field, Field] | None:  # fmt: skip
    known = [(found, one) for one in readings if (found := value(one)) is not None and math.isfinite(found)]
    if not known:
        return None
    found, one = min(known, key=lambda pair: pair[0] if least else -pair[0])
    if not least and found == 0:
        return Field(show(found), found), Field("")
    return Field(show(found), found), Field(f"{one.layer}, step {one.step}")


def maps(kept: KeptTraining) -> Iterator[Element]:
    """Magnitudes and scales of the first seed, each relative to its own middle over the steps."""
    seed = kept.training.request.seed
    candidates = [arm.name for arm in kept.training.arms if arm.role is ArmRole.CANDIDATE and not arm.skip]
    readings = [one for one in kept.of(LayerReading) if one.seed == seed]
    drawn = [name for name in candidates if any(one.arm == name for one in readings)]
    for number, name in enumerate(drawn[:_ARMS], 1):
        for role in Role:
            own = [one for one in readings if one.arm == name and one.role == role]
            for word, title, value in _MAPS:
                yield from _map(f"{word}-{number}-{role.value}", f"{name}: {title} of {role.value}s", own, value)
    if drawn[_ARMS:]:
        yield Text(
            f"No maps are drawn of {listed(drawn[_ARMS:])}: `fp8bench show {kept.training.id} --csv FILE` has their "
            "readings."
        )


def _map(
    name: str, title: str, readings: Sequence[LayerReading], value: Callable[[LayerReading], float]
) -> Iterator[Element]:
    steps = sorted({one.step for one in readings})
    steps = (
        sorted({steps[round(place * (len(steps) - 1) / (_PLACES - 1))] for place in range(_PLACES)}) if steps else []
    )
    known = {(one.layer, one.step): value(one) for one in readings}
    rows, values, hints = [], [], []
    for layer in dict.fromkeys(one.layer for one in readings):
        own = [known.get((layer, step)) for step in steps]
        good = [one for one in own if one is not None and 0 < one < math.inf]
        if good and min(good) < max(good):
            middle = median(good)
            rows.append(f"{layer} ({units.significant(middle)})")
            values.append(tuple(one / middle if one is not None and 0 < one < math.inf else None for one in own))
            hints.append(tuple("" if one is None else units.significant(one) for one in own))
    if rows:
        yield Heat(
            name, title,
            "Each relative to its own middle over the steps, which stands in brackets; the first seed.",
            tuple(rows), tuple(map(units.whole, steps)), tuple(values), Axis("times the middle, by step", "x"),
            tuple(hints), folded=True,
        )  # fmt: skip
