"""The suite gemm as benchmarks for asv."""

from fp8bench import asv_bridge


class Gemm(asv_bridge.Suite):
    """The declared grid of the suite gemm; see Grid in fp8bench/workloads/gemm.py."""

    workload = "gemm"
