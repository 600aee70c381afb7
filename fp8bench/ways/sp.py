"""Tensor parallel with sequence parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.cuts import AMAX_GROUPS, uncut, uncut_tokens
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_parallel import SequenceCut


@ways.register("sp")
class SequenceParallel(Way):
    """As many bytes as tp, and less memory: what lies between the parts of a block is divided, too."""

    name = "sp"
    summary = (
        "tp, and of what lies between a block's parts a rank has its tokens only: gathered before, scattered after"
    )
    options: ClassVar = {"wire": ("stream", "fp8"), "amax": AMAX_GROUPS}

    def refused(self, asked: Asked) -> str:
        return uncut_tokens(asked) or uncut(asked, asked.ranks)

    def model(self, job: Job) -> SequenceCut:
        from fp8bench.nn.parallel.tensor_parallel import SequenceCut

        return SequenceCut(job)
