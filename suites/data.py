"""What asv follows of the suite data."""

from typing import Any

from fp8bench import asv_bridge


class Data(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/data.py."""

    workload = "data"

    def setup_cache(self) -> Any:
        return self.measure()

    setup_cache.timeout = 3600  # type: ignore[attr-defined]
