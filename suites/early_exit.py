"""The suite early_exit as benchmarks for asv."""

from fp8bench import asv_bridge


class EarlyExit(asv_bridge.Suite):
    """The declared grid of the suite early_exit; see Grid in fp8bench/workloads/early_exit.py."""

    workload = "early_exit"
