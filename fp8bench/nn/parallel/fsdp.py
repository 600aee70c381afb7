"""Every rank, or pair of them, has equal rows of each weight; whole ones are gathered while a block needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear, region
from fp8bench.nn.parallel.exchanges import RankGroup
from fp8bench.nn.parallel.model import ParallelModel, ScaleWitness, Witness
from fp8bench.nn.parallel.tensor_parallel import TensorCut
from fp8bench.nn.parallel.ways import Job
from fp8bench.protocols import Phases

_TORCHAO = "torchao_"


class FSDPModel(ParallelModel):
    """torch's fully_shard, a group for each block and one for the rest; `wire` is what weights are gathered in.

    Gradients are reduced in float32.
    """

    module: GPT

    def __init__(self, job: Job) -> None:
        self.group = self.sharers = job.group
        self.module, wire = job.make(), job.options["wire"]
        self._in_codes = wire == "torchao_fp8"
        if wire.startswith(_TORCHAO):
            take_torchao_layers(self.module, job.emulated, self._in_codes)
        shard(self.module, DeviceMesh.from_group(job.group, job.facts.kind), wire)
        super().__init__(dict(self.module.named_parameters()), job.loss_scale)
        # Without what torchao wraps them in.
        self.weights = [getattr(weight, "_tensor", weight) for weight in self.weights]
        if self._in_codes:
            self._scales_are_known()

    def updated(self, phase: Phases) -> None:
        if self._in_codes:
            with phase.communication:
                self._scales_are_known()

    def full_weights(self) -> dict[str, Tensor]:
        group, parts = RankGroup(self.group), zip(self.names, self.weights, strict=True)
        return {name: torch.cat(group.everybodys(part.contiguous())) for name, part in parts}

    def _scales_are_known(self) -> None:
        """The largest magnitudes of all weights that travel as codes, in one exchange after every update."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(self.module)


def take_torchao_layers(model: GPT, emulated: bool, in_codes: bool) -> None:
    """Put torchao's float8 layers, with their weights, in the places of all that blocks have; `in_codes` says that FSDP
    gathers codes of them. Casts are within their products, where no phase can be opened for them."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    named = Float8LinearConfig.from_recipe_name("tensorwise")
    config = replace(named, emulate=emulated, enable_fsdp_float8_all_gather=in_codes)
    for path, layer in list(model.blocks.named_modules()):
        if isinstance(layer, Linear):
            outputs, inputs = layer.weight.shape
            # Without memory it draws no random numbers.
            plain = nn.Linear(inputs, outputs, bias=False, device="meta")
            plain.weight = layer.weight
            made = Float8Linear.from_float(plain, config)
            made.forward = partial(_in_phase, made.forward, layer.arithmetic.carrier)
            owner, _, name = path.rpartition(".")
            setattr(model.blocks.get_submodule(owner), name, made)


def _in_phase(multiply: Callable[[Tensor], Tensor], carrier: torch.dtype, x: Tensor, phase: Phases) -> Tensor:
    return region(phase.gemm, multiply, x.to(carrier))


def shard(model: GPT, mesh: DeviceMesh, wire: str) -> None:
    """Weights are gathered in bfloat16 where `wire` is that, else as they are."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if wire == "bf16" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class TensorFSDP(TensorCut):
    """Tensor parallelism over pairs of ranks, and FSDP2 over the pairs, which divide the batch: of a pair's share of a
    model this rank keeps the shards of its place among the pairs."""

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
        wholes = [parameter.detach() for parameter in self.parameters]
        return [whole.full_tensor() if isinstance(whole, DTensor) else whole for whole in wholes]


@cache
def _pairs(group: dist.ProcessGroup, kind: str) -> DeviceMesh:
    """(data, tensor): neighbouring ranks share tensors. Groups of the kind of the whole one, which may send nothing."""
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 2)
    backend, here = dist.get_backend(group), group.rank()
    groups = {}
    for name, sets in (("data", ranks.t().tolist()), ("tensor", ranks.tolist())):
        made = {tuple(pair): dist.new_group(pair, backend=backend) for pair in sets}
        groups[name] = next(group for members, group in made.items() if ranks.view(-1)[here] in members)
    return DeviceMesh.from_group(list(groups.values()), kind, mesh=ranks, mesh_dim_names=tuple(groups))
