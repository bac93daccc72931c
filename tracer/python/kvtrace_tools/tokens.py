"""Text to token ids and back, without losing a byte."""

from pathlib import Path

from tokenizers import Tokenizer, decoders

from .errors import ToolError


def load_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json of a model directory (or the file itself)."""
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ToolError(f"{path}: not a readable tokenizer: {' '.join(str(error).split())}") from error


def cut_text(text: str, start: int, chars: int | None, collapse: bool) -> str:
    """Characters start .. start + chars of the text; then, if asked, every run of white space in
    them becomes one space and none is left at the ends."""
    part = text[start:] if chars is None else text[start : start + chars]
    return " ".join(part.split()) if collapse else part


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a plain text: none is added, and `<|endoftext|>` in the text stays text."""
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes
    for the characters from U+0100 on, in order."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    table = {chr(byte): byte for byte in own}
    table.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return table


def piece_bytes(token: str) -> bytes:
    """A piece of a tokenizer that is not byte-level: U+2581 is a space, <0x0A> a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def decode(tokenizer: Tokenizer, ids: list[int]) -> list[bytes | int]:
    """One piece per id: its bytes, or the id itself where the tokenizer has no such token."""
    alphabet = byte_alphabet()
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
    pieces: list[bytes | int] = []
    for index in ids:
        token = tokenizer.id_to_token(index)
        if index in added:
            pieces.append(added[index].encode())
        elif token is None:
            pieces.append(index)
        elif not byte_level:
            pieces.append(piece_bytes(token))
        else:
            pieces.append(
                b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
            )
    return pieces


def escape(pieces: list[bytes | int]) -> str:
    r"""Printable text that can be turned back: bytes that are not UTF-8 and control characters
    become \xNN, a backslash \\, an id beyond the tokenizer \{id N}."""
    out = []
    run = b""
    for piece in [*pieces, b""]:
        if isinstance(piece, bytes):
            run += piece
            continue
        out.append(escape_bytes(run) + f"\\{{id {piece}}}")
        run = b""
    return "".join(out) + escape_bytes(run)


def escape_bytes(data: bytes) -> str:
    """The bytes of whole UTF-8 characters stay as they are; see escape()."""
    out = []
    for char in data.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:
            out.append(f"\\x{code - 0xDC00:02x}")
        elif (code < 32 and char not in "\n\t") or 0x7F <= code < 0xA0:
            out.append("".join(f"\\x{byte:02x}" for byte in char.encode()))
        else:
            out.append("\\\\" if char == "\\" else char)
    return "".join(out)
