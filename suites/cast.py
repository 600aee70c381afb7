"""What asv follows of the suite cast."""

from typing import Any

from fp8bench import asv_bridge


class Cast(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/cast.py."""

    workload = "cast"

    def setup_cache(self) -> Any:
        return self.measure()

    setup_cache.timeout = 3600  # type: ignore[attr-defined]
