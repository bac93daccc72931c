"""What a user can ask of a recording, and the callbacks that know what the attention call
cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

import numpy as np
import torch
from torch import nn

from .errors import RecordError
from .schema import Ranges

EXTRAS = ("wo", "value_norm", "residual")
OBSERVATION_ROWS = 64  # query rows before the decode that rows="decode" keeps


@dataclass(frozen=True)
class AttentionCall:
    """One pass through one layer's attention, as the `retention` callback sees it. `hidden` [batch,
    n, hidden_size] is what the attention module was given; query, key and value are the rows of
    this pass, [batch, heads, n, channels], as they meet in attention."""

    layer: int
    module: nn.Module
    hidden: torch.Tensor | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class ImageRequest:
    """One sequence's prompt in one layer, as the `image_score` callback sees it."""

    layer: int
    sequence: int  # number in the file
    tokens: np.ndarray  # [n_prompt] int


Spans = Mapping[str, Ranges]
SpansOption = Union[Spans, Sequence[Spans], Callable[[int, "list[int]"], Spans], None]
Retention = Callable[[AttentionCall], torch.Tensor]
ImageScore = Callable[[ImageRequest], Any]


@dataclass
class RecordOptions:
    """The keywords of kvtrace.record(); see there."""

    logits: Literal["none", "stats", "full"] = "stats"
    layers: Iterable[int] | None = None
    extras: Iterable[str] = ()
    rows: Literal["all", "decode"] = "all"
    kv_dtype: Literal["model", "fp16"] = "model"
    prompt_length: int | None = None
    capacity: int | None = None
    tokenizer: Any = None
    vocab_size: int | None = None
    rope: tuple[str, int] | None = None
    name: str = ""
    task: str = ""
    seed: int | None = None
    spans: SpansOption = None
    chunks: Ranges = ()
    retention: Retention | None = None
    retention_gate: Mapping[str, torch.Tensor] = field(default_factory=dict)
    image_score: ImageScore | None = None
    flush_every: int = 16
    buffer_bytes: int = 1 << 30
    quiet: bool = False

    def __post_init__(self) -> None:
        self.extras = tuple(self.extras)
        self._one_of("logits", ("none", "stats", "full"))
        self._one_of("rows", ("all", "decode"))
        self._one_of("kv_dtype", ("model", "fp16"))
        for extra in self.extras:
            if extra not in EXTRAS:
                raise RecordError(f"extras: {extra!r}, expected some of {', '.join(EXTRAS)}")
        for name, low in (("flush_every", 1), ("buffer_bytes", 1 << 20)):
            if getattr(self, name) < low:
                raise RecordError(f"{name} is {getattr(self, name)}, expected at least {low}")
        if self.prompt_length is not None and self.prompt_length < 1:
            raise RecordError(f"prompt_length is {self.prompt_length}, expected at least 1")
        if self.rope is not None and self.rope[0] not in ("none", "half", "interleaved"):
            raise RecordError(f"rope: {self.rope[0]!r}, expected none, half or interleaved")
        if self.layers is not None:
            self.layers = sorted(set(self.layers))
            if not self.layers:
                raise RecordError("layers: none named; leave the option out to record all")

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise RecordError(
                f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}"
            )

    def spans_of(self, number: int, prompt: Callable[[], list[int]]) -> Spans:
        """Spans of the sequence with this number in the file."""
        if self.spans is None:
            return {}
        if callable(self.spans):
            return self.spans(number, prompt())
        if isinstance(self.spans, Mapping):
            return self.spans
        if number >= len(self.spans):
            raise RecordError(
                f"spans: given for {len(self.spans)} sequences, but sequence {number} is recorded"
            )
        return self.spans[number]
