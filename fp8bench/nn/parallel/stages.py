"""What a pipeline can be cut into. No torch here: plans read it."""

from __future__ import annotations

from fp8bench.nn.parallel.way import Asked

MICROBATCHES = ("2", "4")


def unstaged(asked: Asked, fewest: int = 1) -> str:
    """Why blocks or a batch cannot be cut so; '' where they can."""
    parts = int(asked.options["microbatches"])
    if asked.config.layers % asked.ranks:
        return f"{asked.config.layers} layers have no equal share for each of {asked.ranks} ranks: choose another size"
    if asked.batch % parts:
        return f"{asked.batch} sequences cannot be cut into {parts} equal microbatches: choose another batch"
    if parts < fewest:
        return f"{parts} microbatches do not fill {fewest} stages by this schedule: choose {fewest} or more"
    return ""
