"""What a transformers model says about itself, in the words of the trace."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from .errors import RecordError

OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo", "proj")
CHANGING_ROPE = ("dynamic", "longrope")  # frequencies depend on the length


@dataclass(frozen=True)
class Rotation:
    """How keys are rotated. `inv_freq` [1 or n_layers, dim / 2] float64, or None where one set of
    frequencies cannot say it."""

    kind: str
    dim: int | None
    inv_freq: np.ndarray | None


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder."""
    return model.config.get_text_config(decoder=True)


def check_model(model: object) -> PreTrainedModel:
    """Refuses by name what cannot be recorded whatever it is asked to do."""
    if not isinstance(model, PreTrainedModel):
        hint = ""
        if hasattr(model, "get_base_model"):
            hint = "; of a PEFT model pass model.get_base_model()"
        elif hasattr(model, "_orig_mod"):
            hint = "; pass the model before torch.compile"
        raise RecordError(f"{type(model).__name__}: expected a transformers PreTrainedModel{hint}")
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise RecordError(f"{name}: an encoder-decoder; only decoder-only models can be recorded")
    if model.training:
        raise RecordError(
            f"{name}: in training mode, where dropout changes attention; call model.eval() first"
        )
    return model


def model_name(model: PreTrainedModel) -> str:
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return name.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order: the list of the right length whose elements attend."""
    count = text_config(model).num_hidden_layers
    best: list[nn.Module] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != count:
            continue
        if re.search(r"vision|audio|encoder", name):
            continue
        if any(is_attention(m) for m in module[0].modules()) or not best:
            best = list(module)
            if any(is_attention(m) for layer in best for m in layer.modules()):
                return best
    return best


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one layer's attention as transformers builds it."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and "attention" in type(module).__name__.lower()
    )


def modeling_modules(module: nn.Module) -> list[Any]:
    """The Python modules that the class and its bases were written in."""
    return [sys.modules[c.__module__] for c in type(module).__mro__ if c.__module__ in sys.modules]


def eager_function(module: nn.Module) -> Any:
    """The eager attention of the model's own file, which the interface is given as a default."""
    for source in modeling_modules(module):
        found = getattr(source, "eager_attention_forward", None)
        if found is not None:
            return found
    return None


def layer_window(module: nn.Module, kwargs: dict[str, Any]) -> int:
    """Attention window of a call, the query included; 0 = global."""
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    else:
        window = getattr(module, "sliding_window", None)
        if getattr(module, "is_sliding", None) is False:
            window = None
    return int(window) if window else 0


def layer_sinks(module: nn.Module, kwargs: dict[str, Any]) -> torch.Tensor | None:
    sinks = kwargs.get("s_aux")
    return getattr(module, "sinks", None) if sinks is None else sinks


def layer_softcap(module: nn.Module, kwargs: dict[str, Any]) -> float:
    softcap = kwargs.get("softcap")
    if softcap is None:
        softcap = getattr(module, "attn_logit_softcapping", None)
    return float(softcap or 0.0)


# -- rotation


def _pairs(kept: torch.Tensor, turned: torch.Tensor, dim: int) -> str | None:
    """From what becomes of every unit vector [dim, dim] turned by nothing and by a right angle."""
    a, b = kept.abs().argmax(-1), turned.abs().argmax(-1)
    if torch.equal((a - b).abs(), torch.full_like(a, dim // 2)):
        return "half"
    return "interleaved" if torch.equal(a ^ 1, b) else None


def rotation_pairs(sources: Sequence[Any], dim: int) -> str | None:
    """Finds out by trying which channels the rotary functions of a model's file pair: `half` (i
    with i + dim / 2) or `interleaved` (2i with 2i + 1), in the order in which keys are stored."""
    basis = torch.eye(dim).view(1, 1, dim, dim)  # one position per channel
    for name in ("apply_rotary_pos_emb", "rotate_half", "rotate_every_two"):
        function = next((f for m in sources if (f := getattr(m, name, None))), None)
        if function is None:
            continue
        if name != "apply_rotary_pos_emb":
            return _pairs(basis[0, 0], function(basis)[0, 0], dim)
        for tensors in (2, 1):  # q and k, or one of them
            for width in (dim, dim // 2):  # of cos and sin: most models repeat the frequencies
                ones, zeros = torch.ones(1, dim, width), torch.zeros(1, dim, width)
                try:
                    kept = function(*[basis] * tensors, ones, zeros)
                    turned = function(*[basis] * tensors, zeros, ones)
                except Exception:  # another signature
                    continue
                if tensors == 2:
                    kept, turned = kept[0], turned[0]
                found = _pairs(kept.reshape(-1, dim), turned.reshape(-1, dim), dim)
                if found is not None:
                    return found
    return None


def _frequencies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Inverse frequencies by kind of layer; '' where all layers share them."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if "rotary" not in type(module).__name__.lower() or re.search(r"vision|audio", name):
            continue
        for buffer, values in module.named_buffers(recurse=False):
            match = re.fullmatch(r"(?:(\w+)_)?inv_freq", buffer)
            if match and "original" not in buffer and values.ndim == 1:
                found.setdefault(match.group(1) or "", values)
    return found


def _rope_kind(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return str((parameters or {}).get("rope_type", "default"))


def rotation(model: PreTrainedModel, attention: nn.Module, head_dim: int) -> Rotation:
    """How this model rotates its keys, from its rotary module and its rotary function."""
    found = {kind: values.double().cpu().numpy() for kind, values in _frequencies(model).items()}
    sources, config = modeling_modules(attention), text_config(model)
    rotates = any(hasattr(m, n) for m in sources for n in ("rotate_half", "rotate_every_two"))
    if not found and not rotates:
        return Rotation("none", None, None)
    dims = {2 * len(values) for values in found.values()}
    if not dims:  # frequencies kept in some other way
        factor = getattr(config, "partial_rotary_factor", None) or 1.0
        dims = {int(getattr(config, "rotary_dim", None) or head_dim * factor)}
    dim = max(dims)
    pairs = rotation_pairs(sources, dim)
    if pairs is None:
        raise RecordError(
            f"{type(model).__name__}: which channels its rotary embedding pairs could not be "
            "found out; give rope=('half' or 'interleaved', channels)"
        )
    leading = not hasattr(attention, "qk_rope_head_dim")  # else the rotated channels come last
    if (
        len(dims) > 1
        or dim > head_dim
        or not leading
        or not found
        or _rope_kind(config) in CHANGING_ROPE
    ):
        return Rotation(pairs, min(dim, head_dim), None)
    return Rotation(pairs, dim, _per_layer(config, found))


def _per_layer(config: Any, found: dict[str, np.ndarray]) -> np.ndarray | None:
    if len(found) == 1:
        return next(iter(found.values()))[None]
    types = getattr(config, "layer_types", None)
    if types is None or any(kind not in found for kind in types):
        return None
    return np.stack([found[kind] for kind in types])


# -- the output projection


def output_projection(attention: nn.Module, heads: int, value_dim: int) -> torch.Tensor:
    """[query heads, value_dim, hidden], a view of the weights where they are plain. A module that
    is not a plain linear one (quantised, adapted) is asked for its answer to every unit vector."""
    for name in OUTPUT_PROJECTIONS:
        module = getattr(attention, name, None)
        if isinstance(module, nn.Module):
            break
    else:
        raise RecordError(
            f"{type(attention).__name__}: no output projection among "
            f"{', '.join(OUTPUT_PROJECTIONS)}: wo and value_norm cannot be recorded"
        )
    width = heads * value_dim
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear:
        matrix = module.weight.detach().T
    elif type(module).__name__ == "Conv1D" and weight is not None:
        matrix = weight.detach()
    else:
        matrix = _answers(module, attention, width)
    if matrix.shape[0] != width:
        raise RecordError(
            f"{type(attention).__name__}.{name}: {matrix.shape[0]} inputs, expected "
            f"{heads} heads of {value_dim}: wo and value_norm cannot be recorded"
        )
    return matrix.unflatten(0, (heads, value_dim))


def _answers(module: nn.Module, attention: nn.Module, width: int) -> torch.Tensor:
    like = next((p for p in attention.parameters() if p.dtype.is_floating_point), None)
    dtype = like.dtype if like is not None else torch.float32
    device = like.device if like is not None else torch.device("cpu")
    units = torch.eye(width, dtype=dtype, device=device)
    with torch.no_grad():
        return module(units).float() - module(torch.zeros_like(units[:1])).float()


# -- names that changed between versions


def cache_keyword(model: PreTrainedModel) -> str:
    """`cache`, or `past_key_values` before transformers renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def takes(model: PreTrainedModel, keyword: str) -> bool:
    return keyword in inspect.signature(model.forward).parameters
