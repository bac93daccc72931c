"""Text to ids and back: rules of the pre-tokenizers, bytes that are no text, the command line."""

import contextlib
import gzip
import io
import tempfile
import unittest
from pathlib import Path

import helpers

from kvtrace_tools import tokens
from kvtrace_tools.__main__ import main
from kvtrace_tools.gguf_tokenizer import real_vocabulary, rebuild

TOKENS, MERGES = helpers.tokenizer_tokens()


def fields(pre: str) -> dict:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3] + [1] * (len(TOKENS) - 1),
    }


def words(pre: str, text: str) -> list[str]:
    tokenizer, _ = rebuild(fields(pre).get, len(TOKENS))
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


class Tokens(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.tokenizer, reason = rebuild(fields("smollm").get, len(TOKENS))
        self.assertEqual("", reason)
        self.tokenizer.save(str(self.folder / "tokenizer.json"))

    def run_tool(self, *arguments: str) -> tuple[int, str, str]:
        stdout, stderr = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                code = main(list(arguments))
            except SystemExit as leave:
                code = leave.code
        stdout.flush()
        return code, stdout.buffer.getvalue().decode(), stderr.getvalue()

    def encode(self, *more: str, text: str = "text.txt") -> tuple[int, str]:
        code, _, stderr = self.run_tool(
            "encode", str(self.folder / text), "--tokenizer", str(self.folder),
            "-o", str(self.folder / "ids"), *more)
        return code, stderr

    def test_merges(self) -> None:
        ids = tokens.encode(self.tokenizer, "he hello")
        self.assertEqual(["he", "Ġhe", "ll", "o"], [TOKENS[i] for i in ids])

    def test_words_of_each_rule(self) -> None:
        self.assertEqual(["ab", "1", "2", "3", "Ġcd"], words("smollm", "ab123 cd"))
        self.assertEqual(["ab", "123", "Ġcd"], words("gpt-2", "ab123 cd"))
        self.assertEqual(["ab", "1", "2", "3", "Ġcd"], words("qwen2", "ab123 cd"))
        # Qwen2 keeps a line end with the punctuation before it; GPT-2 and SmolLM do not.
        self.assertEqual(["a", "!Ċ", "b"], words("qwen2", "a!\nb"))
        self.assertEqual(["a", "!", "Ċ", "b"], words("smollm", "a!\nb"))

    def test_special_text_is_text(self) -> None:
        ids = tokens.encode(self.tokenizer, "<|endoftext|>")
        self.assertEqual(13, len(ids))
        self.assertEqual(["<|endoftext|>"], [p.decode() for p in tokens.decode(self.tokenizer, [0])])

    def test_round_trip(self) -> None:
        text = "he said: \u00e4\u00f6\u00fc \u65e5\u672c \U0001f600 1234\n\tx\x00\x1b </script>"
        pieces = tokens.decode(self.tokenizer, tokens.encode(self.tokenizer, text))
        self.assertEqual(text, b"".join(pieces).decode())

    def test_cut_characters(self) -> None:
        emoji = tokens.encode(self.tokenizer, "\U0001f600")
        self.assertEqual(4, len(emoji))
        pieces = tokens.decode(self.tokenizer, emoji[:3])
        self.assertEqual(b"\xf0\x9f\x98", b"".join(pieces))
        self.assertEqual(r"\xf0\x9f\x98", tokens.escape(pieces))
        self.assertEqual("\U0001f600", tokens.escape(tokens.decode(self.tokenizer, emoji)))
        alphabet = {byte: char for char, byte in tokens.byte_alphabet().items()}
        for byte, escaped in ((0x80, r"\x80"), (0x1B, r"\x1b"), (0, r"\x00"), (ord("\\"), r"\\")):
            ids = [TOKENS.index(alphabet[byte])]
            self.assertEqual(escaped, tokens.escape(tokens.decode(self.tokenizer, ids)))

    def test_every_byte_comes_back(self) -> None:
        ids = list(range(1, 257))
        data = b"".join(tokens.decode(self.tokenizer, ids))
        self.assertEqual(set(range(256)), set(data))

    def test_ids_beyond_the_tokenizer(self) -> None:
        pieces = tokens.decode(self.tokenizer, [len(TOKENS) - 1, 49999])
        self.assertEqual(r" he\{id 49999}", tokens.escape(pieces))

    def test_cut_then_collapse(self) -> None:
        self.assertEqual("c d", tokens.cut_text("ab  c\n\n d e", 2, 7, True))
        self.assertEqual("  c", tokens.cut_text("ab  c", 2, None, False))

    def test_commands(self) -> None:
        (self.folder / "text.txt.gz").write_bytes(gzip.compress(b"xx he   hello hello"))
        code, stderr = self.encode("--from", "2", "--max-tokens", "4", "--collapse-whitespace",
                                   "--per-line", "3", text="text.txt.gz")
        self.assertEqual((0, ""), (code, stderr))
        lines = (self.folder / "ids").read_text().split("\n")
        self.assertEqual([3, 1, 0], [len(line.split()) for line in lines])
        code, stdout, _ = self.run_tool("decode", str(self.folder / "ids"), "--tokenizer",
                                        str(self.folder))
        self.assertEqual((0, "he hello\n"), (code, stdout))

    def test_errors_are_one_line(self) -> None:
        (self.folder / "text.txt").write_bytes(b"ab\xff")
        self.assertEqual(1, self.encode()[0])
        self.assertIn("byte 2 is not UTF-8", self.encode()[1])
        (self.folder / "text.txt").write_text("ab")
        self.assertIn("nothing to encode", self.encode("--from", "9")[1])
        self.assertEqual(2, self.encode("--from", "-1")[0])
        (self.folder / "ids").write_text("1 2 x3")
        for ids in ("1 -2", "1 2147483648", "1.5", "٣"):
            (self.folder / "ids").write_text(ids)
            code, _, stderr = self.run_tool("decode", str(self.folder / "ids"), "--tokenizer",
                                            str(self.folder))
            self.assertEqual((1, 1), (code, stderr.count("\n")), ids)
        code, _, stderr = self.run_tool("decode", "x", "--tokenizer", str(self.folder / "none"))
        self.assertEqual((1, 1), (code, stderr.count("\n")))
        code, _, stderr = self.run_tool("find-gguf", "no-such-package-here")
        self.assertEqual((1, 1), (code, stderr.count("\n")))
        code, _, stderr = self.run_tool("find-gguf", "numpy")
        self.assertIn("carries no GGUF", stderr)

    def test_real_vocabulary(self) -> None:
        found = {"tokenizer.ggml.tokens": list("abcd"), "tokenizer.ggml.token_type": [1, 5, 1, 5]}
        self.assertEqual(3, real_vocabulary(found.get, 4))
        self.assertEqual(9, real_vocabulary({}.get, 9))


if __name__ == "__main__":
    unittest.main()
