"""One training step, from its batch to its output lines: batch, forward, backward, clipping, update and readings."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.train.lab.arm_model import UNTIMED_PHASE_MARKERS
from fp8bench.features.train.lab.own_model import UserArmModel, check_user_batches
from fp8bench.features.train.lab.rates import join_norms
from fp8bench.features.train.lab.step_optimizer import derive_seed
from fp8bench.features.train.lab.trainer import CastsAndStatistics, Trainer
from fp8bench.features.train.lab.watched_step import FaultyTensor, FaultyTensorFinder
from fp8bench.features.train.values import (
    FALLBACK_EVENT,
    WATCHED_SECONDS,
    WIRE_BYTES,
    SeedTask,
    StepFigure,
    StepRow,
    StreamLine,
)
from fp8bench.model.step import Coverage
from fp8bench.nn.parallel.wire import StepTrafficWatch
from fp8bench.protocols import Phases
from fp8bench.report.panels import together as group_values
from fp8bench.user_code import own_words
from fp8bench.worker.products import identify_product


def advance(trainer: Trainer, phase: Phases = UNTIMED_PHASE_MARKERS, watched: bool = True) -> Iterator[StreamLine]:
    """Takes the next step of an arm and yields the lines of this step. Yields no lines if the arm has stopped or
    finished.
    """
    if trainer.stopped or trainer.step == trainer.task.steps:
        return
    if trainer.step == 0 and (product := identify_product(trainer.precision, trainer.task.facts)):
        sentence = f"the numbers of a product are those of {product}, not of {trainer.precision.mode}"
        yield trainer.event(FALLBACK_EVENT, sentence)
    yield from take_step(trainer, phase, watched)


def take_step(trainer: Trainer, phase: Phases, watched: bool) -> Iterator[StreamLine]:
    """Takes one step of an arm. Yields its row of figures, and events. Every stride-th step is watched: it also yields
    the readings of tensors. Without `watched` no step is watched, and the size of the update is not measured.
    """
    optimizer = trainer.optimizer
    parallelism = trainer.parallelism
    start = time.perf_counter()
    trainer.arm_model.set_scale_renewal(trainer.are_new_scales_due)
    is_measured = watched
    watched = watched and trainer.step % trainer.task.stride == 0

    # 1. Fix the rate and the loss scale. Remember the state that is needed to repeat the step if it gives NaN or
    # infinity.
    scheduled_rate_share = trainer.rate_share()
    scale = trainer.loss_scale.scale
    casts = trainer.copy_casts()
    rate = optimizer.rate * scheduled_rate_share  # read first: the update may call a user's schedule, which changes it
    step_wire = (
        StepTrafficWatch(parallelism.rank, repeatable=False) if watched and trainer.task.facts.ranks > 1 else None
    )
    watch_hooks = trainer.watch.watch_step() if watched else nullcontext()
    with step_wire or nullcontext(), trainer.materialise(phase), watch_hooks as readings:
        # 2. Forward and backward: gradients of the scaled loss add up over the micro-batches.
        loss = accumulate_gradients(trainer, scale, phase)

        # 3. Ranks average their gradients.
        parallelism.average_gradients(optimizer.gradients, phase)

        # 4. Unscale and clip: compute the divisor of each gradient, and whether the update is skipped.
        norms = parallelism.join_norms(optimizer.gradients.norms())
        gradient_norm = join_norms(norms) / scale
        gradients = [size / scale for size in norms] if readings is not None else []
        # The flag is a tensor, so that the host need not wait for the device before part 6.
        skip_step_flag = (~(loss + gradient_norm).isfinite()).to(torch.float32)
        clip_divisors, clip_factor = compute_clip_divisors(
            norms, gradient_norm, scale, trainer.max_norm, trainer.clip_groups
        )
        gradient_divisors = [divisor * scale for divisor in parallelism.select_stored_values(clip_divisors)]

        # 5. Update the weights, and round low-precision state.
        optimizer.weights.seed_rounding(derive_seed("round", trainer.task.seed, trainer.step))
        with phase.optimizer_step:
            optimizer.step(scheduled_rate_share, gradient_divisors, skip_step_flag, is_measured)

        # 6. Read the step's figures: only here the host waits for the device.
        norms = parallelism.join_norms([*optimizer.update_norms, *optimizer.weight_norms])
        change_norms = norms[: len(norms) // 2]
        weight_norms = norms[len(norms) // 2 :]
        figures = torch.stack(
            [loss, gradient_norm, clip_factor, join_norms(change_norms), join_norms(weight_norms)]
        ).tolist()
        # List the sent bytes before taking the readings, because the readings send values between ranks too.
        messages = () if step_wire is None else step_wire.list_sent_bytes(parallelism.rank)
        if readings is not None:
            parallelism.load_weights(phase)
            names = trainer.parameters
            readings.record_gradients(dict(zip(names, gradients, strict=True)))
            readings.record_update_norms(
                dict(zip(names, change_norms, strict=True)), dict(zip(names, weight_norms, strict=True))
            )
    seconds = time.perf_counter() - start

    # 7. Yield the row, then the readings of tensors. A watched step takes longer than others, so its row has no time.
    row = _make_step_row(trainer, figures, rate, scale, 0.0 if watched else seconds)
    yield row
    if readings is not None:
        yield from trainer.watch.make_stream_lines(trainer.step, readings)
        row_key = row.arm, row.seed, row.step
        yield StepFigure(*row_key, WATCHED_SECONDS, time.perf_counter() - start)
        for message in messages:
            yield StepFigure(*row_key, WIRE_BYTES, message.bytes, f"{message.operation} {message.dtype}")

    # 8. Adapt the loss scale. If the step was not finite, find its first faulty tensor.
    yield from trainer.finish_step(row, casts, lambda: find_faulty_tensor(trainer, scale, casts))


def accumulate_gradients(trainer: Trainer, scale: float, phase: Phases, is_finding: bool = False) -> Tensor:
    """Runs forward and backward of all micro-batches of a step. Returns the mean of their losses over all ranks. With
    `is_finding`, hooks inspect all tensors.
    """
    arm_model = trainer.arm_model
    micro_batches = trainer.settings.micro_batches
    losses = []
    # The gradients of the previous step were kept for inspection. Release them now.
    trainer.optimizer.gradients.begin()
    with arm_model.cached_weights.cast(phase):  # each weight is cast once, for all micro-batches
        for micro_batch_number in range(micro_batches):
            # a. Read the batch. It depends only on seed, step and micro-batch.
            with phase.data_load:
                batch = arm_model.read_batch(trainer.step, micro_batch_number)
            # b. Run forward with the same random numbers in every arm.
            with arm_model.seed_batch(trainer.step, micro_batch_number):
                loss = arm_model.compute_loss(batch, phase, is_finding)
                # c. Run backward from the scaled loss, so that small gradients do not underflow. The gradients of all
                # micro-batches are added, so divide to get their mean.
                (loss * (scale / micro_batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().to(torch.float32).reshape(()))
    with phase.communication:
        return trainer.parallelism.average_loss(torch.stack(losses).mean())


def compute_clip_divisors(
    norms: list[Tensor], norm: Tensor, scale: float, max_norm: float, groups: Sequence[str]
) -> tuple[list[Tensor], Tensor]:
    """Returns the divisor by which clipping shrinks each gradient, and the factor by which it shrinks their joint norm.
    `norms` are the norms of the gradients, still multiplied by the loss scale. `norm` is their joint norm without the
    loss scale. `groups` names the group with which each parameter is clipped.
    """
    if not max_norm:
        return [torch.ones_like(norm)] * len(norms), torch.ones_like(norm)
    norms_by_group = group_values(zip(groups, norms, strict=True))
    if len(norms_by_group) == 1:
        # At least 1: clipping never enlarges a gradient.
        clip_divisor = (norm / max_norm).clamp(min=1.0)
        return [clip_divisor] * len(norms), clip_divisor
    group_norms = {group: join_norms(values) / scale for group, values in norms_by_group.items()}
    clip_divisor_by_group = {group: (part / max_norm).clamp(min=1.0) for group, part in group_norms.items()}
    clipped_norm = join_norms([part / clip_divisor_by_group[group] for group, part in group_norms.items()])
    return [clip_divisor_by_group[group] for group in groups], (norm / clipped_norm).clamp(min=1.0)


def find_faulty_tensor(trainer: Trainer, scale: float, casts: CastsAndStatistics) -> FaultyTensor | None:
    """Repeats the step without an update, and returns its first tensor with NaN or infinity. Returns None if all
    tensors are finite this time.
    """
    # Repeat the step from the state of casts with which it began.
    trainer.restore_casts(casts)
    tensor_finder = FaultyTensorFinder()
    with trainer.materialise(UNTIMED_PHASE_MARKERS), tensor_finder.attach_hooks(trainer.model):
        accumulate_gradients(trainer, scale, UNTIMED_PHASE_MARKERS, is_finding=True)
    # The repeated step has updated the model's running statistics. Undo that.
    trainer.restore_casts(CastsAndStatistics({}, casts.statistics))
    return tensor_finder.faulty_tensor


def _make_step_row(trainer: Trainer, figures: list[float], rate: float, scale: float, seconds: float) -> StepRow:
    loss, gradient_norm, clip_factor, change_norm, parameter_norm = figures
    is_finite = math.isfinite(loss + gradient_norm)
    clipped_share = 1 - 1 / clip_factor if is_finite else 0.0
    ratio = change_norm / parameter_norm if parameter_norm else 0.0
    return StepRow(
        trainer.arm.name,
        trainer.task.seed,
        trainer.step,
        loss,
        rate,
        gradient_norm,
        clipped_share,
        parameter_norm,
        ratio,
        scale,
        trainer.tokens,
        seconds,
        skipped=not is_finite,
    )


def examine_arm_coverages(task: SeedTask) -> tuple[tuple[str, Coverage], ...]:
    """Takes a step of each arm of a user's model, and returns how much of the model each arm converts. Raises
    UsageError if the model cannot be trained.
    """
    arm_names_and_coverages = []
    for index, arm in enumerate(task.arms):
        trainer = Trainer(task, arm)
        assert isinstance(trainer.arm_model, UserArmModel)
        if index == 0:
            check_user_batches(task.settings.make, trainer.arm_model.user_parts, task.seed, task.facts)
        try:
            for _ in advance(trainer, watched=False):
                pass
            trainer.validate()
        except (Fp8benchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UsageError(f"{task.settings.make}: a step of {arm.name} failed: {own_words(error)}.") from error
        coverage = trainer.arm_model.coverage()
        if coverage is not None:
            arm_names_and_coverages.append((arm.name, coverage))
    return tuple(arm_names_and_coverages)
