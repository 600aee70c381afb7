"""The suite prefill as benchmarks for asv."""

from fp8bench import asv_bridge


class Prefill(asv_bridge.Suite):
    """The declared grid of the suite prefill; see Grid in fp8bench/workloads/prefill.py."""

    workload = "prefill"
