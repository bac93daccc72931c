"""The main job on a real model: SmolLM2-135M-Instruct, recorded by our recorder, replayed by our replayer.

Run by CTest with the environment KVREPLAY_PROGRAM (the program), KVREPLAY_MODEL (a Hugging Face directory of the
model) and KVREPLAY_SOURCE (the tree). The reference forward pass is NumPy and shares nothing with the C++ runner.
"""

import csv
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import h5py
import numpy as np
from safetensors.numpy import load_file

PROGRAM = os.environ["KVREPLAY_PROGRAM"]
MODEL = Path(os.environ["KVREPLAY_MODEL"])
TOKENS = Path(os.environ["KVREPLAY_SOURCE"]) / "traces/samples/jargon-a.tokens"


def kvreplay(*arguments: str) -> str:
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}: {done.stderr}")
    return done.stdout


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """x [positions, heads, dim]; the two halves of a head are the pairs."""
    positions, _, dim = x.shape
    angle = np.arange(positions)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def reference_logits(tokens: np.ndarray) -> np.ndarray:
    """One full causal pass in float32 with the weights of MODEL."""
    config = json.loads((MODEL / "config.json").read_text())
    w = {name.removeprefix("model."): x.astype(np.float32) for name, x in load_file(MODEL / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    eps = config["rms_norm_eps"]
    x = w["embed_tokens.weight"][tokens]
    n = len(tokens)
    hidden = np.triu(np.full((n, n), -np.inf, dtype=np.float32), 1)
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        h = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        q = rotate((h @ w[p + "self_attn.q_proj.weight"].T).reshape(n, heads, dim), theta)
        k = rotate((h @ w[p + "self_attn.k_proj.weight"].T).reshape(n, kv_heads, dim), theta)
        v = (h @ w[p + "self_attn.v_proj.weight"].T).reshape(n, kv_heads, dim)
        o = np.empty((n, heads, dim), dtype=np.float32)
        for head in range(heads):
            g = head * kv_heads // heads
            s = (q[:, head] @ k[:, g].T).astype(np.float32) / np.sqrt(dim).astype(np.float32) + hidden
            s = np.exp(s - s.max(axis=-1, keepdims=True))
            o[:, head] = (s / s.sum(axis=-1, keepdims=True)) @ v[:, g]
        x = x + o.reshape(n, heads * dim) @ w[p + "self_attn.o_proj.weight"].T
        h = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["embed_tokens.weight"])
    return rms_norm(x, w["norm.weight"], eps) @ head.T


class RealModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory(prefix="kvreplay_real_")
        cls.path = Path(cls.folder.name)
        cls.tokens = [int(t) for t in TOKENS.read_text().split()]
        (cls.path / "512.tokens").write_text(" ".join(map(str, cls.tokens[:512])))
        (cls.path / "1024.tokens").write_text(" ".join(map(str, cls.tokens[:1024])))
        print(kvreplay("record", "--model", MODEL, "--tokens", cls.path / "1024.tokens", "--prompt-length", "512",
                       "-o", cls.path / "a.h5", "--with", "wo,residual"), end="")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.folder.cleanup()

    def replay(self, *specs: str, heads: str | None = None) -> dict[str, dict]:
        out = self.path / "r.json"
        arguments = ["replay", self.path / "a.h5", "-o", out, "--no-bound"]
        for spec in specs:
            arguments += ["-p", spec]
        if heads:
            arguments += ["--heads", self.path / heads]
        kvreplay(*arguments)
        return dict(zip(specs, json.loads(out.read_text())["runs"]))

    def test_logits_equal_an_independent_forward_pass(self) -> None:
        trace = self.path / "fp32.h5"
        kvreplay("record", "--model", MODEL, "--tokens", self.path / "512.tokens", "--prompt-length", "1", "-o", trace,
                 "--kv-dtype", "fp32", "--logits", "full", "--layers", "0")
        with h5py.File(trace) as f:
            ours = f["sequences/0/logits"][:]
        expected = reference_logits(np.array(self.tokens[:512]))
        self.assertEqual(ours.shape, expected.shape)
        worst = np.abs(ours - expected).max()
        print(f"largest logit difference against NumPy: {worst:.2e}")
        self.assertLess(worst, 1e-2)
        top = np.sort(expected, axis=-1)[:, -2:]
        clear = top[:, 1] - top[:, 0] > 1e-3  # two tokens nearer than that may change places
        np.testing.assert_array_equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])
        self.assertGreater(clear.mean(), 0.99)

    def test_the_recording_is_consistent_with_itself(self) -> None:
        self.assertIn("ok", kvreplay("inspect", self.path / "a.h5", "--check", "--all").splitlines()[-1])
        quality = self.replay("full")["full"]["quality"]
        self.assertAlmostEqual(quality["attention_recall"], 1, delta=1e-5)
        self.assertLess(quality["output_rel_l2"], 1e-3)
        self.assertLess(quality["residual_rel_l2"], 1e-3)

    def test_int8_with_everything_kept(self) -> None:
        for spec, limit in (("full+int8", 0.05), ("full+int8:scales=channel,update=static,margin=1", None)):
            self.replay(spec, heads="heads.csv")
            with open(self.path / "heads.csv") as f:
                rows = list(csv.DictReader(f))
            layers: dict[int, list[float]] = {}
            for row in rows:
                layers.setdefault(int(row["layer"]), []).append(float(row["output_rel_l2"]))
            errors = {layer: max(values) for layer, values in layers.items()}
            print(spec, "output error per layer:", " ".join(f"{layer}:{e:.4f}" for layer, e in errors.items()))
            self.assertEqual(len(errors), 30)
            self.assertGreater(min(errors.values()), 0)
            if limit:
                self.assertLess(max(errors.values()), limit)

    def test_findings(self) -> None:
        literal = "confkv:tau=q0.5,high=128,low=384,mass=max,decay=0.9,recency=0.3"
        rows = self.replay("window:budget=256", "streaming:budget=256", "h2o:budget=256", literal, literal + ",shrink=2")
        for spec, row in rows.items():
            q, m = row["quality"], row["memory"]
            print(f"{spec}: entries {m['mean_entries']:.1f} recall {q['attention_recall']:.3f} "
                  f"output_rel_l2 {q['output_rel_l2']:.3f} residual_rel_l2 {q['residual_rel_l2']:.3f}")
        window, streaming = rows["window:budget=256"], rows["streaming:budget=256"]
        self.assertLess(window["quality"]["attention_recall"], streaming["quality"]["attention_recall"] - 0.1)
        self.assertGreater(window["quality"]["output_rel_l2"], 2 * streaming["quality"]["output_rel_l2"])
        # Read literally, the gate holds what `high` holds: growing is one entry a step.
        self.assertAlmostEqual(rows[literal]["memory"]["mean_entries"] / 129, 1, delta=0.02)
        self.assertGreater(rows[literal + ",shrink=2"]["memory"]["mean_entries"], 1.3 * 129)

    def test_decode_rows_give_the_same_kept_sets(self) -> None:
        """--rows decode leaves the prompt's queries out; column sums stand in for them."""
        kept = {}
        for rows in ("all", "decode"):
            trace = self.path / f"rows_{rows}.h5"
            kvreplay("record", "--model", MODEL, "--tokens", self.path / "512.tokens", "--prompt-length", "256", "-o", trace,
                     "--layers", "0,10", "--rows", rows)
            out = self.path / "kept.csv"
            kvreplay("replay", trace, "-p", "h2o:budget=64", "-p", "tova:budget=64", "-p",
                     "confkv:high=32,low=32,recent=8", "--kept", out)
            kept[rows] = out.read_text().replace(str(trace), "")
        self.assertEqual(kept["all"], kept["decode"])

    def test_generation_equals_teacher_forcing(self) -> None:
        (self.path / "prompt.tokens").write_text(" ".join(map(str, self.tokens[:64])))
        out = kvreplay("record", "--model", MODEL, "--tokens", self.path / "prompt.tokens", "--generate", "24", "-o",
                       self.path / "g.h5", "--logits", "full")
        generated = [int(t) for t in out.splitlines()[-1].split()]
        self.assertEqual(len(generated), 24)
        (self.path / "forced.tokens").write_text(" ".join(map(str, self.tokens[:64] + generated)))
        kvreplay("record", "--model", MODEL, "--tokens", self.path / "forced.tokens", "--prompt-length", "64", "-o",
                 self.path / "f.h5", "--logits", "full")
        with h5py.File(self.path / "g.h5") as g, h5py.File(self.path / "f.h5") as f:
            a, b = g["sequences/0/logits"][:], f["sequences/0/logits"][:]
            self.assertEqual(g["sequences/0/tokens"][:].tolist(), f["sequences/0/tokens"][:].tolist())
        np.testing.assert_allclose(a, b, atol=1e-3)
        self.assertEqual(a[:-1].argmax(-1).tolist(), generated)


if __name__ == "__main__":
    unittest.main(verbosity=2)
