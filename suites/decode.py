"""The suite decode as benchmarks for asv."""

from fp8bench import asv_bridge


class Decode(asv_bridge.Suite):
    """The declared grid of the suite decode; see Grid in fp8bench/workloads/decode.py."""

    workload = "decode"
