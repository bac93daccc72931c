"""Recording runs of llama.cpp through the bindings of PyPI's llama-cpp-python, unpatched.

llama.cpp calls back for every node of its graph (`cb_eval`). A node of flash attention has as its
sources exactly what meets in attention: q after rotation, the views of the key and value cache, the
mask, learned sinks; its parameters are scale and soft cap. So one hook serves every architecture.
Keys and values are the 16-bit cache entries themselves; q is rounded to 16 bits, as llama.cpp's CPU
kernel does. o and lse are computed here in float32 from the stored values, as the kernel gives no
lse and sums o in 16 bits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import RecordError
from .schema import LayerFacts, ModelInfo, SequencePlan
from .version import PRODUCER
from .writer import TraceWriter

NEWEST_TESTED = "0.3.36"
TYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
ROPES = {-1: "none", 0: "interleaved", 2: "half"}
OBJECT_BYTES = 32  # ggml_object, which ggml_tensor_overhead() counts too


class Tensor(ctypes.Structure):
    """struct ggml_tensor."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_float * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class Ggml:
    """The few functions of libggml that are needed to read a tensor from whatever device."""

    def __init__(self, bindings: Any) -> None:
        self._library = self._find(bindings)
        self._library.ggml_tensor_overhead.restype = ctypes.c_size_t
        self._library.ggml_op_name.restype = ctypes.c_char_p
        self._library.ggml_op_name.argtypes = [ctypes.c_int]
        self._library.ggml_backend_tensor_get.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        ]
        self._library.ggml_backend_tensor_get.restype = None
        expected = OBJECT_BYTES + ctypes.sizeof(Tensor)
        found = self._library.ggml_tensor_overhead()
        if found != expected:
            raise RecordError(
                f"llama-cpp-python {bindings.__version__}: ggml_tensor takes {found} bytes, "
                f"expected {expected}: its layout has changed; {NEWEST_TESTED} is known to work"
            )
        names = (self._library.ggml_op_name(op) for op in range(256))
        self.flash = next((i for i, name in enumerate(names) if name == b"FLASH_ATTN_EXT"), -1)
        if self.flash < 0:
            raise RecordError("llama.cpp: no operation FLASH_ATTN_EXT")

    @staticmethod
    def _find(bindings: Any) -> Any:
        from llama_cpp import _ggml, llama_cpp

        for library in (_ggml.libggml, llama_cpp._lib):
            if hasattr(library, "ggml_backend_tensor_get"):
                return library
        raise RecordError(
            f"llama-cpp-python {bindings.__version__}: its library hides ggml_backend_tensor_get"
        )

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None) -> np.ndarray:
        """[ne3, ne2, rows, ne0] of the rows first .. first + count - 1 of axis 1."""
        dtype = TYPES.get(tensor.type)
        if dtype is None:
            raise RecordError(
                f"llama.cpp: {tensor.name.decode()} has ggml type {tensor.type}, "
                "expected float32 or float16"
            )
        shape = [tensor.ne[3], tensor.ne[2], count or tensor.ne[1], tensor.ne[0]]
        strides = [tensor.nb[3], tensor.nb[2], tensor.nb[1], tensor.nb[0]]
        span = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides))
        raw = np.empty(span, np.uint8)
        self._library.ggml_backend_tensor_get(
            ctypes.addressof(tensor), raw.ctypes.data, first * tensor.nb[1], span
        )
        first_value = np.frombuffer(raw, dtype, 1)  # the others lie at strides from it
        return np.array(np.lib.stride_tricks.as_strided(first_value, shape, strides))


def bindings() -> Any:
    """The module llama_cpp, or a RecordError that says how to get it."""
    try:
        import llama_cpp
    except ImportError as error:
        raise RecordError(
            f"recording llama.cpp needs llama-cpp-python: {error}; pip install "
            f"llama-cpp-python=={NEWEST_TESTED} (it builds from source)"
        ) from error
    return llama_cpp


@dataclass
class Layer:
    """Keys and values of one layer so far."""

    k: list[np.ndarray] = field(default_factory=list)  # [n, kv heads, head_dim] float16 each
    v: list[np.ndarray] = field(default_factory=list)
    scale: float = 1.0
    softcap: float = 0.0
    window: int = 0
    sinks: np.ndarray | None = None


def attend(q: np.ndarray, layer: Layer, first: int) -> tuple[np.ndarray, np.ndarray]:
    """q [n, query heads, head_dim] of positions first ..; -> o [n, heads, value_dim] and lse [n,
    heads], float32, from the stored 16-bit values."""
    k, v = np.concatenate(layer.k).astype("f4"), np.concatenate(layer.v).astype("f4")
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    t, j = np.arange(first, first + n)[:, None], np.arange(len(k))[None, :]
    hidden = (j > t) | ((j <= t - layer.window) if layer.window else False)
    o, lse = np.empty((n, heads, v.shape[2]), "f4"), np.empty((n, heads), "f4")
    for head in range(heads):
        scores = (q[:, head].astype("f4") @ k[:, head // group].T) * np.float32(layer.scale)
        if layer.softcap:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        scores[hidden] = -np.inf
        top = scores.max(axis=1, keepdims=True)
        sink = None if layer.sinks is None else np.float32(layer.sinks[head])
        if sink is not None:
            top = np.maximum(top, sink)
        p = np.exp(scores - top)
        total = p.sum(axis=1, keepdims=True)
        if sink is not None:
            total += np.exp(sink - top)
        o[:, head] = (p / total) @ v[:, head // group]
        lse[:, head] = (top + np.log(total))[:, 0]
    return o, lse


def confidence(logits: np.ndarray) -> np.ndarray:
    """[n, vocabulary] -> [n, 4] float32, see FORMAT.md."""
    x = logits.astype("f8")
    top = np.partition(x, -2, axis=1)[:, -2:]
    lse = top[:, 1] + np.log(np.exp(x - top[:, 1:]).sum(axis=1))
    p = np.exp(x - lse[:, None])
    entropy = lse - (p * np.where(p > 0, x, 0)).sum(axis=1)
    columns = [np.maximum(entropy, 0), top[:, 1] - top[:, 0], np.exp(top[:, 1] - lse), lse]
    return np.stack(columns, axis=1).astype("<f4")


class LlamaCppRun:
    """One model and one sequence. Every method that decodes writes what it decoded."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        path: str | os.PathLike[str],
        *,
        capacity: int,
        n_prompt: int,
        block: int = 128,
        threads: int | None = None,
        gpu_layers: int = 0,
        full_logits: bool = False,
        temperature: float | None = None,
        seed: int | None = None,
        task: str = "",
    ) -> None:
        self._api = api = bindings()
        self._ggml = Ggml(api)
        self.path, self.model_path = Path(path), Path(model)
        self._error: BaseException | None = None
        self._plan = SequencePlan(n_prompt, capacity, temperature=temperature, seed=seed, task=task)
        self._block, self._full_logits = block, full_logits
        self._layers: dict[int, Layer] = {}
        self._writer: TraceWriter | None = None
        self.position = 0
        self._rows = 0  # of the pass under way
        self._seen: set[int] = set()
        self._quiet = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._load(threads, gpu_layers)

    def _load(self, threads: int | None, gpu_layers: int) -> None:
        api = self._api
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        if not self.model_path.is_file():
            raise RecordError(f"{self.model_path}: no such file")
        self._model = api.llama_model_load_from_file(str(self.model_path).encode(), parameters)
        if not self._model:
            raise RecordError(f"{self.model_path}: llama.cpp cannot load this model")
        self._callback = api.ggml_backend_sched_eval_callback(self._node)
        context = api.llama_context_default_params()
        context.n_ctx = self._plan.capacity
        context.n_batch = context.n_ubatch = min(self._block, self._plan.capacity)
        context.n_seq_max = 1
        context.flash_attn_type = 1  # enabled
        context.type_k = context.type_v = 1  # float16
        context.swa_full = True  # cell = position, in layers with a window too
        if threads:
            context.n_threads = context.n_threads_batch = threads
        context.cb_eval = self._callback
        self._context = api.llama_init_from_model(self._model, context)
        if not self._context:
            raise RecordError(
                f"{self.model_path}: llama.cpp cannot make a context of "
                f"{self._plan.capacity} positions with flash attention"
            )
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))

    def close(self) -> None:
        """Frees the model. Without finish() the .part stays."""
        if self._writer is not None:
            self._writer.close()
        if getattr(self, "_context", None):
            self._api.llama_free(self._context)
            self._context = None
        if getattr(self, "_model", None):
            self._api.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaCppRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the callback

    def _node(self, address: int, ask: bool, _: Any) -> bool:
        """Asked for every node; called again after the ones that were wanted."""
        tensor = Tensor.from_address(address)
        if ask:
            return tensor.op == self._ggml.flash
        try:
            self._attention(tensor)
            return True
        except BaseException as error:  # cannot pass through C
            self._error = error
            return False

    def _attention(self, node: Tensor) -> None:
        q, k, v = (Tensor.from_address(node.src[i]) for i in range(3))
        root = Tensor.from_address(k.view_src) if k.view_src else k
        name = root.name.decode()
        if not name.startswith("cache_k_l"):
            raise RecordError(
                f"llama.cpp: attends to {name!r}, expected a key cache (cache_k_l0 ...)"
            )
        index, n = int(name.removeprefix("cache_k_l")), self._rows
        if node.op_params[1]:
            raise RecordError(f"layer {index}: ALiBi, a bias that a trace cannot say")
        if q.ne[1] != n or q.ne[3] != 1:
            raise RecordError(f"layer {index}: {q.ne[1]} queries in a pass of {n}")
        layer = self._layers.setdefault(index, Layer())
        layer.scale, layer.softcap = float(node.op_params[0]), float(node.op_params[2])
        if node.src[4]:
            layer.sinks = self._ggml.read(Tensor.from_address(node.src[4])).reshape(-1)
        self._check_mask(index, layer, node)
        rows = self._ggml.read(q)[0].transpose(1, 0, 2)  # [n, heads, head_dim]
        with np.errstate(over="ignore"):
            rows = rows.astype("<f2")
        # Of the cache the new cells only: cell and position are one in a context of one sequence.
        layer.k.append(self._ggml.read(k, self.position, n)[0].transpose(1, 0, 2))
        layer.v.append(self._ggml.read(v, self.position, n)[0].transpose(1, 0, 2))
        o, lse = attend(rows, layer, self.position)
        self._put(index, layer, rows, o, lse)

    def _check_mask(self, index: int, layer: Layer, node: Tensor) -> None:
        """The mask must be the causal one, or that of the model's window."""
        if not node.src[3]:
            raise RecordError(f"layer {index}: no mask, expected causal attention")
        mask = self._ggml.read(Tensor.from_address(node.src[3]))[0, 0][: self._rows]
        seen = mask == 0
        t = np.arange(self.position, self.position + self._rows)[:, None]
        j = np.arange(mask.shape[1])[None, :]
        window = self._api.llama_model_n_swa(self._model)
        if not layer.window and window and not (seen == (j <= t)).all():
            layer.window = window
        expected = (j <= t) & ((j > t - layer.window) if layer.window else True)
        if not (seen == expected).all():
            raise RecordError(
                f"layer {index}, pass at position {self.position}: the mask is not the "
                f"causal one of a window of {layer.window}"
            )

    def _put(self, index: int, layer: Layer, q: np.ndarray, o: np.ndarray, lse: np.ndarray) -> None:
        k, v = layer.k[-1], layer.v[-1]
        if self._writer is None:
            self._writer = TraceWriter(self.path, self._describe(layer, q, k, v), PRODUCER)
            self._writer.begin_sequence(self._plan)
        info = self._writer.model
        found = (q.shape[1], k.shape[1], q.shape[2], v.shape[2], layer.scale, layer.softcap)
        expected = (
            info.n_q_heads,
            info.n_kv_heads,
            info.head_dim,
            info.value_dim,
            info.softmax_scale,
            info.score_softcap,
        )
        if found != expected:
            raise RecordError(
                f"layer {index}: heads, channels, scale and soft cap {found}, but "
                f"{expected} in the layers before"
            )
        for name, rows in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse)):
            self._writer.append(0, name, self.position, rows, index)
        self._seen.add(index)

    def _describe(self, layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> ModelInfo:
        api, architecture = self._api, self.metadata("general.architecture") or "unknown"
        rope = ROPES.get(api.llama_model_rope_type(self._model))
        if rope is None:
            raise RecordError(f"{self.model_path}: rotates in a way that a trace cannot say")
        dim = self.metadata(f"{architecture}.rope.dimension_count")
        return ModelInfo(
            name=self.model_path.stem,
            architecture=architecture,
            n_layers=api.llama_model_n_layer(self._model),
            n_q_heads=q.shape[1],
            n_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            hidden_size=api.llama_model_n_embd(self._model),
            vocab_size=self.vocabulary,
            logit_size=self.vocabulary,
            softmax_scale=layer.scale,
            score_softcap=layer.softcap,
            rope=rope,
            rope_dim=int(dim) if dim and rope != "none" else None,
            compute_dtype="float32",
            cache_dtype="float16",
        )

    def metadata(self, key: str) -> str | None:
        """A value of the GGUF's header."""
        buffer = ctypes.create_string_buffer(256)
        length = self._api.llama_model_meta_val_str(self._model, key.encode(), buffer, 256)
        return buffer.value.decode() if length >= 0 else None

    # -- decoding

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """The next positions, at most `block`. -> logits [rows, vocabulary] of those from position
        n_prompt - 1 on."""
        api, n, first_row = self._api, len(ids), self._plan.n_prompt - 1
        bad = [i for i in ids if not 0 <= i < self.vocabulary]
        if bad:
            raise RecordError(f"token {bad[0]}, expected 0 .. {self.vocabulary - 1}")
        batch = api.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i] = token, self.position + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = self.position + i >= first_row
            self._rows, self._seen = n, set()
            code = api.llama_decode(self._context, batch)
            if self._error is not None:
                raise self._error
            if code or self._writer is None:
                raise RecordError(
                    f"{self.model_path}: llama_decode failed ({code}) or no layer "
                    "attended by flash attention"
                )
            rows = [i for i in range(n) if self.position + i >= first_row]
            logits = (
                np.stack(
                    [
                        np.ctypeslib.as_array(
                            api.llama_get_logits_ith(self._context, i), (self.vocabulary,)
                        )
                        for i in rows
                    ]
                )
                if rows
                else np.empty((0, self.vocabulary), "f4")
            )
        finally:
            api.llama_batch_free(batch)
        self._put_rows(ids, rows, logits)
        return logits

    def _put_rows(self, ids: Sequence[int], rows: list[int], logits: np.ndarray) -> None:
        writer = self._writer
        assert writer is not None
        writer.append(0, "tokens", self.position, np.asarray(ids, "<i4"))
        if rows:
            first = self.position + rows[0]
            writer.append(0, "confidence", first, confidence(logits))
            if self._full_logits:
                writer.append(0, "logits", first, logits)
        if self.position == 0:
            sinks = {i: layer.sinks for i, layer in self._layers.items() if layer.sinks is not None}
            table = None
            if sinks:
                table = np.zeros((writer.model.n_layers, writer.model.n_q_heads), "<f4")
                for index, values in sinks.items():
                    table[index] = values
            writer.put_facts(LayerFacts(sorted(self._seen), self._windows(), table))
        self.position += len(ids)
        if len(ids) > 1 or self.position % 16 == 0:
            writer.commit({0: self.position})

    def _windows(self) -> list[int]:
        assert self._writer is not None
        return [
            self._layers[i].window if i in self._layers else 0
            for i in range(self._writer.model.n_layers)
        ]

    def finish(self) -> None:
        """The trace is whole."""
        if self._writer is None:
            raise RecordError(f"{self.path}: nothing was decoded")
        self._writer.put_windows(self._windows())
        self._writer.end_sequence(0, self.position)
        self._writer.finish()


def record_gguf(
    model: str | os.PathLike[str],
    ids: Sequence[int],
    path: str | os.PathLike[str],
    *,
    prompt_length: int | None = None,
    generate: int | None = None,
    block: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    threads: int | None = None,
    gpu_layers: int = 0,
    logits: str = "stats",
    task: str = "",
) -> int:
    """Runs llama.cpp over token ids (teacher-forced from prompt_length on), or lets it generate,
    and writes the trace `path`. -> positions recorded."""
    ids = [int(i) for i in ids]
    if (prompt_length is None) == (generate is None):
        raise RecordError("give prompt_length (teacher-forced) or generate, one of the two")
    if not ids:
        raise RecordError("no token ids")
    if prompt_length is not None and not 1 <= prompt_length < len(ids):
        raise RecordError(
            f"prompt_length is {prompt_length}, expected 1 .. {len(ids) - 1} ({len(ids)} tokens)"
        )
    total = len(ids) + (generate or 0)
    run = LlamaCppRun(
        model,
        path,
        capacity=total,
        n_prompt=prompt_length or len(ids),
        block=block,
        threads=threads,
        gpu_layers=gpu_layers,
        full_logits=logits == "full",
        temperature=temperature if generate else None,
        seed=seed if generate and temperature else None,
        task=task,
    )
    with run:
        last = np.empty(0)
        for first in range(0, len(ids), block):
            rows = run.feed(ids[first : first + block])
            last = rows[-1] if len(rows) else last
        random = np.random.default_rng(seed)
        vocabulary = run._api.llama_model_get_vocab(run._model)
        for _ in range((generate or 1) - 1):
            token = choose(last, temperature, random)
            if run._api.llama_vocab_is_eog(vocabulary, token):
                break
            last = run.feed([token])[-1]
        run.finish()
        return run.position


def choose(logits: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    """The likeliest token, or one drawn at a temperature."""
    if not temperature:
        return int(logits.argmax())
    p = np.exp((logits - logits.max()).astype("f8") / temperature)
    return int(random.choice(len(p), p=p / p.sum()))
