"""kvtrace record: a Hugging Face directory and a text into a trace, with torch."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrace_tools import files, tokens
from kvtrace_tools.__main__ import count

from .errors import RecordError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def add_command(commands: argparse._SubParsersAction) -> None:
    sub = commands.add_parser(
        "record",
        help="run a model with torch and write a trace",
        description="Runs a transformers model over a text (teacher-forced, in blocks), or lets it "
        "continue the text (--generate), and writes what attention met into a trace.",
    )
    sub.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the model"
    )
    text = sub.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text, or .gz; encoded with the directory's tokenizer.json",
    )
    text.add_argument("--tokens", type=Path, metavar="FILE", help="decimal token ids instead")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="RUN.h5")
    sub.add_argument("--max-tokens", type=count, metavar="N", help="token ids to keep")
    sub.add_argument(
        "--prompt-length",
        type=count,
        metavar="P",
        help="positions that are the prompt; the rest is teacher-forced",
    )
    sub.add_argument(
        "--generate",
        type=count,
        metavar="N",
        help="all tokens are the prompt; generate up to N more",
    )
    sub.add_argument(
        "--temperature", type=float, default=0.0, help="of --generate; 0 (default) is greedy"
    )
    sub.add_argument("--seed", type=int, default=0, help="of --temperature (default 0)")
    sub.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1 ...")
    sub.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto (default): as stored",
    )
    sub.add_argument(
        "--attn", metavar="NAME", help="eager, sdpa, flash_attention_2, ...; default: the model's"
    )
    sub.add_argument(
        "--block",
        type=count,
        default=128,
        metavar="N",
        help="positions per pass of a teacher-forced recording (128)",
    )
    sub.add_argument("--logits", choices=("none", "stats", "full"), default="stats")
    sub.add_argument(
        "--layers", type=_layers, metavar="0,6,12", help="layers to record; default all"
    )
    sub.add_argument(
        "--with",
        dest="extras",
        type=lambda text: text.split(","),
        default=[],
        metavar="X,Y",
        help="wo, value_norm, residual",
    )
    sub.add_argument(
        "--rows",
        choices=("all", "decode"),
        default="all",
        help="decode: q, o, lse from 64 positions before the decode on",
    )
    sub.add_argument(
        "--kv-dtype",
        choices=("model", "fp16"),
        default="model",
        help="fp16: q, k, v are rounded before attention, as `kvreplay record` does",
    )
    sub.add_argument("--task", default="", help="for the record")
    sub.add_argument("--flush-every", type=count, default=16, metavar="N")
    sub.add_argument("--threads", type=count, metavar="N", help="of torch on the CPU")
    sub.add_argument(
        "--baseline",
        action="store_true",
        help="run the same passes first without recording: the overhead is then "
        "measured, not estimated",
    )
    sub.add_argument("--quiet", action="store_true", help="no progress and no summary on stderr")
    sub.set_defaults(run=run)


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 0,6,12") from None


def _load(args: argparse.Namespace) -> PreTrainedModel:
    import torch
    import transformers

    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not (args.hf / "config.json").is_file():
        raise RecordError(f"{args.hf}: no config.json, expected a Hugging Face directory")
    options: dict[str, Any] = {} if args.attn is None else {"attn_implementation": args.attn}
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(args.hf), dtype=dtype, local_files_only=True, **options
        )
        return model.to(device).eval()
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise RecordError(f"{args.hf}: cannot be loaded: {' '.join(str(error).split())}") from error


def _ids(args: argparse.Namespace) -> tuple[list[int], int | None]:
    """Token ids, and the number of real ids where the directory has a tokenizer."""
    known = (args.hf / "tokenizer.json").is_file()
    vocabulary = None
    if args.text is not None or known:
        tokenizer = tokens.load_tokenizer(args.hf)
        vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    if args.text is not None:
        ids = tokens.encode(tokenizer, files.read_text(args.text))
    else:
        ids = files.read_tokens(args.tokens)
    ids = ids[: args.max_tokens]
    if not ids:
        raise RecordError(f"{args.text or args.tokens}: no token ids")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise RecordError(f"{args.tokens}: token {max(ids)}, expected 0 .. {vocabulary - 1}")
    return ids, vocabulary


def _timed(work: Any, device: torch.device) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def run(args: argparse.Namespace) -> None:
    if (args.prompt_length is None) == (args.generate is None):
        raise RecordError("give --prompt-length (teacher-forced) or --generate, one of the two")
    if args.temperature < 0 or (args.temperature and args.generate is None):
        raise RecordError(f"--temperature {args.temperature}: a number from 0 on, with --generate")
    import kvtrace

    kvtrace.check_versions()
    ids, vocabulary = _ids(args)
    model = _load(args)
    if vocabulary is not None:
        vocabulary = min(vocabulary, model.config.get_text_config(decoder=True).vocab_size)
    options = dict(
        logits=args.logits,
        layers=args.layers,
        extras=args.extras,
        rows=args.rows,
        kv_dtype=args.kv_dtype,
        vocab_size=vocabulary,
        task=args.task,
        quiet=True,
        flush_every=args.flush_every,
        name=args.hf.resolve().name,
    )
    if args.generate is None:
        recording, baseline = _teacher_forced(args, model, ids, options)
    else:
        recording, baseline = _generate(args, model, ids, options)
    if recording.summary is not None and not args.quiet:
        recording.summary.baseline = baseline
        print(recording.summary.text(), file=sys.stderr)


def _teacher_forced(
    args: argparse.Namespace, model: PreTrainedModel, ids: list[int], options: dict[str, Any]
) -> tuple[Any, float | None]:
    import torch

    import kvtrace

    from .teacher import passes

    baseline = None
    device = next(model.parameters()).device
    if args.baseline:
        given = torch.tensor([ids], device=device)

        def work() -> None:
            for _ in passes(model, given, args.prompt_length, args.block):
                pass

        _timed(work, device)  # kernels are chosen, memory is allocated
        baseline = _timed(work, device)
    recording = kvtrace.teacher_forced(
        model, ids, args.output, prompt_length=args.prompt_length, block=args.block, **options
    )
    return recording, baseline


def _generate(
    args: argparse.Namespace, model: PreTrainedModel, ids: list[int], options: dict[str, Any]
) -> tuple[Any, float | None]:
    import torch

    import kvtrace

    device = next(model.parameters()).device
    given = torch.tensor([ids], device=device)
    how: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        how = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
        options["seed"] = args.seed

    def work() -> None:
        torch.manual_seed(args.seed)
        generate: Any = model.generate
        generate(given, attention_mask=torch.ones_like(given), max_new_tokens=args.generate, **how)

    baseline = None
    if args.baseline:
        _timed(work, device)
        baseline = _timed(work, device)
    with kvtrace.record(model, args.output, **options) as recording:
        work()
    return recording, baseline
