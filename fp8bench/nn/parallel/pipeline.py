"""Pipeline parallelism: stages of blocks, microbatches of a batch, and torch's schedules GPipe and 1F1B."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.division import Division
from fp8bench.nn.parallel.exchanges import all_answers, is_silent
from fp8bench.nn.parallel.ways import Job
from fp8bench.protocols import Phases, SilentPhases


class Stage(nn.Module):
    """One rank's part of a model: its blocks, embeddings on the first rank, norm and head on the last."""

    def __init__(self, model: GPT, rank: int, ranks: int) -> None:
        super().__init__()
        share = len(model.blocks) // ranks
        self.first = rank == 0
        self.last = rank == ranks - 1
        self.first_block = rank * share
        # The first and the last rank have a copy of a tied head's weight each.
        self.tied = ranks > 1 and (self.first or self.last) and model.head.weight is model.embedding
        model.blocks = model.blocks[self.first_block : self.first_block + share]
        if not self.first:
            del model.embedding, model.positions
        if not self.last:
            del model.norm, model.head
        self.model = model
        self.phase: Phases = SilentPhases()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.first:
            x = self.model.embed(x)
        x = self.model.run_blocks(x, self.phase, length)
        return self.model.read_logits(x, self.phase) if self.last else x

    def named_weights(self) -> dict[str, nn.Parameter]:
        parameters = {}
        for name, parameter in self.model.named_parameters():
            words = name.split(".")
            if words[0] == "blocks":
                words[1] = str(int(words[1]) + self.first_block)
            tied = self.tied and name == "head.weight"
            parameters["embedding" if tied else ".".join(words)] = parameter
        return parameters


class MarkedStage(PipelineStage):
    """Marks what a rank computes; the rest of a step, sending and waiting, is under the phase communication.

    All stages know the shapes that come and go, so that a group that sends nothing need not be asked for votes.
    """

    def forward_one_chunk(self, *inputs: Any, **named: Any) -> Any:
        with self._phase.elementwise:
            return super().forward_one_chunk(*inputs, **named)

    def backward_one_chunk(self, *inputs: Any, **named: Any) -> None:
        with self._phase.elementwise:
            super().backward_one_chunk(*inputs, **named)

    @property
    def _phase(self) -> Phases:
        assert isinstance(self.submod, Stage)
        return self.submod.phase

    def _alone(self) -> bool:
        return self.group is not None and is_silent(self.group)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        if self._alone():
            return torch.ones(1, dtype=torch.int32)
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self._alone():
            return torch.ones(1, dtype=torch.int32)
        return super()._warmup_backward_result(received_result)


class GPipe(Division):
    """One stage of a pipeline. Only the last rank knows the loss."""

    module: Stage
    schedule: ClassVar[type[PipelineScheduleSingle]] = ScheduleGPipe

    def __init__(self, job: Job) -> None:
        model = job.make()
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        rank = job.group.rank()
        ranks = job.group.size()
        self.module = Stage(model, rank, ranks)
        super().__init__(self.module.named_weights(), job.loss_scale)
        self.group = job.group
        self._parts = int(job.options["microbatches"])
        device = torch.device(job.facts.key)
        comes, goes = self._ends(job)
        marked = MarkedStage(self.module, rank, ranks, device, comes, goes, group=job.group)
        self._schedule = self.schedule(marked, self._parts, self._lost)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self.module.phase = phase
        losses: list[Tensor] = []
        inputs = (tokens,) if self.module.first else ()
        with phase.communication:
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            # The first and the last stage each have the tied weight, and each only its own gradient.
            if self.module.tied:
                self._sum_head_and_embedding(self.parameters[self.names.index("embedding")])
        # Only the last stage has losses.
        if not self.module.last:
            return torch.zeros((), device=tokens.device)
        return torch.stack(losses).mean().detach() / self.loss_scale

    def _sum_head_and_embedding(self, weight: nn.Parameter) -> None:
        """Adds what the last rank's head and the first one's embedding do to the weight that both have."""
        assert weight.grad is not None
        gradient_there = torch.zeros_like(weight.grad)
        peer = dist.get_global_rank(self.group, 0 if self.module.last else self.group.size() - 1)
        send = dist.P2POp(dist.isend, weight.grad, peer, self.group)
        receive = dist.P2POp(dist.irecv, gradient_there, peer, self.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        weight.grad += gradient_there

    def whole_loss(self, loss: Tensor) -> Tensor:
        mean = loss.clone()
        dist.broadcast(mean, group=self.group, group_src=self.group.size() - 1)
        return mean

    def full_weights(self) -> dict[str, Tensor]:
        """Each weight is broadcast by its rank; first all ranks learn who has which."""
        own_weights = dict(zip(self.names, self.weights, strict=True))
        weights: dict[str, Tensor] = {}
        # In the order of ranks, because every rank has to take part in every broadcast.
        for rank, names in enumerate(all_answers(self.names, self.group)):
            for name in names:
                weight = own_weights.get(name)
                weight_of_all = self.weights[0].new_empty(self._shapes[name]) if weight is None else weight.clone()
                dist.broadcast(weight_of_all, group=self.group, group_src=rank)
                weights[name] = weight_of_all
        return {name: weights[name] for name in self._shapes}

    def _lost(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.module.phase.elementwise:
            return self.module.model.loss_of(logits, targets) * self.loss_scale

    def _ends(self, job: Job) -> tuple[Tensor, Tensor]:
        model = self.module.model
        sides = job.batch // self._parts, job.config.sequence
        residual = model.around["residual"]
        dtype = model.carrier if residual is None else residual.carrier
        stream = torch.empty(*sides, job.config.width, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(sides, dtype=torch.int64, device="meta")
        if not self.module.last:
            return (tokens if self.module.first else stream), stream
        logits = torch.empty(*sides, job.config.vocabulary, dtype=model.head.arithmetic.carrier, device="meta")
        return (tokens if self.module.first else stream), logits.requires_grad_()


class OneForwardOneBackward(GPipe):
    """The same stages by the schedule 1F1B."""

    schedule = Schedule1F1B
