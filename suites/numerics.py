"""The suite numerics as benchmarks for asv."""

from fp8bench import asv_bridge


class Numerics(asv_bridge.Suite):
    """The declared grid of the suite numerics; see Grid in fp8bench/workloads/numerics.py."""

    workload = "numerics"
