"""Scaled dot-product attention, alone and as a layer, its scores in high precision or emulated in low."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import emulated, refused
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.attention import Core
    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose

LONGEST = 1 << 17
_KERNEL = Axis.choice(
    "kernel",
    "torch's for the core; auto: torch's own choice; math: writes the scores down, the others do not",
    "auto",
    *shared.BACKENDS,
    quiet=True,
)


@workloads.register("attention")
class Attention(LayerWorkload):
    """Attention: `core` is what torch's kernels do; `layer` adds the products around it, which low precision speeds up.

    With scores=high no precision below its carrier reaches the core. With scores=low its products and the matrix of
    scores are in the case's precision, emulated for every precision: nobody would run the explicit form as a kernel, so
    it shows the accuracy of low scores, but not their time. Scores are written without a scale, because a kernel makes
    them tile by tile before the largest is known.
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
            Axis.each("part", "core: attention alone; layer: with the products before and after it", "core", "layer"),
            Axis.count("sequence", "tokens in a sequence", *sequences, high=LONGEST),
            Axis.count("batch", "sequences", batch, high=4096),
            Axis.count("heads", "heads of queries", heads, high=1024),
            Axis.count("key_heads", "heads of keys and values, a divisor of heads; auto: as many", "auto", high=1024),
            Axis.count("head_width", "features of a head", head_width, high=1024),
            Axis.choice("causal", "whether a token sees earlier ones only", "yes", "no"),
            shared.PASS,
            Axis.choice(
                "scores",
                "high: the carrier's; low: emulated in the case's precision, scores rounded unscaled and "
                "then multiplied by 1/sqrt(head_width); low-prescaled: queries multiplied before",
                "high",
                "low",
                "low-prescaled",
            ),
            Axis.count("spread", "standard deviation of the values that come in: how large scores get", "1", high=1024),
            _KERNEL,
            VALUES,
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
        rows, width, inner = _sizes(params)
        training = shared.is_training(params)
        scores = float(rows) * int(params["sequence"]) * int(params["heads"])
        # Two products forward; elements hidden by a causal mask are not counted.
        flops = 4.0 * scores * int(params["head_width"]) * (0.5 if _causal(params) else 1.0)
        # Queries, keys, values and the output in two bytes, the least of any carrier; the same for gradients.
        least = 2.0 * rows * (inner + width) * (2 if training else 1)
        if params["part"] == "layer":
            weights = width * inner + width * width
            flops += 2.0 * rows * weights
            least += 4.0 * weights * (2 if training else 1) + 2.0 * rows * width
        if _low(params):
            # fp32 scores before and after rounding; in backward softmax has probabilities and two gradients.
            least += (3 if training else 2) * 4.0 * scores
        return Work(flops * (3 if training else 1), rows, least_memory=least)

    def memory(self, params: Scalars, precision: Precision) -> float:
        """Counts queries, keys, values, inputs, outputs and their gradients, and scores that are written down."""
        rows, width, inner = _sizes(params)
        training = shared.is_training(params)
        layer = params["part"] == "layer"
        features = (2 if training else 1) * (inner + width * layer) + (3 if training else 1) * width
        weights = 4.0 * (width * inner + width * width) * (2 if training else 1) * layer
        written = (
            (shared.SCORES_KEPT + shared.SCORES_BESIDE if training else shared.SCORES_FORWARD)
            * 4.0
            * rows
            * int(params["sequence"])
        )
        scores = written * int(params["heads"]) if _low(params) or _KERNEL.of(params) == "math" else 0.0
        return shared.carrier_bytes(precision) * rows * features + weights + scores

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        kernel = str(_KERNEL.of(params))
        if support.level is Level.REFUSED:
            return support
        # Settings that exclude each other are refused before asking the device.
        if kernel != "auto" and _low(params):
            return refused(f"scores={params['scores']} runs explicit products and no kernel: choose kernel=auto")
        if missing := shared.missing_kernel(kernel, params["heads"] != params["key_heads"], precision, facts):
            return refused(missing)
        # No product of the core would be in this precision, so its case would be meaningless.
        if params["part"] == "core" and not _low(params) and precision.carried_by:
            return refused(
                f"{precision.name} leaves attention's scores to {precision.carried_by}: ask for --set scores=low to "
                "emulate them, or part=layer"
            )
        # Native products require multiples of sizes; emulated ones do not.
        if params["part"] == "layer" and support.is_native:
            rows, width, inner = _sizes(params)
            shown = f"{rows} tokens, {width} features, {inner} of queries, keys and values"
            support = shared.require_fit(support, precision, rows, (width, inner), shared.is_training(params), shown)
            if support.level is Level.REFUSED:
                return support
        if _low(params):
            return emulated("scores in low precision: explicit products of rounded values, no kernel")
        return support

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return () if params["part"] == "core" else super().layers(params)

    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        from fp8bench.nn import attention

        params = setup.params
        core: Core = attention.FusedCore(_causal(params), str(_KERNEL.of(params)))
        if _low(params):
            core = attention.EmulatedCore(setup.arithmetic, params["scores"] == "low-prescaled", _causal(params))
        return _exercise(setup, choose, carrier, core)

    def error(self, setup: Setup) -> dict[str, float]:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.nn.attention import FusedCore, HeadwiseCore, WrittenScores

        exact = PlainArithmetic(torch.float64)
        core = HeadwiseCore(FusedCore(_causal(setup.params)))
        state = self.prepare(setup)
        errors = state.errors(_exercise(setup, lambda name: exact, exact.carrier, core), setup.settles)
        with WrittenScores() as written:
            state.outcome()
        return {**errors, "scores_bytes": float(written.most)}


def _causal(params: Scalars) -> bool:
    return params["causal"] == "yes"


def _low(params: Scalars) -> bool:
    return params["scores"] != "high"


def _sizes(params: Scalars) -> tuple[int, int, int]:
    """Returns tokens, width of the output, and width of queries, keys and values together."""
    heads, key_heads, head_width = (int(params[name]) for name in ("heads", "key_heads", "head_width"))
    return int(params["batch"]) * int(params["sequence"]), heads * head_width, (heads + 2 * key_heads) * head_width


def _exercise(setup: Setup, choose: Choose, carrier: torch.dtype, core: Core) -> Exercise:
    """Builds the core on random heads, or the layer on random tokens."""
    from fp8bench.nn.attention import BareAttention, SelfAttention
    from fp8bench.nn.exercise import exercise

    params = setup.params
    batch, sequence, heads, key_heads, head_width = (
        int(params[name]) for name in ("batch", "sequence", "heads", "key_heads", "head_width")
    )
    width = heads * head_width
    # The core takes queries, keys and values already split into heads; the layer takes tokens.
    if params["part"] == "core":
        shapes: list[tuple[int, ...]] = [
            (batch, number, sequence, head_width) for number in (heads, key_heads, key_heads)
        ]
    else:
        shapes = [(batch, sequence, width)]

    def build() -> BareAttention | SelfAttention:
        if params["part"] == "core":
            return BareAttention(core)
        return SelfAttention(width, heads, key_heads, 1.0, choose, core)

    return exercise(setup, build, shapes, carrier, shared.is_training(params), float(params["spread"]))
