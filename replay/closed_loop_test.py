"""The closed loop against NumPy: evicting by position set equals masking in a forward pass that
shares nothing with the C++ runner. Run by CTest with KVREPLAY_PROGRAM and KVREPLAY_SOURCE.

Models are tiny: the golden ones, and a Mistral and a Gemma 3 made here."""

import csv
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import h5py
import numpy as np
from safetensors.numpy import load_file, save_file

PROGRAM = os.environ["KVREPLAY_PROGRAM"]
GOLDEN = Path(os.environ["KVREPLAY_SOURCE"]) / "tracer/testdata/models"
PROMPT, LENGTH = 20, 48
TOKENS = [(i * i % 23 + i // 7 * 5) % 61 for i in range(LENGTH)]


def kvreplay(*arguments: object) -> None:
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}: {done.stderr}")


class Model:
    """A forward pass in float64 whose attention is told what each row may see."""

    def __init__(self, folder: Path) -> None:
        self.c = json.loads((folder / "config.json").read_text())
        self.kind = self.c["model_type"]
        self.w = {k.removeprefix("model."): v.astype(np.float64)
                  for k, v in load_file(folder / "model.safetensors").items()}
        gpt2 = self.kind == "gpt2"
        self.layers = self.c["n_layer" if gpt2 else "num_hidden_layers"]
        self.heads = self.c["n_head" if gpt2 else "num_attention_heads"]
        self.kv_heads = self.heads if gpt2 else self.c["num_key_value_heads"]
        self.hidden = self.c["n_embd" if gpt2 else "hidden_size"]
        self.dim = self.c.get("head_dim") or self.hidden // self.heads
        self.scale = self.c.get("query_pre_attn_scalar", self.dim) ** -0.5

    def window(self, layer: int) -> int:
        if self.kind == "mistral":
            return self.c["sliding_window"]
        if self.kind == "gemma3_text" and (layer + 1) % self.c["sliding_window_pattern"]:
            return self.c["sliding_window"]
        return 0

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if self.kind == "gpt2":
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return x * self.w[name + ".weight"] + self.w[name + ".bias"]
        one = 1.0 if self.kind == "gemma3_text" else 0.0
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / scale * (one + self.w[name + ".weight"])

    def dense(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.w[name + ".weight"]
        y = x @ (weight if self.kind == "gpt2" else weight.T)
        return y + self.w.get(name + ".bias", 0.0)

    def rotate(self, x: np.ndarray, layer: int) -> np.ndarray:
        local = self.kind == "gemma3_text" and self.window(layer)
        theta = self.c["rope_local_base_freq"] if local else self.c["rope_theta"]
        half = self.dim // 2
        angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def qkv(self, x: np.ndarray, layer: int) -> tuple:
        n, d = len(x), self.dim
        if self.kind == "gpt2":
            parts = self.dense(x, f"h.{layer}.attn.c_attn").reshape(n, 3, self.heads, d)
            return parts[:, 0], parts[:, 1], parts[:, 2]
        at = f"layers.{layer}.self_attn."
        q = self.dense(x, at + "q_proj").reshape(n, self.heads, d)
        k = self.dense(x, at + "k_proj").reshape(n, self.kv_heads, d)
        if self.kind in ("qwen3", "gemma3_text"):
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        v = self.dense(x, at + "v_proj").reshape(n, self.kv_heads, d)
        return self.rotate(q, layer), self.rotate(k, layer), v

    def attention(self, x: np.ndarray, layer: int, visible: np.ndarray) -> np.ndarray:
        """visible [kv_heads, n, n]"""
        q, k, v = self.qkv(x, layer)
        out = np.empty_like(q)
        for h in range(self.heads):
            g = h * self.kv_heads // self.heads
            s = np.where(visible[g], q[:, h] @ k[:, g].T * self.scale, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, g]
        return out.reshape(len(x), -1)

    def update(self, o: np.ndarray, layer: int) -> np.ndarray:
        """What an attention output adds to the residual stream."""
        if self.kind == "gpt2":
            return self.dense(o, f"h.{layer}.attn.c_proj")
        y = self.dense(o, f"layers.{layer}.self_attn.o_proj")
        post = f"layers.{layer}.post_attention_layernorm"
        return self.norm(y, post) if self.kind == "gemma3_text" else y

    def block(self, x: np.ndarray, layer: int, visible: np.ndarray) -> np.ndarray:
        gelu = lambda y: 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        if self.kind == "gpt2":
            at = f"h.{layer}."
            x = x + self.update(self.attention(self.norm(x, at + "ln_1"), layer, visible), layer)
            return x + self.dense(gelu(self.dense(self.norm(x, at + "ln_2"), at + "mlp.c_fc")), at + "mlp.c_proj")
        at, gemma = f"layers.{layer}.", self.kind == "gemma3_text"
        x = x + self.update(self.attention(self.norm(x, at + "input_layernorm"), layer, visible), layer)
        y = self.norm(x, at + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"))
        gate = self.dense(y, at + "mlp.gate_proj")
        act = gelu(gate) if gemma else gate / (1 + np.exp(-gate))
        y = self.dense(act * self.dense(y, at + "mlp.up_proj"), at + "mlp.down_proj")
        return x + (self.norm(y, at + "post_feedforward_layernorm") if gemma else y)

    def logits(self, visible: np.ndarray) -> np.ndarray:
        """visible [layers, kv_heads, n, n]"""
        x = self.embed()
        for layer in range(self.layers):
            x = self.block(x, layer, visible[layer])
        return self.head(x)

    def direct_logits(self, causal: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """Every layer's attention error, on the full run's activations, added to the last residual."""
        x, error = self.embed(), 0.0
        first = "h.{}.ln_1" if self.kind == "gpt2" else "layers.{}.input_layernorm"
        for layer in range(self.layers):
            y = self.norm(x, first.format(layer))
            cut, whole = (self.attention(y, layer, v[layer]) for v in (visible, causal))
            error = error + self.update(cut, layer) - self.update(whole, layer)
            x = self.block(x, layer, causal[layer])
        return self.head(x + error)

    def embed(self) -> np.ndarray:
        tokens = np.array(TOKENS)
        embedding = self.w["wte.weight" if self.kind == "gpt2" else "embed_tokens.weight"]
        x = embedding[tokens]
        if self.kind == "gpt2":
            x = x + self.w["wpe.weight"][: len(tokens)]
        if self.kind == "gemma3_text":
            x = x * np.sqrt(self.hidden)
        return x

    def head(self, x: np.ndarray) -> np.ndarray:
        embedding = self.w["wte.weight" if self.kind == "gpt2" else "embed_tokens.weight"]
        x = self.norm(x, "ln_f" if self.kind == "gpt2" else "norm")
        y = x @ self.w.get("lm_head.weight", embedding).T
        cap = self.c.get("final_logit_softcapping")
        return cap * np.tanh(y / cap) if cap else y

    def causal(self) -> np.ndarray:
        """What the full cache sees, [layers, kv_heads, n, n]."""
        t, i = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
        out = []
        for layer in range(self.layers):
            window = self.window(layer)
            out.append(np.repeat(((i <= t) & ((i > t - window) | (window == 0)))[None], self.kv_heads, 0))
        return np.array(out)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def make(folder: Path, config: dict) -> None:
    """Random weights for a tiny Mistral or Gemma 3."""
    rng = np.random.default_rng(5)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"embed_tokens": (61, hidden), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        shapes |= {at + "self_attn.q_proj": (q, hidden), at + "self_attn.k_proj": (kv, hidden),
                   at + "self_attn.v_proj": (kv, hidden), at + "self_attn.o_proj": (hidden, q),
                   at + "mlp.gate_proj": (inner, hidden), at + "mlp.up_proj": (inner, hidden),
                   at + "mlp.down_proj": (hidden, inner), at + "input_layernorm": (hidden,),
                   at + "post_attention_layernorm": (hidden,)}
        if config["model_type"] == "gemma3_text":
            shapes |= {at + "pre_feedforward_layernorm": (hidden,), at + "post_feedforward_layernorm": (hidden,),
                       at + "self_attn.q_norm": (dim,), at + "self_attn.k_norm": (dim,)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"model.{name}.weight": (rng.standard_normal(shape) * 0.3).astype(np.float32)
               for name, shape in shapes.items()}, folder / "model.safetensors")


SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 128,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
MADE = {
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 18, "tie_word_embeddings": True},
    "gemma3": SIZES | {"model_type": "gemma3_text", "sliding_window": 18, "sliding_window_pattern": 3,
                       "query_pre_attn_scalar": 16, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
                       "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 20.0},
}


class ClosedLoop(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvreplay_closed_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "ids").write_text(" ".join(map(str, TOKENS)))

    def model_folder(self, name: str) -> Path:
        if name not in MADE:
            return GOLDEN / name
        make(self.folder / name, MADE[name])
        return self.folder / name

    def held_at(self, kept: Path, policy: str, causal: np.ndarray) -> np.ndarray:
        """What each row saw: what was kept after the step before, the row itself, its own window."""
        visible = causal.copy()
        visible[:, :, PROMPT:] = False
        with kept.open() as file:
            for row in csv.DictReader(file):
                step = int(row["step"]) + 1
                if row["policy"] == policy and step < LENGTH:
                    positions = [int(p) for p in row["positions"].split()]
                    visible[int(row["layer"]), int(row["kv_head"]), step, [*positions, step]] = True
        return visible & causal

    def check(self, name: str) -> None:
        folder = self.model_folder(name)
        model = Model(folder)
        trace, out, kept = (self.folder / f"{name}.{end}" for end in ("h5", "json", "csv"))
        kvreplay("record", "--model", folder, "--tokens", self.folder / "ids", "--prompt-length", PROMPT,
                 "--kv-dtype", "fp32", "--logits", "full", "--with", "wo,residual", "-o", trace)
        causal = model.causal()
        full = model.logits(causal)
        with h5py.File(trace) as file:
            np.testing.assert_allclose(file["sequences/0/logits"][:], full[PROMPT - 1 :],
                                       atol=1e-3, rtol=1e-3, err_msg=name)
        kvreplay("replay", trace, "--model", folder, "--mode", "closed", "--kv-dtype", "fp32",
                 "-p", "window:budget=8", "-p", "h2o:budget=10", "-p", "confkv:high=6,low=14,recent=3,tau=q0.5",
                 "-o", out, "--kept", kept)
        p = log_softmax(full)[PROMPT:]
        self.check_direct(name, folder, trace, model, causal, p)
        for row in json.loads(out.read_text())["runs"]:
            visible = self.held_at(kept, row["policy"], causal)
            if row["name"] == "window":
                t, i = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
                expected = causal & ((i >= t - 8) | (t < PROMPT))
                np.testing.assert_array_equal(visible, expected)
            q = log_softmax(model.logits(visible))[PROMPT:]
            next_tokens = np.array(TOKENS[PROMPT + 1 :])
            nll = -q[np.arange(len(next_tokens)), next_tokens]
            kl = (np.exp(p) * (p - q)).sum(-1)
            quality = row["quality"]
            where = f"{name}, {row['policy']}"
            self.assertGreater(kl.mean(), 1e-3, where)  # else masking showed nothing
            self.assertAlmostEqual(np.exp(nll.mean()) / quality["ppl"], 1, delta=1e-3, msg=where)
            self.assertAlmostEqual(kl.mean() / quality["logit_kl"], 1, delta=1e-3, msg=where)
            self.assertAlmostEqual((p.argmax(-1) == q.argmax(-1)).mean(), quality["top1_agreement"], msg=where)

    def check_direct(self, name: str, folder: Path, trace: Path, model: Model, causal: np.ndarray,
                     p: np.ndarray) -> None:
        """direct_kl of a window; the trace keeps q, k, v and the residual in 16 bits."""
        out = self.folder / f"{name}.open.json"
        kvreplay("replay", trace, "--model", folder, "--mode", "open", "-p", "window:budget=8", "-o", out)
        t, i = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
        q = log_softmax(model.direct_logits(causal, causal & ((i >= t - 8) | (t < PROMPT))))[PROMPT:]
        kl = (np.exp(p) * (p - q)).sum(-1).mean()
        nll = -q[np.arange(LENGTH - PROMPT - 1), TOKENS[PROMPT + 1 :]].mean()
        quality = json.loads(out.read_text())["runs"][0]["quality"]
        self.assertAlmostEqual(quality["direct_kl"] / kl, 1, delta=1e-2, msg=name)
        self.assertAlmostEqual(quality["direct_nll"] / nll, 1, delta=1e-3, msg=name)
        self.assertAlmostEqual(quality["kl_proxy"], quality["direct_kl"] ** 0.5 * quality["residual_rel_l2"])

    def test_golden_models(self) -> None:
        for name in ("llama", "qwen2", "qwen3", "gpt2"):
            with self.subTest(name):
                self.check(name)

    def test_windowed_models(self) -> None:
        for name in MADE:
            with self.subTest(name):
                self.check(name)


if __name__ == "__main__":
    unittest.main()
