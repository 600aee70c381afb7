"""A run sent to Weights & Biases: the same figures as TensorBoard's, and its files as an artifact.

Where it goes, and whether at all over a network, is for wandb's own settings to say (WANDB_MODE, WANDB_API_KEY).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.exporting.scalars import figures, moment
from fp8bench.model import Finding, Run, Scalar
from fp8bench.paths import safe


def check() -> None:
    """Raise UsageError where the package is not there."""
    try:
        import wandb  # noqa: F401
    except Exception as error:
        raise UsageError(
            f"--wandb needs the package wandb, which does not import ({type(error).__name__}: {error}). "
            "`pip install wandb` installs it; or leave --wandb out."
        ) from None


def send(run: Run, findings: Mapping[str, Finding], project: str, files: Sequence[Path]) -> None:
    """One run of wandb for one of ours. It may raise anything: it is another program's network."""
    import wandb

    sent = wandb.init(project=project, name=f"{run.request.suite} {run.id}", config=_config(run))
    try:
        sent.log({f"{figure.mode}/{figure.tag}": figure.value for figure in figures(run, findings)})
        artifact = wandb.Artifact(f"fp8bench-{safe(run.id)}", type="fp8bench-run")
        for file in files:
            artifact.add_file(str(file), name=file.name)
        sent.log_artifact(artifact)
    except BaseException:
        sent.finish(exit_code=1)
        raise
    sent.finish()


def _config(run: Run) -> dict[str, Scalar | None]:
    """By which runs are told apart and put in order."""
    wanted = ("machine", "fp8bench", "torch", "python", "commit", "dirty")
    config = {name: run.environment.get(name) for name in wanted}
    devices = ", ".join(f"{one.key}: {one.name}" for one in run.devices)
    return {**config, "command": run.command, "devices": devices, "moment": moment(run), "run": run.id}
