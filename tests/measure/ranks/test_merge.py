"""What several ranks answered, as one answer, by values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8bench.measure.ranks.merge import RanksDisagree, merged
from fp8bench.model import CELL_PHASES, DeviceFacts, MemoryUse
from fp8bench.model.ranks import RankCalls, RankMemory
from fp8bench.model.raw import RawSlot, RawStep, StateCheck
from fp8bench.model.run import OperationBits

GEMM, COMM, REST = (CELL_PHASES.index(name) for name in ("gemm", "communication", "unattributed"))


def slot(*calls: tuple[int, int], wall: float = 1.0, cpu: float = 0.5) -> RawSlot:
    return RawSlot(tuple(RawStep((GEMM, COMM), call) for call in calls), wall, cpu, 0.0)


def test_a_step_is_over_when_its_slowest_rank_is() -> None:
    found = merged("slot", [slot((10, 1), (10, 30), wall=1.0), slot((5, 20), (5, 20), wall=2.0)])
    assert [step.intervals_ns for step in found.steps] == [(5, 20), (10, 30)]
    assert found.ranks == (RankCalls(0, (11, 40), (1, 30)), RankCalls(1, (25, 25), (20, 20)))
    assert found.wall_seconds == 2.0
    assert merged("slot", [slot((1, 1)), slot((1, 1))]).memory_retries is None
    slots = [replace(slot((1, 1)), memory_retries=count) for count in (0, 2, 1)]
    assert merged("slot", slots).memory_retries == 3
    # Phases of different ranks would not add up to anybody's step.
    other = RawSlot((RawStep((REST, COMM, REST), (1, 50, 1)),), 1.0, 1.0, 0.0)
    assert merged("slot", [slot((10, 20)), other]).steps == other.steps


def test_numbers_must_agree_and_builds() -> None:
    assert merged("error", [{"sqnr_db": 31.5}, {"sqnr_db": 31.5}]) == {"sqnr_db": 31.5}
    with pytest.raises(RanksDisagree, match=r"sqnr_db is 31\.5 on rank 0 and 4\.0 on rank 1"):
        merged("error", [{"sqnr_db": 31.5}, {"sqnr_db": 4.0}])
    assert merged("error", ["none", "none"]) == "none"
    with pytest.raises(RanksDisagree, match=r"torch is 2\.13\.0 on rank 0 and 2\.12\.1 on rank 1: install the same"):
        merged("software", [{"torch": "2.13.0"}, {"torch": "2.12.1"}])
    with pytest.raises(RanksDisagree, match="cudnn is 91002 on rank 0 and None on rank 1"):
        merged("software", [{"torch": "2", "cudnn": 91002}, {"torch": "2"}])


def test_other_answers() -> None:
    cpu, gpu = DeviceFacts("cpu", 0, "", 1, ""), DeviceFacts("cuda", 0, "", 1, "")
    assert merged("probe", [(cpu, gpu), (cpu,)]) == (cpu,)
    most = MemoryUse(9, ranks=(RankMemory(0, 5, (("weights", 5),)), RankMemory(1, 9)))
    assert merged("memory", [MemoryUse(5, (("weights", 5),)), MemoryUse(9)]) == most
    assert merged("memory", [MemoryUse(5), "no meter"]) == "no meter"
    assert merged("check", [StateCheck(), StateCheck("lost")]).wrong == "rank 1 of 2: lost"
    assert merged("release", [(), ("a thread",)]) == ("rank 1: a thread",)
    told = [{"torch": "2", "env OMP_NUM_THREADS": "1"}, {"torch": "2", "env OMP_NUM_THREADS": "2"}]
    assert merged("software", told) == {"torch": "2", "rank 0 OMP_NUM_THREADS": "1", "rank 1 OMP_NUM_THREADS": "2"}
    assert merged("try_batch", [5, 7]) == 7 and merged("try_batch", [5, None]) is None
    assert merged("trial", ["", "wrong"]) == "wrong" and merged("statistics", [(1,), (2,)]) == (1,)


def test_bits_are_each_ranks_own_and_once_those_of_all() -> None:
    """Ranks that come to different things by one exchange leave several digests, as a device that does not repeat."""

    def told(rank: int, shared: str) -> tuple[OperationBits, ...]:
        own = OperationBits(f"cpu of rank {rank} of 2", "float32", "product", (f"p{rank}",))
        return own, OperationBits("cpu of 2 ranks", "float32", "sum of all ranks", (shared,))

    first, other = told(0, "s"), told(1, "s")
    assert merged("bits", [first, other]) == (*first, other[0])
    (*_, differing, last) = merged("bits", [first, told(1, "t")])
    assert differing == replace(first[1], digests=("s", "t")) and last == other[0]
