"""What asv follows of the suite conv."""

from typing import Any

from fp8bench import asv_bridge


class Conv(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/conv.py."""

    workload = "conv"

    def setup_cache(self) -> Any:
        return self.measure()

    setup_cache.timeout = 3600  # type: ignore[attr-defined]
