"""The suite attention: scaled dot-product attention, alone or as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import emulated, refused
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.attention import AttentionCore
    from fp8bench.nn.exercise import LayerExercise
    from fp8bench.nn.linear import ChooseArithmetic

LONGEST_SEQUENCE = 1 << 17
# This axis is quiet: cases with its default value do not name it, so they have the names and the history that they had
# before the suite had this axis.
_KERNEL_AXIS = Axis.choice(
    "kernel",
    "torch's kernel for the core; auto: torch chooses; only math writes scores to memory",
    "auto",
    *shared.BACKENDS,
    quiet=True,
)


@workloads.register("attention")
class Attention(LayerWorkload):
    """Times attention. With part=core it times what torch's attention kernels compute. With part=layer it includes the
    products before and after the core, which low precision speeds up.

    With scores=high the core runs in the carrier's precision. With scores=low the core's products and the attention
    scores are rounded to the case's precision. This is always emulated with separate products. So it shows the accuracy
    of low-precision scores, but not their speed. Scores are rounded without a scale, because a fused kernel computes
    them tile by tile, before their largest value is known.
    """

    name = "attention"
    summary = "scaled dot-product attention alone and as a layer, grouped queries, scores in high or low precision"
    layer_kinds = ("qkv", "out")
    batch_axis = "batch"
    history = Grid(
        cpu={"part": ("core", "layer"), "sequence": ("512",)},
        gpu={"part": ("core", "layer"), "sequence": ("4096",)},
        phases=("cast", "gemm", "attention", "elementwise"),
        errors=("output_error", "gradient_error"),
        per="tokens",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        sequences = ("1024", "4096", "16384") if facts.accelerated else ("128", "512")
        batch, heads, head_width = ("4", "16", "128") if facts.accelerated else ("1", "4", "64")
        return (
            # By default, all values of `each` are measured, but only the first value of `choice`.
            Axis.each("part", "core: attention alone; layer: with the products before and after it", "core", "layer"),
            Axis.count("sequence", "tokens in a sequence", *sequences, high=LONGEST_SEQUENCE),
            Axis.count("batch", "sequences", batch, high=4096),
            Axis.count("heads", "heads of queries", heads, high=1024),
            Axis.count(
                "key_heads", "heads of keys and values, a divisor of heads; auto: the same number", "auto", high=1024
            ),
            Axis.count("head_width", "features of a head", head_width, high=1024),
            Axis.choice("causal", "whether a token attends to earlier tokens only", "yes", "no"),
            shared.PASS,  # forward only, or training
            Axis.choice(
                "scores",
                "high: in the carrier's precision; low: emulated in the case's precision, rounded before "
                "the factor 1/sqrt(head_width); low-prescaled: rounded after that factor",
                "high",
                "low",
                "low-prescaled",
            ),
            Axis.count(
                "spread", "standard deviation of the inputs, which determines how large scores get", "1", high=1024
            ),
            _KERNEL_AXIS,
            VALUES,  # the distribution of the random inputs
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        heads = int(params["heads"])
        key_heads = params["key_heads"]
        if key_heads == "auto":
            key_heads = heads
        if heads % int(key_heads):
            raise UsageError(
                f"key_heads={key_heads} does not divide heads={heads}: each head of keys serves as many heads of "
                "queries. Choose a divisor."
            )
        return (tuple({**params, "key_heads": key_heads}.items()),)

    def work(self, params: Scalars) -> Work:
        rows, width, qkv_width = _read_sizes(params)
        is_training = shared.is_training(params)
        score_count = float(rows) * int(params["sequence"]) * int(params["heads"])
        # The forward pass has two products. Scores that a causal mask hides do not count.
        flops = 4.0 * score_count * int(params["head_width"]) * (0.5 if _is_causal(params) else 1.0)
        # Queries, keys, values and the output take at least two bytes for each value. In training, their gradients take
        # the same memory.
        least_memory_bytes = 2.0 * rows * (qkv_width + width) * (2 if is_training else 1)
        if params["part"] == "layer":
            weight_count = _count_layer_weights(width, qkv_width)
            flops += 2.0 * rows * weight_count
            least_memory_bytes += 4.0 * weight_count * (2 if is_training else 1) + 2.0 * rows * width
        if _has_low_precision_scores(params):
            # Scores exist in fp32 before and after rounding. In backward, softmax needs the probabilities and two
            # gradients.
            least_memory_bytes += (3 if is_training else 2) * 4.0 * score_count
        return Work(flops * (3 if is_training else 1), rows, least_memory=least_memory_bytes)

    def memory(self, params: Scalars, precision: Precision) -> float:
        """Estimates the peak bytes: queries, keys, values, inputs, outputs and their gradients, and the attention
        scores if a kernel writes them to memory.
        """
        rows, width, qkv_width = _read_sizes(params)
        is_training = shared.is_training(params)
        is_layer = params["part"] == "layer"
        input_features = qkv_width + width if is_layer else qkv_width
        features = (2 if is_training else 1) * input_features + (3 if is_training else 1) * width
        weight_count = _count_layer_weights(width, qkv_width) if is_layer else 0
        weight_bytes = 4.0 * weight_count * (2 if is_training else 1)
        score_bytes = 0.0
        if _has_low_precision_scores(params) or _KERNEL_AXIS.of(params) == "math":
            score_matrix_copies = (
                shared.SCORE_COPIES_KEPT_FOR_BACKWARD + shared.SCORE_COPIES_IN_BACKWARD
                if is_training
                else shared.FORWARD_SCORE_COPIES
            )
            score_bytes = score_matrix_copies * 4.0 * rows * int(params["sequence"]) * int(params["heads"])
        return shared.carrier_bytes(precision) * rows * features + weight_bytes + score_bytes

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        kernel = str(_KERNEL_AXIS.of(params))
        has_low_precision_scores = _has_low_precision_scores(params)
        if support.level is Level.REFUSED:
            return support
        # Refuse settings that exclude each other, before asking what the device supports.
        if kernel != "auto" and has_low_precision_scores:
            return refused(f"scores={params['scores']} runs explicit products and no kernel: choose kernel=auto")
        has_grouped_heads = params["heads"] != params["key_heads"]
        if missing_kernel_reason := shared.explain_missing_kernel(kernel, has_grouped_heads, precision, facts):
            return refused(missing_kernel_reason)
        # A core without low-precision scores runs in `carried_by`, the precision of values between products. Its time
        # would not describe the case's precision.
        if params["part"] == "core" and not has_low_precision_scores and precision.carried_by:
            return refused(
                f"{precision.name} leaves attention's scores to {precision.carried_by}: ask for --set scores=low to "
                "emulate them, or part=layer"
            )
        # The sizes of native products must be multiples of certain numbers. Emulated products accept all sizes.
        if params["part"] == "layer" and support.is_native:
            rows, width, qkv_width = _read_sizes(params)
            size_text = f"{rows} tokens, {width} features, {qkv_width} of queries, keys and values"
            support = shared.refuse_unfit_sizes(
                support, precision, rows, (width, qkv_width), shared.is_training(params), size_text
            )
            if support.level is Level.REFUSED:
                return support
        if has_low_precision_scores:
            return emulated("scores in low precision: explicit products of rounded values, no kernel")
        return support

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return () if params["part"] == "core" else super().layers(params)

    def exercise(self, setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype) -> LayerExercise:
        from fp8bench.nn import attention

        params = setup.params
        core: AttentionCore = attention.FusedCore(_is_causal(params), str(_KERNEL_AXIS.of(params)))
        if _has_low_precision_scores(params):
            core = attention.EmulatedAttentionCore(
                setup.arithmetic, params["scores"] == "low-prescaled", _is_causal(params)
            )
        return _build_attention_exercise(setup, choose, carrier, core)

    def error(self, setup: Setup) -> dict[str, float]:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.nn.attention import FusedCore, HeadwiseAttentionCore, StoredScores

        exact_arithmetic = PlainArithmetic(torch.float64)
        # Compute one head at a time, because the fp64 scores of all heads would not fit into memory.
        core = HeadwiseAttentionCore(FusedCore(_is_causal(setup.params)))
        exact = _build_attention_exercise(setup, lambda name: exact_arithmetic, exact_arithmetic.carrier, core)
        state = self.prepare(setup)
        errors = state.measure_errors(exact, setup.settles)
        # Run the exercise again, to find out whether its kernel stores the scores.
        with StoredScores() as stored_scores:
            state.outcome()
        return {**errors, "scores_bytes": float(stored_scores.largest_bytes)}


def _is_causal(params: Scalars) -> bool:
    return params["causal"] == "yes"


def _has_low_precision_scores(params: Scalars) -> bool:
    return params["scores"] != "high"


def _read_sizes(params: Scalars) -> tuple[int, int, int]:
    """Returns the number of tokens, the width of the output, and the total width of queries, keys and values."""
    heads, key_heads, head_width = read_integers(params, "heads", "key_heads", "head_width")
    return int(params["batch"]) * int(params["sequence"]), heads * head_width, (heads + 2 * key_heads) * head_width


def _count_layer_weights(width: int, qkv_width: int) -> int:
    """Returns the number of weights of the product before the core (qkv) and the product after it (out)."""
    return width * qkv_width + width * width


def _build_attention_exercise(
    setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype, core: AttentionCore
) -> LayerExercise:
    """Makes an exercise: the attention core with random queries, keys and values as inputs, or the attention layer
    with random tokens.
    """
    from fp8bench.nn.attention import BareAttention, SelfAttention
    from fp8bench.nn.exercise import make_exercise

    params = setup.params
    batch, sequence, heads = read_integers(params, "batch", "sequence", "heads")
    key_heads, head_width = read_integers(params, "key_heads", "head_width")
    width = heads * head_width
    is_attention_core = params["part"] == "core"
    # The core's inputs are queries, keys and values, already split into heads. The layer's inputs are tokens.
    shapes: list[tuple[int, ...]] = [(batch, sequence, width)]
    if is_attention_core:
        shapes = [(batch, number, sequence, head_width) for number in (heads, key_heads, key_heads)]

    def build() -> BareAttention | SelfAttention:
        return (
            BareAttention(core)
            if is_attention_core
            else SelfAttention(width, heads, key_heads, gain=1.0, choose=choose, core=core)
        )

    return make_exercise(setup, build, shapes, carrier, shared.is_training(params), float(params["spread"]))
