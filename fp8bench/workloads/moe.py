"""Mixture of experts, of which each token uses a few: router, dispatch, the experts' products, combine."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats import hardware
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.nn.shared_workloads import is_training, require_fit
from fp8bench.nn.sizes import MoeSizes, layers_around
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, one_of
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose

_WAYS = ("carrier", "bf16", "fp8")
_ROUTERS = ("fp32", "bf16", "fp16", "fp8", "fp8-rowwise", "nvfp4")
_HIGHEST = 4.0


def load_word(text: str) -> str:
    """Parses uniform, router, or zipf with an exponent in canonical form."""
    kind, _, exponent = text.partition(":")
    if kind == "zipf":
        try:
            number = float(exponent)
        except ValueError:
            raise ValueError("expected zipf with an exponent, as in zipf:1") from None
        if not 0 < number <= _HIGHEST:
            raise ValueError(f"expected an exponent above 0, up to {_HIGHEST:g}")
        return f"zipf:{number:g}"
    return one_of("uniform", "zipf:1", "router")(text)


def sizes_of(params: Scalars) -> MoeSizes:
    return MoeSizes(*(int(params[name]) for name in MoeSizes._fields))


@workloads.register("moe")
class Moe(LayerWorkload):
    """Layers of experts. Its FLOPs are those of tokens, without rows that pad an expert's part for a format; the tape
    separates them. Experts without a token are neither read nor multiplied."""

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
            Axis.count("tokens", "rows of the input; in decoding one a sequence", tokens, high=1 << 20),
            Axis.count("width", "features of input and output", width, high=1 << 16),
            Axis.count("hidden", "features between an expert's products", hidden, high=1 << 16),
            Axis.count("experts", "of a layer", experts, high=1024),
            Axis.count("top_k", "how many experts a token takes", top_k, high=64),
            Axis.count("layers", "one behind the other: choices differ the more, the deeper", "1", high=64),
            Axis(
                "load",
                "who goes where: uniform: round robin; zipf:S: by a Zipf law with that exponent; router: the "
                "router's own choice",
                ("uniform", "zipf:1"),
                load_word,
            ),
            Axis.choice(
                "dispatch",
                "what rows travel to experts in: carrier, bf16, or fp8 with a scale for 128 elements",
                *_WAYS,
            ),
            Axis.choice("combine", "the same of the way back", *_WAYS),
            Axis.choice("router", f"the precision of the router's product: {', '.join(_ROUTERS)}", *_ROUTERS),
            Axis.choice("pass", "training: forward and backward; decode: forward alone", "training", "decode"),
            VALUES,
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        if int(params["top_k"]) > int(params["experts"]):
            raise UsageError(
                f"top_k={params['top_k']} is more than experts={params['experts']}: a token takes no expert twice. "
                "Choose fewer."
            )
        return super().expand(params)

    def work(self, params: Scalars) -> Work:
        sizes = sizes_of(params)
        tokens = int(params["tokens"])
        layers = int(params["layers"])
        expert = 3 * sizes.width * sizes.hidden
        products = tokens * (sizes.top_k * expert + sizes.experts * sizes.width)
        # fp32 weights; for each expert of a token a row in two bytes, and the values between its products.
        rows = tokens * sizes.top_k * (2 * sizes.width + 3 * sizes.hidden)
        least = layers * (4.0 * sizes.experts * expert + (2.0 * rows if is_training(params) else 0.0))
        return Work(2.0 * layers * products * (3 if is_training(params) else 1), tokens, least_memory=least)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        places = product(range(int(params["layers"])), range(int(params["experts"])), self.layer_kinds)
        return tuple(
            Layer(f"blocks.{layer}.experts.{number}.{kind}", kind, group="mlp") for layer, number, kind in places
        )

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return layers_around((f"norms.{layer}" for layer in range(int(params["layers"]))), "residual")

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. The experts' products.
        support = precision.support(facts)
        sizes = sizes_of(params)
        shown = f"width={sizes.width}, hidden={sizes.hidden}"
        support = require_fit(support, precision, 0, (sizes.width, sizes.hidden), is_training(params), shown)
        if support.level is Level.REFUSED:
            return support
        # 2. The router has a separate precision and separate sides. Its gradient is contracted over tokens, which then
        # must fit as well.
        router = precisions.get(str(params["router"]))
        along = f"experts={sizes.experts}, tokens={params['tokens']}"
        sides = (sizes.width, sizes.experts, *([int(params["tokens"])] if is_training(params) else []))
        routed = require_fit(router.support(facts), router, 0, sides, False, along)
        if routed.level is Level.REFUSED:
            return hardware.refused(f"router={router.name}: {routed.reason}")
        travels = [axis for axis in ("dispatch", "combine") if params[axis] == "fp8"]
        for axis in ("router", *travels):  # their time is part of the step's
            support_of_axis = precisions.get(str(params[axis])).support(facts)
            if support_of_axis.is_emulated and support.is_native:
                return hardware.emulated(f"{axis}={params[axis]}: {support_of_axis.reason}")
        return support

    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        import torch

        from fp8bench.nn import experts
        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.nn.exercise import exercise
        from fp8bench.nn.linear import cast_once

        # 1. Assign tokens to experts, with a separate draw for each layer.
        params = setup.params
        sizes = sizes_of(setup.params)
        tokens = int(params["tokens"])
        load = str(params["load"])
        plans = [experts.draw_load(load, tokens, sizes, setup.seed + layer) for layer in range(int(params["layers"]))]
        if carrier is torch.float64:  # the exact pass neither rounds nor pads
            travel = experts.Travel("carrier", "carrier", PlainArithmetic(torch.float64), 1)
        else:
            router = precisions.get(str(params["router"])).arithmetic(setup.facts)
            rows = precisions.get(setup.case.precision).multiples[0] if is_training(params) else 1
            travel = experts.Travel(str(params["dispatch"]), str(params["combine"]), router, rows)
        # 2. Make the layers, whose parts are padded for native products.
        state = exercise(
            setup,
            lambda: experts.Mixture(sizes, plans, travel, choose),
            [(tokens, sizes.width)],
            carrier,
            is_training(params),
        )
        # 3. Decoding casts weights once, not in every step.
        if not is_training(params):
            cast_once(state.layer)
        return state

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares output and gradients; adds, by layer, how often the router chooses differently, and the load."""
        from fp8bench.nn.experts import Mixture, disagreements, load_figures

        state = self.prepare(setup)
        exact = self.exact(setup)
        errors = state.errors(exact, setup.settles)
        assert isinstance(state.layer, Mixture) and isinstance(exact.layer, Mixture)
        # The experts that each token took, and those that it should have taken.
        watched = state.layer.watch(state.outcome)
        right = exact.layer.watch(exact.outcome)
        shares = disagreements([chosen for chosen, _ in watched], [chosen for chosen, _ in right])
        # After the first layer that disagrees, later ones have different inputs.
        differing = next((number for number, share in enumerate(shares) if share), len(shares))
        by_layer = {f"top_k_layer{number}_differs_percent": 100 * share for number, share in enumerate(shares)}
        return {
            **errors,
            "top_k_differs_percent": 100 * sum(shares) / len(shares),
            **(by_layer if len(shares) > 1 else {}),
            "layers_that_agree": float(differing),
            **load_figures([counts for _, counts in watched], state.layer.expert_bytes()),
        }
