"""What generate() is about to do: refused by name where one cache per sequence cannot say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import RecordError

DYNAMIC_CACHES = (None, "dynamic", "dynamic_full", "offloaded")
DEFAULT_CAPACITY = 256


@dataclass
class Generation:
    """One call of generate()."""

    prompt: int  # padded prompt length
    capacity: int  # positions that it can feed
    stops: set[int] = field(default_factory=set)
    pad: int | None = None
    temperature: float | None = None
    sequences: int = 1


def _setting(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """A generation setting with generate()'s own precedence."""
    if name in kwargs:
        return kwargs[name]
    given = kwargs.get("generation_config")
    value = getattr(given, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def refuse_modes(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Beam search and its kin, which reorder or crop caches, and caches that are not dynamic."""

    def refuse(what: str, why: str) -> None:
        raise RecordError(
            f"generate: {what} cannot be recorded: {why}; use greedy search or sampling"
        )

    if (_setting(model, kwargs, "num_beams") or 1) > 1:
        refuse("beam search (num_beams)", "beams exchange their caches")
    if kwargs.get("constraints") or kwargs.get("force_words_ids"):
        refuse("constrained beam search", "beams exchange their caches")
    if (_setting(model, kwargs, "penalty_alpha") or 0) > 0:
        refuse("contrastive search (penalty_alpha)", "it tries several tokens per position")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        if _setting(model, kwargs, name):
            refuse(f"assisted generation ({name})", "rejected tokens are cut out of the cache")
    if kwargs.get("custom_generate"):
        refuse("custom_generate", "what it does to the cache is unknown")
    if _setting(model, kwargs, "use_cache") is False:
        refuse("use_cache=False", "every step is a new prompt")
    cache = _setting(model, kwargs, "cache_implementation")
    if cache not in DYNAMIC_CACHES:
        refuse(
            f"cache_implementation={cache!r}",
            "only the default, growing cache hands over the keys in the order of their positions",
        )
    if kwargs.get("inputs_embeds") is not None:
        refuse("inputs_embeds", "a trace needs the token ids")


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return {int(v) for v in (value if isinstance(value, (list, tuple)) else [value])}


def plan(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generation:
    """Lengths, stop tokens and temperature of a call of generate(*args, **kwargs)."""
    refuse_modes(model, kwargs)
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise RecordError("generate: expected a prompt as input_ids [batch, tokens]")
    prompt = ids.shape[1]
    new = _setting(model, kwargs, "max_new_tokens")
    limit = _setting(model, kwargs, "max_length")
    if new is None and limit is not None and limit > prompt:
        new = limit - prompt
    sample = bool(_setting(model, kwargs, "do_sample"))
    temperature = _setting(model, kwargs, "temperature")
    stops = _ids(_setting(model, kwargs, "eos_token_id"))
    pad = _ids(_setting(model, kwargs, "pad_token_id"))
    return Generation(
        prompt=prompt,
        capacity=prompt + int(new if new is not None else DEFAULT_CAPACITY),
        stops=stops,
        pad=next(iter(pad), None),
        temperature=float(temperature if temperature is not None else 1.0) if sample else 0.0,
    )
