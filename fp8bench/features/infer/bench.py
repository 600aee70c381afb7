"""The worker's side of quality; run as a program, its process."""

from __future__ import annotations

from fp8bench.features.infer.values import Quality, QualityTask
from fp8bench.protocols.precision import float32_products
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.step_guards import apart
from fp8bench.worker.switches import unchanged


class InferBench(Bench):
    """Answers what arms do to a model's predictions."""

    def quality(self, task: QualityTask) -> Quality:
        from fp8bench.features.infer.quality import quality_of

        device = self._selected(task.facts)
        with unchanged(), apart(), float32_products("highest"):
            found = quality_of(task)
        device.empty_cache()
        return found


if __name__ == "__main__":
    main(InferBench)
