"""The way to the host: the same code for a device, with a lane whose copies finish late."""

import contextlib
import threading
import time
import unittest
from unittest import mock

import numpy as np
import torch

from support import Case, configs, make_ids, make_model, read

from kvtrace.options import RecordOptions
from kvtrace.recording import Recording
from kvtrace.transfer import CudaLane, Transfer


class LateLane:
    """Copies later and in another thread, as a side stream does. Until then the buffer holds
    rubbish; the source is read only when the copy runs."""

    pinned = False

    def __init__(self, delay: float) -> None:
        self.delay, self.copies = delay, 0

    def copy(self, to: torch.Tensor, source: torch.Tensor):
        self.copies += 1
        to.view(-1).view(torch.uint8).fill_(0xAB)
        done = threading.Event()

        def run() -> None:
            time.sleep(self.delay)
            to.copy_(source)
            done.set()

        threading.Thread(target=run).start()

        class Event:
            @staticmethod
            def synchronize() -> None:
                done.wait()

        return Event()


def nothing() -> None:
    pass


class TransferTest(Case):
    def test_a_buffer_is_whole_before_it_is_read_and_free_before_it_is_used_again(self) -> None:
        lane = LateLane(0.02)
        transfer = Transfer(torch.device("cpu"), 1 << 14, lane)
        under_way = []
        for i in range(6):
            copy = transfer.send(torch.full((1000,), float(i)), nothing)
            under_way.append((i, copy))
            if len(under_way) == 2:  # as a writer thread would
                value, first = under_way.pop(0)
                np.testing.assert_array_equal(first.array(), np.full(1000, value, "f4"))
                first.release()
        self.assertLessEqual(transfer.pool.peak, 1 << 14)

    def test_back_pressure(self) -> None:
        transfer = Transfer(torch.device("cpu"), 1 << 14)
        held = [transfer.send(torch.zeros(1 << 12, dtype=torch.uint8), nothing) for _ in range(4)]
        threading.Timer(0.3, held[0].release).start()
        start = time.perf_counter()
        transfer.send(torch.zeros(1 << 12, dtype=torch.uint8), nothing)
        self.assertGreater(time.perf_counter() - start, 0.1)
        self.assertGreater(transfer.pool.waited, 0.1)

        def broken() -> None:
            raise OSError("the writer has stopped")

        with self.assertRaisesRegex(OSError, "has stopped"):
            transfer.send(torch.zeros(1 << 12, dtype=torch.uint8), broken)

    def test_the_side_stream_is_used_in_the_right_order(self) -> None:
        """The calls of the lane for CUDA, with torch.cuda stood in for: no GPU is needed."""
        calls: list[str] = []

        class Stream:
            def __init__(self, device: object) -> None:
                calls.append("new stream")

            def wait_stream(self, other: object) -> None:
                calls.append(f"wait for {other}")

        class Event:
            def record(self, stream: Stream) -> None:
                calls.append(f"event on {type(stream).__name__}")

            def synchronize(self) -> None:
                calls.append("synchronize")

        @contextlib.contextmanager
        def stream(which: Stream):
            calls.append("enter")
            yield
            calls.append("leave")

        class Source(torch.Tensor):
            def record_stream(self, which: Stream) -> None:
                calls.append(f"kept for {type(which).__name__}")

        stands = dict(
            Stream=Stream, Event=Event, stream=stream, current_stream=lambda device: "the model"
        )
        with mock.patch.multiple(torch.cuda, **stands):
            lane, to = CudaLane(), torch.zeros(4)
            for value in (1.0, 2.0):
                event = lane.copy(to, torch.full((4,), value).as_subclass(Source))
                event.synchronize()
                self.assertEqual(to.tolist(), [value] * 4)
        once = ["wait for the model", "enter", "event on Stream", "leave", "kept for Stream"]
        self.assertEqual(calls, ["new stream", *once, "synchronize", *once, "synchronize"])

    def test_one_piece_larger_than_the_limit_passes(self) -> None:
        transfer = Transfer(torch.device("cpu"), 1 << 12)
        copy = transfer.send(torch.arange(5000), nothing)
        np.testing.assert_array_equal(copy.array(), np.arange(5000))

    def test_a_recording_over_a_late_lane_is_the_same(self) -> None:
        model, ids = make_model(configs()["gemma3"]), make_ids(4, 200)
        found = []
        for lane, limit in ((None, 1 << 30), (LateLane(0.001), 1 << 20)):
            options = RecordOptions(
                quiet=True, extras=["residual"], logits="full", buffer_bytes=limit
            )
            with Recording(model, self.path, options, lane) as recording:
                with torch.no_grad():
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=6,
                        min_new_tokens=6,
                        do_sample=False,
                    )
            self.check()
            self.assertLessEqual(recording._transfer.pool.peak, limit)
            self.assertGreater(recording._transfer.bytes, 1 << 20)
            found.append([read(self.path, b) for b in range(4)])
        for one, other in zip(*found):
            self.assert_same(one, other, 1e-6)


if __name__ == "__main__":
    unittest.main()
