"""The writer thread: work is done there in the order it was given."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .errors import RecordError


class Conveyor:
    """put() hands over a piece of work and returns at once; press() has the thread begin, once a
    pass: woken for every piece it would take the interpreter from the model's thread in the midst
    of a pass. What bounds memory is the pool that the work's buffers come from (see transfer.py).
    The first exception is kept and raised by the next put(), check() or close(); work after it is
    given to `drop`, so that its buffers return."""

    def __init__(self) -> None:
        self._work: deque[tuple[Callable[[], None], Callable[[], None] | None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvtrace-writer", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], drop: Callable[[], None] | None = None) -> None:
        self.check()
        with self._changed:
            if self._closing:
                raise RecordError("the recording has ended")
            self._work.append((work, drop))

    def press(self) -> None:
        """Wakes the thread. Also for who waits for a buffer to come back; raises as check()."""
        with self._changed:
            self._changed.notify()
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Waits until all is done."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.check()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._work and not self._closing:
                    self._changed.wait()
                if not self._work:
                    return
                work, drop = self._work.popleft()
            try:
                if self._error is None:
                    work()
                    continue
            except BaseException as error:  # told to the recording thread
                self._error = error
            if drop is not None:
                drop()
