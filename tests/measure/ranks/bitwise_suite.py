"""A suite whose error is how many values real ranks get otherwise than simulated ones."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fp8bench.suites import Work, Workload, workloads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8bench.suites import Axis, DeviceFacts, Phases, Scalar, Setup


@workloads.register("bitwise_ranks")
class BitwiseRanks(Workload):
    """Every collective in FP8, three steps of each, so that a mu goes on."""

    name = "bitwise_ranks"
    summary = "real ranks against simulated ones"

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return ()

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work(flops=1.0)

    def prepare(self, setup: Setup) -> None:
        return None

    def step(self, state: Any, phase: Phases) -> None:
        return None

    def error(self, setup: Setup) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        from fp8bench.numerics.collectives import FP8Collective, draw_rank_values
        from fp8bench.workloads.collective import COLLECTIVES, FP8_METHODS, SCALINGS, SUMMING_COLLECTIVES

        rank, size = dist.get_rank(), dist.get_world_size()
        sources = [draw_rank_values(0, one, 1 << 12) for one in range(size)]
        different = torch.zeros(2)
        for collective in COLLECTIVES:
            kinds = [*itertools.product(FP8_METHODS, SCALINGS)] if collective in SUMMING_COLLECTIVES else [("", "")]
            for way, scaling in kinds:
                real = FP8Collective(collective, way, scaling)
                for _ in range(3):
                    wanted = real.simulate_ranks(sources)[rank].values
                    found = real(sources[rank], rank, size, nullcontext()).values
                    different += torch.tensor([float((found != wanted).sum()), float(found.numel())])
        dist.all_reduce(different)
        return {"different_values": float(different[0]), "compared_values": float(different[1])}
