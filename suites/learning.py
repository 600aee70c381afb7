"""The suite learning as benchmarks for asv."""

from fp8bench import asv_bridge


class Learning(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/learning.py."""

    workload = "learning"
