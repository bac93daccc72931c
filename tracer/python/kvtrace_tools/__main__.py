"""Command line: python3 -m kvtrace_tools COMMAND ... (errors: one line on stderr, exit code 1)."""

import argparse
import sys
from pathlib import Path

from .errors import ToolError


def count(text: str) -> int:
    """argparse type: a whole number from 0 on."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def run_gguf_to_hf(args: argparse.Namespace) -> None:
    from .gguf_model import convert

    for note in convert(args.model, args.output, args.dtype):
        print(f"note: {note}", file=sys.stderr)


def run_encode(args: argparse.Namespace) -> None:
    from . import files, tokens

    tokenizer = tokens.load_tokenizer(args.tokenizer)
    text = tokens.cut_text(files.read_text(args.text), args.start, args.chars,
                           args.collapse_whitespace)
    ids = tokens.encode(tokenizer, text)[: args.max_tokens]
    if not ids:
        raise ToolError(f"{args.text}: nothing to encode from character {args.start} on")
    files.write_whole(args.output, files.format_tokens(ids, args.per_line).encode())


def run_decode(args: argparse.Namespace) -> None:
    from . import files, tokens

    tokenizer = tokens.load_tokenizer(args.tokenizer)
    text = tokens.escape(tokens.decode(tokenizer, files.read_tokens(args.tokens)))
    sys.stdout.buffer.write(text.encode() + b"\n")


def run_find_gguf(args: argparse.Namespace) -> None:
    from .packages import find_gguf

    for path in find_gguf(args.package):
        print(path)


def add_commands(commands: argparse._SubParsersAction) -> None:
    """The tools' commands, also part of the command line of `kvtrace`."""
    sub = commands.add_parser("gguf-to-hf", help="a GGUF model to a Hugging Face directory")
    sub.add_argument("model", type=Path, metavar="MODEL.gguf")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    sub.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="f32",
                     help="type of the stored weights (default f32, exact)")
    sub.set_defaults(run=run_gguf_to_hf)

    sub = commands.add_parser("encode", help="a text to a file of decimal token ids")
    sub.add_argument("text", type=Path, metavar="TEXT.txt", help="UTF-8, or the same as .gz")
    sub.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="TOKENS")
    sub.add_argument("--from", dest="start", type=count, default=0, metavar="CHAR")
    sub.add_argument("--chars", type=count, metavar="N", help="characters to read")
    sub.add_argument("--max-tokens", type=count, metavar="N", help="ids to keep")
    sub.add_argument("--collapse-whitespace", action="store_true",
                     help="every run of white space becomes one space, after "
                     "--from and --chars counted")
    sub.add_argument("--per-line", type=count, default=0, metavar="N",
                     help="ids on a line (default: all on one)")
    sub.set_defaults(run=run_encode)

    sub = commands.add_parser("decode", help="token ids back to text, bytes escaped losslessly")
    sub.add_argument("tokens", type=Path, metavar="TOKENS")
    sub.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    sub.set_defaults(run=run_decode)

    sub = commands.add_parser("find-gguf", help="path of the GGUF that an installed package carries")
    sub.add_argument("package")
    sub.set_defaults(run=run_find_gguf)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtrace_tools", description=__doc__)
    add_commands(parser.add_subparsers(dest="command", required=True))
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
