"""The suite norm_act as benchmarks for asv."""

from fp8bench import asv_bridge


class NormAct(asv_bridge.Suite):
    """The declared grid of the suite norm_act; see Grid in fp8bench/workloads/norm_act.py."""

    workload = "norm_act"
