"""What the attention call does not say itself: log-sum-exp, exact outputs, mass per column, and
whether the mask was what the trace will claim. All shapes [batch, heads, positions, channels].

A query at padded position t sees keys j with begin[b] <= j <= t, and j > t - window where there is
a window. Scores are scale * q.k, soft-capped as cap * tanh(s / cap); a learned sink is one more
score in the denominator. The sums are float32 or wider whatever the model's type.
"""

from __future__ import annotations

from contextlib import contextmanager
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SCORE_FLOATS = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores held at once
KEY_BLOCK = 4096  # keys widened at once


@dataclass
class Scores:
    """How queries meet keys in one layer."""

    scale: float
    window: int = 0  # 0 = global
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # [query heads]
    stored: bool = False  # q, k, v count as the 16-bit values that the trace stores

    def widen(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float16).float() if self.stored else x.float()


@dataclass
class Block:
    """What rows of one pass attended to."""

    o: torch.Tensor | None  # [batch, n, query heads, value_dim] float32
    lse: torch.Tensor  # [batch, n, query heads] float32


@contextmanager
def exact_sums() -> Iterator[None]:
    """float32 products are float32: no TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rows_at_once(batch: int, heads: int, keys: int, device: torch.device) -> int:
    """Query rows whose scores are held at once."""
    return max(1, SCORE_FLOATS.get(device.type, 1 << 24) // max(1, batch * heads * keys))


def visible(
    t: torch.Tensor, first_key: int, keys: int, window: int, begin: torch.Tensor | None
) -> torch.Tensor:
    """t [rows]: padded positions of queries; `begin` [batch]: of the first key of each sequence.
    -> [batch or 1, rows, keys] bool, on the device of t."""
    rows, j = t[:, None], torch.arange(first_key, first_key + keys, device=t.device)[None, :]
    seen = j <= rows
    if window:
        seen &= j > rows - window
    if begin is None:
        return seen[None]
    return seen[None] & (j[None] >= begin.to(t.device)[:, None, None])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    how: Scores,
    first: int,
    begin: torch.Tensor | None,
    column_sum: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
) -> Block:
    """q: rows from padded position `first` on; k (and v, for o) reach up to the last of them.
    `column_sum` [batch, query heads, columns] float32 gathers the probabilities of the rows
    `counted` [batch, n] by the padded position of the key."""
    batch, heads, n, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    first_key = first + n - keys
    # A single row without padding sees every key that it is given: the caller has cut the window.
    all_seen = n == 1 and begin is None and (not how.window or keys <= how.window)
    wide = how.widen(q).reshape(batch, kv_heads, group * n, -1)
    scores = torch.empty(batch, kv_heads, group * n, keys, device=q.device, dtype=torch.float32)
    for at in range(0, keys, KEY_BLOCK):
        part = how.widen(k[:, :, at : at + KEY_BLOCK])
        scores[..., at : at + part.shape[2]] = torch.matmul(wide, part.transpose(2, 3))
    scores = scores.view(batch, kv_heads, group, n, keys).mul_(how.scale)
    if how.softcap:
        scores = scores.div_(how.softcap).tanh_().mul_(how.softcap)
    if not all_seen:
        t = torch.arange(first, first + n, device=q.device)
        seen = visible(t, first_key, keys, how.window, begin)
        scores.masked_fill_(~seen[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [batch, kv_heads, group, n]
    if how.sinks is not None:
        lse = torch.logaddexp(lse, how.sinks.to(lse).view(1, kv_heads, group, 1))
    o = None
    if v is not None or column_sum is not None:
        p = scores.sub_(lse[..., None]).exp_()
        if begin is not None:
            p.nan_to_num_(0.0)  # rows of padding see nothing
        if column_sum is not None and counted is not None:
            sums = (
                (p * counted.to(p.device)[:, None, None, :, None])
                .sum(3)
                .reshape(batch, heads, keys)
            )
            end = min(first_key + keys, column_sum.shape[2])
            column_sum[:, :, first_key:end] += sums[..., : max(0, end - first_key)]
        if v is not None:
            o = _weigh(p.view(batch, kv_heads, group * n, keys), v, how)
            o = o.view(batch, heads, n, -1).transpose(1, 2)
    return Block(o, lse.reshape(batch, heads, n).transpose(1, 2))


def _weigh(p: torch.Tensor, v: torch.Tensor, how: Scores) -> torch.Tensor:
    total = torch.zeros(*p.shape[:3], v.shape[3], device=v.device, dtype=torch.float32)
    for at in range(0, v.shape[2], KEY_BLOCK):
        part = how.widen(v[:, :, at : at + KEY_BLOCK])
        total += torch.matmul(p[..., at : at + part.shape[2]], part)
    return total


def value_norm(v: torch.Tensor, wo: torch.Tensor, rows: int = 64) -> torch.Tensor:
    """v [batch, kv heads, n, value_dim], wo [query heads, value_dim, hidden] -> [batch, n, query
    heads]: L1 norm of each value through each query head's slice of the output projection."""
    group = wo.shape[0] // v.shape[1]
    out = []
    for at in range(0, v.shape[2], rows):
        part = v[:, :, at : at + rows].float().repeat_interleave(group, dim=1)
        out.append(torch.matmul(part, wo.float()).abs().sum(-1).transpose(1, 2))
    return torch.cat(out, dim=1)


def confidence(logits: torch.Tensor, rows: int = 64) -> torch.Tensor:
    """[..., vocabulary] -> [..., 4] float32: entropy in nats, log-probability margin of the two
    most likely tokens, largest probability, log-sum-exp."""
    flat = logits.reshape(-1, logits.shape[-1])
    out = []
    for at in range(0, len(flat), rows):
        x = flat[at : at + rows].float()
        lse = torch.logsumexp(x, dim=-1)
        top = torch.topk(x, min(2, x.shape[-1]), dim=-1).values
        below = x - lse[:, None]
        weighted = below.exp() * below
        entropy = -torch.where(torch.isneginf(x), torch.zeros_like(x), weighted).sum(-1)
        second = top[:, 1] if top.shape[1] > 1 else torch.full_like(lse, -torch.inf)
        out.append(
            torch.stack(
                [entropy.clamp_min(0), top[:, 0] - second, (top[:, 0] - lse).exp(), lse], dim=-1
            )
        )
    return torch.cat(out).view(*logits.shape[:-1], 4)


def mask_faults(
    mask: torch.Tensor,
    first: int,
    window: int,
    begin: torch.Tensor | None,
    end: torch.Tensor | None = None,
    rows: int = 16,
) -> torch.Tensor:
    """Number of (row, key) pairs of a [batch, heads, n, keys] mask (bool, or added to the scores)
    that are not what the trace will say, over up to `rows` rows of the pass. Rows before `begin` or
    from `end` on [batch] are padding, and what they see does not matter. -> a scalar on the mask's
    device: nothing waits for it here."""
    n, keys = mask.shape[2], mask.shape[3]
    chosen = torch.arange(0, n, -(-n // rows), device=mask.device)
    if n > 1:
        chosen[-1] = n - 1
    part = mask[:, :1].index_select(2, chosen)[:, 0]
    expected = visible(first + chosen, first + n - keys, keys, window, begin)
    if part.dtype == torch.bool:
        wrong = part != expected
    else:  # 0 or nearly the lowest number; anything between would bias the scores
        lowest = torch.finfo(part.dtype).min / 2
        wrong = torch.where(expected, part != 0, part > lowest)
    if begin is not None:
        wrong &= ((first + chosen) >= begin.to(mask.device)[:, None])[:, :, None]
    if end is not None:
        wrong &= ((first + chosen) < end.to(mask.device)[:, None])[:, :, None]
    return wrong.sum()


def output_error(
    out: torch.Tensor, o: torch.Tensor, v: torch.Tensor, real: torch.Tensor | None
) -> torch.Tensor:
    """Largest difference between the path's outputs and ours, [batch, n, heads, value_dim] both, in
    units of the largest value; sequences that are not `real` [batch] here count nothing. -> a
    scalar on the device."""
    difference = (out.float() - o).abs().flatten(1).amax(1)
    if real is not None:
        difference = difference * real.to(difference.device)
    return difference.max() / v.abs().amax().float().clamp_min(1e-30)
