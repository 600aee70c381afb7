"""The worker's side of quality; run as a program, its process."""

from __future__ import annotations

from typing import Any

from fp8bench.features.infer.values import Quality, QualityTask
from fp8bench.model import DeviceFacts
from fp8bench.protocols.precision import float32_products
from fp8bench.user_code.named import named
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.step_guards import apart
from fp8bench.worker.switches import unchanged


class InferBench(Bench):
    """Answers what arms do to a model's predictions."""

    def shape(self, maker: str, facts: DeviceFacts, seed: int) -> tuple[Any, ...]:
        """The fields of the ServedShape of the model that a function makes. Raises UsageError for one that cannot be
        served."""
        from fp8bench.nn.serving import made, shape_of_own

        self._selected(facts)
        with unchanged(), apart(), float32_products("highest"):
            model, _ = made(named(maker), maker, seed, facts)
            return tuple(vars(shape_of_own(maker, model, seed, facts)).values())

    def quality(self, task: QualityTask) -> Quality:
        from fp8bench.features.infer.quality import quality_of

        device = self._selected(task.facts)
        with unchanged(), apart(), float32_products("highest"):
            quality = quality_of(task, None if task.model.config else named(task.model.name))
        device.empty_cache()
        return quality


if __name__ == "__main__":
    main(InferBench)
