"""What several ranks say of a training as one: what must be alike is compared, what is of parts is put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from fp8bench.errors import RanksDisagree
from fp8bench.features.train.values import (
    ArmCost,
    LayerReading,
    RankLines,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.measure.ranks.answers import Merges, most_memory
from fp8bench.units import EXACT_DB

T = TypeVar("T")
# Digests are below this.
_DIGESTS = 1 << 63
# Figures of a rank's own tensors whose largest is that of all ranks; of the others it is the mean.
_MEANS = ("zeros", "underflow", "saturated", "not_finite")
_LARGEST_OF = ("amax", "largest_scale", "lag", "drift")
_LARGEST = ("output_amax", "attention_score", "batch_norm_drift", "memory", "watched_seconds")


def steps(answers: Sequence[RankLines]) -> tuple[StreamLine, ...]:
    _check_batches(answers)
    _check_same(answers)
    return tuple(_merged_lines([answer.lines for answer in answers]))


def looks(answers: Sequence[tuple[StreamLine, ...]]) -> tuple[StreamLine, ...]:
    """Every rank has looked at the whole text, with the same weights and, where scales are its own, its own scales."""
    return tuple(_merged_lines(answers))


def most(answers: Sequence[ArmCost]) -> ArmCost:
    """That of the rank that takes most, with that of each; of one that could not say the reason."""
    whole = most_memory([answer.memory or answer.why for answer in answers])
    if isinstance(whole, str):
        return next(answer for answer in answers if answer.memory is None)
    return next(replace(own, memory=whole) for own in answers if own.memory and own.memory.peak == whole.peak)


def _check_same(answers: Sequence[RankLines]) -> None:
    for rank, other in enumerate(answers):
        if other.faults:
            raise RanksDisagree(f"in a slice rank {rank} {other.faults[0]}")
        for (name, first), (_, own) in zip(answers[0].same, other.same, strict=True):
            if own != first:
                raise RanksDisagree(f"after a slice {name} of rank {rank} are not those of rank 0")


def _check_batches(answers: Sequence[RankLines]) -> None:
    """All ranks mean the same batch, and their parts come to that batch: as often as they are fewer than the ranks."""
    for looked_at in _beside([answer.batches for answer in answers]):
        step, _, whole = looked_at[0]
        for rank, (_, _, other) in enumerate(looked_at):
            if other != whole:
                raise RanksDisagree(f"in step {step} rank {rank} reads another text, or of another seed, than rank 0")
        copies = len(answers) // answers[0].shares
        if (sum(own for _, own, _ in looked_at) - copies * whole) % _DIGESTS:
            raise RanksDisagree(f"in step {step} what the ranks have read is not the batch, each sequence once")


def _merged_lines(answers: Sequence[tuple[StreamLine, ...]]) -> Iterator[StreamLine]:
    for rank, lines in enumerate(answers):
        if [type(line) for line in lines] != [type(line) for line in answers[0]]:
            raise RanksDisagree(f"rank 0 and rank {rank} do not say the same kinds of things")
    for some in _beside(answers):
        yield _MERGED[type(some[0])](some)


def _beside(answers: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    if len({len(answer) for answer in answers}) > 1:
        raise RanksDisagree("they do not say equally many things")
    yield from zip(*answers, strict=True)


def _row(rows: Sequence[StepRow]) -> StepRow:
    """A step takes as long as its slowest rank; all else is the same everywhere, bit by bit."""
    first = rows[0]
    for rank, row in enumerate(rows):
        for field in fields(row):
            before, own = getattr(first, field.name), getattr(row, field.name)
            if field.name != "seconds" and repr(own) != repr(before):
                raise RanksDisagree(
                    f"in step {first.step} of {first.arm} {field.name} is {before!r} on rank 0 and {own!r} on rank "
                    f"{rank}"
                )
    return replace(first, seconds=max(row.seconds for row in rows))


def _reading(parts: Sequence[LayerReading]) -> LayerReading:
    """A tensor whose parts, of equally many values, lie on the ranks; one that all of them have is as it is."""
    first = parts[0]
    if all(part == first for part in parts):
        return first
    mean = _mean([part.mean for part in parts])
    squares = _mean([part.deviation**2 + part.mean**2 for part in parts])
    scales = [part.scale for part in parts]
    figures: dict[str, Any] = {name: _mean([getattr(part, name) for part in parts]) for name in _MEANS}
    figures |= {name: _largest([getattr(part, name) for part in parts]) for name in _LARGEST_OF}
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
    together = max if parts[0].name in _LARGEST else _mean
    return replace(parts[0], value=together([part.value for part in parts]))


def _look(parts: Sequence[Validation]) -> Validation:
    return replace(parts[0], loss=_mean([part.loss for part in parts]))


def _event(parts: Sequence[TrainingEvent]) -> TrainingEvent:
    """One that all ranks say is theirs; else that of the first rank which knows where it was."""
    if all(part == parts[0] for part in parts):
        return parts[0]
    rank, told = next(((rank, part) for rank, part in enumerate(parts) if part.layer), (0, parts[0]))
    return replace(told, words=f"on rank {rank} of {len(parts)}: {told.words}")


def _mean(values: Sequence[float]) -> float:
    """What is the same everywhere stays as it is."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


_MERGED: dict[type, Callable[..., StreamLine]] = {
    StepRow: _row, LayerReading: _reading, StepFigure: _figure, TrainingEvent: _event,
    Validation: _look,
}  # fmt: skip


MERGES: Merges = {"advance": steps, "validate": looks, "alone": most}
