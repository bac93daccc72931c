"""Generation, batches, padding, options and callbacks: what lands in the trace, and what does
not."""

import unittest

import h5py
import numpy as np
import torch
import transformers

from support import Case, configs, make_ids, make_model, read

import kvtrace
from kvtrace.describe import cache_keyword

ALL = dict(logits="full", extras=("wo", "value_norm", "residual"))


def generate(model, ids: torch.Tensor, new: int, **how) -> torch.Tensor:
    mask = how.pop("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, **{"do_sample": False, **how}
    )


class RunsTest(Case):
    def test_generation_and_teacher_forcing_agree(self) -> None:
        """The same tokens give the same rows, whatever the blocks and the commits."""
        for name in ("llama", "gemma3", "gpt_oss"):
            with self.subTest(model=name):
                model = make_model(configs()[name])
                with kvtrace.record(model, self.path, quiet=True, flush_every=5, **ALL):
                    out = generate(model, make_ids(1, 30), 25, min_new_tokens=25)
                self.check()
                one = read(self.path)
                np.testing.assert_array_equal(one["tokens"], out[0, :-1])
                for block in (11, 64):
                    kvtrace.teacher_forced(
                        model,
                        out[0, :-1],
                        self.folder / "b.h5",
                        block=block,
                        prompt_length=30,
                        quiet=True,
                        **ALL,
                    )
                    self.check(self.folder / "b.h5")
                    self.assert_same(one, read(self.folder / "b.h5"), 2e-3)

    def test_sampling_is_what_it_would_have_been(self) -> None:
        model, ids = make_model(configs()["llama"]), make_ids(1, 20)
        how = dict(do_sample=True, temperature=0.7, top_k=0)
        torch.manual_seed(5)
        alone = generate(model, ids, 20, **how)
        torch.manual_seed(5)
        with kvtrace.record(model, self.path, quiet=True, seed=5):
            recorded = generate(model, ids, 20, **how)
        torch.testing.assert_close(alone, recorded)
        self.check()
        with h5py.File(self.path) as file:
            group = file["sequences/0"]
            self.assertEqual((group.attrs["temperature"], group.attrs["seed"]), (0.7, 5))
            np.testing.assert_array_equal(group["tokens"][:], alone[0, : len(group["tokens"])])

    def test_a_batch_of_three_with_padding_equals_three_runs(self) -> None:
        for name in ("qwen2", "gpt2", "gemma3"):
            for side in ("left", "right"):
                with self.subTest(model=name, padding=side):
                    model, lengths, total = make_model(configs()[name]), (30, 12, 25), 30
                    ids, mask = make_ids(3, total), torch.ones(3, total, dtype=torch.long)
                    for b, length in enumerate(lengths):
                        pads = slice(0, total - length) if side == "left" else slice(length, None)
                        ids[b, pads], mask[b, pads] = 0, 0
                    with kvtrace.record(model, self.path, quiet=True, **ALL):
                        if side == "left":
                            out = generate(
                                model,
                                ids,
                                10,
                                attention_mask=mask,
                                min_new_tokens=10,
                                pad_token_id=0,
                            )
                        else:
                            model(input_ids=ids, attention_mask=mask)
                    self.check()
                    for b, length in enumerate(lengths):
                        begin = total - length if side == "left" else 0
                        kept = out[b, begin:-1] if side == "left" else ids[b, :length]
                        single = self.folder / "single.h5"
                        with kvtrace.record(model, single, prompt_length=length, quiet=True, **ALL):
                            model(input_ids=kept[None])
                        self.assert_same(read(self.path, b), read(single), 2e-3)

    def test_a_sequence_ends_at_its_end_token(self) -> None:
        """Two of three sequences end early; the batch goes on feeding them padding."""
        model, ids = make_model(configs()["llama"], seed=3), make_ids(3, 16, seed=2)
        free = generate(model, ids, 40, min_new_tokens=40)
        stop = int(free[0, 16 + 5])
        first = [(row[16:] == stop).nonzero() for row in free]
        lengths = [16 + int(at[0]) if len(at) else 16 + 39 for at in first]
        self.assertNotEqual(len(set(lengths)), 1)
        with kvtrace.record(model, self.path, quiet=True):
            generate(model, ids, 40, eos_token_id=stop, pad_token_id=0)
        self.check()
        with h5py.File(self.path) as file:
            found = [int(file[f"sequences/{b}"].attrs["n_tokens"]) for b in range(3)]
        self.assertEqual(found, lengths)

    def test_padding_after_another_stop_is_cut(self) -> None:
        class Enough(transformers.StoppingCriteria):
            def __call__(self, ids, scores, **kwargs):
                return torch.tensor([ids.shape[1] >= 20, ids.shape[1] >= 26])

        model = make_model(configs()["llama"])
        with kvtrace.record(model, self.path, quiet=True):
            generate(
                model,
                make_ids(2, 16),
                30,
                suppress_tokens=[2],
                pad_token_id=0,
                stopping_criteria=[Enough()],
            )
        self.check()
        with h5py.File(self.path) as file:
            found = [int(file[f"sequences/{b}"].attrs["n_tokens"]) for b in range(2)]
        self.assertEqual(found, [19, 25])

    def test_several_runs_become_several_sequences(self) -> None:
        model = make_model(configs()["llama"])
        with kvtrace.record(model, self.path, quiet=True) as recording:
            generate(model, make_ids(1, 12), 6, min_new_tokens=6)
            generate(model, make_ids(2, 9, seed=1), 4, min_new_tokens=4)
            cache = transformers.DynamicCache(config=model.config)  # a loop of one's own
            ids = make_ids(1, 8, seed=2)
            for part in (ids, ids[:, :1], ids[:, :1]):
                with torch.no_grad():
                    model(input_ids=part, **{cache_keyword(model): cache})
        self.check()
        with h5py.File(self.path) as file:
            sizes = [
                (int(g.attrs["n_prompt"]), int(g.attrs["n_tokens"]))
                for _, g in sorted(file["sequences"].items())
            ]
        self.assertEqual(sizes, [(12, 17), (9, 12), (9, 12), (8, 10)])
        self.assertEqual((recording.summary.sequences, recording.summary.positions), (4, 51))

    def test_a_prompt_in_chunks_and_several_answers(self) -> None:
        model, ids = make_model(configs()["gemma3"]), make_ids(1, 40)
        for rows in ("all", "decode"):
            found = []
            for chunk in (None, 16):
                with kvtrace.record(model, self.path, quiet=True, rows=rows, logits="full"):
                    generate(model, ids, 8, min_new_tokens=8, prefill_chunk_size=chunk)
                self.check()
                found.append(read(self.path))
            self.assert_same(*found, 2e-3)
        with kvtrace.record(model, self.path, quiet=True):
            out = generate(model, ids, 6, min_new_tokens=6, do_sample=True, num_return_sequences=3)
        self.check()
        for b in range(3):
            np.testing.assert_array_equal(read(self.path, b)["tokens"], out[b, :-1])

    def test_layers_rows_and_column_sums(self) -> None:
        for name in ("gemma3", "gpt_oss"):
            with self.subTest(model=name):
                model, ids = make_model(configs()[name]), make_ids(2, 100)
                mask = torch.ones_like(ids)
                ids[1, :9], mask[1, :9] = 0, 0
                with kvtrace.record(model, self.folder / "all.h5", quiet=True):
                    generate(model, ids, 6, attention_mask=mask, min_new_tokens=6, pad_token_id=0)
                with kvtrace.record(model, self.path, quiet=True, layers=[0, 1], rows="decode"):
                    generate(model, ids, 6, attention_mask=mask, min_new_tokens=6, pad_token_id=0)
                self.check()
                for b, prompt in ((0, 100), (1, 91)):
                    whole, some = read(self.folder / "all.h5", b), read(self.path, b)
                    self.assertFalse([n for n in some if n.startswith("layers/2")])
                    for layer in (0, 1):
                        at = f"layers/{layer}/"
                        np.testing.assert_array_equal(some[at + "k"], whole[at + "k"])
                        for dataset in ("q", "o", "lse"):
                            np.testing.assert_allclose(
                                some[at + dataset], whole[at + dataset][prompt - 64 :], atol=1e-5
                            )
                        sums = some[at + "column_sum"]
                        expected = column_sums(whole, layer, prompt, model.config, name)
                        np.testing.assert_allclose(sums, expected, rtol=5e-3, atol=5e-3)

    def test_callbacks_and_spans(self) -> None:
        model, ids = make_model(configs()["llama"]), make_ids(2, 20)
        mask = torch.ones_like(ids)
        ids[1, :4], mask[1, :4] = 0, 0
        gate = torch.nn.Linear(64, 2)

        def retention(call: kvtrace.AttentionCall) -> torch.Tensor:
            assert call.hidden.shape[:2] == (2, call.key.shape[2])
            return torch.nn.functional.logsigmoid(gate(call.hidden) + call.layer)

        def saliency(request: kvtrace.ImageRequest) -> np.ndarray:
            return np.arange(len(request.tokens)) + 100.0 * request.layer + request.sequence

        with kvtrace.record(
            model,
            self.path,
            quiet=True,
            retention=retention,
            image_score=saliency,
            retention_gate={"gate.weight": gate.weight, "gate.bias": gate.bias},
            chunks=[(0, 16)],
            spans=lambda s, prompt: {"needle": [(len(prompt) - 5, len(prompt) - 2)]},
        ):
            generate(model, ids, 5, attention_mask=mask, min_new_tokens=5, pad_token_id=0)
        self.check()
        for b, prompt in ((0, 20), (1, 16)):
            found = read(self.path, b)
            self.assertEqual(found["spans/needle"].tolist(), [[prompt - 5, prompt - 2]])
            self.assertEqual(found["chunks"].tolist(), [[0, 16]])
            expected = np.r_[np.arange(prompt) + 100 + b, np.zeros(4)]
            np.testing.assert_array_equal(found["layers/1/image_score"], expected)
            self.assertEqual(found["layers/0/retention"].shape, (prompt + 4, 2))
            self.assertTrue((found["layers/0/retention"] < 0).all())
            np.testing.assert_array_equal(
                found["model/retention_gate/gate.weight"], gate.weight.detach().numpy()
            )

    def test_generation_loop_without_grad_mode_and_autocast(self) -> None:
        """Sums stay float32 where the caller has asked for less."""
        model, ids = make_model(configs()["llama"], "eager"), make_ids(1, 20)
        with kvtrace.record(model, self.path, quiet=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                generate(model, ids, 6)
        self.check()

    def test_a_flash_path(self) -> None:
        """A kernel that is given padding as [batch, positions], the window as a number, and no
        mask: what flash kernels are given, computed here without one."""

        def kernel(module, query, key, value, mask, scaling=None, sliding_window=None, **kwargs):
            n, keys = query.shape[2], key.shape[2]
            t = torch.arange(keys - n, keys)[:, None]
            seen = torch.arange(keys) <= t
            if sliding_window:
                seen &= torch.arange(keys) > t - sliding_window
            seen = seen[None, None].repeat(len(query), 1, 1, 1)
            if mask is not None:
                seen &= mask[:, None, None, -keys:].bool()
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
            )
            return out.nan_to_num().transpose(1, 2).contiguous(), None

        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

        transformers.AttentionInterface.register("kernel_stand_in", kernel)
        transformers.AttentionMaskInterface.register("kernel_stand_in", masks["flash_attention_2"])
        ids = make_ids(2, 30)
        mask = torch.ones_like(ids)
        ids[1, :7], mask[1, :7] = 0, 0
        for name in ("llama", "gemma3"):
            found = []
            for attention in ("kernel_stand_in", "sdpa"):
                model = make_model(configs()[name], attention)
                with kvtrace.record(model, self.path, quiet=True, **ALL):
                    generate(model, ids, 9, attention_mask=mask, min_new_tokens=9, pad_token_id=0)
                self.check()
                found.append([read(self.path, b) for b in range(2)])
            for one, other in zip(*found):
                self.assert_same(one, other, 2e-3)

    def test_models_are_left_as_they_were(self) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

        before = dict(table)
        model, other = make_model(configs()["llama"]), make_model(configs()["llama"], seed=1)
        hooks = len(model._forward_hooks) + len(model._forward_pre_hooks)
        with kvtrace.record(model, self.path, quiet=True):
            generate(other, make_ids(1, 5), 3)  # another model is not recorded
            generate(model, make_ids(1, 12), 3, min_new_tokens=3)
        self.assertEqual(dict(table), before)
        self.assertEqual(len(model._forward_hooks) + len(model._forward_pre_hooks), hooks)
        with h5py.File(self.path) as file:
            self.assertEqual(list(file["sequences"]), ["0"])


def column_sums(found: dict, layer: int, prompt: int, config, name: str) -> np.ndarray:
    """H2O's mass, written down from the definition."""
    q, k = found[f"layers/{layer}/q"].astype("f8"), found[f"layers/{layer}/k"].astype("f8")
    window, scale = int(found["model/window"][layer]), 0.25 if name == "gpt_oss" else 20**-0.5
    sums = np.zeros((4, prompt))
    for head in range(4):
        for t in range(prompt):
            low = max(0, t - window + 1) if window else 0
            score = scale * k[low : t + 1, head // 2] @ q[t, head]
            top = score.max()
            total = np.exp(score - top).sum()
            if name == "gpt_oss":
                total += np.exp(found["model/sinks"][layer, head] - top)
            sums[head, low : t + 1] += np.exp(score - top) / total
    return sums


if __name__ == "__main__":
    unittest.main()
