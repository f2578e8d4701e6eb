"""Recommended sampling settings: read from a model's files, and used by requests without SamplingParams."""

import json

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.builders import random_llama, write_gguf, write_hf_folder

from minillm import LLM, CheckpointError, SamplingParams
from minillm.catalog import recommended_sampling
from minillm.checkpoints import open_checkpoint
from minillm.checkpoints.recommended_sampling import sampling_from_folder, sampling_from_gguf

SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1, 2.5]),
        "top_k": st.integers(0, 100),
        "top_p": st.sampled_from([0.25, 0.95, 1.0]),
        "min_p": st.sampled_from([0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.25]),
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=256)[0]


def write(folder, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))


@given(given=SAMPLING, do_sample=st.sampled_from([True, False, None]))
def test_settings_are_read_as_transformers_writes_them(tmp_path, given, do_sample):
    expected = {name: value for name, value in given.items() if do_sample or name == "repetition_penalty"}
    chosen = expected | ({} if do_sample is None else {"do_sample": do_sample})
    chosen |= (
        {"temperature": 1.0} if chosen.get("temperature") == 0 else {}
    )  # transformers does not write a temperature of 0
    transformers.GenerationConfig(**chosen, eos_token_id=[1, 2], max_new_tokens=7).save_pretrained(tmp_path)
    read = sampling_from_folder(tmp_path)
    assert {name: read[name] for name in chosen if name != "do_sample"} == {
        name: value for name, value in chosen.items() if name != "do_sample"
    }
    SamplingParams(**read)
    write(tmp_path, **given, do_sample=do_sample)
    assert sampling_from_folder(tmp_path) == expected


@given(given=SAMPLING)
def test_gguf_keys_are_read(given):
    names = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
    metadata = {f"general.sampling.{names.get(name, name)}": value for name, value in given.items()}
    assert sampling_from_gguf(metadata | {"general.name": "x"}, "file") == given


def test_a_request_without_params_uses_the_recommended_settings(folder, tmp_path):
    write(folder, do_sample=True, temperature=0.5, top_k=3, top_p=0.9)
    llm = LLM(folder, backend="numpy")
    assert llm.default_params == SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    seen = []
    add_request = llm.engine.add_request
    llm.engine.add_request = lambda ids, params, **more: seen.append(params) or add_request(ids, params, **more)
    next(llm.stream([1, 2]))
    llm.generate([1, 2], SamplingParams(max_tokens=1))
    assert seen == [llm.default_params, SamplingParams(max_tokens=1)]

    path = write_gguf(tmp_path / "m.gguf", random_llama(), edit=lambda writer: writer.add_sampling_top_k(7))
    assert open_checkpoint(path).recommended_sampling == {"top_k": 7}
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).recommended_sampling == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_sample": True, "temperature": "hot"}, r"generation_config\.json: field 'temperature' is 'hot'"),
        ({"do_sample": 1}, "'do_sample' is 1"),
        ({"do_sample": True, "top_k": 1.5}, "'top_k' is 1.5"),
        ({"repetition_penalty": -1}, "'repetition_penalty' is -1"),
        ({"do_sample": True, "top_p": 7.0}, r"its recommended sampling parameters are invalid: top_p is 7\.0"),
    ],
)
def test_invalid_settings_are_refused(folder, values, message):
    write(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        LLM(folder, backend="numpy")


def test_a_catalog_model_uses_the_settings_of_its_makers(default_gguf, tmp_path):
    assert LLM(default_gguf, context_length=64).default_params == SamplingParams(temperature=0.2, top_p=0.9)
    assert dict(recommended_sampling(tmp_path / "other.gguf")) == {}
