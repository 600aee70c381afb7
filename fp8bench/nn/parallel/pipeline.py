"""Pipeline parallelism. Each rank has some blocks of the model (a stage). A batch is divided into microbatches, which
pass through the stages by one of torch's schedules, GPipe or 1F1B.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.division import RankModelPart
from fp8bench.nn.parallel.exchanges import gather_rank_answers, is_silent
from fp8bench.nn.parallel.ways import ModelPartSetup
from fp8bench.protocols import Phases, SilentPhases


class PipelineStageModel(nn.Module):
    """One rank's blocks of the model. The first rank also has the embeddings, and the last rank the norm and the
    head.
    """

    def __init__(self, model: GPT, rank: int, ranks: int) -> None:
        super().__init__()
        blocks_per_rank = len(model.blocks) // ranks
        self.is_first = rank == 0
        self.is_last = rank == ranks - 1
        self.first_block = rank * blocks_per_rank
        # If the head is tied, the first and the last rank each have a copy of its weight.
        self.has_tied_weight = ranks > 1 and (self.is_first or self.is_last) and model.head.weight is model.embedding
        model.blocks = model.blocks[self.first_block : self.first_block + blocks_per_rank]
        if not self.is_first:
            del model.embedding, model.positions
        if not self.is_last:
            del model.norm, model.head
        self.model = model
        self.phase: Phases = SilentPhases()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.is_first:
            x = self.model.embed_tokens(x)
        x = self.model.run_blocks(x, self.phase, length)
        return self.model.read_logits(x, self.phase) if self.is_last else x

    def named_weights(self) -> dict[str, nn.Parameter]:
        stage_parameters = {}
        for name, parameter in self.model.named_parameters():
            path_parts = name.split(".")
            if path_parts[0] == "blocks":
                # Number the blocks as in the whole model.
                path_parts[1] = str(int(path_parts[1]) + self.first_block)
            # The whole model lists a tied weight as its embedding.
            is_tied_weight = self.has_tied_weight and name == "head.weight"
            stage_parameters["embedding" if is_tied_weight else ".".join(path_parts)] = parameter
        return stage_parameters


class PhaseMarkedStage(PipelineStage):
    """A pipeline stage that marks its computing as a phase. Sending and waiting are in the phase communication.

    All stages know the shapes of inputs and outputs. So they need not exchange shapes, which is impossible in a group
    that sends nothing.
    """

    def forward_one_chunk(self, *inputs: Any, **named: Any) -> Any:
        with self._submodule_phases.elementwise:
            return super().forward_one_chunk(*inputs, **named)

    def backward_one_chunk(self, *inputs: Any, **named: Any) -> None:
        with self._submodule_phases.elementwise:
            super().backward_one_chunk(*inputs, **named)

    @property
    def _submodule_phases(self) -> Phases:
        assert isinstance(self.submod, PipelineStageModel)
        return self.submod.phase

    def _is_silent(self) -> bool:
        return self.group is not None and is_silent(self.group)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        # Ranks of a silent group cannot vote.
        if self._is_silent():
            return torch.ones(1, dtype=torch.int32)
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        if self._is_silent():
            return torch.ones(1, dtype=torch.int32)
        return super()._warmup_backward_result(received_result)


class GPipe(RankModelPart):
    """One stage of a pipeline with the schedule GPipe. Only the last rank knows the loss."""

    module: PipelineStageModel
    schedule: ClassVar[type[PipelineScheduleSingle]] = ScheduleGPipe

    def __init__(self, job: ModelPartSetup) -> None:
        model = job.make()
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        rank = job.group.rank()
        ranks = job.group.size()
        self.module = PipelineStageModel(model, rank, ranks)
        super().__init__(self.module.named_weights(), job.loss_scale)
        self.group = job.group
        self._microbatches = int(job.options["microbatches"])
        device = torch.device(job.facts.key)
        example_input, example_output = self._make_examples(job)
        pipeline_stage = PhaseMarkedStage(
            self.module, rank, ranks, device, example_input, example_output, group=job.group
        )
        self._schedule = self.schedule(pipeline_stage, self._microbatches, self._compute_loss)

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self.module.phase = phase
        losses: list[Tensor] = []
        # Other stages receive their inputs from the previous stage.
        inputs = (tokens,) if self.module.is_first else ()
        with phase.communication:
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            # The first and the last stage each have a copy of the tied weight, but only a part of its gradient.
            if self.module.has_tied_weight:
                self._sum_head_and_embedding(self.parameters[self.names.index("embedding")])
        # Only the last stage has losses.
        if not self.module.is_last:
            return torch.zeros((), device=tokens.device)
        return torch.stack(losses).mean().detach() / self.loss_scale

    def _sum_head_and_embedding(self, weight: nn.Parameter) -> None:
        """Adds up the two parts of the tied weight's gradient. The last rank has the part of the head, and the first
        rank the part of the embedding.
        """
        assert weight.grad is not None
        partner_rank_gradient = torch.zeros_like(weight.grad)
        partner_rank = dist.get_global_rank(self.group, 0 if self.module.is_last else self.group.size() - 1)
        send_operation = dist.P2POp(dist.isend, weight.grad, partner_rank, self.group)
        receive_operation = dist.P2POp(dist.irecv, partner_rank_gradient, partner_rank, self.group)
        for pending_operation in dist.batch_isend_irecv([send_operation, receive_operation]):
            pending_operation.wait()
        weight.grad += partner_rank_gradient

    def average_loss(self, loss: Tensor) -> Tensor:
        mean = loss.clone()
        # Only the last stage knows the loss.
        dist.broadcast(mean, group=self.group, group_src=self.group.size() - 1)
        return mean

    def gather_weights(self) -> dict[str, Tensor]:
        """Returns all weights on every rank. First the ranks exchange the names of their weights. Then each
        weight is broadcast by its rank.
        """
        own_stage_weights = dict(zip(self.names, self.weights, strict=True))
        weights: dict[str, Tensor] = {}
        # Go through the ranks in order, because every rank must take part in every broadcast.
        for rank, names in enumerate(gather_rank_answers(self.names, self.group)):
            for name in names:
                weight = own_stage_weights.get(name)
                weight_copy = self.weights[0].new_empty(self._shapes[name]) if weight is None else weight.clone()
                dist.broadcast(weight_copy, group=self.group, group_src=rank)
                weights[name] = weight_copy
        return {name: weights[name] for name in self._shapes}

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.module.phase.elementwise:
            return self.module.model.compute_loss(logits, targets) * self.loss_scale

    def _make_examples(self, job: ModelPartSetup) -> tuple[Tensor, Tensor]:
        model = self.module.model
        # The stage needs only the shapes and dtypes of examples, so these are on the meta device.
        token_shape = job.batch // self._microbatches, job.config.sequence
        residual = model.around["residual"]
        dtype = model.carrier if residual is None else residual.carrier
        residual_stream_example = torch.empty(
            *token_shape, job.config.width, dtype=dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty(token_shape, dtype=torch.int64, device="meta")
        if not self.module.is_last:
            return (tokens if self.module.is_first else residual_stream_example), residual_stream_example
        logits = torch.empty(*token_shape, job.config.vocabulary, dtype=model.head.arithmetic.carrier, device="meta")
        return (tokens if self.module.is_first else residual_stream_example), logits.requires_grad_()


class OneForwardOneBackward(GPipe):
    """One stage of a pipeline with the schedule 1F1B."""

    schedule = Schedule1F1B
