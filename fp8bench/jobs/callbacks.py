"""Callbacks that watch a training of Hugging Face's Trainer, or of Lightning's: thin, the frameworks know the rest.

Their classes are made when they are asked for: they derive from the framework's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from fp8bench.errors import UsageError

if TYPE_CHECKING:
    from fp8bench.training.own_loop import OwnLoop

# Watches a module and its optimizer.
Watching = Callable[[Any, Any], AbstractContextManager["OwnLoop"]]


def for_hugging_face(watching: Watching) -> Any:
    """A `TrainerCallback`. Where a training raises, the next one, or `on_train_end`, takes its hooks away."""
    base: Any = _package("transformers").TrainerCallback

    class WatchCallback(base):  # type: ignore[misc]
        """Watches from the first step to the last."""

        def __init__(self) -> None:
            self._stack = ExitStack()

        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self._stack.close()
            optimizer = known["optimizer"]
            self._stack.enter_context(watching(known["model"], getattr(optimizer, "optimizer", optimizer)))

        def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self._stack.close()

    return WatchCallback()


def for_lightning(watching: Watching) -> Any:
    """A `Callback`. The loss is the one that backward begins with."""
    base: Any = _package("lightning.pytorch", "pytorch_lightning").Callback

    class WatchCallback(base):  # type: ignore[misc]
        """Watches from the first step to the last, or to an exception."""

        def __init__(self) -> None:
            self._stack = ExitStack()
            self._loop: OwnLoop | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise UsageError(
                    f"a training with {len(trainer.optimizers)} optimizers has no step of its own. Use fp8bench.watch "
                    "with a part of the module and its optimizer."
                )
            self._loop = self._stack.enter_context(watching(pl_module, trainer.optimizers[0]))

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if self._loop is not None:  # Lightning has divided it by the number of micro-batches
                self._loop.loss(loss * trainer.accumulate_grad_batches)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._stack.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._stack.close()

    return WatchCallback()


def _package(*names: str) -> Any:
    """The first of these that is installed."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError(f"{names[0]} cannot be imported here: pip install {names[0].partition('.')[0]}")
