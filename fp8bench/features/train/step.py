"""One training step, from its batch to its lines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.train.lab.made import SILENT
from fp8bench.features.train.lab.own_model import OwnModel, check_batches
from fp8bench.features.train.lab.rates import clippings_of, joint
from fp8bench.features.train.lab.step_optimizer import seed_of
from fp8bench.features.train.lab.trainer import CastState, Trainer
from fp8bench.features.train.lab.watched_step import FaultyTensor, Finder
from fp8bench.features.train.values import (
    FALLBACK,
    WATCHED_SECONDS,
    WIRE_BYTES,
    SeedTask,
    StepFigure,
    StepRow,
    StreamLine,
)
from fp8bench.model.step import Coverage
from fp8bench.nn.parallel.wire import StepWire
from fp8bench.protocols import Phases
from fp8bench.user_code import own_words
from fp8bench.worker.products import product_like


def advance(trainer: Trainer, phase: Phases = SILENT, watched: bool = True) -> Iterator[StreamLine]:
    """Take an arm's next step and yield its lines; none where the arm has stopped or is done."""
    if trainer.stopped or trainer.step == trainer.task.steps:
        return
    if trainer.step == 0 and (other := product_like(trainer.precision, trainer.task.facts)):
        words = f"the numbers of a product are those of {other}, not of {trainer.precision.mode}"
        yield trainer.event(FALLBACK, words)
    yield from take_step(trainer, phase, watched)


def take_step(trainer: Trainer, phase: Phases, watched: bool) -> Iterator[StreamLine]:
    """Take one step of an arm and yield its lines: the row of figures, readings where the step is watched, and events.
    Every stride-th step is watched. Without `watched` none is, and how far weights move is not measured."""
    optimizer, together, started = trainer.optimizer, trainer.together, time.perf_counter()
    measured, watched = watched, watched and trainer.step % trainer.task.stride == 0

    # 1. Fix the rate and the loss scale, and remember what is needed to take the step again if it is not finite.
    share, scale, casts = trainer.rate_share(), trainer.loss_scale.scale, trainer.remember_casts()
    rate = optimizer.rate * share
    wire = StepWire(together.rank, again=False) if watched and trainer.task.facts.ranks > 1 else None
    hooks = trainer.watch.step() if watched else nullcontext()
    with wire or nullcontext(), trainer.present(phase), hooks as readings:
        # 2. Forward and backward: gradients of the scaled loss add up over the micro-batches.
        loss = accumulate_gradients(trainer, scale, phase)

        # 3. Ranks average their gradients.
        together.average(optimizer.gradients, phase)

        # 4. Unscale and clip: find by what each gradient is divided in the update, and whether the update is skipped.
        norms = together.norms(optimizer.gradients.norms())
        norm = joint(norms) / scale
        skip = (~(loss + norm).isfinite()).to(torch.float32)
        clippings, clipping = clippings_of(norms, norm, scale, trainer.most_norm, trainer.clip_groups)
        divisors = [each * scale for each in together.mine(clippings)]

        # 5. Update the weights, and round what is kept in low precision.
        optimizer.weights.draws(seed_of("round", trainer.task.seed, trainer.step))
        with phase.optimizer_step:
            optimizer.step(share, divisors, skip, measured)

        # 6. Read the step's figures: the only time that the host waits for the device.
        norms = together.norms([*optimizer.update_norms, *optimizer.weight_norms])
        moved, sizes = norms[: len(norms) // 2], norms[len(norms) // 2 :]
        figures = torch.stack([loss, norm, clipping, joint(moved), joint(sizes)]).tolist()
        messages = () if wire is None else wire.sent(together.rank)  # before readings send messages of their own
        if readings is not None:
            together.updated(phase)
            readings.updated(*(dict(zip(trainer.parameters, each, strict=True)) for each in (moved, sizes)))
    seconds = time.perf_counter() - started

    # 7. Yield the row, then the readings of tensors. A watched step takes longer than others: its row has no time.
    row = _row(trainer, figures, rate, scale, 0.0 if watched else seconds)
    yield row
    if readings is not None:
        yield from trainer.watch.lines(trainer.step, readings)
        yield StepFigure(row.arm, row.seed, row.step, WATCHED_SECONDS, time.perf_counter() - started)
        for message in messages:
            what = f"{message.operation} {message.dtype}"
            yield StepFigure(row.arm, row.seed, row.step, WIRE_BYTES, message.bytes, what)

    # 8. Adapt the loss scale; look for the first faulty tensor of a step that was not finite.
    yield from trainer.end_step(row, casts, lambda: find_faulty_tensor(trainer, scale, casts))


def accumulate_gradients(trainer: Trainer, scale: float, phase: Phases, finding: bool = False) -> Tensor:
    """Run all micro-batches of the step forward and backward; returns the mean of their losses over all ranks.
    `finding`: hooks look at all tensors."""
    made, count, losses = trainer.made, trainer.settings.micro_batches, []
    trainer.optimizer.gradients.begin()
    with made.cached_weights.cast(phase):  # each weight is cast once for all micro-batches
        for number in range(count):
            with phase.data_load:
                batch = made.read_batch(trainer.step, number)
            with made.seeded(trainer.step, number):
                loss = made.compute_loss(batch, phase, finding)
                (loss * (scale / count)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().to(torch.float32).reshape(()))
    with phase.communication:
        return trainer.together.mean(torch.stack(losses).mean())


def find_faulty_tensor(trainer: Trainer, scale: float, casts: CastState) -> FaultyTensor | None:
    """The first tensor of the step that was not finite, found by taking the step again without an update."""
    trainer.recall_casts(casts)
    finder = Finder()
    with trainer.present(SILENT), finder.attached(trainer.model):
        accumulate_gradients(trainer, scale, SILENT, finding=True)
    trainer.recall_casts(CastState({}, casts.statistics))
    return finder.place


def _row(trainer: Trainer, figures: list[float], rate: float, scale: float, seconds: float) -> StepRow:
    loss, norm, clipping, moved, size = figures
    finite = math.isfinite(loss + norm)
    clipped, ratio = 1 - 1 / clipping if finite else 0.0, moved / size if size else 0.0
    return StepRow(
        trainer.arm.name,
        trainer.task.seed,
        trainer.step,
        loss,
        rate,
        norm,
        clipped,
        size,
        ratio,
        scale,
        trainer.tokens,
        seconds,
        skipped=not finite,
    )


def examine_arms(task: SeedTask) -> tuple[tuple[str, Coverage], ...]:
    """Take a step of each arm of a user's model; returns how much each converts. Raises UsageError for what cannot be
    trained."""
    coverages = []
    for number, arm in enumerate(task.arms):
        trainer = Trainer(task, arm)
        assert isinstance(trainer.made, OwnModel)
        if number == 0:
            check_batches(task.settings.make, trainer.made.given, task.seed, task.facts)
        try:
            for _ in advance(trainer, watched=False):
                pass
            trainer.validate()
        except (Fp8benchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UsageError(f"{task.settings.make}: a step of {arm.name} failed: {own_words(error)}.") from error
        coverage = trainer.made.coverage()
        if coverage is not None:
            coverages.append((arm.name, coverage))
    return tuple(coverages)
