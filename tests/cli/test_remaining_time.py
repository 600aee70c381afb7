"""The predicted remaining time of a run, replayed from real runs on two cores, most under a load of 5 to 9."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.cli.remaining_time import RemainingTime
from fp8bench.model.words import MEASURING_CEILINGS
from tests.counts import for_each

PASSES = "checking numbers", "looking at products", "checking what steps do", "measuring memory", "counting operators"
# Seconds of a group: preparing, compiling, rounds, the rounds' share of their budget, and each pass.
Course = tuple[float, float, float, float, Sequence[float]]
TRANSFORMER: list[Course] = [(1.0, 0.5, 12.0, 1.0, (0.7, 0.9, 1.6, 2.7, 0.7))]
GEMM: list[Course] = [
    (0.2, 0.1, 2.7, 0.21, (0.1, 0.1, 0.1, 0.1, 3.6)),
    (0.3, 0, 2.3, 0.18, (0.2, 0.1, 0.1, 0.1, 0.1)),
    (0.8, 0, 11.3, 1.0, (1.3, 0.6, 0.5, 0.7, 0.5)),
    (0.5, 0, 10.8, 1.0, (0.5, 0.5, 0.3, 0.4, 0.4)),
    (1.7, 0, 4.8, 0.32, (0.8, 0.9, 0.4, 0.3, 1.2)),
]
# On a core of its own, by two workers, of which the second measures memory silently.
QUIET_TWO: list[Course] = [(0.9, 0.1, 6.9, 1.0, (0.35, 0.42, 0.76, 0.0, 0.4))]
# A run under a load of 10 that started 11 s before its plan.
CROWDED: list[Course] = [(4.5, 1.7, 21.1, 1.0, (2.1, 2.8, 4.5, 9.0, 6.0))]
_TICK = 0.1


def predictions(
    groups: Sequence[Course], ceilings: float = 0.0, start: float = 4.0, end: float = 2.0
) -> list[tuple[float, float]]:
    """Pairs of predicted and true remaining seconds, every 0.1 s. `start` is how long the plan took."""
    stages: list[tuple[str, str, float, float]] = [("0", MEASURING_CEILINGS, ceilings, 0.0)]
    for number, (preparing, compiling, rounds, share, passes) in enumerate(groups):
        of_group = [("preparing", preparing, 0.0), ("compiling 3 quantisers", compiling, 0.0)]
        of_group += [
            ("measuring", rounds, share),
            *((doing, seconds, 0.0) for doing, seconds in zip(PASSES, passes, strict=True)),
        ]
        stages += [(str(number), *stage) for stage in of_group]
    remaining, now, predicted = RemainingTime(len(groups), start), 0.0, []
    for setting, doing, seconds, share in stages:
        ticks = round(seconds / _TICK)
        for tick in range(ticks):
            remaining.record_activity(setting, doing, share * tick / ticks, now)
            predicted.append((remaining.predict(now), now))
            now += _TICK
    return [(seconds, now + end - at) for seconds, at in predicted]


@for_each(
    ("groups", "ceilings", "start", "end"),
    [
        (TRANSFORMER, 0.0, 4.0, 2.0),
        (TRANSFORMER, 21.6, 4.0, 2.0),
        (QUIET_TWO, 0.0, 1.6, 0.5),
        (QUIET_TWO, 15.0, 1.6, 0.5),
        (GEMM, 0.0, 4.0, 2.0),
        (TRANSFORMER * 5, 0.0, 4.0, 2.0),
        (CROWDED, 0.0, 11.0, 6.0),
        (CROWDED, 74.0, 11.0, 6.0),
    ],
)
def test_what_is_left_is_right_after_the_first_third(
    groups: list[Course], ceilings: float, start: float, end: float
) -> None:
    """Within 30% or a twentieth of the total in 80% of moments: early verdicts are unpredictable."""
    pairs = predictions(groups, ceilings, start, end)
    later, whole = pairs[len(pairs) // 3 :], pairs[0][1]
    right = [abs(predicted - left) <= 0.3 * left + 0.05 * whole for predicted, left in later]
    assert sum(right) >= 0.8 * len(right)


def test_passes_that_take_longer_than_predicted_are_never_nearly_done() -> None:
    long = (1.0, 0, 10.0, 1.0, (60.0, 1.0, 1.0, 1.0, 1.0))
    assert all(predicted > 1.4 for predicted, _ in predictions([long])[:-50])
