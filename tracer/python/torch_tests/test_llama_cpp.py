"""llama.cpp through the unpatched bindings: the trace against the C++ runner's."""

import importlib.util
import sys
import unittest
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import Case, kvreplay, make_ids, read, replay

from kvtrace.__main__ import main
from kvtrace.errors import RecordError

PRESENT = importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf")


@unittest.skipUnless(PRESENT, "llama-cpp-python and gguf are not installed")
class LlamaCppTest(Case):
    def make(self, architecture: str) -> Path:
        """A GGUF, and beside it the same model as a Hugging Face directory."""
        import helpers

        kv_heads = 2
        weights = helpers.make_weights(4, kv_heads, 260, architecture == "qwen2", False)
        for name in weights:
            if weights[name].ndim == 2:
                weights[name] *= 1.5 * weights[name].shape[1] ** -0.5
        if architecture == "gemma3":
            helpers.add_gemma3_norms(weights)
        path = self.folder / f"{architecture}.gguf"
        helpers.write_gguf(
            path,
            architecture,
            weights,
            4,
            kv_heads,
            "qwen2" if architecture == "qwen2" else "smollm",
        )
        self.assertEqual(main(["gguf-to-hf", str(path), "-o", str(self.folder / architecture)]), 0)
        return path

    def test_the_trace_equals_the_runners(self) -> None:
        tokens = self.folder / "a.tokens"
        tokens.write_text(" ".join(map(str, make_ids(1, 50)[0].tolist())))
        for architecture in ("llama", "qwen2", "gemma3"):
            with self.subTest(architecture=architecture):
                model = self.make(architecture)
                code = main(
                    [
                        "record-gguf",
                        str(model),
                        "--tokens",
                        str(tokens),
                        "-o",
                        str(self.path),
                        "--prompt-length",
                        "30",
                        "--block",
                        "13",
                        "--threads",
                        "1",
                        "--logits",
                        "full",
                        "--quiet",
                    ]
                )
                self.assertEqual(code, 0)
                self.check()
                other = self.folder / "cpp.h5"
                kvreplay(
                    "record",
                    "--model",
                    self.folder / architecture,
                    "--tokens",
                    tokens,
                    "-o",
                    other,
                    "--prompt-length",
                    "30",
                    "--logits",
                    "full",
                    "--quiet",
                )
                one, two = read(self.path), read(other)
                for path, found in ((self.path, one), (other, two)):
                    with h5py.File(path) as file:  # llama.cpp may scale q instead of the scores
                        scale = file["model"].attrs["softmax_scale"]
                    for name in [n for n in found if n.endswith("/q")]:
                        found[name] *= np.float32(scale)
                if architecture == "llama":  # whose GGUF puts rotated pairs side by side
                    for name in [n for n in one if n.endswith(("/q", "/k"))]:
                        one[name] = np.concatenate(
                            [one[name][..., 0::2], one[name][..., 1::2]], axis=-1
                        )
                self.assert_same(
                    one, {n: v for n, v in two.items()}, 2e-2, but=("model/rope_inv_freq",)
                )
                quality = replay(self.path, "full")["full"]["quality"]
                self.assertAlmostEqual(quality["attention_recall"], 1, delta=1e-6)

    def test_generation_and_refusals(self) -> None:
        from kvtrace.llama_cpp_run import record_gguf

        model, ids = self.make("llama"), make_ids(1, 20)[0].tolist()
        found = []
        for _ in range(2):
            length = record_gguf(
                model, ids, self.path, generate=12, temperature=0.8, seed=3, threads=1
            )
            self.check()
            found.append(read(self.path)["tokens"])
            self.assertEqual(length, len(found[-1]))
            self.assertLessEqual(length, 31)
        np.testing.assert_array_equal(*found)
        with self.assertRaisesRegex(RecordError, "prompt_length is 20, expected 1 .. 19"):
            record_gguf(model, ids, self.path, prompt_length=20)
        with self.assertRaisesRegex(RecordError, "token 999, expected 0 .. 25"):
            record_gguf(model, [3, 999], self.folder / "b.h5", prompt_length=1)
        with self.assertRaisesRegex(RecordError, "no such file"):
            record_gguf(self.folder / "none.gguf", ids, self.path, generate=1)
        self.path.write_text("no model")
        with self.assertRaisesRegex(RecordError, "llama.cpp cannot load this model"):
            record_gguf(self.path, ids, self.folder / "b.h5", generate=1)


if __name__ == "__main__":
    unittest.main()
