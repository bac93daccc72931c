"""One dataset that grows with the positions."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from .errors import RecordError

CHUNK_BYTES = 128 << 10
HALF_MAX = 65504


@dataclass(frozen=True)
class Kind:
    """How a dataset is laid out: `axis` says what its rows are (`position`, `query` from first_row
    on, `logit` from n_prompt - 1 on), `tail` the rest of its shape."""

    axis: str
    dtype: str
    tail: tuple[int, ...]
    low: float | None = None  # smallest and largest value that make sense
    high: float | None = None
    infinite: bool = False  # +inf (a margin) or -inf (a logit) may stand in it


class Column:
    """Rows are appended in order of their position and written block by block. Positions before
    `skip` have no row. `where` names file, sequence and dataset in complaints."""

    def __init__(
        self, parent: h5py.Group, name: str, kind: Kind, skip: int, capacity: int, where: str
    ) -> None:
        self.kind, self.skip, self.where = kind, skip, where
        self.row_bytes = (
            max(1, int(np.prod(kind.tail, dtype=np.int64))) * np.dtype(kind.dtype).itemsize
        )
        expected = max(1, capacity - skip)  # in chunks of one size, so that the last is full too
        ideal = max(1, CHUNK_BYTES // self.row_bytes)
        self.chunk_rows = -(-expected // -(-expected // ideal))
        self.rows = 0  # in the dataset
        self.pending: list[np.ndarray] = []
        self.pending_rows = 0
        fill = -1 if kind.dtype.startswith("<i") else np.nan
        self.data = parent.create_dataset(
            name,
            shape=(max(0, capacity - skip), *kind.tail),
            maxshape=(None, *kind.tail),
            chunks=(self.chunk_rows, *kind.tail),
            dtype=kind.dtype,
            fillvalue=fill,
        )

    @property
    def next_position(self) -> int:
        return self.skip + self.rows + self.pending_rows

    @property
    def pending_bytes(self) -> int:
        return self.pending_rows * self.row_bytes

    def append(self, first: int, rows: np.ndarray) -> None:
        """`rows` belong to the positions first, first + 1, ...; those before `skip` are dropped."""
        drop = max(0, self.skip - first)
        rows = rows[drop:]
        if not len(rows):
            return
        if first + drop != self.next_position:
            raise RecordError(
                f"{self.where}: row of position {first + drop}, expected "
                f"{self.next_position}: a pass went unseen"
            )
        if rows.shape[1:] != self.kind.tail:
            raise RecordError(
                f"{self.where}: rows of shape {list(rows.shape[1:])}, expected "
                f"{list(self.kind.tail)}"
            )
        self._check(first + drop, rows)
        self.pending.append(np.array(rows, dtype=self.kind.dtype))  # the caller reuses its buffer
        self.pending_rows += len(rows)

    def _check(self, first: int, rows: np.ndarray) -> None:
        if rows.dtype == np.float16:
            bad = (rows.view(np.uint16) & 0x7C00) == 0x7C00
        elif rows.dtype.kind == "f":
            bad = np.isnan(rows) if self.kind.infinite else ~np.isfinite(rows)
        else:
            bad = np.zeros(rows.shape, bool)
        expected = "finite values"
        if rows.dtype == np.float16:
            expected += f"; the trace stores 16 bits, largest {HALF_MAX}"
        if not bad.any() and (self.kind.low is not None or self.kind.high is not None):
            low = -np.inf if self.kind.low is None else self.kind.low
            high = np.inf if self.kind.high is None else self.kind.high
            bad = (rows < low) | (rows > high)
            expected = f"{low:g} to {high:g}"
        if bad.any():
            at = np.unravel_index(int(bad.argmax()), bad.shape)
            raise RecordError(
                f"{self.where}: step {first + int(at[0])}: {rows[at]}, expected {expected}"
            )

    def new_bytes(self) -> int:
        """Bytes that the pending rows will add to the file, whole chunks counted."""

        def chunks(rows: int) -> int:
            return -(-rows // self.chunk_rows)

        new = chunks(self.rows + self.pending_rows) - chunks(self.rows)
        return new * self.chunk_rows * self.row_bytes

    def extend(self, capacity: int) -> None:
        self.data.resize(max(0, capacity - self.skip), axis=0)

    def write(self) -> None:
        """Pending rows into the dataset, which is large enough."""
        for block in self.pending:
            self.data[self.rows : self.rows + len(block)] = block
            self.rows += len(block)
        self.pending, self.pending_rows = [], 0

    def cut(self, n_tokens: int) -> None:
        self.rows = max(0, n_tokens - self.skip)
        if self.data.shape[0] != self.rows:
            self.data.resize(self.rows, axis=0)
