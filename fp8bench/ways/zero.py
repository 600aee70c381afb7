"""Data parallel with the optimizer's state divided: ZeRO's first stage, of whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.way import Asked, Job, Way, equal_shares
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.zero import ZeroModel


@ways.register("zero")
class Zero(Way):
    """Each weight has one owner, who alone keeps its moments and updates it; no tensor is cut."""

    name = "zero"
    summary = "ZeRO-1: each weight has one owner, which gets its gradient, updates it and sends it to all"
    options: ClassVar = {"wire": ("fp32", "fp8")}

    def refused(self, asked: Asked) -> str:
        tensors = 6 * asked.config.layers
        if asked.ranks > tensors:
            return f"{asked.ranks} ranks have no weight each: the blocks of this model have {tensors}"
        return equal_shares(asked)

    def model(self, job: Job) -> ZeroModel:
        from fp8bench.nn.parallel.zero import ZeroModel

        return ZeroModel(job)
