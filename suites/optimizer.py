"""The suite optimizer as benchmarks for asv."""

from fp8bench import asv_bridge


class Optimizer(asv_bridge.Suite):
    """The declared grid of the suite optimizer; see Grid in fp8bench/workloads/optimizer.py."""

    workload = "optimizer"
