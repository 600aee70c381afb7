"""Tiny random causal models: Hugging Face's, and a module with the same cache protocol, honest and faulty."""

from __future__ import annotations

import warnings
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, KEY_HEADS, HIDDEN, LAYERS = 96, 64, 4, 2, 128, 2


def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def hugging_face(name: str, **more: Any) -> nn.Module:
    library = transformers()
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    config = getattr(library, f"{name}Config")(**(sizes | heads | more))
    model: nn.Module = getattr(library, f"{name}ForCausalLM")(config)
    return model


def llama(**more: Any) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return hugging_face("Llama", rms_norm_eps=1e-5, max_position_embeddings=512, rope_parameters=rope, **more)


def gpt2() -> nn.Module:
    library = transformers()
    config = library.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    model: nn.Module = library.GPT2LMHeadModel(config)
    return model


mixtral = partial(hugging_face, "Mixtral", num_local_experts=4)
mistral = partial(hugging_face, "Mistral", sliding_window=8)
heads_that_do_not_divide = partial(llama, num_key_value_heads=3)


class Layer(nn.Module):
    """Attention alone, over whatever the cache gives back."""

    key_heads = HEADS

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any, at: int, off: int) -> Tensor:
        batch, new, _ = x.shape
        q, k, v = (part.view(batch, new, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = k[:, : self.key_heads], v[:, : self.key_heads]
        if cache is not None:
            k, v = cache.update(k, v, self.number)
        seen = torch.ones(new, k.shape[2], dtype=torch.bool).tril(at + off)
        mixed = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Own(nn.Module):
    """A user's decoder; `slip` shifts positions after the first call, `off` lets tokens see later ones."""

    def __init__(self, slip: int = 0, off: int = 0, keeps: bool = True) -> None:
        super().__init__()
        self.slip, self.off, self.keeps = slip, off, keeps
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        cache = past_key_values if self.keeps else None
        at = 0 if cache is None else cache.get_seq_length()
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1]) + at + (self.slip if at else 0))
        for layer in self.layers:
            x = layer(x, cache, at, self.off)
        y: Tensor = self.head(x)
        return y


class GroupedLayer(Layer):
    """Queries share keys."""

    key_heads = KEY_HEADS


class Grouped(Own):
    """Returns a dict, and has more query heads than key heads, which no config states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GroupedLayer(number) for number in range(LAYERS))

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Any:
        return {"logits": super().forward(ids, past_key_values)}


class Unnamed(Own):
    """Gives a dict whose logits have another name."""

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Any:
        return {"scores": super().forward(ids, past_key_values)}


class Masking(Own):
    """Masks ids that it has not, as those do whose table was filled up to a round number."""

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        logits = super().forward(ids, past_key_values)
        return logits.masked_fill(torch.arange(WORDS) >= WORDS - 3, -torch.inf)


def masking() -> tuple[nn.Module, Tensor]:
    return Masking(), torch.randint(WORDS - 3, (2, 17))


class NaNInBf16(Own):
    """As where a sum leaves what a carrier can hold."""

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        logits = super().forward(ids, past_key_values)
        return logits * torch.nan if logits.dtype is torch.bfloat16 else logits


def nan_in_bf16() -> tuple[nn.Module, Tensor]:
    return NaNInBf16(), torch.randint(WORDS, (2, 17))


class OneBlock(nn.Module):
    """Has its only block in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(WORDS, WIDTH), Layer(0)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        y: Tensor = self.head(self.block(self.embedding(ids), past_key_values, past_key_values.get_seq_length(), 0))
        return y


class WithMore(Own):
    """Has another layer in the list of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        x, at = self.embedding(ids), past_key_values.get_seq_length()
        *blocks, last = self.layers
        for layer in blocks:
            x = layer(x, past_key_values, at, 0)
        y: Tensor = self.head(last(x))
        return y


def with_nan() -> nn.Module:
    model = Own()
    nn.init.constant_(model.head.weight, torch.nan)
    return model


def own() -> tuple[nn.Module, Tensor]:
    return Own(), torch.randint(WORDS, (3, 17))


def without_a_cache() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))


a_slip, seeing_later, keeping_nothing = partial(Own, slip=1), partial(Own, off=1), partial(Own, keeps=False)


class Remembering(Own):
    """Repeats its answer for the same ids at the same position."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[object, Tensor] = {}

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        key = id(past_key_values), past_key_values.get_seq_length(), tuple(ids.flatten().tolist())
        if key not in self.known:
            self.known[key] = super().forward(ids, past_key_values)
        return self.known[key]


class Prefilling(Own):
    """Computes its whole prompt again in each step of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = torch.zeros(64, dtype=torch.int64)

    def forward(self, ids: Tensor, past_key_values: Any = None) -> Tensor:
        at = past_key_values.get_seq_length()
        self.ids[at : at + ids.shape[1]] = ids[0]
        parts = [past_key_values, *past_key_values.layers]
        if at and len(ids) == 1:
            for place in (0, at):
                for part in parts:
                    part.at = place
                if not place:
                    super().forward(self.ids[None, :at], past_key_values)
        return super().forward(ids, past_key_values)


def remembers() -> tuple[nn.Module, Tensor]:
    return Remembering(), torch.randint(WORDS, (3, 17))


def prefills() -> tuple[nn.Module, Tensor]:
    return Prefilling(), torch.randint(WORDS, (3, 17))


def of_another_vocabulary() -> tuple[nn.Module, Tensor]:
    return Own(), torch.randint(WORDS, 2 * WORDS, (3, 17))


def of_longer_texts() -> tuple[nn.Module, Tensor]:
    return Own(), torch.randint(WORDS, (3, 170))
