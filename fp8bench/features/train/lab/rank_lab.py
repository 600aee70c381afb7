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
    RankLines,
    SeedTask,
    State,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.measure.ranks.answers import MergeFunctions, merge_memory
from fp8bench.units import EXACT_DB
from fp8bench.worker.faults import DescribedFault
from fp8bench.worker.ranks.bench import RankBench
from fp8bench.worker.ranks.main import main

# The module that a RanksWorker runs.
MODULE = "fp8bench.features.train.lab.rank_lab"
T = TypeVar("T")


def _gather_answers(answer: Any) -> list[Any]:
    """Returns the answers of all ranks, in the order of ranks."""
    from fp8bench.nn.parallel.exchanges import gather_answers  # importing this module imports torch

    return gather_answers(answer)


class RankLab(RankBench, Lab):
    """The lab of one rank. All ranks receive the same calls at the same time."""

    def begin(self, task: SeedTask) -> tuple[ArmState, ...]:
        """Builds the arms. An arm that fails on one rank is dropped on all ranks. Otherwise the other ranks would
        wait for it in every step.
        """
        states = super().begin(task)
        for rank, faults in enumerate(_gather_answers(self._unbuilt)):
            for name, fault in faults.items():
                self._trainers.pop(name, None)
                self._unbuilt.setdefault(name, DescribedFault(*fault)._replace(text=f"rank {rank}: {fault[1]}"))
        return tuple(state for state in states if state.arm in self._trainers)

    def advance(self, arm: str, steps: int) -> RankLines:  # type: ignore[override]
        """Trains an arm, and returns this rank's lines with digests of what must be equal on all ranks."""
        lines = super().advance(arm, steps)
        trainer = self._get_trainer(arm)
        # Digests once per call are enough: a rank whose weights differ in one step keeps different weights. Digests
        # do not show an error that is equal on all ranks. Tests compare ranks with one process for that.
        named_digests = (
            ("the number of steps", trainer.step),
            ("the weights", trainer.digest_weights()),
            ("the scales", trainer.digest_scales()),
        )
        return RankLines(lines, named_digests)

    def save(self, folder: str) -> tuple[str, ...]:
        return self._on_all_ranks(lambda: super(RankLab, self).save(self._rank_folder(folder)))

    def _find_not_finite(self) -> tuple[str, ...]:
        """Returns the arms that have NaN or infinity on at least one rank. No rank may store such an arm, because a
        checkpoint needs the files of all ranks.
        """
        return tuple(sorted(set().union(*_gather_answers(super()._find_not_finite()))))

    def _read_checkpoint(self, folder: str) -> dict[str, State]:
        return self._on_all_ranks(lambda: super(RankLab, self)._read_checkpoint(self._rank_folder(folder)))

    def _rank_folder(self, folder: str) -> str:
        return f"{folder}/rank-{self._rank}"

    def _on_all_ranks(self, body: Callable[[], T]) -> T:
        """Runs `body`. If it fails on any rank, raises StoreError on every rank."""
        answer = None
        fault_text = ""
        try:
            answer = body()
        except StoreError as error:
            fault_text = str(error)
        for rank, message in enumerate(_gather_answers(fault_text)):
            if message:
                raise StoreError(f"rank {rank}: {message}")
        assert answer is not None
        return answer


# Figures of a tensor that is sharded among ranks are merged by the mean or by the maximum of the ranks' values.
_AVERAGED_FIGURES = ("zeros", "underflow", "saturated", "not_finite")
_MAXIMISED_FIGURES = ("amax", "largest_scale", "lag", "drift")


def _merge_rank_lines(answers: Sequence[RankLines]) -> tuple[StreamLine, ...]:
    """Checks that the ranks train the same model, and merges the lines that they return for the same steps."""
    # Every rank is compared with rank 0, and the error names the rank that differs.
    for rank, answer in enumerate(answers):
        for (name, expected), (_, digest) in zip(answers[0].same, answer.same, strict=True):
            if digest != expected:
                raise RanksDisagree(f"{name} of rank {rank} differ from those of rank 0")
    return tuple(_merge_lines([answer.lines for answer in answers]))


def _merge_costs(answers: Sequence[ArmCost]) -> ArmCost:
    """Returns the cost of the rank that uses most memory, with the memory of every rank. If the memory of a rank is
    unknown, returns the cost of this rank, in which `why` is the reason.
    """
    merged_memory = merge_memory([answer.memory or answer.why for answer in answers])
    if isinstance(merged_memory, str):
        return next(answer for answer in answers if answer.memory is None)
    return next(
        replace(answer, memory=merged_memory)
        for answer in answers
        if answer.memory and answer.memory.peak == merged_memory.peak
    )


def _merge_lines(answers: Sequence[tuple[StreamLine, ...]]) -> Iterator[StreamLine]:
    for rank, lines in enumerate(answers):
        if len(lines) != len(answers[0]):
            raise RanksDisagree(f"rank {rank} sent {len(lines)} lines of some steps, but rank 0 sent {len(answers[0])}")
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
            if field.name != "seconds" and repr(value) != repr(expected):
                raise RanksDisagree(
                    f"in step {first_row.step} of {first_row.arm} {field.name} is {expected!r} on rank 0 and {value!r} "
                    f"on rank {rank}"
                )
    return replace(first_row, seconds=max(row.seconds for row in rows))


def _merge_readings(parts: Sequence[LayerReading]) -> LayerReading:
    """Merges the readings of a tensor whose equal parts are on different ranks. If all ranks have the same reading,
    returns it unchanged.
    """
    first_reading = parts[0]
    if all(part == first_reading for part in parts):
        return first_reading
    # All parts have equally many values, so the tensor's moments are the means of the parts' moments.
    mean = _average([part.mean for part in parts])
    squares = _average([part.deviation**2 + part.mean**2 for part in parts])
    scales = [part.scale for part in parts]
    figures: State = {}
    for name in _AVERAGED_FIGURES:
        figures[name] = _average([getattr(part, name) for part in parts])
    for name in _MAXIMISED_FIGURES:
        values = (getattr(part, name) for part in parts)
        figures[name] = max((value for value in values if value is not None), default=None)
    return replace(
        first_reading,
        smallest=min((part.smallest for part in parts if part.smallest), default=0.0),
        mean=mean,
        deviation=math.sqrt(max(0.0, squares - mean**2)),
        least_scale=min(part.least_scale for part in parts),
        scale=scales[0] if len(set(scales)) == 1 else 2.0 ** _average([math.log2(scale) for scale in scales]),
        signal_to_noise=_merge_signal_to_noise(parts),
        **figures,
    )


def _merge_signal_to_noise(parts: Sequence[LayerReading]) -> float | None:
    signal_power = noise = 0.0
    for part in parts:
        if part.signal_to_noise is None:
            return None
        power = part.mean**2 + part.deviation**2
        signal_power += power
        noise += 0.0 if part.signal_to_noise >= EXACT_DB else power / 10 ** (part.signal_to_noise / 10)
    return EXACT_DB if not noise else 10 * math.log10(signal_power / noise)


def _merge_figures(parts: Sequence[StepFigure]) -> StepFigure:
    figure = FIGURES.get(parts[0].name)
    combine_values = figure.over_ranks if figure is not None and figure.over_ranks is not None else _average
    return replace(parts[0], value=combine_values([part.value for part in parts]))


def _merge_events(parts: Sequence[TrainingEvent]) -> TrainingEvent:
    """Returns the event that all ranks have. If the ranks' events differ, returns the event of the first rank that
    names a layer.
    """
    if all(part == parts[0] for part in parts):
        return parts[0]
    rank, event = next(((rank, part) for rank, part in enumerate(parts) if part.layer), (0, parts[0]))
    return replace(event, words=f"on rank {rank} of {len(parts)}: {event.words}")


def _average(values: Sequence[float]) -> float:
    """Returns the mean. If all values are equal, the mean is exactly this value."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


_MERGE_BY_LINE_KIND: dict[type, Callable[..., StreamLine]] = {
    StepRow: _merge_rows,
    LayerReading: _merge_readings,
    StepFigure: _merge_figures,
    TrainingEvent: _merge_events,
    Validation: lambda parts: replace(parts[0], loss=_average([part.loss for part in parts])),
}


# In a validation, all ranks evaluate the same text with the same weights. Only their scales may differ.
MERGES: MergeFunctions = {
    "advance": _merge_rank_lines,
    "validate": lambda answers: tuple(_merge_lines(answers)),
    "measure_memory": _merge_costs,
}


if __name__ == "__main__":
    main(RankLab)
