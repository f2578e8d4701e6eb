"""Small tokenizers of every kind, and helpers to store, stream and damage them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minillm.tokenizer import Tokenizer
from minillm.tokenizer.gguf import TokenType

# Characters that pre-tokenizers treat differently.
DIFFICULT_CHARACTERS = (
    "ab'SsdllLVErem Tt\n\r\t\u00a0\u3000 12345²½٣Ⅷ.,!?;:/()[]{}<>=+$^~|`_#\"\\-éÉe\u0301ñßΩאبखक्ष中文かなカナ한글ա՛ა𝒜"
)
DIFFICULT_CHARACTERS += "🎉\u200d👩\ufe0f"
# Text of any Unicode characters, of the characters above, or mostly of spaces and line breaks.
ANY_TEXT = st.text(max_size=40) | st.text(DIFFICULT_CHARACTERS, max_size=60) | st.text(" \n\t\r a1'", max_size=30)

# Values of wrong types, out of range, or empty.
JUNK = st.sampled_from([None, True, -1, 2**63, 10**30, 1.5, "", "x", "<s>", [], {}, [[]], {"type": "BPE"}])

CORPUS = ["the cat sat on the mat in 1984", "a dog, a cat and the hat", "안녕 세상", "def f(x): return x + 1"] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer like GPT-2's, with three special tokens and one added token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def sentencepiece_backend(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer like Llama 2's: spaces are '▁', and characters not in the vocabulary become bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat", "a dog and a cat"] * 3, trainer)
    fields = json.loads(backend.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] in SPECIAL]
    backend = tokenizers.Tokenizer.from_str(json.dumps(fields))
    backend.decoder = decoder
    return backend


def llama2_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def gemma_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def wordpiece_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    """Return the text of each push to a streaming decoder, and of `finish`."""
    decoder = tokenizer.stream(**options)
    return [*map(decoder.push, ids), decoder.finish()]


def write(folder: Path, name: str, value: Any) -> None:
    """Write a file: text unchanged, any other value as JSON."""
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def paths_in(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path (keys and indices) of every value inside a nested JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


def spm_metadata(pieces, adds_space):
    """Return the metadata that a converter writes for a SentencePiece model. `pieces` are (text, score, type)."""
    texts = [text.replace("▁", " ") if token_type == TokenType.USER_DEFINED else text for text, _, token_type in pieces]
    _, scores, types = zip(*pieces, strict=True)
    fields = {"model": "llama", "pre": "default", "tokens": texts, "scores": list(scores)}
    fields |= {"token_type": [int(token_type) for token_type in types], "add_space_prefix": adds_space}
    fields |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
