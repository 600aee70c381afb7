"""Tensor parallel by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.cuts import AMAX_GROUPS, uncut_by_hand
from fp8bench.nn.parallel.way import Asked, Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.tensor_hand import HandCut


@ways.register("tp_hand")
class TensorParallelByHand(Way):
    """The exchanges of Megatron-LM: a sum behind attention and feed-forward part each, one before them in backward."""

    name = "tp_hand"
    summary = "the same cuts by hand: exchanges are a phase of their own, amax groups a choice"
    options: ClassVar = {"amax": AMAX_GROUPS}

    def refused(self, asked: Asked) -> str:
        return uncut_by_hand(asked)

    def model(self, job: Job) -> HandCut:
        from fp8bench.nn.parallel.tensor_hand import HandCut

        return HandCut(job)
