"""The suite collective as benchmarks for asv."""

from fp8bench import asv_bridge


class Collective(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/collective.py."""

    workload = "collective"
