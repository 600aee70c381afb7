"""Ways of parallel training in which rank 1 makes a mistake of the size in its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8bench.nn.parallel.ways import AMAX_GROUPS, WAYS, ModelPartSetup, ParallelMethod
from fp8bench.numerics import collectives

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.nn.parallel.data_parallel import DDPModel
    from fp8bench.nn.parallel.division import RankModelPart

WIRES, AMAX = {"wire": ("fp32", "bf16", "fp8_gather", "fp8_twoshot")}, {"amax": AMAX_GROUPS}


def plant(name: str, model: Callable[[ModelPartSetup], RankModelPart], options: Mapping[str, tuple[str, ...]]) -> None:
    WAYS[name] = ParallelMethod(name, "a way with a mistake", lambda asked: "", model, options)


def ddp(name: str, body: Callable[[type[DDPModel]], type[DDPModel]]) -> None:

    def model(job: ModelPartSetup) -> RankModelPart:
        from fp8bench.nn.parallel.data_parallel import DDPModel

        return body(DDPModel)(job)

    plant(name, model, WIRES)


def forgets(kind: type[DDPModel]) -> type[DDPModel]:
    from fp8bench.nn.parallel.data_parallel import _make_done_future

    class Model(kind):  # type: ignore[misc, valid-type]
        def _choose_communication_hook(self, wire: str) -> Any:
            return lambda bucket: _make_done_future(bucket.buffer())

    return Model


def heavier(times: float) -> Callable[[type[DDPModel]], type[DDPModel]]:

    def body(kind: type[DDPModel]) -> type[DDPModel]:
        class Model(kind):  # type: ignore[misc, valid-type]
            def _choose_communication_hook(self, wire: str) -> Any:
                sent, own = super()._choose_communication_hook(wire), times if self.group.rank() == 1 else 1.0

                def hook(bucket: Any) -> Any:
                    bucket.buffer().mul_(own)
                    assert sent is not None
                    return sent(bucket)

                return hook

        return Model

    return body


def other_scale(times: float) -> Callable[[ModelPartSetup], RankModelPart]:
    """For split tensors rank 1 uses `times` the common largest magnitude and casts by it.

    Of four ranks the second of each pair does.
    """

    def model(job: ModelPartSetup) -> RankModelPart:
        from fp8bench.nn.parallel import tensor_parallel
        from fp8bench.nn.parallel.exchanges import RankGroup
        from fp8bench.nn.parallel.tensor_parallel import TensorFSDP

        class Wrong(RankGroup):
            def max_over_ranks(self, x: Tensor) -> Tensor:
                return super().max_over_ranks(x) * (times if self.rank else 1)

        tensor_parallel.RankGroup, kept = Wrong, tensor_parallel.RankGroup  # type: ignore[misc]
        try:
            return (TensorFSDP if job.group.size() == 4 else tensor_parallel.TensorCut)(job)
        finally:
            tensor_parallel.RankGroup = kept  # type: ignore[misc]

    return model


def nobody_asked(job: ModelPartSetup) -> RankModelPart:
    from fp8bench.nn.parallel.tensor_parallel import TensorCut

    model = TensorCut(job)
    for layer in model.module.modules():
        scales = getattr(getattr(layer, "arithmetic", None), "scales", {})
        for item in scales.values():
            item._max_over_ranks = lambda x: x
    return model


def one_sum_forgotten(job: ModelPartSetup) -> RankModelPart:
    from fp8bench.nn.parallel.tensor_parallel import TensorCut

    model = TensorCut(job)
    model.module.blocks[-1].mlp._forward_pre_hooks.clear()
    return model


def other_wire_scale(way: ParallelMethod) -> Callable[[ModelPartSetup], RankModelPart]:

    def model(job: ModelPartSetup) -> RankModelPart:
        made: Any = way.make_division(job)
        wire = made.fp8_wire
        own, result = collectives.compute_largest_scale, wire._run_program

        def wrong(*given: Any) -> Any:
            collectives.compute_largest_scale = lambda amax: own(amax) * 2
            try:
                return result(*given)
            finally:
                collectives.compute_largest_scale = own

        if job.group.rank() == 1:
            wire._run_program = wrong
        found: RankModelPart = made
        return found

    return model


def expert_mistake(kind: str) -> Callable[[ModelPartSetup], RankModelPart]:
    """Rank 1 returns rows in another order.

    Or gradients of the router, or of all that is not an expert's, are not averaged.
    """

    def model(job: ModelPartSetup) -> RankModelPart:
        from fp8bench.nn.parallel.exchanges import RankGroup
        from fp8bench.nn.parallel.expert_parallel import ExpertsByRanks, RankLocalExperts

        made = ExpertsByRanks(job)
        if kind == "alone":
            made._rank_group.sum_gradients = lambda gradients: None  # type: ignore[method-assign]
            return made

        class Turned(RankGroup):
            def exchange_rows(self, x: Tensor, sent: Any, received: Any) -> Tensor:
                got = super().exchange_rows(x, sent, received)
                return got.roll(1, 0) if self.rank == 1 else got

        turned = Turned(job.group)
        for block in made.module.blocks:
            assert isinstance(block.mlp, RankLocalExperts)
            block.mlp.group = turned
        return made

    return model


def seen_twice(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        def take_batch_share(self, batch: Tensor) -> Tensor:
            return batch.chunk(2)[0]

    return Model


def undivided(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        def gradients(self) -> list[Tensor]:
            return [gradient * self.group.size() for gradient in super().gradients()]

    return Model


def stale(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        _before: Tensor | None = None

        def _reduce_in_fp8(self, bucket: Any) -> Any:
            own, before = collectives.scale_for_cast, self._before

            def scaled(*given: Any) -> Any:
                _, self._before = yield from own(*given)
                used = self._before.new_ones(1) if before is None else before
                return given[0] * used, used

            collectives.scale_for_cast = scaled  # type: ignore[assignment]
            try:
                return super()._reduce_in_fp8(bucket)
            finally:
                collectives.scale_for_cast = own

    return Model


def forgets_layer(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        def _choose_communication_hook(self, wire: str) -> Any:
            sent = super()._choose_communication_hook(wire)
            name = "blocks.1.mlp.down.weight"

            def hook(bucket: Any) -> Any:
                forgotten = dict(self.module.named_parameters())[name]
                pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
                stored = [(gradient, gradient.clone()) for item, gradient in pairs if item is forgotten]
                assert sent is not None
                done = sent(bucket)
                done.wait()
                for gradient, own in stored:
                    gradient.copy_(own)
                return done

            return hook

    return Model


for word, body in {
    "ddp_forgets": forgets,
    "ddp_seen_twice": seen_twice,
    "ddp_undivided": undivided,
    "ddp_stale": stale,
    "ddp_forgets_layer": forgets_layer,
    **{f"ddp_{times:g}": heavier(times) for times in (1.06, 1.2, 1.4, 1.6, 2.0)},
}.items():
    ddp(word, body)
for word, made in {
    "tp_twice": other_scale(0.5),
    "tp_half": other_scale(2.0),
    "tp_quarter": other_scale(0.25),
    "tp_alone": nobody_asked,
    "tp_forgets": one_sum_forgotten,
}.items():
    plant(word, made, AMAX)
for word in ("turned", "alone"):
    WAYS[f"ep_{word}"] = replace(WAYS["ep"], name=f"ep_{word}", make_division=expert_mistake(word))
for word in ("sp", "zero"):
    plant(f"{word}_wire", other_wire_scale(WAYS[word]), WAYS[word].options)
