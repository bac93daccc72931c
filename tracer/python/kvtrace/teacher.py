"""Recording given tokens: one causal pass in blocks, every row at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from . import describe
from .errors import RecordError
from .options import RecordOptions
from .recording import Recording


def passes(
    model: PreTrainedModel, ids: torch.Tensor, prompt_length: int, block: int
) -> Iterator[int]:
    """Runs ids [1, tokens] through the model in blocks; yields the positions done. Logits are asked
    for from position prompt_length - 1 on only."""
    cache = DynamicCache(config=model.config)
    keyword = describe.cache_keyword(model)
    total = ids.shape[1]
    for first in range(0, total, block):
        end = min(total, first + block)
        extra: dict[str, Any] = {}
        if describe.takes(model, "logits_to_keep"):
            extra["logits_to_keep"] = max(1, min(end - first, end - (prompt_length - 1)))
        with torch.no_grad():
            model(input_ids=ids[:, first:end], use_cache=True, **{keyword: cache}, **extra)
        yield end


def teacher_forced(
    model: PreTrainedModel,
    ids: Sequence[int] | torch.Tensor,
    path: str | os.PathLike[str],
    prompt_length: int,
    block: int = 128,
    **options: Any,
) -> Recording:
    """See kvtrace.teacher_forced()."""
    tokens = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
    total = tokens.shape[1]
    if not 1 <= prompt_length < total:
        raise RecordError(
            f"prompt_length is {prompt_length}, expected 1 .. {total - 1} ({total} tokens)"
        )
    if block < 1:
        raise RecordError(f"block is {block}, expected at least 1")
    limit = getattr(describe.text_config(model), "max_position_embeddings", None)
    if limit is not None and total > limit:
        raise RecordError(
            f"{total} tokens, but the model knows {limit} positions (max_position_embeddings)"
        )
    vocabulary = describe.text_config(model).vocab_size
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise RecordError(f"token {low if low < 0 else high}, expected 0 .. {vocabulary - 1}")
    chosen = RecordOptions(prompt_length=prompt_length, capacity=total, **options)
    with Recording(model, path, chosen) as recording:
        for _ in passes(model, tokens.to(next(model.parameters()).device), prompt_length, block):
            pass
    return recording
