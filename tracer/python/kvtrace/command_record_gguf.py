"""kvtrace record-gguf: a GGUF and token ids into a trace, with llama.cpp."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kvtrace_tools import files
from kvtrace_tools.__main__ import count


def add_command(commands: argparse._SubParsersAction) -> None:
    sub = commands.add_parser(
        "record-gguf",
        help="run a GGUF with llama.cpp and write a trace",
        description="Runs llama.cpp (PyPI's llama-cpp-python, unpatched) over token ids, or lets "
        "it continue them (--generate), and writes what attention met into a trace.",
    )
    sub.add_argument("model", type=Path, metavar="MODEL.gguf")
    sub.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="decimal token ids")
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
    sub.add_argument("--temperature", type=float, default=0.0, help="of --generate; 0: greedy")
    sub.add_argument("--seed", type=int, default=0, help="of --temperature (default 0)")
    sub.add_argument("--block", type=count, default=128, metavar="N", help="positions per pass")
    sub.add_argument("--logits", choices=("stats", "full"), default="stats")
    sub.add_argument("--threads", type=count, metavar="N", help="of llama.cpp")
    sub.add_argument("--gpu-layers", type=count, default=0, metavar="N", help="layers on the GPU")
    sub.add_argument("--task", default="", help="for the record")
    sub.add_argument("--quiet", action="store_true", help="no summary on stderr")
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from .llama_cpp_run import record_gguf

    start = time.perf_counter()
    positions = record_gguf(
        args.model,
        files.read_tokens(args.tokens)[: args.max_tokens],
        args.output,
        prompt_length=args.prompt_length,
        generate=args.generate,
        block=args.block,
        temperature=args.temperature,
        seed=args.seed,
        threads=args.threads,
        gpu_layers=args.gpu_layers,
        logits=args.logits,
        task=args.task,
    )
    if not args.quiet:
        seconds = time.perf_counter() - start
        print(
            f"{args.output}: {positions} positions, {positions / seconds:.1f} tokens/s with "
            "recording and loading",
            file=sys.stderr,
        )
