"""Every rank has the whole model and its share of a batch: the mean of gradients is sent, or the updated weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fp8bench.nn.parallel.exchanges import FP8Wire, OwnedTensors, RankGroup, WireWitness, is_silent
from fp8bench.nn.parallel.model import ParallelModel, Witness
from fp8bench.nn.parallel.ways import Job
from fp8bench.protocols import Phases, SilentPhases

Hook = Callable[[GradBucket], Future[Tensor]]


class DDPModel(ParallelModel):
    """torch's DistributedDataParallel, with hooks of our own where gradients are sent in fewer bits."""

    def __init__(self, job: Job) -> None:
        whole = job.make()
        super().__init__(dict(whole.named_parameters()), job.loss_scale)
        self.module, self.group, self.sharers = whole, job.group, job.group
        self._phase: Phases = SilentPhases()
        devices = [job.facts.index] if job.facts.accelerated else None
        self._ddp = DistributedDataParallel(whole, devices, process_group=job.group, gradient_as_bucket_view=True)
        self._wire = job.options["wire"]
        self._fp8 = FP8Wire(job.group, self._wire)
        self._witness: WireWitness | None = None
        hook = self._hook(self._wire)
        if hook is not None:  # torch looks at the annotations of a hook, and here these are texts
            self._ddp.register_comm_hook(None, lambda state, bucket: self._sent(hook, bucket))

    def witnesses(self) -> list[Witness]:
        witnesses = super().witnesses()
        if self._wire.startswith("fp8"):
            self._witness = WireWitness(self.group)
            witnesses.append(self._witness)
        return witnesses

    def _sent(self, hook: Hook, bucket: GradBucket) -> Future[Tensor]:
        """Looked at from outside, so that what a hook does before and after its program is seen as well."""
        if self._witness is None:
            return hook(bucket)
        own, done = bucket.buffer().clone(), hook(bucket)
        self._witness.look(own, done.wait(), self._fp8.mean_of)
        return done

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._phase = phase
        loss: Tensor = self._ddp(tokens, targets, phase)
        return loss

    def _hook(self, wire: str) -> Hook | None:
        """What sends a bucket; None for torch's own way."""
        if is_silent(self.group) and not wire.startswith("fp8"):
            return _unsent
        if wire == "bf16":
            return self._in_bf16
        return None if wire == "fp32" else self._in_fp8

    def _in_bf16(self, bucket: GradBucket) -> Future[Tensor]:
        """torch's own hook for it asks for NCCL."""
        whole = bucket.buffer()
        with self._phase.cast:
            sent = (whole / self.group.size()).to(torch.bfloat16)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        done: Future[Tensor] = work.get_future().then(lambda _: whole.copy_(sent))
        return done

    def _in_fp8(self, bucket: GradBucket) -> Future[Tensor]:
        """By codes of each rank's values, which are added up in float32: their scale leaves no room for sums."""
        whole = bucket.buffer()
        return _done(whole.copy_(self._fp8.mean(whole, self._phase)))


def _unsent(bucket: GradBucket) -> Future[Tensor]:
    return _done(bucket.buffer())


def _done(values: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future


class ZeroModel(ParallelModel):
    """Each weight has one owner, who alone keeps its moments and updates it. Gradients go to their owners, and updated
    weights from them to all.

    In bf16 and FP8 an owner keeps the float32 weights that it updates beside the model, which all ranks, the owner too,
    compute with as it was sent. In FP8 each weight and each gradient is sent with a scale of its own.
    """

    def __init__(self, job: Job) -> None:
        self.module = job.make()
        super().__init__(dict(self.module.named_parameters()), job.loss_scale)
        self.group = self.sharers = job.group
        self._all_names, self._all_weights = self.names, self.weights
        self._exchanges, sizes = RankGroup(job.group), [weight.numel() for weight in self.weights]
        self._owned = OwnedTensors(self._exchanges, sizes, job.options["wire"])
        self.fp8_wire = self._owned.fp8
        self.names, self.weights = self._owned.own(self.names), self._owned.own(self.weights)
        if job.options["wire"] != "fp32":
            self.weights = [weight.clone() for weight in self.weights]
            self.updated(SilentPhases())

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss = super().loss(tokens, targets, phase)
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        means = iter(self._owned.means(gradients, phase))
        for parameter, owner in zip(self.parameters, self._owned.owners, strict=True):
            parameter.grad = next(means) if owner == self.group.rank() else None
        return loss

    def updated(self, phase: Phases) -> None:
        self._owned.put(self.weights, self._all_weights, phase)

    def full_weights(self) -> dict[str, Tensor]:
        newest = [weight.clone() for weight in self._owned.newest(self.weights, self._all_weights)]
        self._exchanges.from_owners(newest, self._owned.owners)
        return dict(zip(self._all_names, newest, strict=True))
