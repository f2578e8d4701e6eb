"""A tokenizer.json whose steps make a text much longer is rejected before the steps run."""

import base64
import functools
import json

import pytest
from support.tokenizer_builders import write
from tokenizers import pre_tokenizers

from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer


def replace_step(old, new, pattern_type="String"):
    return {"type": "Replace", "pattern": {pattern_type: old}, "content": new}


LONG_REPLACEMENT_TABLE = base64.b64encode((0).to_bytes(4, "little") + b"x" * 2000 + b"\0").decode()
DEEPLY_NESTED = functools.reduce(
    lambda inner, _: {"type": "Sequence", "normalizers": [inner]}, range(300), {"type": "NFC"}
)
EXPANDING_STEPS = [
    ("normalizer", {"type": "Sequence", "normalizers": [replace_step("a", "a" * 100)] * 6}),
    (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [replace_step("", "aa")] * 7}]},
    ),
    ("normalizer", {"type": "Sequence", "normalizers": [replace_step("b*", "a" * 10, "Regex")] * 6}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 2000}),
    ("normalizer", {"type": "Prepend", "prepend": "a" * 5000}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": LONG_REPLACEMENT_TABLE}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "!"}),
    ("normalizer", {"pattern": {"String": "a"}, "content": "a" * 5000}),
    ("normalizer", DEEPLY_NESTED),
    (
        "pre_tokenizer",
        {"type": "Sequence", "pretokenizers": [json.loads(pre_tokenizers.ByteLevel().__getstate__())] * 40},
    ),
    ("decoder", {"type": "Sequence", "decoders": [replace_step("", "x" * 1000)] * 3}),
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


@pytest.mark.parametrize(("component", "value"), EXPANDING_STEPS)
def test_expanding_steps_are_rejected(small_folder, component, value):
    fields = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    write(small_folder, "tokenizer.json", fields | {component: value})
    with pytest.raises(TokenizerError, match=component):
        Tokenizer.from_folder(small_folder)


def test_long_affixes_are_rejected(small_folder):
    fields = json.loads((small_folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields["model"]["continuing_subword_prefix"] = "#" * 100
    write(small_folder, "tokenizer.json", fields)
    with pytest.raises(TokenizerError, match="'continuing_subword_prefix' has 100 characters"):
        Tokenizer.from_folder(small_folder)
