"""Writing a kvtrace file, so that a crash leaves either the finished file or a recoverable .part.

Needs numpy and h5py alone. The format is traces/FORMAT.md; how a crash is survived is the same as
in the C++ writer: datasets are extended ahead, `committed` follows the data, and the name without
.part appears last. Before HDF5 writes anything, the room for it is reserved in the file, so that a
full disk is met by us and not in the middle of HDF5's own structures.
"""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np

from .column import CHUNK_BYTES, Column, Kind
from .errors import RecordError
from .schema import LayerFacts, ModelInfo, SequencePlan

HELD_BYTES = 64 << 20  # bytes held back at most between commits, all columns together
METADATA_MARGIN = 512 << 10  # room that is always reserved for HDF5's own structures
METADATA_PER_COLUMN = 8 << 10


def layer_kinds(model: ModelInfo) -> dict[str, Kind]:
    """The datasets of a layer group, by name."""
    hq, hkv = model.n_q_heads, model.n_kv_heads
    out = "<f2" if model.exact else "<f4"
    return {
        "q": Kind("query", "<f2", (hq, model.head_dim)),
        "k": Kind("position", "<f2", (hkv, model.head_dim)),
        "v": Kind("position", "<f2", (hkv, model.value_dim)),
        "o": Kind("query", out, (hq, model.value_dim)),
        "lse": Kind("query", "<f4", (hq,)),
        "value_norm": Kind("position", "<f4", (hq,), low=0),
        "residual_norm": Kind("position", "<f4", (), low=0),
        "image_score": Kind("position", "<f4", ()),
        "retention": Kind("position", "<f4", (hkv,), high=0),
    }


def sequence_kinds(model: ModelInfo) -> dict[str, Kind]:
    """The datasets of a sequence group, by name."""
    return {
        "tokens": Kind("position", "<i4", (), low=0, high=model.vocab_size - 1),
        "confidence": Kind("logit", "<f4", (4,), infinite=True),
        "logits": Kind("logit", "<f4", (model.logit_size,), infinite=True),
        "residual_final": Kind("logit", "<f2" if model.exact else "<f4", (model.hidden_size,)),
    }


class _Sequence:
    def __init__(self, group: h5py.Group, plan: SequencePlan, where: str) -> None:
        self.group, self.plan, self.where = group, plan, where
        self.capacity = max(plan.capacity, plan.n_prompt)
        self.columns: dict[str, Column] = {}
        self.layers: set[int] = set()
        self.committed = 0
        self.open = True


class TraceWriter:
    """Writes `path`.part and renames it in finish(). Sequences may be written side by side. Every
    method raises RecordError, one line that names the file; after one, only close() is useful."""

    def __init__(self, path: str | os.PathLike[str], model: ModelInfo, producer: str) -> None:
        self.path = Path(path)
        self.part = self.path.with_name(self.path.name + ".part")
        self.model = model
        self._layer_kinds, self._sequence_kinds = layer_kinds(model), sequence_kinds(model)
        self._sequences: list[_Sequence] = []
        self._new_columns = 0
        self._held = 0
        self._facts: LayerFacts | None = None
        self._file: h5py.File | None = None
        try:
            model.check(str(self.part))
        except ValueError as error:
            raise RecordError(str(error)) from error
        self._lock = self._open_lock()
        try:
            self._reserve(METADATA_MARGIN)
            self._file = h5py.File(
                self.part, "w", libver=("earliest", "v110"), locking=False, rdcc_nbytes=0
            )
            self._reserve(METADATA_MARGIN)
            self._write_header(producer)
            self._flush()
        except OSError as error:
            raise self._disk_error("cannot be written", error) from error
        except BaseException:
            self.close()
            raise

    # -- structure

    def _open_lock(self) -> int:
        try:
            lock = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RecordError(f"{self.part}: cannot create the file: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise RecordError(f"{self.part}: another process is writing this file") from error
        except OSError:
            pass  # a file system without locks
        return lock

    def _write_header(self, producer: str) -> None:
        assert self._file is not None
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._file.attrs.update(
            format="kvtrace",
            version=np.uint32(1),
            complete=np.uint8(0),
            producer=producer,
            created=now,
        )
        model, group = self.model, self._file.create_group("model")
        group.attrs.update(
            name=model.name,
            architecture=model.architecture,
            rope=model.rope,
            key_rotation=model.key_rotation,
            softmax_scale=np.float64(model.softmax_scale),
        )
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
            group.attrs[name] = np.int32(getattr(model, name))
        if model.rope_dim is not None:
            group.attrs["rope_dim"] = np.int32(model.rope_dim)
        if model.score_softcap:
            group.attrs["score_softcap"] = np.float64(model.score_softcap)
        for name in ("compute_dtype", "cache_dtype"):
            if getattr(model, name):
                group.attrs[name] = getattr(model, name)
        if model.rope_inv_freq is not None:
            group["rope_inv_freq"] = np.asarray(model.rope_inv_freq, dtype="<f8")
        self._file.create_group("sequences")

    def put_facts(self, facts: LayerFacts) -> None:
        """Layers, windows, sinks and output projections; before the first commit."""
        assert self._file is not None and self._facts is None
        self._facts = facts
        group = self._file["model"]
        try:
            self._reserve(METADATA_MARGIN + sum(2 * w.size for w in facts.wo.values()))
            group["layers"] = np.asarray(facts.layers, dtype="<i4")
            group["window"] = np.asarray(facts.window, dtype="<i4")
            if facts.sinks is not None:
                group["sinks"] = np.asarray(facts.sinks, dtype="<f4")
            for layer, weights in facts.wo.items():
                with np.errstate(over="ignore"):
                    narrow = np.asarray(weights, dtype="<f2")
                if not np.isfinite(narrow).all():
                    raise RecordError(
                        f"{self.part}: model/wo/{layer}: a weight beyond {65504} or "
                        "not finite; the trace stores 16 bits"
                    )
                group[f"wo/{layer}"] = narrow
        except OSError as error:
            raise self._disk_error("cannot write the model", error) from error

    def put_windows(self, window: Sequence[int]) -> None:
        """Windows that have shown themselves only later than put_facts()."""
        assert self._file is not None and self._facts is not None
        try:
            self._file["model/window"][:] = np.asarray(window, dtype="<i4")
        except OSError as error:
            raise self._disk_error("cannot write the model", error) from error

    def put_retention_gate(self, weights: Mapping[str, np.ndarray]) -> None:
        """Weights of the gate that gives `retention`, each under its checkpoint's name."""
        assert self._file is not None
        try:
            self._reserve(METADATA_MARGIN + sum(4 * w.size for w in weights.values()))
            for name, values in weights.items():
                self._file[f"model/retention_gate/{name}"] = np.asarray(values, dtype="<f4")
        except OSError as error:
            raise self._disk_error("cannot write the retention gate", error) from error

    def begin_sequence(self, plan: SequencePlan) -> int:
        """-> its number."""
        assert self._file is not None
        number = len(self._sequences)
        where = f"{self.part}: sequences/{number}"
        self._check_plan(plan, where)
        try:
            self._reserve(METADATA_MARGIN + 8 * plan.capacity)
            group = self._file.create_group(f"sequences/{number}")
            one = _Sequence(group, plan, where)
            group.attrs.update(
                n_prompt=np.uint64(plan.n_prompt),
                n_tokens=np.uint64(one.capacity),
                committed=np.uint64(0),
                source=plan.source,
            )
            for name in ("name", "task"):
                if getattr(plan, name):
                    group.attrs[name] = getattr(plan, name)
            if plan.temperature is not None:
                group.attrs["temperature"] = np.float64(plan.temperature)
            if plan.seed is not None:
                group.attrs["seed"] = np.int64(plan.seed)
            group.create_dataset(
                "logit_pos", data=self._logit_pos(one), maxshape=(None,), chunks=(CHUNK_BYTES // 4,)
            )
            for name, ranges in plan.spans.items():
                group[f"spans/{name}"] = np.asarray(ranges, dtype="<i4").reshape(-1, 2)
            if plan.chunks:
                group["chunks"] = np.asarray(plan.chunks, dtype="<i4").reshape(-1, 2)
            group.create_group("layers")
        except OSError as error:
            raise self._disk_error("cannot begin a sequence", error) from error
        self._sequences.append(one)
        return number

    def _check_plan(self, plan: SequencePlan, where: str) -> None:
        if plan.n_prompt < 1:
            raise RecordError(f"{where}: a prompt of {plan.n_prompt} tokens, expected at least 1")
        if not 0 <= plan.first_row < plan.n_prompt:
            raise RecordError(
                f"{where}: first_row {plan.first_row}, expected 0 .. {plan.n_prompt - 1}"
            )
        named = [(f"span {name}", r) for name, ranges in plan.spans.items() for r in ranges]
        named += [("chunk", r) for r in plan.chunks]
        for what, (begin, end) in named:
            limit = plan.n_prompt if what == "chunk" else None
            if not 0 <= begin < end or (limit is not None and end > limit):
                raise RecordError(
                    f"{where}: {what} {begin} .. {end}, expected a half-open range "
                    f"of positions{'' if limit is None else f' up to {limit}'}"
                )

    @staticmethod
    def _logit_pos(one: _Sequence) -> np.ndarray:
        return np.arange(one.plan.n_prompt - 1, one.capacity, dtype="<i4")

    # -- rows

    def append(
        self, sequence: int, name: str, first: int, rows: np.ndarray, layer: int | None = None
    ) -> None:
        """Rows of the positions first, first + 1, ... of one dataset. The first call creates it.
        float32 rows of a 16-bit dataset are narrowed; a value beyond its range is an error."""
        one = self._sequences[sequence]
        full = name if layer is None else f"layers/{layer}/{name}"
        try:
            column = one.columns.get(full) or self._create(one, full, name, layer)
            if column.kind.dtype == "<f2" and rows.dtype != np.float16:
                with np.errstate(over="ignore"):
                    rows = rows.astype("<f2")
            before = column.pending_bytes
            column.append(first, rows)
            self._held += column.pending_bytes - before
            if self._held >= HELD_BYTES:
                self._write(self._pending())
        except OSError as error:
            raise self._disk_error(f"at position {first}", error) from error

    def next_position(self, sequence: int, name: str, layer: int | None = None) -> int:
        """The position whose row append() expects next."""
        full = name if layer is None else f"layers/{layer}/{name}"
        return self._sequences[sequence].columns[full].next_position

    def put_column_sum(self, sequence: int, layer: int, sums: np.ndarray) -> None:
        """[n_q_heads, n_prompt], once, after the prompt."""
        one = self._sequences[sequence]
        try:
            self._reserve(METADATA_MARGIN + 4 * sums.size)
            one.group[f"layers/{layer}/column_sum"] = np.asarray(sums, dtype="<f4")
        except OSError as error:
            raise self._disk_error("at the end of the prompt", error) from error

    def _create(self, one: _Sequence, full: str, name: str, layer: int | None) -> Column:
        kind = (self._sequence_kinds if layer is None else self._layer_kinds)[name]
        skip = {"position": 0, "query": one.plan.first_row, "logit": one.plan.n_prompt - 1}
        self._new_columns += 1
        if layer is not None and layer not in one.layers:
            one.layers.add(layer)
            group = one.group.create_group(f"layers/{layer}")
            if one.plan.first_row:
                group.attrs["first_row"] = np.uint64(one.plan.first_row)
        column = Column(one.group, full, kind, skip[kind.axis], one.capacity, f"{one.where}/{full}")
        one.columns[full] = column
        return column

    def _grow(self, one: _Sequence, needed: int) -> None:
        if needed <= one.capacity:
            return
        one.capacity = max(needed, one.capacity + one.capacity // 2, one.capacity + 256)
        for column in one.columns.values():
            column.extend(one.capacity)
        data = one.group["logit_pos"]
        data.resize(one.capacity - one.plan.n_prompt + 1, axis=0)
        data[:] = self._logit_pos(one)
        one.group.attrs.modify("n_tokens", np.uint64(one.capacity))

    def _pending(self) -> list[tuple[_Sequence, Column]]:
        return [(one, c) for one in self._sequences for c in one.columns.values() if c.pending_rows]

    def _write(self, columns: list[tuple[_Sequence, Column]]) -> None:
        needed = sum(column.new_bytes() for _, column in columns)
        needed += METADATA_PER_COLUMN * self._new_columns + METADATA_MARGIN
        self._reserve(needed)
        self._new_columns = self._held = 0
        for one, column in columns:
            self._grow(one, column.next_position)
            column.write()

    # -- commits

    def commit(self, positions: Mapping[int, int]) -> None:
        """Positions [0, n) of these sequences are whole in every dataset: writes what is held back,
        flushes, then writes `committed`, and flushes again."""
        if self._facts is None:
            raise RecordError(f"{self.part}: a commit before the layers are known")
        try:
            self._write(self._pending())
            for number, n in positions.items():
                self._check_whole(self._sequences[number], n)
            self._flush()
            for number, n in positions.items():
                one = self._sequences[number]
                one.committed = n
                one.group.attrs.modify("committed", np.uint64(n))
            self._flush()
            self._reserve(METADATA_MARGIN)
        except OSError as error:
            raise self._disk_error(
                f"at position {max(positions.values(), default=0)}", error
            ) from error

    def _check_whole(self, one: _Sequence, n: int) -> None:
        assert self._facts is not None
        missing = set(self._facts.layers) - one.layers
        if missing:
            raise RecordError(f"{one.where}/layers/{min(missing)}: no rows, expected {n} positions")
        for column in one.columns.values():
            if column.next_position < n:
                raise RecordError(
                    f"{column.where}: rows up to position {column.next_position}, expected {n}"
                )

    def end_sequence(self, number: int, n_tokens: int) -> None:
        """The sequence has n_tokens positions; what came after them is cut off."""
        one = self._sequences[number]
        if n_tokens < one.plan.n_prompt:
            raise RecordError(
                f"{one.where}: {n_tokens} positions, expected the whole prompt of "
                f"{one.plan.n_prompt}"
            )
        for name, ranges in one.plan.spans.items():
            for begin, end in ranges:
                if end > n_tokens:
                    raise RecordError(
                        f"{one.where}/spans/{name}: {begin} .. {end}, but the "
                        f"sequence has {n_tokens} positions"
                    )
        self.commit({number: n_tokens})
        try:
            one.capacity = n_tokens
            for column in one.columns.values():
                column.cut(n_tokens)
            one.group["logit_pos"].resize(n_tokens - one.plan.n_prompt + 1, axis=0)
            one.group.attrs.modify("n_tokens", np.uint64(n_tokens))
            one.group.attrs.modify("committed", np.uint64(n_tokens))
            self._flush()
        except OSError as error:
            raise self._disk_error("at the end of a sequence", error) from error
        one.committed, one.open = n_tokens, False

    def finish(self) -> None:
        """complete = 1, close, fsync, rename, fsync of the folder."""
        assert self._file is not None
        if not self._sequences:
            raise RecordError(f"{self.part}: no sequence was recorded")
        if any(one.open for one in self._sequences):
            raise RecordError(f"{self.part}: a sequence has not ended")
        try:
            self._file.attrs.modify("complete", np.uint8(1))
            self._flush()
            self._file.close()
            self._file = None
            self._drop_reserve()
            os.fsync(self._lock)
            os.replace(self.part, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._disk_error("cannot be finished", error) from error
        self.close()

    def close(self) -> None:
        """Without finish(): leaves the .part as it was committed last. Never raises."""
        if self._file is not None:
            try:
                self._file.close()
            except Exception:  # HDF5 gives what it likes for a disk that has no room left
                pass
            self._file = None
            try:
                self._drop_reserve()
            except OSError:
                pass
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def discard(self) -> None:
        """close(), and no file is left."""
        self.close()
        self.part.unlink(missing_ok=True)

    @property
    def committed(self) -> list[int]:
        """Whole positions of each sequence."""
        return [one.committed for one in self._sequences]

    # -- the disk

    def _flush(self) -> None:
        assert self._file is not None
        self._file.flush()

    def _reserve(self, count: int) -> None:
        """Room for `count` more bytes behind what HDF5 has allocated, or OSError."""
        end = self._file.id.get_filesize() if self._file is not None else 0
        os.posix_fallocate(self._lock, end, count)

    def _drop_reserve(self) -> None:
        """Cuts the file to the end that its own superblock (version 0) names at byte 40."""
        head = os.pread(self._lock, 48, 0)
        if len(head) == 48 and head[:8] == b"\x89HDF\r\n\x1a\n" and head[8] == 0:
            end = int.from_bytes(head[40:48], "little")
            if 48 < end < os.fstat(self._lock).st_size:
                os.ftruncate(self._lock, end)

    def _disk_error(self, when: str, error: OSError) -> RecordError:
        reason = error.strerror or str(error).splitlines()[0]
        hint = ""
        if any(one.committed for one in self._sequences):
            hint = (
                f"; positions committed: {', '.join(map(str, self.committed))} "
                f"(kvreplay inspect {self.part} --recover)"
            )
        self.close()
        return RecordError(f"{self.part}: {when}: {reason}{hint}")
