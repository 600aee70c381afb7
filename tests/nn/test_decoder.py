"""A served model against the one that is trained, its cache and its bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8bench.formats.scaled import values
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.gpt import GPT
from fp8bench.nn.served import (
    KV_FORMATS,
    WEIGHT_FORMATS,
    estimate_min_memory,
    list_weight_shapes,
    make_served_shape,
    step_bytes,
)
from fp8bench.nn.served import ServedArm as Arm
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig
from fp8bench.nn.storage import CachedHeads, IntegerWeight, PrecastWeight, StoredWeight, draw_weights, store_weight
from fp8bench.protocols import SilentPhases
from fp8bench.registry import workloads
from fp8bench.workloads.decode import Decode
from tests.counts import for_each
from tests.tapes import tape_in_phases
from tests.workloads.steps import SMALL, setup_of


def model_of(
    config: GPTConfig, kv: str = "fp32", weights: str = "own", carrier: torch.dtype = torch.float32, batch: int = 2
) -> Decoder:
    plain = PlainArithmetic(carrier)

    def keep(name: str, weight: Tensor) -> StoredWeight:
        own = weights == "own" or name == "head"
        return PrecastWeight(weight, plain) if own else store_weight(weight, weights, False)

    drawn = draw_weights(list_weight_shapes(config), 3, "cpu")
    return Decoder(config, drawn, keep, kv, carrier, (batch, config.sequence))


def token_by_token(model: Decoder, tokens: Tensor, first: int) -> Tensor:
    result = [model.forward(tokens[:, :first], 0, SilentPhases(), every=True)]
    result += [model.forward(tokens[:, at : at + 1], at, SilentPhases()) for at in range(first, tokens.shape[1])]
    return torch.cat(result, 1)


@for_each("size", ["nano", "nano-llama", "nano-moe"])
def test_the_trained_model_of_these_weights_gives_the_same_logits(size: str) -> None:
    """GPT has no cache; checkpoints of the mixture are read in this order."""
    config = replace(SERVED_SIZES[size], sequence=32)
    plain, weight = PlainArithmetic(torch.float32), draw_weights(list_weight_shapes(config), 3, "cpu")
    gpt = GPT(config, lambda name: plain, torch.float32)
    expected = [(name, shape) for name, (shape, _) in list_weight_shapes(config).items()]
    assert [(name, (*item.shape,)) for name, item in gpt.named_parameters()] == expected
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(weight(name))
        tokens = torch.randint(config.vocabulary, (2, 20), generator=torch.Generator().manual_seed(2))
        logits = gpt.logits(tokens, SilentPhases())
    result = token_by_token(model_of(config), tokens, 7)
    assert float((result - logits).abs().max()) <= 1e-5 * float(logits.abs().max())


@for_each("name", KV_FORMATS)
def test_what_a_cache_gives_back_is_the_formats_own_rounding(name: str) -> None:
    """The formats have separate oracles."""
    x = torch.randn(2, 3, 10, 48, generator=torch.Generator().manual_seed(5)) * 3
    heads, slowly = (CachedHeads(name, (2, 3, 16, 48), torch.float32, "cpu") for _ in range(2))
    for item in (heads, slowly):
        item.calibrate(x)
    heads.write(x, 0)
    for at in range(10):
        slowly.write(x[:, :, at : at + 1], at)
    result, stored = heads.read(10), KV_FORMATS[name]
    assert torch.equal(result, slowly.read(10))
    if stored.fmt is None or name == "fp8":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]
        expected = x.to(dtype).float()
    elif name == "fp8-head":
        per_head = [values(x[:, head].reshape(-1, 48), stored.fmt, stored.scaling).view(2, 10, 48) for head in range(3)]
        expected = torch.stack(per_head, 1)
    else:
        expected = values(x.reshape(-1, 48), stored.fmt, stored.scaling).view(x.shape)
    # Divides by scales instead of multiplying by inverses: a last bit of fp32, but equal codes.
    assert torch.allclose(result, expected, rtol=1e-6, atol=0)


@for_each("name", [name for name in WEIGHT_FORMATS if name not in ("fp32", "bf16")])
def test_kept_weights_multiply_as_their_values(name: str) -> None:
    random = torch.Generator().manual_seed(6)
    weight, x = (torch.randn(rows, 96, generator=random) for rows in (64, 5))
    stored = store_weight(weight, name, False)
    restored = stored.restore()  # type: ignore[attr-defined]
    product = stored.multiply(x.bfloat16(), SilentPhases()).double()
    exact = x.bfloat16().double() @ restored.double().t()
    assert float((product - exact).norm() / exact.norm()) < 6e-3  # bf16's rounding of inputs and outputs
    known = WEIGHT_FORMATS[name]
    if known.fmt is not None:
        expected = values(weight, known.fmt, known.scaling)
        assert torch.allclose(restored, expected, rtol=1e-6, atol=0)
        return
    assert isinstance(stored, IntegerWeight)
    step = stored.scales.float().expand(-1, -1, stored.group).reshape(weight.shape)
    assert bool(((restored - weight).abs() <= step * 0.51 + 1e-6).all())
    assert bool(stored.native)


def test_bytes_are_those_of_a_hand_count() -> None:
    """nano: width 192, 2 layers, 256 ids. llama3-8b: 32 layers of 218,103,808 weights in their products."""
    nano = step_bytes(make_served_shape(SERVED_SIZES["nano"]), Arm("fp32"), 1, 512)
    # embedding row + position + 5 norms + 2 x (3 + 1 + 4 + 4) x 192^2 + head, in four bytes
    assert nano.weights == 4 * (192 + 192 + 5 * 192 + 2 * 12 * 192 * 192 + 256 * 192)
    assert nano.kv == 2 * 2 * 192 * 512 * 4
    llama, eight = make_served_shape(SERVED_SIZES["llama3-8b"]), 8192
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert block == 218_103_808
    others = 3 * 4096 + 65 * 4096 + 128256 * 4096  # three tokens' rows, norms, head
    assert step_bytes(llama, Arm("bf16"), 3, eight).weights == 2 * (others + 32 * block)
    assert step_bytes(llama, Arm("bf16"), 3, eight).kv == 131_072 * eight * 3
    assert step_bytes(llama, Arm("bf16", "fp8"), 3, eight).kv == 65_536 * eight * 3
    # The least memory grows by what a cache of half a byte a value holds: a quarter of fp16's bytes.
    grown = estimate_min_memory(llama, 3, 2 * eight) - estimate_min_memory(llama, 3, eight)
    assert grown == 131_072 / 4 * eight * 3
    assert step_bytes(llama, Arm("bf16", "fp8-token"), 3, eight).kv == (65_536 + 2 * 32 * 8 * 4) * eight * 3
    assert step_bytes(llama, Arm("bf16", "nvfp4"), 1, eight).kv == 2 * 32 * (8 * eight * (64 + 8) + 4)
    assert step_bytes(llama, Arm("bf16", "mxfp4"), 1, eight).kv == 2 * 8 * eight * 32 * (64 + 4)
    rows = 6144 + 4096 + 28672 + 4096
    assert step_bytes(llama, Arm("bf16", "", "int8"), 3, 1).weights == 2 * others + 32 * (block + 2 * rows)
    assert step_bytes(llama, Arm("bf16", "", "int4"), 3, 1).weights == 2 * others + 32 * (block // 2 + block // 32)


def test_bytes_of_experts_are_those_of_a_hand_count() -> None:
    """mixtral-8x7b: 46.7e9 weights, of which a token uses 12.9e9; olmoe-1b-7b: 6.9e9 and 1.3e9."""
    mixtral = make_served_shape(SERVED_SIZES["mixtral-8x7b"])
    attention, expert, router = 4096 * (4096 + 2 * 1024) + 4096 * 4096, 3 * 4096 * 14336, 8 * 4096
    whole = 2 * 32000 * 4096 + 32 * (attention + 8 * expert + router) + 65 * 4096
    assert sum(math.prod(shape) for _, shape in mixtral.shapes) == whole == 46_702_792_704
    others = 4096 + 65 * 4096 + 32000 * 4096 + 32 * router
    assert step_bytes(mixtral, Arm("bf16"), 1, 8).weights == 2 * (others + 32 * (attention + 2 * expert))
    assert step_bytes(mixtral, Arm("bf16"), 1, 8, 7.5).weights == 2 * (others + 32 * attention + 240 * expert)
    flops = 2 * (32 * (attention + 2 * expert + router) + 32000 * 4096) + 4 * 32 * 4096 * 8
    assert workloads.get("decode").work({"size": "mixtral-8x7b", "batch": 1, "context": 8}).flops == flops
    olmoe = make_served_shape(SERVED_SIZES["olmoe-1b-7b"])
    assert sum(math.prod(shape) for _, shape in olmoe.shapes) == pytest.approx(6.92e9, rel=0.01)
    assert olmoe.active_weight_count + 2 * 50304 * 2048 == pytest.approx(1.28e9, rel=0.01)
    # DeepSeek-V3's, as published: 256 experts, 8 per token.
    deepseek = replace(olmoe, experts=256, top_k=8)
    assert [round(deepseek.count_chosen_experts(batch)) for batch in (1, 8, 32, 128)] == [8, 57, 163, 252]


@for_each("kv", KV_FORMATS)
@for_each("weights", [name for name in WEIGHT_FORMATS if name != "fp32"])
@for_each("tied", [False, True])
def test_counted_bytes_are_those_that_are_stored(kv: str, weights: str, tied: bool) -> None:
    """A step reads two rows of the embedding and the head; a tied one is stored once."""
    config = replace(SERVED_SIZES["nano-llama"], layers=1, sequence=32, tied=tied)
    model = model_of(config, kv, "own" if weights == "bf16" else weights, torch.bfloat16, batch=2)
    model.fill_cache(32, torch.Generator().manual_seed(0))
    counted = step_bytes(make_served_shape(config), Arm("bf16", kv, weights), 2, 32)
    assert model.cache_bytes(32) == counted.kv
    unread = ((0 if tied else config.vocabulary) - 2) * config.width * 2
    assert model.weight_bytes() == counted.weights + unread
    if weights == "bf16":
        parameters = sum(math.prod(shape) for shape, _ in list_weight_shapes(config).values())
        assert 8 * model.weight_bytes() == 16 * parameters


@for_each("size", ["nano", "nano-llama"])
def test_a_cache_that_grows_gives_what_a_static_one_gives(size: str) -> None:
    config, result = SERVED_SIZES[size], []
    cache = f"fp32[2,{config.key_heads},40,{config.head_width}]"
    for more in ({}, {"static": "no"}):
        state = Decode().prepare(setup_of("decode", {**SMALL["decode"], "size": size, **more}, "fp32"))
        for _ in range(2):
            Decode().step(state, SilentPhases())
        tape = tape_in_phases(state.step)
        copies = (item for item in tape.operators if item.operator == "cat" and item.outputs == (cache,))
        moved = sum(item.calls * item.bytes for item in copies)
        result.append((state.logits.clone(), tape.flops, moved))
    (logits, flops, none), (grown, as_many, moved) = result
    assert torch.equal(logits, grown) and flops == as_many and none == 0
    assert moved == config.layers * 2 * 2 * (2 * config.key_heads * 40 * config.head_width * 4)
