"""Reads and checks the tokenizer's fields in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from typing import Any

from minillm.errors import TokenizerError
from minillm.tokenizer.end_tokens import END_NAMES

SENTENCEPIECE_CONTROLS = {"<s>", "</s>"}
NO_TOKEN = 2**32 - 1  # -1 as an unsigned integer: llama.cpp's id of a token that does not exist
ROLES = {"bos": "bos_token", "eos": "eos_token", "eot": "eot_token", "unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """The type of a token. Control and user-defined tokens are found in a text before BPE is applied."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFTokenizerFields:
    """The tokenizer's part of a GGUF file's metadata.

    Parameters
    ----------
    metadata : the file's metadata by key
    source : the file's name, for error messages
    """

    def __init__(self, metadata: Mapping[str, Any], source: str):
        self.metadata, self.source = metadata, source

    def error(self, field: str, problem: str) -> TokenizerError:
        """Return an error that names the file, the field and the problem."""
        return TokenizerError(f"{self.source}: metadata {field!r} {problem}")

    def get(self, field: str, expected: type, default: Any = None) -> Any:
        """Return a field, or `default` if it is absent. Its type must be `expected` exactly: a bool is not an int."""
        value = self.metadata.get(field, default)
        if value is not default and type(value) is not expected:
            raise self.error(field, f"is {value!r:.60} ({type(value).__name__}), expected {expected.__name__}")
        return value

    def array(self, field: str, expected: type, length: int | None = None) -> list[Any]:
        """Return a field that is a list or NumPy array of `expected` items, as a list. Check its `length`, if given."""
        value = self.metadata.get(field)
        if value is None:
            raise self.error(field, "is missing")
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple):
            found = f"{value!r:.60} ({type(value).__name__})"
            raise self.error(field, f"is {found}, expected an array of {expected.__name__}")
        if not set(map(type, values)) <= {expected}:  # one pass in C, because the arrays are long
            index = next(index for index, item in enumerate(values) if type(item) is not expected)
            raise self.error(field, f"holds {values[index]!r:.60} at index {index:,}, expected {expected.__name__}")
        if length is not None and len(values) != length:
            raise self.error(field, f"has {len(values):,} entries, expected {length:,}, one per token")
        return list(values)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, in order of ids. Tokens are unique and not empty."""
        field = "tokenizer.ggml.tokens"
        tokens = self.array(field, str)
        vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
        if not tokens or "" in vocabulary:
            raise self.error(field, f"has an empty token at id {tokens.index('')}" if tokens else "is empty")
        if len(vocabulary) < len(tokens):
            first = next(index for index, token in enumerate(tokens) if vocabulary[token] != index)
            text = tokens[first]
            raise self.error(field, f"holds {text!r:.60} twice, as ids {first} and {vocabulary[text]}")
        return vocabulary

    @cached_property
    def token_types(self) -> list[int]:
        """The `TokenType` of every token. A token with the name of an end token counts as a control token.

        A file may say otherwise. Then a text that spells the token would become it even where no special tokens are
        wanted.
        """
        names = END_NAMES | (SENTENCEPIECE_CONTROLS if self.get("tokenizer.ggml.model", str) == "llama" else set())
        types = list(self._types_in_file)
        for token in names & self.vocabulary.keys():
            if types[self.vocabulary[token]] in (TokenType.NORMAL, TokenType.USER_DEFINED):
                types[self.vocabulary[token]] = TokenType.CONTROL
        return types

    @cached_property
    def _types_in_file(self) -> list[int]:
        field = "tokenizer.ggml.token_type"
        types = self.array(field, int, len(self.vocabulary))
        if unknown := set(types) - set(TokenType):
            token_id = types.index(min(unknown))
            raise self.error(field, f"is {min(unknown)} for token {token_id:,}, expected 1 to {max(TokenType)}")
        return types

    def tokens_of(self, *types: TokenType) -> list[str]:
        """Return the tokens of the given types, in order of ids."""
        pairs = zip(self.vocabulary, self.token_types, strict=True)
        return [token for token, token_type in pairs if token_type in types]

    def special(self) -> list[str]:
        """Return the special tokens, in order of ids."""
        return self.tokens_of(TokenType.CONTROL, TokenType.UNKNOWN)

    def token_id(self, role: str) -> int | None:
        """Return the id of the token in a role such as `"bos"`, or None if there is none."""
        field, vocab_size = f"tokenizer.ggml.{role}_token_id", len(self.vocabulary)
        token_id = self.get(field, int)
        if token_id == NO_TOKEN or (role == "padding" and token_id not in range(vocab_size)):
            return None  # nothing is ever padded, so the id of the padding token does not matter
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise self.error(field, f"is {token_id}, expected an id below the vocabulary size {vocab_size:,}")
        return token_id

    def special_tokens(self) -> dict[str, str]:
        """Return the token in each role: `{"bos_token": "<|im_start|>", ...}`."""
        tokens = list(self.vocabulary)
        ids = {name: self.token_id(role) for role, name in ROLES.items()}
        return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
