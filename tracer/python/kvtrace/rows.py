"""One layer's rows of one pass: checked, completed with what the call does not say, and sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from .attention import Scores, attend, mask_faults, output_error, rows_at_once, value_norm
from .errors import RecordError
from .layers import LayerBook
from .options import OBSERVATION_ROWS, AttentionCall, RecordOptions
from .passes import Batch, Pass, clip
from .session import Field, HostSession

Ship = Callable[[torch.Tensor, Callable[[np.ndarray], None]], None]
MASKED = ("eager", "sdpa")  # paths whose window is in the mask alone
BLOCK_BYTES = 16 << 20  # packed rows that are sent at once

Piece = tuple[str, torch.Tensor, torch.dtype]  # name, [batch, n, ...], stored type


def block_bytes(options: RecordOptions) -> int:
    """Bytes that are sent at once: several blocks fit into the buffers."""
    return min(BLOCK_BYTES, options.buffer_bytes // 4)


def pack(pieces: Sequence[Piece]) -> tuple[torch.Tensor, list[Field]]:
    """Datasets side by side, so that a pass costs one copy: [batch, n, words] int16 and what lies
    where."""
    columns, fields, at = [], [], 0
    for name, values, dtype in pieces:
        tail = tuple(values.shape[2:])
        words = values.to(dtype).reshape(*values.shape[:2], -1).contiguous().view(torch.int16)
        fields.append(
            Field(name, at, words.shape[2], "<f2" if dtype == torch.float16 else "<f4", tail)
        )
        columns.append(words)
        at += words.shape[2]
    return torch.cat(columns, dim=2), fields


def check_keys(
    layer: int, how: Scores, q: torch.Tensor, k: torch.Tensor, batch: Batch, one: Pass
) -> None:
    total, keys, n = batch.fed + one.n, k.shape[2], q.shape[2]
    if n != one.n or q.shape[0] != batch.size:
        raise RecordError(
            f"layer {layer}: attends with {q.shape[0]} x {n} queries in a pass of "
            f"{batch.size} x {one.n} tokens"
        )
    least = min(total, how.window - 1 + n) if how.window else total
    if not least <= keys <= total:
        raise RecordError(
            f"layer {layer}: meets {keys} keys where {total} positions were fed: "
            "static caches, cache prefixes and compressed caches cannot be "
            "recorded; use the default cache"
        )


def check_mask(
    layer: int,
    how: Scores,
    module: nn.Module,
    k: torch.Tensor,
    mask: Any,
    implementation: str,
    kwargs: dict[str, Any],
    batch: Batch,
    one: Pass,
) -> None:
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        faults = mask_faults(mask, batch.fed, how.window, batch.begin_tensor, one.ends(batch))
        one.faults.append(faults.to(one.ids.device))
        one.fault_layers.append(layer)
        return
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None and one.n > 1 and (implementation == "eager" or not causal):
        raise RecordError(
            f"layer {layer}: attends in both directions; only causal attention can be recorded"
        )
    if mask is None and implementation in MASKED and how.window and k.shape[2] > how.window:
        raise RecordError(
            f"layer {layer}: has a window of {how.window}, but {implementation} was "
            f"given {k.shape[2]} keys and no mask"
        )


def check_outputs(
    layer: int,
    how: Scores,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    batch: Batch,
    one: Pass,
) -> None:
    """Compares the path's output of a prompt pass's last row with what the trace says. A path that
    scales or biases its scores on its own is found out here; rounding is far below the limit."""
    if one.n == 1:
        return
    low = max(0, k.shape[2] - how.window) if how.window else 0
    block = attend(
        q[:, :, -1:],
        k[:, :, low:],
        v[:, :, low:],
        how,
        batch.fed + one.n - 1,
        batch.begin_tensor,
    )
    assert block.o is not None
    ends = one.ends(batch)
    real = None if ends is None else ends == batch.fed + one.n
    one.errors.append(output_error(out[:, -1:], block.o, v, real).to(one.ids.device))
    one.error_layers.append(layer)


class RowSender:
    """Gives every row of a layer to the session, block by block, through `ship`."""

    def __init__(
        self, book: LayerBook, options: RecordOptions, session: HostSession, ship: Ship
    ) -> None:
        self.book, self.options = book, options
        self._session, self._ship = session, ship
        self._block = block_bytes(options)

    def send(
        self,
        layer: int,
        how: Scores,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        batch: Batch,
        one: Pass,
    ) -> None:
        """The pass's rows of one layer, block by block."""
        info = self.book.info
        assert info is not None
        n, keys = one.n, k.shape[2]
        new_k, new_v = k[:, :, keys - n :], v[:, :, keys - n :]
        extras = self._extra_rows(layer, q, new_k, new_v, one)
        width = 2 * (
            q.shape[1] * (q.shape[3] + v.shape[3]) + k.shape[1] * (k.shape[3] + v.shape[3])
        )
        step = min(
            n,
            max(1, self._block // (width * batch.size)),
            rows_at_once(batch.size, q.shape[1], min(keys, how.window or keys), q.device),
        )
        first_query = batch.first_query(OBSERVATION_ROWS) if self.options.rows == "decode" else 0
        for at in range(0, n, step):
            end = min(n, at + step)
            pieces: list[Piece] = [
                ("k", new_k[:, :, at:end].transpose(1, 2), torch.float16),
                ("v", new_v[:, :, at:end].transpose(1, 2), torch.float16),
            ]
            pieces += self._attended(
                layer, how, q, k, v, out, at, end, batch, batch.fed + end > first_query
            )
            pieces += [(name, values[:, at:end], torch.float32) for name, values in extras]
            packed, fields = pack(pieces)
            places = clip(one.places, at, end)
            self._ship(
                packed, partial(self._session.packed, fields=fields, places=places, layer=layer)
            )

    def _attended(
        self,
        layer: int,
        how: Scores,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        at: int,
        end: int,
        batch: Batch,
        wanted: bool,
    ) -> list[Piece]:
        """q, o and lse of rows at .. end - 1; o is the model's own where it is float32."""
        info, first, n = self.book.info, batch.fed + at, q.shape[2]
        assert info is not None
        sums = self._sums(layer, q, batch) if self.options.rows == "decode" else None
        if not wanted and sums is None:
            return []
        last = k.shape[2] - (n - end)  # keys up to the last row of the block
        low = max(0, last - (end - at) - how.window + 1) if how.window else 0
        own = out.dtype == torch.float32 and q.dtype == torch.float32
        counted = batch.counted(first, end - at) if sums is not None else None
        block = attend(
            q[:, :, at:end],
            k[:, :, low:last],
            v[:, :, low:last] if wanted and not own else None,
            how,
            first,
            batch.begin_tensor,
            sums,
            counted,
        )
        if not wanted:
            return []
        o = out[:, at:end] if own else block.o
        assert o is not None
        return [
            ("q", q[:, :, at:end].transpose(1, 2), torch.float16),
            ("o", o, torch.float16 if info.exact else torch.float32),
            ("lse", block.lse, torch.float32),
        ]

    def _sums(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        if batch.prompt_over:
            return None
        if layer not in batch.column_sums:
            batch.column_sums[layer] = torch.zeros(
                batch.size, q.shape[1], max(batch.ends), device=q.device
            )
        return batch.column_sums[layer]

    def _extra_rows(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, one: Pass
    ) -> list[tuple[str, torch.Tensor]]:
        extras = []
        if "value_norm" in self.options.extras:
            stored = v.to(torch.float16).float()
            extras.append(("value_norm", value_norm(stored, self.book.wo(layer))))
        if self.options.retention is not None:
            call = AttentionCall(layer, self.book.attention[layer], one.hidden.get(layer), q, k, v)
            beta = self.options.retention(call)
            expected = (q.shape[0], one.n, k.shape[1])
            if tuple(beta.shape) != expected:
                raise RecordError(
                    f"retention: layer {layer}: shape {list(beta.shape)}, expected "
                    f"[batch, positions, kv heads] = {list(expected)}"
                )
            extras.append(("retention", beta))
        return extras
