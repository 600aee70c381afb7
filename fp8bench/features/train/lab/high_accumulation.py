"""An optimizer of anybody's over weights in low precision: gradients add up high, updates are applied low.

    optimizer = fp8bench.HighAccumulation(model.parameters(), lambda masters: torch.optim.SGD(masters, lr=0.1))

Of every parameter there is a float32 master, which the optimizer has as its own. What backward finds of a micro-batch
is added to the master's float32 gradient as soon as it is there; `step` lets the optimizer change the masters, rounds
what it has changed, and gives the model the masters in its parameters' dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.optimizer import rounded_update


class HighAccumulation(torch.optim.Optimizer):
    """`trained` are the model's parameters, `masters` theirs in their order: clip and read gradients of those.

    `updates` is what each update is rounded to: fp8 (E4M3 under a scale of its own), bf16, or fp32 for none.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        updates: str = "fp8",
    ) -> None:
        if updates not in ("fp8", "bf16", "fp32"):
            raise UsageError(f"updates must be fp8, bf16 or fp32, got {updates!r:.40}.")
        self.trained = [one for one in parameters if one.requires_grad]
        self.masters = [nn.Parameter(one.detach().to(torch.float32, copy=True)) for one in self.trained]
        self._inner = make(self.masters)
        self._rounded = rounded_update(updates)
        super().__init__(self.masters, {})
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_taken, master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        before = [master.detach().clone() for master in self.masters]
        self._inner.step()
        self._rounded(before, self.masters)
        self._give()

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
    fresh = parameter.grad.to(torch.float32)
    master.grad = fresh if master.grad is None else master.grad + fresh
    parameter.grad = None
