"""A pipeline by torch's schedule 1f1b."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.stages import MICROBATCHES, unstaged
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.pipeline import Pipeline


@ways.register("pp_1f1b")
class OneForwardOneBackward(Way):
    """The same losses and the same wait as by GPipe, with the activations of at most as many microbatches as stages."""

    name = "pp_1f1b"
    summary = "blocks cut into stages; each microbatch goes backward as soon as it can"
    options: ClassVar = {"microbatches": MICROBATCHES}

    def refused(self, asked: Asked) -> str:
        return unstaged(asked, fewest=asked.ranks)

    def model(self, job: Job) -> Pipeline:
        from fp8bench.nn.parallel.pipeline import Pipeline

        return Pipeline(job, "1f1b")
