"""Data parallel: DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.way import Asked, Job, Way, equal_shares
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.ddp import DDPModel


@ways.register("ddp")
class DDP(Way):
    """Gradients are averaged while backward goes on; with fewer bits by hooks of our own."""

    name = "ddp"
    summary = "the whole model on every rank, torch's DistributedDataParallel; the mean of gradients is sent"
    options: ClassVar = {"wire": ("fp32", "bf16", "fp8_gather", "fp8_twoshot")}

    def refused(self, asked: Asked) -> str:
        return equal_shares(asked)

    def model(self, job: Job) -> DDPModel:
        from fp8bench.nn.parallel.ddp import DDPModel

        return DDPModel(job)
