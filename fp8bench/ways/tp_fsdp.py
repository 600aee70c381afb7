"""Tensor parallel and FSDP2 on two dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.cuts import AMAX_GROUPS, uncut
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_fsdp import TensorFSDP


@ways.register("tp_fsdp")
class TensorParallelFSDP(Way):
    """What large trainings do: tensors within a machine, FSDP between machines."""

    name = "tp_fsdp"
    summary = "pairs of ranks share tensors as tp does, and FSDP2 shards what a pair has over all pairs"
    options: ClassVar = {"amax": AMAX_GROUPS}
    least_ranks = 4

    def refused(self, asked: Asked) -> str:
        pairs, left = divmod(asked.ranks, 2)
        if left or asked.batch % pairs:
            return f"{asked.batch} sequences have no equal share for each pair of {asked.ranks} ranks"
        return uncut(asked, 2)

    def model(self, job: Job) -> TensorFSDP:
        from fp8bench.nn.parallel.tensor_fsdp import TensorFSDP

        return TensorFSDP(job)
