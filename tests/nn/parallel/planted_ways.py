"""Ways of training in parallel in which rank 1 makes a mistake, by the size that the name says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from fp8bench.nn.parallel.cuts import AMAX_GROUPS
from fp8bench.nn.parallel.way import Job, Way
from fp8bench.ways import ways

if TYPE_CHECKING:
    from torch import Tensor

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


@ways.register("hand_quarter")
class OtherScale(Way):
    """Rank 1 takes a quarter of its neighbours' largest magnitudes, and cuts off what is larger."""

    name = "hand_quarter"
    summary = "a shard's scale is wrong"
    options: ClassVar = {"amax": AMAX_GROUPS}

    def model(self, job: Job) -> ParallelModel:
        from fp8bench.nn.parallel import tensor_hand
        from fp8bench.nn.parallel.exchanges import Group

        class Wrong(Group):
            def largest(self, x: Tensor) -> Tensor:
                return super().largest(x) / (4 if self.rank else 1)

        class Model(tensor_hand.HandCut):
            def __init__(self, job: Job) -> None:
                tensor_hand.Group, kept = Wrong, tensor_hand.Group  # type: ignore[misc]
                try:
                    super().__init__(job)
                finally:
                    tensor_hand.Group = kept  # type: ignore[misc]

        return Model(job)
