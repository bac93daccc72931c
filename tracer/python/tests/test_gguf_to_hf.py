"""GGUF to Hugging Face: names, layouts, sizes, refusals."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path

import helpers
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from kvtrace_tools.__main__ import main
from kvtrace_tools.errors import ToolError
from kvtrace_tools.gguf_model import convert, to_dtype

VOCAB = len(helpers.tokenizer_tokens()[0])


class GgufToHf(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.file = self.folder / "m.gguf"
        self.out = self.folder / "hf"

    def write(self, architecture: str, *, kv_heads: int = 2, bias: bool = False, tied: bool = True,
              pads: int = 0, extra: dict | None = None, pre: str = "smollm",
              quantise: bool = False) -> dict:
        weights = helpers.make_weights(4, kv_heads, VOCAB + pads, bias, tied)
        helpers.write_gguf(self.file, architecture, weights, 4, kv_heads, pre, pads, extra, quantise)
        return weights

    def config(self) -> dict:
        return json.loads((self.out / "config.json").read_text())

    def same(self, expected: dict, found: dict) -> None:
        self.assertEqual(set(expected), set(found))
        for name, values in expected.items():
            np.testing.assert_array_equal(values, found[name], err_msg=name)

    def scores(self, q: np.ndarray, k: np.ndarray, rotate: object, position: int) -> np.ndarray:
        """q . k per query head, query at `position`, key at 3, each head with its KV head."""
        q = rotate(q.reshape(4, helpers.HEAD_DIM).astype(float), position)
        k = rotate(k.reshape(2, helpers.HEAD_DIM).astype(float), 3)
        return np.array([q[h] @ k[h // 2] for h in range(4)])

    def test_llama_rows_are_put_back(self) -> None:
        weights = self.write("llama", bias=True)
        self.assertEqual([], convert(self.file, self.out, "f32"))
        found = load_file(self.out / "model.safetensors")
        self.same(weights, found)
        x = np.linspace(-1, 1, helpers.HIDDEN)
        name = "model.layers.1.self_attn.{}_proj.weight"
        q, k = (found[name.format(c)] @ x for c in "qk")
        # The stored rows of the GGUF, rotated as llama.cpp rotates them, are the reference.
        q_pairs = helpers.interleave(weights[name.format("q")], 4) @ x
        k_pairs = helpers.interleave(weights[name.format("k")], 2) @ x
        for position in (0, 50):
            np.testing.assert_allclose(
                self.scores(q, k, helpers.rotate, position),
                self.scores(q_pairs, k_pairs, helpers.rotate_pairs, position), atol=1e-6)
        # Left as they were, they would be wrong from the first position that differs on.
        wrong = self.scores(q_pairs, k_pairs, helpers.rotate, 50)
        self.assertGreater(np.abs(wrong - self.scores(q, k, helpers.rotate, 50)).max(), 1e-3)

    def test_qwen2_rows_are_left_alone(self) -> None:
        weights = self.write("qwen2", bias=True, tied=False, pre="qwen2")
        self.assertEqual([], convert(self.file, self.out, "f32"))
        self.same(weights, load_file(self.out / "model.safetensors"))
        self.assertEqual("qwen2", self.config()["model_type"])
        self.assertFalse(self.config()["tie_word_embeddings"])

    def test_gemma3_norms_lose_their_one(self) -> None:
        weights = helpers.make_weights(4, 2, VOCAB, False, True)
        helpers.add_gemma3_norms(weights)
        helpers.write_gguf(self.file, "gemma3", weights, 4, 2, "smollm")
        convert(self.file, self.out, "f32")
        found = load_file(self.out / "model.safetensors")
        self.assertEqual(set(weights), set(found))
        for name, values in weights.items():
            np.testing.assert_allclose(found[name], values, atol=1e-6, err_msg=name)
        config = self.config()
        self.assertEqual("gemma3_text", config["model_type"])
        self.assertEqual(5, config["sliding_window"])
        self.assertEqual(helpers.HEAD_DIM, config["query_pre_attn_scalar"])
        self.assertNotIn("hidden_act", config)

    def test_config(self) -> None:
        self.write("llama")
        convert(self.file, self.out, "f32")
        expected = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
            "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
            "attention_bias": False, "mlp_bias": False,
        }
        self.assertEqual(expected, self.config())

    def test_padding_rows_are_left_out(self) -> None:
        weights = self.write("qwen2", pads=3, tied=False, pre="qwen2")
        notes = convert(self.file, self.out, "f32")
        self.assertEqual(1, len(notes))
        self.assertIn("3 padding rows", notes[0])
        found = load_file(self.out / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            np.testing.assert_array_equal(weights[name][:VOCAB], found[name])
        self.assertEqual(VOCAB, self.config()["vocab_size"])

    def test_quantised_rows(self) -> None:
        weights = self.write("llama", quantise=True)
        convert(self.file, self.out, "f32")
        want = weights["model.embed_tokens.weight"]
        found = load_file(self.out / "model.safetensors")["model.embed_tokens.weight"]
        # Q8_0: 32 values share a scale of max / 127; half a step, and the scale's own rounding.
        bound = np.abs(want).max(axis=1, keepdims=True) * (0.51 / 127 + 2**-11)
        self.assertTrue((np.abs(found - want) <= bound).all())
        self.assertGreater(np.abs(found - want).max(), 0)

    def test_dtypes(self) -> None:
        self.write("llama")
        for dtype, stored in (("f16", "F16"), ("bf16", "BF16")):
            convert(self.file, self.out, dtype)
            with safe_open(self.out / "model.safetensors", "np") as file:
                for name in file.keys():
                    self.assertEqual(stored, file.get_slice(name).get_dtype())
        with self.assertRaisesRegex(ToolError, "float16"):
            to_dtype(np.array([1e6], np.float32), "f16", "x")
        with self.assertRaisesRegex(ToolError, "finite"):
            to_dtype(np.array([np.nan], np.float32), "f32", "x")
        # 1 + 2^-8 is halfway between two bfloat16 values: to the even one. The next float goes up.
        halfway = np.array([1 + 2**-8, 1 + 2**-8 + 2**-23, 1 + 3 * 2**-8], np.float32)
        self.assertEqual([0x3F80, 0x3F81, 0x3F82], to_dtype(halfway, "bf16", "x").tolist())

    def refused(self, *parts: str) -> None:
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            code = main(["gguf-to-hf", str(self.file), "-o", str(self.out)])
        self.assertEqual(1, code)
        self.assertEqual(1, stderr.getvalue().count("\n"))
        for part in ("m.gguf", *parts):
            self.assertIn(part, stderr.getvalue())
        self.assertFalse((self.out / "config.json").exists())

    def test_unknown_architecture(self) -> None:
        self.write("llama")
        helpers.write_gguf(self.file, "mamba", {}, 4, 2, "smollm")
        self.refused("'mamba'", "known: llama, qwen2")

    def test_scaled_rope(self) -> None:
        self.write("llama", extra={"rope_freqs.weight": np.ones(4, np.float32)})
        self.refused("rotary")

    def test_unknown_tensor(self) -> None:
        self.write("llama", extra={"blk.0.attn_q_norm.weight": np.ones(8, np.float32)})
        self.refused("attn_q_norm")

    def test_wrong_head_count(self) -> None:
        weights = helpers.make_weights(4, 1, VOCAB, False, True)
        helpers.write_gguf(self.file, "qwen2", weights, 4, 2, "qwen2")
        self.refused("attn_k.weight", "[8, 32]", "[16, 32]")

    def test_missing_tensor(self) -> None:
        weights = helpers.make_weights(4, 2, VOCAB, False, True)
        del weights["model.layers.1.mlp.up_proj.weight"]
        helpers.write_gguf(self.file, "llama", weights, 4, 2, "smollm")
        self.refused("model.layers.1.mlp.up_proj.weight")

    def test_damaged_files(self) -> None:
        self.write("llama")
        whole = self.file.read_bytes()
        for data in (b"", b"GGUF", whole[:1000], whole[:-200], b"x" * 4096):
            self.file.write_bytes(data)
            self.refused()
        self.file.unlink()
        self.refused("cannot be read")

    def test_unknown_pre_tokenizer_is_a_note(self) -> None:
        self.write("llama", pre="bloom")
        notes = convert(self.file, self.out, "f32")
        self.assertEqual(1, len(notes))
        self.assertIn("'bloom'", notes[0])
        self.assertFalse((self.out / "tokenizer.json").exists())


if __name__ == "__main__":
    unittest.main()
