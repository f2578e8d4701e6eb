"""Fields of `config.json` that minillm does not know: a warning names them, unless they cannot change the logits."""

from __future__ import annotations

import json
import warnings

import pytest
from support.damage import edit_json
from transformers import CONFIG_MAPPING

from minillm import UnusedFieldsWarning
from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.fields import Fields
from minillm.checkpoints.hf_architectures import ARCHITECTURES
from minillm.checkpoints.hf_models import read_config
from minillm.errors import UnsupportedError


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_default_config_of_an_architecture_causes_no_warning(model_type):
    config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedFieldsWarning)
        read_config(Fields(config, "config.json"))


UNKNOWN = {
    "clip_qkv": 8.0,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "no_rope_layers": [1, 0],
    "attn_logit_softcapping": 50.0,
    "attention_multiplier": 0.5,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}


def test_one_warning_names_all_unknown_fields(hf_folder):
    edit_json(hf_folder / "config.json", **UNKNOWN)
    with pytest.warns(UnusedFieldsWarning) as caught:
        open_checkpoint(hf_folder)
    (message,) = [str(warning.message) for warning in caught if warning.category is UnusedFieldsWarning]
    assert ", ".join(map(repr, sorted(UNKNOWN))) in message
    assert "config.json" in message


@pytest.mark.parametrize("value", [None, False, 0, 1.0, [], {}, ""])
def test_a_value_that_means_none_causes_no_warning(hf_folder, value):
    edit_json(hf_folder / "config.json", **dict.fromkeys(UNKNOWN, value))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedFieldsWarning)
        open_checkpoint(hf_folder)


def test_attention_to_later_tokens_is_refused(hf_folder):
    edit_json(hf_folder / "config.json", is_causal=True)
    open_checkpoint(hf_folder)
    edit_json(hf_folder / "config.json", is_causal=False)
    with pytest.raises(UnsupportedError, match="is_causal is False; only True is implemented"):
        open_checkpoint(hf_folder)
