"""Data parallelism, in which each rank trains on its share of a batch: DDP, ZeRO-1 and FSDP.

In DDP each rank has the whole model. In ZeRO-1 each weight has one rank that owns it. In FSDP each rank holds an equal
share of the rows of each weight, and a block gathers its whole weights when it needs them.
"""

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
from fp8bench.nn.parallel.division import RankModelPart, ScaleOrWireWitness
from fp8bench.nn.parallel.exchanges import FP8ExchangeWitness, FP8Wire, RankGroup, RankOwnedTensors, is_silent
from fp8bench.nn.parallel.ways import ModelPartSetup
from fp8bench.protocols import Phases, SilentPhases

Hook = Callable[[GradBucket], Future[Tensor]]


class DDPModel(RankModelPart):
    """torch's DistributedDataParallel. If gradients are sent in fewer than 32 bits, a hook converts them."""

    def __init__(self, job: ModelPartSetup) -> None:
        model = job.make()
        super().__init__(dict(model.named_parameters()), job.loss_scale)
        self.module = model
        self.group = job.group
        self.batch_group = job.group
        self._phase: Phases = SilentPhases()
        # DistributedDataParallel takes no device list for a model on a CPU.
        devices = [job.facts.index] if job.facts.accelerated else None
        self._ddp = DistributedDataParallel(model, devices, process_group=job.group, gradient_as_bucket_view=True)
        self._wire = job.options["wire"]
        self._fp8 = FP8Wire(job.group, self._wire)
        self._witness: FP8ExchangeWitness | None = None
        communication_hook = self._choose_communication_hook(self._wire)
        # torch checks the annotations of a hook, which are strings in this module, so pass a lambda
        if communication_hook is not None:
            self._ddp.register_comm_hook(None, lambda state, bucket: self._send_bucket(communication_hook, bucket))

    def witnesses(self) -> list[ScaleOrWireWitness]:
        witnesses = super().witnesses()
        if self._wire.startswith("fp8"):
            self._witness = FP8ExchangeWitness(self.group)
            witnesses.append(self._witness)
        return witnesses

    def _send_bucket(self, hook: Hook, bucket: GradBucket) -> Future[Tensor]:
        if self._witness is None:
            return hook(bucket)
        # Copy the gradients first, because the hook overwrites the bucket.
        gradients = bucket.buffer().clone()
        future = hook(bucket)
        self._witness.verify_exchange_result(gradients, future.wait(), self._fp8.average_over_ranks)
        return future

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._phase = phase
        return self._ddp(tokens, targets, phase)

    def _choose_communication_hook(self, wire: str) -> Hook | None:
        # A silent group has nothing to reduce. Only FP8 keeps its hook.
        if is_silent(self.group) and not wire.startswith("fp8"):
            return lambda bucket: _make_done_future(bucket.buffer())
        if wire == "bf16":
            return self._reduce_in_bf16
        return None if wire == "fp32" else self._reduce_in_fp8

    def _reduce_in_bf16(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduces a bucket in bf16. torch's hook for bf16 would need NCCL."""
        gradients = bucket.buffer()
        with self._phase.cast:
            bf16_gradients = (gradients / self.group.size()).to(torch.bfloat16)
        all_reduce_work = dist.all_reduce(bf16_gradients, group=self.group, async_op=True)
        assert all_reduce_work is not None
        return all_reduce_work.get_future().then(lambda _: gradients.copy_(bf16_gradients))

    def _reduce_in_fp8(self, bucket: GradBucket) -> Future[Tensor]:
        """Sends each rank's values as FP8 codes and sums them in float32, because sums would exceed the range of the
        codes.
        """
        gradients = bucket.buffer()
        return _make_done_future(gradients.copy_(self._fp8.send(self._fp8.average_over_ranks, gradients, self._phase)))


def _make_done_future(values: Tensor) -> Future[Tensor]:
    # torch requires a future from a hook, even if the values are already there.
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future


class ZeroModel(RankModelPart):
    """ZeRO-1: each weight has one rank that owns it, keeps its moments and updates it. Gradients are sent to the
    owners. Updated weights are sent from the owners to all ranks.

    If weights are sent in bf16 or FP8, the owner also keeps them in float32. All ranks, the owner too, compute with
    the weights in the format in which they were sent. In FP8 each weight and each gradient has its own scale.
    """

    def __init__(self, job: ModelPartSetup) -> None:
        self.module = job.make()
        super().__init__(dict(self.module.named_parameters()), job.loss_scale)
        self.group = self.batch_group = job.group
        self._all_names = self.names
        self._all_weights = self.weights
        self._exchanges = RankGroup(job.group)
        sizes = [weight.numel() for weight in self.weights]
        self._owned = RankOwnedTensors(self._exchanges, sizes, job.options["wire"])
        self.fp8_wire = self._owned.fp8
        self.names = self._owned.select_items_of_own_rank(self.names)
        self.weights = self._owned.select_items_of_own_rank(self.weights)
        # In float32 the weight itself is sent, so no copy is needed.
        if job.options["wire"] != "fp32":
            self.weights = [weight.clone() for weight in self.weights]
            self.send_updates(SilentPhases())

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss = super().loss(tokens, targets, phase)
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        mean_gradients = iter(self._owned.average_gradients(gradients, phase))
        for parameter, owner_rank in zip(self.parameters, self._owned.owners, strict=True):
            # This rank updates only the weights that it owns.
            parameter.grad = next(mean_gradients) if owner_rank == self.group.rank() else None
        return loss

    def send_updates(self, phase: Phases) -> None:
        self._owned.send_updated_tensors(self.weights, self._all_weights, phase)

    def gather_weights(self) -> dict[str, Tensor]:
        newest_weights = [weight.clone() for weight in self._owned.list_newest_tensors(self.weights, self._all_weights)]
        self._exchanges.broadcast_from_owners(newest_weights, self._owned.owners)
        return dict(zip(self._all_names, newest_weights, strict=True))


_TORCHAO_PREFIX = "torchao_"


class FSDPModel(RankModelPart):
    """torch's fully_shard, with one group of weights for each block and one group for all other weights. Weights are
    gathered in the format `wire`, and gradients are reduced in float32.
    """

    module: GPT

    def __init__(self, job: ModelPartSetup) -> None:
        self.group = self.batch_group = job.group
        self.module = job.make()
        wire_format = job.options["wire"]
        self._gathers_codes = wire_format == "torchao_fp8"
        if wire_format.startswith(_TORCHAO_PREFIX):
            use_torchao_layers(self.module, job.emulated, self._gathers_codes)
        shard_model(self.module, DeviceMesh.from_group(job.group, job.facts.kind), wire_format)
        super().__init__(dict(self.module.named_parameters()), job.loss_scale)
        # torchao wraps its weights. Use the plain tensors inside.
        self.weights = [getattr(weight, "_tensor", weight) for weight in self.weights]
        if self._gathers_codes:
            self._compute_scales()

    def send_updates(self, phase: Phases) -> None:
        if self._gathers_codes:
            with phase.communication:
                self._compute_scales()

    def gather_weights(self) -> dict[str, Tensor]:
        group = RankGroup(self.group)
        name_shard_pairs = zip(self.names, self.weights, strict=True)
        return {name: torch.cat(group.gather_from_ranks(part.contiguous())) for name, part in name_shard_pairs}

    def _compute_scales(self) -> None:
        """Finds the largest magnitudes of all weights that are sent as codes, after an update. One exchange does it
        for all of them.
        """
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(self.module)


def use_torchao_layers(model: GPT, emulated: bool, in_codes: bool) -> None:
    """Replaces the linear layers of all blocks by torchao's float8 layers with the same weights. With `in_codes` FSDP
    gathers these weights as codes. torchao casts inside its products, so their casts cannot be timed separately.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    recipe_config = Float8LinearConfig.from_recipe_name("tensorwise")
    config = replace(recipe_config, emulate=emulated, enable_fsdp_float8_all_gather=in_codes)
    # Iterate over a list, because the loop replaces modules.
    for path, layer in list(model.blocks.named_modules()):
        if isinstance(layer, Linear):
            outputs, inputs = layer.weight.shape
            # On the meta device a layer draws no random numbers.
            unconverted_layer = nn.Linear(inputs, outputs, bias=False, device="meta")
            unconverted_layer.weight = layer.weight
            float8_layer = Float8Linear.from_float(unconverted_layer, config)
            multiply = float8_layer.forward
            carrier = layer.arithmetic.carrier
            # Default arguments hold the values of this iteration of the loop.
            float8_layer.forward = lambda x, phase, multiply=multiply, carrier=carrier: region(
                phase.gemm, multiply, x.to(carrier)
            )
            parent_path, _, name = path.rpartition(".")
            setattr(model.blocks.get_submodule(parent_path), name, float8_layer)


def shard_model(model: GPT, mesh: DeviceMesh, wire: str) -> None:
    precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if wire == "bf16" else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # Shard the blocks first. The last call then groups only the remaining weights.
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision_policy)
    fully_shard(model, mesh=mesh, mp_policy=precision_policy)
