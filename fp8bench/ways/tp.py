"""Tensor parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.cuts import AMAX_GROUPS, uncut
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_parallel import TensorCut


@ways.register("tp")
class TensorParallel(Way):
    """The exchanges of Megatron-LM: a sum behind attention and feed-forward part each, one before them in backward."""

    name = "tp"
    summary = "heads and hidden features cut; what blocks make is added up, amax groups are a choice"
    options: ClassVar = {"amax": AMAX_GROUPS}

    def refused(self, asked: Asked) -> str:
        return uncut(asked, asked.ranks)

    def model(self, job: Job) -> TensorCut:
        from fp8bench.nn.parallel.tensor_parallel import TensorCut

        return TensorCut(job)
