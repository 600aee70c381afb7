"""The suite mlp as benchmarks for asv."""

from fp8bench import asv_bridge


class Mlp(asv_bridge.Suite):
    """The declared grid of the suite mlp; see Grid in fp8bench/workloads/mlp.py."""

    workload = "mlp"
