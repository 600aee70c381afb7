"""The lab of one rank, which trains its part of every arm, and functions that merge the answers of all ranks. The
parent process checks that everything the ranks share is equal, and combines their parts.
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
    RankTrainingLines,
    SeedTask,
    State,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.measure.ranks.answers import MergeFunctionByRequest, merge_memory_of_ranks
from fp8bench.units import EXACT_SQNR_DB
from fp8bench.worker.faults import FaultDescription
from fp8bench.worker.ranks.bench import RankBench
from fp8bench.worker.ranks.main import main

# The module that a RanksWorker runs.
MODULE = "fp8bench.features.train.lab.rank_lab"
T = TypeVar("T")


def _gather_rank_answers(answer: Any) -> list[Any]:
    """Returns the answers of all ranks, in the order of ranks."""
    from fp8bench.nn.parallel.exchanges import gather_rank_answers  # importing this module imports torch

    return gather_rank_answers(answer)


class RankLab(RankBench, Lab):
    """The lab of one rank. All ranks receive the same calls at the same time."""

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """Builds the arms. An arm that fails on one rank is dropped on all ranks. Otherwise the other ranks would
        wait for it in every step.
        """
        arm_states = super().begin(task)
        for rank, faults in enumerate(_gather_rank_answers(self._unbuilt)):
            for name, fault in faults.items():
                self._trainers.pop(name, None)
                self._unbuilt.setdefault(name, FaultDescription(*fault)._replace(text=f"rank {rank}: {fault[1]}"))
        return tuple(state for state in arm_states if state.arm in self._trainers)

    def advance(self, arm: str, steps: int) -> RankTrainingLines:  # type: ignore[override]
        """Trains an arm. Returns this rank's lines, and digests of all state that must be equal on all ranks."""
        lines = super().advance(arm, steps)
        trainer = self._get_arm_trainer(arm)
        # Digests once per call are enough: a rank whose weights differ in one step keeps different weights. Digests
        # do not show an error that is equal on all ranks. Tests compare ranks with one process for that.
        equal_figures = (
            ("the number of steps", trainer.step),
            ("the weights", trainer.digest_shared_weights()),
            ("the scales", trainer.digest_scales()),
        )
        return RankTrainingLines(lines, equal_figures)

    def save(self, folder: str) -> tuple[str, ...]:
        return self._on_all_ranks(lambda: super(RankLab, self).save(self._rank_folder(folder)))

    def _list_nonfinite_arms(self) -> tuple[str, ...]:
        """Returns the arms that have NaN or infinity on at least one rank. No rank may store such an arm, because a
        checkpoint needs the files of all ranks.
        """
        return tuple(sorted(set().union(*_gather_rank_answers(super()._list_nonfinite_arms()))))

    def _read_checkpoint(self, folder: str) -> dict[str, State]:
        return self._on_all_ranks(lambda: super(RankLab, self)._read_checkpoint(self._rank_folder(folder)))

    def _rank_folder(self, folder: str) -> str:
        return f"{folder}/rank-{self._rank}"

    def _on_all_ranks(self, body: Callable[[], T]) -> T:
        """Runs `body`. If it fails on any rank, raises StoreError on every rank."""
        answer = None
        rank_fault_text = ""
        try:
            answer = body()
        except StoreError as error:
            rank_fault_text = str(error)
        for rank, message in enumerate(_gather_rank_answers(rank_fault_text)):
            if message:
                raise StoreError(f"rank {rank}: {message}")
        assert answer is not None
        return answer


# Figures of a tensor that is sharded among ranks are merged by the mean or by the maximum of the ranks' values.
_RANK_AVERAGED_FIGURES = ("zeros", "underflow", "saturated", "not_finite")
_RANK_MAXIMUM_FIGURES = ("amax", "largest_scale", "lag", "drift")


def _merge_rank_lines(answers: Sequence[RankTrainingLines]) -> tuple[StreamLine, ...]:
    """Checks that the ranks train the same model, and merges the lines that they return for the same steps."""
    # Every rank is compared with rank 0, and the error names the rank that differs.
    for rank, answer in enumerate(answers):
        for (name, expected), (_, digest) in zip(answers[0].same, answer.same, strict=True):
            if digest != expected:
                raise RanksDisagree(f"{name} of rank {rank} differ from those of rank 0")
    return tuple(_merge_lines([answer.lines for answer in answers]))


def _merge_rank_costs(answers: Sequence[ArmCost]) -> ArmCost:
    """Returns the cost of the rank that uses most memory, with the memory of every rank. If the memory of a rank is
    unknown, returns the cost of that rank, whose field `why` has the reason.
    """
    memory_over_ranks = merge_memory_of_ranks([answer.memory or answer.why for answer in answers])
    if isinstance(memory_over_ranks, str):
        return next(answer for answer in answers if answer.memory is None)
    return next(
        replace(answer, memory=memory_over_ranks)
        for answer in answers
        if answer.memory and answer.memory.peak == memory_over_ranks.peak
    )


def _merge_lines(answers: Sequence[tuple[StreamLine, ...]]) -> Iterator[StreamLine]:
    for rank, lines in enumerate(answers):
        if len(lines) != len(answers[0]):
            raise RanksDisagree(f"rank {rank} sent {len(lines)} lines for the same steps, and rank 0 {len(answers[0])}")
    for parts in zip(*answers, strict=True):
        yield _MERGE_BY_LINE_KIND[type(parts[0])](parts)


def _merge_rows(rows: Sequence[StepRow]) -> StepRow:
    """Merges the rows of one step, one from each rank. The time is that of the slowest rank. All other figures must
    be bit-identical.
    """
    first_row = rows[0]
    for rank, row in enumerate(rows):
        for field in fields(row):
            expected = getattr(first_row, field.name)
            value = getattr(row, field.name)
            # Compare the texts of floats, because a NaN would never equal itself.
            if field.name != "seconds" and repr(value) != repr(expected):
                raise RanksDisagree(
                    f"in step {first_row.step} of {first_row.arm} {field.name} is {expected!r} on rank 0 and {value!r} "
                    f"on rank {rank}"
                )
    return replace(first_row, seconds=max(row.seconds for row in rows))


def _merge_rank_readings(parts: Sequence[LayerReading]) -> LayerReading:
    """Merges the readings of a tensor that is divided equally among ranks. If all ranks have the same reading, returns
    it unchanged.
    """
    first_reading = parts[0]
    if all(part == first_reading for part in parts):
        return first_reading
    # Every rank has equally many values of the tensor, so its moments are the means of the ranks' moments.
    mean = _compute_mean([part.mean for part in parts])
    mean_square = _compute_mean([part.deviation**2 + part.mean**2 for part in parts])
    scales = [part.scale for part in parts]
    figures: State = {}
    for name in _RANK_AVERAGED_FIGURES:
        figures[name] = _compute_mean([getattr(part, name) for part in parts])
    for name in _RANK_MAXIMUM_FIGURES:
        values = (getattr(part, name) for part in parts)
        figures[name] = max((value for value in values if value is not None), default=None)
    return replace(
        first_reading,
        smallest=min((part.smallest for part in parts if part.smallest), default=0.0),
        mean=mean,
        deviation=math.sqrt(max(0.0, mean_square - mean**2)),
        least_scale=min(part.least_scale for part in parts),
        scale=scales[0] if len(set(scales)) == 1 else 2.0 ** _compute_mean([math.log2(scale) for scale in scales]),
        signal_to_noise=_merge_signal_to_noise(parts),
        **figures,
    )


def _merge_signal_to_noise(parts: Sequence[LayerReading]) -> float | None:
    signal_power = noise = 0.0
    for part in parts:
        if part.signal_to_noise is None:
            return None
        part_mean_square = part.mean**2 + part.deviation**2
        signal_power += part_mean_square
        noise += 0.0 if part.signal_to_noise >= EXACT_SQNR_DB else part_mean_square / 10 ** (part.signal_to_noise / 10)
    return EXACT_SQNR_DB if not noise else 10 * math.log10(signal_power / noise)


def _merge_figures(parts: Sequence[StepFigure]) -> StepFigure:
    figure = FIGURES.get(parts[0].name)
    combine_rank_values = (
        figure.combine_over_ranks if figure is not None and figure.combine_over_ranks is not None else _compute_mean
    )
    return replace(parts[0], value=combine_rank_values([part.value for part in parts]))


def _merge_events(parts: Sequence[TrainingEvent]) -> TrainingEvent:
    """Returns the event that all ranks have. If the ranks' events differ, returns the event of the first rank that
    names a layer.
    """
    if all(part == parts[0] for part in parts):
        return parts[0]
    rank, event = next(((rank, part) for rank, part in enumerate(parts) if part.layer), (0, parts[0]))
    return replace(event, words=f"on rank {rank} of {len(parts)}: {event.words}")


def _compute_mean(values: Sequence[float]) -> float:
    """Returns the mean. If all values are equal, the mean is exactly this value."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


_MERGE_BY_LINE_KIND: dict[type, Callable[..., StreamLine]] = {
    StepRow: _merge_rows,
    LayerReading: _merge_rank_readings,
    StepFigure: _merge_figures,
    TrainingEvent: _merge_events,
    Validation: lambda parts: replace(parts[0], loss=_compute_mean([part.loss for part in parts])),
}


# In a validation, all ranks evaluate the same text with the same weights. Only their scales may differ.
MERGE_BY_METHOD: MergeFunctionByRequest = {
    "advance": _merge_rank_lines,
    "validate": lambda answers: tuple(_merge_lines(answers)),
    "measure_memory": _merge_rank_costs,
}


if __name__ == "__main__":
    main(RankLab)
