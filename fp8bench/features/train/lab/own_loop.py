"""Watches a user's training loop by hooks on the module and the optimizer, whose step ends a training step.

A fault in watching ends watching, with an event, and never the training.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import wraps
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.batch_figures import BatchMemory
from fp8bench.features.train.lab.loop_figures import (
    LoopHabits,
    listening,
    local,
    parameters_of,
    predictions_of,
)
from fp8bench.features.train.lab.loop_state import LoopState
from fp8bench.features.train.lab.own_ranks import Ranks
from fp8bench.features.train.lab.rates import joint
from fp8bench.features.train.lab.readings import Figures, dense, read
from fp8bench.features.train.lab.replicas import Replicas
from fp8bench.features.train.lab.watched_step import ModelWatch, WatchedStep, is_watched
from fp8bench.features.train.values import UNSEEN, Lines, StepFigure, StepRow, TrainingEvent, Validation

# After this many consecutive updates without a row of figures, or skipped by a GradScaler, an event gives the reason.
_SILENT = 3
Hook = Callable[..., Any]


class OwnLoop:
    """Makes a row of every step and watches every `stride`-th, after which `told` receives the lines. Norms of
    gradients are those that the optimizer gets, the norm of the parameters that of the last watched step. A step with
    an unknown loss has no row; three consecutive ones cause an event. A step that the GradScaler skips has a row."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        told: Callable[[Lines], None],
        name: str = "own",
        stride: int = 10,
        tokens: int = 0,
        scaler: Any = None,
        precision: str = "fp32",
        eager: bool = False,
    ) -> None:
        """`tokens` is the number in a step; `scaler` is a GradScaler, whose scale is recorded. `precision` is what
        layers that only cast inside are measured in; `eager`: watched steps run without compilation."""
        if stride < 1:
            raise UsageError(f"stride={stride!r}: must be a whole number from 1 on: one step per stride is watched.")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("the module has no parameter that requires a gradient: there is nothing to watch.")
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        optimizer = unwrap_optimizer(optimizer)
        self._module, self._told = module, told
        self._name, self._stride, self._tokens, self._scaler = name, stride, tokens, scaler
        self._watch = ModelWatch(module, name, precision=precision, eager=eager)
        self._habits = LoopHabits(module, optimizer)
        self._batches, self._state, self._replicas = BatchMemory(), LoopState(module), Replicas(module)
        self._ranks = Ranks()
        self._step, self._began, self._in_step, self._first_watched = 0, 0.0, False, 0
        self._losses: list[Tensor] = []
        self._roots: list[Tensor] = []
        # The scale by which the last backward's loss was multiplied.
        self._loss_scale: Tensor | float = 1.0
        # How many of the losses had their backward.
        self._losses_used = 0
        self._are_parts = self._is_first = self._in_update = False
        self._silent, self._skipped, self._seen_rows = 0, 0, False
        # Steps whose figures are still on the device: the row without them, and these figures.
        self._rows: list[tuple[StepRow, Figures]] = []
        self._norm: Tensor | None = None
        self._predictions: Figures = {}
        self._size: Tensor | float = math.nan
        self._before: list[Tensor] = []
        self._seen: WatchedStep | None = None
        self._hooks, self._attached = ExitStack(), ExitStack()
        self._has_ended = False
        # The exception of a user's function of lines: it ends the loop.
        self.ends_by: Exception | None = None
        # The optimizer is not kept: when a script drops it, watching ends and the module is free as well.
        self._optimizer_ref = weakref.ref(optimizer, lambda _: self._release())

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    def __enter__(self) -> Self:
        guard = self._guard
        handles = [
            self._optimizer.register_step_pre_hook(guard(self._before_update)),
            self._optimizer.register_step_post_hook(guard(self._after_update)),
        ]
        if self._is_hookable:
            handles.append(self._module.register_forward_pre_hook(guard(self._take_inputs), with_kwargs=True))
            handles.append(self._module.register_forward_hook(guard(self._see_output)))
        for handle in handles:
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(listening(guard(self._backward_begins), guard(self._end_backward)))
        self._hooks.enter_context(self._habits.listening())
        self._begin()
        return self

    def begin_in_step(self) -> None:
        """Leaves out the step that the optimizer is taking now, whose loss is over."""
        self._attached.close()
        self._seen, self._in_step, self._first_watched = None, True, 1

    @property
    def is_updating(self) -> bool:
        return self._in_step or self._in_update

    def __exit__(self, *_: object) -> None:
        """Removes all hooks and passes on the remaining rows, however the loop has ended."""
        self._attached.close()
        if not self._has_ended:
            self._guard(self._tell)((), last=True)
        self._has_ended = True
        self._hooks.close()

    @property
    def _is_hookable(self) -> bool:
        """Whether hooks run as Python: `module.compile()` compiles them along with the module."""
        return getattr(self._module, "_compiled_call_impl", None) is None

    def _guard(self, hook: Hook) -> Hook:
        """Returns the hook with its first exception ending all watching, and not the training."""

        @wraps(hook)
        def run(*arguments: Any, **named: Any) -> Any:
            if self._has_ended:
                return None
            try:
                return hook(*arguments, **named)
            except Exception as error:
                if error is self.ends_by:
                    raise
                self._fail(error)
                return None

        return run

    def _fail(self, error: Exception) -> None:
        # Hooks of the optimizer cannot be removed while they run; from here on they do nothing.
        self._has_ended = True
        with suppress(Exception):
            self._attached.close()
        words = f"watching ends here, and the training goes on: {type(error).__name__}: {error!s:.300}"
        self._told((TrainingEvent(self._name, 0, self._step, UNSEEN, words),))

    def _release(self) -> None:
        """The optimizer is gone: writes the remaining rows and drops everything of the model."""
        self.__exit__()
        self._seen, self._before, self._losses, self._roots = None, [], [], []
        del self._module, self._watch, self._habits, self._state

    def loss(self, value: Tensor | float) -> None:
        """Sets the loss of a micro-batch, for a module that does not return it."""
        self._losses.append(torch.as_tensor(value, device=self._watch.device).detach().reshape(()))

    def held_out(self, value: Tensor | float, tokens: int = 1) -> None:
        """Sets the current loss on held-out data."""
        self._told((Validation(self._name, 0, self._step, "held-out", float(value), tokens),))

    @property
    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        optimized = set(map(id, parameters_of(self._optimizer)))
        return {path: parameter for path, parameter in self._watch.parameters.items() if id(parameter) in optimized}

    def _begin(self, late: bool = False) -> None:
        """Begins a step; `late` if its forward is over, so that it cannot be watched."""
        self._is_first = True
        if not late and (self._step == self._first_watched or is_watched(self._step, self._stride)):
            self._seen = self._attached.enter_context(self._watch.step(self._guard))
        self._began = time.perf_counter()

    def _take_inputs(self, module: nn.Module, *inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._find_skipped(len(self._losses))
        # transformers: the loss is divided by the items of all micro-batches.
        self._are_parts = any(isinstance(some, dict) and some.get("num_items_in_batch") is not None for some in inputs)
        if self._is_first:
            self._batches.take_inputs(inputs, self._seen is not None)
        else:
            self._batches.add_examples(inputs)
        self._is_first = False

    def _find_skipped(self, losses: int) -> None:
        """Ends a step whose gradients were discarded, as a GradScaler does if they overflow. `losses` is the number of
        losses that belong to it."""
        state = "" if self._in_update else self._habits.find_discarded_gradients()
        if not state:
            return
        later = self._losses[losses:]
        if state == "skipped":
            self._losses = self._losses[:losses]
            self._end_step(is_skipped=True)
            self._begin(late=bool(later))
        self._habits.forget_gradients()
        self._losses, self._roots, self._losses_used = later, [], 0

    def _see_output(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # The loss is what the module returns, or else what backward begins with.
        loss = loss_of(output)
        if loss is not None:
            self.loss(loss)

    def _backward_begins(self, root: Tensor | None) -> None:
        self._find_skipped(self._losses_used)
        self._habits.backward_begins()
        if self._seen is not None and root is not None and not self._predictions:
            self._predictions = predictions_of(root)
            self._batches.see_targets(root)

    def _end_backward(self, root: Tensor | None) -> None:
        # A backward of other models leaves these gradients unchanged.
        has_reached = self._habits.end_backward()
        self._losses_used = len(self._losses)
        if root is not None and has_reached and self._module.training:
            scale = getattr(self._scaler, "_scale", None)  # its get_scale() waits for the device
            self._loss_scale = 1.0 if scale is None else scale.to(root.device, copy=True)
            self._roots.append(root / self._loss_scale)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reads the gradients now or, if the optimizer is called with a closure, after the closure has computed
        them."""
        self._in_update = True
        # With a closure, gradients only exist after it ran.
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._read_gradients()
            return None

        def run_closure() -> Any:
            self._roots = []  # a closure may be called several times in a step
            loss = closure()
            self._guard(self._read_gradients)()
            return loss

        return arguments[:1], {**named, "closure": run_closure}

    @torch.no_grad()
    def _read_gradients(self) -> None:
        self._habits.update_begins(self._state.update_begins(self._optimizer))
        parameters = [parameter for parameter in parameters_of(self._optimizer) if parameter.grad is not None]
        if not parameters:
            self._norm = None
            return
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer undoes a GradScaler's scale itself
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        norm = joint(self._norms_of(_join_small(list(map(local, gradients))) if self._ranks.size == 1 else gradients))
        self._norm = norm if scale is None else norm / scale
        if self._seen is not None:
            trained = self._trained_parameters
            self._before = [local(parameter).detach().clone() for parameter in trained.values()]
            sums = torch.stack([tensor.sum(dtype=torch.float64) for tensor in self._before])
            digest = (sums * torch.arange(1, len(sums) + 1).to(sums)).sum()
            self._seen.named["weights_before", ""] = digest
            self._seen.named |= self._replicas.figures(self._step, digest)
            matrices = {path: weight.grad for path, weight in trained.items() if weight.ndim > 1}
            self._see_gradients({path: gradient for path, gradient in matrices.items() if gradient is not None})

    def _see_gradients(self, gradients: dict[str, Tensor]) -> None:
        assert self._seen is not None
        self._seen.see_gradients(dict(zip(gradients, self._norms_of(list(gradients.values())), strict=True)))

    def _norms_of(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Returns the norms of tensors; of several ranks, what this one contributes to each."""
        norms = torch._foreach_norm([dense(local(tensor)) for tensor in tensors])
        if self._ranks.size > 1:
            norms = torch._foreach_mul(norms, [math.sqrt(self._ranks.share(tensor)) for tensor in tensors])
        return norms

    @torch.no_grad()
    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._end_step()
        self._habits.end_update()
        self._state.end_update(optimizer)
        self._in_step = self._in_update = False
        self._begin()

    @torch.no_grad()
    def _end_step(self, is_skipped: bool = False) -> None:
        """Makes the row of a step, and the lines of a watched one."""
        seconds = time.perf_counter() - self._began
        ratio: Tensor | float = math.nan
        if self._seen is not None and self._before:
            trained = self._trained_parameters
            sizes = torch._foreach_norm(self._before)
            # In place: new tensors of this size cost as much time as the subtraction.
            torch._foreach_sub_(self._before, list(map(local, trained.values())))
            moved = torch._foreach_norm(self._before)
            names = tuple(trained)
            self._seen.see_update(dict(zip(names, moved, strict=True)), dict(zip(names, sizes, strict=True)))
            shares = [math.sqrt(self._ranks.share(parameter)) for parameter in trained.values()]
            self._size = joint(torch._foreach_mul(sizes, shares))
            ratio = joint(torch._foreach_mul(moved, shares)) / self._size
            self._seen.named |= {(name, ""): value for name, value in self._predictions.items()}
            self._seen.named |= self._batches.figures() | self._habits.figures(trained) | self._state.figures(trained)
        # A row needs both: gradients that the optimizer got, and a loss. A GradScaler skips what is not finite.
        loss = self._loss()
        is_skipped_by_scaler = is_skipped and self._scaler is not None
        norm = math.nan if is_skipped_by_scaler else self._norm
        has_row = norm is not None and loss is not None
        if norm is not None and loss is not None:
            figures = Figures(loss=loss, gradient_norm=norm, parameter_norm=self._size, update_ratio=ratio)
            figures["loss_scale"] = self._loss_scale
            row_seconds = 0.0 if self._seen is not None else seconds
            row = StepRow(
                self._name,
                0,
                self._step,
                math.nan,
                self._habits.rate(),
                math.nan,
                0.0,
                math.nan,
                math.nan,
                1.0,
                self._tokens,
                row_seconds,
                is_skipped_by_scaler,
            )
            self._rows.append((row, figures))
        self._attached.close()
        events = [*self._find_unseen(has_row), *self._find_all_skipped(is_skipped_by_scaler)]
        habits = [StepFigure(self._name, 0, self._step, word, 1.0) for word in self._habits.pop_mistakes()]
        if self._seen is not None or events or habits:
            seen_lines = self._watch.lines(self._step, self._seen) if self._seen is not None else ()
            self._tell((*seen_lines, *habits, *events))
        self._seen, self._before, self._norm = None, [], None
        self._losses, self._roots, self._losses_used = [], [], 0
        self._predictions = {}
        self._step += 1

    def _loss(self) -> Tensor | None:
        if self._losses and not (self._are_parts and self._roots):
            return torch.stack(self._losses).mean()
        return torch.stack([root.to(torch.float32) for root in self._roots]).sum() if self._roots else None

    def _find_unseen(self, has_row: bool) -> list[TrainingEvent]:
        """Returns an event after the third consecutive update without a row; none again until there were rows."""
        if self._in_step:
            return []
        # One silent update may be a warm-up; three in a row mean that the loop cannot be observed.
        self._silent = 0 if has_row else self._silent + 1
        self._seen_rows |= has_row
        if self._silent != _SILENT:
            return []
        since = f"rows have stopped since step {self._step - _SILENT + 1}" if self._seen_rows else "there are no rows"
        return [self._event(f"{since}: in {_SILENT} updates {self._why_unseen()}")]

    def _find_all_skipped(self, is_skipped: bool) -> list[TrainingEvent]:
        """Returns an event after the third consecutive step that the GradScaler has skipped."""
        self._skipped = self._skipped + 1 if is_skipped else 0
        if self._skipped != _SILENT:
            return []
        scale = float(self._scaler.get_scale())
        words = (
            f"{_SILENT} steps in a row had a backward and no update: the GradScaler skips gradients that are not "
            f"finite. Its scale is {scale:g}; if it keeps falling, the gradients overflow without it, too"
        )
        return [self._event(words)]

    def _event(self, words: str) -> TrainingEvent:
        return TrainingEvent(self._name, 0, self._step, UNSEEN, words)

    def _why_unseen(self) -> str:
        parameters = {id(parameter) for parameter in self._module.parameters()}
        if not any(id(parameter) in parameters for parameter in parameters_of(self._optimizer)):
            return "the optimizer changed no parameter of this module. Give fp8bench.watch the module that it trains"
        if self._norm is None:
            return "no parameter had a gradient. Call backward before the optimizer's step"
        if not self._module.training:
            return "the module was in eval mode. Call its train() before the loop"
        return "no loss was found where backward began. Give it by loss(value) on what fp8bench.watch returned"

    def _tell(self, lines: Lines, last: bool = False) -> None:
        """Passes on the rows since the last time, then the lines of the watched step."""
        # Here the host may wait for the device, since figures are read as well.
        numbers = read([figures for _, figures in self._rows])
        pairs = zip(self._rows, numbers, strict=True)
        rows = [replace(row, **cast("dict[str, Any]", figures)) for (row, _), figures in pairs]
        self._rows = []
        joined = self._ranks.join(rows, tuple(lines), last) if rows or lines or last else ()
        if joined:
            self._told(joined)


# Gradients with fewer elements are joined: the norm of each takes as long as that of all.
_SMALL = 1 << 12


def _join_small(gradients: list[Tensor]) -> list[Tensor]:
    """Returns tensors with the same elements, of which only one is small."""
    small = [tensor for tensor in gradients if tensor.numel() < _SMALL and not tensor.is_sparse]
    if len(small) < 2 or len({(tensor.dtype, tensor.device) for tensor in small}) > 1:
        return gradients
    large = [tensor for tensor in gradients if tensor.numel() >= _SMALL or tensor.is_sparse]
    return [*large, torch.cat([tensor.flatten() for tensor in small])]


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer inside wrappers such as Accelerate's, whose hooks would never run."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        kind = type(optimizer).__name__
        raise UsageError(f"{kind} is not an optimizer of torch, and has no hooks. Give the torch.optim one inside it.")
    return optimizer  # type: ignore[no-any-return]


def loss_of(output: Any) -> Tensor | None:
    """Returns the loss in a module's output: a single number, an entry or attribute `loss`, or the first of a tuple."""
    if isinstance(output, tuple) and output:
        output = output[0]
    elif isinstance(output, dict):
        output = output.get("loss")
    loss = getattr(output, "loss", output)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None
