"""Tensor parallelism: attention by heads, feed-forward parts by hidden features, with explicit exchanges.

With sequence parallelism a rank has only its tokens of the stream, for which it computes norms, residuals, head and
loss. The parts that are cut gather all tokens, and of their sums each rank gets its own tokens.

No rank knows the largest magnitude of a tensor that is cut. `own` scales each share by its own; `group` asks all ranks
for the largest before every cast, so that codes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8bench.formats.native_codes import current_scale
from fp8bench.formats.recipes import Delayed, Treatment
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.attention import SelfAttention
from fp8bench.nn.gpt import GPT, Block
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.data_parallel import shard
from fp8bench.nn.parallel.exchanges import FP8Group, RankGroup, added, copied, gathered, scattered
from fp8bench.nn.parallel.model import ParallelModel, ScaleWitness, Witness
from fp8bench.nn.parallel.ways import OF_GROUP, OUTPUTS, OWN, Cut, Job, cut_of, cuts
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.tensor_scales import DelayedScale, NextScale, ScalePair
from fp8bench.protocols import Arithmetic, Phases, Role

# Turns one rank's largest magnitude, a float32 scalar tensor, into that of all ranks.
Largest = Callable[[Tensor], Tensor]


class CurrentOfGroup:
    """Scales by a tensor's largest magnitude over all ranks."""

    def __init__(self, largest: Largest, treatment: Treatment) -> None:
        self._largest, self._treatment = largest, treatment
        self.last: ScalePair | None = None

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        if again and self.last is not None:
            return self.last
        scaling = self._treatment.scaling
        assert scaling is not None
        amax = self._largest(largest_magnitude(x) if amax is None else amax)
        self.last = ScalePair(*current_scale(amax, self._treatment.fmt, scaling.rounding))
        return self.last


class DelayedOfGroup(DelayedScale):
    """A delayed scale with the history of the whole tensor."""

    def __init__(self, largest: Largest, delayed: Delayed, treatment: Treatment) -> None:
        super().__init__(delayed, treatment.fmt)
        self._largest = largest

    def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScalePair:
        if again and self.last is not None:
            return self.last
        return super().next(x, again, self._largest(largest_magnitude(x) if amax is None else amax))


def cut_roles(cut: Cut) -> tuple[Role, ...]:
    """The operands of which each rank has a share; the rest of a product is the same on all of them."""
    return (Role.WEIGHT, Role.GRADIENT if cut.dim == OUTPUTS else Role.INPUT)


def scaled_together(arithmetic: Arithmetic, roles: Iterable[Role], largest: Largest) -> Arithmetic:
    """`arithmetic` with scales by the largest magnitudes of all ranks for these roles; itself where no tensor has one
    scale. Ranks have to cast in the same order."""
    if not (isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.per_tensor):
        return arithmetic
    delayed = arithmetic.recipe.delayed
    scales: dict[Role, NextScale] = dict(arithmetic.scales)
    for role in roles:
        treatment = arithmetic.treatments[role]
        scales[role] = DelayedOfGroup(largest, delayed, treatment) if delayed else CurrentOfGroup(largest, treatment)
    return type(arithmetic)(arithmetic.recipe, arithmetic.carrier, arithmetic.name, scales)


Exchange = Callable[[Tensor, RankGroup], Tensor]


def share_blocks(
    model: GPT, config: GPTConfig, group: RankGroup, enter: Exchange = copied, leave: Exchange = added, amax: str = OWN
) -> None:
    """Cuts every block down to this rank's share, and exchanges the inputs and outputs of its parts. Scales are by own
    shares or by whole tensors. Layers keep their paths in the model."""
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.attn, SelfAttention)
        for path, cut in cuts(config).items():
            layer = block.get_submodule(path)
            assert isinstance(layer, Linear)
            layer.weight = nn.Parameter(cut.share(layer.weight.detach(), group.rank, group.size).contiguous())
            if amax == OF_GROUP:
                layer.arithmetic = scaled_together(layer.arithmetic, cut_roles(cut), group.largest)
        queries, keys, values = (size // group.size for size in block.attn.sizes)
        block.attn.sizes = (queries, keys, values)
        for part in (block.attn, block.mlp):
            part.register_forward_pre_hook(lambda _, given: (enter(given[0], group), *given[1:]))
            part.register_forward_hook(lambda _, given, y: leave(y, group))


class TensorCut(ParallelModel):
    """A rank's share of a model; all ranks read the whole batch."""

    enter: Exchange = staticmethod(copied)
    leave: Exchange = staticmethod(added)
    module: GPT

    def __init__(self, job: Job) -> None:
        self._shared, self._config, self._amax = self._group(job), job.config, job.options["amax"]
        self.module = job.make()
        share_blocks(self.module, job.config, self._shared, self.enter, self.leave, self._amax)
        named = dict(self.module.named_parameters())
        self._cuts = [cut_of(name, job.config) for name in named]
        super().__init__(named, job.loss_scale)
        self.group = job.group

    def _group(self, job: Job) -> RankGroup:
        return RankGroup(job.group)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._shared.phase = phase
        return super().loss(tokens, targets, phase)

    def shared_roles(self, layer: str) -> Collection[Role]:
        cut = cut_of(f"{layer}.weight", self._config)
        return cut_roles(cut) if cut is not None and self._amax == OF_GROUP else ()

    def full_weights(self) -> dict[str, Tensor]:
        parts = zip(self.names, self._own(), self._cuts, strict=True)
        return {name: own if cut is None else cut.joined(self._shared.all_of(own)) for name, own, cut in parts}

    def _own(self) -> list[Tensor]:
        return self.weights


class SequenceCut(TensorCut):
    """TensorCut with this rank's tokens of the stream only. Gradients of weights that all ranks have are summed."""

    enter = staticmethod(gathered)
    leave = staticmethod(scattered)

    def _group(self, job: Job) -> RankGroup:
        if job.options["wire"] != "fp8":
            return RankGroup(job.group)
        group = FP8Group(job.group)
        self.fp8_wire = group.wire
        return group

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        group = self._shared
        group.phase = phase
        with phase.elementwise:
            stream = self.module.through(group.own(self.module.embedded(tokens)), phase, tokens.shape[1])
            loss = self.module.lost(self.module.read(stream, phase), group.own(targets))
            (loss * (self.loss_scale / group.size)).backward()  # type: ignore[no-untyped-call]
            common = [parameter.grad for parameter, cut in zip(self.parameters, self._cuts, strict=True) if cut is None]
            group.added_together([tensor for tensor in common if tensor is not None])
        return loss.detach()


class TensorFSDP(TensorCut):
    """Tensor parallelism over pairs of ranks, and FSDP2 over the pairs, which divide the batch. A rank keeps a shard of
    its share in the pair; the other shards are with its counterparts in other pairs."""

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
    """The mesh (data, tensor), in which neighbouring ranks share tensors. Its groups have the backend of the whole
    group, which may send nothing."""
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 2)
    backend, here = dist.get_backend(group), group.rank()
    groups = {}
    for name, sets in (("data", ranks.t().tolist()), ("tensor", ranks.tolist())):
        made = {tuple(pair): dist.new_group(pair, backend=backend) for pair in sets}
        groups[name] = next(group for members, group in made.items() if ranks.view(-1)[here] in members)
    return DeviceMesh.from_group(list(groups.values()), kind, mesh=ranks, mesh_dim_names=tuple(groups))
