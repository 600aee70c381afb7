"""The worker process of an audit."""

from __future__ import annotations

from fp8bench.features.audit.bench import AuditBench
from fp8bench.worker.main import main

if __name__ == "__main__":
    main(AuditBench)
