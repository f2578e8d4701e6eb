"""Tokens that end a turn: found by name and in the chat template, and never made from ordinary text."""

import pytest
from support.tokenizer_builders import spm_metadata

from minillm.tokenizer import Tokenizer
from minillm.tokenizer.end_tokens import END_NAMES, end_names
from minillm.tokenizer.gguf import TokenType

BYTES = [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
LETTERS = [(letter, -2.0, TokenType.NORMAL) for letter in "▁abcdefghijklmnopqrstuvwxyz<>|/_"]


def tokenizer(*tokens, template=None, general=None, **ids):
    """Return a SentencePiece tokenizer with an unknown token, the given (text, type) pairs, bytes and letters."""
    entries = [("<unk>", 0.0, TokenType.UNKNOWN), *((text, 0.0, kind) for text, kind in tokens), *BYTES, *LETTERS]
    metadata = spm_metadata(entries, False)
    for role in ("bos", "eos", "eot"):
        metadata.pop(f"tokenizer.ggml.{role}_token_id", None)
    metadata |= {f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in ids.items()}
    metadata |= {"tokenizer.ggml.add_bos_token": False} | (general or {})
    if template:
        metadata["tokenizer.chat_template"] = template
    return Tokenizer.from_gguf(metadata, "x.gguf")


@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL])
@pytest.mark.parametrize("name", sorted(name for name in END_NAMES if "▁" not in name))
def test_a_token_with_a_known_name_ends_a_turn(name, kind):
    found = tokenizer(("<|start|>", TokenType.CONTROL), (name, kind), eos=1)
    assert found.eos_token_ids == (1, 2)
    assert 2 in found.encode(f"a{name}")
    assert 2 not in found.encode(f"a{name}", parse_special=False)
    assert found.decode([2]) == ""


def test_end_of_sequence_is_a_control_token_whatever_the_file_says():
    found = tokenizer(("</s>", TokenType.USER_DEFINED), ("<s>", TokenType.NORMAL), eos=1)
    assert found.encode("</s>") == [1]
    assert found.encode("<s>") == [2]
    for text in ("</s>", "<s>"):
        assert not {1, 2} & set(found.encode(text, parse_special=False))


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<stop-here>' if m.role == 'assistant' }}\n{% endfor %}"
)


def test_a_token_that_the_template_writes_after_an_answer_ends_a_turn():
    tokens = ("<eos>", TokenType.CONTROL), ("<stop-here>", TokenType.CONTROL), ("<other>", TokenType.CONTROL)
    assert tokenizer(*tokens, eos=1, template=TEMPLATE).eos_token_ids == (1, 2)
    assert tokenizer(*tokens, eos=1).eos_token_ids == (1,)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% broken", "{{ messages[0].content }}"])
def test_a_template_that_shows_no_end_is_ignored(template):
    assert end_names(["<eos>", "<|end|>"], template, {"eos_token": "<eos>"}) == ["<|end|>"]


@pytest.mark.parametrize(("name", "strips"), [("Phi-3-mini", True), ("phi3", True), ("Llama", False)])
def test_white_space_after_the_special_tokens_of_phi_3_belongs_to_them(name, strips):
    tokens = ("<|user|>", TokenType.CONTROL), ("<s>", TokenType.CONTROL)
    found = tokenizer(*tokens, eos=1, general={"general.name": name})
    tight, loose = found.encode("<|user|>a"), found.encode("<|user|>\n  a")
    assert (loose == tight) == strips
    assert found.encode("<s>\na") != found.encode("<s>a")
