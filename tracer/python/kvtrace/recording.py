"""Recording a transformers model while it runs: the context manager behind kvtrace.record()."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from . import describe, generation
from .attention import confidence, exact_sums
from .conveyor import Conveyor
from .errors import RecordError
from .interface import Interception
from .layers import LayerBook
from .meter import Meter, Summary
from .options import OBSERVATION_ROWS, ImageRequest, RecordOptions
from .passes import Batch, Pass, clip
from .schema import SequencePlan
from .rows import RowSender, block_bytes, check_keys, check_mask, check_outputs
from .session import HostSession, Place
from .transfer import Lane, Transfer
from .version import PRODUCER


class Recording:
    """Records every pass of `model` between __enter__ and __exit__ into `path`. After it has ended,
    `summary` says what it cost. An error of the recording is raised from the model's call."""

    def __init__(
        self,
        model: PreTrainedModel,
        path: str | os.PathLike[str],
        options: RecordOptions,
        lane: Lane | None = None,
    ) -> None:
        self.model = describe.check_model(model)
        self.path, self.options = Path(path), options
        self.book = LayerBook(self.model, options)
        self.summary: Summary | None = None
        self._layers = describe.decoder_layers(self.model)
        watched = {
            id(m): m
            for layer in self._layers
            for m in layer.modules()
            if isinstance(getattr(m, "layer_idx", None), int)
            and m is not layer
            and "cross" not in type(m).__name__.lower()
        }
        self._attention = {i: m for i, m in watched.items() if describe.is_attention(m)}
        self._interception = Interception(self.model, set(watched), self._watch)
        device = next(self.model.parameters()).device
        self._transfer = Transfer(device, options.buffer_bytes, lane)
        self._meter = Meter(device.type == "cuda")
        self._session = HostSession(self.path, PRODUCER)
        self._rows = RowSender(self.book, options, self._session, self._ship)
        self._conveyor: Conveyor | None = None
        self._batch: Batch | None = None
        self._pass: Pass | None = None
        self._generation: generation.Generation | None = None
        self._signature = inspect.signature(self.model.forward)
        self._hooks: list[Any] = []
        self._sequences = 0
        self._opened = self._told_facts = False
        self._seconds, self._batch_start = 0.0, 0.0
        self._error: BaseException | None = None

    # -- coming and going

    def __enter__(self) -> Recording:
        if "generate" in vars(self.model):
            raise RecordError(f"{type(self.model).__name__}: is being recorded already")
        folder = self.path.absolute().parent
        if not folder.is_dir():
            raise RecordError(f"{self.path}: the folder {folder} does not exist")
        self._conveyor = Conveyor()
        self._hooks.append(self.model.register_forward_pre_hook(self._before, with_kwargs=True))
        self._hooks.append(self.model.register_forward_hook(self._after, with_kwargs=True))
        if "residual" in self.options.extras:
            for index, layer in enumerate(self._layers):
                self._hooks.append(layer.register_forward_hook(self._residual_hook(index)))
        if self.options.retention is not None:
            for module in self._attention.values():
                self._hooks.append(
                    module.register_forward_pre_hook(self._keep_hidden, with_kwargs=True)
                )
        self._interception.install()
        setattr(self.model, "generate", self._generate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()
        failure = error or self._error
        if failure is None:
            try:
                self._end_batch(None, None)
                self._give(self._finish)
                self._join()
            except BaseException as late:
                failure = late
        if failure is None:
            self._summarise()
            return
        self._leave(failure)
        if error is None:
            raise failure

    def _remove(self) -> None:
        self._interception.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if "generate" in vars(self.model):
            del self.model.generate

    def _join(self) -> None:
        conveyor, self._conveyor = self._conveyor, None
        if conveyor is not None:
            conveyor.close()

    def _finish(self) -> None:
        if self._session.writer is None:
            raise RecordError(f"{self.path}: nothing was recorded: the model made no pass")
        self._session.writer.finish()

    def _leave(self, failure: BaseException) -> None:
        """Commits what is whole, leaves the .part, and says so."""
        try:
            self._join()
        except BaseException:  # what is being raised came from there
            pass
        try:
            self._session.abandon()
        except BaseException:
            pass
        writer = self._session.writer
        if writer is None:
            return
        whole = writer.committed
        if not any(whole):
            writer.part.unlink(missing_ok=True)
        elif not self.options.quiet:
            print(
                f"{writer.part}: recording ended early ({type(failure).__name__}) with "
                f"{', '.join(map(str, whole))} positions whole; kvreplay inspect {writer.part} "
                "--recover",
                file=sys.stderr,
            )

    def _summarise(self) -> None:
        self.summary = Summary(
            str(self.path),
            self._sequences,
            sum(n for _, n in self._session.ended),
            self.path.stat().st_size,
            self._seconds,
            self._meter.seconds(),
            self._transfer.pool.waited,
        )
        if not self.options.quiet:
            print(self.summary.text(), file=sys.stderr)

    # -- to the writer thread

    def _give(self, work: Callable[[], None]) -> None:
        assert self._conveyor is not None
        self._conveyor.put(work)

    def _ship(self, values: torch.Tensor, work: Callable[[np.ndarray], None]) -> None:
        """`work` on the values in host memory, in the writer thread."""
        conveyor = self._conveyor
        assert conveyor is not None
        copy = self._transfer.send(values, conveyor.press)

        def run() -> None:
            work(copy.array())
            copy.release()

        conveyor.put(run, copy.release)

    # -- generate()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        original: Any = getattr(type(self.model), "generate")
        self._end_batch(None, None)
        self._generation = generation.plan(self.model, args, kwargs)
        try:
            result = original(self.model, *args, **kwargs)
            ids = result if isinstance(result, torch.Tensor) else result.sequences
            self._end_batch(ids, self._generation)
        finally:
            self._generation = None
        return result

    def _end_batch(self, ids: torch.Tensor | None, plan: generation.Generation | None) -> None:
        if self._batch is None:
            return
        outputs = None if ids is None else ids.cpu().numpy()
        prompt, pad = (plan.prompt, plan.pad) if plan is not None else (0, None)
        self._give(partial(self._session.end, outputs, prompt, pad))
        if self._batch.device.type == "cuda":
            torch.cuda.synchronize(self._batch.device)  # for an honest time
        self._seconds += time.perf_counter() - self._batch_start
        self._batch = None

    # -- one pass through the model

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._guard():
            given = self._signature.bind_partial(*args, **kwargs).arguments
            given = {**given.pop("kwargs", {}), **given}
            ids = given.get("input_ids")
            if not isinstance(ids, torch.Tensor):
                raise RecordError(
                    f"{type(self.model).__name__}: a pass without input_ids; a trace "
                    "needs the token ids"
                )
            cache = given.get("cache", given.get("past_key_values"))
            past = self._past(cache)
            size, n = ids.shape
            kept = self._kept(given.get("attention_mask"), past, n)
            batch = self._batch_for(ids, past, kept, given.get("position_ids"))
            self._pass = Pass(ids, n, batch.places(kept, n))

    @staticmethod
    def _past(cache: Any) -> int:
        """Positions that a cache holds."""
        try:
            return int(cache.get_seq_length()) if cache is not None else 0
        except ValueError:  # no layer has attended yet, or none ever will
            return 0

    def _kept(self, mask: Any, past: int, n: int) -> np.ndarray | None:
        """[batch, n] bool: which of the pass's rows are no padding; None: all."""
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            raise RecordError(
                "attention_mask: expected [batch, positions]; masks made by the "
                "caller cannot be recorded"
            )
        if past and self._generation is not None:
            return None  # generate() appends ones, and looking would stop the device
        if mask.shape[1] < n:
            raise RecordError(f"attention_mask: {mask.shape[1]} positions for {n} tokens")
        kept = mask[:, -n:].bool().cpu().numpy()
        return None if kept.all() else kept

    def _batch_for(
        self, ids: torch.Tensor, past: int, kept: np.ndarray | None, positions: Any
    ) -> Batch:
        size, n = ids.shape
        if past == 0:
            self._end_batch(None, None)
            batch = self._batch = Batch(size, self._sequences, ids.device)
            self._batch_start = time.perf_counter()
            self._sequences += size
            prompt = self._generation.prompt if self._generation is not None else None
            length = None if self._generation is not None else self.options.prompt_length
            batch.start(kept, n, prompt, length)
            self._check_positions(batch, positions, n)
            if callable(self.options.spans) or self.options.image_score is not None:
                batch.prompt_ids.append(ids)
            return batch
        if self._batch is None:
            raise RecordError(
                f"the cache holds {past} positions that were not recorded: a recording "
                "must see a sequence from its first token on (a cached prefix, or a "
                "second turn of a conversation?)"
            )
        batch = self._batch
        if past != batch.fed or size != batch.size:
            raise RecordError(
                f"the cache holds {past} positions of {size} sequences where "
                f"{batch.fed} of {batch.size} were recorded: a cropped or exchanged "
                "cache cannot be recorded"
            )
        if batch.prompt_ids and not batch.prompt_over:
            batch.prompt_ids.append(ids)
        return batch

    @staticmethod
    def _check_positions(batch: Batch, positions: Any, n: int) -> None:
        if not isinstance(positions, torch.Tensor):
            if any(batch.begins):
                raise RecordError(
                    "left padding without position_ids: the model would rotate by the "
                    "padded positions; pass position_ids that count each sequence "
                    "from 0 (generate() does)"
                )
            return
        if positions.ndim != 2:
            return  # several coordinates per token (images)
        rows = positions.cpu().numpy()
        for b in range(batch.size):
            row = rows[b if len(rows) > 1 else 0]
            begin, end = batch.begins[b], min(batch.ends[b], n)
            if not np.array_equal(row[begin:end], np.arange(end - begin)):
                raise RecordError(
                    f"position_ids of sequence {b} do not count from 0 (packed "
                    "sequences?): each sequence needs a row of its own"
                )

    def _guard(self) -> _Guard:
        return _Guard(self)

    # -- one layer

    def _watch(
        self,
        original: Any,
        implementation: str,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.options.kv_dtype == "fp16":
            q, k, v = (x.to(torch.float16).to(x.dtype) for x in (q, k, v))
        result = original(module, q, k, v, mask, *args, **kwargs)
        if self._pass is not None:
            with (
                self._guard(),
                torch.no_grad(),
                exact_sums(),
                torch.autocast(q.device.type, enabled=False),
            ):
                self._take(module, q, k, v, result[0], mask, implementation, kwargs)
        return result

    def _take(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        mask: Any,
        implementation: str,
        kwargs: dict[str, Any],
    ) -> None:
        index: Any = module.layer_idx
        one, batch, layer = self._pass, self._batch, int(index)
        assert one is not None and batch is not None
        if layer in one.layers:
            raise RecordError(
                f"layer {layer}: attends twice in one pass; shared attention cannot be recorded"
            )
        one.layers.add(layer)
        how = self.book.see(layer, module, q, k, v, kwargs)
        if not self.book.wanted(layer):
            return
        check_keys(layer, how, q, k, batch, one)
        check_mask(layer, how, module, k, mask, implementation, kwargs, batch, one)
        check_outputs(layer, how, q, k, v, out, batch, one)
        self._announce(batch, one)
        self._rows.send(layer, how, q, k, v, out, batch, one)

    def _announce(self, batch: Batch, one: Pass) -> None:
        """Opens the file, begins the sequences, and gives the pass's tokens: once each."""
        info = self.book.info
        assert info is not None
        if not self._opened:
            self._opened = True
            self._give(partial(self._session.open, info))
            gate = {
                n: t.detach().float().cpu().numpy() for n, t in self.options.retention_gate.items()
            }
            if gate:
                self._give(partial(self._session.gate, gate))
        if not batch.announced:
            batch.announced = True
            plans = [self._plan(batch, b) for b in range(batch.size)]
            stops = self._generation.stops if self._generation is not None else set()
            self._give(partial(self._session.begin, plans, stops))
        if not one.told:
            one.told = True
            self._ship(one.ids, partial(self._session.tokens, places=one.places))

    def _plan(self, batch: Batch, b: int) -> SequencePlan:
        options, number, prompt = self.options, batch.first_number + b, batch.n_prompt[b]
        capacity = options.capacity or prompt + generation.DEFAULT_CAPACITY
        temperature = None
        if self._generation is not None:
            capacity = self._generation.capacity - batch.begins[b]
            temperature = self._generation.temperature
        first_row = max(0, prompt - OBSERVATION_ROWS) if options.rows == "decode" else 0

        def ids() -> list[int]:
            whole = torch.cat(batch.prompt_ids, dim=1)[b]
            return [int(i) for i in whole[batch.begins[b] : batch.ends[b]].tolist()]

        spans = {name: list(ranges) for name, ranges in options.spans_of(number, ids).items()}
        return SequencePlan(
            prompt,
            capacity,
            first_row,
            task=options.task,
            temperature=temperature,
            seed=options.seed,
            chunks=options.chunks,
            spans=spans,
        )

    def _keep_hidden(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._pass is not None:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            layer: Any = module.layer_idx
            self._pass.hidden[int(layer)] = hidden

    def _residual_hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            one = self._pass
            if one is None:
                return
            with self._guard(), torch.no_grad():
                hidden = output[0] if isinstance(output, tuple) else output
                if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
                    raise RecordError(
                        f"layer {index}: its output is not [batch, positions, hidden]: "
                        "the residual stream cannot be recorded"
                    )
                if index == len(self._layers) - 1:
                    one.last_residual = hidden
                if index in one.layers and self.book.wanted(index):
                    norms = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)
                    self._ship(
                        norms,
                        partial(
                            self._session.rows, "residual_norm", places=one.places, layer=index
                        ),
                    )

        return hook

    # -- the end of a pass

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with self._guard(), torch.no_grad():
            one, batch, self._pass = self._pass, self._batch, None
            assert one is not None and batch is not None
            self._check_seen(one)
            if not self._told_facts:
                self._told_facts = True
                self._give(partial(self._session.facts, self.book.facts()))
            self._send_faults(batch, one)
            self._send_logits(batch, one, output)
            batch.advance(one.places, one.n)
            if batch.fed >= max(batch.ends) and not batch.prompt_over:
                batch.prompt_over = True
                self._end_prompt(batch)
            self._give(self._session.pass_done)
            batch.uncommitted += one.n
            if one.n > 1 or batch.uncommitted >= self.options.flush_every:
                batch.uncommitted = 0
                self._give(self._session.commit)
            if self._conveyor is not None:
                self._conveyor.press()

    def _check_seen(self, one: Pass) -> None:
        wanted = [layer for layer in one.layers if self.book.wanted(layer)]
        if wanted:
            if self._told_facts and set(self.book.recorded()) - set(one.layers):
                missing = min(set(self.book.recorded()) - set(one.layers))
                raise RecordError(f"layer {missing}: did not attend in this pass")
            return
        if self._interception.names and one.layers:
            self.book.recorded()  # names the layer that is missing
        raise RecordError(
            f"{type(self.model).__name__}: its attention does not go through transformers' "
            "attention interface (ALL_ATTENTION_FUNCTIONS), so that q, k and v cannot be seen; "
            "`kvreplay record` or a newer transformers may know this model"
        )

    def _send_faults(self, batch: Batch, one: Pass) -> None:
        if one.faults:
            self._ship(
                torch.stack(one.faults),
                partial(self._session.check_masks, layers=one.fault_layers, position=batch.fed),
            )

        if one.errors:
            self._ship(
                torch.stack(one.errors),
                partial(self._session.check_outputs, layers=one.error_layers, position=batch.fed),
            )

    def _send_logits(self, batch: Batch, one: Pass, output: Any) -> None:
        """Rows that predict: confidence, logits, and the residual stream they were made from."""
        start = max(0, batch.first_logit() - batch.fed)
        if start >= one.n:
            return
        info, options = self.book.info, self.options
        assert info is not None
        if options.logits != "none":
            logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else None)
            if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
                raise RecordError(
                    f"{type(self.model).__name__}: gives no logits; record a model with "
                    "a language-model head, or pass logits='none'"
                )
            if logits.shape[2] != info.logit_size:
                raise RecordError(f"{logits.shape[2]} logits, expected {info.logit_size}")
            offset = one.n - logits.shape[1]
            if start < offset:
                raise RecordError(
                    f"logits of position {batch.fed + start} are missing (the model "
                    f"was asked for the last {logits.shape[1]} rows, logits_to_keep)"
                )
            self._send_logit_rows(logits[:, start - offset :], start, one.places)
        if "residual" in options.extras and one.last_residual is not None:
            dtype = torch.float16 if info.exact else torch.float32
            self._ship(
                one.last_residual[:, start:].to(dtype),
                partial(
                    self._session.rows, "residual_final", places=clip(one.places, start, one.n)
                ),
            )

    def _send_logit_rows(self, logits: torch.Tensor, start: int, places: list[Place]) -> None:
        info = self.book.info
        assert info is not None
        rows = clip(places, start, start + logits.shape[1])
        self._ship(
            confidence(logits[..., : info.vocab_size]),
            partial(self._session.rows, "confidence", places=rows),
        )
        if self.options.logits != "full":
            return
        step = max(1, block_bytes(self.options) // (4 * logits.shape[0] * logits.shape[2]))
        for at in range(0, logits.shape[1], step):
            end = min(at + step, logits.shape[1])
            part = clip(rows, at, end)
            self._ship(
                logits[:, at:end].float(), partial(self._session.rows, "logits", places=part)
            )

    def _end_prompt(self, batch: Batch) -> None:
        for layer, sums in batch.column_sums.items():
            self._ship(sums, partial(self._session.column_sums, layer, begins=batch.begins))
        batch.column_sums = {}
        if self.options.image_score is not None:
            self._score_images(self.options.image_score, batch)

    def _score_images(self, callback: Callable[[ImageRequest], Any], batch: Batch) -> None:
        ids = torch.cat(batch.prompt_ids, dim=1).cpu().numpy()
        for layer in self.book.recorded():
            scores = []
            for b, (begin, end) in enumerate(zip(batch.begins, batch.ends)):
                number = batch.first_number + b
                values = callback(ImageRequest(layer, number, ids[b, begin:end]))
                values = np.asarray(
                    values.cpu() if isinstance(values, torch.Tensor) else values, dtype="<f4"
                )
                if values.shape != (end - begin,):
                    raise RecordError(
                        f"image_score: layer {layer}, sequence {number}: shape "
                        f"{list(values.shape)}, expected [{end - begin}]"
                    )
                scores.append(values)
            self._give(partial(self._session.image_scores, layer, scores))


class _Guard:
    """Measures the recorder's own work and keeps its first error, so that a recording whose error
    was swallowed on the way does not end as if nothing had happened."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._span = recording._meter.span()

    def __enter__(self) -> None:
        self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span.__exit__(None, None, None)
        if error is not None and self._recording._error is None:
            self._recording._error = error
