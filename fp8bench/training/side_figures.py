"""Figures of a watched step that belong to no cast: attention scores, embeddings, batch norms, memory."""

from __future__ import annotations

import math
import resource
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.formats.scaled import largest_magnitude

# Queries whose scores are made at a time: all of a long context would not fit.
_QUERIES = 256
_KIB = 1024


def attention_score(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """The largest magnitude of q k / sqrt(head width) that softmax gets, of the first sequence, all of its heads.

    Queries are (batch, heads, tokens, width), keys the same of as many heads or fewer, which neighbours share.
    """
    queries, keys = (one[0].detach().to(torch.float32) for one in (q, k))
    if len(keys) != len(queries):
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    largest = torch.zeros((), device=q.device)
    for start in range(0, q.shape[2], _QUERIES):
        scores = queries[:, start : start + _QUERIES] @ keys.transpose(-1, -2)
        # What is masked becomes 0, and so no largest magnitude.
        largest = torch.maximum(largest, largest_magnitude(scores.tril_(start) if causal else scores))
    return largest / math.sqrt(q.shape[-1])


def embedding_spread(weight: Tensor) -> Tensor:
    """How far rows lie from their mean, as the root of the mean square: 0 where all tokens are alike."""
    rows = weight.detach().to(torch.float32)
    norm: Tensor = torch.linalg.vector_norm(rows - rows.mean(0))
    return norm / math.sqrt(max(len(rows), 1))


def batch_norm_drift(x: Tensor, mean: Tensor, channels_last: bool) -> Tensor:
    """How many standard deviations of the batch a running mean is off, as the root of the mean square over channels.

    Channels are the last dimension, or, as torch's own layers have them, the second.
    """
    channels = x.detach().to(torch.float32).transpose(0, -1 if channels_last else 1).flatten(1)
    deviation, batch = torch.std_mean(channels, 1, correction=0)
    return ((mean - batch) / deviation).square().mean().sqrt()


def running_mean(module: nn.Module) -> Tensor | None:
    """The one that a batch norm keeps, while it trains."""
    found: Any = getattr(module, "running_mean", None)
    return found if isinstance(found, Tensor) and module.training else None


def begin_peak(device: torch.device) -> None:
    """From now on a GPU counts the most that was in use at a time."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def bytes_in_use(device: torch.device) -> int:
    """The most that tensors on a GPU have taken since `begin_peak`; on a processor the most that the process has
    ever taken."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
