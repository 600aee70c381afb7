"""What asv follows of the suite gemm."""

from fp8bench import asv_bridge


class Gemm(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/gemm.py."""

    workload = "gemm"
