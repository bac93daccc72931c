"""What is found out about the layers while they attend for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from . import describe
from .attention import Scores
from .errors import RecordError
from .options import RecordOptions
from .schema import LayerFacts, ModelInfo


class LayerBook:
    """Every layer's window, sinks and shape, as its first call showed them; one shape and one scale
    for all, or an error by name."""

    def __init__(self, model: PreTrainedModel, options: RecordOptions) -> None:
        self.model, self.options = model, options
        self.config = describe.text_config(model)
        self.n_layers = int(self.config.num_hidden_layers)
        self.info: ModelInfo | None = None
        self.scores: dict[int, Scores] = {}
        self.attention: dict[int, nn.Module] = {}
        self._wo: dict[int, torch.Tensor] = {}
        layers = options.layers
        if layers is not None:
            bad = [layer for layer in layers if not 0 <= layer < self.n_layers]
            if bad:
                raise RecordError(f"layers: {bad[0]}, expected 0 .. {self.n_layers - 1}")
        self._wanted = None if layers is None else set(layers)

    def wanted(self, layer: int) -> bool:
        return self._wanted is None or layer in self._wanted

    def see(
        self,
        layer: int,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> Scores:
        """A layer's call; the first one is written down, later ones must agree with it."""
        known = self.scores.get(layer)
        scale = kwargs.get("scaling")
        if scale is None:
            scale = getattr(module, "scaling", None) or q.shape[-1] ** -0.5
        window = describe.layer_window(module, kwargs)
        if known is not None:
            if known.window != window or known.scale != float(scale):
                raise RecordError(
                    f"layer {layer}: window {window} and scale {float(scale):g}, but "
                    f"{known.window} and {known.scale:g} in an earlier pass"
                )
            return known
        if kwargs.get("position_bias") is not None:
            raise RecordError(
                f"layer {layer}: adds a position bias to its scores, which a trace cannot say"
            )
        half = q.dtype in (torch.float16, torch.bfloat16)
        scores = Scores(
            float(scale),
            window,
            describe.layer_softcap(module, kwargs),
            describe.layer_sinks(module, kwargs),
            stored=half or self.options.kv_dtype == "fp16",
        )
        if self.wanted(layer):
            self._check_shape(layer, module, q, k, v, scores)
        self.scores[layer], self.attention[layer] = scores, module
        return scores

    def _check_shape(
        self,
        layer: int,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
    ) -> None:
        found = {
            "n_q_heads": q.shape[1],
            "n_kv_heads": k.shape[1],
            "head_dim": q.shape[3],
            "value_dim": v.shape[3],
            "softmax_scale": scores.scale,
            "score_softcap": scores.softcap,
        }
        if self.info is None:
            self.info = self._describe(module, q, found)
        for name, value in found.items():
            expected = getattr(self.info, name)
            if value != expected:
                raise RecordError(
                    f"layer {layer}: {name} {value:g}, but {expected:g} in the layers "
                    "before; a trace holds one: name layers that agree in layers="
                )

    def _describe(self, module: nn.Module, q: torch.Tensor, found: dict[str, Any]) -> ModelInfo:
        options = self.options
        logit_size = self._logit_size()
        vocab = options.vocab_size
        if vocab is None and options.tokenizer is not None:
            vocab = min(len(options.tokenizer), logit_size)
        if options.rope is not None:
            rotation = describe.Rotation(options.rope[0], options.rope[1], None)
        else:
            rotation = describe.rotation(self.model, module, found["head_dim"])
        half = q.dtype in (torch.float16, torch.bfloat16) or options.kv_dtype == "fp16"
        return ModelInfo(
            name=options.name or describe.model_name(self.model),
            architecture=str(self.config.model_type),
            n_layers=self.n_layers,
            hidden_size=int(self.config.hidden_size),
            vocab_size=int(vocab if vocab is not None else logit_size),
            logit_size=logit_size,
            rope=rotation.kind,
            rope_dim=rotation.dim,
            rope_inv_freq=rotation.inv_freq,
            compute_dtype=str(q.dtype).removeprefix("torch."),
            cache_dtype="float16" if half else "float32",
            **found,
        )

    def _logit_size(self) -> int:
        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if isinstance(head, nn.Linear) and weight is not None:
            return int(head.out_features)
        return int(self.config.vocab_size)

    def wo(self, layer: int) -> torch.Tensor:
        """[query heads, value_dim, hidden] on the device of the layer."""
        assert self.info is not None
        if layer not in self._wo:
            self._wo[layer] = describe.output_projection(
                self.attention[layer], self.info.n_q_heads, self.info.value_dim
            )
        return self._wo[layer]

    def recorded(self) -> list[int]:
        """Layers that attended and are wanted; an error where a named one did not attend."""
        missing = [] if self._wanted is None else sorted(self._wanted - set(self.scores))
        if missing:
            raise RecordError(
                f"layer {missing[0]}: named in layers=, but it did not attend through "
                "transformers' attention interface"
            )
        return sorted(layer for layer in self.scores if self.wanted(layer))

    def facts(self) -> Callable[[], LayerFacts]:
        """What the writer needs, made in its thread: copies from the device may wait there."""
        layers, info = self.recorded(), self.info
        assert info is not None
        window = [self.scores[i].window if i in self.scores else 0 for i in range(self.n_layers)]
        sinks = {i: s.sinks for i, s in self.scores.items() if s.sinks is not None}
        for layer in layers:
            if bool(sinks) != (layer in sinks):
                raise RecordError(
                    f"layer {layer}: {'no ' if sinks else ''}learned sinks, unlike "
                    "other layers; name layers that agree in layers="
                )
        wo = {layer: self.wo(layer) for layer in layers} if "wo" in self.options.extras else {}

        def make() -> LayerFacts:
            table = None
            if sinks:
                table = np.zeros((self.n_layers, info.n_q_heads), "<f4")
                for layer, values in sinks.items():
                    table[layer] = values.detach().float().cpu().numpy()
            return LayerFacts(
                layers, window, table, {i: w.detach().float().cpu().numpy() for i, w in wo.items()}
            )

        return make
