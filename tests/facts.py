"""Devices as a plan knows them: one of each kind that makes a difference."""

from fp8bench.model import DeviceFacts


def gpu(
    name: str, capability: tuple[int, int] | None, index: int = 0, hip: str | None = None, arch: str = ""
) -> DeviceFacts:
    """A GPU of that name and class; NVIDIA's unless it has a version of HIP."""
    return DeviceFacts("cuda", index, name, 140 << 30, "2.13.0", capability, None if hip else "13.0", hip, arch)


CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")
V100 = gpu("V100", (7, 0))
A100 = gpu("A100", (8, 0))
H200 = gpu("H200", (9, 0))
B200 = gpu("B200", (10, 0))
MI300X = gpu("MI300X", (9, 4), hip="7.0", arch="gfx942")
MI350X = gpu("MI355X", (9, 5), hip="7.0", arch="gfx950:sramecc+:xnack-")
XPU = DeviceFacts("xpu", 0, "Data Center GPU Max 1550", 64 << 30, "2.13.0", scaled_products=True)
