"""The suite data as benchmarks for asv."""

from fp8bench import asv_bridge


class Data(asv_bridge.Suite):
    """The declared grid of the suite data; see Grid in fp8bench/workloads/data.py."""

    workload = "data"
