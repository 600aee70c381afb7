"""Ways of training in parallel in which rank 1 makes a mistake, by the size that the name says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.nn.parallel.cuts import AMAX_GROUPS
from fp8bench.nn.parallel.way import Job, Way
from fp8bench.numerics import fp8_reduce
from fp8bench.ways import ways

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.nn.parallel.ddp import DDPModel
    from fp8bench.nn.parallel.model import ParallelModel

WIRES = ("fp32", "bf16", "fp8_gather", "fp8_twoshot")


@ways.register("ddp_forgets")
class Forgets(Way):
    """Gradients are sent to nobody."""

    name = "ddp_forgets"
    summary = "nothing is added up"
    options: ClassVar = {"wire": WIRES}

    def model(self, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel.ddp import DDPModel, _unsent

        class Model(DDPModel):
            def _hook(self, wire: str) -> Any:
                return _unsent

        return Model(job)


class Heavier(Way):
    """What rank 1 sends is `times` as large as it is."""

    summary = "a scale is wrong"
    options: ClassVar = {"wire": WIRES}
    times: ClassVar[float]

    def model(self, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel.ddp import DDPModel

        times = self.times if job.group.rank() == 1 else 1.0

        class Model(DDPModel):
            def _hook(self, wire: str) -> Any:
                sent = super()._hook(wire)

                def hook(bucket: Any) -> Any:
                    bucket.buffer().mul_(times)
                    assert sent is not None
                    return sent(bucket)

                return hook

        return Model(job)


for number in (1.06, 1.2, 1.4, 1.6, 2.0):
    word = f"ddp_{number:g}"
    ways.register(word)(type(f"Heavier_{word}", (Heavier,), {"name": word, "times": number}))


class OtherScale(Way):
    """Of tensors that are cut rank 1 takes so many `times` the largest magnitude of all ranks, and casts by that; of
    four ranks each second one, in its pair."""

    summary = "a shard's scale is wrong"
    options: ClassVar = {"amax": AMAX_GROUPS}
    times: ClassVar[float]

    def model(self, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel import tensor_parallel
        from fp8bench.nn.parallel.exchanges import Group
        from fp8bench.nn.parallel.tensor_fsdp import TensorFSDP

        times, kind = self.times, TensorFSDP if job.group.size() == 4 else tensor_parallel.TensorCut

        class Wrong(Group):
            def largest(self, x: Tensor) -> Tensor:
                return super().largest(x) * (times if self.rank else 1)

        class Model(kind):  # type: ignore[misc, valid-type]
            def __init__(self, job: Job) -> None:
                tensor_parallel.Group, kept = Wrong, tensor_parallel.Group  # type: ignore[misc]
                try:
                    super().__init__(job)
                finally:
                    tensor_parallel.Group = kept  # type: ignore[misc]

        return Model(job)


for word, number in {"tp_twice": 0.5, "tp_half": 2.0, "tp_quarter": 0.25}.items():
    ways.register(word)(type(f"OtherScale_{word}", (OtherScale,), {"name": word, "times": number}))


@ways.register("tp_alone")
class NobodyAsked(OtherScale):
    """Scales of shares are each rank's own where they should be those of whole tensors."""

    name = "tp_alone"

    def model(self, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel.tensor_parallel import TensorCut

        model = TensorCut(job)
        for layer in model.module.modules():
            scales = getattr(getattr(layer, "arithmetic", None), "scales", {})
            for one in scales.values():
                one._largest = lambda x: x
        return model


@ways.register("tp_forgets")
class OneSumForgotten(Way):
    """Of one part of a block gradients are not added up."""

    name = "tp_forgets"
    summary = "one all-reduce is missing"
    options: ClassVar = {"amax": AMAX_GROUPS}

    def model(self, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel.tensor_parallel import TensorCut

        model = TensorCut(job)
        model.module.blocks[-1].mlp._forward_pre_hooks.clear()
        return model


class OtherWireScale(Way):
    """What rank 1 sends in FP8 is by twice the scale that its values ask for."""

    summary = "a scale on the wire is wrong"

    def model(self, job: Job) -> ParallelModel:
        model: Any = ways.get(self.name.removesuffix("_wire")).model(job)
        wire = model.fp8_wire
        own, result = fp8_reduce.largest_scale, wire._result

        def wrong(*given: Any) -> Any:
            fp8_reduce.largest_scale = lambda amax: own(amax) * 2
            try:
                return result(*given)
            finally:
                fp8_reduce.largest_scale = own

        if job.group.rank() == 1:
            wire._result = wrong
        found: ParallelModel = model
        return found


for word in ("sp", "zero"):
    members = {"name": f"{word}_wire", "options": ways.get(word).options}
    ways.register(f"{word}_wire")(type(f"OtherWireScale_{word}", (OtherWireScale,), members))


def ddp(name: str, body: Callable[[type[DDPModel]], type[DDPModel]]) -> None:
    """A way that is DDP's but for what `body` makes of its model."""

    def model(self: Way, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel.ddp import DDPModel

        return body(DDPModel)(job)

    members = {"name": name, "summary": "DDP with a mistake", "options": {"wire": WIRES}, "model": model}
    ways.register(name)(type(f"Way_{name}", (Way,), members))


def seen_twice(kind: type[DDPModel]) -> type[DDPModel]:
    """Rank 1 takes rank 0's share of a batch."""

    class Model(kind):  # type: ignore[misc, valid-type]
        def own_share(self, batch: Tensor) -> Tensor:
            return batch.chunk(2)[0]

    return Model


def undivided(kind: type[DDPModel]) -> type[DDPModel]:
    """Gradients are sums, not means."""

    class Model(kind):  # type: ignore[misc, valid-type]
        def gradients(self) -> list[Tensor]:
            return [one * self.group.size() for one in super().gradients()]

    return Model


def stale(kind: type[DDPModel]) -> type[DDPModel]:
    """Buckets are sent by the scale of the bucket before; the first by 1."""

    class Model(kind):  # type: ignore[misc, valid-type]
        _before: Tensor | None = None

        def _in_fp8(self, bucket: Any) -> Any:
            own, before = fp8_reduce.scaled, self._before

            def scaled(*given: Any) -> Any:
                _, self._before = yield from own(*given)
                used = self._before.new_ones(1) if before is None else before
                return given[0] * used, used

            fp8_reduce.scaled = scaled  # type: ignore[assignment]
            try:
                return super()._in_fp8(bucket)
            finally:
                fp8_reduce.scaled = own

    return Model


def forgets_layer(kind: type[DDPModel]) -> type[DDPModel]:
    """Of one layer every rank keeps its own gradient."""

    class Model(kind):  # type: ignore[misc, valid-type]
        def _hook(self, wire: str) -> Any:
            sent = super()._hook(wire)
            name = "blocks.1.mlp.down.weight"

            def hook(bucket: Any) -> Any:
                forgotten = dict(self.module.named_parameters())[name]
                pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
                kept = [(gradient, gradient.clone()) for one, gradient in pairs if one is forgotten]
                assert sent is not None
                done = sent(bucket)
                done.wait()
                for gradient, own in kept:
                    gradient.copy_(own)
                return done

            return hook

    return Model


for word, body in {
    "ddp_seen_twice": seen_twice, "ddp_undivided": undivided, "ddp_stale": stale, "ddp_forgets_layer": forgets_layer,
}.items():  # fmt: skip
    ddp(word, body)
