"""Reading texts and token files, writing files whole."""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ToolError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name beside `path` to write to; on success it is synced and renamed over `path`, so
    that no half file is ever seen. On failure it is removed."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        # Some writers create private files; a result is as readable as any other new file.
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        os.replace(part, path)
    except OSError as error:
        raise ToolError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, or leaves what was there."""
    with replacing(path) as part:
        part.write_bytes(data)


def read_text(path: Path) -> str:
    """A UTF-8 text; a name ending in .gz is decompressed."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                data = file.read()
        else:
            data = path.read_bytes()
    except (OSError, EOFError) as error:
        raise ToolError(f"{path}: cannot be read: {error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolError(
            f"{path}: byte {error.start} is not UTF-8; convert it first, e.g. with iconv"
        ) from error


def read_tokens(path: Path) -> list[int]:
    """Decimal ids separated by white space, each from 0 to 2^31 - 1."""
    ids = []
    for index, word in enumerate(read_text(path).split()):
        if not (word.isascii() and word.isdigit() and len(word) <= 10 and int(word) < 2**31):
            raise ToolError(f"{path}: token {index} is {word[:20]!r}, expected a decimal id")
        ids.append(int(word))
    return ids


def format_tokens(ids: list[int], per_line: int) -> str:
    """One line, or lines of `per_line` ids where that is positive; ends in a newline."""
    width = per_line if per_line > 0 else max(len(ids), 1)
    lines = [" ".join(map(str, ids[i : i + width])) for i in range(0, len(ids), width)]
    return "\n".join(lines) + "\n"
