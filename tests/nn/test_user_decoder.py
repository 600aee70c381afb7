"""Serving users' own models: against fp8bench's decoder with the same weights, and against themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.served import ServedArm as Arm
from fp8bench.nn.served import check_weight_groups, list_weight_shapes, step_bytes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.storage import PrecastWeight, StoredWeight, draw_weights, store_weight
from fp8bench.nn.user_decoder import UserDecoder, check_user_model, make_model
from fp8bench.protocols import SilentPhases
from tests.counts import for_each
from tests.nn import served_models
from tests.nn.served_models import HEADS, HIDDEN, KEY_HEADS, LAYERS, WIDTH, WORDS
from tests.workloads.steps import CPU

CONFIG = GPTConfig(WORDS, WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, batch=1, sequence=16, is_llama_like=True)
each_model = for_each("make", [served_models.llama, served_models.gpt2, served_models.Own, served_models.Grouped])
TOKENS = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(1))


def plainly_served(arm: Arm) -> Decoder:
    def keep(name: str, weight: Tensor) -> StoredWeight:
        if name == "head" or not arm.weights:
            return PrecastWeight(weight, PlainArithmetic(torch.float32))
        return store_weight(weight, arm.weights, False)

    drawn = draw_weights(list_weight_shapes(CONFIG), 3, "cpu")
    return Decoder(CONFIG, drawn, keep, arm.kv_format, torch.float32, (2, 16))


def of_the_same_weights() -> nn.Module:
    drawn = draw_weights(list_weight_shapes(CONFIG), 3, "cpu")
    state = {"model.embed_tokens.weight": drawn("embedding"), "model.norm.weight": drawn("norm.weight")}
    state["lm_head.weight"] = drawn("head.weight")
    for block in range(LAYERS):
        own, theirs = f"blocks.{block}", f"model.layers.{block}"
        rows = WIDTH, KEY_HEADS * WIDTH // HEADS, KEY_HEADS * WIDTH // HEADS
        parts = torch.split_with_sizes(drawn(f"{own}.attn.qkv.weight"), rows)
        state |= {f"{theirs}.self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        gate, up = drawn(f"{own}.mlp.up.weight").chunk(2)
        state |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
        state[f"{theirs}.mlp.down_proj.weight"] = drawn(f"{own}.mlp.down.weight")
        state[f"{theirs}.self_attn.o_proj.weight"] = drawn(f"{own}.attn.out.weight")
        for name, mine in (("input", "attn"), ("post_attention", "mlp")):
            state[f"{theirs}.{name}_layernorm.weight"] = drawn(f"{own}.norm_{mine}.weight")
    model = served_models.llama()
    model.load_state_dict(state)
    return model


ARMS = [
    Arm("fp32"),
    Arm("fp32", "fp8"),
    Arm("fp32", "fp8-head"),
    Arm("fp32", "nvfp4"),
    Arm("fp32", "fp8@0=fp32"),
    Arm("fp32", "", "int8"),
    Arm("fp32", "", "int4"),
    Arm("fp32", "fp8-token", "fp8"),
]


def both_ways(model: Decoder | UserDecoder) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        model.calibrates = True
        whole = model.forward(TOKENS, 0, SilentPhases(), every=True)
        model.calibrates = False
        parts = [model.forward(TOKENS[:, :8], 0, SilentPhases(), every=True)]
        parts += [model.forward(TOKENS[:, at : at + 1], at, SilentPhases()) for at in range(8, 12)]
    return whole, torch.cat(parts, 1)


@pytest.mark.slow
@for_each("arm", ARMS)
def test_hugging_faces_llama_is_served_as_fp8benchs_own(arm: Arm) -> None:
    mine, theirs = plainly_served(arm), UserDecoder("llama", of_the_same_weights(), arm, (2, 16), "cpu")
    (expected, _), (whole, parts) = both_ways(mine), both_ways(theirs)
    limit = 1e-2 if arm.kv else 1e-5  # a value may round the other way, and then the next layer's
    assert float((whole - expected).norm() / expected.norm()) < limit
    assert float((parts - whole).norm() / whole.norm()) < limit
    if arm != Arm("fp32"):
        exact = both_ways(plainly_served(Arm("fp32")))[0]
        assert float((whole - exact).norm() / exact.norm()) > 5 * float((whole - expected).norm() / expected.norm())


@each_model
def test_logits_are_those_of_the_model_without_a_cache(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    with torch.no_grad():
        out: Any = model(TOKENS)
    expected = out if isinstance(out, Tensor) else out["logits"]
    whole, parts = both_ways(UserDecoder("own", model, Arm("fp32"), (2, 12), "cpu"))
    assert max(float((item - expected).abs().max()) for item in (whole, parts)) <= 1e-5 * float(expected.abs().max())


@each_model
def test_bytes_are_those_that_are_stored(make: Callable[[], nn.Module]) -> None:
    model = make()
    shape = check_user_model("own", model, 0, CPU)
    assert (shape.vocabulary, shape.layers, shape.heads) == (WORDS, LAYERS, HEADS)
    stored = sum(parameter.numel() for parameter in model.parameters())
    places = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    tied = 0 if hasattr(model, "head") or make is served_models.llama else WORDS * WIDTH
    positions = 0 if make is served_models.llama else WIDTH
    counted = step_bytes(shape, Arm("fp32"), 2, 12)
    assert counted.weights == 4 * (stored - places + tied + 2 * WIDTH + positions)
    decoder = UserDecoder("own", make(), Arm("bf16", "", "int8"), (2, 12), "cpu")
    cached = sum(item.numel() for layer in decoder.cache.layers for item in (layer.keys, layer.values))
    assert counted.kv == 4 * cached and step_bytes(shape, Arm("bf16", "fp8"), 2, 12).kv == cached
    assert 8.0 < 8 * decoder.weight_bytes() / decoder.weight_count() < 16.0
    assert UserDecoder("own", make(), Arm("bf16"), (2, 12), "cpu").weight_bytes() == 2 * stored


@for_each("weights", ["int8", "int4", "fp8", "mxfp4", "nvfp4"])
def test_gpt2s_turned_weights_are_multiplied(weights: str) -> None:
    """Hugging Face's GPT-2 stores them transposed; in bf16 multiplied by torch's kernels where they exist."""
    seen = []
    for arm in (Arm("fp32"), Arm("bf16", "", weights)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            seen.append(both_ways(UserDecoder("gpt2", served_models.gpt2(), arm, (2, 12), "cpu"))[0].float())
    exact, low = seen
    assert 1e-3 < float((low - exact).norm() / exact.norm()) < 0.2


def test_a_filled_cache_is_read_and_is_the_formats_own() -> None:
    logits = []
    for seed in (0, 0, 1):
        model = UserDecoder("own", of_the_same_weights(), Arm("fp32", "fp8"), (2, 16), "cpu")
        model.fill_cache(15, torch.Generator().manual_seed(seed))
        keys = model.cache.layers[0].keys
        assert torch.equal(keys[:, :, :15], keys[:, :, :15].to(torch.float8_e4m3fn).float())
        assert float(keys[:, :, :15, 0].std()) > 3 and not keys[:, :, 15:].any()
        with torch.no_grad():
            logits += [model.forward(TOKENS[:, :1], 15, SilentPhases()) for _ in range(2)]
    assert all(torch.equal(item, logits[0]) for item in logits[:4]) and not torch.equal(logits[4], logits[0])


REFUSED = {
    "without_a_cache": "takes no past_key_values",
    "keeping_nothing": "puts nothing into the cache",
    "Unnamed": "returns scores. It must return logits",
    "a_slip": "not return what it stored",
    "seeing_later": "tokens attend to later tokens",
    "mixtral": "stacked experts",
    "mistral": "a sliding window",
    "WithMore": "is in block 2, but the cache has 2 layers",
    "with_nan": "logits have NaN",
    "heads_that_do_not_divide": "running one token with a cache fails",
}


@for_each("make", REFUSED)
def test_what_cannot_be_served_is_a_sentence(make: str) -> None:
    model, _ = make_model(getattr(served_models, make), make, 0, CPU)
    with pytest.raises(UsageError, match=REFUSED[make]):
        check_user_model(make, model, 0, CPU)


def test_a_model_that_masks_ids_is_served() -> None:
    assert check_user_model("masking", served_models.masking()[0], 0, CPU).vocabulary == WORDS


def test_weights_in_no_numbered_block_cannot_be_kept() -> None:
    shape = check_user_model("own", served_models.OneBlock(), 0, CPU)
    check_weight_groups(shape, Arm("bf16", "fp8", "bf16"))
    with pytest.raises(UsageError, match="weights=int8 has no effect"):
        check_weight_groups(shape, Arm("bf16", "", "int8"))


def test_what_makers_may_give() -> None:
    model, tokens = make_model(served_models.own, "own", 0, CPU)
    again, _ = make_model(served_models.own, "own", 0, CPU)
    assert tokens is not None and tokens.shape == (3, 17)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    for wrong, words in (
        (lambda: 3, "returns int"),
        (lambda: (model, torch.rand(2, 3)), "invalid tokens"),
        (lambda: (model, torch.ones(2, 2, dtype=torch.int64)), "with 3 or more positions"),
        (lambda: (model, torch.ones(0, 9, dtype=torch.int64)), "invalid tokens"),
        (lambda: 1 / 0, "fails: Zero"),
    ):
        with pytest.raises(UsageError, match=words):
            make_model(wrong, "own", 0, CPU)
