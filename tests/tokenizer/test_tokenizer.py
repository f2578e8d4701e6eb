"""The tokenizer against transformers and the `tokenizers` library, and against damaged data."""

import base64
import contextlib
import copy
import functools
import json
import os

import numpy as np
import pytest
import tokenizers
import transformers
from gguf import GGUFReader
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minillm.errors import ChatTemplateError, TokenizerError, UnsupportedError
from minillm.tokenizer import Tokenizer

PROMPTS = {
    "english": "The quick brown fox doesn't jump over the lazy dog.  Twice, it's said.",
    "code": "def f(x):\n    return [x ** 2 for x in range(10)]  # squares\n\n\tprint(f(3))",
    "korean": "안녕하세요, 오늘 날씨가 어때요? 서울은 비가 옵니다.",
    "emoji": "👩‍👩‍👧‍👦 says 🎉🎉 and 🇰🇷, naïvely",
    "digits": "In 1984, 3.14159 and 1,000,000 were 12 apples at 5%",
    "chat": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
}
TEXT = st.text(max_size=60) | st.text("ab 1٣½²\n\t'.,<|im_end|>é한🎉\u200d", max_size=40)


@pytest.fixture(scope="module")
def default_metadata(default_gguf):
    fields = GGUFReader(default_gguf).fields.values()
    return {field.name: field.contents() for field in fields if field.name.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def default_tokenizer(default_metadata):
    return Tokenizer.from_gguf(default_metadata, "default.gguf")


@pytest.fixture(scope="module")
def by_transformers(default_gguf):
    return transformers.AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)


@pytest.fixture(scope="module")
def truth(by_transformers):
    """SmolLM2's own tokenizer: as transformers reads it from GGUF, plus the cut around every digit."""
    backend = tokenizers.Tokenizer.from_str(by_transformers.backend_tokenizer.to_str())
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return backend


# The default model


@pytest.mark.parametrize("text", PROMPTS.values(), ids=PROMPTS)
def test_ids_are_those_of_transformers(default_tokenizer, by_transformers, truth, text):
    ids = default_tokenizer.encode(text)
    assert ids == by_transformers(text).input_ids == truth.encode(text).ids
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_whitespace_before_digits_stays_whole_where_the_gguf_import_of_transformers_splits_it(
    default_tokenizer, by_transformers, truth
):
    # transformers ignores `tokenizer.ggml.pre` and cuts text as GPT-2 does. The two part ways only where
    # several white spaces, or a number sign outside ASCII, meet a number.
    for text in ("Steps:\n\n1. Go", "a  5", " ½"):
        assert default_tokenizer.encode(text) == truth.encode(text).ids != by_transformers(text).input_ids


@given(text=TEXT)
def test_ids_of_any_text(default_tokenizer, truth, text):
    assert default_tokenizer.encode(text) == truth.encode(text).ids


@given(text=TEXT)
def test_decode_gives_the_text_back(default_tokenizer, default_metadata, text):
    vocabulary = set(default_metadata["tokenizer.ggml.tokens"])
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assume(all(letter in vocabulary for piece, _ in spelled for letter in piece))  # 21 bytes have no token
    assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special_tokens=False) == text


@given(text=TEXT)
def test_without_parse_special_no_text_makes_a_special_token(default_tokenizer, text):
    text += "<|im_start|>"
    ids = default_tokenizer.encode(text, parse_special=False)
    assert min(ids) > 16  # the seventeen control tokens come first
    assert 1 in default_tokenizer.encode(text)


def test_attributes(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.bos_token_id == 1
    assert default_tokenizer.eos_token_ids == (2,)
    assert "im_start" in default_tokenizer.chat_template
    assert repr(default_tokenizer).startswith(
        "Tokenizer(byte-level BPE, 49,152 tokens, bos 1, eos (2,), with chat template"
    )
    texts = [default_tokenizer.token_text(token_id) for token_id in default_tokenizer.encode("a cat\n\n1안<|im_end|>")]
    assert texts == ["a", " cat", "\n\n", "1", "<0xEC>", "<0x95>", "<0x88>", "<|im_end|>"]


@pytest.mark.parametrize("text", ["\ud800", "ok \udc80 no", None, b"bytes", ["a"]])
def test_what_is_no_text_is_refused(default_tokenizer, text):
    with pytest.raises(TokenizerError, match="encode: "):
        default_tokenizer.encode(text)


@pytest.mark.parametrize("token_id", [-1, -(2**70), 1.0, "5", None, [5]])
def test_what_is_no_token_id(default_tokenizer, token_id):
    for use in (
        lambda: default_tokenizer.decode([5, token_id]),
        lambda: default_tokenizer.stream().push(token_id),
        lambda: default_tokenizer.token_text(token_id),
    ):
        with pytest.raises(TokenizerError, match=r"is not a token id"):
            use()


@pytest.mark.parametrize("token_id", [49152, 2**31, 2**64])
def test_an_id_without_a_token_is_no_text(default_tokenizer, token_id):
    ids = default_tokenizer.encode("안녕 a cat")
    for position in range(len(ids) + 1):  # also in the middle of a character
        mixed = [*ids[:position], token_id, *ids[position:]]
        assert default_tokenizer.decode(mixed) == "안녕 a cat" == "".join(streamed(default_tokenizer, mixed))
    assert default_tokenizer.token_text(token_id) == f"<no token {token_id}>"


# Streaming


def streamed(tokenizer, ids, **options):
    decoder = tokenizer.stream(**options)
    return [*map(decoder.push, ids), decoder.finish()]


def ids_of(tokenizer):
    """Lists of ids: any tokens, but mostly single bytes and special tokens, where the trouble is."""
    short = [token_id for token_id in range(tokenizer.vocab_size) if len(tokenizer._token(token_id) or "") == 1]
    return st.lists(st.sampled_from(short) | st.integers(0, 16) | st.integers(0, tokenizer.vocab_size - 1), max_size=30)


@given(data=st.data(), skip=st.booleans())
def test_streaming_any_ids_adds_up_to_decode(default_tokenizer, truth, data, skip):
    ids = data.draw(ids_of(default_tokenizer))
    whole = default_tokenizer.decode(ids, skip_special_tokens=skip)
    assert whole == truth.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(default_tokenizer, ids, skip_special_tokens=skip)) == whole


def test_half_a_character_is_held_back_and_a_wrong_byte_is_not(default_tokenizer):
    byte = {default_tokenizer.token_text(token_id): token_id for token_id in range(17, 300)}
    flag = default_tokenizer.encode("🎉")
    assert [delta for delta in streamed(default_tokenizer, flag) if delta] == ["🎉"]
    start, letter = default_tokenizer.encode("안")[0], byte["A"]
    assert streamed(default_tokenizer, [start, letter, letter]) == ["", "\ufffdA", "A", ""]
    assert streamed(default_tokenizer, [start]) == ["", "\ufffd"]
    assert streamed(default_tokenizer, [start, start, start]) == ["", "\ufffd", "\ufffd", "\ufffd"]


def test_a_stream_can_be_used_again_after_finish(default_tokenizer):
    decoder = default_tokenizer.stream()
    for _ in range(2):
        assert decoder.push(default_tokenizer.encode("안")[0]) == ""
        assert decoder.finish() == "\ufffd"


# Small tokenizers of every kind, as folders


CORPUS = ["the cat sat on the mat in 1984", "a dog, a cat and the hat", "안녕 세상", "def f(x): return x + 1"] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level_backend():
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


def sentencepiece_backend(decoder):
    """Llama 2's kind: spaces are '▁', what the vocabulary lacks falls back to bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat", "a dog and a cat"] * 3, trainer)
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    backend.decoder = decoder
    return backend


def llama2_decoder():
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def gemma_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def wordpiece_backend():
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS = {
    "byte-level": byte_level_backend,
    "llama2": lambda: sentencepiece_backend(llama2_decoder()),
    "gemma": lambda: sentencepiece_backend(gemma_decoder()),
    "metaspace": lambda: sentencepiece_backend(decoders.Metaspace()),
    "wordpiece": wordpiece_backend,
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """A folder as transformers saves it."""
    path = tmp_path_factory.mktemp(request.param)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param](), **names)
    saved.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    saved.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ours(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@settings(max_examples=40)
@given(text=st.text("the cadog 1,()안\n🎉é", max_size=30))
@example("안녕 the <s>cat</s> <tool> 🎉")
def test_a_folder_reads_as_in_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        whole = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == whole
        assert "".join(streamed(ours, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=60)
@given(data=st.data(), skip=st.booleans())
def test_streaming_random_ids_of_a_folder(ours, folder, data, skip):
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=20))
    deltas = streamed(ours, ids, skip_special_tokens=skip)
    if "metaspace" not in folder.name:  # whose byte tokens only the whole run of them can decode
        assert "".join(deltas) == ours.decode(ids, skip_special_tokens=skip)


def test_special_tokens_of_a_folder(ours, theirs, folder):
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    messages = [{"role": "user", "content": "the cat"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.special_tokens["unk_token"] == "<unk>"


@pytest.fixture
def small_folder(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_end_of_turn_ids_come_from_the_generation_config_first(small_folder):
    assert Tokenizer.from_folder(small_folder).eos_token_ids == ()
    write(small_folder, "config.json", {"eos_token_id": 5})
    assert Tokenizer.from_folder(small_folder).eos_token_ids == (5,)
    write(small_folder, "generation_config.json", {"eos_token_id": [6, 7]})
    write(small_folder, "special_tokens_map.json", {"eos_token": {"content": "</s>"}})
    assert Tokenizer.from_folder(small_folder).eos_token_ids == (2, 6, 7)


def test_where_the_chat_template_comes_from(small_folder):
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_folder(small_folder).apply_chat_template([{"role": "user", "content": "hi"}])
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(small_folder, "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.from_folder(small_folder).chat_template == "D"
    write(small_folder, "tokenizer_config.json", {"chat_template": [{"name": [], "template": 1}, 3]})
    assert Tokenizer.from_folder(small_folder).chat_template is None
    write(small_folder, "chat_template.jinja", "J")
    assert Tokenizer.from_folder(small_folder).chat_template == "J"


def test_tokens_only_the_config_knows_are_added(small_folder):
    size = Tokenizer.from_folder(small_folder).vocab_size
    token = {"content": "<|turn|>", "special": True, "normalized": False}
    write(small_folder, "tokenizer_config.json", {"added_tokens_decoder": {str(size): token}})
    tokenizer = Tokenizer.from_folder(small_folder)
    assert tokenizer.encode("a<|turn|>")[-1] == size
    assert tokenizer.decode([size]) == ""
    write(small_folder, "tokenizer_config.json", {"added_tokens_decoder": {str(size + 3): token}})
    with pytest.raises(TokenizerError, match="turn"):
        Tokenizer.from_folder(small_folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[1, 2]"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", [1]),
        ("tokenizer_config.json", {"bos_token": 3}),
        ("tokenizer_config.json", {"eos_token": {"text": "x"}}),
        ("tokenizer_config.json", {"chat_template": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": {"content": 4}}}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 1}]}),
        ("generation_config.json", {"eos_token_id": "2"}),
        ("config.json", {"eos_token_id": [-1]}),
    ],
)
def test_damaged_folders(small_folder, name, value):
    write(small_folder, name, value)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(small_folder)


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json")


@pytest.mark.parametrize("name", [*FILES, "generation_config.json"])
def test_huge_files(small_folder, name):
    (small_folder / name).unlink(missing_ok=True)
    with (small_folder / name).open("wb") as file:
        file.truncate(200_000_000)  # takes no room on the disk
    with pytest.raises(TokenizerError, match=rf"{name}: 200,000,000 bytes, expected at most"):
        Tokenizer.from_folder(small_folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes and devices with names are Unix's")
@pytest.mark.parametrize("name", [*FILES, "generation_config.json"])
def test_files_that_never_end(small_folder, name):
    path = small_folder / name
    path.unlink(missing_ok=True)
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), path.mkdir):
        make()
        with pytest.raises(TokenizerError, match=f"{name}: is not a regular file"):
            Tokenizer.from_folder(small_folder)
        if not path.is_dir():
            path.unlink()


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


LONG_TABLE = base64.b64encode((0).to_bytes(4, "little") + b"x" * 2000 + b"\0").decode()
DEEP = functools.reduce(lambda inner, _: {"type": "Sequence", "normalizers": [inner]}, range(300), {"type": "NFC"})
GROWTH_BOMBS = [
    ("normalizer", {"type": "Sequence", "normalizers": [replace("a", "a" * 100)] * 6}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [replace("", "aa")] * 7}]}),
    ("normalizer", {"type": "Sequence", "normalizers": [replace("b*", "a" * 10, "Regex")] * 6}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 2000}),
    ("normalizer", {"type": "Prepend", "prepend": "a" * 5000}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": LONG_TABLE}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "!"}),
    ("normalizer", {"pattern": {"String": "a"}, "content": "a" * 5000}),
    ("normalizer", DEEP),
    (
        "pre_tokenizer",
        {"type": "Sequence", "pretokenizers": [json.loads(pre_tokenizers.ByteLevel().__getstate__())] * 40},
    ),
    ("decoder", {"type": "Sequence", "decoders": [replace("", "x" * 1000)] * 3}),
    ("decoder", {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}),
    (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2000,
            "pair": [],
            "special_tokens": {},
        },
    ),
]


@pytest.mark.parametrize(("part", "value"), GROWTH_BOMBS)
def test_steps_that_make_much_of_little_are_refused(small_folder, part, value):
    described = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    write(small_folder, "tokenizer.json", described | {part: value})
    with pytest.raises(TokenizerError, match=part):
        Tokenizer.from_folder(small_folder)


def test_long_affixes_are_refused(small_folder):
    described = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["continuing_subword_prefix"] = "#" * 100
    write(small_folder, "tokenizer.json", described)
    with pytest.raises(TokenizerError, match="'continuing_subword_prefix' has 100 characters"):
        Tokenizer.from_folder(small_folder)


def test_dropout_is_for_training(small_folder):
    plain = Tokenizer.from_folder(small_folder)
    described = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["dropout"] = 0.5
    write(small_folder, "tokenizer.json", described)
    tokenizer = Tokenizer.from_folder(small_folder)
    for parse_special in (True, False):
        ids = [tokenizer.encode("the cat sat on the mat", parse_special=parse_special) for _ in range(20)]
        assert ids == [plain.encode("the cat sat on the mat", parse_special=parse_special)] * 20


def test_two_tokens_with_one_id_are_refused(small_folder):
    described = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"]["cat"] = described["model"]["vocab"]["a"]
    write(small_folder, "tokenizer.json", described)
    with pytest.raises(TokenizerError, match="2 tokens of the vocabulary have the id"):
        Tokenizer.from_folder(small_folder)


def test_ids_may_have_holes(small_folder):
    described = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["model"]["vocab"]["zzz"] = 400
    write(small_folder, "tokenizer.json", described)
    tokenizer = Tokenizer.from_folder(small_folder)
    a = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.vocab_size == 401
    assert tokenizer.decode([*a, 390, 400, 401, *a]) == "azzza"
    assert tokenizer.token_text(390) == "<no token 390>"


def test_folders_without_a_readable_tokenizer(small_folder):
    (small_folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="UTF-8"):
        Tokenizer.from_folder(small_folder)
    (small_folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.from_folder(small_folder)


def paths_in(value, path=()):
    """Every place in a nested JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


JUNK = st.sampled_from([None, True, -1, 2**63, 10**30, 1.5, "", "x", "<s>", [], {}, [[]], {"type": "BPE"}])


@settings(max_examples=150)
@given(data=st.data())
def test_fuzzed_tokenizer_json(tmp_path_factory, data):
    backend = data.draw(st.sampled_from([small_byte_level(), small_sentencepiece()]))
    path = data.draw(st.sampled_from([path for path in paths_in(backend) if path]))
    mutated = copy.deepcopy(backend)
    place = mutated
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(JUNK)
    text = json.dumps(mutated)
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]
    folder = tmp_path_factory.getbasetemp()
    write(folder, "tokenizer.json", text)
    with contextlib.suppress(TokenizerError):
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode("abc <s> 12\n안")
        tokenizer.decode(ids)
        tokenizer.encode("<s>", parse_special=False)
        streamed(tokenizer, ids)


def small_byte_level():
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>"])
    backend.enable_padding(length=8)
    backend.enable_truncation(4)
    return json.loads(backend.to_str())


def small_sentencepiece():
    vocabulary = {"<s>": 0, "▁a": 1, "▁": 2, "a": 3, "<0x0A>": 4, "b": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<s>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = llama2_decoder()
    return json.loads(backend.to_str())


# Damaged GGUF metadata


def small_metadata():
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<e>", "a", "b", "ab", "Ġ", "1", "<tool>", "[PAD]"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }


def test_a_small_gguf_tokenizer():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] = np.array(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    tokenizer = Tokenizer.from_gguf(metadata, "small.gguf")
    assert tokenizer.encode("ab 11<tool><e>") == [0, 3, 4, 5, 5, 6, 0, 0]
    assert tokenizer.encode("ab", add_special_tokens=False) == [3]
    assert tokenizer.decode([0, 3, 4, 5, 6, 0]) == "ab 1<tool>"
    assert tokenizer.eos_token_ids == (0, 6)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
@given(text=st.text("ab1 \n\t½²'é", max_size=20))
def test_pre_tokenizers(pre, text):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "a"), ("Ġ", "1"), ("Ġ", "Ġ"), ("1", "1"), ("Ċ", "Ċ"), ("a", "b"), ("Ġ", "Â")]
    tokens = letters + [left + right for left, right in pairs]
    metadata = small_metadata() | {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    digits = r"\p{N}|" if pre == "smollm" else ""  # the rule as one regular expression, as llama.cpp has it
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    cuts = [pre_tokenizers.Split(tokenizers.Regex(rule), "isolated") for rule in (digits[:-1], words) if rule]
    expected = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    expected.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    assert Tokenizer.from_gguf(metadata, "x.gguf").encode(text) == expected.encode(text).ids


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "llama-2", "'llama-2'; supported: gpt2"),
        ("model", None, "missing; supported: gpt2"),
        ("pre", "qwen1", "'qwen1'; supported: command-r, "),
        ("pre", None, "missing; supported: command-r, "),
        ("add_space_prefix", True, "byte-level"),
    ],
)
def test_unsupported_gguf_tokenizers(field, value, words):
    with pytest.raises(UnsupportedError, match=rf"x\.gguf.*{words}"):
        Tokenizer.from_gguf(small_metadata() | {f"tokenizer.ggml.{field}": value}, "x.gguf")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", 3, "is 3"),
        ("tokens", None, "missing"),
        ("tokens", [], "empty"),
        ("tokens", "abc", "array"),
        ("tokens", ["<e>", "a", "b", "ab", "Ġ", "1", "<tool>", 7], "index 7"),
        ("tokens", ["<e>", "a", "b", "ab", "Ġ", "a", "<tool>", "x"], "'a' twice, as ids 1 and 5"),
        ("tokens", ["<e>", "a", "b", "ab", "", "1", "<tool>", "x"], "id 4"),
        ("tokens", ["<e>", "a", "b", "ba", "Ġ", "1", "<tool>", "x"], "'ab'"),
        ("token_type", [1, 2], "2 entries, expected one for each of 8"),
        ("token_type", [3, 1, 1, 1, 1, 1, 1, 9], "is 9 for token 7"),
        ("token_type", [3, 1, 1, 1, 1, 1, 1, True], "index 7"),
        ("token_type", None, "missing"),
        ("merges", ["a  b"], "index 0"),
        ("merges", ["ab"], "index 0"),
        ("merges", ["a b", "a "], "index 1"),
        ("merges", ["a z"], "'z'"),
        ("merges", ["a b", "a b"], "twice"),
        ("bos_token_id", 8, "below the vocabulary's size 8"),
        ("eos_token_id", -1, "is -1"),
        ("eos_token_id", 1.0, "float"),
        ("add_bos_token", 1, "expected bool"),
        ("bos_token_id", None, "missing"),
    ],
)
def test_damaged_gguf_metadata(field, value, words):
    with pytest.raises(TokenizerError, match=rf"x\.gguf.*{words}"):
        Tokenizer.from_gguf(small_metadata() | {f"tokenizer.ggml.{field}": value}, "x.gguf")


@given(data=st.data())
def test_fuzzed_gguf_metadata(data):
    metadata = small_metadata()
    path = data.draw(st.sampled_from([path for path in paths_in(metadata) if path]))
    place = metadata
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(JUNK | st.text(max_size=3))
    with contextlib.suppress(TokenizerError, UnsupportedError):
        Tokenizer.from_gguf(metadata, "x.gguf").encode("ab 1<e>")
