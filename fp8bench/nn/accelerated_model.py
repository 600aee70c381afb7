"""A model of a user's own as Accelerate prepares it for FP8, by its own `prepare`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.holders import LINEAR, Held

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]
# The layers that it puts in, by their classes' names: torchao's and Transformer Engine's, and MS-AMP's.
_CONVERTED = ("Float8Linear", "FP8Linear")
_TRANSFORMER_ENGINE = "transformer_engine"


class AcceleratedModel(PlainArithmetic):
    """bf16, as Accelerate's autocast has it, and a whole model that it prepares by a recipe."""

    def __init__(self, recipe: str, level: str, facts: DeviceFacts) -> None:
        super().__init__(torch.bfloat16)
        self._recipe, self._level, self._facts = recipe, level, facts

    def prepared(self, model: nn.Module, optimizer_of: OptimizerOf) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """Raises UsageError where Accelerate refuses, and where it would leave the model as it is.

        torchao's layers get new parameters by Accelerate's defaults, and an optimizer that has the old ones would never
        move them: it is made of those that are there then. The other recipes ask for both at once.
        """
        name, apart = type(model).__name__, self._recipe == "ao"
        with _quiet():
            try:
                accelerator = self._accelerator()
                made = accelerator.prepare(model) if apart else model
                optimizer = optimizer_of([parameter for parameter in made.parameters() if parameter.requires_grad])
                if optimizer is not None:
                    optimizer = accelerator.prepare(optimizer) if apart else optimizer
                if not apart:
                    made, optimizer = accelerator.prepare(made, optimizer)
            except (ImportError, ValueError, RuntimeError, NotImplementedError) as error:
                words = " ".join(str(error).split())
                raise UsageError(f"Accelerate prepares no {name} by recipe={self._recipe}: {words}") from error
        if not converted_in(made):
            raise UsageError(
                f"Accelerate converts nothing of {name}: it leaves the first and the last linear layer, and those "
                "whose sides are no multiples of 16, as they are. Choose fp8, or a model with more linear layers."
            )
        return made, optimizer

    def _accelerator(self) -> Any:
        from accelerate import Accelerator
        from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs

        recipes = {
            "ao": AORecipeKwargs, "te": TERecipeKwargs, "msamp": partial(MSAMPRecipeKwargs, opt_level=self._level),
        }  # fmt: skip
        # A copy of the model lies where it is to be already.
        return Accelerator(
            mixed_precision="fp8", kwargs_handlers=[recipes[self._recipe]()], cpu=not self._facts.accelerated,
            device_placement=False,
        )  # fmt: skip


def converted_in(model: nn.Module) -> frozenset[str]:
    """Paths of the layers that are low in a model that was prepared."""
    return frozenset(
        name for name, module in model.named_modules()
        if type(module).__name__ in _CONVERTED or type(module).__module__.partition(".")[0] == _TRANSFORMER_ENGINE
    )  # fmt: skip


def unconverted(held: Held) -> Held:
    """A layer with why Accelerate has left it."""
    if held.kind != LINEAR:
        return replace(held, rule="class", reason="Accelerate converts nn.Linear alone")
    if any(side % 16 for side in held.sides):
        return replace(held, rule="shape", reason="Accelerate leaves layers whose sides are no multiples of 16")
    return replace(held, rule="kept", reason="Accelerate leaves the first and the last linear layer as they are")


@contextmanager
def _quiet() -> Iterator[None]:
    """Its packages tell of kernels that were built for other versions, and of what they will drop."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
