"""Tokenizer: text to token ids and back.

The merging itself is done by the `tokenizers` library. Here stands what a server needs around it: reading a
model's tokenizer from its files, decoding as tokens arrive, the chat template, and errors that say what is
wrong with the data.
"""

from __future__ import annotations

import functools
import json
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from minillm.errors import ChatTemplateError, TokenizerError
from minillm.tokenizer import gguf
from minillm.tokenizer.chat_template import ChatTemplate
from minillm.tokenizer.detokenizer import StreamingDecoder, WindowStream, token_bytes, visible
from minillm.tokenizer.growth import check_growth

MAX_TOKENIZER_FILE = 60_000_000  # bytes of tokenizer.json; those of the largest vocabularies have half of it
MAX_FILE = 10_000_000  # bytes of any other file
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Text to token ids and back, for one model.

    A model may have more rows than its tokenizer has tokens (matrices are padded to round sizes), or the ids may
    have holes, so that any id from 0 up can be drawn: one without a token decodes to no text.

    Parameters
    ----------
    backend: the tokenizer of the `tokenizers` library; belongs to this object from now on.
    special_tokens: which token plays which role, such as `{"eos_token": "<|im_end|>"}`.
    eos_token_ids: the ids that end a turn; `special_tokens["eos_token"]` need not be repeated.
    chat_template: Jinja source, if the model came with one.
    where: what errors call this tokenizer, usually its file.

    Attributes
    ----------
    vocab_size: V, one more than the largest token id.
    bos_token_id, eos_token_ids, chat_template, special_tokens: as above, ids for names.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        where: str = "tokenizer",
    ):
        backend.no_padding()  # a file may ask to pad every text to a length, or to cut it: neither is wanted,
        backend.no_truncation()  # and a padding length of 10^12 would be an attack
        if getattr(backend.model, "dropout", None):  # a setting for training, which leaves out merges at random
            backend.model.dropout = None
        self.where = where
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.vocab_size = _vocab_size(backend, where)
        self.bos_token_id = self._id_of("bos_token", backend)
        named = self._id_of("eos_token", backend)
        self.eos_token_ids = tuple(dict.fromkeys([*([] if named is None else [named]), *eos_token_ids]))
        self._backend = backend
        self._bytes = token_bytes(backend.decoder)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Read a folder in Hugging Face layout.

        `tokenizer.json` must be there. Read as well, where present: `tokenizer_config.json` (special tokens,
        chat template), `special_tokens_map.json`, `chat_template.jinja` (wins over the config's), and the
        `eos_token_id` of `generation_config.json` or else `config.json`. Raises `TokenizerError`.
        """
        path = Path(path)
        where = str(path / "tokenizer.json")
        source = _read_text(path / "tokenizer.json", MAX_TOKENIZER_FILE)
        if source is None:
            raise TokenizerError(f"{where}: no such file; a model folder needs its tokenizer in this form")
        check_growth(_json_object(source, where), where)
        config_path = path / "tokenizer_config.json"
        config = _read_json(config_path)
        names = _read_json(path / "special_tokens_map.json") | config
        with _backend_errors(where):
            backend = tokenizers.Tokenizer.from_str(source)
            _add_missing_tokens(backend, config.get("added_tokens_decoder"), str(config_path))
        return cls(
            backend,
            special_tokens=_special_tokens(names, str(config_path)),
            eos_token_ids=_eos_token_ids(path),
            chat_template=_read_text(path / "chat_template.jinja") or _config_template(config, str(config_path)),
            where=where,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], where: str) -> Tokenizer:
        """Rebuild the tokenizer a GGUF file describes; `where` names the file in errors.

        Arrays in `metadata` may be lists or numpy arrays. Raises `TokenizerError` for damaged fields and
        `UnsupportedError` for tokenizers other than those of `minillm/tokenizer/gguf`.
        """
        fields = gguf.GGUFTokenizerFields(metadata, where)
        with _backend_errors(where):
            backend = gguf.build(fields)
        special_tokens = fields.special_tokens()
        end_of_turn = special_tokens.pop("eot_token", None)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=[] if end_of_turn is None else [backend.token_to_id(end_of_turn)],
            chat_template=fields.get("tokenizer.chat_template", str),
            where=where,
        )

    @property
    def kind(self) -> str:
        """How it cuts text, for people: "byte-level BPE", "SentencePiece BPE", "Unigram", ..."""
        kind = type(self._backend.model).__name__
        decoder = str(self._backend.decoder)
        if "ByteLevel" in decoder:
            return f"byte-level {kind}"
        return f"SentencePiece {kind}" if "ByteFallback" in decoder else kind

    def __repr__(self) -> str:
        template = "with" if self.chat_template else "without"
        return (
            f"Tokenizer({self.kind}, {self.vocab_size:,} tokens, bos {self.bos_token_id}, eos {self.eos_token_ids}, "
            f"{template} chat template, from {self.where!r})"
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        add_special_tokens: begin with the beginning-of-sequence token, if this model wants one.
        parse_special: read `<|im_start|>` and the like as the tokens they name. Chat templates rely on it, and
            it means that whoever writes part of a prompt can write "<|im_end|>" there and end the turn. Pass
            False for text from people you do not trust: it then becomes ordinary characters.

        A byte for which the vocabulary has no token is dropped, as in every implementation of BPE without an
        unknown token (SmolLM2's vocabulary lacks 21 bytes: six control characters, and lead bytes of planes
        of Unicode that are almost empty). Raises `TokenizerError` for text that is not Unicode.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"encode: wants a str, found {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            lone = f"U+{ord(text[problem.start]):04X}"
            raise TokenizerError(
                f"encode: character {problem.start:,} is the lone surrogate {lone}, half of a UTF-16 pair and no "
                "text; decode the input properly, or replace it"
            ) from problem
        backend = self._backend if parse_special else self._without_special
        with _backend_errors(self.where):
            return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids: bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        Raises `TokenizerError` for what is no id: negative or not a whole number.
        """
        decoder = self.stream(skip_special_tokens=skip_special_tokens)
        if isinstance(decoder, WindowStream):  # the library may know more than the stream can
            kept = [token_id for token_id in ids if self._kept_token(token_id, skip_special_tokens) is not None]
            return self._decode_plainly(kept)
        return "".join([*map(decoder.push, ids), decoder.finish()])

    def stream(self, *, skip_special_tokens: bool = True) -> StreamingDecoder:
        """A decoder to push token ids into as they are generated; takes the ids that `decode` takes."""
        token_of = functools.partial(self._kept_token, skip_special=skip_special_tokens)
        if self._bytes is not None:
            return self._bytes.stream(token_of)
        return WindowStream(self._decode_plainly, lambda token_id: token_of(token_id) is not None)

    def token_text(self, token_id: int) -> str:
        """One token for people to read: `" hello"` for "Ġhello", `"<0xE2>"` for a byte that is no character.

        `"<no token 270>"` for an id without a token. Raises `TokenizerError` as `decode` does.
        """
        token = self._token(token_id)
        if token is None:
            return f"<no token {token_id}>"
        return token.replace("▁", " ") if self._bytes is None else visible(self._bytes.of(token))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the text this model was trained on; encode it without adding special tokens.

        `messages` are dicts with `role` and `content`; see `ChatTemplate.render`. What stands in `content` is
        put into the text as it is, special tokens and all. Raises `RequestError`, `ChatTemplateError`.
        """
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**self.special_tokens, **variables}
        )

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.where}: the model has no chat template; give it plain text instead")
        return ChatTemplate(self.chat_template)

    @functools.cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """A twin of the backend that takes special tokens in text for ordinary text.

        A second object, because the library's switch for it would also switch other threads' calls. It shares
        the vocabulary.
        """
        twin = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if getattr(self._backend, part) is not None:
                setattr(twin, part, getattr(self._backend, part))
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            twin.add_tokens([token])
        twin.encode_special_tokens = True
        return twin

    def _id_of(self, role: str, backend: tokenizers.Tokenizer) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else backend.token_to_id(token)

    def _token(self, token_id: int) -> str | None:
        """The vocabulary's form of a token; None for an id without one."""
        is_whole = hasattr(token_id, "__index__")
        if not is_whole or (number := operator.index(token_id)) < 0:
            raise TokenizerError(f"{self.where}: {token_id!r:.60} is no token id, a whole number from 0 up")
        return self._backend.id_to_token(number) if number < self.vocab_size else None

    def _kept_token(self, token_id: int, skip_special: bool) -> str | None:
        token = self._token(token_id)
        return None if skip_special and token_id in self._special_ids else token

    def _decode_plainly(self, ids: list[int]) -> str:
        with _backend_errors(self.where):
            return self._backend.decode(ids, skip_special_tokens=False)


def _vocab_size(backend: tokenizers.Tokenizer, where: str) -> int:
    """V, where no two tokens share an id."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        (token_id, count), *_ = Counter(vocabulary.values()).most_common(1)
        raise TokenizerError(f"{where}: {count} tokens of the vocabulary have the id {token_id}, wanted one")
    return 1 + max(vocabulary.values(), default=-1)


@contextmanager
def _backend_errors(where: str) -> Iterator[None]:
    """Turn whatever the `tokenizers` library throws into `TokenizerError`.

    It raises plain `Exception` for bad data, and where its Rust code panics a `PanicException`, which is no
    `Exception` at all, so that an `except Exception` lets it through.
    """
    try:
        yield
    except BaseException as problem:
        if type(problem).__module__ == "pyo3_runtime" or type(problem) in (Exception, TypeError, ValueError):
            raise TokenizerError(f"{where}: the tokenizers library cannot use it: {problem}") from problem
        raise


# Reading a folder


def _read_text(path: Path, max_bytes: int = MAX_FILE) -> str | None:
    """A file's text; None if there is no such file. Pipes and devices, which may never end, are none."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise TokenizerError(f"{path}: is no regular file")
        if (size := path.stat().st_size) > max_bytes:
            raise TokenizerError(f"{path}: {size:,} bytes, wanted at most {max_bytes:,}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TokenizerError(f"{path}: cannot be read as UTF-8 text: {problem}") from problem


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    text = _read_text(path)
    return {} if text is None else _json_object(text, str(path))


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{where}: is not JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise TokenizerError(f"{where}: holds a JSON {type(value).__name__}, wanted an object")
    return value


def _special_tokens(names: dict[str, Any], where: str) -> dict[str, str]:
    """Which token plays which role. A token is written as text, or as an object with a `content`."""
    tokens = {}
    for role in SPECIAL_NAMES:
        value = names.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(content, str):
            raise TokenizerError(f"{where}: {role!r} is {value!r:.60}, wanted a token's text")
        if content is not None:
            tokens[role] = content
    return tokens


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Any, where: str) -> None:
    """Add the tokens that `tokenizer_config.json` lists (id -> token) and `tokenizer.json` lacks."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for key, token in sorted(_added_tokens(added, where).items()):
        if token.content in known:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != key:
            raise TokenizerError(
                f"{where}: 'added_tokens_decoder' gives {token.content!r:.60} the id {key}, but with tokenizer.json "
                f"it gets {backend.token_to_id(token.content)}"
            )


def _added_tokens(added: Any, where: str) -> dict[int, AddedToken]:
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    try:
        return {
            int(key): AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
            for key, token in (added or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise TokenizerError(f"{where}: 'added_tokens_decoder' is not a table of tokens: {problem!r}") from problem


def _eos_token_ids(path: Path) -> list[int]:
    """The ids that end a turn, from `generation_config.json` or else from `config.json`."""
    for file in (path / "generation_config.json", path / "config.json"):
        value = _read_json(file).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise TokenizerError(f"{file}: 'eos_token_id' is {value!r:.60}, wanted a token id or a list of them")
        return ids
    return []


def _config_template(config: dict[str, Any], where: str) -> str | None:
    """The chat template in `tokenizer_config.json`: text, or a list of named ones of which "default" counts."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[-1].get("template") if named else None
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{where}: 'chat_template' is {value!r:.60}, wanted text")
    return value
