"""Merging ranks' answers into one, and naming the rank at fault, by values."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.measure.ranks.answers import (
    RanksDisagree,
    RankState,
    describe_delay,
    describe_failure,
    find_culprit,
    find_suspect_ranks,
    make_failed_rank,
    merge_answers,
)
from fp8bench.measure.ranks.process import Launch, RanksProcess, _RankConnections
from fp8bench.model import CELL_PHASES, DeviceFacts, MemoryUse, Phase
from fp8bench.model.ranks import HEARTBEAT_LAYOUT, FailedRank, Heartbeat, RankCalls, RankMemory, parse_heartbeat
from fp8bench.model.raw import RawSlot, RawStep, StateCheck
from tests.counts import for_each

GEMM, COMM, REST = (CELL_PHASES.index(name) for name in ("gemm", "communication", "unattributed"))


def slot(*calls: tuple[int, int], wall: float = 1.0, cpu: float = 0.5) -> RawSlot:
    return RawSlot(tuple(RawStep((GEMM, COMM), call) for call in calls), wall, cpu, 0.0)


def test_a_step_ends_with_its_slowest_rank() -> None:
    found = merge_answers("slot", [slot((10, 1), (10, 30), wall=1.0), slot((5, 20), (5, 20), wall=2.0)])
    assert [step.intervals_ns for step in found.steps] == [(5, 20), (10, 30)]
    assert found.ranks == (RankCalls(0, (11, 40), (1, 30)), RankCalls(1, (25, 25), (20, 20)))
    assert found.wall_seconds == 2.0
    assert merge_answers("slot", [slot((1, 1)), slot((1, 1))]).memory_retries is None
    slots = [replace(slot((1, 1)), memory_retries=count) for count in (0, 2, 1)]
    assert merge_answers("slot", slots).memory_retries == 3
    # Phases of different ranks would not add up to any step.
    other = RawSlot((RawStep((REST, COMM, REST), (1, 50, 1)),), 1.0, 1.0, 0.0)
    assert merge_answers("slot", [slot((10, 20)), other]).steps == other.steps


def test_ranks_must_agree_in_numbers_and_builds() -> None:
    assert merge_answers("error", [{"sqnr_db": 31.5}, {"sqnr_db": 31.5}]) == {"sqnr_db": 31.5}
    with pytest.raises(RanksDisagree, match=r"sqnr_db is 31\.5 on rank 0 and 4\.0 on rank 1"):
        merge_answers("error", [{"sqnr_db": 31.5}, {"sqnr_db": 4.0}])
    assert merge_answers("error", ["none", "none"]) == "none"
    with pytest.raises(RanksDisagree, match=r"torch is 2\.13\.0 on rank 0 and 2\.12\.1 on rank 1: install the same"):
        merge_answers("software", [{"torch": "2.13.0"}, {"torch": "2.12.1"}])
    with pytest.raises(RanksDisagree, match="cudnn is 91002 on rank 0 and None on rank 1"):
        merge_answers("software", [{"torch": "2", "cudnn": 91002}, {"torch": "2"}])


def test_each_kind_of_answer_has_its_merge() -> None:
    cpu, gpu = DeviceFacts("cpu", 0, "", 1, ""), DeviceFacts("cuda", 0, "", 1, "")
    assert merge_answers("probe", [(cpu, gpu), (cpu,)]) == (cpu,)
    most = MemoryUse(9, ranks=(RankMemory(0, 5, (("weights", 5),)), RankMemory(1, 9)))
    assert merge_answers("memory", [MemoryUse(5, (("weights", 5),)), MemoryUse(9)]) == most
    assert merge_answers("memory", [MemoryUse(5), "no meter"]) == "no meter"
    assert merge_answers("check", [StateCheck(), StateCheck("lost")]).wrong == "rank 1 of 2: lost"
    assert merge_answers("release", [(), ("a thread",)]) == ("rank 1: a thread",)
    told = [{"torch": "2", "env OMP_NUM_THREADS": "1"}, {"torch": "2", "env OMP_NUM_THREADS": "2"}]
    assert merge_answers("software", told) == {
        "torch": "2",
        "rank 0 OMP_NUM_THREADS": "1",
        "rank 1 OMP_NUM_THREADS": "2",
    }
    assert merge_answers("try_batch", [5, 7]) == 7 and merge_answers("try_batch", [5, None]) is None
    assert merge_answers("trial", ["", "wrong"]) == "wrong" and merge_answers("statistics", [(1,), (2,)]) == (1,)


TIMED_OUT = ("RuntimeError: Timed out waiting 6000ms for recv", "trace")
LEFT = ("SwitchesChanged: it left the working directory at /", "trace")
CLOSED = ("RuntimeError: [pair.cc:553] Connection closed by peer", "trace")
GONE = ("ValueError: Default process group has not been initialized", "trace")


def state(rank: int, sequence: int, seconds: float = 0.0, phase: str = "gemm", **known: object) -> RankState:
    return RankState(Heartbeat(rank, sequence, phase, "slot", seconds), **known)  # type: ignore[arg-type]


@for_each(
    ("states", "guilty"),
    [
        # Rank 0 complains about a collective that rank 1 never reached.
        ([state(0, 12, phase="communication", has_answered=True, fault=TIMED_OUT), state(1, 11)], 1),
        # One raised, and the other waits for it.
        ([state(0, 12, phase="communication"), state(1, 11, has_answered=True, fault=("ValueError: boom", ""))], 1),
        # One exited by itself, and the launcher ended the other.
        ([state(0, 10, ended="was ended by SIGTERM", status=-15), state(1, 12, ended="exited", status=7)], 1),
        # It exited with 0, which the launcher does not report; the other rank learned that its peer had gone.
        ([state(0, 12, has_answered=True, fault=("RuntimeError: closed by peer", "")), state(1, 11, ended="ended")], 1),
        # NCCL's watchdog aborts ranks that wait for a hanging rank.
        ([state(0, 12, ended="was ended by SIGABRT", status=-6), state(1, 11)], 1),
        # Both came equally far and complain; the rank that was aborted is named, although the other was quiet longer.
        ([state(0, 12, 9.0, ended="was ended by SIGABRT", status=-6), state(1, 12, 1.0)], 0),
        # No rank is behind: the aborted one is named.
        (
            [
                state(0, 12, has_answered=True, fault=("RuntimeError: reset", "")),
                state(1, 12, ended="SIGABRT", status=-6),
            ],
            1,
        ),
        # One raised after a step that both completed, and the other answered normally.
        ([state(0, 29, 1.0, has_answered=True), state(1, 29, 2.0, has_answered=True, fault=LEFT)], 1),
        # One raised by itself, and then its neighbour lost the connection, a moment earlier.
        ([state(0, 21, 1.0, has_answered=True, fault=CLOSED), state(1, 21, 2.0, has_answered=True, fault=GONE)], 1),
        # The same for a pipeline's last stage, whose steps have more phases than those of the waiting stage.
        ([state(0, 21), state(1, 40, has_answered=True, fault=("ValueError: boom", ""))], 1),
        # The first of several that exited by themselves; they are given in that order.
        ([state(2, 9, ended="exited", status=3), state(1, 8, ended="exited", status=4), state(0, 9)], 2),
    ],
)
def test_the_rank_that_failed_is_named(states: list[RankState], guilty: int) -> None:
    assert find_culprit(states).rank == guilty and find_suspect_ranks(states) == (find_culprit(states),)


@for_each(
    ("states", "named"),
    [
        # Both are equally far. The complaining rank may be the delayed one: it was stopped, for example, and continued
        # after its timeout.
        ([state(0, 11, 1.0, has_answered=True, fault=TIMED_OUT), state(1, 11, 2.0)], "0 and 1"),
        ([state(0, 11, 2.0), state(1, 11, 1.0)], "0 and 1"),
        ([state(0, 11, 2.0), state(1, 11, 1.0), state(2, 12, has_answered=True, fault=TIMED_OUT)], "0 and 1"),
        ([state(2, 11), state(0, 11), state(1, 11, 1.0)], "0, 1 and 2"),
        ([state(0, 11, has_answered=True), state(1, 11), state(2, 11)], "1 and 2"),
    ],
)
def test_an_unclear_fault_names_no_rank(states: list[RankState], named: str) -> None:
    said = describe_failure(states, 10.0)
    assert f"it is unclear which of ranks {named} of {len(states)} failed: all are in phase gemm of 'slot'" in said
    assert ("said: RuntimeError: Timed out" in said) == any(state.fault == TIMED_OUT for state in states)


def test_failures_name_rank_phase_and_reason() -> None:
    waiting = state(0, 12, 9.0, "communication", has_answered=True, fault=TIMED_OUT)
    assert make_failed_rank(find_culprit([waiting, state(1, 11, 3.0)]).heartbeat, 2, 10.0) == FailedRank(
        1, 2, "slot", "gemm", 11, 7.0
    )
    assert describe_failure([waiting, state(1, 11, 3.0)], 10.0) == (
        "rank 1 of 2, in phase gemm of 'slot', hangs: its last heartbeat, number 11, is 7.0 s old; rank 0 "
        "said: RuntimeError: Timed out waiting 6000ms for recv"
    )
    boom = state(1, 11, has_answered=True, fault=("ValueError: boom", ""))
    assert (
        describe_failure([state(0, 12), boom], 1.0) == "rank 1 of 2, in phase gemm of 'slot', failed: ValueError: boom"
    )
    assert describe_delay([state(0, 12, 9.5), state(1, 11, 9.0)], 10.0) == (
        ": rank 1 of 2, in phase gemm of 'slot', hangs: its last heartbeat, number 11, is 1.0 s old"
    )


def test_heartbeats_are_read_from_files() -> None:
    gemm = [*Phase].index(Phase.GEMM)
    assert parse_heartbeat(1, HEARTBEAT_LAYOUT.pack(7, gemm, 1.5, b"slot")) == Heartbeat(1, 7, "gemm", "slot", 1.5)
    assert parse_heartbeat(1, HEARTBEAT_LAYOUT.pack(7, -1, 1.5, b"prepare")).doing == "'prepare'"
    assert parse_heartbeat(0, b"") == Heartbeat(0, 0, "", "start", 0.0)
    assert parse_heartbeat(0, struct.pack("<q", 1)).sequence == 0


Replies = tuple[tuple[int, tuple[Any, ...]], ...]
REFUSAL = ("fault", "ValueError", "no such size", "trace", True)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RanksProcess:
    """A launcher without processes, with planted replies of ranks."""
    process = RanksProcess.__new__(RanksProcess)
    for name, stand_in in (("kill", lambda: None), ("_find_statuses", dict)):
        monkeypatch.setattr(process, name, stand_in)
    process._launch, process._folder, process._started_at = Launch(2, 1.0, 1.0, ""), tmp_path, 0.0
    process._request, process.is_broken = "loop", False
    return process


def receive(ranks: RanksProcess, *replies: tuple[int, tuple[Any, ...]]) -> Any:
    ranks._ranks = [_RankConnections(number, reply=reply) for number, reply in enumerate(replies)]
    return ranks.receive_answer()


def test_replies_of_all_ranks_become_one_answer(ranks: RanksProcess) -> None:
    assert receive(ranks, (7, ("ok", 1.5)), (7, ("ok", 2.5))) == (7, ("ok", 2.5))
    ranks._request = "error"
    said = "rmse is 1.0 on rank 0 and 2.0 on rank 1"
    number, answer = receive(ranks, (7, ("ok", {"rmse": 1.0})), (7, ("ok", {"rmse": 2.0})))
    assert (number, answer) == (7, ("fault", "the ranks disagree", said, "", False)) and not ranks.is_broken


@for_each("refused", [True, False])
def test_the_same_fault_on_all_ranks_is_one_fault(refused: bool, ranks: RanksProcess) -> None:
    answer = ("fault", "ValueError", "no such size (on all 2 ranks)", "trace", refused)
    assert receive(ranks, (7, REFUSAL), (7, ("fault", "ValueError", "x", "", refused))) == (7, answer)
    assert not ranks.is_broken


@for_each(
    "replies",
    [
        ((7, ("ok", 1.5)), (7, REFUSAL)),
        ((7, REFUSAL), (7, ("fault", "KeyError", "x", "", True))),
        ((7, ("ok", 1.5)), (6, ("ok", 1.5))),
    ],
)
def test_ranks_that_answer_differently_are_out_of_step(replies: Replies, ranks: RanksProcess) -> None:
    number, (word, words, *_, refused) = receive(ranks, *replies)
    assert (number, word, refused, ranks.is_broken) == (7, "fault", False, True) and "of 2" in words
