"""Tensor and sequence parallel by torch's DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.nn.parallel.cuts import uncut_by_torch, uncut_tokens
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_dtensor import DTensorSequence


@ways.register("sp_torch")
class SequenceParallelByTorch(Way):
    """Layouts of DTensor's in the place of the exchanges by hand."""

    name = "sp_torch"
    summary = "tp with torch's SequenceParallel: what sp does by hand"

    def refused(self, asked: Asked) -> str:
        if asked.precision.mode == "fp8":
            return "DTensor would gather float8 codes of the tokens, which gloo cannot send: way=sp does"
        return uncut_tokens(asked) or uncut_by_torch(asked, asked.ranks)

    def model(self, job: Job) -> DTensorSequence:
        from fp8bench.nn.parallel.tensor_dtensor import DTensorSequence

        return DTensorSequence(job)
