"""The suite conv as benchmarks for asv."""

from fp8bench import asv_bridge


class Conv(asv_bridge.Suite):
    """The declared grid of the suite conv; see Grid in fp8bench/workloads/conv.py."""

    workload = "conv"
