"""One training step, from its batch to its lines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8bench.features.train.lab.rates import clippings_of, joint
from fp8bench.features.train.lab.step_optimizer import seed_of
from fp8bench.features.train.values import WATCHED_SECONDS, WIRE_BYTES, StepFigure, StepRow, StreamLine
from fp8bench.nn.parallel.wire import StepWire
from fp8bench.protocols import Phases

if TYPE_CHECKING:
    from fp8bench.features.train.lab.trainer import Trainer


def take_step(trainer: Trainer, phase: Phases, watched: bool) -> Iterator[StreamLine]:
    """Take one step of an arm and yield its lines: the row of figures, readings where the step is watched, and events.
    Every stride-th step is watched. Without `watched` none is, and how far weights move is not measured."""
    optimizer, together, started = trainer.optimizer, trainer.together, time.perf_counter()
    measured, watched = watched, watched and trainer.step % trainer.task.stride == 0

    # 1. Fix the rate and the loss scale, and remember what is needed to take the step again if it is not finite.
    share, scale, casts = trainer.rate_share(), trainer.loss_scale.scale, trainer.remember_casts()
    rate = optimizer.rate * share
    wire = StepWire(together.rank, again=False) if watched and trainer.task.facts.ranks > 1 else None
    hooks = trainer.watch.step(trainer.settings.micro_batches) if watched else nullcontext()
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
    yield from trainer.end_step(row, casts)


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


def _row(trainer: Trainer, figures: list[float], rate: float, scale: float, seconds: float) -> StepRow:
    loss, norm, clipping, moved, size = figures
    finite = math.isfinite(loss + norm)
    clipped, ratio = 1 - 1 / clipping if finite else 0.0, moved / size if size else 0.0
    return StepRow(
        trainer.arm.name, trainer.task.seed, trainer.step, loss, rate, norm, clipped, size, ratio, scale,
        trainer.tokens, seconds, skipped=not finite,
    )  # fmt: skip
