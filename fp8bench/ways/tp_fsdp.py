"""Tensor parallel and FSDP2 on two dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.nn.parallel.cuts import uncut_by_torch
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_dtensor import DTensorFSDP


@ways.register("tp_fsdp")
class TensorParallelFSDP(Way):
    """What large trainings do: tensors within a machine, FSDP between machines."""

    name = "tp_fsdp"
    summary = "pairs of ranks share tensors as tp does, and FSDP2 shards what a pair has over all pairs"
    least_ranks = 4

    def refused(self, asked: Asked) -> str:
        pairs, left = divmod(asked.ranks, 2)
        if left or asked.batch % pairs:
            return f"{asked.batch} sequences have no equal share for each pair of {asked.ranks} ranks"
        return uncut_by_torch(asked, 2)

    def model(self, job: Job) -> DTensorFSDP:
        from fp8bench.nn.parallel.tensor_dtensor import DTensorFSDP

        return DTensorFSDP(job)
