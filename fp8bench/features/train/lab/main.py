"""The worker process of a training: the worker's own, with a lab instead of a bench."""

from __future__ import annotations

from fp8bench.features.train.lab.lab import Lab
from fp8bench.worker.main import main

if __name__ == "__main__":
    main(Lab)
