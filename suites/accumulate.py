"""The suite accumulate as benchmarks for asv."""

from fp8bench import asv_bridge


class Accumulate(asv_bridge.Suite):
    """The declared grid of the suite accumulate; see Grid in fp8bench/workloads/accumulate.py."""

    workload = "accumulate"
