"""The host side of a recording: blocks of rows, in the order the passes made them, into the writer.
Runs in the writer thread; knows neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import RecordError
from .schema import LayerFacts, ModelInfo, SequencePlan
from .writer import TraceWriter


OUTPUT_ERROR = {"float32": 1e-2}  # TF32 may round the scores on a device
OUTPUT_ROUNDING = 6e-2  # of 16-bit paths, which may round scores and probabilities


@dataclass(frozen=True)
class Place:
    """Where the rows of one sequence lie in a block [batch, n, ...], and the position of the
    first."""

    row: int  # first row in the block
    count: int
    position: int  # unpadded


@dataclass(frozen=True)
class Field:
    """A dataset's share of packed rows of 16-bit words."""

    name: str
    first: int
    words: int
    dtype: str  # <f2 or <f4
    tail: tuple[int, ...]


class _Batch:
    def __init__(self, numbers: list[int], plans: Sequence[SequencePlan], stops: set[int]) -> None:
        self.numbers, self.plans, self.stops = numbers, plans, stops
        self.ends: list[int | None] = [None] * len(numbers)  # first position that is cut off
        self.fed = [0] * len(numbers)  # positions whose tokens are known
        self.done = [0] * len(numbers)  # positions whose pass is over
        self.scored: list[int] = []  # layers that have image_score

    def whole(self, index: int) -> int:
        end = self.ends[index]
        return self.done[index] if end is None else min(end, self.done[index])


class HostSession:
    """One file. Batches follow one another; in each every sequence has its number in the file."""

    def __init__(self, path: str | Path, producer: str) -> None:
        self.path, self.producer = Path(path), producer
        self.writer: TraceWriter | None = None
        self.batch: _Batch | None = None
        self.ended: list[tuple[SequencePlan, int]] = []

    def open(self, model: ModelInfo) -> None:
        self.writer = TraceWriter(self.path, model, self.producer)

    def facts(self, make: Callable[[], LayerFacts]) -> None:
        assert self.writer is not None
        self.writer.put_facts(make())

    def gate(self, weights: dict[str, np.ndarray]) -> None:
        assert self.writer is not None
        self.writer.put_retention_gate(weights)

    def begin(self, plans: Sequence[SequencePlan], stops: set[int]) -> None:
        """`stops`: token ids after which a sequence has ended, whatever the batch still feeds
        it."""
        assert self.writer is not None
        self.batch = _Batch([self.writer.begin_sequence(plan) for plan in plans], plans, stops)

    def _kept(self, index: int, place: Place) -> int:
        """Rows of the place that are part of the sequence."""
        assert self.batch is not None
        end = self.batch.ends[index]
        return place.count if end is None else max(0, min(place.count, end - place.position))

    def tokens(self, ids: np.ndarray, places: Sequence[Place]) -> None:
        """ids [batch, n] of the positions fed."""
        batch = self.batch
        assert batch is not None and self.writer is not None
        for index, place in enumerate(places):
            rows = ids[index, place.row : place.row + place.count].astype("<i4")
            for offset, token in enumerate(rows.tolist()):
                position = place.position + offset
                if position < batch.plans[index].n_prompt or batch.ends[index] is not None:
                    continue
                if token in batch.stops:
                    batch.ends[index] = position
            kept = self._kept(index, place)
            self.writer.append(batch.numbers[index], "tokens", place.position, rows[:kept])
            batch.fed[index] = place.position + place.count

    def rows(
        self, name: str, block: np.ndarray, places: Sequence[Place], layer: int | None = None
    ) -> None:
        """block [batch, n, ...] of one dataset."""
        batch = self.batch
        assert batch is not None and self.writer is not None
        for index, place in enumerate(places):
            kept = self._kept(index, place)
            if kept:
                self.writer.append(
                    batch.numbers[index],
                    name,
                    place.position,
                    block[index, place.row : place.row + kept],
                    layer,
                )

    def packed(
        self, block: np.ndarray, fields: Sequence[Field], places: Sequence[Place], layer: int | None
    ) -> None:
        """block [batch, n, words] int16: several datasets side by side."""
        for field in fields:
            words = np.ascontiguousarray(block[:, :, field.first : field.first + field.words])
            values = words.view(field.dtype).reshape(*block.shape[:2], *field.tail)
            self.rows(field.name, values, places, layer)

    def column_sums(self, layer: int, sums: np.ndarray, begins: Sequence[int]) -> None:
        """sums [batch, heads, padded prompt]; `begins`: where each sequence starts in it."""
        batch = self.batch
        assert batch is not None and self.writer is not None
        for index, begin in enumerate(begins):
            end = begin + batch.plans[index].n_prompt
            self.writer.put_column_sum(batch.numbers[index], layer, sums[index, :, begin:end])

    def image_scores(self, layer: int, scores: Sequence[np.ndarray]) -> None:
        """One [prompt] array per sequence."""
        batch = self.batch
        assert batch is not None and self.writer is not None
        for index, values in enumerate(scores):
            self.writer.append(batch.numbers[index], "image_score", 0, values.astype("<f4"), layer)
        batch.scored.append(layer)

    def _score_text(self, batch: _Batch) -> None:
        """Generated tokens are text: their image_score is 0."""
        assert self.writer is not None
        for index, number in enumerate(batch.numbers):
            made = batch.whole(index) - batch.plans[index].n_prompt
            for layer in batch.scored if made > 0 else []:
                position = self.writer.next_position(number, "image_score", layer)
                zeros = np.zeros(batch.whole(index) - position, "<f4")
                self.writer.append(number, "image_score", position, zeros, layer)

    def check_masks(self, faults: np.ndarray, layers: Sequence[int], position: int) -> None:
        """faults [calls]: pairs that the model's mask and the trace see differently."""
        for layer, count in zip(layers, faults.tolist()):
            if count:
                raise RecordError(
                    f"{self.path}: layer {layer}, pass at position {position}: the attention "
                    f"mask is not the causal one of this layer's window ({count} entries differ in "
                    "the rows looked at): bidirectional or chunked attention, packed sequences and "
                    "biases cannot be recorded"
                )

    def check_outputs(self, errors: np.ndarray, layers: Sequence[int], position: int) -> None:
        """errors [calls]: differences between the model's outputs and the trace's."""
        info = self.writer.model if self.writer is not None else None
        limit = OUTPUT_ERROR.get(info.compute_dtype if info is not None else "", OUTPUT_ROUNDING)
        for layer, error in zip(layers, errors.tolist()):
            if not error <= limit:
                raise RecordError(
                    f"{self.path}: layer {layer}, pass at position {position}: attention gave "
                    f"outputs that differ from softmax(scale q k) v by {error:.2g} of the "
                    f"largest value, expected at most {limit:g}: it does more than a trace can say "
                    "(a scale or a bias of its own?)"
                )

    def pass_done(self) -> None:
        """Everything of the pass that the last tokens began has been given."""
        assert self.batch is not None
        self.batch.done = list(self.batch.fed)

    def commit(self) -> None:
        """Marks the positions of finished passes as whole."""
        batch = self.batch
        assert batch is not None and self.writer is not None
        self._score_text(batch)
        self.writer.commit({n: batch.whole(index) for index, n in enumerate(batch.numbers)})

    def end(self, outputs: np.ndarray | None, prompt: int, pad: int | None) -> None:
        """The batch is over. `outputs` [batch, tokens] is what generate() returned, `prompt` its
        padded prompt length: positions that were fed after a sequence had ended are cut off."""
        batch = self.batch
        if batch is None:
            return
        assert self.writer is not None
        self._score_text(batch)
        for index, number in enumerate(batch.numbers):
            plan, length = batch.plans[index], batch.whole(index)
            if outputs is not None and batch.ends[index] is None:
                made = outputs[index, prompt:].tolist()
                while pad not in batch.stops and len(made) > 1 and made[-1] == pad:
                    made.pop()
                # The last token made is an output, never an input.
                length = min(length, plan.n_prompt + max(0, len(made) - 1))
            self.writer.end_sequence(number, length)
            self.ended.append((plan, length))
        self.batch = None

    def abandon(self) -> None:
        """Commits what is whole and closes; the .part stays."""
        if self.writer is None:
            return
        try:
            if self.batch is not None:
                self.commit()
        finally:
            self.writer.close()
