"""The part of the recorder that needs no torch: file, rows, commits, the disk, the writer
thread."""

import os
import resource
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import numpy as np

from kvtrace import LayerFacts, ModelInfo, RecordError, SequencePlan, TraceWriter
from kvtrace.conveyor import Conveyor
from kvtrace.session import Field, HostSession, Place

HQ, HKV, D = 4, 2, 8
PROGRAM = os.environ.get("KVREPLAY_PROGRAM")


def model(**changes) -> ModelInfo:
    values = dict(
        name="tiny",
        architecture="llama",
        n_layers=2,
        n_q_heads=HQ,
        n_kv_heads=HKV,
        head_dim=D,
        value_dim=D,
        hidden_size=32,
        vocab_size=50,
        logit_size=52,
        softmax_scale=0.25,
        cache_dtype="float16",
    )
    return ModelInfo(**{**values, **changes})


def put(writer: TraceWriter, sequence: int, first: int, end: int, seed: int = 0) -> None:
    rng = np.random.default_rng((seed, first))
    for layer in range(2):
        for name, heads in (("q", HQ), ("k", HKV), ("v", HKV)):
            rows = rng.standard_normal((end - first, heads, D)).astype("<f2")
            writer.append(sequence, name, first, rows, layer)
    writer.append(sequence, "tokens", first, np.arange(first, end) % 50)


def inspect(path: Path, *arguments: str) -> str:
    """What kvreplay says about a trace, where the program is at hand; else h5py must open it."""
    if PROGRAM is None:
        with h5py.File(path) as file:
            return "" if file.attrs["format"] == "kvtrace" else "no trace"
    done = subprocess.run([PROGRAM, "inspect", path, *arguments], capture_output=True, text=True)
    if done.returncode not in ((0, 3) if "--recover" in arguments else (0,)):
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtrace_")
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "run.h5"
        self.part = Path(folder.name) / "run.h5.part"


class WriterTest(Folder):
    def test_sequences_side_by_side_grow_and_are_cut(self) -> None:
        writer = TraceWriter(self.path, model(), "test")
        plans = [SequencePlan(4, 6), SequencePlan(3, 300, spans={"needle": [(1, 2)]})]
        numbers = [writer.begin_sequence(plan) for plan in plans]
        self.assertEqual(numbers, [0, 1])
        for s in numbers:
            put(writer, s, 0, plans[s].n_prompt, seed=s)
        writer.put_facts(LayerFacts([0, 1], [0, 16]))
        writer.commit({0: 4, 1: 3})
        for s, begin in ((0, 4), (1, 3)):
            for t in range(begin, 70):
                put(writer, s, t, t + 1, seed=s)
        writer.end_sequence(1, 60)
        writer.end_sequence(0, 70)
        self.assertFalse(self.path.exists())
        writer.finish()
        self.assertFalse(self.part.exists())
        with h5py.File(self.path) as file:
            for s, length in ((0, 70), (1, 60)):
                group = file[f"sequences/{s}"]
                self.assertEqual([group.attrs[a] for a in ("n_tokens", "committed")], [length] * 2)
                self.assertEqual(group["layers/1/k"].shape, (length, HKV, D))
                self.assertEqual(group["logit_pos"][0], plans[s].n_prompt - 1)
                self.assertEqual(group["logit_pos"][-1], length - 1)
                one = np.random.default_rng((s, 50))
                expected = one.standard_normal((1, HQ, D)).astype("<f2")
                np.testing.assert_array_equal(group["layers/0/q"][50:51], expected)
            self.assertEqual(file["sequences/1/spans/needle"][:].tolist(), [[1, 2]])
            self.assertEqual(file["model/window"][:].tolist(), [0, 16])
        inspect(self.path, "--check", "--all")

    def test_first_row_and_logit_rows_start_late(self) -> None:
        writer = TraceWriter(self.path, model(), "test")
        writer.begin_sequence(SequencePlan(6, 8, first_row=4))
        put(writer, 0, 0, 8)
        writer.append(0, "confidence", 0, np.tile(np.float32([1, 0.5, 0.5, 3]), (8, 1)))
        writer.put_column_sum(0, 0, np.full((HQ, 6), 1, "<f4"))
        writer.put_column_sum(0, 1, np.full((HQ, 6), 1, "<f4"))
        writer.put_facts(LayerFacts([0, 1], [0, 0]))
        writer.end_sequence(0, 8)
        writer.finish()
        with h5py.File(self.path) as file:
            self.assertEqual(file["sequences/0/layers/0/q"].shape[0], 4)
            self.assertEqual(file["sequences/0/layers/0"].attrs["first_row"], 4)
            self.assertEqual(file["sequences/0/confidence"].shape[0], 3)
        inspect(self.path, "--check", "--all")

    def test_what_is_refused(self) -> None:
        def begun(**plan) -> TraceWriter:
            self.part.unlink(missing_ok=True)
            writer = TraceWriter(self.path, model(), "test")
            self.addCleanup(writer.close)
            writer.begin_sequence(SequencePlan(**{"n_prompt": 4, "capacity": 8, **plan}))
            return writer

        big = np.full((1, HKV, D), 70000, "<f4")
        cases = [
            (
                "a value beyond 16 bits",
                lambda: begun().append(0, "k", 0, big, 1),
                "layers/1/k: step 0: inf.*65504",
            ),
            (
                "not a number",
                lambda: begun().append(0, "lse", 0, np.full((1, HQ), np.nan, "f4"), 0),
                "layers/0/lse: step 0: nan, expected finite",
            ),
            (
                "a token outside",
                lambda: begun().append(0, "tokens", 0, np.array([3, 50])),
                "tokens: step 1: 50, expected 0 to 49",
            ),
            (
                "a retention above 1",
                lambda: begun().append(0, "retention", 0, np.full((1, HKV), 0.1, "f4"), 0),
                "retention: step 0: 0.1",
            ),
            (
                "a pass unseen",
                lambda: begun().append(0, "tokens", 2, np.array([3])),
                "row of position 2, expected 0",
            ),
            (
                "another shape",
                lambda: begun().append(0, "k", 0, np.zeros((1, HQ, D), "f2"), 0),
                r"rows of shape \[4, 8\], expected \[2, 8\]",
            ),
            (
                "a span turned round",
                lambda: begun(spans={"needle": [(3, 2)]}),
                "span needle 3 .. 2",
            ),
            ("a chunk beyond the prompt", lambda: begun(chunks=[(0, 5)]), "chunk 0 .. 5"),
            ("no prompt", lambda: begun(n_prompt=0), "prompt of 0 tokens"),
            (
                "heads that do not divide",
                lambda: TraceWriter(self.path, model(n_kv_heads=3), "test"),
                "n_kv_heads 3 does not divide n_q_heads 4",
            ),
        ]
        for name, work, text in cases:
            with self.subTest(name):
                with self.assertRaisesRegex(RecordError, text) as caught:
                    work()
                self.assertNotIn("\n", str(caught.exception))
                self.assertIn("run.h5.part", str(caught.exception))

    def test_a_commit_wants_every_row(self) -> None:
        writer = TraceWriter(self.path, model(), "test")
        self.addCleanup(writer.close)
        writer.begin_sequence(SequencePlan(2, 4))
        put(writer, 0, 0, 2)
        writer.append(0, "tokens", 2, np.array([1]))
        writer.put_facts(LayerFacts([0, 1], [0, 0]))
        with self.assertRaisesRegex(RecordError, "rows up to position 2, expected 3"):
            writer.commit({0: 3})

    def test_a_second_writer_is_refused(self) -> None:
        writer = TraceWriter(self.path, model(), "test")
        self.addCleanup(writer.close)
        with self.assertRaisesRegex(RecordError, "another process is writing"):
            TraceWriter(self.path, model(), "test")

    def run_child(self, body: str, limit: int | None = None) -> subprocess.CompletedProcess:
        code = f"import sys; sys.path[:0] = {sys.path[:1] + [str(Path(__file__).parent)]!r}\n"
        code += f"from test_trace_writer import *\npath = Path({str(self.path)!r})\n{body}"

        def limited() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limited
        )

    RUN = """
writer = TraceWriter(path, model(), "test")
writer.begin_sequence(SequencePlan(4, {capacity}))
put(writer, 0, 0, 4)
writer.put_facts(LayerFacts([0, 1], [0, 0]))
writer.commit({{0: 4}})
try:
    for t in range(4, 20000):
        put(writer, 0, t, t + 1)
        if (t + 1) % 16 == 0:
            writer.commit({{0: t + 1}})
        if t == {stop}:
            os.kill(os.getpid(), 9)
except RecordError as error:
    print(error)
    sys.exit(1)
"""

    def test_a_killed_writer_leaves_what_was_committed(self) -> None:
        for capacity in (5, 400):  # growing, and extended ahead
            with self.subTest(capacity=capacity):
                done = self.run_child(self.RUN.format(capacity=capacity, stop=330))
                self.assertEqual(done.returncode, -9, done.stderr)
                self.assertFalse(self.path.exists())
                with h5py.File(self.part) as file:
                    group = file["sequences/0"]
                    self.assertEqual(group.attrs["committed"], 320)
                    self.assertEqual(group["tokens"].shape[0], group.attrs["n_tokens"])
                    expected = np.random.default_rng((0, 300))
                    expected = expected.standard_normal((1, HQ, D)).astype("<f2")
                    np.testing.assert_array_equal(group["layers/0/q"][300:301], expected)
                if PROGRAM:
                    self.assertIn("320 positions", inspect(self.part, "--recover", "--check"))

    def test_a_full_disk_is_named_and_loses_nothing_committed(self) -> None:
        done = self.run_child(self.RUN.format(capacity=5, stop=-1), limit=5 << 18)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(
            done.stdout,
            r"run.h5.part: at position \d+: File too large; positions "
            r"committed: \d+ \(kvreplay inspect .* --recover\)",
        )
        self.assertFalse(self.path.exists())
        with h5py.File(self.part) as file:
            committed = int(file["sequences/0"].attrs["committed"])
            self.assertGreater(committed, 4)
            self.assertTrue(np.isfinite(file["sequences/0/layers/1/v"][:committed]).all())
        if PROGRAM:
            self.assertIn(f"{committed} positions", inspect(self.part, "--recover", "--check"))


class SessionTest(Folder):
    def test_rows_after_a_stop_token_are_left_out(self) -> None:
        session = HostSession(self.path, "test")
        session.open(model())
        session.begin([SequencePlan(2, 8), SequencePlan(3, 8)], stops={9})

        def step(ids: list[list[int]], places: list[Place]) -> None:
            n = len(ids[0])
            session.tokens(np.array(ids), places)
            for layer in range(2):
                block = np.full((2, n, 64 + 32 + 32), 1, "<f2").view("<i2")
                session.packed(
                    block,
                    [
                        Field("q", 0, 32, "<f2", (HQ, D)),
                        Field("k", 32, 16, "<f2", (HKV, D)),
                        Field("v", 48, 16, "<f2", (HKV, D)),
                        Field("lse", 64, 8, "<f4", (HQ,)),
                    ],
                    places,
                    layer,
                )
            session.pass_done()

        # The first sequence is padded on the left by one; 9 in a prompt stops nothing.
        step([[0, 5, 9], [9, 4, 5]], [Place(1, 2, 0), Place(0, 3, 0)])
        session.facts(lambda: LayerFacts([0, 1], [0, 0]))
        session.commit()
        step([[7], [8]], [Place(0, 1, 2), Place(0, 1, 3)])
        step([[9], [8]], [Place(0, 1, 3), Place(0, 1, 4)])
        step([[0], [8]], [Place(0, 1, 4), Place(0, 1, 5)])
        session.commit()
        self.assertEqual(session.writer.committed, [3, 6])
        session.end(None, 0, None)
        session.writer.finish()
        with h5py.File(self.path) as file:
            self.assertEqual(file["sequences/0/tokens"][:].tolist(), [5, 9, 7])
            self.assertEqual(file["sequences/1/tokens"][:].tolist(), [9, 4, 5, 8, 8, 8])
            self.assertEqual(file["sequences/1/layers/1/lse"].shape, (6, HQ))

    def test_an_unfinished_pass_is_not_committed(self) -> None:
        session = HostSession(self.path, "test")
        session.open(model())
        session.begin([SequencePlan(2, 8)], stops=set())
        put(session.writer, 0, 0, 2)
        session.batch.fed = [2]
        session.pass_done()
        session.facts(lambda: LayerFacts([0, 1], [0, 0]))
        session.writer.append(0, "tokens", 2, np.array([1]))
        session.batch.fed = [3]
        session.abandon()
        with h5py.File(self.part) as file:
            self.assertEqual(file["sequences/0"].attrs["committed"], 2)


class ConveyorTest(unittest.TestCase):
    def test_order_and_errors(self) -> None:
        conveyor, seen, dropped = Conveyor(), [], []
        gate = threading.Event()

        def fail() -> None:
            gate.wait(10)
            raise RecordError("the disk")

        conveyor.put(lambda: seen.append(1))
        conveyor.put(fail, lambda: dropped.append("fail"))
        conveyor.put(lambda: seen.append(2), lambda: dropped.append("after"))
        conveyor.press()
        gate.set()
        with self.assertRaisesRegex(RecordError, "the disk"):
            conveyor.close()
        self.assertEqual((seen, dropped), ([1], ["fail", "after"]))
        with self.assertRaisesRegex(RecordError, "the disk"):
            conveyor.put(lambda: seen.append(3))


if __name__ == "__main__":
    unittest.main()
