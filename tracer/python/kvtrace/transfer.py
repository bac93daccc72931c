"""Tensors to host memory without stopping the device: pinned buffers, side streams, back
pressure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch


class Event(Protocol):
    def synchronize(self) -> None: ...


class Lane(Protocol):
    """How bytes leave one kind of device."""

    pinned: bool

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Event:
        """Starts `to` = `source`; the source may be freed by its owner at once. The event is over
        when `to` is whole."""
        ...


class _Done:
    def synchronize(self) -> None:
        pass


class HostLane:
    """For tensors in host memory: the copy is done when copy() returns."""

    pinned = False

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Event:
        to.copy_(source)
        return _Done()


class CudaLane:
    """One side stream per device. The model's stream goes on while the copy runs."""

    pinned = True

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Event:
        side = self._streams.get(source.device)
        if side is None:
            side = self._streams[source.device] = torch.cuda.Stream(source.device)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            to.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        # The allocator must not give the source's memory away before the side stream has read it.
        source.record_stream(side)
        return event


class Pool:
    """Host buffers of at most `limit` bytes in all. take() waits until enough has come back: this
    is the back pressure. One buffer above the limit is given when nothing else is out."""

    def __init__(self, limit: int, pinned: bool) -> None:
        self.limit, self.pinned = limit, pinned
        self.waited = 0.0  # seconds in take()
        self.peak = 0  # bytes
        self._held = 0  # bytes allocated, given out or not
        self._out = 0  # buffers given out
        self._free: dict[int, list[torch.Tensor]] = {}
        self._changed = threading.Condition()

    def take(self, count: int, alive: Callable[[], None]) -> torch.Tensor:
        """A uint8 buffer of at least `count` bytes. `alive` is called while waiting and raises when
        no buffer will ever return."""
        size = 1 << max(12, (count - 1).bit_length())
        with self._changed:
            start = time.perf_counter()
            while True:
                if self._free.get(size):
                    self._out += 1
                    return self._free[size].pop()
                if self._held + size > self.limit:
                    self._drop_free()
                if self._held + size <= self.limit or self._out == 0:
                    break
                alive()
                self._changed.wait(0.2)
                self.waited += time.perf_counter() - start
                start = time.perf_counter()
            self._held += size
            self._out += 1
            self.peak = max(self.peak, self._held)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)

    def give(self, buffer: torch.Tensor) -> None:
        with self._changed:
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._out -= 1
            self._changed.notify()

    def _drop_free(self) -> None:
        for size, buffers in self._free.items():
            self._held -= size * len(buffers)
        self._free.clear()


class HostCopy:
    """A tensor on its way. array() waits for it; release() gives its buffer back."""

    def __init__(self, pool: Pool, buffer: torch.Tensor, view: torch.Tensor, event: Event) -> None:
        self._pool, self._buffer, self._view, self._event = pool, buffer, view, event

    def array(self) -> np.ndarray:
        """Valid until release()."""
        self._event.synchronize()
        return self._view.numpy()

    def release(self) -> None:
        """Also where array() was never called: a buffer must not be given on while it is
        written."""
        self._event.synchronize()
        self._pool.give(self._buffer)


class Transfer:
    """Starts copies to the host. `limit` bounds the bytes under way; `lane` is chosen by device
    where it is not given (tests give one)."""

    def __init__(self, device: torch.device, limit: int, lane: Lane | None = None) -> None:
        self.lane: Lane = lane or (CudaLane() if device.type == "cuda" else HostLane())
        self.pool = Pool(limit, self.lane.pinned)
        self.bytes = 0

    def send(self, source: torch.Tensor, alive: Callable[[], None]) -> HostCopy:
        source = source.detach().contiguous()
        count = source.numel() * source.element_size()
        buffer = self.pool.take(max(count, 1), alive)
        view = buffer[:count].view(source.dtype).view(source.shape)
        # A model spread over devices may keep some layers on the host.
        lane = self.lane if source.device.type != "cpu" or not self.lane.pinned else HostLane()
        self.bytes += count
        return HostCopy(self.pool, buffer, view, lane.copy(view, source))
