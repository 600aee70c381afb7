"""The suite transformer: a training step of a GPT. It loads data, runs forward and backward, adds up gradients over
micro-batches, and runs AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from fp8bench.errors import UsageError
from fp8bench.formats.hardware import emulated, refused
from fp8bench.model import DeviceFacts, Level, Params, Scalar, Scalars, StaticScales, Support, TensorStatistics, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.served import CARRIER_BYTES, WEIGHT_FORMATS
from fp8bench.nn.sizes import SIZES, GPTConfig, gpt_layers, make_gpt_surrounding_layers
from fp8bench.protocols import Grid, Layer, Precision, Role, Setup, SilentPhases
from fp8bench.protocols.axes import Axis, read_integers
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8bench.nn.attention import AttentionCore
    from fp8bench.nn.batches import TokenLoader
    from fp8bench.nn.compiling import ForwardPass
    from fp8bench.nn.gpt import GPT
    from fp8bench.nn.linear import ChooseArithmetic
    from fp8bench.nn.rlhf import RlhfModels
    from fp8bench.nn.training_step import HoldCastWeights, Loader, TrainingState

# The defaults of parameters that change how a step is executed. A case that was built by hand may omit them.
DEFAULT_AXIS_CHOICES = {
    "checkpointing": "no",
    "compile": "no",
    "attention": "auto",
    "weights": "cached",
    "cut": "linear",
    "fused": "yes",
    "models": "actor",
    "frozen": "bf16",
}
# The FLOPs of the two models that only run forward, relative to those of a trained model. Forward is a third of a
# training step.
_FROZEN_MODELS_FLOPS_FACTOR = 2 / 3
COMPILE_SECONDS = 600.0


@workloads.register("transformer")
class Transformer(shared.TrainingWorkload):
    """Times a training step with every phase. It is the main workload of this tool.

    With compile=yes, forward and backward are one graph each. With compile=blocks, each block is a graph. Fused
    operations cannot be distinguished, so the time of forward and backward is unattributed. The other phases are still
    timed. With weights=cached, a step casts each weight once, before its micro-batches. With weights=recast, each
    micro-batch casts a weight where it multiplies. With checkpointing=blocks, phases include recomputation. FLOPs do
    not include it, so that throughputs can be compared.
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
                "blocks: keep only each block's input, and compute the block again in backward",
                "no",
                "blocks",
            ),
            Axis.choice(
                "compile",
                "yes: torch.compile, forward and backward without phases (unattributed); blocks: only the blocks, "
                "as one graph for all of them, which compiles faster",
                "no",
                "yes",
                "blocks",
            ),
            Axis.choice("attention", "torch's kernel for attention; auto: torch chooses", "auto", *shared.BACKENDS),
            Axis.choice(
                "cut",
                "block: a backend may run each block as one layer, without phases; linear: only its products",
                "linear",
                "block",
                quiet=True,
            ),
            Axis.choice(
                "fused",
                "yes: AdamW in torch's fused kernel; no: in several kernels",
                "yes",
                "no",
                quiet=True,
            ),
            Axis.choice(
                "models",
                "rlhf: adds to the model (the actor) a critic that trains on the same batches, and a "
                "reference and a reward model that only run forward; all four have the same size",
                "actor",
                "rlhf",
                quiet=True,
            ),
            Axis.choice(
                "frozen",
                f"format of the weights in the blocks of rlhf's reference and reward model: "
                f"{', '.join(WEIGHT_FORMATS)}",
                *WEIGHT_FORMATS,
                default=DEFAULT_AXIS_CHOICES["frozen"],
                quiet=True,
            ),
            Axis.choice("weights", "cached: cast once a step; recast: in every micro-batch", "cached", "recast"),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        config = _read_config(params)
        has_four_models = _read_choice_param(params, "models") == "rlhf"
        if not has_four_models and _read_choice_param(params, "frozen") != DEFAULT_AXIS_CHOICES["frozen"]:
            raise UsageError(f"frozen={params['frozen']} is for the frozen models of models=rlhf: add models=rlhf.")
        if has_four_models and (_is_case_compiled(params) or _read_choice_param(params, "cut") != "linear"):
            raise UsageError("models=rlhf has four models, of which none is compiled: choose compile=no, cut=linear.")
        default_sizes: dict[str, Scalar] = {"batch": config.batch, "sequence": config.sequence}
        params_with_sizes = {
            name: default_sizes.get(name, value) if value == "auto" else value for name, value in params.items()
        }
        return (tuple(params_with_sizes.items()),)

    def work(self, params: Scalars) -> Work:
        sequences = int(params["batch"]) * int(params["micro_batches"])
        length = int(params["sequence"])
        config = _read_config(params)
        # The least memory: weights, two moments, gradients, and the logits of one micro-batch, all in fp32.
        least_memory_bytes = 16.0 * config.weights + 4.0 * int(params["batch"]) * length * config.vocabulary
        compile_seconds = COMPILE_SECONDS if _is_case_compiled(params) else 0.0
        flops = config.step_flops(sequences, length)
        further_models_bytes = 0.0
        if _read_choice_param(params, "models") == "rlhf":
            flops *= 2 + _FROZEN_MODELS_FLOPS_FACTOR
            further_models_bytes = 16.0 * config.weights + _count_frozen_bytes(params)
        return Work(
            flops,
            sequences * length,
            least_memory=least_memory_bytes + further_models_bytes,
            setup_seconds=compile_seconds,
        )

    def memory(self, params: Scalars, precision: Precision) -> float:
        """Estimates the peak bytes of an uncompiled step: weights, gradients and moments in fp32, the activations that
        blocks store for a micro-batch, logits and their gradients, and attention scores if a kernel writes them to
        memory. With checkpointing, the stored activations are the inputs of all blocks and all activations of a single
        block.
        """
        config = _read_config(params)
        length, batch = read_integers(params, "sequence", "batch")
        bytes_per_value = shared.carrier_bytes(precision)
        key_value_width = 2 * config.key_heads * config.head_width
        # The values that a block stores for each token: both norms, queries, the output of attention and the sum after
        # it, and the inputs and outputs of the activation.
        block_activations = 7 * config.width + key_value_width + (3 if config.is_llama_like else 2) * config.hidden
        recomputes_blocks = _read_choice_param(params, "checkpointing") == "blocks"
        block_value_count = (
            config.layers * config.width + block_activations if recomputes_blocks else config.layers * block_activations
        )
        score_bytes = 0.0
        if _read_choice_param(params, "attention") == "math":
            score_matrix_count = shared.SCORE_COPIES_IN_BACKWARD + shared.SCORE_COPIES_KEPT_FOR_BACKWARD * (
                1 if recomputes_blocks else config.layers
            )
            score_bytes = score_matrix_count * 4.0 * batch * config.heads * length**2
        tokens = batch * length
        state_bytes = 16.0 * config.weights  # weights, gradients and two moments in fp32
        if _read_choice_param(params, "models") == "rlhf":
            state_bytes = 2 * state_bytes + _count_frozen_bytes(params)
        return (
            state_bytes
            + tokens * (bytes_per_value * (block_value_count + 5 * config.width) + 12.0 * config.vocabulary)
            + score_bytes
        )

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = self._check_product_support(params, precision, facts)
        has_grouped_heads = _read_config(params).has_grouped_heads
        reason = shared.explain_missing_kernel(
            _read_choice_param(params, "attention"), has_grouped_heads, precision, facts
        )
        if support.level is not Level.REFUSED and reason:
            return refused(reason)
        frozen_weight_format = _read_choice_param(params, "frozen")
        if support.is_native and frozen_weight_format not in CARRIER_BYTES:
            return emulated(f"frozen weights in {frozen_weight_format} are restored before they are multiplied")
        return support

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        """Returns how a device supports the products of one kind of layer. The core of attention is not checked,
        because its inputs always have the carrier's dtype.
        """
        if _read_choice_param(params, "cut") == "block" and kind != "head":
            return refused("a precision map cannot divide the one layer of cut=block: choose cut=linear")
        return self._check_product_support(params, precision, facts)

    def scales_refused(self, params: Scalars, rule: StaticScales) -> str:
        if _read_choice_param(params, "models") == "rlhf":
            return "RLHF trains two models, each with its own scales: choose models=actor"
        if not _is_case_compiled(params) or (not rule.refresh and rule.bound is None):
            return ""
        return "scales cannot be renewed in a compiled graph: choose compile=no, or static scales without renewal"

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return gpt_layers(_read_config(params).layers)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return make_gpt_surrounding_layers(_read_config(params).layers)

    def _make_case_model(self, setup: Setup) -> GPT:
        from fp8bench.nn.around import set_surrounding_arithmetics
        from fp8bench.nn.unit_scaling import scale_to_unit

        recomputes_blocks = _read_choice_param(setup.params, "checkpointing") == "blocks"
        model = _build_model(setup, self.arithmetics(setup), setup.arithmetic.carrier, recomputes_blocks)
        if precisions.get(setup.case.precision).unit_scaled:
            scale_to_unit(model, int(setup.params["sequence"]))
        set_surrounding_arithmetics(model, setup.around(self.around(setup.params)))
        return model

    def _check_product_support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # 1. A compiled graph cannot update the history of delayed scales.
        support = precision.support(facts)
        if support.level is not Level.REFUSED and precision.remembers and _is_case_compiled(params):
            return refused(
                f"{precision.mode} depends on earlier casts, which a compiled graph does not know: choose compile=no, "
                "or a precision that casts from the tensor alone, like fp8"
            )
        # 2. Check whether a backend's own layers cast weights in every micro-batch, and which models they support.
        backend = precision.backend if precision.whole_layers else None
        recasts_weights = (
            backend is not None and not backend.caches_weights and _read_choice_param(params, "weights") == "cached"
        )
        if recasts_weights and support.level is not Level.REFUSED:
            support = replace(support, reason=f"{support.reason}; its layers cast their weights in every micro-batch")
        differs_from_gpt2_block = (
            _read_config(params).is_llama_like or _read_choice_param(params, "attention") != "auto"
        )
        if precision.whole_layers and _read_choice_param(params, "cut") == "block" and differs_from_gpt2_block:
            return refused(
                "a backend's block is GPT-2's, with its own attention: choose such a size, and attention=auto"
            )
        # 3. Check that sizes are multiples of what native products require. The number of tokens is one of these sizes.
        multiple = precision.multiples[0]
        tokens = int(params["batch"]) * int(params["sequence"])
        is_compiled = support.is_native and _is_case_compiled(params)
        if is_compiled and (reason := shared.explain_uncompilable(precision, _read_config(params), tokens)):
            return refused(reason)
        if support.is_native and tokens % multiple:
            return refused(
                f"native {precision.name} contracts weight gradients over the tokens, in multiples of {multiple}; "
                f"batch x sequence is {tokens}: choose another batch or sequence"
            )
        return support

    def prepare(self, setup: Setup) -> TrainingState | RlhfModels:
        if _read_choice_param(setup.params, "models") == "rlhf":
            return self._make_four_models(setup)
        return self._make_training_state(setup, _make_loader(setup))

    def _make_four_models(self, setup: Setup) -> RlhfModels:
        from fp8bench.nn import rlhf
        from fp8bench.nn.gpt import GPT

        micro_batches = int(setup.params["micro_batches"])
        frozen_weight_format = _read_choice_param(setup.params, "frozen")
        loader = rlhf.SharedBatchLoader(_make_loader(setup), micro_batches)
        actor = self._make_training_state(setup, loader)
        critic_state = self._make_training_state(replace(setup, draw=setup.draw + 1), loader)
        assert isinstance(actor.model, GPT)
        frozen_models = rlhf.make_frozen_models(
            actor.model, _make_config(setup), int(setup.params["batch"]), frozen_weight_format, setup.seed
        )
        return rlhf.RlhfModels(actor, critic_state, frozen_models, loader, micro_batches, {})

    def _make_training_state(self, setup: Setup, loader: Loader) -> TrainingState:
        from fp8bench.nn.attention import select_attention_kernel
        from fp8bench.nn.gpt import has_fused_blocks
        from fp8bench.nn.training_step import make_training_state

        params = setup.params
        attention = _read_choice_param(params, "attention")
        model = self._make_case_model(setup)
        with select_attention_kernel(attention):
            forward = _compile_forward(setup, model)
        return make_training_state(
            setup,
            model,
            loader,
            _make_weight_cast(setup, model),
            attention=attention,
            forward=forward,
            compiled=forward is not model or has_fused_blocks(model),
            fused=_read_choice_param(params, "fused") == "yes",
            micro_batches=int(params["micro_batches"]),
        )

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares loss and gradients of one step with those of the same step in fp64, from the same initial state."""
        import torch

        from fp8bench.nn import attention
        from fp8bench.nn.arithmetics import PlainArithmetic
        from fp8bench.numerics import norms

        def compute_exact_gradients() -> tuple[float, list[Tensor]]:
            exact = PlainArithmetic(torch.float64)
            # GPUs have no fused attention kernel for fp64, and the scores of all heads and layers together would not
            # fit into memory.
            core = attention.HeadwiseAttentionCore(attention.FusedCore())
            model = _build_model(setup, lambda name: exact, exact.carrier, checkpointing=True, core=core).double()
            return _compute_gradients(setup, model, model, 1.0)

        reference_loss, reference_gradients = (
            compute_exact_gradients() if setup.shared is None else setup.shared(compute_exact_gradients)
        )
        with attention.StoredScores() as stored_scores:
            loss, gradients = self._compute_first_gradients(setup)
        figures = {} if _is_case_compiled(setup.params) else {"scores_bytes": float(stored_scores.largest_bytes)}
        if _read_choice_param(setup.params, "models") == "rlhf":
            rlhf_models = self._make_four_models(setup)
            rlhf_models.step(SilentPhases())  # the first step creates the moments
            figures |= rlhf_models.figures()
        return {
            "loss_error": norms.relative_error(loss, reference_loss),
            "gradient_error": norms.joint_relative_frobenius(gradients, reference_gradients),
            **figures,
        }

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        return self.prepare(setup).losses(steps)

    def gradient_error(self, setup: Setup, reference: Setup) -> float:
        from fp8bench.numerics.norms import joint_relative_frobenius

        _, exact = self._compute_first_gradients(reference)
        return joint_relative_frobenius(self._compute_first_gradients(setup)[1], exact)

    def _compute_first_gradients(self, setup: Setup) -> tuple[float, list[Tensor]]:
        """Returns the mean loss and the gradients of the first step. If the precision needs a history of casts, an
        extra pass first fills the history.
        """
        from fp8bench.nn.attention import select_attention_kernel

        model = self._make_case_model(setup)
        with select_attention_kernel(_read_choice_param(setup.params, "attention")):
            forward = _compile_forward(setup, model)
            if setup.settles:
                _compute_gradients(setup, model, forward, setup.loss_scale)
            return _compute_gradients(setup, model, forward, setup.loss_scale)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """Returns statistics of the operands of all products of one micro-batch, forward and backward, by kind of layer
        and by role. The micro-batch runs in fp32 for every precision, because fp16 without its loss scale would lose
        the smallest gradients before they are counted.
        """
        import torch

        from fp8bench.nn import arithmetics
        from fp8bench.numerics.ranges import TallyLedger

        value_range_ledger = TallyLedger()
        plain_arithmetic = arithmetics.PlainArithmetic(torch.float32)
        kinds = {layer.name: layer.kind for layer in self.layers(setup.params)}
        model = _build_model(
            setup,
            lambda name: arithmetics.count_casts(plain_arithmetic, kinds[name], value_range_ledger),
            plain_arithmetic.carrier,
        )
        model(*_make_loader(setup).next(), SilentPhases()).backward()
        kind_and_role_order = list(product(self.layer_kinds, Role))
        statistics = value_range_ledger.statistics()
        return tuple(
            sorted(statistics, key=lambda statistic: kind_and_role_order.index((statistic.kind, Role(statistic.role))))
        )


def _read_choice_param(params: Scalars, name: str) -> str:
    return str(params.get(name, DEFAULT_AXIS_CHOICES[name]))


def _is_case_compiled(params: Scalars) -> bool:
    return _read_choice_param(params, "compile") != "no"


def _count_frozen_bytes(params: Scalars) -> float:
    """Returns a lower bound of the bytes that the two frozen models of RLHF need, without scales."""
    return 2.0 * _read_config(params).weights * WEIGHT_FORMATS[_read_choice_param(params, "frozen")].bits / 8


def _read_config(params: Scalars) -> GPTConfig:
    return SIZES[str(params["size"])]


def _make_config(setup: Setup) -> GPTConfig:
    return replace(_read_config(setup.params), sequence=int(setup.params["sequence"]))


def _build_model(
    setup: Setup,
    choose: ChooseArithmetic,
    carrier: torch.dtype,
    checkpointing: bool = False,
    core: AttentionCore | None = None,
) -> GPT:
    """Builds the model of a case from its seed. The initial weights are the same for every arithmetic."""
    from fp8bench.nn.gpt import GPT, fuse_gpt_blocks
    from fp8bench.nn.training_step import seed_weights
    from fp8bench.nn.whole_layers import wrap_model_forward

    config = _make_config(setup)
    with seed_weights(setup):
        model = GPT(config, choose, carrier, checkpointing, core)
    if _read_choice_param(setup.params, "cut") == "block" and not config.is_llama_like:
        fuse_gpt_blocks(model, config.heads)
    wrap_model_forward(model)
    return model


def _make_weight_cast(setup: Setup, model: GPT) -> HoldCastWeights:
    """Returns a function that casts the weights once, before the micro-batches of a step. If each micro-batch casts the
    weights itself, the function does nothing.
    """
    if _read_choice_param(setup.params, "weights") == "recast":
        return lambda phase: nullcontext()
    from fp8bench.nn.whole_layers import CachedWeights

    return CachedWeights(model).cast


def _compile_forward(setup: Setup, model: GPT) -> ForwardPass:
    """Returns the model, or a compiled function of it. It is compiled here, on a batch from a new data loader, so that
    no timed step compiles. Nothing is compiled while static scales are calibrated, because these scales change from
    cast to cast.
    """
    if (setup.scales is not None and setup.scales.watching) or not _is_case_compiled(setup.params):
        return model
    from fp8bench.nn.compiling import compile_blocks, compile_model

    compile_blocks_or_model = (
        compile_blocks if _read_choice_param(setup.params, "compile") == "blocks" else compile_model
    )
    with _make_weight_cast(setup, model)(SilentPhases()):
        return compile_blocks_or_model(model, *_make_loader(setup).next())


def _make_loader(setup: Setup) -> TokenLoader:
    from fp8bench.nn.batches import make_loader

    return make_loader(setup, int(setup.params["batch"]), _make_config(setup))


def _compute_gradients(setup: Setup, model: GPT, forward: ForwardPass, loss_scale: float) -> tuple[float, list[Tensor]]:
    """Returns the mean loss and the summed gradients of the micro-batches of one step."""
    model.zero_grad()
    loader = _make_loader(setup)
    micro_batches = int(setup.params["micro_batches"])
    summed_loss = 0.0
    with _make_weight_cast(setup, model)(SilentPhases()):
        for _ in range(micro_batches):
            tokens, targets = loader.next()
            loss = forward(tokens, targets, SilentPhases()) / micro_batches
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
            summed_loss += float(loss.detach())
    return summed_loss, [parameter.grad / loss_scale for parameter in model.parameters() if parameter.grad is not None]
