"""Ways of parallel training in which rank 1 makes a mistake of the size in its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8bench.nn.parallel.ways import AMAX_GROUPS, WAYS, Job, Way

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.nn.parallel.data_parallel import DDPModel
    from fp8bench.nn.parallel.division import Division

WIRES, AMAX = {"wire": ("fp32", "bf16", "fp8_gather", "fp8_twoshot")}, {"amax": AMAX_GROUPS}


def plant(name: str, model: Callable[[Job], Division], options: Mapping[str, tuple[str, ...]]) -> None:
    WAYS[name] = Way(name, "a way with a mistake", lambda asked: "", model, options)


def ddp(name: str, body: Callable[[type[DDPModel]], type[DDPModel]]) -> None:

    def model(job: Job) -> Division:
        from fp8bench.nn.parallel.data_parallel import DDPModel

        return body(DDPModel)(job)

    plant(name, model, WIRES)


def forgets(kind: type[DDPModel]) -> type[DDPModel]:
    from fp8bench.nn.parallel.data_parallel import _make_done_future

    class Model(kind):  # type: ignore[misc, valid-type]
        def _choose_hook(self, wire: str) -> Any:
            return lambda bucket: _make_done_future(bucket.buffer())

    return Model


def heavier(times: float) -> Callable[[type[DDPModel]], type[DDPModel]]:

    def body(kind: type[DDPModel]) -> type[DDPModel]:
        class Model(kind):  # type: ignore[misc, valid-type]
            def _choose_hook(self, wire: str) -> Any:
                sent, own = super()._choose_hook(wire), times if self.group.rank() == 1 else 1.0

                def hook(bucket: Any) -> Any:
                    bucket.buffer().mul_(own)
                    assert sent is not None
                    return sent(bucket)

                return hook

        return Model

    return body


def one_sum_forgotten(job: Job) -> Division:
    from fp8bench.nn.parallel.tensor_parallel import TensorCut

    model = TensorCut(job)
    model.module.blocks[-1].mlp._forward_pre_hooks.clear()
    return model


def expert_mistake(kind: str) -> Callable[[Job], Division]:
    """Rank 1 returns rows in another order.

    Or gradients of the router, or of all that is not an expert's, are not averaged.
    """

    def model(job: Job) -> Division:
        from fp8bench.nn.parallel.exchanges import RankGroup
        from fp8bench.nn.parallel.expert_parallel import ExpertsByRanks, RankedExperts

        made = ExpertsByRanks(job)
        if kind == "alone":
            made._shared.sum_gradients = lambda gradients: None  # type: ignore[method-assign]
            return made

        class Turned(RankGroup):
            def exchange_rows(self, x: Tensor, sent: Any, received: Any) -> Tensor:
                got = super().exchange_rows(x, sent, received)
                return got.roll(1, 0) if self.rank == 1 else got

        turned = Turned(job.group)
        for block in made.module.blocks:
            assert isinstance(block.mlp, RankedExperts)
            block.mlp.group = turned
        return made

    return model


def seen_twice(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        def take_share(self, batch: Tensor) -> Tensor:
            return batch.chunk(2)[0]

    return Model


def undivided(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        def gradients(self) -> list[Tensor]:
            return [gradient * self.group.size() for gradient in super().gradients()]

    return Model


def forgets_layer(kind: type[DDPModel]) -> type[DDPModel]:

    class Model(kind):  # type: ignore[misc, valid-type]
        def _choose_hook(self, wire: str) -> Any:
            sent = super()._choose_hook(wire)
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
    "ddp_forgets_layer": forgets_layer,
    **{f"ddp_{times:g}": heavier(times) for times in (1.06, 1.2, 1.4, 2.0)},
}.items():
    ddp(word, body)
plant("tp_forgets", one_sum_forgotten, AMAX)
for word in ("turned", "alone"):
    WAYS[f"ep_{word}"] = replace(WAYS["ep"], name=f"ep_{word}", divide=expert_mistake(word))
