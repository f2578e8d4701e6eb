"""Errors of LLM: requests and arguments that are refused, damaged weights, and a forked process."""

import math
import os

import numpy as np
import pytest
import torch
from support.builders import random_llama, write_gguf, write_hf_folder

from minillm import LLM, CapacityError, EngineConfig, NumericError, RequestError, SamplingParams


def test_requests_that_cannot_be_served_are_refused(llm):
    assert llm.context_length == 128
    refused = [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([1, 262], "prompt token 1 is 262; it must be a whole number, from 0 to 261"),
        ([-1], "prompt token 0 is -1"),
        ([1.5], r"prompt token 0 is 1\.5"),
        ([True], "prompt token 0 is True"),
        ([[1]], r"prompt token 0 is \[1\]"),
        (np.ones((2, 2)), "prompt token 0 is array"),
        (b"abc", "a prompt is text or a list of token ids, not bytes"),
        ({"prompt": "hi"}, "not dict"),
        (None, "not NoneType"),
        ([1] * 128, r"128 tokens and max_tokens of 1 need a context of 129 tokens, but it has 128"),
    ]
    for prompt, message in refused:
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match=message):
            llm.stream(prompt, SamplingParams(max_tokens=1))  # before the first delta is read
    for prompts in (None, 5, b"abc", {"prompt": "hi"}, (n for n in "ab")):
        with pytest.raises(RequestError, match="generate takes a prompt or a list of prompts"):
            llm.generate(prompts)
    with pytest.raises(RequestError, match="params are dict; they must be SamplingParams"):
        llm.generate("hello", {"max_tokens": 1})
    with pytest.raises(RequestError, match="stop_token_ids is 262"):
        llm.generate([[1]], SamplingParams(max_tokens=1, stop_token_ids=[262]))
    with pytest.raises(RequestError, match="129 tokens do not fit the context of 128"):
        llm.logits([1] * 129)
    with pytest.raises(RequestError, match="list"):
        llm.chat([])
    # The engine still works after all these errors.
    assert llm.logits([1] * 128).shape == (128, 262)
    full = llm.generate([[1] * 127], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    assert full.finish_reason == "length"


def test_a_bad_prompt_among_good_ones_starts_nothing(llm):
    for prompts, params in (
        ([[1, 2], []], SamplingParams(max_tokens=1)),
        ([[1, 2], [3]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1000)]),
        ([[1, 2], [3]], [SamplingParams(max_tokens=1), {"max_tokens": 1}]),
        ([[1, 2], [3]], [SamplingParams(max_tokens=1)]),
    ):
        before = llm.engine.step().step
        with pytest.raises(
            RequestError, match=r"empty|need a context of 1001 tokens|params are dict|2 prompts came with 1 params"
        ):
            llm.generate(prompts, params)
        assert llm.engine.step().step == before + 1
        assert not llm.engine.has_unfinished


def test_a_model_without_a_tokenizer_accepts_only_token_ids(tmp_path):
    path, _ = write_hf_folder(tmp_path)
    llm = LLM(path)
    assert llm.tokenizer is None
    assert not llm.can_chat
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0]
    assert (len(output.token_ids), output.text) == (3, "")
    for call in (
        lambda: llm.generate("hi"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.generate([[1]], SamplingParams(max_tokens=3, stop="x")),
    ):
        with pytest.raises(RequestError, match="has no tokenizer"):
            call()


def test_damaged_weights_raise_an_error_instead_of_text(tmp_path):
    model = random_llama(vocab_size=262)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    llm = LLM(write_gguf(tmp_path / "damaged.gguf", model))
    with pytest.raises(NumericError) as raised:
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=5))
    assert [output.prompt_token_ids for output in raised.value.outputs] == [[1, 2, 3], [4]]
    assert all(isinstance(output.error, NumericError) for output in raised.value.outputs)
    for _ in range(2):  # the second time shows that the engine was not left busy
        with pytest.raises(NumericError, match="NaN or infinity"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5))


def test_the_outputs_of_the_other_prompts_survive_a_failed_one(llm, monkeypatch):
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    expected = llm.generate([[4], [5]], params)
    forward = llm.transformer.forward

    def forward_with_nan(batch, cache, **options):
        logits = forward(batch, cache, **options)
        logits[batch.token_ids[batch.query_starts[1:] - 1] == 7] = math.nan
        return logits

    monkeypatch.setattr(llm.transformer, "forward", forward_with_nan)
    with pytest.raises(NumericError) as raised:
        llm.generate([[4], [7], [5]], params)
    first, failed, last = raised.value.outputs
    assert [first.token_ids, last.token_ids] == [output.token_ids for output in expected]
    assert (first.error, last.error) == (None, None)
    assert (failed.error, failed.finish_reason) == (raised.value, "error")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "abacus"}, "'abacus' is unknown"),
        ({"threads": 0}, "threads is 0"),
        ({"context_length": 0}, "context_length is 0; it must be a whole number, from 1 to 128"),
        ({"context_length": 10.5}, r"context_length is 10\.5"),
        ({"context_length": True}, "context_length is True"),
        ({"engine": EngineConfig(block_size="16")}, "block_size is '16'"),
        ({"threads": "2"}, "threads is '2'"),
        ({"threads": 10**6}, "threads is 1000000; on this machine it can be 1 to"),
        ({"context_length": 129}, "context_length is 129"),
        ({"engine": EngineConfig(block_size=0)}, "block_size is 0"),
        ({"engine": EngineConfig(num_blocks=0)}, "num_blocks is 0"),
        ({"report": 1}, r"report is 1; it must be a minillm\.catalog\.Report"),
        ({"weights": []}, r"weights is \[\]; it can be None, 'int8', 'int4'"),
        ({"engine": EngineConfig(max_sequences=0)}, "max_sequences is 0"),
        ({"engine": EngineConfig(policy="clever")}, "policy is 'clever'"),
    ],
)
def test_arguments_out_of_range(model_file, arguments, message):
    with pytest.raises(ValueError, match=message):
        LLM(model_file, **arguments)


def test_an_error_about_a_cache_beyond_memory_suggests_a_smaller_context(tmp_path):
    path, _ = write_hf_folder(tmp_path, max_position_embeddings=2**31 - 1)
    assert LLM(path).context_length == 8192
    with pytest.raises(CapacityError, match=r"2,147,483,648 positions does not fit .* smaller context_length"):
        LLM(path, context_length=2**31 - 1)


@pytest.mark.parametrize("num_blocks", [10**12, 10**18, 10**30])
def test_a_pool_beyond_every_memory_is_refused_by_name(model_file, num_blocks):
    with pytest.raises(CapacityError, match=r"does not fit into memory .* or its engine fewer num_blocks"):
        LLM(model_file, engine=EngineConfig(num_blocks=num_blocks))


def test_weights_beyond_the_memory_are_refused_by_name(model_file, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr("minillm.llm.Transformer", fail)
    with pytest.raises(CapacityError, match=r"the weights of .*tiny\.gguf do not fit into memory \(Unable"):
        LLM(model_file)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("call", ["generate", "add_request", "step", "logits"])
def test_a_forked_child_gets_an_error_that_names_spawn(llm, call):
    params = SamplingParams(max_tokens=1)
    calls = {
        "generate": lambda: llm.generate([[1, 2]], params),
        "add_request": lambda: llm.engine.add_request([1, 2], params),
        "step": llm.engine.step,
        "logits": lambda: llm.logits([1, 2]),
    }
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            calls[call]()
        except RequestError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        assert 'get_context("spawn")' in pipe.read()
    os.waitpid(child, 0)


def test_an_unknown_kv_dtype_is_refused(model_file):
    with pytest.raises(ValueError, match="kv_dtype is 'int8'; keys and values can be stored as float32 or float16"):
        LLM(model_file, engine=EngineConfig(kv_dtype="int8"))
