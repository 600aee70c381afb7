"""What asv follows of the suite mlp."""

from fp8bench import asv_bridge


class Mlp(asv_bridge.Suite):
    """Its declared grid; see Grid in fp8bench/workloads/mlp.py."""

    workload = "mlp"
