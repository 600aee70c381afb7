"""The suite attention as benchmarks for asv."""

from fp8bench import asv_bridge


class Attention(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/attention.py."""

    workload = "attention"
