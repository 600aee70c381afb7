"""Watches a user's training loop by hooks on the module and the optimizer, whose step ends a training step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.loop_figures import LoopHabits, listening, parameters_of, predictions_of, tensors_in
from fp8bench.features.train.lab.rates import joint
from fp8bench.features.train.lab.readings import Figures, dense, read
from fp8bench.features.train.lab.watched_step import ModelWatch, WatchedStep, is_watched
from fp8bench.features.train.values import UNSEEN, Lines, StepFigure, StepRow, TrainingEvent, Validation

# After this many consecutive updates without a row of figures, an event gives the reason.
_SILENT = 3


class OwnLoop:
    """Makes a row of every step and watches every `stride`-th, after which `told` receives the lines. Norms of
    gradients are those that the optimizer gets, the norm of the parameters that of the last watched step. A step with
    an unknown loss has no row; three consecutive ones cause an event."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        told: Callable[[Lines], None],
        name: str = "own",
        stride: int = 10,
        tokens: int = 0,
        scaler: Any = None,
    ) -> None:
        """`tokens` is the number in a step; `scaler` is a GradScaler, whose scale is recorded."""
        if stride < 1:
            raise UsageError(f"stride={stride!r}: must be a whole number from 1 on: one step per stride is watched.")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError("the module has no parameter that requires a gradient: there is nothing to watch.")
        self._module, self._optimizer, self._told = module, optimizer, told
        self._name, self._stride, self._tokens, self._scaler = name, stride, tokens, scaler
        self._watch = ModelWatch(module, name)
        self._habits = LoopHabits(module, optimizer)
        self._step, self._began = 0, 0.0
        self._losses: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._reached = self._is_first = False
        self._silent, self._seen_rows = 0, False
        # Steps whose figures are still on the device: number, figures, rate and seconds.
        self._rows: list[tuple[int, Figures, float, float]] = []
        self._norm: Tensor | None = None
        self._predictions: Figures = {}
        self._size: Tensor | float = math.nan
        self._before: list[Tensor] = []
        self._seen: WatchedStep | None = None
        self._hooks, self._attached = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        handles = (
            self._module.register_forward_pre_hook(self._take_inputs, with_kwargs=True),
            self._module.register_forward_hook(self._see_output),
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        )
        for handle in handles:
            self._hooks.callback(handle.remove)
        self._hooks.enter_context(listening(self._backward_begins, self._end_backward))
        self._hooks.enter_context(self._habits.listening())
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        """Removes all hooks and passes on the remaining rows, however the loop has ended."""
        self._hooks.close()
        self._attached.close()
        self._tell(())

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

    def _begin(self) -> None:
        self._is_first = True
        if is_watched(self._step, self._stride):
            self._seen = self._attached.enter_context(self._watch.step())
        self._began = time.perf_counter()

    def _take_inputs(self, module: nn.Module, *inputs: Any) -> None:
        if self._is_first and module.training and torch.is_grad_enabled():
            self._is_first = False
            self._habits.take_inputs(inputs, self._seen is not None)

    def _see_output(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # The loss is what the module returns, or else what backward begins with.
        loss = loss_of(output)
        if loss is not None:
            self.loss(loss)
            return
        for tensor in tensors_in(getattr(output, "__dict__", None) or output):
            if tensor.requires_grad:
                tensor.register_hook(self._is_reached)  # type: ignore[no-untyped-call]

    def _is_reached(self, gradient: Tensor) -> None:
        self._reached = True

    def _backward_begins(self, root: Tensor | None) -> None:
        self._reached = False
        self._habits.backward_begins()
        if self._seen is not None and root is not None and not self._predictions:
            self._predictions = predictions_of(root)

    def _end_backward(self, root: Tensor | None) -> None:
        self._habits.end_backward()
        if root is not None and self._reached:
            scale = getattr(self._scaler, "_scale", None)  # its get_scale() waits for the device
            self._roots.append(root if scale is None else root / scale.to(root.device))

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reads the gradients now or, if the optimizer is called with a closure, after the closure has computed
        them."""
        # With a closure, gradients only exist after it ran.
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._read_gradients()
            return None

        def run_closure() -> Any:
            self._roots = []  # a closure may be called several times in a step
            loss = closure()
            self._read_gradients()
            return loss

        return arguments[:1], {**named, "closure": run_closure}

    @torch.no_grad()
    def _read_gradients(self) -> None:
        self._habits.update_begins()
        trained = parameters_of(self._optimizer)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if not gradients:
            self._norm = None
            return
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer undoes a GradScaler's scale itself
        norm = joint(torch._foreach_norm(list(map(dense, gradients))))
        self._norm = norm if scale is None else norm / scale
        if self._seen is not None:
            self._size = joint(torch._foreach_norm(trained))
            self._before = [parameter.detach().clone() for parameter in self._trained_parameters.values()]
            sums = torch.stack([tensor.sum(dtype=torch.float64) for tensor in self._before])
            self._seen.named["weights_before", ""] = (sums * torch.arange(1, len(sums) + 1).to(sums)).sum()

    @torch.no_grad()
    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        seconds = time.perf_counter() - self._began
        ratio: Tensor | float = math.nan
        if self._seen is not None and self._before:
            names, now = zip(*self._trained_parameters.items(), strict=True)
            moved = torch._foreach_norm(torch._foreach_sub(list(now), self._before))
            sizes = torch._foreach_norm(self._before)
            self._seen.see_update(dict(zip(names, moved, strict=True)), dict(zip(names, sizes, strict=True)))
            ratio = joint(moved) / joint(sizes)
            self._seen.named |= {(name, ""): value for name, value in self._predictions.items()}
            self._seen.named |= self._habits.figures(self._trained_parameters)
        # A row needs both: gradients that the optimizer got, and a loss.
        loss = self._loss()
        if self._norm is not None and loss is not None:
            row_seconds = 0.0 if self._seen is not None else seconds
            figures = Figures(loss=loss, gradient_norm=self._norm, parameter_norm=self._size, update_ratio=ratio)
            self._rows.append((self._step, figures, self._habits.rate(), row_seconds))
        self._attached.close()
        self._habits.end_update()
        unseen = self._unseen(self._norm is not None and loss is not None)
        habits = [StepFigure(self._name, 0, self._step, word, 1.0) for word in self._habits.pop_mistakes()]
        if self._seen is not None or unseen or habits:
            seen_lines = self._watch.lines(self._step, self._seen) if self._seen is not None else ()
            self._tell((*seen_lines, *habits, *unseen))
        self._seen, self._before, self._norm, self._losses, self._roots = None, [], None, [], []
        self._predictions = {}
        self._step += 1
        self._begin()

    def _loss(self) -> Tensor | None:
        if self._losses:
            return torch.stack(self._losses).mean()
        return torch.stack([root.to(torch.float32) for root in self._roots]).sum() if self._roots else None

    def _unseen(self, has_row: bool) -> tuple[TrainingEvent, ...]:
        """Returns an event after the third consecutive update without a row; none again until there were rows."""
        # One silent update may be a warm-up; three in a row mean that the loop cannot be observed.
        self._silent = 0 if has_row else self._silent + 1
        self._seen_rows |= has_row
        if self._silent != _SILENT:
            return ()
        since = f"rows have stopped since step {self._step - _SILENT + 1}" if self._seen_rows else "there are no rows"
        words = f"{since}: in {_SILENT} updates {self._why_unseen()}"
        return (TrainingEvent(self._name, 0, self._step, UNSEEN, words),)

    def _why_unseen(self) -> str:
        parameters = {id(parameter) for parameter in self._module.parameters()}
        if not any(id(parameter) in parameters for parameter in parameters_of(self._optimizer)):
            return "the optimizer changed no parameter of this module. Give fp8bench.watch the module that it trains"
        if self._norm is None:
            return "no parameter had a gradient. Call backward before the optimizer's step"
        if not self._module.training:
            return "the module was in eval mode. Call its train() before the loop"
        return "no loss was found where backward began. Give it by loss(value) on what fp8bench.watch returned"

    def _tell(self, lines: Lines) -> None:
        """Passes on the rows since the last time, then the lines of the watched step."""
        # Here the host may wait for the device, since figures are read as well.
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        numbers = read([figures for _, figures, _, _ in self._rows])
        rows = [
            StepRow(
                self._name,
                0,
                step,
                figures["loss"],
                rate,
                figures["gradient_norm"],
                0.0,
                figures["parameter_norm"],
                figures["update_ratio"],
                scale,
                self._tokens,
                seconds,
            )
            for (step, _, rate, seconds), figures in zip(self._rows, numbers, strict=True)
        ]
        self._rows = []
        if rows or lines:
            self._told((*rows, *lines))


def loss_of(output: Any) -> Tensor | None:
    """Returns the loss in a module's output: a single number, an entry or attribute `loss`, or the first of a tuple."""
    if isinstance(output, tuple) and output:
        output = output[0]
    elif isinstance(output, dict):
        output = output.get("loss")
    loss = getattr(output, "loss", output)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point() else None
