"""The suite moe as benchmarks for asv."""

from fp8bench import asv_bridge


class Moe(asv_bridge.Suite):
    """The declared grid of the suite moe; see Grid in fp8bench/workloads/moe.py."""

    workload = "moe"
