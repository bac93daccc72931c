"""Which rows of which pass belong to which position of which sequence. Padding ends here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .errors import RecordError
from .session import Place


def clip(places: Sequence[Place], first: int, end: int) -> list[Place]:
    """The same places in the block of rows first .. end - 1."""
    out = []
    for place in places:
        low, high = max(place.row, first), min(place.row + place.count, end)
        out.append(Place(max(0, low - first), max(0, high - low), place.position + low - place.row))
    return out


@dataclass
class Batch:
    """Sequences that are decoded side by side. Padded positions count the columns of the batch;
    sequence b begins at begins[b] and its prompt ends before ends[b]."""

    size: int
    first_number: int  # of its first sequence in the file
    device: torch.device
    fed: int = 0  # padded positions that have been through the model
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # positions of each so far
    closed: list[bool] = field(default_factory=list)  # right padding has begun
    announced: bool = False
    uncommitted: int = 0
    prompt_over: bool = False
    column_sums: dict[int, torch.Tensor] = field(default_factory=dict)
    prompt_ids: list[torch.Tensor] = field(default_factory=list)
    begin_tensor: torch.Tensor | None = None  # [size], None where all begin at 0

    @property
    def n_prompt(self) -> list[int]:
        return [end - begin for begin, end in zip(self.begins, self.ends)]

    def start(
        self, kept: np.ndarray | None, n: int, prompt: int | None, prompt_length: int | None
    ) -> None:
        """The first pass of n rows, of which kept [size, n] are no padding. `prompt`: padded prompt
        length where it is known; `prompt_length`: unpadded, for all sequences alike."""
        for b in range(self.size):
            real = np.flatnonzero(kept[b]) if kept is not None else np.arange(n)
            if not len(real):
                raise RecordError(f"sequence {b} of the batch: the first pass holds only padding")
            begin, end = int(real[0]), int(real[-1]) + 1
            self.begins.append(begin)
            if prompt_length is not None:
                self.ends.append(begin + prompt_length)
            else:
                self.ends.append(max(prompt, n) if prompt is not None and end == n else end)
        self.lengths, self.closed = [0] * self.size, [False] * self.size
        if any(self.begins):
            self.begin_tensor = torch.tensor(self.begins, device=self.device)

    def places(self, kept: np.ndarray | None, n: int) -> list[Place]:
        """Where the rows of a pass belong. Refuses padding between tokens."""
        out = []
        for b in range(self.size):
            if kept is None:
                if self.closed[b]:
                    raise RecordError(self._gap(b))
                out.append(Place(0, n, self.lengths[b]))
                continue
            real = np.flatnonzero(kept[b])
            if len(real) and (
                self.closed[b]
                or real[-1] - real[0] + 1 != len(real)
                or (self.lengths[b] and real[0] != 0)
            ):
                raise RecordError(self._gap(b))
            row = int(real[0]) if len(real) else 0
            out.append(Place(row, len(real), self.lengths[b]))
            self.closed[b] = self.closed[b] or (not len(real)) or int(real[-1]) + 1 < n
        return out

    @staticmethod
    def _gap(b: int) -> str:
        return (
            f"sequence {b} of the batch: padding between its tokens (a right-padded prompt that "
            "is decoded?); pad on the left"
        )

    def advance(self, places: Sequence[Place], n: int) -> None:
        self.fed += n
        self.lengths = [length + place.count for length, place in zip(self.lengths, places)]

    def counted(self, first: int, n: int) -> torch.Tensor:
        """[size, n] bool: rows from padded position `first` on that are prompt, not padding."""
        t = torch.arange(first, first + n, device=self.device)
        begins = torch.tensor(self.begins, device=self.device)[:, None]
        ends = torch.tensor(self.ends, device=self.device)[:, None]
        return (t >= begins) & (t < ends)

    def first_query(self, rows: int) -> int:
        """Padded position from which q, o and lse are wanted, `rows` before the shortest prompt's
        end."""
        return min(max(begin, end - rows) for begin, end in zip(self.begins, self.ends))

    def first_logit(self) -> int:
        """Padded position of the first logit row that any sequence needs."""
        return min(self.ends) - 1


@dataclass
class Pass:
    """One forward call of the whole model."""

    ids: torch.Tensor
    n: int
    places: list[Place]
    told: bool = False  # its tokens are on their way
    layers: set[int] = field(default_factory=set)  # layers that have attended
    faults: list[torch.Tensor] = field(default_factory=list)
    fault_layers: list[int] = field(default_factory=list)
    errors: list[torch.Tensor] = field(default_factory=list)  # of the path's outputs against ours
    error_layers: list[int] = field(default_factory=list)
    hidden: dict[int, Any] = field(default_factory=dict)  # attention's input, by layer
    last_residual: torch.Tensor | None = None

    def ends(self, batch: Batch) -> torch.Tensor | None:
        """[batch]: padded position where the padding on the right begins; None: there is none."""
        if all(place.row + place.count == self.n for place in self.places):
            return None
        return torch.tensor(
            [batch.fed + place.row + place.count for place in self.places], device=batch.device
        )
