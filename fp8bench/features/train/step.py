"""One training step, from its batch to its lines: batch, forward, backward, clipping, update, readings."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.train.lab.made import SILENT
from fp8bench.features.train.lab.own_model import OwnModel, check_batches
from fp8bench.features.train.lab.rates import joint
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
from fp8bench.report.panels import together as group_values
from fp8bench.user_code import own_words
from fp8bench.worker.products import product_like


def advance(trainer: Trainer, phase: Phases = SILENT, watched: bool = True) -> Iterator[StreamLine]:
    """Takes an arm's next step and yields its lines; none if the arm has stopped or is done."""
    if trainer.stopped or trainer.step == trainer.task.steps:
        return
    if trainer.step == 0 and (product := product_like(trainer.precision, trainer.task.facts)):
        words = f"the numbers of a product are those of {product}, not of {trainer.precision.mode}"
        yield trainer.event(FALLBACK, words)
    yield from take_step(trainer, phase, watched)


def take_step(trainer: Trainer, phase: Phases, watched: bool) -> Iterator[StreamLine]:
    """Takes one step of an arm and yields its lines: the row of figures, readings if the step is watched, and events.
    Every stride-th step is watched. Without `watched` none is, and the size of updates is not measured."""
    optimizer, together, started = trainer.optimizer, trainer.together, time.perf_counter()
    trainer.made.renew_scales(trainer.are_scales_due)
    measured, watched = watched, watched and trainer.step % trainer.task.stride == 0

    # 1. Fix the rate and the loss scale, and remember the state needed to repeat the step if it is not finite.
    share, scale, casts = trainer.rate_share(), trainer.loss_scale.scale, trainer.remember_casts()
    rate = optimizer.rate * share  # now: a user's schedule changes it with the update
    wire = StepWire(together.rank, repeatable=False) if watched and trainer.task.facts.ranks > 1 else None
    hooks = trainer.watch.step() if watched else nullcontext()
    with wire or nullcontext(), trainer.present(phase), hooks as readings:
        # 2. Forward and backward: gradients of the scaled loss add up over the micro-batches.
        loss = accumulate_gradients(trainer, scale, phase)

        # 3. Ranks average their gradients.
        together.average(optimizer.gradients, phase)

        # 4. Unscale and clip: compute the divisor of each gradient, and whether the update is skipped.
        norms = together.norms(optimizer.gradients.norms())
        norm = joint(norms) / scale
        gradients = [size / scale for size in norms] if readings is not None else []
        skip = (~(loss + norm).isfinite()).to(torch.float32)
        clippings, clipping = clip(norms, norm, scale, trainer.most_norm, trainer.clip_groups)
        divisors = [divisor * scale for divisor in together.mine(clippings)]

        # 5. Update the weights, and round low-precision state.
        optimizer.weights.draws(seed_of("round", trainer.task.seed, trainer.step))
        with phase.optimizer_step:
            optimizer.step(share, divisors, skip, measured)

        # 6. Read the step's figures: the only time that the host waits for the device.
        norms = together.norms([*optimizer.update_norms, *optimizer.weight_norms])
        moved, sizes = norms[: len(norms) // 2], norms[len(norms) // 2 :]
        figures = torch.stack([loss, norm, clipping, joint(moved), joint(sizes)]).tolist()
        messages = () if wire is None else wire.list_sent(together.rank)  # before readings send their messages
        if readings is not None:
            together.refresh(phase)
            names = trainer.parameters
            readings.see_gradients(dict(zip(names, gradients, strict=True)))
            readings.see_update(dict(zip(names, moved, strict=True)), dict(zip(names, sizes, strict=True)))
    seconds = time.perf_counter() - started

    # 7. Yield the row, then the readings of tensors. A watched step takes longer than others, so its row has no time.
    row = _row(trainer, figures, rate, scale, 0.0 if watched else seconds)
    yield row
    if readings is not None:
        yield from trainer.watch.lines(trainer.step, readings)
        place = row.arm, row.seed, row.step
        yield StepFigure(*place, WATCHED_SECONDS, time.perf_counter() - started)
        for message in messages:
            yield StepFigure(*place, WIRE_BYTES, message.bytes, f"{message.operation} {message.dtype}")

    # 8. Adapt the loss scale; find the first faulty tensor of a step that was not finite.
    yield from trainer.end_step(row, casts, lambda: find_faulty_tensor(trainer, scale, casts))


def accumulate_gradients(trainer: Trainer, scale: float, phase: Phases, finding: bool = False) -> Tensor:
    """Runs all micro-batches of the step forward and backward; returns the mean of their losses over all ranks.
    `finding`: hooks inspect all tensors."""
    maker, count, losses = trainer.made, trainer.settings.micro_batches, []
    # Gradients of the previous step were kept until now, because watching reads them after the step.
    trainer.optimizer.gradients.begin()
    with maker.cached_weights.cast(phase):  # each weight is cast once for all micro-batches
        for number in range(count):
            # a. The batch, which depends only on seed, step and micro-batch.
            with phase.data_load:
                batch = maker.read_batch(trainer.step, number)
            # b. Forward, with the same random numbers in every arm.
            with maker.seed_batch(trainer.step, number):
                loss = maker.compute_loss(batch, phase, finding)
                # c. Backward from the scaled loss, so that small gradients do not underflow.
                (loss * (scale / count)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().to(torch.float32).reshape(()))
    with phase.communication:
        return trainer.together.mean(torch.stack(losses).mean())


def clip(
    norms: list[Tensor], norm: Tensor, scale: float, most: float, groups: Sequence[str]
) -> tuple[list[Tensor], Tensor]:
    """Returns the divisor of each gradient, and the common factor by which all shrink. `norms` are of scaled gradients,
    `norm` that of all without the scale; `groups` names the group of each parameter."""
    if not most:
        return [torch.ones_like(norm)] * len(norms), torch.ones_like(norm)
    by_group = group_values(zip(groups, norms, strict=True))
    if len(by_group) == 1:
        clipping = (norm / most).clamp(min=1.0)
        return [clipping] * len(norms), clipping
    parts = {group: joint(values) / scale for group, values in by_group.items()}
    divisors = {group: (part / most).clamp(min=1.0) for group, part in parts.items()}
    clipped = joint([part / divisors[group] for group, part in parts.items()])
    return [divisors[group] for group in groups], (norm / clipped).clamp(min=1.0)


def find_faulty_tensor(trainer: Trainer, scale: float, casts: CastState) -> FaultyTensor | None:
    """Finds the first tensor of the step that was not finite, by repeating the step without an update."""
    trainer.recall_casts(casts)
    finder = Finder()
    with trainer.present(SILENT), finder.attach(trainer.model):
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
    """Takes a step of each arm of a user's model; returns how much each converts. Raises UsageError if it cannot be
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
