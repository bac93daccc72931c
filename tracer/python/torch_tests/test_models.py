"""Every architecture, every attention path: traces that keep the rules, equal to the C++
runner's."""

import subprocess
import unittest

import h5py
import numpy as np
import torch
import transformers

from support import (
    COMMON,
    HEAD,
    PROGRAM,
    VOCABULARY,
    Case,
    configs,
    make_ids,
    make_model,
    read,
    replay,
)

import kvtrace

ALL = dict(logits="full", extras=("wo", "value_norm", "residual"))


class ModelsTest(Case):
    def test_traces_keep_every_rule_and_full_replays_exactly(self) -> None:
        ids = make_ids(1, 40)
        for name, config in configs().items():
            # Unrounded values met in attention: the stored ones give lse only to their rounding.
            for attention, kv, tolerance in (("eager", "model", 1e-4), ("sdpa", "fp16", 1e-6)):
                with self.subTest(model=name, attention=attention, kv=kv):
                    model = make_model(config, attention)
                    with kvtrace.record(model, self.path, quiet=True, kv_dtype=kv, **ALL):
                        model.generate(
                            ids,
                            attention_mask=torch.ones_like(ids),
                            max_new_tokens=12,
                            min_new_tokens=12,
                            do_sample=False,
                        )
                    self.check()
                    quality = replay(self.path, "full")["full"]["quality"]
                    self.assertAlmostEqual(quality["attention_recall"], 1, delta=tolerance)
                    self.assertLess(quality["output_rel_l2"], 1e-3)
                    self.assertLess(quality["residual_rel_l2"], 1e-3)
                    self.assertNotIn("generate", vars(model))

    def test_what_the_header_says(self) -> None:
        expected = {
            "llama": dict(rope="half", rope_dim=16, softmax_scale=0.25, window=[0, 0, 0]),
            "mistral": dict(rope="half", rope_dim=16, softmax_scale=0.25, window=[16, 16, 16]),
            "gemma3": dict(rope="half", rope_dim=16, softmax_scale=20**-0.5, window=[16, 0, 16]),
            "gpt_oss": dict(rope="half", rope_dim=16, softmax_scale=0.25, window=[16, 0, 16]),
            "gpt2": dict(rope="none", softmax_scale=0.25, window=[0, 0, 0]),
            "gptj": dict(rope="interleaved", rope_dim=8, softmax_scale=0.25, window=[0, 0, 0]),
            "phi": dict(rope="half", rope_dim=8, softmax_scale=0.25, window=[0, 0, 0]),
            "glm": dict(rope="interleaved", rope_dim=8, softmax_scale=0.25, window=[0, 0, 0]),
        }
        gptj = transformers.GPTJConfig(
            vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, eos_token_id=2
        )
        for name, facts in expected.items():
            with self.subTest(model=name):
                model = make_model({**configs(), "gptj": gptj}[name], "eager")
                kvtrace.teacher_forced(
                    model, make_ids(1, 24)[0], self.path, prompt_length=20, quiet=True
                )
                with h5py.File(self.path) as file:
                    group = file["model"]
                    for key in ("rope", "rope_dim", "softmax_scale"):
                        self.assertEqual(group.attrs.get(key), facts.get(key), key)
                    self.assertEqual(group["window"][:].tolist(), facts["window"])
                    self.assertEqual(group.attrs["logit_size"], VOCABULARY)
                    self.assertEqual("sinks" in group, name == "gpt_oss")
                    if name == "gpt_oss":
                        sinks = torch.stack([layer.self_attn.sinks for layer in model.model.layers])
                        np.testing.assert_array_equal(group["sinks"][:], sinks.detach().numpy())
                    if name == "gemma3":  # two bases, one row per layer
                        frequencies = group["rope_inv_freq"][:]
                        self.assertEqual(frequencies.shape, (3, 8))
                        self.assertTrue((frequencies[0] == frequencies[2]).all())
                        self.assertFalse((frequencies[0] == frequencies[1]).all())

    def test_stored_keys_are_rotated_as_the_header_says(self) -> None:
        """Turning keys back by rope, rope_dim and rope_inv_freq gives the projections again."""
        for name in ("llama", "phi", "glm"):
            with self.subTest(model=name):
                model = make_model(configs()[name])
                inner = model.model
                raw: list[torch.Tensor] = []
                hook = inner.layers[0].self_attn.k_proj.register_forward_hook(
                    lambda m, a, out: raw.append(out.detach())
                )
                kvtrace.teacher_forced(
                    model, make_ids(1, 24)[0], self.path, prompt_length=20, block=24, quiet=True
                )
                hook.remove()
                with h5py.File(self.path) as file:
                    k = file["sequences/0/layers/0/k"][:].astype("f8")
                    dim, kind = int(file["model"].attrs["rope_dim"]), file["model"].attrs["rope"]
                    frequencies = file["model/rope_inv_freq"][0]
                angle = np.arange(24)[:, None, None] * frequencies
                cos, sin = np.cos(angle), np.sin(angle)
                pick = (
                    (slice(0, dim // 2), slice(dim // 2, dim))
                    if kind == "half"
                    else (slice(0, dim, 2), slice(1, dim, 2))
                )
                a, b = k[..., pick[0]], k[..., pick[1]]
                turned = k.copy()
                turned[..., pick[0]], turned[..., pick[1]] = a * cos + b * sin, b * cos - a * sin
                np.testing.assert_allclose(turned, raw[0].numpy().reshape(24, 2, -1), atol=5e-3)

    def test_soft_caps_are_written_down(self) -> None:
        """kvreplay does not apply them yet and says so; the trace holds the capped sums."""
        config = transformers.Gemma2Config(
            **COMMON, **HEAD, sliding_window=16, attn_logit_softcapping=1.5, query_pre_attn_scalar=4
        )
        model = make_model(config, "eager")
        kvtrace.teacher_forced(
            model, make_ids(1, 40)[0], self.path, prompt_length=30, block=16, quiet=True
        )
        with h5py.File(self.path) as file:
            self.assertEqual(file["model"].attrs["score_softcap"], 1.5)
            windows = file["model/window"][:]
            self.assertEqual(sorted(set(windows.tolist())), [0, 16])
            for layer, window in enumerate(windows):
                group = file[f"sequences/0/layers/{layer}"]
                q, k = group["q"][:].astype("f8"), group["k"][:].astype("f8")
                scores = 0.5 * np.einsum("thd,jhd->htj", q, k.repeat(2, axis=1))
                capped = 1.5 * np.tanh(scores / 1.5)
                t, j = np.arange(40)[:, None], np.arange(40)
                capped[:, (j > t) | ((j <= t - window) & (window > 0))] = -np.inf
                lse = np.log(np.exp(capped).sum(-1)).T
                np.testing.assert_allclose(group["lse"][:], lse, atol=2e-3)
                self.assertGreater(np.abs(scores).max(), 3)
        with self.assertRaisesRegex(AssertionError, "score_softcap"):
            self.check()

    def test_both_recorders_give_the_same_trace(self) -> None:
        tokens = self.folder / "run.tokens"
        tokens.write_text(" ".join(map(str, make_ids(1, 60)[0].tolist())))
        compared = []
        for name, config in configs().items():
            directory = self.folder / name
            make_model(config).save_pretrained(directory)
            for ours, theirs, tolerance in (("model", "fp32", 2e-3), ("fp16", "fp16", 4e-3)):
                arguments = ["--prompt-length", "40", "--logits", "full", "--with"]
                done = subprocess.run(
                    [
                        PROGRAM,
                        "record",
                        "--model",
                        directory,
                        "--tokens",
                        tokens,
                        "-o",
                        self.folder / "cpp.h5",
                        *arguments,
                        "wo,value_norm,residual",
                        "--kv-dtype",
                        theirs,
                    ],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    self.assertIn("not support", done.stderr, name)
                    break
                model = make_model(config)
                ids = [int(t) for t in tokens.read_text().split()]
                kvtrace.teacher_forced(
                    model,
                    ids,
                    self.path,
                    prompt_length=40,
                    block=17,
                    kv_dtype=ours,
                    quiet=True,
                    **ALL,
                )
                with self.subTest(model=name, kv=theirs):
                    self.check()
                    self.assert_same(read(self.path), read(self.folder / "cpp.h5"), tolerance)
                    compared.append(name)
        known = {"llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2"}
        self.assertLessEqual(known, set(compared))

    def test_half_precision(self) -> None:
        ids = make_ids(1, 40)
        for dtype in (torch.bfloat16, torch.float16):
            for name in ("llama", "gemma3"):
                with self.subTest(dtype=dtype, model=name):
                    model = make_model(configs()[name], "eager", dtype=dtype)
                    with kvtrace.record(model, self.path, quiet=True, extras=("wo", "value_norm")):
                        model.generate(
                            ids,
                            attention_mask=torch.ones_like(ids),
                            max_new_tokens=8,
                            do_sample=False,
                        )
                    self.check()
                    with h5py.File(self.path) as file:
                        self.assertEqual(file["model"].attrs["cache_dtype"], "float16")
                        self.assertEqual(
                            file["model"].attrs["compute_dtype"], str(dtype).removeprefix("torch.")
                        )
                        self.assertEqual(file["sequences/0/layers/0/o"].dtype, "<f2")


if __name__ == "__main__":
    unittest.main()
