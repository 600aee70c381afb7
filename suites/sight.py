"""Whether a gate sees what it says that it could have seen: `python -m suites.sight`.

Seeded Monte Carlo. Of a build in which nothing changed the gate's code says from which slow-down on it would have
failed, with its thresholds and without; a slow-down of that size is planted in another build of the same kind, judged
and, where suspected, drawn once more. As often as was asked for (80 of 100) it should fail.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.steps.change_points import LEAST_VALUES, newest_levels, steps_of_many
from fp8bench.analysis.steps.levels import LEAST
from fp8bench.features.duel.values import CaseResult, Session
from fp8bench.features.duel.verdicts import compared
from fp8bench.features.gate.judging import (
    USUAL_POWER,
    GateOutcome,
    JudgedFigure,
    SecondLook,
    Sight,
    first_look,
    key_of,
    second_look,
)
from fp8bench.features.gate.power import Newest, Second, chance_among, sight_of, sights_of_history
from fp8bench.features.gate.thresholds import ThresholdRule
from fp8bench.model import (
    Case,
    Comparison,
    Direction,
    Evidence,
    Interval,
    Level,
    Record,
    Segments,
    SlotSample,
    Status,
    Support,
    Timing,
    Work,
)
from suites.gate import NOISES, Setting, build
from suites.trials import Table, options

# Whatever is told from chance fails.
NO_THRESHOLD = (ThresholdRule("*", "*", 0.0, 0.0),)
Build = Callable[[random.Random, float, tuple[ThresholdRule, ...]], tuple[bool, Sight]]


class Seen(NamedTuple):
    """Of many builds: the median of what could have been seen, and the share of those with just that which fail; the
    same beyond the threshold."""

    seen: float
    told: float
    fails: float
    failed: float


def trial(of: Build, builds: int, seed: int = 0) -> Seen:
    """Builds in which nothing changed, and two of the same kind for each, with what it said that it would see."""
    draw = random.Random(seed)
    sights = [of(draw, 0.0, ())[1] for _ in range(builds)]
    known = [sight for sight in sights if math.isfinite(sight.fails)]
    told = sum(of(draw, sight.seen, NO_THRESHOLD)[0] for sight in known)
    failed = sum(of(draw, sight.fails, ())[0] for sight in known)
    seen, fails = (statistics.median_low(getattr(sight, name) for sight in sights) for name in ("seen", "fails"))
    return Seen(seen, told / max(1, len(known)), fails, failed / max(1, len(known)))


def stored(setting: Setting) -> Build:
    """Runs of 100 cases against each other; what is suspected is measured again."""

    def of(draw: random.Random, planted: float, rules: tuple[ThresholdRule, ...]) -> tuple[bool, Sight]:
        judged = build(setting, draw, 1 + planted, rules)
        return judged[0].outcome is GateOutcome.REGRESSION, _first(judged, Second.AGAIN)

    return of


def _first(judged: Sequence[JudgedFigure], second: Second) -> Sight:
    """Of the figure that something is planted in, judged among all."""
    return sight_of(judged[0], chance_among(judged), second, USUAL_POWER)


def duel(cases: int, sessions: int, between: float, noise: str = "Gaussian") -> Build:
    """A duel of so many cases, processes lying `between` apart; what is suspected is duelled again."""

    def of(draw: random.Random, planted: float, rules: tuple[ThresholdRule, ...]) -> tuple[bool, Sight]:
        def look(number: int) -> Comparison:
            return _duelled(number, sessions, planted if number == 0 else 0.0, lambda: between * NOISES[noise](draw))

        judged = first_look([look(number) for number in range(cases)], rules)
        again = {key_of(one): one for one in (look(0),)} if judged[0].outcome is GateOutcome.TO_CONFIRM else {}
        settled = second_look(judged, SecondLook(again, "again"), rules)
        return settled[0].outcome is GateOutcome.REGRESSION, _first(judged, Second.DUEL)

    return of


def _duelled(number: int, sessions: int, planted: float, noise: Callable[[], float]) -> Comparison:
    def process(slower: float) -> Timing:
        took = round(1e9 * math.exp(noise()) * (1 + slower))
        return Timing(Segments(("gemm",), (0,)), tuple(SlotSample(at, ((took,),), 1.0, 1.0) for at in range(5)))

    case = Case("made", (("case", number),), "bf16", "cpu")
    record = Record(case, Support(Level.NATIVE, ""), Status.OK, Work())
    many = tuple(
        Session(tuple(process(0.0) for _ in "AA"), tuple(process(planted) for _ in "BB")) for _ in range(sessions)
    )
    return next(compared(CaseResult(record, record, many)))


def nights(count: int, between: float, noise: str = "Gaussian") -> Build:
    """A history of so many nights; what was planted came with the last in which a step can be found at all."""

    def of(draw: random.Random, planted: float, rules: tuple[ThresholdRule, ...]) -> tuple[bool, Sight]:
        logs = np.array([between * NOISES[noise](draw) for _ in range(count)])
        (level,) = newest_levels([np.exp(logs)])
        flat = Comparison(
            "made[case=0]@box/bf16", "made", "relative_time", "x", Direction.SAME, Evidence.HISTORY, 1.0, 1.0
        )
        sights = sights_of_history([Newest(flat, level, count)], rules, 0, Second.AGAIN, USUAL_POWER, required=False)
        logs[-LEAST:] += math.log1p(planted)
        steps = steps_of_many([np.exp(logs)])[0]
        found = [one for one in steps if one.after > 1.01 * one.before]
        if not found:
            return False, sights.figures[0]
        last = found[-1]
        was = {"before": last.before, "after": last.after, "ratio": last.ratio, "p_value": last.p_value}
        step = replace(flat, direction=Direction.WORSE, **was)  # type: ignore[arg-type]
        judged = first_look([step], rules)
        value = math.exp(between * NOISES[noise](draw)) * (1 + planted)
        where = Direction.WORSE if value > math.sqrt(last.before * last.after) else Direction.SAME
        ratio = value / last.before
        again = replace(
            flat, direction=where, before=last.before, after=value, ratio=Interval(ratio, ratio, ratio, 0.0)
        )
        settled = second_look(judged, SecondLook({key_of(again): again}, "again"), rules)
        return settled[0].outcome is GateOutcome.REGRESSION, sights.figures[0]

    return of


KINDS: dict[str, Build] = {
    **{f"stored, {one.words}": stored(one) for one in (
        Setting(1, 1, 0.01), Setting(1, 1, 0.02), Setting(1, 1, 0.05), Setting(3, 1, 0.02), Setting(5, 1, 0.02),
        Setting(5, 5, 0.01), Setting(5, 5, 0.02), Setting(5, 5, 0.05), Setting(5, 5, 0.02, noise="one-sided"),
        Setting(5, 5, 0.02, noise="bad runs"), Setting(1, 1, 0.02, 0.02),
    )},
    **{f"duel of {cases}, {sessions} sessions, {100 * between:g}% between processes ({noise})":
       duel(cases, sessions, between, noise)
       for cases, sessions, between, noise in (
           (1, 4, 0.01, "Gaussian"), (10, 4, 0.01, "Gaussian"), (10, 4, 0.03, "Gaussian"), (10, 8, 0.01, "Gaussian"),
           (10, 4, 0.01, "one-sided"), (10, 8, 0.03, "bad runs"),
       )},
    **{f"history, {count} nights, {100 * between:g}% between nights ({noise})": nights(count, between, noise)
       for count, between, noise in (
           (LEAST_VALUES, 0.01, "Gaussian"), (14, 0.01, "Gaussian"), (30, 0.01, "Gaussian"), (30, 0.03, "Gaussian"),
           (100, 0.01, "Gaussian"), (30, 0.01, "one-sided"), (30, 0.01, "bad runs"),
       )},
}  # fmt: skip


def main() -> None:
    kinds = "kinds whose words begin with this"
    asked = options(__doc__, builds=(400, "of each kind"), only=("", kinds))
    heads = ("could have seen", "told", "would fail", "failed")
    table = Table(f"{asked.builds} builds a line; percent", *heads, name=66)
    for words, kind in KINDS.items():
        if words.startswith(asked.only):
            table.row(words, *trial(kind, asked.builds))


if __name__ == "__main__":
    main()
