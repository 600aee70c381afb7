"""The suite moe: a mixture of experts, in which each token uses a few experts. A step runs the router, sends rows to
their experts (dispatch), runs the experts' products, and sends rows back (combine).
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats import hardware
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.nn.shared_workloads import is_training, refuse_unfit_sizes
from fp8bench.nn.sizes import MoeSizes, make_surrounding_layers
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, one_of, read_integers
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import LayerExercise
    from fp8bench.nn.linear import ChooseArithmetic

_ROW_FORMATS = ("carrier", "bf16", "fp8")
_ROUTER_PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp8-rowwise", "nvfp4")
_LARGEST_EXPONENT = 4.0


def parse_load(text: str) -> str:
    """Parses how tokens are distributed among experts: 'uniform', 'router', or 'zipf:' with an exponent. The exponent
    is returned in its shortest form.
    """
    load_kind, _, exponent = text.partition(":")
    if load_kind == "zipf":
        try:
            zipf_exponent = float(exponent)
        except ValueError:
            raise ValueError("expected zipf with an exponent, as in zipf:1") from None
        if not 0 < zipf_exponent <= _LARGEST_EXPONENT:
            raise ValueError(f"expected an exponent above 0, up to {_LARGEST_EXPONENT:g}")
        return f"zipf:{zipf_exponent:g}"
    return one_of("uniform", "zipf:1", "router")(text)


def read_sizes(params: Scalars) -> MoeSizes:
    return MoeSizes(*read_integers(params, *MoeSizes._fields))


@workloads.register("moe")
class Moe(LayerWorkload):
    """Times layers of experts. The declared FLOPs are those of the tokens' rows. Rows that only pad an expert's part to
    a multiple do not count, and the tape lists them separately. A step does not read the weights of an expert without
    tokens.
    """

    name = "moe"
    summary = "a mixture of experts: router, dispatch, products, combine; a training step, or decoding, by load"
    linear_layers = True
    layer_kinds = ("up", "down")
    batch_axis = "tokens"
    history = Grid(
        cpu={"width": ("128",), "load": ("uniform",), "pass": ("training",)},
        gpu={"width": ("2048",), "load": ("uniform",), "pass": ("training",)},
        phases=("cast", "gemm", "elementwise"),
        errors=("output_error", "gradient_error"),
        per="flops",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tokens, width, hidden, experts, top_k = (
            ("8192", "2048", "1024", "64", "8") if facts.accelerated else ("256", "128", "256", "8", "2")
        )
        return (
            Axis.count("tokens", "rows of the input; in decoding one for each sequence", tokens, high=1 << 20),
            Axis.count("width", "features of input and output", width, high=1 << 16),
            Axis.count("hidden", "features between an expert's products", hidden, high=1 << 16),
            Axis.count("experts", "experts of a layer", experts, high=1024),
            Axis.count("top_k", "number of experts for each token", top_k, high=64),
            Axis.count(
                "layers",
                "layers in sequence; in deeper layers precisions differ more in their choice of experts",
                "1",
                high=64,
            ),
            Axis(
                "load",
                "how tokens are assigned to experts: uniform: round robin; zipf:S: by a Zipf law with "
                "exponent S; router: by the router",
                ("uniform", "zipf:1"),
                parse_load,
            ),
            Axis.choice(
                "dispatch",
                "format of rows on the way to experts: carrier, bf16, or fp8 with a scale for 128 elements",
                *_ROW_FORMATS,
            ),
            Axis.choice("combine", "format of rows on the way back from experts", *_ROW_FORMATS),
            Axis.choice(
                "router", f"the precision of the router's product: {', '.join(_ROUTER_PRECISIONS)}", *_ROUTER_PRECISIONS
            ),
            Axis.choice("pass", "training: forward and backward; decode: forward alone", "training", "decode"),
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        if int(params["top_k"]) > int(params["experts"]):
            raise UsageError(
                f"top_k={params['top_k']} is more than experts={params['experts']}: a token uses an expert only once. "
                "Choose fewer."
            )
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        sizes = read_sizes(params)
        tokens, layers = read_integers(params, "tokens", "layers")
        # An expert is a gated block with three matrices.
        expert_weights = 3 * sizes.width * sizes.hidden
        products = tokens * (sizes.top_k * expert_weights + sizes.experts * sizes.width)
        # Weights are in fp32. Each token has a row for each of its experts. The values of rows, and the values between
        # the two products, take two bytes each.
        row_value_count = tokens * sizes.top_k * (2 * sizes.width + 3 * sizes.hidden)
        least_memory_bytes = layers * (
            4.0 * sizes.experts * expert_weights + (2.0 * row_value_count if is_training(params) else 0.0)
        )
        return Work(
            2.0 * layers * products * (3 if is_training(params) else 1), tokens, least_memory=least_memory_bytes
        )

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        indices = product(range(int(params["layers"])), range(int(params["experts"])), self.layer_kinds)
        return tuple(
            Layer(f"blocks.{layer}.experts.{number}.{kind}", kind, group="mlp") for layer, number, kind in indices
        )

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return make_surrounding_layers((f"norms.{layer}" for layer in range(int(params["layers"]))), "residual")

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. Find how the device supports the products of the experts.
        support = precision.support(facts)
        sizes = read_sizes(params)
        size_text = f"width={sizes.width}, hidden={sizes.hidden}"
        support = refuse_unfit_sizes(support, precision, 0, (sizes.width, sizes.hidden), is_training(params), size_text)
        if support.level is Level.REFUSED:
            return support
        # 2. Find how the device supports the router's products, which have their own precision and sizes. The router's
        # weight gradient sums over tokens, so the number of tokens must fit too.
        router_precision = precisions.get(str(params["router"]))
        router_size_text = f"experts={sizes.experts}, tokens={params['tokens']}"
        side_lengths = (sizes.width, sizes.experts, *([int(params["tokens"])] if is_training(params) else []))
        router_precision_support = refuse_unfit_sizes(
            router_precision.support(facts), router_precision, 0, side_lengths, False, router_size_text
        )
        if router_precision_support.level is Level.REFUSED:
            return hardware.refused(f"router={router_precision.name}: {router_precision_support.reason}")
        fp8_axes = [axis for axis in ("dispatch", "combine") if params[axis] == "fp8"]
        for axis in ("router", *fp8_axes):  # the step also runs these casts and products
            axis_support = precisions.get(str(params[axis])).support(facts)
            if axis_support.is_emulated and support.is_native:
                return hardware.emulated(f"{axis}={params[axis]}: {axis_support.reason}")
        return support

    def exercise(self, setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype) -> LayerExercise:
        import torch

        from fp8bench.nn import experts
        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.nn.exercise import make_exercise
        from fp8bench.nn.linear import cast_once

        # 1. Assign tokens to experts, with a different seed for each layer.
        params = setup.params
        sizes = read_sizes(setup.params)
        tokens = int(params["tokens"])
        load_text = str(params["load"])
        plans = [
            experts.draw_expert_load(load_text, tokens, sizes, setup.seed + layer)
            for layer in range(int(params["layers"]))
        ]
        if carrier is torch.float64:  # the exact reference neither rounds nor pads rows
            row_formats = experts.RowTransferFormats("carrier", "carrier", PlainArithmetic(torch.float64), 1)
        else:
            router = precisions.get(str(params["router"])).arithmetic(setup.facts)
            row_multiple = precisions.get(setup.case.precision).multiples[0] if is_training(params) else 1
            row_formats = experts.RowTransferFormats(
                str(params["dispatch"]), str(params["combine"]), router, row_multiple
            )
        # 2. Make the layers. Each expert's rows are padded to a multiple that native products accept.
        state = make_exercise(
            setup,
            lambda: experts.Mixture(sizes, plans, row_formats, choose),
            [(tokens, sizes.width)],
            carrier,
            is_training(params),
        )
        # 3. In decoding, cast weights once before the steps.
        if not is_training(params):
            cast_once(state.layer)
        return state

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares output and gradients with those of the exact pass. For each layer it adds how often the router
        chooses other experts, and how evenly the experts are loaded.
        """
        from fp8bench.nn.experts import Mixture, compute_disagreement_shares, summarise_load

        state = self.prepare(setup)
        exact = self.exact(setup)
        errors = state.measure_errors(exact, setup.settles)
        assert isinstance(state.layer, Mixture) and isinstance(exact.layer, Mixture)
        # Record which experts each token gets in this precision and in the exact pass.
        routing_by_layer = state.layer.record_routing(state.outcome)
        exact_routing_by_layer = exact.layer.record_routing(exact.outcome)
        differing_choice_shares = compute_disagreement_shares(
            [chosen_experts for chosen_experts, _ in routing_by_layer],
            [chosen_experts for chosen_experts, _ in exact_routing_by_layer],
        )
        # Find the first layer whose router chooses other experts than in the exact pass. Layers after it also get other
        # inputs than in that pass.
        first_differing_layer = next(
            (number for number, share in enumerate(differing_choice_shares) if share), len(differing_choice_shares)
        )
        layer_differing_percents = {
            f"top_k_layer{number}_differs_percent": 100 * share for number, share in enumerate(differing_choice_shares)
        }
        return {
            **errors,
            "top_k_differs_percent": 100 * sum(differing_choice_shares) / len(differing_choice_shares),
            **(layer_differing_percents if len(differing_choice_shares) > 1 else {}),
            "layers_that_agree": float(first_differing_layer),
            **summarise_load([counts for _, counts in routing_by_layer], state.layer.expert_bytes()),
        }
