"""Tensor parallelism: ranks divide attention by heads, and feed-forward parts by hidden features. They exchange tensors
explicitly.

With sequence parallelism a rank holds only its own tokens of the residual stream. It computes norms, residuals, head
and loss for its own tokens only. Before attention and feed-forward parts, each rank gathers all tokens. Afterwards the
ranks' outputs are summed, and each rank gets the sums for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8bench.nn.attention import SelfAttention
from fp8bench.nn.block import Block
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.data_parallel import shard_model
from fp8bench.nn.parallel.division import RankModelPart, ScaleOrWireWitness
from fp8bench.nn.parallel.exchanges import (
    FP8Group,
    RankGroup,
    add_over_ranks,
    copy_to_ranks,
    gather_tokens,
    scatter_tokens,
)
from fp8bench.nn.parallel.group_scales import list_divided_roles, use_group_scales
from fp8bench.nn.parallel.ways import OF_GROUP, OWN, ModelPartSetup, find_weight_cut, list_weight_cuts
from fp8bench.nn.parallel.witnesses import ScaleWitness
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Phases, Role

ExchangeTensor = Callable[[Tensor, RankGroup], Tensor]


def split_blocks_over_ranks(
    model: GPT,
    config: GPTConfig,
    group: RankGroup,
    exchange_before: ExchangeTensor = copy_to_ranks,
    exchange_after: ExchangeTensor = add_over_ranks,
    amax: str = OWN,
) -> None:
    """Replaces the weights of every block by this rank's share, and adds exchanges before and after attention and the
    feed-forward part. `amax` chooses whether a share is scaled by its largest magnitude or by that of the whole tensor.
    Layers keep their paths in the model.
    """
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.attn, SelfAttention)
        for path, cut in list_weight_cuts(config).items():
            layer = block.get_submodule(path)
            assert isinstance(layer, Linear)
            layer.weight = nn.Parameter(cut.share(layer.weight.detach(), group.rank, group.size).contiguous())
            if amax == OF_GROUP:
                layer.arithmetic = use_group_scales(layer.arithmetic, list_divided_roles(cut), group.max_over_ranks)
        # Each rank computes only its share of the heads.
        queries, keys, values = (size // group.size for size in block.attn.sizes)
        block.attn.sizes = (queries, keys, values)
        for part in (block.attn, block.mlp):
            part.register_forward_pre_hook(lambda _, inputs: (exchange_before(inputs[0], group), *inputs[1:]))
            part.register_forward_hook(lambda _, inputs, y: exchange_after(y, group))


class TensorCut(RankModelPart):
    """A rank's share of a model with tensor parallelism. All ranks read the whole batch."""

    exchange_before: ExchangeTensor = staticmethod(copy_to_ranks)
    exchange_after: ExchangeTensor = staticmethod(add_over_ranks)
    module: GPT
    _rank_group: RankGroup

    def __init__(self, job: ModelPartSetup) -> None:
        self._rank_group = self._make_shared_group(job)
        self._config = job.config
        self._amax = job.options["amax"]
        self.module = job.make()
        split_blocks_over_ranks(
            self.module, job.config, self._rank_group, self.exchange_before, self.exchange_after, self._amax
        )
        named_parameters = dict(self.module.named_parameters())
        self._cuts = [find_weight_cut(name, job.config) for name in named_parameters]
        super().__init__(named_parameters, job.loss_scale)
        self.group = job.group

    def _make_shared_group(self, job: ModelPartSetup) -> RankGroup:
        return RankGroup(job.group)

    def list_shared_roles(self, layer: str) -> Collection[Role]:
        cut = find_weight_cut(f"{layer}.weight", self._config)
        return list_divided_roles(cut) if cut is not None and self._amax == OF_GROUP else ()

    def gather_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, share, cut in zip(self.names, self._list_weight_shares(), self._cuts, strict=True):
            weights[name] = share if cut is None else cut.join(self._rank_group.gather_from_ranks(share))
        return weights

    def _list_weight_shares(self) -> list[Tensor]:
        return self.weights


class SequenceCut(TensorCut):
    """Tensor parallelism in which a rank holds only its own tokens of the residual stream. Weights that are not cut are
    on all ranks, which sum their gradients.
    """

    exchange_before = staticmethod(gather_tokens)
    exchange_after = staticmethod(scatter_tokens)

    def __init__(self, job: ModelPartSetup) -> None:
        super().__init__(job)
        self.common_parameters = [part for part, cut in zip(self.parameters, self._cuts, strict=True) if cut is None]

    def _make_shared_group(self, job: ModelPartSetup) -> RankGroup:
        if job.options["wire"] != "fp8":
            return RankGroup(job.group)
        group = FP8Group(job.group)
        self.fp8_wire = group.wire
        return group

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        group = self._rank_group
        stream = self.module.run_blocks(
            group.take_token_share(self.module.embed_tokens(tokens)), phase, tokens.shape[1]
        )
        return self.module.compute_loss(self.module.read_logits(stream, phase), group.take_token_share(targets))


class TensorFSDP(TensorCut):
    """Tensor parallelism in pairs of ranks, and FSDP2 over the pairs. The pairs divide the batch, and the two ranks of
    a pair divide the weights. Ranks with the same share of the weights in different pairs each store one shard of this
    share.
    """

    def __init__(self, job: ModelPartSetup) -> None:
        device_pair_mesh = _make_pair_mesh(job.group, job.facts.kind)
        self._pair = device_pair_mesh.get_group("tensor")
        self.batch_group = device_pair_mesh.get_group("data")
        super().__init__(replace(job, group=self._pair))
        shard_model(self.module, device_pair_mesh["data"], "fp32")
        # Read the parameters again, because fully_shard has replaced them by shards.
        RankModelPart.__init__(self, dict(self.module.named_parameters()), job.loss_scale)
        # Losses and faults concern all ranks, not only those of the pair.
        self.group = job.group

    def witnesses(self) -> list[ScaleOrWireWitness]:
        pair = dist.get_process_group_ranks(self._pair)
        return [ScaleWitness(self.layers(), self.list_shared_roles, self.group, pair)]

    def _list_weight_shares(self) -> list[Tensor]:
        parameter_shards = [parameter.detach() for parameter in self.parameters]
        return [shard.full_tensor() if isinstance(shard, DTensor) else shard for shard in parameter_shards]


@cache
def _make_pair_mesh(group: dist.ProcessGroup, kind: str) -> DeviceMesh:
    """Returns torch's mesh of ranks with the dimensions (data, tensor). Neighbouring ranks share tensors. The mesh's
    groups have the backend of `group`, even if it is 'fake' and sends nothing.
    """
    ranks = dist.get_process_group_ranks(group)
    mesh = torch.tensor(ranks).view(-1, 2)
    global_rank = ranks[group.rank()]
    backend = dist.get_backend(group)
    groups = {}
    for name, sets in (("data", mesh.t().tolist()), ("tensor", mesh.tolist())):
        for members in sets:  # every rank must take part in making every group
            new_group = dist.new_group(members, backend=backend)
            if global_rank in members:
                groups[name] = new_group
    return DeviceMesh.from_group(list(groups.values()), kind, mesh=mesh, mesh_dim_names=tuple(groups))
