"""Which products Transformer Engine takes, by its own checks; product_rules has torch's. Nothing here knows torch.

Read off Transformer Engine 2.20: pytorch/quantization.py, utils.py and its quantisers' is_quantizable.
"""

from __future__ import annotations

from fp8bench.formats.device_classes import DeviceClass
from fp8bench.formats.grids import E5M2
from fp8bench.formats.scaled_products import Objection, Product, Scheme, Source, uneven

ADA = (8, 9)
HOPPER = (9, 0)
BLACKWELL = (10, 0)
BLACKWELL_FOR_THE_DESK = (12, 0)

# Its recipes. Of every FP8 tensor that is cast the rows come in 8s and the columns in 16s; MXFP8 and NVFP4 tensors are
# cast along both of their sides, in whole blocks.
MULTIPLES = {
    Scheme.TENSOR: (8, 8, 16),
    Scheme.BLOCK: (8, 8, 16),
    Scheme.MXFP8: (32, 32, 32),
    Scheme.NVFP4: (16, 16, 16),
}


def te_objections(product: Product, device: DeviceClass) -> tuple[Objection, ...] | None:
    """What Transformer Engine has against a product; None where it has no recipe for it, or is not for the device."""
    scheme = product.scheme
    if scheme not in MULTIPLES or not device.is_nvidia:
        return None
    refusal = _refusal(scheme, device)
    if not refusal and product.a.fmt is E5M2 and product.b.fmt is E5M2:
        refusal = "it has no recipe with E5M2 in every role"
    if refusal:
        return (Objection(Source.TE, refusal),)
    return tuple(uneven(product, Source.TE, MULTIPLES[scheme]))


def _refusal(scheme: Scheme, device: DeviceClass) -> str:
    """What it says to a device (check_mxfp8_support and its neighbours); '' where it refuses nothing."""
    if not device.at_least(ADA):
        return "its FP8 begins at compute capability 8.9"
    if scheme is Scheme.BLOCK and not device.at_least(HOPPER):
        return "its blocks of 128 begin at compute capability 9.0, with CUDA 12.9"
    if scheme is Scheme.MXFP8 and device.at_least(BLACKWELL_FOR_THE_DESK):
        return "it refuses MXFP8 from compute capability 12.0 on, where not every layout of a product is there"
    if scheme in (Scheme.MXFP8, Scheme.NVFP4) and not device.at_least(BLACKWELL):
        return f"its {scheme} begins at compute capability 10.0"
    return ""
