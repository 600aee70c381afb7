"""Watches a user's training loop by hooks on the module and the optimizer. Each step of the optimizer ends a training
step. If a hook fails, watching ends with an event in the stream, but the training goes on.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.batch_figures import BatchHistory
from fp8bench.features.train.lab.loop_figures import (
    LoopMistakeDetector,
    call_around_backward,
    get_local_shard,
    list_parameters,
    measure_predictions,
)
from fp8bench.features.train.lab.loop_state import LoopState
from fp8bench.features.train.lab.own_ranks import Ranks
from fp8bench.features.train.lab.rates import join_norms
from fp8bench.features.train.lab.readings import FigureValues, get_stored_values, move_figures_to_host
from fp8bench.features.train.lab.replicas import ReplicaWeightCheck, digest_weight_bits
from fp8bench.features.train.lab.watched_step import ModelWatch, WatchedStep, is_watched_step
from fp8bench.features.train.values import UNSEEN_EVENT, Lines, StepFigure, StepRow, TrainingEvent, Validation

# After this many updates in a row that have no row of figures, or that a GradScaler skips, an event gives the reason.
_STEPS_UNTIL_EVENT = 3
Hook = Callable[..., Any]


class UserLoopRecorder:
    """Records a row of figures for every step, and watches every `stride`-th step in detail. The lines go to
    `on_lines`. Gradient norms are those that the optimizer receives. The parameter norm is that of the last watched
    step. A step without a known loss has no row, and three such steps in a row cause an event. A step that the
    GradScaler skips has a row.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        on_lines: Callable[[Lines], None],
        name: str = "own",
        stride: int = 10,
        tokens: int = 0,
        scaler: Any = None,
        precision: str = "fp32",
        eager: bool = False,
    ) -> None:
        """`tokens` is the number of tokens in a step. `scaler` is a GradScaler whose scale is recorded. Layers whose
        casts cannot be read are measured as if the recipe of `precision` cast them. `eager` means that watched steps
        run without compilation.
        """
        if stride < 1:
            raise UsageError(f"stride={stride!r}: must be a whole number from 1 on: one step per stride is watched.")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("the module has no parameter that requires a gradient, so there is nothing to watch.")
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        optimizer = unwrap_optimizer(optimizer)
        self._module, self._on_lines = module, on_lines
        self._name, self._stride, self._tokens, self._scaler = name, stride, tokens, scaler
        self._watch = ModelWatch(module, name, precision=precision, eager=eager)
        self._habits = LoopMistakeDetector(module, optimizer)
        self._batches, self._state, self._replicas = BatchHistory(), LoopState(module), ReplicaWeightCheck(module)
        self._ranks = Ranks()
        self._step, self._step_start, self._in_step, self._first_watched = 0, 0.0, False, 0
        self._losses: list[Tensor] = []
        self._backward_losses: list[Tensor] = []
        # The scale by which the last backward's loss was multiplied.
        self._loss_scale: Tensor | float = 1.0
        # How many of the `_losses` were recorded when the last backward ended.
        self._losses_used = 0
        self._is_loss_divided = self._is_first_batch = self._in_update = False
        self._steps_without_row, self._steps_skipped, self._had_rows = 0, 0, False
        # Rows whose figures are still on the device, as pairs of the incomplete row and its figures.
        self._rows: list[tuple[StepRow, FigureValues]] = []
        self._gradient_norm: Tensor | None = None
        self._predictions: FigureValues = {}
        self._parameter_norm: Tensor | float = math.nan
        self._weights_before: list[Tensor] = []
        self._watched_step: WatchedStep | None = None
        self._hooks, self._step_hooks = ExitStack(), ExitStack()
        self._has_ended = False
        # The exception of a user's function that receives lines. This exception ends the loop.
        self.user_error: Exception | None = None
        # A weak reference: when a script drops its optimizer, watching ends and the module is freed.
        self._optimizer_ref = weakref.ref(optimizer, lambda _: self._drop_model_references())

    def __enter__(self) -> Self:
        guard_hook = self._guard_hook
        hook_handles = [
            self._habits.optimizer.register_step_pre_hook(guard_hook(self._begin_update)),
            self._habits.optimizer.register_step_post_hook(guard_hook(self._end_update)),
        ]
        if self._runs_hooks_as_python:
            hook_handles.append(
                self._module.register_forward_pre_hook(guard_hook(self._record_module_inputs), with_kwargs=True)
            )
            hook_handles.append(self._module.register_forward_hook(guard_hook(self._record_output)))
        for handle in hook_handles:
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(
            call_around_backward(guard_hook(self._begin_backward), guard_hook(self._end_backward))
        )
        self._hooks.enter_context(self._habits.watch_other_optimizers())
        self._begin_step()
        return self

    def begin_watch_in_step(self) -> None:
        """Begins to watch inside a step of the optimizer. That step is left out, because its loss was computed
        earlier.
        """
        self._step_hooks.close()
        self._watched_step, self._in_step, self._first_watched = None, True, 1

    @property
    def is_updating_parameters(self) -> bool:
        return self._in_step or self._in_update

    def __exit__(self, *_: object) -> None:
        """Removes all hooks and passes the remaining rows to `on_lines`, whether the loop ended normally or by an
        exception.
        """
        self._step_hooks.close()
        if not self._has_ended:
            self._guard_hook(self._pass_stream_lines)((), is_last=True)
        self._has_ended = True
        self._hooks.close()

    @property
    def _runs_hooks_as_python(self) -> bool:
        """Returns whether hooks run as Python code. They do not after `module.compile()`, which would compile them
        together with the module.
        """
        return getattr(self._module, "_compiled_call_impl", None) is None

    def _guard_hook(self, hook: Hook) -> Hook:
        """Returns a hook whose first exception ends watching but not the training."""

        def run(*arguments: Any, **named: Any) -> Any:
            if self._has_ended:
                return None
            try:
                return hook(*arguments, **named)
            except Exception as error:
                # An exception of the user's own function has to end the loop.
                if error is self.user_error:
                    raise
                self._end_watching_after_error(error)
                return None

        return run

    def _end_watching_after_error(self, error: Exception) -> None:
        # An optimizer's hooks cannot be removed while they run, so `_has_ended` makes them return at once.
        self._has_ended = True
        with suppress(Exception):
            self._step_hooks.close()
        words = f"watching ends here, and the training goes on: {type(error).__name__}: {error!s:.300}"
        self._on_lines((TrainingEvent(self._name, 0, self._step, UNSEEN_EVENT, words),))

    def _drop_model_references(self) -> None:
        """Writes the remaining rows, and drops all references to the model. Called once the optimizer is deleted."""
        self.__exit__()
        self._watched_step, self._weights_before, self._losses, self._backward_losses = None, [], [], []
        del self._module, self._watch, self._habits, self._state

    def loss(self, value: Tensor | float) -> None:
        """Sets the loss of a micro-batch, for a module that does not return it."""
        self._losses.append(torch.as_tensor(value, device=self._watch.device).detach().reshape(()))

    def held_out(self, value: Tensor | float, tokens: int = 1) -> None:
        """Sets the current loss on held-out data."""
        self._on_lines((Validation(self._name, 0, self._step, "held-out", float(value), tokens),))

    @property
    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        # The optimizer may train only a part of the module.
        optimized_parameter_ids = set(map(id, list_parameters(self._habits.optimizer)))
        return {
            path: parameter
            for path, parameter in self._watch.parameters.items()
            if id(parameter) in optimized_parameter_ids
        }

    def _begin_step(self, is_late: bool = False) -> None:
        """Begins a step. `is_late` means that the forward pass of the step is already over. Such a step cannot be
        watched.
        """
        self._is_first_batch = True
        if not is_late and (self._step == self._first_watched or is_watched_step(self._step, self._stride)):
            self._watched_step = self._step_hooks.enter_context(self._watch.watch_step(self._guard_hook))
        self._step_start = time.perf_counter()

    def _record_module_inputs(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._end_skipped_step(len(self._losses))
        # transformers divides the loss of each micro-batch by the items of all micro-batches. The step's loss is then
        # the sum of these losses.
        self._is_loss_divided = named.get("num_items_in_batch") is not None
        if self._is_first_batch:
            self._batches.add_inputs((arguments, named), self._watched_step is not None)
        else:
            self._batches.add_examples((arguments, named))
        self._is_first_batch = False

    def _end_skipped_step(self, loss_count: int) -> None:
        """Ends the step if its gradients were discarded, for example by a GradScaler after an overflow. The first
        `loss_count` of the recorded losses belong to this step.
        """
        discard_kind = "" if self._in_update else self._habits.find_discarded_gradients()
        if not discard_kind:
            return
        later_losses = self._losses[loss_count:]
        if discard_kind == "skipped":
            self._losses = self._losses[:loss_count]
            self._end_step(is_skipped=True)
            self._begin_step(is_late=bool(later_losses))
        self._habits.forget_gradients()
        self._losses, self._backward_losses, self._losses_used = later_losses, [], 0

    def _record_output(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # The loss is the module's output, or else the tensor with which backward begins.
        loss = find_loss_in_output(output)
        if loss is not None:
            self.loss(loss)

    def _begin_backward(self, loss: Tensor | None) -> None:
        self._end_skipped_step(self._losses_used)
        self._habits.begin_backward()
        if self._watched_step is not None and loss is not None and not self._predictions:
            self._predictions = measure_predictions(loss)
            self._batches.compare_loss_targets(loss)

    def _end_backward(self, loss: Tensor | None) -> None:
        # Another model's backward leaves these gradients unchanged.
        has_changed_gradients = self._habits.end_backward()
        self._losses_used = len(self._losses)
        if loss is not None and has_changed_gradients and self._module.training:
            scale = getattr(self._scaler, "_scale", None)  # `get_scale()` would wait for the device
            if scale is not None:
                self._loss_scale = scale.to(loss.device, copy=True)
            # A copy, because the loop may change its loss in place.
            self._backward_losses.append(loss.clone() if scale is None else loss / self._loss_scale)

    def _begin_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reads the gradients before an update. If the optimizer is called with a closure, reads them once the
        closure has computed them.
        """
        self._in_update = True
        # With a closure, gradients do not exist until the closure has run.
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._read_gradients()
            return None

        losses_before_closure = self._backward_losses

        def run_closure() -> Any:
            # LBFGS calls its closure several times: keep the losses of the last call only, and those from before the
            # step, because Lightning accumulates micro-batches.
            self._backward_losses = [*losses_before_closure]
            loss = closure()
            self._guard_hook(self._read_gradients)()
            return loss

        return arguments[:1], {**named, "closure": run_closure}

    @torch.no_grad()
    def _read_gradients(self) -> None:
        optimizer = self._habits.optimizer
        parameters: list[Tensor] = []
        parameters_without_gradient: list[Tensor] = []
        for parameter in list_parameters(optimizer):
            (parameters_without_gradient if parameter.grad is None else parameters).append(parameter)
        self._habits.begin_update(self._state.begin_update(optimizer, parameters_without_gradient))
        self._gradient_norm = None
        if not parameters:
            return
        gradient_norms = self._measure_norms([cast(Tensor, parameter.grad) for parameter in parameters])
        self._gradient_norm = join_norms(gradient_norms)
        # A fused optimizer divides gradients by the GradScaler's scale itself
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            self._gradient_norm = self._gradient_norm / scale
        if self._watched_step is not None:
            trained_parameters = self._trained_parameters
            self._weights_before = [
                get_local_shard(parameter).detach().clone() for parameter in trained_parameters.values()
            ]
            self._watched_step.figures["weights_before", ""] = digest_weight_bits(self._weights_before)
            self._watched_step.figures |= self._replicas.list_figures(self._step, self._weights_before)
            gradient_norm_by_id = dict(zip(map(id, parameters), gradient_norms, strict=True))
            self._watched_step.record_gradients(
                {
                    path: gradient_norm_by_id[id(weight)]
                    for path, weight in trained_parameters.items()
                    if id(weight) in gradient_norm_by_id
                }
            )

    def _measure_norms(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the norms of tensors or, with several ranks, this rank's contribution to each norm."""
        tensor_norms = torch._foreach_norm([get_stored_values(get_local_shard(tensor)) for tensor in tensors])
        return self._ranks.compute_norm_shares(tensor_norms, tensors)

    @torch.no_grad()
    def _end_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._end_step()
        self._habits.end_update()
        self._state.end_update(optimizer)
        self._in_step = self._in_update = False
        self._begin_step()

    @torch.no_grad()
    def _end_step(self, is_skipped: bool = False) -> None:
        """Makes the row of a step, and the lines of a watched step."""
        seconds = time.perf_counter() - self._step_start
        watched_step = self._watched_step
        ratio: Tensor | float = math.nan
        if watched_step is not None and self._weights_before:
            ratio = self._record_update(watched_step)
        # Record no figures without a loss, or without gradients that the optimizer received. A GradScaler skips
        # gradients that are not finite.
        loss = self._combine_step_losses()
        is_skipped_by_scaler = is_skipped and self._scaler is not None
        gradient_norm = math.nan if is_skipped_by_scaler else self._gradient_norm
        # A step in whose middle watching began has no row.
        has_row = gradient_norm is not None and loss is not None and not self._in_step
        if gradient_norm is not None and loss is not None and not self._in_step:
            figures = FigureValues(
                loss=loss, gradient_norm=gradient_norm, parameter_norm=self._parameter_norm, update_ratio=ratio
            )
            figures["loss_scale"] = self._loss_scale
            # A watched step has no time, because watching slows it down.
            row = StepRow(
                self._name,
                0,
                self._step,
                loss=math.nan,
                rate=self._habits.highest_rate(),
                gradient_norm=math.nan,
                clipped=0.0,
                parameter_norm=math.nan,
                update_ratio=math.nan,
                loss_scale=1.0,
                tokens=self._tokens,
                seconds=0.0 if watched_step is not None else seconds,
                skipped=is_skipped_by_scaler,
            )
            self._rows.append((row, figures))
        self._step_hooks.close()
        events = [*self._find_missing_rows(has_row), *self._make_scaler_skip_events(is_skipped_by_scaler)]
        new_mistake_names = self._habits.pop_new_mistakes()
        new_mistake_figures = [
            StepFigure(self._name, 0, self._step, word, 1.0) for word in new_mistake_names if not self._in_step
        ]
        if watched_step is not None or events or new_mistake_figures:
            watched_step_lines = (
                self._watch.make_stream_lines(self._step, watched_step) if watched_step is not None else ()
            )
            self._pass_stream_lines((*watched_step_lines, *new_mistake_figures, *events))
        self._watched_step, self._weights_before, self._gradient_norm = None, [], None
        self._losses, self._backward_losses, self._losses_used = [], [], 0
        self._predictions = {}
        self._step += 1

    def _record_update(self, watched_step: WatchedStep) -> Tensor:
        """Records the update of a watched step. Returns the norm of the update divided by the norm of the weights."""
        trained_parameters = self._trained_parameters
        weights = list(trained_parameters.values())
        weight_norms = torch._foreach_norm(self._weights_before)
        # Subtract in place, because allocating new tensors of this size takes as long as the subtraction.
        torch._foreach_sub_(self._weights_before, list(map(get_local_shard, weights)))
        change_norms = torch._foreach_norm(self._weights_before)
        watched_step.record_update_norms(
            dict(zip(trained_parameters, change_norms, strict=True)),
            dict(zip(trained_parameters, weight_norms, strict=True)),
        )
        self._parameter_norm = join_norms(self._ranks.compute_norm_shares(weight_norms, weights))
        watched_step.figures |= {(name, ""): value for name, value in self._predictions.items()}
        watched_step.figures |= (
            self._batches.list_figures()
            | self._habits.list_figures(trained_parameters)
            | self._state.list_figures(trained_parameters)
        )
        return join_norms(self._ranks.compute_norm_shares(change_norms, weights)) / self._parameter_norm

    def _combine_step_losses(self) -> Tensor | None:
        # Recorded losses of micro-batches are averaged. If they are divided or missing, the losses with which backward
        # began add up.
        if self._losses and not (self._is_loss_divided and self._backward_losses):
            return torch.stack(self._losses).mean()
        if not self._backward_losses:
            return None
        return torch.stack([loss.to(torch.float32) for loss in self._backward_losses]).sum()

    def _find_missing_rows(self, has_row: bool) -> list[TrainingEvent]:
        """Returns an event once three updates in a row have no row of figures, and no further event until an update has
        a row again.
        """
        if self._in_step:
            return []
        # A single update without recorded figures may be a warm-up. Three in a row mean that the loop cannot be
        # observed.
        self._steps_without_row = 0 if has_row else self._steps_without_row + 1
        self._had_rows |= has_row
        if self._steps_without_row != _STEPS_UNTIL_EVENT:
            return []
        missing_rows_text = (
            f"rows have stopped since step {self._step - _STEPS_UNTIL_EVENT + 1}"
            if self._had_rows
            else "there are no rows"
        )
        return [
            self._make_event(f"{missing_rows_text}: in {_STEPS_UNTIL_EVENT} updates {self._explain_missing_rows()}")
        ]

    def _make_scaler_skip_events(self, is_skipped: bool) -> list[TrainingEvent]:
        """Returns an event at the third step in a row that the GradScaler skips."""
        self._steps_skipped = self._steps_skipped + 1 if is_skipped else 0
        if self._steps_skipped != _STEPS_UNTIL_EVENT:
            return []
        scale = float(self._scaler.get_scale())
        words = (
            f"{_STEPS_UNTIL_EVENT} steps in a row had a backward and no update: the GradScaler skips gradients that "
            f"are not finite. Its scale is {scale:g}; if it keeps falling, the gradients overflow even without it"
        )
        return [self._make_event(words)]

    def _make_event(self, words: str) -> TrainingEvent:
        return TrainingEvent(self._name, 0, self._step, UNSEEN_EVENT, words)

    def _explain_missing_rows(self) -> str:
        parameter_ids = {id(parameter) for parameter in self._module.parameters()}
        if not any(id(parameter) in parameter_ids for parameter in list_parameters(self._habits.optimizer)):
            return "the optimizer changed no parameter of this module. Give fp8bench.watch the module that it trains"
        if self._gradient_norm is None:
            return "no parameter had a gradient. Call backward before the optimizer's step"
        if not self._module.training:
            return "the module was in eval mode. Call its train() before the loop"
        return "no loss was found where backward began. Give it by loss(value) on what fp8bench.watch returned"

    def _pass_stream_lines(self, lines: Lines, is_last: bool = False) -> None:
        """Passes the rows since the last call to `on_lines`, followed by the lines of the watched step."""
        # The host waits for the device here, to read the figures of all rows at once.
        row_figures = move_figures_to_host([figures for _, figures in self._rows])
        row_figure_pairs = zip(self._rows, row_figures, strict=True)
        rows = [replace(row, **cast("dict[str, Any]", figures)) for (row, _), figures in row_figure_pairs]
        self._rows = []
        merged_lines = self._ranks.join(rows, tuple(lines), is_last) if rows or lines or is_last else ()
        if merged_lines:
            self._on_lines(merged_lines)


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the torch optimizer inside wrappers such as Accelerate's. The hooks of such a wrapper would never run."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        kind = type(optimizer).__name__
        raise UsageError(f"{kind} is not an optimizer of torch, and has no hooks. Give the torch.optim one inside it.")
    return optimizer  # type: ignore[no-any-return]


def find_loss_in_output(output: Any) -> Tensor | None:
    """Returns the loss in a module's output, or None. The loss may be the output itself if that is a single number,
    an entry or attribute `loss`, or the first element of a tuple.
    """
    if isinstance(output, tuple) and output:
        output = output[0]
    elif isinstance(output, dict):
        output = output.get("loss")
    loss = getattr(output, "loss", output)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None
