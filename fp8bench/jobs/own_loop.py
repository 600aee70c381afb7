"""What is done with the lines of somebody's own training loop: kept in a file, held against the health rules, told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fp8bench.analysis.health.health import Health
from fp8bench.errors import StoreError
from fp8bench.files import append
from fp8bench.model.training import Arm, ArmRole, Line
from fp8bench.registry import precisions
from fp8bench.store.trainings import plain

if TYPE_CHECKING:
    import torch

    from fp8bench.training.own_loop import OwnLoop

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
    from fp8bench.training.own_loop import OwnLoop

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
