"""kvreplay under mpirun: the same rows for any number of ranks, and jobs that end when they fail.

Environment: KVREPLAY_PROGRAM, KVREPLAY_MPIRUN.
"""

import json
import os
import subprocess
import tempfile
import time
import unittest

PROGRAM = os.environ["KVREPLAY_PROGRAM"]
MPIRUN = [os.environ["KVREPLAY_MPIRUN"], "--oversubscribe"]
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
LIMIT_S = 30


def run(ranks, *arguments, prefix=()):
    command = [*MPIRUN, "-n", str(ranks), *prefix, PROGRAM, *arguments] if ranks else [PROGRAM, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)


def rows(path):
    with open(path, encoding="utf-8") as file:
        runs = json.load(file)["runs"]
    for row in runs:
        row.pop("time")
    return runs


class Ranks(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.trace = self.path("t.h5")
        made = run(0, "synth", "-o", self.trace, "--layers", "2", "--tokens", "120", "--prompt-length", "40")
        self.assertEqual(made.returncode, 0, made.stderr)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def sweep(self, ranks, *traces):
        out = self.path(f"s{ranks}.json")
        done = run(ranks, "sweep", *(traces or [self.trace]), "-p", "window:budget=4..20..4", "--batch-points", "1",
                   "--quiet", "-o", out)
        return done, out

    def test_rows_do_not_depend_on_ranks(self):
        done, alone = self.sweep(0)
        self.assertEqual(done.returncode, 0, done.stderr)
        for ranks in (1, 2, 4, 8):  # 8: more than there are points
            done, out = self.sweep(ranks)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(rows(out), rows(alone), f"{ranks} ranks")
            self.assertEqual(done.stdout.count("policy "), 1, "one rank prints")

    def test_replay_too(self):
        results = []
        for ranks in (0, 1, 3):
            out = self.path(f"r{ranks}.json")
            done = run(ranks, "replay", self.trace, "-p", "full", "-p", "h2o:budget=9", "-p", "window:budget=8",
                       "-p", "confkv:high=8,low=20,recent=4", "--match-bytes", "window:budget=10", "--quiet", "-o", out)
            self.assertEqual(done.returncode, 0, done.stderr)
            results.append(rows(out))
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])
        refused = run(2, "replay", self.trace, "-p", "full", "--steps", self.path("s.csv"))
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("without mpirun", refused.stderr)

    def test_tune_too(self):
        texts = []
        for ranks in (0, 2):
            done = run(ranks, "tune", self.trace, "-p", "h2o:budget=8..64..2", "--max-ratio", "0.4", "--evaluations",
                       "12", "--quiet")
            self.assertEqual(done.returncode, 0, done.stderr)
            texts.append(done.stdout)
        self.assertEqual(texts[0], texts[1])

    def test_a_bad_trace_among_others_is_failed_rows(self):
        with open(self.trace, "rb") as file:
            whole = file.read()
        with open(self.path("cut.h5"), "wb") as file:
            file.write(whole[: len(whole) // 2])
        done, out = self.sweep(2, self.path("cut.h5"), self.trace)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual([row["status"] for row in rows(out)], ["failed"] * 5 + ["ok"] * 5)

    def test_an_error_ends_the_job_with_one_line(self):
        begin = time.monotonic()
        done = run(2, "sweep", self.path("absent.h5"), "-p", "full")
        self.assertNotEqual(done.returncode, 0)
        self.assertLess(time.monotonic() - begin, LIMIT_S)
        lines = [line for line in done.stderr.splitlines() if line.startswith("kvreplay:")]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn("absent.h5", lines[0])

    def test_a_rank_that_throws_ends_the_job(self):
        # Rank 1 stands in another folder, where the relative path leads nowhere.
        script = 'cd "$0"; if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then cd /; fi; exec "$@"'
        begin = time.monotonic()
        done = run(2, "sweep", "t.h5", "-p", "window:budget=4..20..4",
                   prefix=("sh", "-c", script, self.folder.name))
        self.assertNotEqual(done.returncode, 0)
        self.assertLess(time.monotonic() - begin, LIMIT_S)
        self.assertIn("kvreplay: t.h5", done.stderr)

    def test_a_rank_that_dies_ends_the_job(self):
        script = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then exit 3; fi; exec "$@"'
        done = run(2, "sweep", self.trace, "-p", "window:budget=4..20..4", prefix=("sh", "-c", script, "sh"))
        self.assertNotEqual(done.returncode, 0)


if __name__ == "__main__":
    unittest.main()
