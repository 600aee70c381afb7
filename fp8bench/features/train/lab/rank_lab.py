"""The lab of one of several ranks: trains its part of every arm, and says what shows whether the ranks still agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fp8bench.errors import StoreError
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.values import ArmState, RankLines, SeedTask
from fp8bench.worker.faults import DescribedFault
from fp8bench.worker.ranks.bench import RankBench
from fp8bench.worker.ranks.main import main

# What a RanksWorker runs to have some.
MODULE = "fp8bench.features.train.lab.rank_lab"
T = TypeVar("T")


def _said_by_all(own: Any) -> list[Any]:
    """Imported where torch is known to be."""
    from fp8bench.nn.parallel.exchanges import all_answers

    return all_answers(own)


class RankLab(RankBench, Lab):
    """One of several labs, which are all asked the same at the same time."""

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """An arm that cannot be built on one rank is built on none: its neighbours would wait for it in every step."""
        states = super().begin(task)
        for rank, faults in enumerate(_said_by_all(self._unbuilt)):
            for name, fault in faults.items():
                self._trainers.pop(name, None)
                self._unbuilt.setdefault(name, DescribedFault(*fault)._replace(text=f"rank {rank}: {fault[1]}"))
        return tuple(state for state in states if state.arm in self._trainers)

    def advance(self, arm: str, steps: int) -> RankLines:  # type: ignore[override]
        """The steps of this rank, and digests of what its neighbours must have alike."""
        trainer = self._trainer(arm)
        first = trainer.step
        lines = super().advance(arm, steps)
        looked_at = [step for step in range(first, trainer.step) if step % self._task.stride == 0]
        batches = tuple((step, *trainer.read(step)) for step in looked_at)
        weights, faults = trainer.weights_digest()
        same = ("the steps done", trainer.step), ("the weights", weights), ("the scales", trainer.scales_digest())
        return RankLines(lines, same, batches, trainer.together.shares, faults)

    def save(self, folder: str) -> tuple[str, ...]:
        return self._together(lambda: super(RankLab, self).save(self._own(folder)))

    def _lost(self) -> tuple[str, ...]:
        """On any rank: what was kept of an arm by some of them could not be gone on with."""
        return tuple(sorted({name for names in _said_by_all(super()._lost()) for name in names}))

    def _read(self, folder: str, arm: str = "") -> dict[str, dict[str, Any]]:
        return self._together(lambda: super(RankLab, self)._read(self._own(folder), arm))

    def _own(self, folder: str) -> str:
        """Where this rank keeps its state: scales may be a rank's own."""
        return f"{folder}/rank-{self._rank}"

    def _together(self, body: Callable[[], T]) -> T:
        """What all ranks must be able to do. Raises StoreError on all of them where one cannot."""
        answer, failure = None, ""
        try:
            answer = body()
        except StoreError as error:
            failure = str(error)
        for rank, said in enumerate(_said_by_all(failure)):
            if said:
                raise StoreError(f"rank {rank}: {said}")
        assert answer is not None
        return answer


if __name__ == "__main__":
    main(RankLab)
