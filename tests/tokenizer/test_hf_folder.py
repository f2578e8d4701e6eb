"""Tokenizers in folders of Hugging Face layout: valid ones compared with transformers, and damaged ones."""

import contextlib
import copy
import json
import os

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tokenizer_builders import (
    JUNK,
    byte_level_backend,
    gemma_decoder,
    llama2_decoder,
    paths_in,
    sentencepiece_backend,
    streamed,
    wordpiece_backend,
    write,
)
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from minillm.errors import ChatTemplateError, TokenizerError
from minillm.tokenizer import Tokenizer

BACKENDS = {
    "byte-level": byte_level_backend,
    "llama2": lambda: sentencepiece_backend(llama2_decoder()),
    "gemma": lambda: sentencepiece_backend(gemma_decoder()),
    "metaspace": lambda: sentencepiece_backend(decoders.Metaspace()),
    "wordpiece": wordpiece_backend,
}


@pytest.fixture(scope="module", params=BACKENDS)
def folder(request, tmp_path_factory):
    """A tokenizer folder saved by transformers."""
    path = tmp_path_factory.mktemp(request.param)
    special_tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=BACKENDS[request.param](), **special_tokens)
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
def test_a_folder_gives_the_ids_and_texts_of_transformers(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    for skip_special in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip_special) == expected
        assert "".join(streamed(ours, ids, skip_special_tokens=skip_special)) == expected


@settings(max_examples=60)
@given(data=st.data(), skip_special=st.booleans())
def test_streaming_any_ids_equals_decode_for_each_kind(ours, folder, data, skip_special):
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=20))
    deltas = streamed(ours, ids, skip_special_tokens=skip_special)
    if "metaspace" not in folder.name:  # Metaspace decodes byte tokens correctly only as a complete run
        assert "".join(deltas) == ours.decode(ids, skip_special_tokens=skip_special)


def test_special_tokens_and_chat_template_of_a_folder(ours, theirs, folder):
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    messages = [{"role": "user", "content": "the cat"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert ours.special_tokens["unk_token"] == "<unk>"


def test_eos_ids_come_from_generation_config_before_config(small_folder):
    assert Tokenizer.from_folder(small_folder).eos_token_ids == ()
    write(small_folder, "config.json", {"eos_token_id": 5})
    assert Tokenizer.from_folder(small_folder).eos_token_ids == (5,)
    write(small_folder, "generation_config.json", {"eos_token_id": [6, 7]})
    write(small_folder, "special_tokens_map.json", {"eos_token": {"content": "</s>"}})
    assert Tokenizer.from_folder(small_folder).eos_token_ids == (2, 6, 7)


def test_chat_template_files_by_precedence(small_folder):
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.from_folder(small_folder).apply_chat_template([{"role": "user", "content": "hi"}])
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(small_folder, "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.from_folder(small_folder).chat_template == "D"
    write(small_folder, "tokenizer_config.json", {"chat_template": [{"name": [], "template": 1}, 3]})
    assert Tokenizer.from_folder(small_folder).chat_template is None
    write(small_folder, "chat_template.jinja", "J")
    assert Tokenizer.from_folder(small_folder).chat_template == "J"


def test_tokens_missing_from_tokenizer_json_are_added(small_folder):
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
def test_damaged_files_are_rejected(small_folder, name, value):
    write(small_folder, name, value)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(small_folder)


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json")


@pytest.mark.parametrize("name", [*FILES, "generation_config.json"])
def test_huge_files_are_rejected(small_folder, name):
    (small_folder / name).unlink(missing_ok=True)
    with (small_folder / name).open("wb") as file:
        file.truncate(200_000_000)  # a sparse file
    with pytest.raises(TokenizerError, match=rf"{name}: 200,000,000 bytes, expected at most"):
        Tokenizer.from_folder(small_folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", [*FILES, "generation_config.json"])
def test_pipes_devices_and_folders_are_rejected(small_folder, name):
    path = small_folder / name
    path.unlink(missing_ok=True)
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), path.mkdir):
        make()
        with pytest.raises(TokenizerError, match=f"{name}: is not a regular file"):
            Tokenizer.from_folder(small_folder)
        if not path.is_dir():
            path.unlink()


def test_dropout_is_not_applied(small_folder):
    plain = Tokenizer.from_folder(small_folder)
    fields = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields["model"]["dropout"] = 0.5
    write(small_folder, "tokenizer.json", fields)
    tokenizer = Tokenizer.from_folder(small_folder)
    for parse_special in (True, False):
        ids = [tokenizer.encode("the cat sat on the mat", parse_special=parse_special) for _ in range(20)]
        assert ids == [plain.encode("the cat sat on the mat", parse_special=parse_special)] * 20


def test_duplicate_ids_are_rejected(small_folder):
    fields = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields["model"]["vocab"]["cat"] = fields["model"]["vocab"]["a"]
    write(small_folder, "tokenizer.json", fields)
    with pytest.raises(TokenizerError, match="2 tokens of the vocabulary have the id"):
        Tokenizer.from_folder(small_folder)


def test_ids_may_have_gaps(small_folder):
    fields = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields["model"]["vocab"]["zzz"] = 400
    write(small_folder, "tokenizer.json", fields)
    tokenizer = Tokenizer.from_folder(small_folder)
    a = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.vocab_size == 401
    assert tokenizer.decode([*a, 390, 400, 401, *a]) == "azzza"
    assert tokenizer.token_text(390) == "<no token 390>"


def test_an_unreadable_or_missing_tokenizer_json_is_rejected(small_folder):
    (small_folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match="UTF-8"):
        Tokenizer.from_folder(small_folder)
    (small_folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.from_folder(small_folder)


@settings(max_examples=150)
@given(data=st.data())
def test_a_fuzzed_tokenizer_json_works_or_raises_tokenizer_error(tmp_path_factory, data):
    backend = data.draw(st.sampled_from([small_byte_level(), small_sentencepiece()]))
    path = data.draw(st.sampled_from([path for path in paths_in(backend) if path]))
    mutated = copy.deepcopy(backend)
    parent = mutated
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = data.draw(JUNK)
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


@pytest.mark.parametrize("token", ["\ud800", "<s\udfff>"])
def test_half_a_utf_16_pair_in_a_special_token_is_refused(small_folder, token):
    for name, value in (
        ("special_tokens_map.json", {"eos_token": token}),
        ("special_tokens_map.json", {"eos_token": {"content": token}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": token}}}),
    ):
        write(small_folder, name, value)
        with pytest.raises(TokenizerError, match="tokenizer"):
            Tokenizer.from_folder(small_folder)
        (small_folder / name).unlink()
