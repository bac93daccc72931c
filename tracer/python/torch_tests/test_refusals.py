"""What cannot be recorded is said in one line; what breaks on the way leaves a recoverable file."""

import resource
import subprocess
import sys
import unittest
from pathlib import Path

import h5py
import numpy as np
import torch
import transformers

from support import COMMON, VOCABULARY, Case, configs, kvreplay, make_ids, make_model

import kvtrace
from kvtrace import RecordError
from kvtrace.describe import cache_keyword


class RefusalTest(Case):
    def setUp(self) -> None:
        super().setUp()
        self.model = make_model(configs()["llama"])

    def refused(self, text: str, work, model=None, **options) -> None:
        with self.assertRaisesRegex(RecordError, text) as caught:
            with kvtrace.record(
                self.model if model is None else model, self.path, quiet=True, **options
            ):
                work()
        self.assertNotIn("\n", str(caught.exception))
        self.assertFalse(self.path.exists())

    def test_ways_of_generating(self) -> None:
        ids = make_ids(1, 8)
        cases = [
            (dict(num_beams=3), r"beam search \(num_beams\) cannot be recorded"),
            (dict(penalty_alpha=0.6, top_k=4), "contrastive search"),
            (dict(prompt_lookup_num_tokens=3), r"assisted generation \(prompt_lookup_num_tokens\)"),
            (dict(assistant_model=self.model), r"assisted generation \(assistant_model\)"),
            (dict(use_cache=False), "use_cache=False cannot be recorded"),
            (dict(cache_implementation="static"), "cache_implementation='static'"),
        ]
        for how, text in cases:
            with self.subTest(how=list(how)):
                self.refused(text, lambda: self.model.generate(ids, max_new_tokens=4, **how))
        config = transformers.GenerationConfig(num_beams=2)
        self.refused(
            "beam search",
            lambda: self.model.generate(ids, generation_config=config, max_new_tokens=4),
        )

    def test_passes(self) -> None:
        ids, model = make_ids(2, 8), self.model
        left = torch.ones_like(ids)
        left[0, :3] = 0
        keyword, cache = cache_keyword(model), transformers.DynamicCache(config=model.config)
        model(input_ids=ids, **{keyword: cache})
        embeddings = model.get_input_embeddings()(ids)
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)
        holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2)
        both = torch.zeros(2, 1, 8, 8)
        cases = [
            ("a pass without input_ids", lambda: model(inputs_embeds=embeddings)),
            (
                "8 positions that were not recorded",
                lambda: model(input_ids=ids[:, :1], **{keyword: cache}),
            ),
            (
                "left padding without position_ids",
                lambda: model(input_ids=ids, attention_mask=left),
            ),
            ("static caches", lambda: model(input_ids=ids, **{keyword: static})),
            (
                "position_ids of sequence 0 do not count",
                lambda: model(input_ids=ids, position_ids=packed),
            ),
            ("padding between its tokens", lambda: model(input_ids=ids, attention_mask=holes)),
            (
                r"attention_mask: expected \[batch, positions\]",
                lambda: model(input_ids=ids, attention_mask=both),
            ),
            ("nothing was recorded", lambda: None),
        ]
        for text, work in cases:
            with self.subTest(text=text):
                self.refused(text, work)

    def test_a_mask_that_is_not_causal(self) -> None:
        """An attention in both directions, and a chunked one, behind an honest call."""

        class Prefix(type(self.model.model)):
            def forward(self, input_ids, **kwargs):
                mask = torch.tril(torch.ones(1, 1, 8, 8, dtype=torch.bool))
                mask[..., 1, 3] = True
                return super().forward(input_ids=input_ids, **{**kwargs, "attention_mask": mask})

        self.model.model.__class__ = Prefix
        self.refused(
            "layer 0, pass at position 0: the attention mask is not the causal one",
            lambda: self.model(input_ids=make_ids(1, 8)),
        )

    def test_models(self) -> None:
        bloom = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2)
        model = transformers.BloomForCausalLM(bloom).eval()
        self.refused(
            "BloomForCausalLM: its attention does not go through transformers' attention",
            lambda: model(input_ids=make_ids(1, 8)),
            model,
        )
        t5 = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            d_kv=16,
            decoder_start_token_id=0,
        )
        for other, text in (
            (transformers.T5ForConditionalGeneration(t5).eval(), "an encoder-decoder"),
            (torch.nn.Linear(2, 2), "Linear: expected a transformers PreTrainedModel"),
            (make_model(configs()["llama"]).train(), "in training mode"),
            (torch.compile(self.model), "pass the model before torch.compile"),
        ):
            self.refused(text, lambda: None, other)
        headless = self.model.model
        self.refused("gives no logits", lambda: headless(input_ids=make_ids(1, 8)), headless)

    def test_a_path_that_does_more_than_it_says(self) -> None:
        """A scale of its own per layer: told in the call, or done in silence inside of it."""
        scaled = make_model(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=2,
                bos_token_id=1,
                eos_token_id=2,
                scale_attn_by_inverse_layer_idx=True,
            ),
            "eager",
        )
        with torch.no_grad():
            scaled.transformer.h[1].attn.c_attn.weight.mul_(3)
        self.refused(
            "layer 1: softmax_scale 0.125, but 0.25 in the layers before|"
            "layer 1, pass at position 0: attention gave outputs that differ",
            lambda: scaled(input_ids=make_ids(1, 8)),
            scaled,
        )

        def bent(module, query, key, value, mask, scaling=None, **kwargs):
            original = transformers.modeling_utils.sdpa_attention_forward
            return original(module, query, key, value, mask, scaling=scaling / 2, **kwargs)

        transformers.AttentionInterface.register("bent", bent)
        masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        transformers.AttentionMaskInterface.register("bent", masks["sdpa"])
        for dtype in (torch.float32, torch.bfloat16):
            model = make_model(configs()["llama"], "bent", dtype=dtype)
            self.refused(
                "layer 0, pass at position 0: attention gave outputs that differ",
                lambda: model(input_ids=make_ids(1, 8)),
                model,
            )

    def test_options(self) -> None:
        ids = make_ids(1, 8)
        for options, text in (
            (dict(logits="some"), "logits is 'some', expected one of none, stats, full"),
            (dict(extras=["wi"]), "extras: 'wi'"),
            (dict(layers=[0, 3]), "layers: 3, expected"),
            (dict(rows="last"), "rows is 'last'"),
            (dict(flush_every=0), "flush_every is 0"),
            (dict(spans={"needle": [(2, 20)]}), "spans/needle: 2 .. 20, but the sequence has 8"),
            (dict(spans=[]), "spans: given for 0 sequences"),
            (dict(vocab_size=40), "tokens: step .*, expected 0 to 39"),
            (dict(retention=lambda call: call.key[..., 0]), "retention: layer 0: shape"),
            (dict(image_score=lambda request: np.zeros(3)), "image_score: layer 0, sequence 0"),
        ):
            with self.subTest(options=list(options)):
                self.refused(text, lambda: self.model(input_ids=ids), **options)
        self.refused(
            "logits of position 3 are missing",
            prompt_length=4,
            work=lambda: self.model(input_ids=ids, logits_to_keep=1),
        )
        missing = self.folder / "none" / "run.h5"
        with self.assertRaisesRegex(RecordError, "the folder .* does not exist"):
            with kvtrace.record(self.model, missing):
                pass
        with self.assertRaisesRegex(RecordError, "is being recorded already"):
            with kvtrace.record(self.model, self.path, quiet=True):
                with kvtrace.record(self.model, self.folder / "b.h5", quiet=True):
                    pass

    def test_a_value_beyond_16_bits_is_named(self) -> None:
        model = make_model(configs()["llama"], dtype=torch.bfloat16)
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
        self.refused(
            r"sequences/0/layers/1/v: step 0: -?inf, expected finite values; the trace "
            "stores 16 bits",
            lambda: model(input_ids=make_ids(1, 8)),
            model,
        )

    def test_an_exception_leaves_what_is_whole(self) -> None:
        class Stop(transformers.StoppingCriteria):
            def __call__(self, ids, scores, **kwargs):
                if ids.shape[1] == 30:
                    raise KeyboardInterrupt
                return torch.zeros(len(ids), dtype=torch.bool)

        with self.assertRaises(KeyboardInterrupt):
            with kvtrace.record(self.model, self.path, quiet=True):
                self.model.generate(
                    make_ids(2, 12),
                    max_new_tokens=40,
                    min_new_tokens=40,
                    stopping_criteria=[Stop()],
                )
        part = self.path.with_name("run.h5.part")
        self.assertIn("29 positions", kvreplay("inspect", part, "--recover", "--check", "--all"))

    CHILD = """
import os, sys
sys.path[:0] = {paths!r}
from support import *
import kvtrace

class Kill(transformers.StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] == 100:
            recording._conveyor.put(lambda: os.kill(os.getpid(), 9))
        return torch.zeros(len(ids), dtype=torch.bool)

model = make_model(configs()["llama"])
with kvtrace.record(model, {path!r}, extras=["residual"]) as recording:
    model.generate(make_ids(1, 12), max_new_tokens=200, min_new_tokens=200,
                   stopping_criteria=[Kill()])
"""

    def test_a_killed_process(self) -> None:
        code = self.CHILD.format(paths=[str(Path(__file__).resolve().parent)], path=str(self.path))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(done.returncode, -9, done.stderr)
        part = self.path.with_name("run.h5.part")
        self.assertFalse(self.path.exists())
        with h5py.File(part) as file:
            committed = int(file["sequences/0"].attrs["committed"])
        self.assertGreaterEqual(committed, 80)
        self.assertIn(
            f"{committed} positions", kvreplay("inspect", part, "--recover", "--check", "--all")
        )

    def test_a_full_disk(self) -> None:
        """The file may not grow beyond some size: the same error path as a full disk."""
        config = transformers.LlamaConfig(**{**COMMON, "max_position_embeddings": 4096})
        model, before = make_model(config), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 19, before[1]))
        try:
            with self.assertRaisesRegex(
                RecordError,
                "run.h5.part: at position .*: File too large; "
                r"positions committed: \d+",
            ) as caught:
                kvtrace.teacher_forced(
                    model, make_ids(1, 3000)[0], self.path, prompt_length=100, block=200, quiet=True
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertNotIn("\n", str(caught.exception))
        self.assertFalse(self.path.exists())
        part = self.path.with_name("run.h5.part")
        self.assertIn("positions", kvreplay("inspect", part, "--recover", "--check"))


if __name__ == "__main__":
    unittest.main()
