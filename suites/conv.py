"""The suite conv as benchmarks for asv."""

from fp8bench import asv_bridge


class Conv(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/conv.py."""

    workload = "conv"
