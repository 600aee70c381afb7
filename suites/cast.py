"""The suite cast as benchmarks for asv."""

from fp8bench import asv_bridge


class Cast(asv_bridge.Suite):
    """The declared grid of the suite cast; see Grid in fp8bench/workloads/cast.py."""

    workload = "cast"
