"""Data parallel with weights, gradients and moments divided: FSDP2 (fully_shard)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8bench.nn.parallel.way import Asked, Job, Way, equal_shares
from fp8bench.ways import ways

if TYPE_CHECKING:
    from fp8bench.nn.parallel.fsdp2 import FSDPModel

# Layers of torchao's, whose weights travel as float32 or as the codes that they multiply by.
TORCHAO = ("torchao_fp32", "torchao_fp8")


@ways.register("fsdp2")
class FSDP2(Way):
    """Weights are gathered block by block, for forward and again for backward; gradients are scattered."""

    name = "fsdp2"
    summary = "weights, gradients and moments cut into equal rows, torch's fully_shard"
    options: ClassVar = {"wire": ("fp32", "bf16", *TORCHAO)}

    def refused(self, asked: Asked) -> str:
        config, ranks, wire = asked.config, asked.ranks, asked.options["wire"]
        rows = {"the vocabulary": config.vocabulary, "the width": config.width, "the hidden width": config.hidden}
        if not config.modern:
            rows["the sequence"] = config.sequence
        uneven = next((name for name, count in rows.items() if count % ranks), None)
        if uneven is not None:
            return (
                f"{uneven} ({rows[uneven]}) has no equal part for each of {ranks} ranks, and parts of unequal size are "
                "padded, or fail with float8: choose another number of ranks"
            )
        if wire in TORCHAO and asked.precision.mode != "fp8":
            return f"wire={wire} has torchao's layers, which multiply in fp8: choose dtype fp8, or wire=fp32"
        if wire in TORCHAO and asked.facts.version_of("torchao") is None:
            return f"wire={wire} needs the package torchao: pip install torchao"
        return equal_shares(asked)

    def model(self, job: Job) -> FSDPModel:
        from fp8bench.nn.parallel.fsdp2 import FSDPModel

        return FSDPModel(job)
