"""What asv follows of the suite moe."""

from fp8bench import asv_bridge


class Moe(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/moe.py."""

    workload = "moe"
