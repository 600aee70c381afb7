"""Tensor parallelism by torch's DTensor, fp8 by torchao's styles of it; beside it FSDP2 on a second dimension."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fp8bench.nn.attention import SelfAttention
from fp8bench.nn.gpt import GPT, Block
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.cuts import OUTPUTS, Cut, cut_of, cuts
from fp8bench.nn.parallel.exchanges import Group
from fp8bench.nn.parallel.model import HeldModel
from fp8bench.nn.parallel.tensor_hand import loss_of_own_tokens
from fp8bench.nn.parallel.way import Job
from fp8bench.protocols import Phases

# How torch cuts a layer whose outputs are cut, and one whose inputs are.
Styles = tuple[type[ColwiseParallel], type[RowwiseParallel]]


class TorchLinear(nn.Linear):
    """A layer as torch's styles take one: its weight is fp32 and is cast to what it multiplies in."""

    carrier: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.carrier), self.weight.to(self.carrier))


class Unmarked(nn.Module):
    """A layer of torch's in the place of one that is given the phases. DTensor sends within, so that it marks none."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def _torch_layer(weight: Tensor, carrier: torch.dtype, job: Job) -> nn.Module:
    layer = TorchLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.carrier = carrier
    layer.weight = nn.Parameter(weight)
    if not _in_float8(job):
        return layer
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    found: nn.Module = Float8Linear.from_float(layer, Float8LinearConfig(emulate=job.emulated))
    return found


def _in_float8(job: Job) -> bool:
    """By torchao; all else that DTensor multiplies in is a dtype of torch's."""
    return job.precision == "fp8"


def _styles(job: Job) -> Styles:
    if not _in_float8(job):
        return ColwiseParallel, RowwiseParallel
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    return Float8ColwiseParallel, Float8RowwiseParallel


def _in_order_of_ranks(weight: Tensor, cut: Cut, ranks: int) -> Tensor:
    """Rows so that what torch gives a rank, one piece of them, is its share."""
    return torch.cat([cut.share(weight, rank, ranks) for rank in range(ranks)], cut.dim)


def _in_order_of_model(weight: Tensor, cut: Cut, ranks: int) -> Tensor:
    return cut.joined(weight.chunk(ranks, cut.dim))


def share_blocks(model: GPT, job: Job, mesh: DeviceMesh, by_sequence: bool = False) -> None:
    """Have every block be cut over a mesh; by sequence, what lies between its parts too, along the tokens."""
    (by_outputs, by_inputs), ranks = _styles(job), mesh.size()
    stream = Shard(1) if by_sequence else Replicate()
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.attn, SelfAttention)
        plan: dict[str, ParallelStyle] = {}
        for path, cut in cuts(job.config).items():
            layer = block.get_submodule(path)
            assert isinstance(layer, Linear)
            ordered = _in_order_of_ranks(layer.weight.detach(), cut, ranks)
            block.set_submodule(path, Unmarked(_torch_layer(ordered, layer.arithmetic.carrier, job)))
            plan[f"{path}.layer"] = (
                by_outputs(input_layouts=stream) if cut.dim == OUTPUTS else by_inputs(output_layouts=stream)
            )
        queries, keys, values = (size // ranks for size in block.attn.sizes)
        block.attn.sizes = (queries, keys, values)
        if by_sequence:
            plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm_attn", "norm_mlp")}
        # Every rank has made the same weights: none need be sent.
        parallelize_module(block, mesh, plan, src_data_rank=None)


class DTensorCut(HeldModel):
    """A rank's share of a model whose blocks are DTensors."""

    module: GPT

    def __init__(self, job: Job) -> None:
        self._job = job
        self.module = job.make()
        self._spread()
        named = {name.replace(".layer.", "."): one for name, one in self.module.named_parameters()}
        super().__init__(named, job.loss_scale, [not _is_everywhere(one) for one in named.values()])
        self.group = job.group

    def _spread(self) -> None:
        mesh = DeviceMesh.from_group(self._job.group, self._job.facts.kind)
        self._tensor_ranks = mesh.size()
        share_blocks(self.module, self._job, mesh)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = self.module(tokens, targets, phase)
        (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def full_weights(self) -> dict[str, Tensor]:
        found = {}
        for name, one in zip(self.names, self.parameters, strict=True):
            whole = one.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            cut = cut_of(name, self._job.config)
            found[name] = whole if cut is None else _in_order_of_model(whole, cut, self._tensor_ranks)
        return found


class DTensorSequence(DTensorCut):
    """The same with SequenceParallel: of what lies between the parts of a block a rank has its tokens."""

    def _spread(self) -> None:
        mesh = DeviceMesh.from_group(self._job.group, self._job.facts.kind)
        self._tensor_ranks, self._shared = mesh.size(), Group(self._job.group)
        share_blocks(self.module, self._job, mesh, by_sequence=True)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        return loss_of_own_tokens(self, self.module, self._shared, tokens, targets, phase)


class DTensorFSDP(DTensorCut):
    """The same over pairs of ranks, and over those in the same place of their pairs FSDP2, which divides the batch."""

    def _spread(self) -> None:
        mesh = _pairs(self._job.group, self._job.facts.kind)
        self._tensor_ranks = mesh["tensor"].size()
        self._sequences = mesh["data"]
        share_blocks(self.module, self._job, mesh["tensor"])
        for block in self.module.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(self.module, mesh=mesh["data"])

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        rank, size = self._sequences.get_local_rank(), self._sequences.size()
        return super().loss(tokens.chunk(size)[rank], targets.chunk(size)[rank], phase)


def _is_everywhere(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) or all(one.is_replicate() for one in tensor.placements)


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
