"""The suite vision as benchmarks for asv."""

from fp8bench import asv_bridge


class Vision(asv_bridge.Suite):
    """The declared grid of the suite vision; see Grid in fp8bench/workloads/vision.py."""

    workload = "vision"
