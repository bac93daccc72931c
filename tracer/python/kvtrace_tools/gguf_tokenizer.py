"""The tokenizer that a GGUF file carries, rebuilt with the `tokenizers` library.

Byte-level BPE and Gemma's pieces are rebuilt. A GGUF names the rule that splits text into words before the merges
(`tokenizer.ggml.pre`) but does not contain it; the rules below are those of the models' own
tokenizer.json files. A name that is not listed is refused, for a wrong rule gives other ids.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Field = Callable[[str], Any]


def real_vocabulary(field: Field, rows: int) -> int:
    """Tokens up to the last one that is not padding; `rows` where the file lists no tokens."""
    tokens = field("tokenizer.ggml.tokens")
    if not tokens:
        return rows
    types = field("tokenizer.ggml.token_type") or [1] * len(tokens)
    count = min(len(tokens), len(types), rows)
    while count > 1 and types[count - 1] == UNUSED:
        count -= 1
    return count


def word_splitter(name: str) -> pre_tokenizers.PreTokenizer | None:
    """The rule that cuts text into words before the merges, None where it is not known."""
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in ("gpt-2", "gpt2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "qwen2":
        words = pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, level])
    return None


def merges_of(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps a score per piece instead of merges: a pair joins the sooner, the higher
    the score of what it makes (as transformers' convert_slow_tokenizer derives merges)."""
    found = []
    for piece, index in ids.items():
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(scores[index], left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def rebuild_pieces(field: Field, vocab: int) -> Tokenizer:
    """Gemma's: spaces stand as U+2581 inside words, unknown characters as their bytes."""
    tokens, scores = field("tokenizer.ggml.tokens")[:vocab], field("tokenizer.ggml.scores")
    types = field("tokenizer.ggml.token_type")
    ids = {token: index for index, token in enumerate(tokens)}
    plain = {token: index for token, index in ids.items() if types[index] in (1, USER_DEFINED)}
    unknown = tokens[field("tokenizer.ggml.unknown_token_id") or 0]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges_of(plain, scores), unk_token=unknown,
                                     byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [AddedToken(tokens[i], special=True, normalized=False)
               for i in range(vocab) if types[i] == CONTROL]
    tokenizer.add_tokens(special)
    return tokenizer


def rebuild(field: Field, vocab: int) -> tuple[Tokenizer | None, str]:
    """The tokenizer over the first `vocab` ids, or None and the reason."""
    kind, rule = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    if kind == "llama" and field("general.architecture") == "gemma3" and tokens:
        return rebuild_pieces(field, vocab), ""
    if kind != "gpt2" or not tokens or merges is None:
        return None, f"tokenizer {kind!r} is not byte-level BPE with tokens and merges"
    splitter = word_splitter(rule)
    if splitter is None:
        return None, f"pre-tokenizer {rule!r} is not known; known: smollm, gpt-2, qwen2"
    types = field("tokenizer.ggml.token_type") or [1] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens[:vocab])}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(ids) != vocab or any(len(pair) != 2 for pair in pairs):
        return None, "its tokens repeat or a merge is not a pair"
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    except Exception as error:  # the library raises bare Exception
        return None, " ".join(str(error).split())
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    added = [i for i in range(vocab) if types[i] in (CONTROL, USER_DEFINED)]
    for index in added:
        special = types[index] == CONTROL
        tokenizer.add_tokens([AddedToken(tokens[index], special=special, normalized=False)])
    return tokenizer, ""
