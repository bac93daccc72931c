"""kvtrace: records what attention really met while a transformers model runs.

    import kvtrace
    with kvtrace.record(model, "run.h5"):
        model.generate(**inputs, max_new_tokens=256)

`kvreplay replay run.h5 -p full -p h2o:budget=256` then says what a cache policy would have cost.
The writer (TraceWriter) needs numpy and h5py alone; record() and teacher_forced() need torch and
transformers, which are imported at the first use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import RecordError
from .schema import LayerFacts, ModelInfo, SequencePlan
from .version import OLDEST_TRANSFORMERS, __version__
from .writer import TraceWriter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .options import AttentionCall, ImageRequest
    from .recording import Recording

__all__ = [
    "AttentionCall",
    "ImageRequest",
    "LayerFacts",
    "ModelInfo",
    "RecordError",
    "SequencePlan",
    "TraceWriter",
    "__version__",
    "check_versions",
    "record",
    "teacher_forced",
]


def __getattr__(name: str) -> Any:
    """The callbacks' arguments, which need torch, are imported at the first use."""
    if name in ("AttentionCall", "ImageRequest"):
        from . import options

        return getattr(options, name)
    raise AttributeError(f"module 'kvtrace' has no attribute {name!r}")


def check_versions() -> None:
    """Raises RecordError, one line, where torch or transformers are missing or too old."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise RecordError(
            f"recording needs torch and transformers: {error}; pip install "
            "'torch>=2.6' 'transformers>=5.1'"
        ) from error
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise RecordError(
            f"transformers {transformers.__version__}: its eager attention cannot be "
            f"seen; at least {oldest} is needed (pip install 'transformers>={oldest}')"
        )


def record(model: PreTrainedModel, path: str | os.PathLike[str], **options: Any) -> Recording:
    """A context manager: every pass of `model` inside it goes into the trace `path`.

    Each sequence of each generate() (or of each forward pass from an empty cache) becomes one
    sequence of the trace, padding removed. While it runs the file is `path`.part; it is renamed at
    the end. An exception leaves the .part, recoverable up to the last commit.

    Options:
      logits         "stats" (default): confidence of each step; "full": also whole float32 rows;
                     "none"
      layers         numbers of the layers to record; default: all that attend
      extras         some of "wo" (output projections), "value_norm" (CriticalKV), "residual" (norms
                     of the residual stream, and the stream before the final norm)
      rows           "decode": q, o and lse from 64 positions before the decode on, and the prompt's
                     mass per column; "all" (default)
      kv_dtype       "fp16": q, k, v are rounded to 16 bits before attention, as a deployed FP16
                     cache would, and the model computes with that; "model" (default): as they are
      prompt_length  of plain forward passes: positions that count as prompt; default: the first
      pass capacity       positions that plain forward passes will feed, if known
      tokenizer      gives the number of real token ids; or vocab_size, the number itself
      rope           (kind, channels), where the model's own rotation cannot be found out
      name, task, seed   for the record
      spans          {"needle": [(begin, end)]} in unpadded positions; a list of those, one per
                     sequence; or a function (sequence, prompt ids) -> those
      chunks         [(begin, end)] of the prompt
      retention      function (AttentionCall) -> log retention [batch, positions, kv heads], <= 0
      retention_gate weights of the gate behind it, by name
      image_score    function (ImageRequest) -> saliency [n_prompt]
      flush_every    decode positions between commits (16)
      buffer_bytes   host memory for copies under way (1 GiB); a slower disk makes the model wait
      quiet          True: no line on stderr at the end

    Raises RecordError, one line, for what cannot be recorded.
    """
    check_versions()
    from .options import RecordOptions
    from .recording import Recording

    return Recording(model, path, RecordOptions(**options))


def teacher_forced(
    model: PreTrainedModel,
    ids: Sequence[int] | torch.Tensor,
    path: str | os.PathLike[str],
    *,
    prompt_length: int,
    block: int = 128,
    **options: Any,
) -> Recording:
    """Records given token ids [tokens] in passes of `block` positions, as fast as a prompt. The
    first prompt_length are the prompt, each later one is fed as if it had been generated. Options
    are record()'s. -> the finished recording; its `summary` says what it cost."""
    check_versions()
    from .teacher import teacher_forced as run

    return run(model, ids, path, prompt_length, block, **options)
