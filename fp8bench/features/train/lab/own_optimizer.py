"""Adapts an optimizer and schedule of the user's own to the trainer; and HighAccumulation, which wraps any torch
optimizer for weights in low precision: gradients add up in high precision, updates are applied in low.

    optimizer = fp8bench.HighAccumulation(model.parameters(), lambda masters: torch.optim.SGD(masters, lr=0.1))

Each parameter has a float32 master, which the inner optimizer updates. The gradient of each micro-batch is added to the
master's float32 gradient as soon as it is there; `step` lets the optimizer change the masters, rounds their updates,
and copies the masters to the parameters in their dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.optimizer import Gradients, Weights, rounded_update
from fp8bench.user_code import own_words


class TorchOptimizer:
    """A torch optimizer with the interface of LoopOptimizer. `factor` multiplies the rates of one step; `rate` is that
    of the first group. Whether a step is skipped is decided on the host, which waits for the device once more."""

    def __init__(
        self, name: str, model: nn.Module, make: Callable[..., Any], schedule: Callable[..., Any] | None,
        updates: str = "fp32",
    ) -> None:  # fmt: skip
        self._own, self._schedule = _made(name, model, make, schedule)
        optimized = [parameter for group in self._own.param_groups for parameter in group["params"]]
        changed = set(map(id, getattr(self._own, "trained", optimized)))
        self.parameters = {path: parameter for path, parameter in model.named_parameters() if id(parameter) in changed}
        if len(self.parameters) < len(changed):
            raise UsageError(f"{name}: its optimizer has parameters that are not the model's. Make it from the model.")
        trained = list(self.parameters.values())
        self._changed: list[Tensor] = [*trained]
        # Gradients lie in the parameters, or in the masters of a HighAccumulation.
        low, high = (getattr(self._own, word, trained) for word in ("trained", "masters"))
        masters = dict(zip(map(id, low), high, strict=True))
        self._holders = [masters[id(parameter)] for parameter in trained]
        self.gradients, self.weights = Gradients(self._holders), Weights(trained)
        self.factor = 1.0
        self._rounds, self._rounded = updates != "fp32", rounded_update(updates)
        self.update_norms = self.weight_norms = [tensor.new_zeros(()) for tensor in self._changed]

    @property
    def rate(self) -> float:
        return float(self._own.param_groups[0]["lr"]) * self.factor

    @torch.no_grad()
    def step(self, rate: float, divisors: Sequence[Tensor], skip: Tensor, measured: bool = True) -> None:
        copied = self._changed if measured or self._rounds else []
        before = [parameter.detach().clone() for parameter in copied]
        if not bool(skip):
            for parameter, divisor in zip(self._holders, divisors, strict=True):
                if parameter.grad is not None:
                    parameter.grad.div_(divisor.to(parameter.grad.dtype))
            self._update()
            if self._rounds:
                self._rounded(before, self._changed)
        if before:
            torch._foreach_sub_(before, self._changed)
            self.update_norms = [tensor.to(torch.float32) for tensor in torch._foreach_norm(before)]
        self.weight_norms = [tensor.to(torch.float32) for tensor in torch._foreach_norm(self._changed)]
        self.gradients.end()

    def _update(self) -> None:
        rates = [group["lr"] for group in self._own.param_groups]
        try:
            if self.factor != 1.0:
                for group, rate in zip(self._own.param_groups, rates, strict=True):
                    group["lr"] = rate * self.factor
            self._own.step()
        finally:
            for group, rate in zip(self._own.param_groups, rates, strict=True):
                group["lr"] = rate
        if self._schedule is not None:
            self._schedule.step()

    def kept(self) -> dict[str, list[Tensor]]:
        kept: dict[str, list[Tensor]] = {"weights": self.weights.kept(), "gradients": self.gradients.kept()}
        for state in self._own.state.values():
            for word, value in state.items():
                if isinstance(value, Tensor):
                    kept.setdefault(word.replace("_", " "), []).append(value)
        return kept

    def memory(self) -> dict[str, Any]:
        schedule = {} if self._schedule is None else self._schedule.state_dict()
        return {"weights": self.weights.kept(), "own": self._own.state_dict(), "schedule": schedule}

    @torch.no_grad()
    def recall(self, memory: Mapping[str, Any]) -> None:
        for parameter, kept in zip(self._changed, memory["weights"], strict=True):
            parameter.copy_(kept)
        self._own.load_state_dict(memory["own"])
        if self._schedule is not None:
            self._schedule.load_state_dict(memory["schedule"])


def _made(
    name: str, model: nn.Module, make: Callable[..., Any], schedule: Callable[..., Any] | None
) -> tuple[torch.optim.Optimizer, Any]:
    try:
        optimizer = make(model)
        scheduler = schedule(optimizer) if schedule is not None else None
    except Exception as error:
        raise UsageError(f"{name}: its optimizer or schedule cannot be made: {own_words(error)}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{name}: its optimizer function returns {type(optimizer).__name__}. Give a function that takes the model "
            "and returns a torch optimizer: lambda model: torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    by_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if scheduler is not None and (by_loss or not callable(getattr(scheduler, "step", None))):
        raise UsageError(
            f"{name}: its schedule function returns {type(scheduler).__name__}. Give a function that takes the "
            "optimizer and returns a torch scheduler whose step() takes no argument."
        )
    return optimizer, scheduler


class HighAccumulation(torch.optim.Optimizer):
    """`trained` are the model's parameters and `masters` their float32 copies in the same order: clip and read the
    gradients of `masters`.

    parameters: the model's
    make: a function of the copies that returns their optimizer
    updates: the format to which each update is rounded: fp8 (E4M3, scaled by tensor), bf16, or fp32 for none
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        updates: str = "fp8",
    ) -> None:
        if updates not in ("fp8", "bf16", "fp32"):
            raise UsageError(f"updates must be fp8, bf16 or fp32, got {updates!r:.40}.")
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [nn.Parameter(own.detach().to(torch.float32, copy=True)) for own in self.trained]
        self._inner = make(self.masters)
        self._rounded = rounded_update(updates)
        super().__init__(self.masters, {})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_taken, master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = [master.detach().clone() for master in self.masters]
        self._inner.step()
        self._rounded(before, self.masters)
        self._give()
        return loss

    def _give(self) -> None:
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for master, kept in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(kept)
        self._give()


def _taken(master: nn.Parameter, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.to(torch.float32)
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None
