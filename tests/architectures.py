"""Models of ten architectures, tiny and with random weights, each with a batch. Nothing is downloaded.

Importing this takes seconds: transformers is slow to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    # Expected presence in the environment.
    warnings.simplefilter("ignore")
    import transformers
    from diffusers import DiTTransformer2DModel, UNet2DModel

transformers.logging.set_verbosity_error()

Made = tuple[nn.Module, Any]
WIDTH, HIDDEN, LAYERS, HEADS, WORDS, ROWS, LENGTH = 64, 128, 2, 4, 96, 2, 16
TOKENS = ROWS * LENGTH
_TEXT: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
_USUAL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


def _text() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids}


def _pictures() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.tensor([1, 2])}


def llama() -> Made:
    config = transformers.LlamaConfig(**_TEXT, **_USUAL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), _text()


def gpt2() -> Made:
    config = transformers.GPT2Config(**_TEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH)
    return transformers.GPT2LMHeadModel(config), _text()


def bert() -> Made:
    config = transformers.BertConfig(**_TEXT, **_USUAL, max_position_embeddings=LENGTH)
    return transformers.BertForMaskedLM(config), _text()


def vit() -> Made:
    config = transformers.ViTConfig(**_USUAL, image_size=32, patch_size=8, num_labels=16)
    return transformers.ViTForImageClassification(config), _pictures()


def mixtral() -> Made:
    config = transformers.MixtralConfig(**_TEXT, **_USUAL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config), _text()


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=16,
        d_ff=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), _text()


def mamba() -> Made:
    config = transformers.MambaConfig(**_TEXT, hidden_size=WIDTH, state_size=8, num_hidden_layers=LAYERS)
    return transformers.MambaForCausalLM(config), _text()


def resnet() -> Made:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], layer_type="basic", num_labels=16
    )
    return transformers.ResNetForImageClassification(config), _pictures()


def unet() -> Made:
    model = UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, (torch.randn(ROWS, 3, 8, 8), torch.tensor([1, 2]))


def dit() -> Made:
    model = DiTTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        in_channels=4,
        num_layers=LAYERS,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    labels = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])}
    return model, {"hidden_states": torch.randn(ROWS, 4, 8, 8), **labels}


ALL: dict[str, Callable[[], Made]] = {
    one.__name__: one for one in (llama, gpt2, bert, vit, mixtral, t5, mamba, unet, dit, resnet)
}


def made(name: str) -> Made:
    """A small model without dropout, always from the same seed."""
    torch.manual_seed(0)
    model, batch = ALL[name]()
    return model.eval(), batch
