"""The suite collective as benchmarks for asv."""

from fp8bench import asv_bridge


class Collective(asv_bridge.Suite):
    """The declared grid of the suite collective; see Grid in fp8bench/workloads/collective.py."""

    workload = "collective"
