"""Every rank has the whole model and its share of a batch: the mean of gradients is sent, or the updated weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fp8bench.nn.parallel.exchanges import FP8Wire, WireWitness
from fp8bench.nn.parallel.model import ParallelModel, Witness, is_silent
from fp8bench.nn.parallel.ways import Job
from fp8bench.numerics.fp8_reduce import Pieces
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
        found = super().witnesses()
        if self._wire.startswith("fp8"):
            self._witness = WireWitness(self.group)
            found.append(self._witness)
        return found

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


T = TypeVar("T")


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
        sizes = [weight.numel() for weight in self.weights]
        self._owners = owners(sizes, self.group.size())
        self.names, self.weights = self._of(self.group.rank(), self.names), self._of(self.group.rank(), self.weights)
        self._most = max(sum(self._of(owner, sizes)) for owner in range(self.group.size()))
        owned = [self._of(owner, sizes) for owner in range(self.group.size())]
        filled = [[*some, *filter(None, [self._most - sum(some)])] for some in owned]
        self._pieces = [Pieces(some, max(map(len, filled))) for some in filled]
        self._sent_as = torch.bfloat16 if job.options["wire"] == "bf16" else torch.float32
        if job.options["wire"] != "fp32":
            self.fp8_wire = FP8Wire(self.group) if job.options["wire"] == "fp8" else None
            self.weights = [weight.clone() for weight in self.weights]
            self.updated(SilentPhases())

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss = super().loss(tokens, targets, phase)
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        own = self._of(self.group.rank(), gradients)
        if self.fp8_wire is None:
            with phase.cast:
                sent = [gradient.to(self._sent_as) for gradient in gradients]  # themselves in float32
            with phase.communication:
                pairs = zip(sent, self._owners, strict=True)
                _wait(dist.reduce(one, group=self.group, group_dst=owner, async_op=True) for one, owner in pairs)
            if self._sent_as != torch.float32:
                torch._foreach_copy_(own, self._of(self.group.rank(), sent))
            torch._foreach_div_(own, self.group.size())
        else:
            rows = [self._row(self._of(owner, gradients)) for owner in range(self.group.size())]
            _put(self.fp8_wire.own_tensors_of_mean(torch.stack(rows), self._pieces, phase), own)
        for parameter, owner in zip(self.parameters, self._owners, strict=True):
            if owner != self.group.rank():
                parameter.grad = None
        return loss

    def updated(self, phase: Phases) -> None:
        if self.fp8_wire is None:
            with phase.cast:
                sent = [weight.to(self._sent_as) for weight in self._newest().values()]
            with phase.communication:
                self._broadcast(sent)
            if self._sent_as != torch.float32:
                torch._foreach_copy_(self._all_weights, sent)
            return
        every = self.fp8_wire.joined_tensors(self._row(self.weights), self._pieces, phase)
        for owner, row in enumerate(every.view(self.group.size(), -1)):
            _put(row, self._of(owner, self._all_weights))

    def full_weights(self) -> dict[str, Tensor]:
        found = {name: weight.clone() for name, weight in self._newest().items()}
        self._broadcast(list(found.values()))
        return found

    def _newest(self) -> dict[str, Tensor]:
        """All weights, those of this rank as it updates them."""
        every = dict(zip(self._all_names, self._all_weights, strict=True))
        return every | dict(zip(self.names, self.weights, strict=True))

    def _of(self, owner: int, some: Sequence[T]) -> list[T]:
        """Of what there is for each weight that of an owner's."""
        return [one for one, place in zip(some, self._owners, strict=True) if place == owner]

    def _row(self, tensors: Sequence[Tensor]) -> Tensor:
        """What there is for an owner's weights, filled up to the numbers of whoever has most."""
        row = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(row, (0, self._most - row.numel()))

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        pairs = zip(tensors, self._owners, strict=True)
        _wait(dist.broadcast(one, group=self.group, group_src=owner, async_op=True) for one, owner in pairs)


def owners(elements: Sequence[int], ranks: int) -> list[int]:
    """For each tensor the rank that owns it: the largest first, each to whoever has least so far."""
    owned, found = [0] * ranks, [0] * len(elements)
    for place in sorted(range(len(elements)), key=lambda one: (-elements[one], one)):
        found[place] = owned.index(min(owned))
        owned[found[place]] += elements[place]
    return found


def _wait(begun: Iterable[dist.Work | None]) -> None:
    """For all of them, of which none waits for another to begin."""
    for work in list(begun):
        if work is not None:
            work.wait()


def _put(row: Tensor, tensors: Sequence[Tensor]) -> None:
    pieces = torch.split(row[: sum(tensor.numel() for tensor in tensors)], [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))
