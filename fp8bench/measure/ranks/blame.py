"""Which of several ranks is the one that failed. Torch names rank 0, which only waited for the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from fp8bench.model.ranks import FailedRank, Heartbeat

# How a process ends that has waited for its neighbours in vain, or was told to end because they failed.
_VICTIMS = (-signal.SIGABRT, -signal.SIGTERM)
# What a rank raises because of its neighbours, in gloo's and NCCL's ways; a suite may raise it of itself, too.
_MAY_COMPLAIN = re.compile(r"(RuntimeError|Dist\w*Error|Timeout\w*|Connection\w*|BrokenPipeError|EOFError)\b")


@dataclass(frozen=True)
class RankState:
    """A rank when something went wrong: its last heartbeat, and what it answered or how it ended, if it did.

    `fault` is its exception in words, with its traceback. `ended` says how its process did, '' if it lives; `status` is
    the exit status where the launcher told one. `stopped` is what the system says of its process: it gets no core until
    somebody lets it go on.
    """

    beat: Heartbeat
    answered: bool = False
    fault: tuple[str, str] = ("", "")
    ended: str = ""
    status: int | None = None
    stopped: bool = False

    @property
    def rank(self) -> int:
        return self.beat.rank

    @property
    def well(self) -> bool:
        return self.answered and not self.fault[0]

    @property
    def failed_itself(self) -> bool:
        return bool(self.fault[0]) and _MAY_COMPLAIN.match(self.fault[0]) is None


def behind(states: Sequence[RankState]) -> RankState:
    """The rank whose heartbeat is oldest: which has done least, then longest ago.

    Of those that have come equally far one that does not answer is meant before one that complains of it. None that has
    done what it was asked is meant, while another has not.
    """
    states = [state for state in states if not state.well] or states
    return min(states, key=lambda state: (state.beat.sequence, state.answered, bool(state.ended), state.beat.seconds))


def culprit(states: Sequence[RankState]) -> RankState:
    """A rank that ended of itself, or raised what neighbours do not make it raise, or is stopped; else the one that is
    behind."""
    last = behind(states)
    ended = [state for state in states if state.ended]
    of_itself = [state for state in ended if state.status not in _VICTIMS]
    if of_itself:
        return of_itself[0]
    if failed := [state for state in states if state.failed_itself]:
        return behind(failed)
    if stopped := [state for state in states if state.stopped and not state.well]:
        return behind(stopped)
    if ended and last.beat.sequence >= min(state.beat.sequence for state in ended):
        return next((state for state in ended if state.status != -signal.SIGTERM), ended[0])
    return last


def suspects(states: Sequence[RankState]) -> tuple[RankState, ...]:
    """The culprit; several ranks where nobody can tell which it is: they have come equally far, to the same phase, and
    each may have waited for the other, whoever complained of it first."""
    guilty = culprit(states)
    if guilty.ended or guilty.failed_itself:
        return (guilty,)
    place = guilty.beat.sequence, guilty.beat.phase
    waiting = [state for state in states if not state.well] or states
    alike = (state.stopped if guilty.stopped else (state.beat.sequence, state.beat.phase) == place for state in waiting)
    return tuple(sorted(compress(waiting, alike), key=lambda state: state.rank))


def failed_rank(beat: Heartbeat, ranks: int, now: float) -> FailedRank:
    return FailedRank(beat.rank, ranks, beat.request, beat.phase, beat.sequence, max(0.0, now - beat.seconds))


def sentence(states: Sequence[RankState], now: float) -> str:
    named = suspects(states)
    return _named(named, len(states), now) + "".join(
        f"; rank {other.rank} said: {_short(other.fault[0])}"
        for other in states
        if other.fault[0] and (len(named) > 1 or other is not named[0])
    )


def late(states: Sequence[RankState], now: float) -> str:
    return f": {_named(suspects(states), len(states), now)}"


def _named(named: Sequence[RankState], ranks: int, now: float) -> str:
    first = named[0]
    if len(named) == 1:
        return f"rank {first.rank} of {ranks}, in {first.beat.doing}, {_what(first, now)}"
    which = f"{', '.join(str(state.rank) for state in named[:-1])} and {named[-1].rank} of {ranks}"
    if first.stopped:
        return f"ranks {which} are stopped (SIGSTOP or SIGTSTP, by /proc)"
    oldest = now - min(state.beat.seconds for state in named)
    return (
        f"nobody can tell which of ranks {which} failed: all are in {first.beat.doing}, at heartbeat number "
        f"{first.beat.sequence}, {oldest:.1f} s old"
    )


def _what(state: RankState, now: float) -> str:
    if state.ended:
        return state.ended
    if state.fault[0]:
        return f"failed: {state.fault[0]}"
    how = "is stopped (SIGSTOP or SIGTSTP, by /proc)" if state.stopped else "does not go on"
    return f"{how}: its last heartbeat, number {state.beat.sequence}, is {now - state.beat.seconds:.1f} s old"


def _short(text: str, most: int = 200) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[:most]}..."
