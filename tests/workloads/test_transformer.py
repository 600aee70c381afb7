"""The training step: what it computes, what it marks, what its errors say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8bench.corpus import Corpus, prepare_corpus
from fp8bench.devices.cpu import HostStamper
from fp8bench.errors import UsageError
from fp8bench.measure.clock import PhaseClock
from fp8bench.model import CELL_PHASES, PHASES, Case, DeviceFacts, Scalar
from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions
from fp8bench.workloads.transformer import State, Transformer

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")
H200 = DeviceFacts("cuda", 0, "H200", 140 << 30, "2.13.0", (9, 0), "13.0")
TINY = GPTConfig(256, 32, 2, 2, 2, 64, batch=2, sequence=16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(None, tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes that train in milliseconds."""
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setitem(SIZES, "tiny-modern", replace(TINY, modern=True, key_heads=1))
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker; tensors this small only wait for each other on more
    yield
    torch.set_rng_state(before)
    torch.set_num_threads(threads)


def setup_for(corpus: Corpus, precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Setup:
    params = {"size": "tiny", "batch": 2, "sequence": 16, "micro_batches": 2, "data": corpus.identity, **changes}
    case = Case("transformer", tuple(params.items()), precision, "cpu")
    mode = precisions.get(precision)
    arithmetic = mode.arithmetic(CPU)
    carriers = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    high = precisions.get(carriers[arithmetic.carrier]).arithmetic(CPU)
    return Setup(case, CPU, seed, arithmetic, high, {}, mode.loss_scale, corpus.path)


def stepped(setup: Setup, steps: int = 1) -> State:
    workload = Transformer()
    state = workload.prepare(setup)
    for _ in range(steps):
        workload.step(state, SilentPhases())
    return state


def test_micro_batches_add_up_to_one_large_batch(corpus: Corpus) -> None:
    """The same text in four, two or one pieces gives the same gradients and the same weights."""
    states = [stepped(setup_for(corpus, batch=batch, micro_batches=4 // batch)) for batch in (1, 2, 4)]
    for other in states[:2]:
        for one, whole in zip(other.buffers, states[2].buffers, strict=True):
            torch.testing.assert_close(one, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp8"])
def test_the_buffers_hold_the_mean_gradient(corpus: Corpus, precision: str) -> None:
    """In fp32, without the loss scale, of this step only."""
    setup = setup_for(corpus, precision)
    workload = Transformer()
    state = workload.prepare(setup)
    model, loader = workload.prepare(setup).model, workload.prepare(setup).loader
    for _ in range(2):  # a second step must not keep what the first one added
        model.load_state_dict(state.model.state_dict())
        losses = [model(*loader.next(), SilentPhases()) for _ in range(2)]
        gradients = torch.autograd.grad(torch.stack(losses).mean() * setup.loss_scale, list(model.parameters()))
        workload.step(state, SilentPhases())
        for buffer, gradient in zip(state.buffers, gradients, strict=True):
            assert buffer.dtype == torch.float32
            torch.testing.assert_close(buffer, gradient / setup.loss_scale, rtol=2e-2, atol=1e-6)


def test_adamw_updates_every_weight_as_its_paper_says(corpus: Corpus) -> None:
    """The first step: decay, then minus the learning rate times the sign of the gradient, nearly."""
    setup = setup_for(corpus)
    before = [one.detach().clone() for one in Transformer().prepare(setup).parameters]
    state = stepped(setup)
    for old, new, gradient in zip(before, state.parameters, state.buffers, strict=True):
        assert new.dtype == torch.float32 and new.grad is None
        assert not torch.equal(old, new)
        wanted = old * (1 - 3e-4 * 0.1) - 3e-4 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(new.detach(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", ["tiny", "tiny-modern"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_every_phase_is_seen_and_closed(corpus: Corpus, precision: str, size: str) -> None:
    """All seven in low precision; fp32 casts nothing."""
    workload = Transformer()
    state = workload.prepare(setup_for(corpus, precision, size=size))
    clock = PhaseClock(HostStamper())
    seen = []
    for _ in range(2):
        clock.begin()
        workload.step(state, clock)
        codes, _ = clock.end()
        seen.append(codes)
    assert {CELL_PHASES[code] for code in seen[0]} - {"unattributed"} == set(PHASES) - (
        {"cast"} if precision == "fp32" else set()
    )
    assert seen[0] == seen[1], "the marks of a step are always the same, so that cells can be compared"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_the_loss_falls(corpus: Corpus, precision: str) -> None:
    """It is training, not only arithmetic: on text it has not seen, after twenty steps."""
    workload = Transformer()
    state = workload.prepare(setup_for(corpus, precision, batch=8))
    unseen = workload.prepare(setup_for(corpus, precision, seed=99, batch=32)).loader.next()

    def loss() -> float:
        with torch.no_grad():
            return float(state.model(*unseen, SilentPhases()))

    before = loss()
    for _ in range(20):
        workload.step(state, SilentPhases())
    assert before == pytest.approx(6.05, abs=0.4)  # log 256 and the spread of the first logits: it knows nothing
    assert loss() < before - 0.1


def test_two_states_of_one_seed_are_alike(corpus: Corpus) -> None:
    """The A/A control does the very same work with tensors of its own."""
    setup = setup_for(corpus, "bf16")
    one, other = stepped(setup, 2), stepped(setup, 2)
    for mine, others in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(mine, others) and mine.data_ptr() != others.data_ptr()
    different = stepped(setup_for(corpus, "bf16", seed=1), 2)
    assert not torch.equal(one.parameters[0], different.parameters[0])


def test_weights_are_the_same_in_every_precision(corpus: Corpus) -> None:
    """So that errors compare arithmetic and nothing else."""
    models = [Transformer().prepare(setup_for(corpus, precision)).parameters for precision in ("fp32", "fp8")]
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))


def test_errors_grow_as_bits_are_taken_away(corpus: Corpus) -> None:
    """Of all gradients, against the step in fp64; the loss's error is small everywhere."""
    found = {
        precision: Transformer().error(setup_for(corpus, precision, sequence=64))
        for precision in ("fp32", "bf16", "fp8", "nvfp4")
    }
    gradients = [one["gradient_error"] for one in found.values()]
    assert gradients == sorted(gradients) and gradients[0] < 1e-5 and gradients[-1] < 1
    assert gradients[1] > 100 * gradients[0] and gradients[2] > 2 * gradients[1]
    assert found["fp32"]["loss_error"] < 1e-6
    assert all(0 <= one["loss_error"] < 0.05 for one in found.values())


def test_a_precision_map_changes_what_it_names(corpus: Corpus) -> None:
    """With everything mapped back to bf16, fp8 is bf16; with one kind mapped it is neither."""
    setup = setup_for(corpus, "fp8")
    bf16 = precisions.get("bf16").arithmetic(CPU)
    half = Transformer().error(replace(setup, layers={"mlp": bf16}))["gradient_error"]
    none = Transformer().error(replace(setup, layers={"mlp": bf16, "attn": bf16}))["gradient_error"]
    whole = Transformer().error(setup)["gradient_error"]
    assert none < min(half, whole) and half != whole
    assert none == Transformer().error(setup_for(corpus, "bf16"))["gradient_error"]


def test_the_head_is_high_precision_unless_mapped(corpus: Corpus) -> None:
    """The output layer is the one that low precision hurts most."""
    setup = setup_for(corpus, "fp8")
    fp8 = precisions.get("fp8").arithmetic(CPU)
    assert Transformer().prepare(setup).model.head.arithmetic is setup.high
    assert Transformer().prepare(replace(setup, layers={"head": fp8})).model.head.arithmetic is fp8


def test_axes_have_small_defaults_on_a_processor_and_real_ones_on_a_gpu() -> None:
    """And 'auto' is the model's own."""
    workload = Transformer()
    sizes = {facts.kind: {axis.name: axis.default for axis in workload.axes(facts)}["size"] for facts in (CPU, H200)}
    assert sizes == {"cpu": ("nano",), "cuda": ("gpt2-124m",)}
    params = {"size": "gpt2-124m", "batch": "auto", "sequence": 128, "micro_batches": 2}
    assert workload.expand(params) == ((("size", "gpt2-124m"), ("batch", 8), ("sequence", 128), ("micro_batches", 2)),)


@pytest.mark.parametrize(("axis", "value"), [("batch", "0"), ("batch", "many"), ("sequence", "-1"), ("size", "huge")])
def test_what_an_axis_cannot_be_is_refused(axis: str, value: str) -> None:
    """With the axis's name."""
    axes = {one.name: one for one in Transformer().axes(CPU)}
    with pytest.raises(UsageError, match=f"axis '{axis}' cannot be '{value}'"):
        axes[axis].values([value])


def test_work_counts_all_tokens_of_a_step() -> None:
    """FLOPs grow with them."""
    work = Transformer().work({"size": "nano", "batch": 3, "sequence": 96, "micro_batches": 4})
    assert work.tokens == 3 * 96 * 4
    assert work.flops == SIZES["nano"].step_flops(12, 96) > 1e9


def test_a_text_too_short_for_the_sequence_says_so(corpus: Corpus, tmp_path: Path) -> None:
    """And a missing one."""
    short = tmp_path / "short.tokens"
    short.write_bytes(b"\1\0" * 10)
    with pytest.raises(ValueError, match="10 tokens; a sequence of 16 needs more"):
        Transformer().prepare(replace(setup_for(corpus), corpus=str(short)))
    with pytest.raises(ValueError, match="was given none"):
        Transformer().prepare(replace(setup_for(corpus), corpus=None))
