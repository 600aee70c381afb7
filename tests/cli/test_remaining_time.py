"""The time that a run still takes, predicted along runs whose course is known."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.cli.remaining_time import RemainingTime
from tests.counts import for_each


def predictions(groups: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Pairs of what was predicted and what was left, each second of groups that prepare, measure and pass so long."""
    remaining, now = RemainingTime(len(groups)), 0.0
    whole = sum(map(sum, groups))
    pairs = []
    for number, (preparing, measuring, passes) in enumerate(groups):
        for doing, seconds in (("preparing", preparing), ("measuring", measuring), ("measuring memory", passes)):
            for step in range(round(seconds)):
                share = {"preparing": 0.0, "measuring": step / seconds}.get(doing, 1.0)
                remaining.follow(str(number), doing, share, now)
                pairs.append((remaining.predict(now), whole - now))
                now += 1
    return pairs


@for_each(
    "groups",
    [
        [(3.0, 12.0, 9.0)],  # a transformer on a CPU
        [(3.0, 12.0, 9.0)] * 5,
        [(1.0, 10.0, 2.0)] * 6,  # products, whose passes are short
        [(2.0, 60.0, 40.0)],  # a longer budget
    ],
)
def test_what_is_left_is_right_after_the_first_third(groups: list[tuple[float, float, float]]) -> None:
    """Within 30%, or a twentieth of the whole: of the last seconds shares mean nothing."""
    pairs = predictions(groups)
    for predicted, left in pairs[len(pairs) // 3 :]:
        assert abs(predicted - left) <= 0.3 * left + 0.05 * len(pairs)


def test_passes_that_take_longer_than_predicted_are_never_nearly_done() -> None:
    assert all(predicted > 0.5 for predicted, _ in predictions([(1.0, 10.0, 60.0)]))
