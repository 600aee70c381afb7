"""The suite transformer as benchmarks for asv."""

from fp8bench import asv_bridge


class Transformer(asv_bridge.Suite):
    """The declared grid of the suite transformer; see Grid in fp8bench/workloads/transformer.py."""

    workload = "transformer"
