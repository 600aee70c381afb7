"""The lab of one of several ranks, which trains its part of every arm; and the merging of the answers of all ranks.

The parent compares what must be equal on all ranks, and combines the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from fp8bench.errors import RanksDisagree, StoreError
from fp8bench.features.train.frame import FIGURES
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.values import (
    ArmCost,
    ArmState,
    LayerReading,
    RankLines,
    SeedTask,
    State,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.measure.ranks.answers import Merges, most_memory
from fp8bench.units import EXACT_DB
from fp8bench.worker.faults import DescribedFault
from fp8bench.worker.ranks.bench import RankBench
from fp8bench.worker.ranks.main import main

# The module that a RanksWorker runs.
MODULE = "fp8bench.features.train.lab.rank_lab"
T = TypeVar("T")


def _from_all_ranks(answer: Any) -> list[Any]:
    from fp8bench.nn.parallel.exchanges import all_answers  # imports torch

    return all_answers(answer)


class RankLab(RankBench, Lab):
    """One of several labs, which all receive the same calls at the same time."""

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """Builds the arms. An arm that fails on one rank is dropped on all: the others would wait for it in every
        step."""
        states = super().begin(task)
        for rank, faults in enumerate(_from_all_ranks(self._unbuilt)):
            for name, fault in faults.items():
                self._trainers.pop(name, None)
                self._unbuilt.setdefault(name, DescribedFault(*fault)._replace(text=f"rank {rank}: {fault[1]}"))
        return tuple(state for state in states if state.arm in self._trainers)

    def advance(self, arm: str, steps: int) -> RankLines:  # type: ignore[override]
        """This rank's lines, with digests of its batches and of everything that all ranks must have in common."""
        trainer = self._trainer(arm)
        first = trainer.step
        lines = super().advance(arm, steps)
        # Digests of the text cost time, so only watched steps have them.
        looked_at = [step for step in range(first, trainer.step) if step % self._task.stride == 0]
        batches = tuple((step, *trainer.made.digest_batches(step)) for step in looked_at)
        # After the slice: every wrong exchange leaves different weights, or a recorded fault.
        weights, faults = trainer.weights_digest()
        same = ("the number of steps", trainer.step), ("the weights", weights), ("the scales", trainer.scales_digest())
        return RankLines(lines, same, batches, trainer.together.shares, faults)

    def save(self, folder: str) -> tuple[str, ...]:
        return self._on_all_ranks(lambda: super(RankLab, self).save(self._own_folder(folder)))

    def _not_finite(self) -> tuple[str, ...]:
        """Returns arms that are not finite on any rank: a checkpoint that some ranks lack could not be resumed."""
        return tuple(sorted(set().union(*_from_all_ranks(super()._not_finite()))))

    def _read(self, folder: str) -> dict[str, State]:
        return self._on_all_ranks(lambda: super(RankLab, self)._read(self._own_folder(folder)))

    def _own_folder(self, folder: str) -> str:
        return f"{folder}/rank-{self._rank}"

    def _on_all_ranks(self, body: Callable[[], T]) -> T:
        """Runs `body`; raises StoreError on every rank if it fails on any of them."""
        answer, failure = None, ""
        try:
            answer = body()
        except StoreError as error:
            failure = str(error)
        for rank, message in enumerate(_from_all_ranks(failure)):
            if message:
                raise StoreError(f"rank {rank}: {message}")
        assert answer is not None
        return answer


# Digests are taken modulo this.
_DIGESTS = 1 << 63
# Figures of parts of a tensor that are merged by their mean, and by their maximum.
_MEANS = ("zeros", "underflow", "saturated", "not_finite")
_LARGEST_OF = ("amax", "largest_scale", "lag", "drift")


def _merge_slices(answers: Sequence[RankLines]) -> tuple[StreamLine, ...]:
    _check_batches(answers)
    _check_same(answers)
    return tuple(_merged_lines([answer.lines for answer in answers]))


def _costs(answers: Sequence[ArmCost]) -> ArmCost:
    """Returns the memory of the rank that takes most, with that of each rank; the reason, if one rank has none."""
    combined = most_memory([answer.memory or answer.why for answer in answers])
    if isinstance(combined, str):
        return next(answer for answer in answers if answer.memory is None)
    return next(
        replace(answer, memory=combined) for answer in answers if answer.memory and answer.memory.peak == combined.peak
    )


def _check_same(answers: Sequence[RankLines]) -> None:
    # Every rank is compared with the first, and the error names the one that differs.
    for rank, answer in enumerate(answers):
        if answer.faults:
            raise RanksDisagree(f"in a slice rank {rank} {answer.faults[0]}")
        for (name, first), (_, digest) in zip(answers[0].same, answer.same, strict=True):
            if digest != first:
                raise RanksDisagree(f"after a slice {name} of rank {rank} differ from those of rank 0")


def _check_batches(answers: Sequence[RankLines]) -> None:
    """Checks that all ranks read the same batch: their parts must add up to it, times the ranks that read the same
    part."""
    for looked_at in _by_position([answer.batches for answer in answers]):
        step, _, step_digest = looked_at[0]
        for rank, (_, _, digest) in enumerate(looked_at):
            if digest != step_digest:
                raise RanksDisagree(
                    f"in step {step} rank {rank} reads a different text than rank 0, or uses another seed"
                )
        copies = len(answers) // answers[0].shares
        if (sum(part for _, part, _ in looked_at) - copies * step_digest) % _DIGESTS:
            raise RanksDisagree(f"in step {step} the ranks did not read each sequence of the batch exactly once")


def _merged_lines(answers: Sequence[tuple[StreamLine, ...]]) -> Iterator[StreamLine]:
    for rank, lines in enumerate(answers):
        if [type(line) for line in lines] != [type(line) for line in answers[0]]:
            raise RanksDisagree(f"rank 0 and rank {rank} send different kinds of lines")
    for parts in _by_position(answers):
        yield _MERGE_BY_KIND[type(parts[0])](parts)


def _by_position(answers: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    if len({len(answer) for answer in answers}) > 1:
        raise RanksDisagree("they send different numbers of lines")
    yield from zip(*answers, strict=True)


def _row(rows: Sequence[StepRow]) -> StepRow:
    """Merges rows of a step, which takes as long as its slowest rank; all other figures must be bit-identical."""
    first = rows[0]
    for rank, row in enumerate(rows):
        for field in fields(row):
            expected, value = getattr(first, field.name), getattr(row, field.name)
            if field.name != "seconds" and repr(value) != repr(expected):
                raise RanksDisagree(
                    f"in step {first.step} of {first.arm} {field.name} is {expected!r} on rank 0 and {value!r} on rank "
                    f"{rank}"
                )
    return replace(first, seconds=max(row.seconds for row in rows))


def _reading(parts: Sequence[LayerReading]) -> LayerReading:
    """Merges readings of a tensor whose equal parts are on the ranks; one that all ranks have is unchanged."""
    first = parts[0]
    if all(part == first for part in parts):
        return first
    # Moments of the whole from those of equal parts.
    mean = _mean([part.mean for part in parts])
    squares = _mean([part.deviation**2 + part.mean**2 for part in parts])
    scales = [part.scale for part in parts]
    figures: State = {}
    for name in _MEANS:
        figures[name] = _mean([getattr(part, name) for part in parts])
    for name in _LARGEST_OF:
        values = (getattr(part, name) for part in parts)
        figures[name] = max((value for value in values if value is not None), default=None)
    return replace(
        first,
        smallest=min((part.smallest for part in parts if part.smallest), default=0.0),
        mean=mean,
        deviation=math.sqrt(max(0.0, squares - mean**2)),
        least_scale=min(part.least_scale for part in parts),
        scale=scales[0] if len(set(scales)) == 1 else 2.0 ** _mean([math.log2(scale) for scale in scales]),
        signal_to_noise=_signal_to_noise(parts),
        **figures,
    )


def _signal_to_noise(parts: Sequence[LayerReading]) -> float | None:
    signal = noise = 0.0
    for part in parts:
        if part.signal_to_noise is None:
            return None
        power = part.mean**2 + part.deviation**2
        signal += power
        noise += 0.0 if part.signal_to_noise >= EXACT_DB else power / 10 ** (part.signal_to_noise / 10)
    return EXACT_DB if not noise else 10 * math.log10(signal / noise)


def _figure(parts: Sequence[StepFigure]) -> StepFigure:
    figure = FIGURES.get(parts[0].name)
    combine = figure.over_ranks if figure is not None and figure.over_ranks is not None else _mean
    return replace(parts[0], value=combine([part.value for part in parts]))


def _event(parts: Sequence[TrainingEvent]) -> TrainingEvent:
    """Returns an event that all ranks have; otherwise that of the first rank that knows where it happened."""
    if all(part == parts[0] for part in parts):
        return parts[0]
    rank, event = next(((rank, part) for rank, part in enumerate(parts) if part.layer), (0, parts[0]))
    return replace(event, words=f"on rank {rank} of {len(parts)}: {event.words}")


def _mean(values: Sequence[float]) -> float:
    """Returns the mean; equal values keep their bits."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


_MERGE_BY_KIND: dict[type, Callable[..., StreamLine]] = {
    StepRow: _row,
    LayerReading: _reading,
    StepFigure: _figure,
    TrainingEvent: _event,
    Validation: lambda parts: replace(parts[0], loss=_mean([part.loss for part in parts])),
}


# All ranks evaluate the whole text with the same weights; only scales may differ between ranks.
MERGES: Merges = {"advance": _merge_slices, "validate": lambda answers: tuple(_merged_lines(answers)), "alone": _costs}


if __name__ == "__main__":
    main(RankLab)
