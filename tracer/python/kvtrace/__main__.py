"""Command line: kvtrace COMMAND ... (errors: one line on stderr, exit code 1; wrong usage: 2)."""

import argparse
import sys

from kvtrace_tools.__main__ import add_commands
from kvtrace_tools.errors import ToolError

from . import command_record, command_record_gguf
from .version import __version__


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtrace", description="Traces of real runs for kvreplay, and tools around them."
    )
    parser.add_argument("--version", action="version", version=f"kvtrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command_record.add_command(commands)
    command_record_gguf.add_command(commands)
    add_commands(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
