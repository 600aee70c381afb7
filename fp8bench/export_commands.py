"""The options that give a run to other programs' boards: --tensorboard and --wandb."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8bench.errors import StoreError, UsageError
from fp8bench.exporting import tensorboard, wandb
from fp8bench.history.runs import store_of
from fp8bench.model import Finding, Run
from fp8bench.streams import complain


def check_exports(arguments: argparse.Namespace) -> None:
    """What is wrong with them is said before anything is measured."""
    asked = [option for option in ("trace", "tensorboard", "wandb") if getattr(arguments, option, None) is not None]
    if asked and getattr(arguments, "dry_run", False):
        raise UsageError(f"--dry-run measures nothing, so that there is nothing for --{asked[0]}. Leave one out.")
    if "tensorboard" in asked:
        tensorboard.check(arguments.tensorboard)
    if "wandb" in asked:
        wandb.check()


def tell_exports(run: Run, arguments: argparse.Namespace) -> bool:
    """Write and send what was asked for, and say so; False where that was interrupted.

    That it cannot be done is no failure of the run, which is kept.
    """
    from fp8bench.pipeline import findings

    if arguments.tensorboard is None and arguments.wandb is None:
        return True
    found = findings(run)
    try:
        if arguments.tensorboard is not None:
            complain(_to_tensorboard(run, found, arguments.tensorboard))
        if arguments.wandb is not None:
            complain(_to_wandb(run, found, arguments))
    except KeyboardInterrupt:
        complain(f"interrupted; the run is kept, and `fp8bench show {run.id}` takes --tensorboard and --wandb too")
        return False
    return True


def _to_tensorboard(run: Run, found: Mapping[str, Finding], folder: Path) -> str:
    try:
        files = tensorboard.write(run, found, folder)
    except StoreError as error:
        return f"tensorboard: {error} The run is kept; `fp8bench show {run.id} --tensorboard DIR` writes it again"
    if not files:
        return "tensorboard: nothing was measured, so that there is nothing to write"
    return f"tensorboard: {len(files)} curve{'s' * (len(files) != 1)} in {folder}; `tensorboard --logdir {folder}`"


def _to_wandb(run: Run, found: Mapping[str, Finding], arguments: argparse.Namespace) -> str:
    try:
        wandb.send(run, found, arguments.wandb, list(_files(run, arguments)))
    except Exception as error:
        again = f"`fp8bench show {run.id} --wandb {arguments.wandb}` sends it again"
        return f"wandb: not sent ({type(error).__name__}: {error}). The run is kept; {again}"
    return f"wandb: sent to project {arguments.wandb}"


def _files(run: Run, arguments: argparse.Namespace) -> Iterator[Path]:
    """The run, and its report where there is one."""
    from fp8bench.reporting import PAGE, ROWS, folder_of

    folder = folder_of([run], store_of(Path(run.path)) or arguments.store)
    for file in (Path(run.path), folder / PAGE, folder / ROWS):
        if run.path and file.is_file():
            yield file
