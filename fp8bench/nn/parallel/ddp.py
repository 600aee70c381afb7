"""Every rank has the whole model and its share of a batch; the mean of gradients is what is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fp8bench.nn.parallel.alone import AloneModel
from fp8bench.nn.parallel.model import HeldModel, ParallelModel, is_silent, share
from fp8bench.nn.parallel.way import Job
from fp8bench.nn.parallel.witness import Hook, MeanWitness, Witness
from fp8bench.numerics.fp8_reduce import POST, AutoScale, mean_in_fp8
from fp8bench.numerics.rank_programs import on_this_rank
from fp8bench.protocols import Phases, SilentPhases


class DDPModel(AloneModel):
    """torch's DistributedDataParallel, with hooks of our own where gradients are sent in fewer bits."""

    def __init__(self, job: Job) -> None:
        whole = job.make()
        super().__init__(whole, job.loss_scale)
        self.group = job.group
        self._phase: Phases = SilentPhases()
        devices = [job.facts.index] if job.facts.accelerated else None
        self._ddp = DistributedDataParallel(whole, devices, process_group=job.group, gradient_as_bucket_view=True)
        self._wire, self._seen_by = job.options["wire"], list[MeanWitness]()
        hook = self._hook(self._wire)
        if hook is not None:  # torch looks at the annotations of a hook, and here these are texts
            self._ddp.register_comm_hook(None, lambda state, bucket: self._sent(hook, bucket))

    def whole_loss(self, loss: Tensor) -> Tensor:
        return ParallelModel.whole_loss(self, loss)

    def witnesses(self) -> list[Witness]:
        if self._wire.startswith("fp8"):
            self._seen_by.append(MeanWitness(self._wire, self.group))
        return [*HeldModel.witnesses(self), *self._seen_by]

    def _sent(self, hook: Hook, bucket: GradBucket) -> Future[Tensor]:
        return self._seen_by[0].around(hook, bucket) if self._seen_by else hook(bucket)

    def _forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._phase = phase
        loss: Tensor = self._ddp(share(tokens, self.group), share(targets, self.group), phase)
        return loss

    def _hook(self, wire: str) -> Hook | None:
        """What sends a bucket; None for torch's own way."""
        if is_silent(self.group) and not wire.startswith("fp8"):
            return _unsent
        if wire == "bf16":
            return self._in_bf16
        return None if wire == "fp32" else lambda bucket: self._in_fp8(bucket, wire)

    def _in_bf16(self, bucket: GradBucket) -> Future[Tensor]:
        """torch's own hook for it asks for NCCL."""
        whole = bucket.buffer()
        with self._phase.cast:
            sent = (whole / self.group.size()).to(torch.bfloat16)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        done: Future[Tensor] = work.get_future().then(lambda _: whole.copy_(sent))
        return done

    def _in_fp8(self, bucket: GradBucket, wire: str) -> Future[Tensor]:
        """By codes of each rank's values, which are added up in float32: their scale leaves no room for sums."""
        whole, size = bucket.buffer(), self.group.size()
        with self._phase.cast:
            padded = torch.nn.functional.pad(whole, (0, -whole.numel() % size))
            program = mean_in_fp8(wire, padded, POST, self.group.rank(), size, AutoScale())
            mean = on_this_rank(program, None, self._phase.communication, self.group).values
            whole.copy_(mean[: whole.numel()])
        return _done(whole)


def _unsent(bucket: GradBucket) -> Future[Tensor]:
    return _done(bucket.buffer())


def _done(values: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future
