"""Tensor parallelism over pairs of ranks, and FSDP2 over the pairs, which divide the batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8bench.nn.parallel.fsdp2 import shard
from fp8bench.nn.parallel.model import ParallelModel
from fp8bench.nn.parallel.tensor_parallel import TensorCut
from fp8bench.nn.parallel.way import Job
from fp8bench.nn.parallel.witness import ScaleWitness, Witness


class TensorFSDP(TensorCut):
    """A pair's share of a model, of whose shards this rank keeps those of its place among the pairs."""

    def __init__(self, job: Job) -> None:
        mesh = _pairs(job.group, job.facts.kind)
        self._pair, self.sharers = mesh.get_group("tensor"), mesh.get_group("data")
        super().__init__(replace(job, group=self._pair))
        shard(self.module, mesh["data"], "fp32")
        ParallelModel.__init__(self, dict(self.module.named_parameters()), job.loss_scale)
        self.group = job.group

    def witnesses(self) -> list[Witness]:
        pair = dist.get_process_group_ranks(self._pair)
        return [ScaleWitness(self.layers(), self.shared_roles, self.group, pair)]

    def _own(self) -> list[Tensor]:
        wholes = [one.detach() for one in self.parameters]
        return [one.full_tensor() if isinstance(one, DTensor) else one for one in wholes]


@cache
def _pairs(group: dist.ProcessGroup, kind: str) -> DeviceMesh:
    """(data, tensor): neighbouring ranks share tensors. Groups of the kind of the whole one, which may send nothing."""
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 2)
    backend, here = dist.get_backend(group), group.rank()
    groups = {}
    for name, sets in (("data", ranks.t().tolist()), ("tensor", ranks.tolist())):
        made = {tuple(one): dist.new_group(one, backend=backend) for one in sets}
        groups[name] = next(group for members, group in made.items() if ranks.view(-1)[here] in members)
    return DeviceMesh.from_group(list(groups.values()), kind, mesh=ranks, mesh_dim_names=tuple(groups))
