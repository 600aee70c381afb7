"""Tensor parallel by torch's DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.nn.parallel.cuts import uncut_by_torch
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_dtensor import DTensorCut


@ways.register("tp")
class TensorParallel(Way):
    """As torchtitan and others cut a transformer; what DTensor sends is within its layers, and marks no phase."""

    name = "tp"
    summary = "heads and hidden features cut by DTensor (fp8: torchao's styles of it); what blocks make is added up"

    def refused(self, asked: Asked) -> str:
        return uncut_by_torch(asked, asked.ranks)

    def model(self, job: Job) -> DTensorCut:
        from fp8bench.nn.parallel.tensor_dtensor import DTensorCut

        return DTensorCut(job)
