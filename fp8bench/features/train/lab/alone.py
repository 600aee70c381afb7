"""An arm by itself: its steps as passes take them, which count what they need and keep nothing of what they say."""

from __future__ import annotations

from collections.abc import Callable

from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.values import Arm, SeedTask
from fp8bench.protocols import Phases
from fp8bench.worker.memory_pass import Make, Prepared, Told, watch_of

# So many steps before the last one are gone over again: other batches each time, at the rate that a training ends with.
_LAST = 50


class NotFinite(RuntimeError):
    """An arm that has stopped, whose steps are none any more."""


def another_step(trainer: Trainer, phase: Phases) -> None:
    """A step as any other, however many there were; of an arm that is done, one of its last once more."""
    trainer.repeat(_LAST)
    for _ in trainer.advance(phase, watched=False):
        pass
    if trainer.stopped:
        raise NotFinite(f"its steps were not finite after {trainer.step}, and it stopped")


def made_alone(task: SeedTask, arm: Arm) -> Make:
    """How an arm is made that nobody watches: readings of tensors take memory, too, every so many steps."""

    def make(told: Told | None) -> Callable[[], Prepared]:
        def prepare() -> Prepared:
            trainer = Trainer(task, arm, None if told is None else watch_of(told))
            return Prepared(trainer, lambda phase: another_step(trainer, phase))

        return prepare

    return make
