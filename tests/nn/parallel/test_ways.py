"""How a model is cut, and what cannot be: with the number."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8bench.nn.parallel.ways import WAYS, ParallelCase, cut_of, cuts
from fp8bench.nn.sizes import SIZES, GPTConfig, of_config
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU

NANO = SIZES["nano"]
LLAMA = replace(NANO, modern=True, key_heads=2)


@for_each(("config", "ranks"), [(NANO, 2), (NANO, 4), (LLAMA, 2)])
def test_shares_make_up_the_whole(config: GPTConfig, ranks: int) -> None:
    for path, cut in cuts(config).items():
        outputs, inputs = of_config(config)[path.split(".")[1]]
        whole = torch.arange(outputs * inputs).view(outputs, inputs)
        shares = [cut.share(whole, rank, ranks) for rank in range(ranks)]
        assert torch.equal(cut.joined(shares), whole)
        assert {one.numel() for one in shares} == {whole.numel() // ranks}


def test_a_rank_has_queries_keys_and_values_of_its_heads() -> None:
    """Of keys and values too, where several heads share one."""
    cut, head = cuts(LLAMA)["attn.qkv"], LLAMA.head_width
    rows = torch.arange(sum(cut.parts)).view(-1, 1)
    queries, keys = LLAMA.width, LLAMA.key_heads * head
    wanted = [*range(queries // 2, queries), *range(queries + head, queries + keys),
              *range(queries + keys + head, queries + 2 * keys)]  # fmt: skip
    assert cut.share(rows, 1, 2).view(-1).tolist() == wanted


def test_what_every_rank_has_whole_is_not_cut() -> None:
    assert cut_of("blocks.1.mlp.down.weight", NANO) == cuts(NANO)["mlp.down"]
    for name in ("embedding", "positions", "blocks.0.norm_attn.weight", "norm.weight", "head.weight"):
        assert cut_of(name, NANO) is None


def refusal(
    way: str, mode: str = "fp32", ranks: int = 2, config: GPTConfig = NANO, batch: int = 8, **options: str
) -> str:
    return WAYS[way].refused(ParallelCase(config, batch, ranks, precisions.get(mode), options, CPU))


def test_what_cannot_be_cut_is_refused_with_the_number() -> None:
    three = replace(NANO, layers=3)
    wanted = {
        refusal("tp", ranks=3, amax="own"): "4 heads have no equal share for each of 3 ranks",
        refusal("tp", config=LLAMA, ranks=4, amax="own"): "2 heads of keys have no equal share for each of 4",
        refusal("sp", config=replace(NANO, sequence=97), amax="own"): "97 tokens have no equal share for each of 2",
        refusal("tp", config=replace(NANO, experts=4), amax="own"): "experts are not cut here",
        refusal("tp", mode="mxfp8", amax="group"): "mxfp8 has no scale of a tensor that ranks could share",
        refusal("tp_fsdp", ranks=4, batch=7, amax="own"): "7 sequences have no equal share for each pair of 4 ranks",
        refusal("pp_gpipe", config=three, microbatches="2"): "3 layers have no equal share for each of 2 ranks",
        refusal("pp_gpipe", batch=6, microbatches="4"): "6 sequences cannot be cut into 4 equal microbatches",
        refusal("pp_1f1b", ranks=2, microbatches="1"): "1 microbatches do not fill 2 stages by this schedule",
    }  # fmt: skip
    for found, start in wanted.items():
        assert found.startswith(start), (found, start)


def test_what_can_be_is_not_refused() -> None:
    assert not refusal("tp", mode="fp8", amax="own") and not refusal("tp_fsdp", "mxfp8", ranks=4, amax="own")
    assert not refusal("tp", mode="fp8", amax="group") and not refusal("sp", ranks=4, amax="own")
    assert not refusal("pp_gpipe", microbatches="4") and not refusal("pp_1f1b", mode="mxfp8", microbatches="2")
