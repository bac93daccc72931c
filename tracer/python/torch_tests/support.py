"""Tiny random models, and kvreplay as the judge of what was recorded."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import numpy as np
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

PROGRAM = os.environ["KVREPLAY_PROGRAM"]
VOCABULARY = 97

COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
HEAD = dict(head_dim=16)
MIXED = dict(
    sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
)


def configs() -> dict[str, transformers.PretrainedConfig]:
    """One configuration per architecture, small, with what makes it different."""
    return {
        "llama": transformers.LlamaConfig(**COMMON),
        "qwen2": transformers.Qwen2Config(**COMMON),
        "qwen3": transformers.Qwen3Config(**COMMON, **HEAD),
        "mistral": transformers.MistralConfig(**COMMON, sliding_window=16),
        "gemma3": transformers.Gemma3TextConfig(
            **COMMON, **HEAD, **MIXED, query_pre_attn_scalar=20
        ),
        "gpt_oss": transformers.GptOssConfig(
            **COMMON, **HEAD, **MIXED, num_local_experts=4, num_experts_per_tok=2
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=256,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "phi": transformers.PhiConfig(**COMMON, partial_rotary_factor=0.5),
        "glm": transformers.GlmConfig(
            **COMMON, **HEAD, partial_rotary_factor=0.5, pad_token_id=None
        ),
    }


def make_model(
    config: transformers.PretrainedConfig,
    attention: str = "sdpa",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
):
    """Random weights, large enough that attention is not flat."""
    if config.model_type == "gpt_oss":  # transformers has no SDPA for learned sinks
        attention = "eager"
    torch.manual_seed(seed)
    config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("sinks") or ".bias" in name:
                values.normal_(0, 0.5)
            elif values.ndim > 1:
                values.normal_(0, 1.2 * values.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def make_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def kvreplay(*arguments: object) -> str:
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise AssertionError(f"exit {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def replay(path: Path, *specs: str) -> dict[str, dict]:
    """Results of the policies, by SPEC."""
    out = path.with_suffix(".json")
    arguments = ["replay", path, "-o", out, "--no-bound", "--quiet"]
    for spec in specs:
        arguments += ["-p", spec]
    kvreplay(*arguments)
    return dict(zip(specs, json.loads(out.read_text())["runs"]))


def read(path: Path, sequence: int = 0) -> dict[str, np.ndarray]:
    """Every dataset of a sequence, and the model's under `model/`."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(path) as file:

        def visit(prefix: str):
            def keep(name: str, item: object) -> None:
                if isinstance(item, h5py.Dataset):
                    values = item[()]
                    found[prefix + name] = values.astype("f4") if values.dtype == "f2" else values

            return keep

        file[f"sequences/{sequence}"].visititems(visit(""))
        file["model"].visititems(visit("model/"))
    return found


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtrace_torch_")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.path = self.folder / "run.h5"

    def check(self, path: Path | None = None) -> None:
        kvreplay("inspect", path or self.path, "--check", "--all")

    def assert_same(
        self,
        one: dict[str, np.ndarray],
        other: dict[str, np.ndarray],
        tolerance: float,
        but: tuple[str, ...] = (),
    ) -> None:
        names = {n for n in one if not n.startswith(but)} if but else set(one)
        self.assertEqual(names, {n for n in other if not n.startswith(but)} if but else set(other))
        for name in sorted(names):
            self.assertEqual(one[name].shape, other[name].shape, name)
            np.testing.assert_allclose(
                one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name
            )
