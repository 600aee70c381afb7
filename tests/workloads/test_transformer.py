"""The training step: results, phases and errors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from shutil import which

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fp8bench.model import PHASES, UNATTRIBUTED, DeviceFacts, Level, Request, Scalar
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.compiling import compile_model
from fp8bench.nn.gpt import GPT
from fp8bench.nn.linear import Linear
from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.nn.training_step import TrainingState
from fp8bench.numerics.norms import joint_relative_frobenius
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Phases, Role, Setup, SilentPhases, WatchedArithmetic
from fp8bench.registry import precisions
from fp8bench.workloads import transformer
from fp8bench.workloads.transformer import Transformer, _build_model, _compute_gradients, _make_loader
from tests.counts import for_each
from tests.nn.test_scaled_arithmetic import NEEDS_PRODUCTS
from tests.workloads.steps import CPU, H200, MI300, Operations, marks, setup_of

TINY = GPTConfig(256, 32, 2, 2, 2, 64, batch=2, sequence=16)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setitem(SIZES, "tiny-flat", replace(TINY, layers=1))
    monkeypatch.setitem(SIZES, "tiny-modern", replace(TINY, is_llama_like=True, key_heads=1))
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker; with tensors this small more threads only wait
    yield
    torch.set_rng_state(before)
    torch.set_num_threads(threads)


def setup_for(corpus: Corpus, precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Setup:
    params = {"size": "tiny", "batch": 2, "sequence": 16, "micro_batches": 2, "data": corpus.identity, **changes}
    return setup_of("transformer", params, precision, seed, corpus.path)


def stepped(setup: Setup, steps: int = 1) -> TrainingState:
    workload = Transformer()
    state = workload.prepare(setup)
    for _ in range(steps):
        workload.step(state, SilentPhases())
    return state


def seen(setup: Setup) -> list[str]:
    workload = Transformer()
    state = workload.prepare(setup)
    first = marks(workload, state)
    second = marks(workload, state)
    assert first == second
    return first


@for_each("precision", ["fp32", "fp16", "fp8"])
def test_the_buffers_hold_the_mean_gradient(corpus: Corpus, precision: str) -> None:
    setup = setup_for(corpus, precision)
    workload = Transformer()
    state = workload.prepare(setup)
    model = workload.prepare(setup).model
    loader = workload.prepare(setup).loader
    for _ in range(2):  # a second step must not keep the first one's additions
        model.load_state_dict(state.model.state_dict())
        losses = [model(*loader.next(), SilentPhases()) for _ in range(2)]
        gradients = torch.autograd.grad(torch.stack(losses).mean() * setup.loss_scale, list(model.parameters()))
        workload.step(state, SilentPhases())
        for buffer, gradient in zip(state.gradient_buffers, gradients, strict=True):
            assert buffer.dtype == torch.float32
            torch.testing.assert_close(buffer, gradient / setup.loss_scale, rtol=2e-2, atol=1e-6)


@for_each("size", ["tiny", "tiny-modern"])
@for_each("precision", ["fp32", "bf16", "fp8"])
def test_every_phase_is_seen_and_closed(corpus: Corpus, precision: str, size: str) -> None:
    found = seen(setup_for(corpus, precision, size=size))
    lacking = {"communication", "decode", *(["cast"] if precision == "fp32" else [])}
    assert set(found) - {UNATTRIBUTED} == set(PHASES) - lacking


def test_a_loss_of_zero_has_an_error(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([0.0, 0.0, 0.0, 0.5])
    monkeypatch.setattr(transformer, "_compute_gradients", lambda *given: (next(losses), [torch.zeros(2)]))
    found = [Transformer().error(setup_for(corpus)) for _ in range(2)]
    assert [one["loss_error"] for one in found] == [0.0, math.inf]
    assert all(one["gradient_error"] == 0.0 for one in found)


class Scores(TorchDispatchMode):
    """Counts fp64 matrices of (tokens, tokens): those alive at once, and the most heads that one of them has."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.alive, self.most, self.heads = tokens, 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64 and one.shape[-2:] == (self.tokens,) * 2:
                self.heads = max(self.heads, one.numel() // self.tokens**2)
                self.alive += 1
                self.most = max(self.most, self.alive)
                weakref.finalize(one, self.gone)
        return result

    def gone(self) -> None:
        self.alive -= 1


@for_each("size", ["tiny", "tiny-modern"])
def test_the_exact_step_keeps_no_scores_and_is_what_it_was(corpus: Corpus, size: str) -> None:
    """A GPU has no fused kernel in fp64, so one head's scores exist at a time."""
    most = set()
    for changes in ({}, {"batch": 4}):
        setup = setup_for(corpus, size=size, sequence=24, attention="math", **changes)
        with sdpa_kernel(SDPBackend.MATH), Scores(24) as scores:
            found = Transformer().error(setup)
        assert scores.heads == 1
        most.add(scores.most)
    assert len(most) == 1 and most.pop() < 12
    exact = PlainArithmetic(torch.float64)
    model = _build_model(setup, lambda name: exact, exact.carrier).double()
    loss, gradients = _compute_gradients(setup, model, model, 1.0)
    state = Transformer().prepare(setup)
    with sdpa_kernel(SDPBackend.MATH):
        own_loss, own = _compute_gradients(setup, state.model, state.model, 1.0)
    assert found["loss_error"] == pytest.approx(abs(own_loss - loss) / loss, rel=1e-6)
    assert found["gradient_error"] == pytest.approx(joint_relative_frobenius(own, gradients), rel=1e-6)


def test_the_head_is_high_precision_unless_mapped(corpus: Corpus) -> None:
    setup = setup_for(corpus, "fp8")
    fp8 = precisions.get("fp8").arithmetic(CPU)
    assert Transformer().prepare(setup).model.head.arithmetic is setup.high
    assert Transformer().prepare(replace(setup, layers={"head": fp8})).model.head.arithmetic is fp8


@pytest.mark.slow
@for_each("size", ["tiny", "tiny-modern"])
@for_each("precision", ["fp32", "fp8"])
def test_checkpointing_computes_every_block_again_and_nothing_else(corpus: Corpus, precision: str, size: str) -> None:
    plain, again = (setup_for(corpus, precision, size=size, checkpointing=word) for word in ("no", "blocks"))
    for one, other in zip(stepped(plain, 2).parameters, stepped(again, 2).parameters, strict=True):
        assert torch.equal(one, other)
    before = seen(plain)
    after = seen(again)
    blocks = 2 * TINY.layers  # of two micro-batches
    # Four products a block forward, each entered once; recomputing stops before the last one, which is not needed.
    assert after.count("attention") - before.count("attention") == blocks
    assert 3 * blocks <= after.count("gemm") - before.count("gemm") <= 4 * blocks
    assert after.count(UNATTRIBUTED) == before.count(UNATTRIBUTED)
    assert Transformer().error(again) == Transformer().error(plain)


def both_ways(corpus: Corpus, mode: str, facts: DeviceFacts = CPU, **changes: Scalar) -> list[Setup]:
    setups = [setup_for(corpus, mode, weights=word, **changes) for word in ("cached", "recast")]
    return [replace(one, arithmetic=precisions.get(mode).arithmetic(facts)) for one in setups]


@pytest.mark.parametrize(
    ("mode", "facts", "checkpointing"),
    [
        ("bf16", CPU, "no"),
        ("fp8", CPU, "blocks"),
        ("fp8-unit", CPU, "blocks"),
        ("mxfp8", CPU, "blocks"),
        ("nvfp4", CPU, "no"),
        pytest.param("fp8", H200, "blocks", marks=NEEDS_PRODUCTS),
        pytest.param("fp8-rowwise", H200, "no", marks=NEEDS_PRODUCTS),
    ],
)
def test_cached_weights_train_as_those_that_are_cast_again(
    corpus: Corpus, mode: str, facts: DeviceFacts, checkpointing: str
) -> None:
    setups = both_ways(corpus, mode, facts, checkpointing=checkpointing)
    cached, recast = (stepped(one, 3) for one in setups)
    for one, other in zip(
        [*cached.gradient_buffers, *cached.parameters], [*recast.gradient_buffers, *recast.parameters], strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("weights", ["cached", "recast"])
@pytest.mark.parametrize("size", ["tiny", "tiny-modern"])
def test_a_unit_scaled_step_is_the_plain_one(corpus: Corpus, size: str, weights: str) -> None:
    """In fp64, over three steps; also with weights scaled to unit once."""
    found = []
    for mode in ("fp8", "fp8-unit"):
        exact = PlainArithmetic(torch.float64)
        setup = replace(setup_for(corpus, mode, size=size, weights=weights), arithmetic=exact, high=exact)
        state = Transformer().prepare(setup)
        assert isinstance(state, TrainingState) and isinstance(state.model, GPT)
        assert (state.model.unit_scaling is not None) == (mode == "fp8-unit")
        state.model.double()
        state.gradient_buffers = [one.double() for one in state.gradient_buffers]
        found.append((torch.tensor(state.losses(3), dtype=torch.float64), *state.gradient_buffers, *state.parameters))
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float64 and one.norm() > 0
        assert (other - one).norm() < 1e-10 * one.norm()


def casts_seen(setup: Setup) -> tuple[Setup, list[Role]]:
    """The setup, and a list of the roles of everything cast in the case's precision, transposed operands included."""
    seen: list[Role] = []
    watched = WatchedArithmetic(setup.arithmetic, lambda operand, source, role, before: seen.append(role))
    return replace(setup, arithmetic=watched), seen


def weight_casts(corpus: Corpus, mode: str, **changes: Scalar) -> int:
    setup, seen = casts_seen(setup_for(corpus, mode, **changes))
    Transformer().step(Transformer().prepare(setup), SilentPhases())
    return seen.count(Role.WEIGHT)


@for_each("mode", ["bf16", "fp8", "mxfp8"])
def test_a_step_casts_each_weight_once(corpus: Corpus, mode: str) -> None:
    weights = 4 * TINY.layers  # the head uses another arithmetic
    for changes in ({}, {"micro_batches": 3}, {"checkpointing": "blocks"}):
        assert weight_casts(corpus, mode, **changes) == 2 * weights
    assert weight_casts(corpus, mode, weights="recast", micro_batches=3) == 3 * 2 * weights
    again = weight_casts(corpus, mode, weights="recast", checkpointing="blocks")
    assert again > 2 * 2 * weights, "blocks cast their weights a second time"


def test_cached_weights_are_cast_ahead_of_the_first_micro_batch(corpus: Corpus) -> None:
    for mode, first in (("fp8", "cast"), ("fp32", "data_load")):
        found = [name for name in seen(setup_for(corpus, mode)) if name != UNATTRIBUTED]
        assert found[0] == first and found[1] == ("data_load" if first == "cast" else "elementwise")
    recast = [name for name in seen(setup_for(corpus, "fp8", weights="recast")) if name != UNATTRIBUTED]
    assert recast[0] == "data_load"


def test_layers_of_another_library_say_that_they_cast_their_weights_again() -> None:
    found = {}
    installed = replace(CPU, packages=(("torchao", "0.18.0"),))
    for word in ("cached", "recast"):
        params = {"size": "nano", "batch": 2, "sequence": 96, "micro_batches": 2, "weights": word}
        for mode in ("fp8:backend=torchao", "fp8"):
            support = Transformer().support(params, precisions.get(mode), installed)
            assert support.level is Level.EMULATED
            found[mode, word] = support.reason.endswith("; its layers cast their weights in every micro-batch")
    assert [key for key, says in found.items() if says] == [("fp8:backend=torchao", "cached")]


@for_each(
    ("mode", "more", "wrong"),
    [
        ("fp8-block", {}, ""),
        ("fp8-block", {"size": "nano", "batch": 4}, "192, 576 are no multiples"),
        ("fp8-block", {"batch": 3, "sequence": 96}, "288 is no multiple"),
        ("fp8-block", {"size": "nano", "compile": "no"}, ""),
        ("fp8-rowwise", {"size": "nano"}, ""),
    ],
)
def test_what_compiled_blocks_of_128_do_not_fit_is_refused(mode: str, more: dict[str, Scalar], wrong: str) -> None:
    params = {"size": "gpt2-124m", "batch": 8, "sequence": 96, "micro_batches": 1, "compile": "yes", **more}
    found = Transformer().support(params, precisions.get(mode), H200)
    assert found.level is (Level.REFUSED if wrong else Level.NATIVE) and wrong in found.reason
    assert not wrong or found.reason.endswith("choose compile=no, or other sizes")
    assert Transformer().support(params, precisions.get(mode), CPU).level is Level.EMULATED


def test_a_mapped_layer_is_cached_in_its_own_precision(corpus: Corpus) -> None:
    setup = replace(setup_for(corpus, "fp8"), layers={"mlp": precisions.get("fp32").arithmetic(CPU)})
    state = Transformer().prepare(setup)
    with state.hold_cast_weights(SilentPhases()):
        kept = {name: one.operands for name, one in state.model.named_modules() if isinstance(one, Linear)}
    assert {name.split(".")[-2] for name, operands in kept.items() if operands is None} == {"mlp"}
    head = kept["head"]
    assert head is not None and head[0].data.dtype == torch.bfloat16 and head[0].scale is None
    assert all(one.operands is None for one in state.model.modules() if isinstance(one, Linear))


@for_each("checkpointing", ["no", "blocks"])
def test_attention_takes_the_kernel_that_was_asked_for(corpus: Corpus, checkpointing: str) -> None:
    gradient_buffers = {}
    kernels = {}
    for attention in ("auto", "flash", "math"):
        setup = setup_for(corpus, attention=attention, checkpointing=checkpointing)
        state = Transformer().prepare(setup)
        with Operations() as ran:
            Transformer().step(state, SilentPhases())
        gradient_buffers[attention] = state.gradient_buffers
        kernels[attention] = {name for name in ran.names if "flash_attention" in name}
    assert kernels["auto"] == kernels["flash"] != set() and not kernels["math"]
    for one, other in zip(gradient_buffers["flash"], gradient_buffers["math"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@for_each(
    ("size", "attention", "precision", "facts", "why"),
    [
        ("nano", "flash", "fp32", CPU, ""),
        ("nano", "math", "bf16", CPU, ""),
        ("nano", "cudnn", "bf16", CPU, "choose auto"),
        ("nano", "efficient", "fp32", CPU, "choose auto"),
        ("nano", "flash", "fp32", H200, "choose auto"),
        ("nano", "cudnn", "tf32", H200, "choose auto"),
        ("nano", "cudnn", "fp8", H200, ""),
        ("nano", "efficient", "fp32", H200, ""),
        ("nano", "flash", "bf16", MI300, ""),
        ("nano", "cudnn", "bf16", MI300, "choose auto"),
        ("llama-1b", "efficient", "bf16", H200, "no grouped queries on a GPU"),
        ("llama-1b", "efficient", "fp8", H200, "no grouped queries on a GPU"),
        ("llama-1b", "efficient", "fp32", H200, ""),
        ("gpt2-124m", "efficient", "bf16", H200, ""),
        ("llama-1b", "flash", "bf16", H200, ""),
        ("llama-1b", "auto", "bf16", H200, ""),
    ],
)
def test_a_kernel_that_a_device_lacks_is_refused(
    size: str, attention: str, precision: str, facts: DeviceFacts, why: str
) -> None:
    """In fp32 keys and values are repeated, so that the kernel can still be used."""
    params = {"size": size, "batch": 2, "sequence": 96, "micro_batches": 2, "attention": attention}
    found = Transformer().support(params, precisions.get(precision), facts)
    assert found.level is (Level.REFUSED if why else Level.NATIVE)
    assert why in found.reason and (not why or "choose auto" in found.reason)


@pytest.mark.parametrize("kind", ["head", "mlp", "attn"])
def test_a_mapped_layer_is_not_asked_for_attentions_kernel(kind: str) -> None:
    """Flash takes no float32, but attention's core gets the model's carrier."""
    request = Request(
        "transformer", ("bf16", "fp8"), axes=(("attention", ("flash",)),), precision_map=((kind, "fp32"),)
    )
    plain, mapped = make_plan(request, (H200,)).groups[0].cases
    assert mapped.case.precision_map == ((kind, "fp32"),) and plain.case.precision_map == ()
    assert mapped.runs and mapped.support.level is Level.NATIVE
    (alone,) = make_plan(replace(request, dtypes=("fp32",), precision_map=()), (H200,)).groups[0].cases
    assert "flash attention takes no float32" in alone.skip


# torch warns during compiling because it uses its deprecated functions.
COMPILING = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo force disabled:UserWarning")


@pytest.mark.slow
@COMPILING
@pytest.mark.skipif(not (which("g++") or which("clang++")), reason="torch.compile needs a C++ compiler on a processor")
@for_each("compiled", ["yes", "blocks"])
def test_compiled_steps_train_as_eager_ones(corpus: Corpus, compiled: str) -> None:
    size = "tiny-flat" if compiled == "yes" else "tiny"
    eager, fused = (setup_for(corpus, compile=word, size=size, checkpointing="blocks") for word in ("no", compiled))
    state = Transformer().prepare(fused)
    before = graphs()
    for number in range(2):
        Transformer().step(state, SilentPhases())
        assert graphs() == before > 0, f"step {number} compiled something"
    for one, other in zip(stepped(eager, 2).gradient_buffers, state.gradient_buffers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    assert set(marks(Transformer(), state)) == {"data_load", "accumulate", "optimizer_step", UNATTRIBUTED}


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_model_that_was_not_compiled_is_no_compiled_model(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the function itself if it is switched off."""
    state = Transformer().prepare(setup_for(corpus))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(RuntimeError, match="compiled no graph: is it switched off"):
        compile_model(state.model, *state.loader.next())


@pytest.mark.slow
@COMPILING
@for_each("checkpointing", ["no", "blocks"])
@for_each("weights", ["cached", "recast"])
@for_each("compiled", ["yes", "blocks"])
def test_compiled_low_precision_is_one_graph_in_all_steps(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, weights: str, checkpointing: str, compiled: str
) -> None:
    """Cached weights are inputs, cast in each step; traced alone the bits equal the eager step's."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    words = {"size": "tiny-flat" if compiled == "yes" else "tiny", "checkpointing": checkpointing, "weights": weights}
    eager, fused = (setup_for(corpus, "fp8", compile=word, **words) for word in ("no", compiled))
    at_first = graphs()
    state = Transformer().prepare(fused)
    before = graphs()
    assert before == at_first + 1, "both blocks share a graph"
    for _ in range(3):
        Transformer().step(state, SilentPhases())
    assert graphs() == before > 0
    for one, other in zip(stepped(eager, 3).parameters, state.parameters, strict=True):
        assert torch.equal(one, other)
    cast = {"cast"} if weights == "cached" else set()
    assert set(marks(Transformer(), state)) == cast | {"data_load", "accumulate", "optimizer_step", UNATTRIBUTED}
    assert graphs() == before
    if weights == "cached":
        with state.hold_cast_weights(SilentPhases()), torch.no_grad():
            for layer in (one for one in state.model.modules() if isinstance(one, Linear)):
                assert layer.operands is not None
                layer.operands[0].data.zero_()
            loss = state.forward(*state.loader.next(), SilentPhases())
        assert float(loss) == pytest.approx(math.log(TINY.vocabulary), rel=1e-6), "the graph has constant weights"


@pytest.mark.slow
@COMPILING
def test_each_kind_of_block_has_its_own_graph(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds in three blocks: the last one keeps its products in high precision."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, layers=3))
    eager, fused = (
        replace(
            setup_for(corpus, "fp8", compile=word),
            layers={"blocks.2": precisions.get("bf16").arithmetic(CPU)},
        )
        for word in ("no", "blocks")
    )
    at_first = graphs()
    state = Transformer().prepare(fused)
    assert graphs() == at_first + 2
    Transformer().step(state, SilentPhases())
    assert graphs() == at_first + 2
    for expected, weight in zip(stepped(eager).parameters, state.parameters, strict=True):
        assert torch.equal(expected, weight)


@pytest.mark.slow
@COMPILING
def test_a_compiler_that_is_missing_is_an_error(corpus: Corpus) -> None:
    import torch._inductor.config as inductor

    # Not by monkeypatch: torch's options do not survive its restore.
    missing = inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True})
    with missing, pytest.raises(RuntimeError, match="No working C\\+\\+ compiler"):
        Transformer().prepare(setup_for(corpus, compile="yes"))


def test_statistics_describe_the_operands_of_every_layer_kind(corpus: Corpus) -> None:
    found = Transformer().statistics(setup_for(corpus))
    tokens, width, hidden, layers = 32, TINY.width, TINY.hidden, TINY.layers
    counts = {
        "attn": {"input": 2 * width * tokens, "weight": 4 * width * width, "gradient": 4 * width * tokens},
        "mlp": {
            "input": (width + hidden) * tokens,
            "weight": 2 * width * hidden,
            "gradient": (hidden + width) * tokens,
        },
    }
    wanted = [(kind, role, layers * count) for kind, roles in counts.items() for role, count in roles.items()]
    wanted += [("head", "input", width * tokens), ("head", "weight", 256 * width), ("head", "gradient", 256 * tokens)]
    assert [(one.kind, one.role, one.count) for one in found] == wanted
    model = Transformer().prepare(setup_for(corpus)).model
    assert found[-2].amax == float(model.head.weight.detach().abs().amax())
    assert 0.5 / tokens < found[-1].amax <= 1 / tokens, "softmax minus one, averaged over the tokens"
    assert found == Transformer().statistics(setup_for(corpus, "fp16")), "values, not what fp16 leaves of them"


def test_losses_are_those_of_the_steps_that_are_timed(corpus: Corpus) -> None:
    setup = setup_for(corpus, "fp8")
    losses = Transformer().losses(setup, 3)
    state = Transformer().prepare(setup)
    first, _ = _compute_gradients(setup, state.model, state.model, 1.0)
    assert len(losses) == 3 and losses[0] == pytest.approx(first, rel=1e-6)
    later = stepped(setup, 2)
    loader = _make_loader(setup)
    batches = [loader.next() for _ in range(6)][4:]
    third = [float(later.model(*batch, SilentPhases()).detach()) for batch in batches]
    assert losses[2] == pytest.approx(sum(third) / 2, rel=1e-6)


def test_a_loss_that_is_not_finite_is_the_last(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = TrainingState.step

    def spoiling(self: TrainingState, phase: Phases) -> None:
        inner(self, phase)
        torch.nn.init.constant_(self.model.embedding, math.nan)

    monkeypatch.setattr(TrainingState, "step", spoiling)
    losses = Transformer().losses(setup_for(corpus), 5)
    assert len(losses) == 2 and math.isfinite(losses[0]) and math.isnan(losses[1])


def test_the_first_gradients_are_held_against_another_setups(corpus: Corpus) -> None:
    low, high = (setup_for(corpus, name) for name in ("fp8", "bf16"))
    found = []
    for setup in (low, high):
        model = Transformer().prepare(setup).model
        found.append(_compute_gradients(setup, model, model, setup.loss_scale)[1])
    wanted = joint_relative_frobenius(*found)
    assert 0 < wanted < 0.5 and Transformer().gradient_error(low, high) == wanted
    assert Transformer().gradient_error(low, low) == 0.0
