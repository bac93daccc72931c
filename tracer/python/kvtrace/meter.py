"""What recording costs, measured while recording."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Meter:
    """Sums the time of the recorder's own work in the model's thread and on its device."""

    def __init__(self, cuda: bool) -> None:
        self.host = 0.0
        self._cuda = cuda
        self._device = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def span(self) -> Iterator[None]:
        start = time.perf_counter()
        if self._cuda:
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
        try:
            yield
        finally:
            if self._cuda:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                self._events.append((begin, end))
                self._collect(wait=False)
            self.host += time.perf_counter() - start

    def _collect(self, wait: bool) -> None:
        while self._events and (wait or self._events[0][1].query()):
            begin, end = self._events.popleft()
            end.synchronize()
            self._device += begin.elapsed_time(end) / 1000

    def seconds(self) -> float:
        """What the passes would have been faster by. On a device the host's work hides behind the
        device's or the other way round: the longer one counts."""
        self._collect(wait=True)
        return max(self.host, self._device)


@dataclass
class Summary:
    """A finished recording. `seconds` are those of the passes, `overhead` the part of them that
    recording took, `waited` the part of that spent waiting for buffers."""

    path: str
    sequences: int = 0
    positions: int = 0
    bytes: int = 0
    seconds: float = 0.0
    overhead: float = 0.0
    waited: float = 0.0
    baseline: float | None = None  # seconds of the same passes without recording, where measured

    def text(self) -> str:
        rate = self.positions / self.seconds if self.seconds else 0.0
        without = self.baseline if self.baseline is not None else self.seconds - self.overhead
        how = "measured" if self.baseline is not None else "estimated"
        other = f"{self.positions / without:.1f}" if without > 0 else "-"
        sequences = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        return (
            f"{self.path}: {sequences}, {self.positions} positions, "
            f"{self.bytes / 2**20:.1f} MiB; {rate:.1f} tokens/s with recording, {other} without "
            f"({how}; {self.waited:.2f} s waiting for the disk)"
        )
