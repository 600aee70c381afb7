"""A pipeline by torch's schedule gpipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.stages import MICROBATCHES, unstaged
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.pipeline import Pipeline


@ways.register("pp_gpipe")
class GPipe(Way):
    """As long as it waits it keeps the activations of all microbatches."""

    name = "pp_gpipe"
    summary = "blocks cut into stages; all microbatches go forward, then all backward"
    options: ClassVar = {"microbatches": MICROBATCHES}

    def refused(self, asked: Asked) -> str:
        return unstaged(asked)

    def model(self, job: Job) -> Pipeline:
        from fp8bench.nn.parallel.pipeline import Pipeline

        return Pipeline(job, "gpipe")
