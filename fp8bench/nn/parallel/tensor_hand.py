"""Tensor parallelism by hand: attention by heads and feed-forward parts by hidden features, exchanges explicit.

With sequence parallelism a rank has its tokens of the stream only, of which norms, residuals, head and loss are
computed. All tokens are gathered for what is cut, and of its sums each rank gets those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from fp8bench.nn.attention import SelfAttention
from fp8bench.nn.gpt import GPT, Block, loss_of
from fp8bench.nn.linear import Linear
from fp8bench.nn.parallel.amax_groups import cut_roles, scaled_as_whole
from fp8bench.nn.parallel.cuts import OF_GROUP, OWN, cut_of, cuts
from fp8bench.nn.parallel.exchanges import Group, added, copied, gathered, scattered
from fp8bench.nn.parallel.model import HeldModel, local
from fp8bench.nn.parallel.way import Job
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Phases, Role

Exchange = Callable[[Tensor, Group], Tensor]


def share_blocks(
    model: GPT, config: GPTConfig, group: Group, enter: Exchange = copied, leave: Exchange = added, amax: str = OWN
) -> None:
    """Leave this rank its share of every block, with scales of its own shares or of whole tensors; and have what a
    part of a block is given, and what comes of it, exchanged. Its layers keep their paths in the model."""
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.attn, SelfAttention)
        for path, cut in cuts(config).items():
            layer = block.get_submodule(path)
            assert isinstance(layer, Linear)
            layer.weight = nn.Parameter(cut.share(layer.weight.detach(), group.rank, group.size).contiguous())
            if amax == OF_GROUP:
                layer.arithmetic = scaled_as_whole(layer.arithmetic, cut, group)
        queries, keys, values = (size // group.size for size in block.attn.sizes)
        block.attn.sizes = (queries, keys, values)
        for part in (block.attn, block.mlp):
            part.register_forward_pre_hook(lambda _, given: (enter(given[0], group), *given[1:]))
            part.register_forward_hook(lambda _, given, y: leave(y, group))


class HandCut(HeldModel):
    """A rank's share of a model, whose batch all ranks see whole."""

    enter: Exchange = staticmethod(copied)
    leave: Exchange = staticmethod(added)
    module: GPT

    def __init__(self, job: Job) -> None:
        self._shared, self._config, self._amax = Group(job.group), job.config, job.options["amax"]
        self.module = job.make()
        share_blocks(self.module, job.config, self._shared, self.enter, self.leave, self._amax)
        named = dict(self.module.named_parameters())
        self._cuts = [cut_of(name, job.config) for name in named]
        super().__init__(named, job.loss_scale, [cut is not None for cut in self._cuts])
        self.group = job.group

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._shared.phase = phase
        with phase.elementwise:
            loss: Tensor = self.module(tokens, targets, phase)
            (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def shared_roles(self, layer: str) -> Collection[Role]:
        cut = cut_of(f"{layer}.weight", self._config)
        return cut_roles(cut) if cut is not None and self._amax == OF_GROUP else ()

    def full_weights(self) -> dict[str, Tensor]:
        parts = zip(self.names, self.weights, self._cuts, strict=True)
        return {name: own if cut is None else cut.joined(self._shared.everybodys(own)) for name, own, cut in parts}


class SequenceCut(HandCut):
    """The same, and of the stream a rank's tokens only. What all ranks have whole got gradients of those: a sum."""

    enter = staticmethod(gathered)
    leave = staticmethod(scattered)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._shared.phase = phase
        with phase.elementwise:
            return loss_of_own_tokens(self, self.module, self._shared, tokens, targets, phase)


def loss_of_own_tokens(
    held: HeldModel, model: GPT, group: Group, tokens: Tensor, targets: Tensor, phase: Phases
) -> Tensor:
    """Forward and backward of this rank's tokens; gradients of what all ranks have are added up, in one message."""
    stream = model.through(group.own(model.embedded(tokens)), phase, tokens.shape[1])
    loss = loss_of(model.read(stream, phase), group.own(targets))
    (loss * (held.loss_scale / group.size)).backward()  # type: ignore[no-untyped-call]
    common = [one for one, cut in zip(held.parameters, held.sharded, strict=True) if not cut]
    own = [local(one.grad).view(-1) for one in common if one.grad is not None]
    whole = group.added(torch.cat(own))
    torch._foreach_copy_(own, list(torch.split(whole, [one.numel() for one in own])))
    return loss.detach()
