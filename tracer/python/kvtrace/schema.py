"""What a trace says about its model and its sequences: plain data, no torch, no HDF5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Ranges = Sequence[tuple[int, int]]


@dataclass
class ModelInfo:
    """The attributes and datasets of /model. Shapes and units are those of traces/FORMAT.md."""

    name: str
    architecture: str
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    hidden_size: int
    vocab_size: int
    logit_size: int
    softmax_scale: float
    rope: str = "none"
    rope_dim: int | None = None
    key_rotation: str = "rotated"
    score_softcap: float = 0.0
    compute_dtype: str = ""
    cache_dtype: str = ""
    rope_inv_freq: np.ndarray | None = None  # [1 or n_layers, rope_dim / 2] float64

    @property
    def exact(self) -> bool:
        """Whether q, k and v met in attention exactly as stored: o is then stored in 16 bits
        too."""
        return self.cache_dtype == "float16"

    def check(self, where: str) -> None:
        """Raises ValueError for what the reader would refuse."""
        for name in (
            "n_layers",
            "n_q_heads",
            "n_kv_heads",
            "head_dim",
            "value_dim",
            "hidden_size",
            "vocab_size",
            "logit_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{where}: {name} is {getattr(self, name)}, expected at least 1")
        if self.n_q_heads % self.n_kv_heads:
            raise ValueError(
                f"{where}: n_kv_heads {self.n_kv_heads} does not divide n_q_heads {self.n_q_heads}"
            )
        if self.vocab_size > self.logit_size:
            raise ValueError(
                f"{where}: vocab_size {self.vocab_size}, expected at most the logit "
                f"size, {self.logit_size}"
            )


@dataclass
class LayerFacts:
    """What is known of the layers once all have attended once."""

    layers: Sequence[int]  # recorded, ascending
    window: Sequence[int]  # [n_layers], 0 = global
    sinks: np.ndarray | None = None  # [n_layers, n_q_heads] float32
    wo: Mapping[int, np.ndarray] = field(default_factory=dict)  # [n_q_heads, value_dim, hidden]


@dataclass
class SequencePlan:
    """One sequence to come. Positions count from 0 without any padding."""

    n_prompt: int
    capacity: int  # positions expected; grows where more come
    first_row: int = 0  # q, o and lse start here
    name: str = ""
    task: str = ""
    source: str = "real"
    temperature: float | None = None
    seed: int | None = None
    chunks: Ranges = ()
    spans: Mapping[str, Ranges] = field(default_factory=dict)
