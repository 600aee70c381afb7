"""The suite learning as benchmarks for asv."""

from fp8bench import asv_bridge


class Learning(asv_bridge.Suite):
    """The declared grid of the suite learning; see Grid in fp8bench/workloads/learning.py."""

    workload = "learning"
