"""Tokenizer: text to token ids and back.

The `tokenizers` library does the merging. This module adds what a server needs: reading a model's tokenizer from its
files, decoding tokens as they arrive, the chat template, and errors that describe what is wrong with the data.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minillm.errors import ChatTemplateError, TokenizerError
from minillm.tokenizer import gguf
from minillm.tokenizer.backend_errors import backend_errors
from minillm.tokenizer.chat_template import ChatTemplate
from minillm.tokenizer.detokenizer import StreamingDecoder, WindowStream, token_bytes, visible
from minillm.tokenizer.hf_folder import read_folder


class Tokenizer:
    """Converts text to token ids and back, for one model.

    A model may have more output rows than its tokenizer has tokens, because matrices are padded to round sizes, and
    the ids may have gaps. Sampling can therefore return any id from 0 up. An id without a token decodes to no text.

    Parameters
    ----------
    backend : the tokenizer of the `tokenizers` library; this object takes ownership of it
    special_tokens : the token for each role, such as `{"eos_token": "<|im_end|>"}`
    eos_token_ids : the ids that end a turn, in addition to `special_tokens["eos_token"]`
    chat_template : Jinja source, if the model has a template
    source : the name of this tokenizer in errors, usually its file

    Attributes
    ----------
    vocab_size : V, one more than the largest token id
    bos_token_id : the id of `special_tokens["bos_token"]`, or None
    eos_token_ids : all ids that end a turn
    special_tokens, chat_template, source : as above
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        source: str = "tokenizer",
    ):
        # A file may set padding or truncation to a fixed length. Neither is useful here, and a padding length of 10^12
        # would be an attack.
        backend.no_padding()
        backend.no_truncation()
        if getattr(backend.model, "dropout", None):  # a setting for training that skips merges at random
            backend.model.dropout = None
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.vocab_size = _vocab_size(backend, source)
        self.bos_token_id = self._id_of("bos_token", backend)
        eos_token_id = self._id_of("eos_token", backend)
        named_ids = [] if eos_token_id is None else [eos_token_id]
        self.eos_token_ids = tuple(dict.fromkeys([*named_ids, *eos_token_ids]))
        self._backend = backend
        self._token_bytes = token_bytes(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read a tokenizer from a folder in Hugging Face layout.

        `tokenizer.json` is required. Optional files: `tokenizer_config.json` (special tokens, chat template),
        `special_tokens_map.json`, `chat_template.jinja` (overrides the config's template), and for the `eos_token_id`
        `generation_config.json` or else `config.json`. Raises `TokenizerError`.
        """
        files = read_folder(path)
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            eos_token_ids=files.eos_token_ids,
            chat_template=files.chat_template,
            source=files.source,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file describes. `source` names the file in errors.

        Arrays in `metadata` may be lists or NumPy arrays. Raises `TokenizerError` for damaged fields and
        `UnsupportedError` for tokenizers that `minillm/tokenizer/gguf` does not implement.
        """
        fields = gguf.GGUFTokenizerFields(metadata, source)
        with backend_errors(source):
            backend = gguf.build(fields)
        special_tokens = fields.special_tokens()
        end_of_turn = special_tokens.pop("eot_token", None)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=[] if end_of_turn is None else [fields.vocabulary[end_of_turn]],
            chat_template=fields.get("tokenizer.chat_template", str),
            source=source,
        )

    @property
    def kind(self) -> str:
        """The algorithm's name for display: "byte-level BPE", "SentencePiece BPE", "Unigram", ..."""
        kind = type(self._backend.model).__name__
        decoder = str(self._backend.decoder)
        if "ByteLevel" in decoder:
            return f"byte-level {kind}"
        return f"SentencePiece {kind}" if "ByteFallback" in decoder else kind

    def __repr__(self) -> str:
        template = "with" if self.chat_template else "without"
        return (
            f"Tokenizer({self.kind}, {self.vocab_size:,} tokens, bos {self.bos_token_id}, eos {self.eos_token_ids}, "
            f"{template} chat template, from {self.source!r})"
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        add_special_tokens : whether to begin with the beginning-of-sequence token, if this model uses one
        parse_special : whether to convert text such as `<|im_start|>` to the special token of that name. Chat
            templates rely on this. It also lets the author of any part of a prompt write "<|im_end|>" and end the
            turn. Pass False for untrusted text: special tokens then become ordinary characters.

        A byte without a token in the vocabulary is dropped, as in every implementation of BPE without an unknown
        token. SmolLM2's vocabulary lacks 21 bytes: six control characters, and lead bytes of almost empty Unicode
        planes. Raises `TokenizerError` for text that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"encode: expected a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            lone = f"U+{ord(text[problem.start]):04X}"
            raise TokenizerError(
                f"encode: character {problem.start:,} is the lone surrogate {lone}, half of a UTF-16 "
                "pair; decode the input correctly, or replace the character"
            ) from problem
        backend = self._backend if parse_special else self._without_special
        with backend_errors(self.source):
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD; an id without a token adds no text.

        Raises `TokenizerError` for an id that is negative or not an integer.
        """
        decoder = self.stream(skip_special_tokens=skip_special_tokens)
        if isinstance(decoder, WindowStream):  # the library is exact where a stream may not be
            kept = [token_id for token_id in ids if self._kept_token(token_id, skip_special_tokens) is not None]
            return self._decode_all(kept)
        return "".join([*map(decoder.push, ids), decoder.finish()])

    def stream(self, *, skip_special_tokens: bool = True) -> StreamingDecoder:
        """Return a decoder for token ids as they are generated. It accepts the same ids as `decode`."""
        token_of = functools.partial(self._kept_token, skip_special=skip_special_tokens)
        if self._token_bytes is not None:
            return self._token_bytes.stream(token_of)
        return WindowStream(self._decode_all, lambda token_id: token_of(token_id) is not None)

    def token_text(self, token_id: int) -> str:
        """Return one token as readable text: `" hello"` for "Ġhello", `"<0xE2>"` for a partial character.

        An id without a token gives text such as `"<no token 270>"`. Raises `TokenizerError` for the same ids as
        `decode`.
        """
        token = self._token(token_id)
        if token is None:
            return f"<no token {token_id}>"
        return token.replace("▁", " ") if self._token_bytes is None else visible(self._token_bytes.to_bytes(token))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return a conversation in the text format of this model. Encode it with `add_special_tokens=False`.

        `messages` are dicts with `role` and `content`; see `ChatTemplate.render`. The text of `content` is inserted
        unchanged, including any special tokens. Raises `RequestError` and `ChatTemplateError`.
        """
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**self.special_tokens, **variables}
        )

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.source}: the model has no chat template; pass plain text instead")
        return ChatTemplate(self.chat_template)

    @functools.cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """A copy of the backend that treats special tokens in text as ordinary text.

        It is a second object because the library's setting would also affect calls from other threads. Both share
        the vocabulary.
        """
        copy = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(self._backend, part) is not None:
                setattr(copy, part, getattr(self._backend, part))
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            copy.add_tokens([token])
        copy.encode_special_tokens = True
        return copy

    def _id_of(self, role: str, backend: tokenizers.Tokenizer) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else backend.token_to_id(token)

    def _token(self, token_id: int) -> str | None:
        """Return the vocabulary form of a token, or None for an id without a token."""
        is_integer = hasattr(token_id, "__index__")
        if not is_integer or (number := operator.index(token_id)) < 0:
            raise TokenizerError(
                f"{self.source}: {token_id!r:.60} is not a token id, expected an integer of at least 0"
            )
        return self._backend.id_to_token(number) if number < self.vocab_size else None

    def _kept_token(self, token_id: int, skip_special: bool) -> str | None:
        token = self._token(token_id)
        return None if skip_special and token_id in self._special_ids else token

    def _decode_all(self, ids: list[int]) -> str:
        with backend_errors(self.source):
            return self._backend.decode(ids, skip_special_tokens=False)


def _vocab_size(backend: tokenizers.Tokenizer, source: str) -> int:
    """Return V. Raise `TokenizerError` if two tokens share an id."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        (token_id, count), *_ = Counter(vocabulary.values()).most_common(1)
        raise TokenizerError(f"{source}: {count} tokens of the vocabulary have the id {token_id}, expected one")
    return 1 + max(vocabulary.values(), default=-1)
