"""The suite attention as benchmarks for asv."""

from fp8bench import asv_bridge


class Attention(asv_bridge.Suite):
    """The declared grid of the suite attention; see Grid in fp8bench/workloads/attention.py."""

    workload = "attention"
