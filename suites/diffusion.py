"""The suite diffusion as benchmarks for asv."""

from fp8bench import asv_bridge


class Diffusion(asv_bridge.Suite):
    """The declared grid of the suite diffusion; see Grid in fp8bench/workloads/diffusion.py."""

    workload = "diffusion"
