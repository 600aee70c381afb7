"""What asv follows of the suite learning."""

from fp8bench import asv_bridge


class Learning(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/learning.py."""

    workload = "learning"
