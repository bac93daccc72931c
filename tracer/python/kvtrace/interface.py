"""Standing between a model and its attention: transformers' public table of attention functions.

The functions that a model's attention modules ask for by name (`eager`, `sdpa`, a flash kernel) are
replaced under the same name, so that the model builds its masks and its cache exactly as without
us. A replaced function calls the one it stands for and shows the call to the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import describe
from .errors import RecordError

Watch = Callable[..., Any]  # (original, implementation, module, q, k, v, mask, kwargs) -> result


class Interception:
    """Installed by install(), undone by remove(). `modules`: the attention modules to watch."""

    def __init__(self, model: PreTrainedModel, modules: set[int], watch: Watch) -> None:
        self._watched, self._watch = modules, watch
        self._undo: list[tuple[Any, str, Any]] = []
        self.tables: dict[int, Any] = {id(ALL_ATTENTION_FUNCTIONS): ALL_ATTENTION_FUNCTIONS}
        self.names: set[str] = set()
        for module in model.modules():
            if id(module) not in modules:
                continue
            config = getattr(module, "config", model.config)
            self.names.add(str(getattr(config, "_attn_implementation", None) or "eager"))
            for source in describe.modeling_modules(module):
                table = getattr(source, "ALL_ATTENTION_FUNCTIONS", None)
                if table is not None:
                    self.tables[id(table)] = table

    def install(self) -> None:
        for table in self.tables.values():
            for name in self.names:
                before = table.get(name)
                if before is None and name != "eager":
                    continue  # this table does not know it; the model would fail without us too
                self._undo.append((table, name, before))
                table[name] = self._replacement(name, before)

    def remove(self) -> None:
        while self._undo:
            table, name, before = self._undo.pop()
            del table[name]
            if table.get(name) is not before:
                table[name] = before

    def _replacement(self, name: str, before: Callable[..., Any] | None) -> Callable[..., Any]:
        def attention(
            module: nn.Module,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            original = before or describe.eager_function(module)
            if original is None:
                raise RecordError(
                    f"{type(module).__name__}: its file has no "
                    "eager_attention_forward; load the model with "
                    "attn_implementation='sdpa'"
                )
            if id(module) not in self._watched:
                return original(module, query, key, value, attention_mask, *args, **kwargs)
            return self._watch(
                original, name, module, query, key, value, attention_mask, args, kwargs
            )

        return attention
