"""Tiny models, their GGUF files written as llama.cpp's converter writes them, and a tiny tokenizer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gguf
import numpy as np

from kvtrace_tools.tokens import byte_alphabet

HIDDEN, INTERMEDIATE, LAYERS, HEAD_DIM, THETA = 32, 20, 2, 8, 10000.0


def tokenizer_tokens() -> tuple[list[str], list[str]]:
    """Byte-level vocabulary: one special, 256 bytes, three merged pieces; and the merges."""
    tokens = ["<|endoftext|>", *byte_alphabet(), "he", "ll", "Ġhe"]
    return tokens, ["h e", "l l", "Ġ he"]


def make_weights(q_heads: int, kv_heads: int, vocab: int, bias: bool, tied: bool) -> dict:
    """Weights by Hugging Face name, float32."""
    rng = np.random.default_rng(7)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    q, kv = q_heads * HEAD_DIM, kv_heads * HEAD_DIM
    weights = {"model.embed_tokens.weight": draw(vocab, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = draw(vocab, HIDDEN)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, q),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            weights[f"{base}{name}.weight"] = draw(rows, columns)
            if bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                weights[f"{base}{name}.bias"] = draw(rows)
        weights[f"{base}input_layernorm.weight"] = draw(HIDDEN)
        weights[f"{base}post_attention_layernorm.weight"] = draw(HIDDEN)
    return weights


def add_gemma3_norms(weights: dict) -> None:
    """Gemma 3 has a norm before and after attention and MLP, and one of q and k heads."""
    rng = np.random.default_rng(8)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for name, size in (("pre_feedforward_layernorm", HIDDEN),
                           ("post_feedforward_layernorm", HIDDEN),
                           ("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)):
            weights[f"{base}{name}.weight"] = rng.standard_normal(size).astype(np.float32)


GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: row 2i of a head is the first half's row i, row 2i + 1 the second half's."""
    out = np.empty_like(values)
    half = HEAD_DIM // 2
    for head in range(heads):
        for i in range(half):
            out[head * HEAD_DIM + 2 * i] = values[head * HEAD_DIM + i]
            out[head * HEAD_DIM + 2 * i + 1] = values[head * HEAD_DIM + half + i]
    return out


def gguf_name(name: str, architecture: str) -> str:
    names = GGUF_NAMES | GEMMA3_NAMES if architecture == "gemma3" else GGUF_NAMES
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{suffix}"
    return f"{names[module]}.{suffix}"


def write_gguf(path: Path, architecture: str, weights: dict, q_heads: int, kv_heads: int,
               pre: str, pads: int = 0, extra: dict | None = None, quantise: bool = False) -> None:
    """`pads` unused tokens follow the tokenizer's; `extra` tensors are added as they are."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(q_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "gemma3":
        writer.add_sliding_window(5)
    tokens, merges = tokenizer_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(pads)])
    writer.add_token_types([3] + [1] * (len(tokens) - 1) + [5] * pads)
    writer.add_token_merges(merges)
    for name, values in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            values = interleave(values, q_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = interleave(values, kv_heads)
        if architecture == "gemma3" and "norm." in name:
            values = values + 1
        if quantise and name == "model.embed_tokens.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name, architecture), data, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name, architecture), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    """[heads, HEAD_DIM] rotated as Hugging Face does: channel i with channel i + HEAD_DIM / 2."""
    half = HEAD_DIM // 2
    angle = position * THETA ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
    )


def rotate_pairs(x: np.ndarray, position: int) -> np.ndarray:
    """[heads, HEAD_DIM] rotated as llama.cpp does for `llama`: channels 2i and 2i + 1."""
    angle = position * THETA ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    out = np.empty_like(x)
    out[:, 0::2] = x[:, 0::2] * np.cos(angle) - x[:, 1::2] * np.sin(angle)
    out[:, 1::2] = x[:, 1::2] * np.cos(angle) + x[:, 0::2] * np.sin(angle)
    return out
