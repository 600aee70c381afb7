"""What asv follows of the suite cast."""

from fp8bench import asv_bridge


class Cast(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/cast.py."""

    workload = "cast"
