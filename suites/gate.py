"""How often a gate fails a build for nothing, and how often it finds what was planted: `python -m suites.gate`.

Seeded Monte Carlo: runs of 100 cases are drawn, judged by the gate's own code, and suspects drawn once more, as a
second look would. Figures in percent of such runs.

`--sight`: whether it sees what it says that it could have seen. Of a build in which nothing changed its code says from
which slow-down on it would have failed, with its thresholds and without; a slow-down of that size is planted in another
build of the same kind, judged and, where suspected, drawn once more. As often as was asked for (80 of 100) it should
fail.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fp8bench.analysis.compare.compare import of_times
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.compare.sides import MatchedFigures
from fp8bench.analysis.steps.change_points import LEAST, LEAST_VALUES, newest_levels, steps_of_many
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
from fp8bench.model.specs import TIME
from suites.trials import Table, options

CASES = 100
WITHIN = 0.003
# Of variance 1 where nothing is bad: what disturbs only adds, or makes one figure in twenty slower by 4 deviations.
NOISES: dict[str, Callable[[random.Random], float]] = {
    "Gaussian": lambda draw: draw.gauss(0, 1),
    "one-sided": lambda draw: draw.expovariate(1),
    "bad runs": lambda draw: draw.gauss(0, 1) + (draw.expovariate(0.25) if draw.random() < 0.05 else 0),
}


@dataclass(frozen=True)
class Setting:
    """Runs on each side, how far the same case lies apart in two of them, and how far all of a run do together."""

    before: int
    after: int
    between: float
    together: float = 0.0
    noise: str = "Gaussian"

    @property
    def words(self) -> str:
        shared = f", {100 * self.together:g}% shared by a run" if self.together else ""
        return f"{self.before} + {self.after} runs, {100 * self.between:g}% between runs ({self.noise}{shared})"


SETTINGS = (
    Setting(1, 1, 0.005), Setting(1, 1, 0.01), Setting(1, 1, 0.02), Setting(1, 1, 0.03), Setting(1, 1, 0.05),
    Setting(1, 1, 0.02, noise="one-sided"), Setting(1, 1, 0.02, noise="bad runs"), Setting(1, 1, 0.02, 0.02),
    Setting(3, 1, 0.02), Setting(5, 1, 0.02), Setting(5, 5, 0.01), Setting(5, 5, 0.02), Setting(5, 5, 0.05),
    Setting(5, 5, 0.02, noise="one-sided"), Setting(5, 5, 0.02, noise="bad runs"), Setting(5, 5, 0.01, 0.02),
)  # fmt: skip


def build(
    setting: Setting, draw: random.Random, planted: float = 1.0, rules: tuple[ThresholdRule, ...] = ()
) -> tuple[JudgedFigure, ...]:
    """What the gate makes of the cases of one build; the first is so many times as slow as it was."""
    before = [_run(setting, draw) for _ in range(setting.before)]
    after = [_run(setting, draw, planted) for _ in range(setting.after)]
    judged = first_look(list(_comparisons(before, after)), rules)
    suspects = {key_of(one.comparison) for one in judged if one.outcome is GateOutcome.TO_CONFIRM}
    if suspects:
        again = _comparisons(before, [_run(setting, draw, planted)], after)
        look = SecondLook({key_of(one): one for one in again if key_of(one) in suspects}, "again")
        judged = second_look(judged, look, rules)
    return judged


def _run(setting: Setting, draw: random.Random, planted: float = 1.0) -> list[float]:
    """The logarithms of the times of all cases in one run."""
    noise = NOISES[setting.noise]
    shared = setting.together * noise(draw)
    logs = [shared + math.hypot(setting.between, WITHIN) * noise(draw) for _ in range(CASES)]
    return [logs[0] + math.log(planted), *logs[1:]]


def _comparisons(
    before: list[list[float]], after: list[list[float]], beside: Sequence[list[float]] = ()
) -> Iterator[Comparison]:
    for case in range(CASES):
        old, new, others = (
            tuple(Estimate(run[case] + math.log(1e-3), WITHIN) for run in side) for side in (before, after, beside)
        )
        yield of_times(MatchedFigures(TIME, "s", old, new, beside=others), f"made[case={case}]@cpu/bf16", "made", ())


def false_alarms(setting: Setting, builds: int, seed: int = 0) -> float:
    """The share of builds that fail although nothing has changed."""
    draw = random.Random(seed)
    return sum(any(map(_fails, build(setting, draw))) for _ in range(builds)) / builds


def found(setting: Setting, planted: float, builds: int, seed: int = 0) -> float:
    """The share of builds in which the one case that became slower fails."""
    draw = random.Random(seed)
    return sum(_fails(build(setting, draw, planted)[0]) for _ in range(builds)) / builds


def _fails(judged: JudgedFigure) -> bool:
    return judged.outcome is GateOutcome.REGRESSION


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
        slower = [step for step in steps if step.after > 1.01 * step.before]
        if not slower:
            return False, sights.figures[0]
        last = slower[-1]
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
    asked = options(
        __doc__, builds=(int, "of each setting; default 2000, with --sight 400"),
        sight=(False, "whether it sees what it says that it could have seen"),
        only=("", "kinds of --sight whose words begin with this"),
    )  # fmt: skip
    builds = asked.builds or (400 if asked.sight else 2000)
    if asked.sight:
        heads = ("could have seen", "told", "would fail", "failed")
        table = Table(f"{builds} builds a line; percent", *heads, name=66)
        for words, kind in KINDS.items():
            if words.startswith(asked.only):
                table.row(words, *trial(kind, builds))
        return
    title = f"{CASES} cases a build, {builds} builds a line; percent of builds"
    table, few = Table(title, "false alarms", "+8% found", "+15%", "+30%", name=66), max(1, builds // 10)
    for setting in SETTINGS:
        rest = (found(setting, times, few) for times in (1.08, 1.15, 1.3))
        table.row(setting.words, false_alarms(setting, builds), *rest)


if __name__ == "__main__":
    main()
