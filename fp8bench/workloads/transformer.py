"""A training step of a GPT: data, forward, backward, accumulation over micro-batches, AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import emulated, refused
from fp8bench.model import DeviceFacts, Level, Params, Scalar, Scalars, StaticScales, Support, TensorStatistics, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.served import CARRIERS, WEIGHT_FORMATS
from fp8bench.nn.sizes import SIZES, GPTConfig, gpt_around, gpt_layers
from fp8bench.protocols import Grid, Layer, Precision, Role, Setup, SilentPhases
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8bench.nn.attention import Core
    from fp8bench.nn.batches import TokenLoader
    from fp8bench.nn.compiling import Forward
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.linear import Choose
    from fp8bench.nn.rlhf import FourModels
    from fp8bench.nn.training_step import Cast, Loader, TrainingState

# Parameters that change how a step is done; what it computes changes at most through delayed scales. A case made by
# hand may leave them out.
USUAL = {
    "checkpointing": "no",
    "compile": "no",
    "attention": "auto",
    "weights": "cached",
    "cut": "linear",
    "fused": "yes",
    "models": "actor",
    "frozen": "bf16",
}
# The work of two models that only run forward, a third of a step each, relative to one that is trained.
_FROZEN_WORK = 2 / 3
COMPILE_SECONDS = 600.0


@workloads.register("transformer")
class Transformer(shared.TrainingWorkload):
    """A training step with every phase: the main workload of this tool.

    With compile=yes forward and backward are one graph each, whose parts are fused and indistinguishable: their time is
    unattributed, the other phases stay. With weights=cached a step casts each weight once, ahead of its micro-batches
    and of any graph; with recast each micro-batch casts them where it multiplies. With checkpointing=blocks phases
    include recomputation; FLOPs do not, so that throughputs compare.
    """

    name = "transformer"
    version = "3"
    summary = "a GPT training step with every phase, from data loading to the optimizer"
    linear_layers = True
    unit_scales = True
    batch_axis = "batch"
    history = Grid(
        cpu={"size": ("nano",)},
        gpu={"size": ("gpt2-124m",)},
        phases=("data_load", "cast", "gemm", "attention", "accumulate", "optimizer_step", "elementwise"),
        errors=("gradient_error", "loss_error"),
        per="tokens",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        size = "gpt2-124m" if facts.accelerated else "nano"
        return (
            Axis.choice("size", f"the model: {', '.join(SIZES)}", *SIZES, default=size),
            Axis.count("batch", "sequences in a micro-batch", "auto", high=4096),
            Axis.count("sequence", "tokens in a sequence", "auto", high=1 << 16),
            Axis.count("micro_batches", "micro-batches accumulated in a step", "2", high=1024),
            Axis.choice(
                "checkpointing",
                "blocks: keep each block's input only, compute it again in backward",
                "no",
                "blocks",
            ),
            Axis.choice(
                "compile",
                "yes: torch.compile, forward and backward without phases (unattributed)",
                "no",
                "yes",
            ),
            Axis.choice("attention", "torch's kernel for it; auto: torch's own choice", "auto", *shared.BACKENDS),
            Axis.choice(
                "cut",
                "block: a backend may take each block into one layer, without phases; linear: products alone",
                "linear",
                "block",
                quiet=True,
            ),
            Axis.choice(
                "fused",
                "yes: AdamW in torch's one kernel; no: in the several that it takes without",
                "yes",
                "no",
                quiet=True,
            ),
            Axis.choice(
                "models",
                "rlhf: beside the model (the actor) a critic that trains on the same batches, a reference "
                "and a reward model that go forward alone, all as large",
                "actor",
                "rlhf",
                quiet=True,
            ),
            Axis.choice(
                "frozen",
                f"of rlhf: what weights of the reference's and reward model's blocks are kept in: "
                f"{', '.join(WEIGHT_FORMATS)}",
                *WEIGHT_FORMATS,
                default=USUAL["frozen"],
                quiet=True,
            ),
            Axis.choice("weights", "cached: cast once a step; recast: in every micro-batch", "cached", "recast"),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        config = SIZES[str(params["size"])]
        four = _choice(params, "models") == "rlhf"
        if not four and _choice(params, "frozen") != USUAL["frozen"]:
            raise UsageError(f"frozen={params['frozen']} is for the frozen models of models=rlhf: add models=rlhf.")
        if four and (_choice(params, "compile"), _choice(params, "cut")) != ("no", "linear"):
            raise UsageError("models=rlhf has four models, of which none is compiled: choose compile=no, cut=linear.")
        usual_sizes: dict[str, Scalar] = {"batch": config.batch, "sequence": config.sequence}
        return (
            tuple(
                (name, usual_sizes[name] if name in usual_sizes and value == "auto" else value)
                for name, value in params.items()
            ),
        )

    def work(self, params: Scalars) -> Work:
        sequences = int(params["batch"]) * int(params["micro_batches"])
        length = int(params["sequence"])
        config = SIZES[str(params["size"])]
        # In fp32: weights, two moments, gradients, and the logits of a micro-batch.
        least = 16.0 * config.weights + 4.0 * int(params["batch"]) * length * config.vocabulary
        compiling = COMPILE_SECONDS if _choice(params, "compile") == "yes" else 0.0
        flops = config.step_flops(sequences, length)
        extra_bytes = 0.0
        if _choice(params, "models") == "rlhf":
            flops *= 2 + _FROZEN_WORK
            extra_bytes = 16.0 * config.weights + _frozen_bytes(params)
        return Work(flops, sequences * length, least_memory=least + extra_bytes, setup_seconds=compiling)

    def memory(self, params: Scalars, precision: Precision) -> float:
        """Counts the memory of an uncompiled step: weights, gradients and moments in fp32; what blocks keep of a
        micro-batch, or only their inputs and what one block keeps; logits with their gradients; and scores that are
        written to memory."""
        config = SIZES[str(params["size"])]
        length = int(params["sequence"])
        batch = int(params["batch"])
        size = shared.carrier_bytes(precision)
        keys = 2 * config.key_heads * config.head_width
        # Both norms, queries, attention's output and the sum after it; before and after the activation.
        activations = 7 * config.width + keys + (3 if config.modern else 2) * config.hidden
        recomputes = _choice(params, "checkpointing") == "blocks"
        blocks = config.layers * config.width + activations if recomputes else config.layers * activations
        scores = 0.0
        if _choice(params, "attention") == "math":
            matrices = shared.SCORES_BESIDE + shared.SCORES_KEPT * (1 if recomputes else config.layers)
            scores = matrices * 4.0 * batch * config.heads * length**2
        tokens = batch * length
        states = 16.0 * config.weights
        if _choice(params, "models") == "rlhf":
            states += states + _frozen_bytes(params)
        return states + tokens * (size * (blocks + 5 * config.width) + 12.0 * config.vocabulary) + scores

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = self._products(params, precision, facts)
        grouped = SIZES[str(params["size"])].has_grouped_heads
        missing = shared.missing_kernel(_choice(params, "attention"), grouped, precision, facts)
        if support.level is not Level.REFUSED and missing:
            return refused(missing)
        frozen = _choice(params, "frozen")
        if support.is_native and frozen not in CARRIERS:
            return emulated(f"frozen weights in {frozen} are restored before they are multiplied")
        return support

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        """Considers products only: attention's core gets values in the model's carrier, regardless of the map."""
        if _choice(params, "cut") == "block" and kind != "head":
            return refused("cut=block may be one layer, which a precision map cannot divide: choose cut=linear")
        return self._products(params, precision, facts)

    def scales_refused(self, params: Scalars, rule: StaticScales) -> str:
        if _choice(params, "models") == "rlhf":
            return "of RLHF's models two are trained, each with scales of its own: choose models=actor"
        if _choice(params, "compile") == "no" or (not rule.refresh and rule.bound is None):
            return ""
        return "scales cannot be renewed in a compiled graph: choose compile=no, or let them stay as they are found"

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return gpt_layers(SIZES[str(params["size"])].layers)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return gpt_around(SIZES[str(params["size"])].layers)

    def _own(self, setup: Setup) -> GPT:
        from fp8bench.nn.around import set_around
        from fp8bench.nn.unit_scaling import scale_to_unit

        recomputes = _choice(setup.params, "checkpointing") == "blocks"
        model = _model(setup, self.arithmetics(setup), setup.arithmetic.carrier, recomputes)
        if precisions.get(setup.case.precision).unit_scaled:
            scale_to_unit(model, int(setup.case.param("sequence")))
        set_around(model, setup.around(self.around(setup.params)))
        return model

    def _products(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. Delayed scales and a compiled graph exclude each other.
        support = precision.support(facts)
        if support.level is not Level.REFUSED and precision.remembers and _choice(params, "compile") == "yes":
            return refused(
                f"{precision.mode} depends on earlier casts, which a compiled graph does not know: choose compile=no, "
                "or a dtype without memory, like fp8"
            )
        # 2. Check what a backend's layers accept or do themselves.
        recasts = precision.backend is not None and precision.whole_layers and not precision.backend.caches_weights
        if recasts and support.level is not Level.REFUSED and _choice(params, "weights") == "cached":
            support = replace(support, reason=f"{support.reason}; its layers cast their weights in every micro-batch")
        is_unlike_gpt2 = SIZES[str(params["size"])].modern or _choice(params, "attention") != "auto"
        if precision.whole_layers and _choice(params, "cut") == "block" and is_unlike_gpt2:
            return refused(
                "a backend's block is GPT-2's, with its own attention: choose such a size, and attention=auto"
            )
        # 3. Check the multiples of native products, of which tokens are one side.
        along = precision.multiples[0]
        tokens = int(params["batch"]) * int(params["sequence"])
        if support.is_native and _choice(params, "compile") == "yes":
            reason = shared.uncompilable(precision, SIZES[str(params["size"])], tokens)
            if reason:
                return refused(reason)
        if support.is_native and tokens % along:
            return refused(
                f"native {precision.name} contracts weight gradients over the tokens, in multiples of {along}; batch x "
                f"sequence is {tokens}: choose another batch or sequence"
            )
        return support

    def prepare(self, setup: Setup) -> TrainingState | FourModels:
        if _choice(setup.params, "models") == "rlhf":
            return self._four(setup)
        return self._training_state(setup, _loader(setup))

    def _four(self, setup: Setup) -> FourModels:
        from fp8bench.nn import rlhf
        from fp8bench.nn.gpt import GPT

        count = int(setup.case.param("micro_batches"))
        frozen = _choice(setup.params, "frozen")
        loader = rlhf.ReadBatches(_loader(setup), count)
        actor = self._training_state(setup, loader)
        critic = self._training_state(replace(setup, draw=setup.draw + 1), loader)
        assert isinstance(actor.model, GPT)
        frozen_pair = rlhf.frozen_models(
            actor.model, _config(setup), int(setup.case.param("batch")), frozen, setup.seed
        )
        return rlhf.FourModels(actor, critic, frozen_pair, loader, count, {})

    def _training_state(self, setup: Setup, loader: Loader) -> TrainingState:
        from fp8bench.nn.attention import attention_by
        from fp8bench.nn.gpt import blocks_are_taken
        from fp8bench.nn.training_step import new_state

        params = setup.params
        attention = _choice(params, "attention")
        model = self._own(setup)
        with attention_by(attention):
            forward = _forward(setup, model)
        return new_state(
            setup,
            model,
            loader,
            _weights(setup, model),
            attention=attention,
            forward=forward,
            compiled=forward is not model or blocks_are_taken(model),
            fused=_choice(params, "fused") == "yes",
            micro_batches=int(params["micro_batches"]),
        )

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the loss and all gradients of one step with the same step in fp64 throughout, from identical
        state."""
        import torch

        from fp8bench.nn import attention
        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.numerics import norms

        def exactly() -> tuple[float, list[Tensor]]:
            exact = PlainArithmetic(torch.float64)
            # No fused kernel of a GPU takes fp64, and the scores of all heads and layers at once would not fit.
            core = attention.HeadwiseCore(attention.FusedCore())
            model = _model(setup, lambda name: exact, exact.carrier, checkpointing=True, core=core).double()
            return _gradients(setup, model, model, 1.0)

        reference_loss, reference = exactly() if setup.shared is None else setup.shared(exactly)
        with attention.WrittenScores() as written:
            loss, gradients = self._first_gradients(setup)
        figures = {} if _choice(setup.params, "compile") == "yes" else {"scores_bytes": float(written.most)}
        if _choice(setup.params, "models") == "rlhf":
            four = self._four(setup)
            four.step(SilentPhases())  # makes the moments
            figures |= four.figures()
        return {
            "loss_error": norms.relative_error(loss, reference_loss),
            "gradient_error": norms.joint_relative_frobenius(gradients, reference),
            **figures,
        }

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        return self.prepare(setup).losses(steps)

    def gradient_error(self, setup: Setup, reference: Setup) -> float:
        from fp8bench.numerics.norms import joint_relative_frobenius

        _, exact = self._first_gradients(reference)
        return joint_relative_frobenius(self._first_gradients(setup)[1], exact)

    def _first_gradients(self, setup: Setup) -> tuple[float, list[Tensor]]:
        """Returns mean loss and gradients of the first step, in a second pass if an arithmetic must settle."""
        from fp8bench.nn.attention import attention_by

        model = self._own(setup)
        with attention_by(_choice(setup.params, "attention")):
            forward = _forward(setup, model)
            if setup.settles:
                _gradients(setup, model, forward, setup.loss_scale)
            return _gradients(setup, model, forward, setup.loss_scale)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """Counts the operands of all products of one micro-batch, forward and backward, by layer kind and role. It runs
        in fp32 for any precision: fp16 without its loss scale would lose the smallest gradients uncounted."""
        import torch

        from fp8bench.nn import arithmetics
        from fp8bench.numerics.ranges import Ledger

        ledger = Ledger()
        plain = arithmetics.PlainArithmetic(torch.float32)
        kinds = {layer.name: layer.kind for layer in self.layers(setup.params)}
        model = _model(setup, lambda name: arithmetics.count_casts(plain, kinds[name], ledger), plain.carrier)
        model(*_loader(setup).next(), SilentPhases()).backward()
        roles = list(Role)
        return tuple(
            sorted(
                ledger.statistics(),
                key=lambda statistic: (self.layer_kinds.index(statistic.kind), roles.index(Role(statistic.role))),
            )
        )


def _choice(params: Scalars, name: str) -> str:
    return str(params.get(name, USUAL[name]))


def _frozen_bytes(params: Scalars) -> float:
    """Returns a lower bound of the bytes of both frozen models, without scales."""
    return 2.0 * SIZES[str(params["size"])].weights * WEIGHT_FORMATS[_choice(params, "frozen")].bits / 8


def _config(setup: Setup) -> GPTConfig:
    return replace(SIZES[str(setup.case.param("size"))], sequence=int(setup.case.param("sequence")))


def _model(
    setup: Setup, choose: Choose, carrier: torch.dtype, checkpointing: bool = False, core: Core | None = None
) -> GPT:
    """Builds a case's model from its seed; weights are the same for every arithmetic."""
    from fp8bench.nn.gpt import GPT, take_blocks
    from fp8bench.nn.training_step import seed_weights
    from fp8bench.nn.whole_layers import surround

    with seed_weights(setup):
        model = GPT(_config(setup), choose, carrier, checkpointing, core)
    if _choice(setup.params, "cut") == "block" and not _config(setup).modern:
        take_blocks(model, _config(setup).heads)
    surround(model)
    return model


def _weights(setup: Setup, model: GPT) -> Cast:
    """Returns the cast of a step's weights ahead of its micro-batches; nothing if each micro-batch casts them."""
    if _choice(setup.params, "weights") == "recast":
        return lambda phase: nullcontext()
    from fp8bench.nn.whole_layers import CachedWeights

    return CachedWeights(model).cast


def _forward(setup: Setup, model: GPT) -> Forward:
    """Returns the model, or compiles it now, on separate text, so that no timed step has to. While scales are found in
    data it is not compiled, because they change from cast to cast."""
    calibrating = setup.scales is not None and setup.scales.watching
    if calibrating or _choice(setup.params, "compile") == "no":
        return model
    from fp8bench.nn.compiling import compile_model

    with _weights(setup, model)(SilentPhases()):
        return compile_model(model, *_loader(setup).next())


def _loader(setup: Setup) -> TokenLoader:
    from fp8bench.nn.batches import loader_for

    return loader_for(setup, int(setup.case.param("batch")), _config(setup))


def _gradients(setup: Setup, model: GPT, forward: Forward, loss_scale: float) -> tuple[float, list[Tensor]]:
    """Returns mean loss and summed gradients of one step's micro-batches."""
    model.zero_grad()
    loader = _loader(setup)
    micro_batches = int(setup.case.param("micro_batches"))
    total = 0.0
    with _weights(setup, model)(SilentPhases()):
        for _ in range(micro_batches):
            tokens, targets = loader.next()
            loss = forward(tokens, targets, SilentPhases()) / micro_batches
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total, [parameter.grad / loss_scale for parameter in model.parameters() if parameter.grad is not None]
