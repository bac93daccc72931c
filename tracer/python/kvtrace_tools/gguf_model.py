"""A Llama-family, Qwen2, Qwen3 or Gemma 3 model from GGUF to a Hugging Face directory.

GGUF stores what llama.cpp's attention wants. For `llama` that is rotary pairs side by side: the
rows of q and k (weights and biases) of each head are interleaved, (0, d/2, 1, d/2 + 1, ...), where
Hugging Face keeps the two halves apart. Each is undone with its own head count: k has n_kv_heads.
The others are stored as they were, but for Gemma 3's norms: Hugging Face keeps w of a factor
1 + w, GGUF the factor.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

from . import gguf_tokenizer
from .errors import ToolError
from .files import replacing, write_whole

# GGUF's name -> class and model_type of config.json.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA3_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@dataclass
class Shape:
    """What config.json says about sizes."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int


class Source:
    """A GGUF file whose fields are checked when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except OSError as error:
            raise ToolError(f"{path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # the library raises many kinds for a damaged file
            text = " ".join(str(error).split())
            raise ToolError(f"{path}: not a readable GGUF file: {text}") from error

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def number(self, key: str, kind: type[int] | type[float], default: Any = None) -> Any:
        value = self.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
            found = "missing" if value is None else repr(value)[:40]
            raise ToolError(f"{self.path}: {key} is {found}, expected a positive {kind.__name__}")
        return value


def layer_names(architecture: str) -> dict[str, str]:
    """GGUF's name of a layer's module -> Hugging Face's."""
    if architecture == "gemma3":
        return LAYER_NAMES | HEAD_NORMS | GEMMA3_NORMS
    return LAYER_NAMES | HEAD_NORMS if architecture == "qwen3" else LAYER_NAMES


def read_shape(source: Source) -> Shape:
    """Sizes of the model; refuses architectures and variants that this tool does not know."""
    architecture = source.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ToolError(f"{source.path}: architecture {architecture!r} is not known; known: {known}")
    prefix = architecture + "."
    hidden = source.number(prefix + "embedding_length", int)
    q_heads = source.number(prefix + "attention.head_count", int)
    kv_heads = source.number(prefix + "attention.head_count_kv", int, q_heads)
    head_dim = source.number(prefix + "attention.key_length", int, hidden // q_heads)
    value_dim = source.number(prefix + "attention.value_length", int, head_dim)
    if q_heads % kv_heads or head_dim % 2 or value_dim != head_dim:
        raise ToolError(
            f"{source.path}: {q_heads} query heads, {kv_heads} KV heads, key length {head_dim}, "
            f"value length {value_dim} do not make a model of this kind"
        )
    if source.get(prefix + "expert_count", 0):
        raise ToolError(f"{source.path}: mixtures of experts are not supported")
    return Shape(
        architecture,
        source.number(prefix + "block_count", int),
        hidden,
        source.number(prefix + "feed_forward_length", int),
        q_heads,
        kv_heads,
        head_dim,
    )


def check_rope(source: Source, shape: Shape) -> None:
    """Refuses every rotary variant that config.json would not say here."""
    prefix = shape.architecture + ".rope."
    scaling = source.get(prefix + "scaling.type", "none")
    rotated = source.get(prefix + "dimension_count", shape.head_dim)
    tensors = {tensor.name for tensor in source.reader.tensors}
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ToolError(f"{source.path}: scaled rotary frequencies are not supported")
    if rotated != shape.head_dim:
        raise ToolError(f"{source.path}: {prefix}dimension_count is {rotated}, "
                        f"expected the head size {shape.head_dim}")


def make_config(source: Source, shape: Shape, vocab: int, tied: bool, dtype: str) -> dict[str, Any]:
    """config.json in the `rope_theta` spelling, which transformers 4 and 5 both read."""
    prefix = shape.architecture + "."
    tensors = {tensor.name for tensor in source.reader.tensors}
    theta = source.number(prefix + "rope.freq_base", float, 10000.0)
    eps = source.number(prefix + "attention.layer_norm_rms_epsilon", float)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.architecture][0]],
        "model_type": ARCHITECTURES[shape.architecture][1],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": source.number(prefix + "context_length", int),
        # GGUF holds float32: 9.99999975e-06 was 1e-05.
        "rms_norm_eps": float(str(np.float32(eps))),
        "rope_theta": float(str(np.float32(theta))),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": DTYPES[dtype],
    }
    if shape.architecture == "gemma3":
        del config["hidden_act"]
        config.update(gemma3_config(source, shape))
    if shape.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    for key in ("bos", "eos"):
        token = source.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{key}_token_id"] = token
    return config


def gemma3_config(source: Source, shape: Shape) -> dict[str, Any]:
    """What is Gemma 3's own. GGUF leaves to the program that every sixth layer is global, that the
    others turn with base 10,000, and the scale of the scores (the head size, but in the 27B)."""
    if shape.layers == 62:
        raise ToolError(f"{source.path}: the 27B scales its scores in another way, which is not known here")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": source.number("gemma3.attention.sliding_window", int),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": source.get("gemma3.final_logit_softcapping"),
    }


def hugging_face_name(name: str, shape: Shape) -> str | None:
    """Name in a Hugging Face checkpoint, None for a tensor this tool does not know."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    known = layer_names(shape.architecture)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in known:
        if int(parts[1]) < shape.layers:
            return f"model.layers.{int(parts[1])}.{known[parts[2]]}.{suffix}"
    return None


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads * d, ...] with rotary pairs side by side -> the same with the halves apart."""
    half = rows.shape[0] // heads // 2
    pairs = rows.reshape(heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def expected_shape(name: str, shape: Shape) -> tuple[int, ...] | None:
    """Shape of a weight or bias in the Hugging Face layout, vocabulary rows left to the caller."""
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows_columns = {
        "q_proj": (q, shape.hidden),
        "k_proj": (kv, shape.hidden),
        "v_proj": (kv, shape.hidden),
        "o_proj": (shape.hidden, q),
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
    }
    module, _, suffix = name.rpartition(".")
    short = module.rpartition(".")[2]
    if short in ("embed_tokens", "lm_head"):
        return None
    full = rows_columns.get(short, (shape.hidden,))
    return full if suffix == "weight" else full[:1]


def to_dtype(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """float32 -> the stored type; bfloat16 as uint16 bits, rounded to nearest even."""
    if not np.isfinite(values).all():
        raise ToolError(f"tensor {name}: holds values that are not finite")
    if dtype == "f16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise ToolError(f"tensor {name}: exceeds the range of float16; use bf16 or f32")
        return half
    if dtype == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values


def convert_tensors(source: Source, shape: Shape, vocab: int, dtype: str) -> dict[str, np.ndarray]:
    """All tensors by Hugging Face name in `dtype`; vocabulary rows past `vocab` are dropped."""
    out: dict[str, np.ndarray] = {}
    for tensor in source.reader.tensors:
        name = hugging_face_name(tensor.name, shape)
        if name is None:
            raise ToolError(f"{source.path}: tensor {tensor.name} is not known for "
                            f"{shape.architecture} with {shape.layers} layers")
        try:
            raw = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ToolError(f"{source.path}: {tensor.name}: type {kind} cannot be read") from error
        values = np.ascontiguousarray(raw, dtype=np.float32)
        expected = expected_shape(name, shape)
        if expected is None:
            expected = (values.shape[0], shape.hidden)
            if values.shape[0] < vocab:
                raise ToolError(f"{source.path}: {tensor.name}: {values.shape[0]} rows, "
                                f"expected at least {vocab}")
        if values.shape != expected:
            raise ToolError(f"{source.path}: {tensor.name}: shape {list(values.shape)}, "
                            f"expected {list(expected)}")
        if ".embed_tokens." in name or name.startswith("lm_head."):
            values = values[:vocab]
        if shape.architecture == "llama" and ".q_proj." in name:
            values = unpermute(values, shape.q_heads)
        if shape.architecture == "llama" and ".k_proj." in name:
            values = unpermute(values, shape.kv_heads)
        if shape.architecture == "gemma3" and "norm." in name:
            values = values - 1
        out[name] = np.ascontiguousarray(to_dtype(values, dtype, tensor.name))
    check_complete(source.path, shape, out)
    return out


def check_complete(path: Path, shape: Shape, tensors: dict[str, np.ndarray]) -> None:
    """Every weight of every layer is there."""
    needed = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(shape.layers):
        needed += [f"model.layers.{layer}.{module}.weight" for module in layer_names(shape.architecture).values()]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ToolError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """One safetensors file, written whole. bfloat16 is handed over as its uint16 bits, which numpy
    has no type for."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=DTYPES[dtype],
            shape=values.shape,
            data_ptr=values.ctypes.data,
            data_len=values.nbytes,
        )
        for name, values in tensors.items()
    }
    with replacing(path) as part:
        try:
            safetensors.serialize_file(specs, part, {"format": "pt"})
        except safetensors.SafetensorError as error:
            raise ToolError(f"{path}: cannot be written: {error}") from error


def convert(path: Path, out: Path, dtype: str) -> list[str]:
    """Writes config.json, model.safetensors and, where it can be rebuilt, tokenizer.json into
    `out` (created if missing). Returns notes for the user. Raises ToolError."""
    source = Source(path)
    shape = read_shape(source)
    check_rope(source, shape)
    stored_rows = {t.name: int(t.shape[-1]) for t in source.reader.tensors}.get("token_embd.weight")
    if stored_rows is None:
        raise ToolError(f"{path}: tensor token_embd.weight is missing")
    vocab = gguf_tokenizer.real_vocabulary(source.get, stored_rows)
    notes = []
    if vocab < stored_rows:
        notes.append(f"{stored_rows - vocab} padding rows of the vocabulary left out, {vocab} kept")
    tensors = convert_tensors(source, shape, vocab, dtype)
    tied = "lm_head.weight" not in tensors
    config = make_config(source, shape, vocab, tied, dtype)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"{out}: cannot be created: {error.strerror}") from error
    tokenizer, reason = gguf_tokenizer.rebuild(source.get, vocab)
    if tokenizer is None:
        notes.append(f"no tokenizer.json: {reason}")
    else:
        write_whole(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_safetensors(out / "model.safetensors", tensors, dtype)
    # Last: a directory without it is not taken for a model.
    write_whole(out / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    return notes
