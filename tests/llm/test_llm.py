"""LLM.generate and LLM.logits on a tiny random model."""

import threading

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import write_hf_folder
from support.llm_cases import answer_of, sampling_params, token_ids

import minillm.llm
from minillm import LLM, EngineConfig, SamplingParams
from minillm.engine.sampling import sample


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_greedy_tokens_are_those_of_transformers(tmp_path, backend):
    path, model = write_hf_folder(tmp_path, with_tokenizer=True)
    prompt = [5, 99, 7, 200]
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=-1, pad_token_id=0
    )
    output = LLM(path, backend=backend).generate(
        [prompt], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    )
    assert output[0].token_ids == expected[0, 4:].tolist()


@settings(max_examples=60)
@given(requests=st.lists(st.tuples(token_ids, sampling_params), min_size=2, max_size=5))
def test_an_answer_does_not_depend_on_earlier_requests(llm, requests):
    """Tokens and logprobs are equal with and without prefix cache hits, and do not depend on earlier samples."""
    expected = []
    for prompt, sampling in requests:
        llm.reset_prefix_cache()
        expected.append(answer_of(llm.generate([prompt], sampling)[0]))
    answers = [answer_of(llm.generate([prompt], sampling)[0]) for prompt, sampling in requests]
    assert answers == expected


@settings(max_examples=40)
@given(prompt=token_ids, params=sampling_params)
def test_generate_alternates_logits_and_sample(llm, prompt, params):
    """The simplest implementation computes all logits again for each token and samples from the last row."""
    tokens, logprobs = [], []
    while len(tokens) < params.max_tokens:
        chosen = sample(llm.logits(prompt + tokens)[-1], params, params.seed, len(tokens), prompt + tokens)
        tokens.append(chosen.token_id)
        logprobs.append(chosen.logprob)
        if chosen.token_id in llm.tokenizer.eos_token_ids and not params.ignore_eos:
            break
    output = llm.generate([prompt], params)[0]
    assert (output.token_ids, output.logprobs) == (tokens, logprobs)


@settings(max_examples=40)
@given(beginning=token_ids, left=token_ids, right=token_ids)
def test_a_shared_prefix_is_computed_once(llm, beginning, left, right):
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=True, ignore_eos=True)
    llm.reset_prefix_cache()
    fresh = llm.generate([beginning + right], params)[0]
    llm.generate([beginning + left], params)
    again = llm.generate([beginning + right], params)[0]
    num_reusable = min(len(beginning), len(beginning + right) - 1)  # the last token is always computed
    assert again.metrics.num_cached_tokens >= num_reusable // 4 * 4  # whole blocks only
    assert again.metrics.num_cached_tokens % 4 == 0
    assert again.metrics.num_cached_tokens < len(beginning + right)
    assert answer_of(again) == answer_of(fresh)


@settings(max_examples=30)
@given(prompt=token_ids, chunk=st.integers(1, 40))
def test_logits_have_the_same_bits_for_any_prefill_chunk(llm, prompt, chunk):
    whole, lengths = llm.logits(prompt), []
    forward = llm.transformer.forward

    def forward_and_count_tokens(batch, *args, **kwargs):
        lengths.append(batch.num_tokens)
        return forward(batch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minillm.llm, "PREFILL_CHUNK", chunk)
        patch.setattr(llm.transformer, "forward", forward_and_count_tokens)
        np.testing.assert_array_equal(llm.logits(prompt), whole)
    assert lengths == [chunk] * (len(prompt) // chunk) + [len(prompt) % chunk] * (len(prompt) % chunk > 0)
    assert whole.shape == (len(prompt), 262)
    assert whole.dtype == np.float32


@settings(max_examples=30)
@given(prompt=token_ids, params=sampling_params)
def test_logprobs_are_the_log_softmax_of_the_logits(llm, prompt, params):
    output = llm.generate([prompt], params)[0]
    logits = llm.logits(prompt + output.token_ids)[len(prompt) - 1 : -1]
    expected = torch.log_softmax(torch.tensor(logits).double(), -1).gather(1, torch.tensor([output.token_ids]).T)
    np.testing.assert_allclose(output.logprobs, expected[:, 0], atol=1e-9)


def test_answers_differ_without_a_seed_and_repeat_with_one(llm):
    def tokens(seed):
        params = SamplingParams(max_tokens=12, temperature=3.0, ignore_eos=True, seed=seed)
        return llm.generate("hello", params)[0].token_ids

    assert tokens(None) != tokens(None)
    assert tokens(5) == tokens(5) != tokens(6)


def test_outputs_are_in_the_order_of_the_prompts(llm):
    params = SamplingParams(max_tokens=4, temperature=0)
    prompts = ["hello", [7, 8, 9], "world"]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == [llm.encode(prompt) for prompt in prompts]
    assert answer_of(llm.generate("hello", params)[0]) == answer_of(outputs[0])
    assert answer_of(llm.generate([7, 8, 9], params)[0]) == answer_of(outputs[1])
    assert answer_of(llm.generate(np.array([7, 8, 9]), params)[0]) == answer_of(outputs[1])
    assert llm.generate([], params) == []


@settings(max_examples=30)
@given(requests=st.lists(st.tuples(token_ids, sampling_params), min_size=1, max_size=5))
def test_prompts_get_the_same_answers_together_as_alone(llm, requests):
    prompts, params = [list(column) for column in zip(*requests, strict=True)]
    together = llm.generate(prompts, params)
    for (prompt, sampling), output in zip(requests, together, strict=True):
        assert output.prompt_token_ids == prompt
        assert answer_of(output) == answer_of(llm.generate([prompt], sampling)[0])


def test_several_completions_of_one_prompt(llm):
    """The first completion equals the answer with n=1. The others differ, and deltas name their completion."""
    options = {"max_tokens": 10, "temperature": 2.0, "seed": 3, "logprobs": True, "ignore_eos": True}
    single = llm.generate([[5] * 9], SamplingParams(**options))[0]
    output = llm.generate([[5] * 9], SamplingParams(**options, n=3))[0]
    assert len(output.completions) == 3
    assert answer_of(output) == answer_of(output.completions[0]) == answer_of(single)
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 3
    assert [completion.metrics.num_generated_tokens for completion in output.completions] == [10] * 3
    deltas = list(llm.stream([5] * 9, SamplingParams(**options, n=3)))
    for number, completion in enumerate(output.completions):
        own_deltas = [delta for delta in deltas if delta.completion == number]
        assert [delta.token_id for delta in own_deltas] == completion.token_ids
        assert "".join(delta.text for delta in own_deltas) == completion.text
        assert own_deltas[-1].finish_reason == completion.finish_reason == "length"
    greedy = llm.generate([[5]], SamplingParams(max_tokens=5, temperature=0, n=2))[0]
    assert greedy.completions[0].token_ids == greedy.completions[1].token_ids


def test_metrics_are_consistent(llm):
    llm.reset_prefix_cache()
    metrics = llm.generate([[5] * 20], SamplingParams(max_tokens=5, ignore_eos=True))[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_generated_tokens) == (20, 0, 5)
    assert 0 < metrics.prefill_seconds < metrics.time_to_first_token  # which includes sampling
    assert metrics.decode_seconds > 0
    assert metrics.prefill_tokens_per_second == pytest.approx(20 / metrics.prefill_seconds)
    assert metrics.decode_tokens_per_second == pytest.approx(4 / metrics.decode_seconds)
    assert metrics.kv_bytes == 6 * 4 * llm.kv_cache.bytes_per_token  # 24 positions in 6 blocks of 4


def test_the_number_of_threads_changes_no_bit_and_applies_to_every_caller(model_file):
    params = SamplingParams(max_tokens=20, temperature=1, seed=1, logprobs=True)
    answers, num_threads = [], []
    for threads in (1, 2):
        llm = LLM(model_file, threads=threads)
        forward = llm.transformer.forward

        def forward_and_count_threads(*args, forward=forward, **kwargs):
            num_threads.append(numba.get_num_threads())
            return forward(*args, **kwargs)

        llm.transformer.forward = forward_and_count_threads
        caller = threading.Thread(target=lambda llm=llm: answers.append(answer_of(llm.generate([[1] * 20], params)[0])))
        caller.start()
        caller.join()
    assert answers[0] == answers[1]
    assert num_threads == [1] * (len(num_threads) // 2) + [2] * (len(num_threads) // 2)


@pytest.mark.parametrize("block_size", [1, 7, 128, 1000])
def test_the_block_size_does_not_change_answers(llm, model_file, block_size):
    params = SamplingParams(max_tokens=20, temperature=1, seed=1, logprobs=True)
    other = LLM(model_file, engine=EngineConfig(block_size=block_size), context_length=100)
    assert answer_of(other.generate("hello", params)[0]) == answer_of(llm.generate("hello", params)[0])
    assert "blocks of" in repr(other)


def test_a_float16_cache_halves_memory_and_changes_logits_slightly(model_file):
    full, half = LLM(model_file), LLM(model_file, engine=EngineConfig(kv_dtype="float16"))
    assert half.kv_cache.num_bytes * 2 == full.kv_cache.num_bytes
    prompt = full.encode("hello world, hello")
    expected, found = full.logits(prompt), half.logits(prompt)
    assert 0 < np.abs(expected - found).max() <= 1e-2 * np.abs(expected).max()
    np.testing.assert_allclose(
        LLM(model_file, backend="numpy", engine=EngineConfig(kv_dtype="float16")).logits(prompt),
        found,
        atol=2e-5 * np.abs(found).max(),
    )
