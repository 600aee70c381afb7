"""Callbacks that watch a training of Hugging Face's Trainer, or of Lightning's: thin, the frameworks know the rest.

Their classes are made when they are asked for: they derive from the framework's own.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fp8bench.errors import StoreError, UsageError
from fp8bench.features.train.health.health import Health
from fp8bench.features.train.kept import plain
from fp8bench.features.train.values import Arm, ArmRole, Line
from fp8bench.files import append
from fp8bench.registry import precisions

if TYPE_CHECKING:
    import torch

    from fp8bench.features.train.lab.own_loop import OwnLoop


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


Told = Callable[[Sequence[Line]], None]


@contextmanager
def watched(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path | None,
    told: Told | None,
    precision: str,
    health: bool,
    **options: Any,
) -> Iterator[OwnLoop]:
    """Watch for the body. Alarms are lines among the others."""
    from fp8bench.features.train.lab.own_loop import OwnLoop

    arm = Arm(options["name"], precisions.canonical(precision), ArmRole.REFERENCE)
    rules = Health((arm,)) if health else None
    with ExitStack() as stack:
        keep = _Kept(path, stack) if path is not None else None

        def tell(lines: Sequence[Line]) -> None:
            every = (*lines, *rules.see(lines)) if rules is not None else lines
            if keep is not None:
                keep(every)
            if told is not None:
                told(every)

        yield stack.enter_context(OwnLoop(module, optimizer, tell, **options))


class _Kept:
    """A file of lines. A disk that is full ends the file with a warning, and not somebody's training."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        try:
            self._file: IO[bytes] | None = stack.enter_context(path.open("xb"))
        except OSError as error:
            raise StoreError(f"{path} cannot be made ({error.strerror}). Give another file.") from None

    def __call__(self, lines: Sequence[Line]) -> None:
        if self._file is None:
            return
        text = "".join(json.dumps(plain(line), separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
        try:
            append(self._file, text, sync=False)  # what is written survives the process, and nobody waits for the disk
        except OSError as error:
            warnings.warn(f"{self._file.name} ends here ({error.strerror}); the training goes on.", stacklevel=2)
            self._file = None
