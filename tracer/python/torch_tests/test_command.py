"""kvtrace record as a command, and SmolLM2 recorded by both recorders."""

import contextlib
import io
import os
import unittest
from pathlib import Path

import h5py
import numpy as np

from support import Case, configs, kvreplay, make_ids, make_model, read, replay

from kvtrace.__main__ import main

MODEL = os.environ.get("KVREPLAY_MODEL")
SOURCE = Path(__file__).resolve().parents[3]


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and what stood on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, text.getvalue()


class CommandTest(Case):
    def setUp(self) -> None:
        super().setUp()
        self.model = self.folder / "tiny"
        make_model(configs()["qwen2"]).save_pretrained(self.model)
        self.tokens = self.folder / "a.tokens"
        self.tokens.write_text(" ".join(map(str, make_ids(1, 40)[0].tolist())))

    def record(self, *arguments: object) -> tuple[int, str]:
        return run(
            "record",
            "--hf",
            self.model,
            "--tokens",
            self.tokens,
            "-o",
            self.path,
            "--threads",
            1,
            *arguments,
        )

    def test_both_ways(self) -> None:
        code, text = self.record(
            "--prompt-length",
            30,
            "--block",
            7,
            "--with",
            "wo,residual",
            "--layers",
            "0,2",
            "--logits",
            "full",
            "--baseline",
        )
        self.assertEqual(code, 0, text)
        self.assertRegex(
            text,
            r"1 sequence, 40 positions, .* tokens/s with recording, [\d.]+ "
            r"without \(measured; .*\n$",
        )
        self.check()
        forced = read(self.path)
        self.assertEqual(forced["model/layers"].tolist(), [0, 2])
        np.testing.assert_array_equal(
            forced["tokens"], [int(t) for t in self.tokens.read_text().split()]
        )
        outputs = []
        for _ in range(2):
            code, text = self.record(
                "--generate", 9, "--temperature", 0.8, "--seed", 4, "--dtype", "bfloat16", "--quiet"
            )
            self.assertEqual((code, text), (0, ""))
            self.check()
            outputs.append(read(self.path)["tokens"])
        np.testing.assert_array_equal(*outputs)
        with h5py.File(self.path) as file:
            group = file["sequences/0"]
            self.assertEqual((group.attrs["temperature"], group.attrs["seed"]), (0.8, 4))
            self.assertEqual(file["model"].attrs["name"], "tiny")

    def test_errors_are_one_line(self) -> None:
        for arguments, text in (
            ((), "--prompt-length .* or --generate"),
            (("--prompt-length", 40), r"prompt_length is 40, expected 1 .. 39 \(40 tokens\)"),
            (("--generate", 3, "--temperature", -1), "--temperature -1.0"),
            (("--prompt-length", 9, "--with", "wx"), "extras: 'wx'"),
            (("--prompt-length", 9, "--attn", "none_such"), "cannot be loaded: .*none_such"),
        ):
            with self.subTest(arguments=arguments):
                code, error = self.record(*arguments)
                self.assertEqual(code, 1)
                self.assertRegex(error, f"^error: .*{text}.*\n$")
        self.assertFalse(self.path.exists())
        code, error = run(
            "record", "--hf", self.folder, "--tokens", self.tokens, "-o", self.path, "--generate", 1
        )
        self.assertRegex(error, "no config.json")
        self.assertEqual(run("record", "--hf", self.model, "-o", self.path)[0], 2)

    def test_the_tools_are_there_too(self) -> None:
        code, error = run("find-gguf", "no-such-package")
        self.assertEqual((code, error), (1, "error: package 'no-such-package' is not installed\n"))


@unittest.skipUnless(MODEL, "KVREPLAY_MODEL names no SmolLM2")
class SmolLM2Test(Case):
    """The C++ runner and transformers on the same model and text."""

    SPECS = (
        "full",
        "window:budget=96",
        "streaming:budget=96",
        "h2o:budget=96",
        "tova:budget=96",
        "random:budget=96",
        "confkv:tau=q0.5,high=128,low=64",
    )

    def test_policies_rank_the_same(self) -> None:
        ids = (SOURCE / "traces/samples/jargon-a.tokens").read_text().split()[:384]
        tokens = self.folder / "a.tokens"
        tokens.write_text(" ".join(ids))
        arguments = ["--tokens", tokens, "--prompt-length", 256, "--with", "wo,residual"]
        code, text = run(
            "record",
            "--hf",
            MODEL,
            *arguments,
            "-o",
            self.path,
            "--kv-dtype",
            "fp16",
            "--threads",
            1,
        )
        self.assertEqual(code, 0, text)
        other = self.folder / "cpp.h5"
        kvreplay("record", "--model", MODEL, *arguments, "-o", other, "--quiet")
        for path in (self.path, other):
            kvreplay("inspect", path, "--check")
        one, two = replay(self.path, *self.SPECS), replay(other, *self.SPECS)
        differences = {}
        for column in ("attention_recall", "output_rel_l2", "residual_rel_l2"):
            ours = [one[spec]["quality"][column] for spec in self.SPECS]
            theirs = [two[spec]["quality"][column] for spec in self.SPECS]
            self.assertEqual(np.argsort(ours).tolist(), np.argsort(theirs).tolist(), column)
            differences[column] = float(np.abs(np.subtract(ours, theirs)).max())
        print("largest differences between the recorders:", differences)
        self.assertLess(max(differences.values()), 1e-3)
        self.assertAlmostEqual(one["full"]["quality"]["attention_recall"], 1, delta=1e-5)


if __name__ == "__main__":
    unittest.main()
