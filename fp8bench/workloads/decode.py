"""The suite decode: one decoding step of a language model with a KV cache, at a fixed context length."""

from __future__ import annotations

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Level, Scalars, Support
from fp8bench.nn import served
from fp8bench.nn.served_workloads import ServedWorkload
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.protocols import Grid, Precision, Setup
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads
from fp8bench.user_code.named import named

_STATIC_AXIS = Axis.choice(
    "static",
    "yes: new keys and values are written into a preallocated cache; no: the cache is copied to append "
    "them, as where a cache grows",
    "yes",
    "no",
    quiet=True,
)


@workloads.register("decode")
class Decode(ServedWorkload):
    """Times decoding. The KV cache is filled before timing, from the seed, with values like those of a trained model.

    All steps are equal: the new token is at the last position of the context and attends to all of it. The input is
    token ids, and a step has no sampler, tokeniser or server. So the time of a step is the time per output token (TPOT)
    at this context length, and batch / time is output tokens/s. The embedding, norms and head stay in the carrier
    unless a precision map changes them.
    """

    name = "decode"
    version = "2"  # since version 2 of this suite, the head shares the embedding's weights
    summary = "one token a sequence through a GPT with a static cache of keys and values, at a fixed context"
    default_sizes = (("nano", "512"), ("llama-1b", "8192"))
    context_description = "positions to which the new token attends, including its own"
    new_token_count = 1
    find_make_function = staticmethod(named)
    history = Grid(
        cpu={"size": ("nano",), "context": ("512",)},
        gpu={"size": ("llama-1b",), "context": ("8192",)},
        phases=("cast", "gemm", "attention", "elementwise"),
        errors=("logits_error",),
        per="tokens",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (*super().axes(facts), _STATIC_AXIS)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = super().support(params, precision, facts)
        is_built_in = (
            str(params["size"]) in SERVED_SIZES
            and params["kv"] == served.OWN
            and precision.name != served.SERVED_PRECISION
        )
        if _STATIC_AXIS.of(params) == "no" and not is_built_in and support.level is not Level.REFUSED:
            return refused("static=no works only with kv=own and a size of fp8bench's own: choose these")
        return support

    def precision(self, setup: Setup) -> Precision:
        return precisions.get(setup.case.precision)
