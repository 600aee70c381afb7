"""Data parallelism, each rank with its share of a batch: DDP; ZeRO-1, whose weights have an owner each; and FSDP, where
each rank has equal rows of each weight and blocks gather whole ones when they need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear, region
from fp8bench.nn.parallel.division import Division, Witness
from fp8bench.nn.parallel.exchanges import FP8Wire, OwnedTensors, RankGroup, WireWitness, is_silent
from fp8bench.nn.parallel.ways import Job
from fp8bench.protocols import Phases, SilentPhases

Hook = Callable[[GradBucket], Future[Tensor]]


class DDPModel(Division):
    """torch's DistributedDataParallel, with hooks where gradients are sent in fewer bits."""

    def __init__(self, job: Job) -> None:
        model = job.make()
        super().__init__(dict(model.named_parameters()), job.loss_scale)
        self.module = model
        self.group = job.group
        self.sharers = job.group
        self._phase: Phases = SilentPhases()
        devices = [job.facts.index] if job.facts.accelerated else None
        self._ddp = DistributedDataParallel(model, devices, process_group=job.group, gradient_as_bucket_view=True)
        self._wire = job.options["wire"]
        self._fp8 = FP8Wire(job.group, self._wire)
        self._witness: WireWitness | None = None
        hook = self._hook(self._wire)
        if hook is not None:  # a lambda, because torch checks annotations, which are strings here
            self._ddp.register_comm_hook(None, lambda state, bucket: self._send(hook, bucket))

    def witnesses(self) -> list[Witness]:
        witnesses = super().witnesses()
        if self._wire.startswith("fp8"):
            self._witness = WireWitness(self.group)
            witnesses.append(self._witness)
        return witnesses

    def _send(self, hook: Hook, bucket: GradBucket) -> Future[Tensor]:
        if self._witness is None:
            return hook(bucket)
        gradients = bucket.buffer().clone()
        done = hook(bucket)
        self._witness.look(gradients, done.wait(), self._fp8.mean_of)
        return done

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._phase = phase
        return self._ddp(tokens, targets, phase)

    def _hook(self, wire: str) -> Hook | None:
        if is_silent(self.group) and not wire.startswith("fp8"):
            return lambda bucket: _done(bucket.buffer())
        if wire == "bf16":
            return self._in_bf16
        return None if wire == "fp32" else self._in_fp8

    def _in_bf16(self, bucket: GradBucket) -> Future[Tensor]:
        """torch's own hook for bf16 needs NCCL."""
        gradients = bucket.buffer()
        with self._phase.cast:
            sent = (gradients / self.group.size()).to(torch.bfloat16)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: gradients.copy_(sent))

    def _in_fp8(self, bucket: GradBucket) -> Future[Tensor]:
        """Sends codes of each rank's values and adds them up in float32: their scale leaves no room for sums."""
        gradients = bucket.buffer()
        return _done(gradients.copy_(self._fp8.send(self._fp8.mean_of, gradients, self._phase)))


def _done(values: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future


class ZeroModel(Division):
    """Each weight has one owner, which alone keeps its moments and updates it. Gradients go to the owners, and updated
    weights from there to all ranks.

    In bf16 and FP8 an owner also keeps float32 weights; all ranks, the owner included, compute with the weights in the
    precision of the wire. In FP8 each weight and each gradient has its own scale.
    """

    def __init__(self, job: Job) -> None:
        self.module = job.make()
        super().__init__(dict(self.module.named_parameters()), job.loss_scale)
        self.group = self.sharers = job.group
        self._all_names = self.names
        self._all_weights = self.weights
        self._exchanges = RankGroup(job.group)
        sizes = [weight.numel() for weight in self.weights]
        self._owned = OwnedTensors(self._exchanges, sizes, job.options["wire"])
        self.fp8_wire = self._owned.fp8
        self.names = self._owned.own(self.names)
        self.weights = self._owned.own(self.weights)
        # Full-precision weights need no copy: what is sent is the weight itself.
        if job.options["wire"] != "fp32":
            self.weights = [weight.clone() for weight in self.weights]
            self.send_updates(SilentPhases())

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss = super().loss(tokens, targets, phase)
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        means = iter(self._owned.means(gradients, phase))
        for parameter, owner in zip(self.parameters, self._owned.owners, strict=True):
            parameter.grad = next(means) if owner == self.group.rank() else None
        return loss

    def send_updates(self, phase: Phases) -> None:
        self._owned.put(self.weights, self._all_weights, phase)

    def full_weights(self) -> dict[str, Tensor]:
        newest = [weight.clone() for weight in self._owned.newest(self.weights, self._all_weights)]
        self._exchanges.from_owners(newest, self._owned.owners)
        return dict(zip(self._all_names, newest, strict=True))


_TORCHAO = "torchao_"


class FSDPModel(Division):
    """torch's fully_shard, a group for each block and one for the rest. Weights are gathered in the format `wire`,
    gradients reduced in float32."""

    module: GPT

    def __init__(self, job: Job) -> None:
        self.group = self.sharers = job.group
        self.module = job.make()
        wire = job.options["wire"]
        self._in_codes = wire == "torchao_fp8"
        if wire.startswith(_TORCHAO):
            take_torchao_layers(self.module, job.emulated, self._in_codes)
        shard(self.module, DeviceMesh.from_group(job.group, job.facts.kind), wire)
        super().__init__(dict(self.module.named_parameters()), job.loss_scale)
        # The plain tensors inside torchao's wrappers.
        self.weights = [getattr(weight, "_tensor", weight) for weight in self.weights]
        if self._in_codes:
            self._compute_scales()

    def send_updates(self, phase: Phases) -> None:
        if self._in_codes:
            with phase.communication:
                self._compute_scales()

    def full_weights(self) -> dict[str, Tensor]:
        group = RankGroup(self.group)
        parts = zip(self.names, self.weights, strict=True)
        return {name: torch.cat(group.all_of(part.contiguous())) for name, part in parts}

    def _compute_scales(self) -> None:
        """Finds the largest magnitudes of all weights that travel as codes, in one exchange after every update."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(self.module)


def take_torchao_layers(model: GPT, emulated: bool, in_codes: bool) -> None:
    """Replaces the linear layers of all blocks by torchao's float8 layers with the same weights, which FSDP gathers as
    codes if `in_codes`. Their casts are inside their products, where no phase can be opened."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    named = Float8LinearConfig.from_recipe_name("tensorwise")
    config = replace(named, emulate=emulated, enable_fsdp_float8_all_gather=in_codes)
    for path, layer in list(model.blocks.named_modules()):
        if isinstance(layer, Linear):
            outputs, inputs = layer.weight.shape
            # On meta it draws no random numbers.
            plain = nn.Linear(inputs, outputs, bias=False, device="meta")
            plain.weight = layer.weight
            layer8 = Float8Linear.from_float(plain, config)
            multiply = layer8.forward
            carrier = layer.arithmetic.carrier
            layer8.forward = lambda x, phase, by=multiply, to=carrier: region(phase.gemm, by, x.to(to))
            owner, _, name = path.rpartition(".")
            setattr(model.blocks.get_submodule(owner), name, layer8)


def shard(model: GPT, mesh: DeviceMesh, wire: str) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if wire == "bf16" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
