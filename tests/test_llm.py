"""LLM: generate, stream, chat and logits, on a tiny random model."""

import gc
import math
import os
import threading

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import random_llama, write_gguf, write_hf_folder

import minillm.llm
from minillm import (
    LLM,
    BusyError,
    CapacityError,
    ChatTemplateError,
    EngineConfig,
    NumericError,
    RequestError,
    SamplingParams,
)
from minillm.engine.sampling import sample

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    def with_template(writer):
        writer.add_chat_template(TEMPLATE)

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, random_llama(vocab_size=262), "Q8_0", with_tokenizer=True, edit=with_template)


@pytest.fixture(scope="module")
def llm(model_file):
    return LLM(model_file, engine=EngineConfig(block_size=4))


token_ids = st.lists(st.integers(0, 261), min_size=1, max_size=30)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 1000),
    ignore_eos=st.booleans(),
    logprobs=st.just(True),
)


def essence(output):
    return output.token_ids, output.logprobs, output.text, output.finish_reason


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
@given(requests=st.lists(st.tuples(token_ids, params), min_size=2, max_size=5))
def test_an_answer_does_not_depend_on_what_ran_before(llm, requests):
    """Tokens and logprobs are equal, whether or not the prefix cache had a match, and whatever was sampled before."""
    alone = []
    for prompt, how in requests:
        llm.reset_prefix_cache()
        alone.append(essence(llm.generate([prompt], how)[0]))
    in_a_row = [essence(llm.generate([prompt], how)[0]) for prompt, how in requests]
    assert in_a_row == alone


@settings(max_examples=40)
@given(prompt=token_ids, how=params)
def test_the_loop_is_logits_and_sample_by_turns(llm, prompt, how):
    """The simplest implementation computes all logits again for every token, and samples from the last row."""
    tokens, logprobs = [], []
    while len(tokens) < how.max_tokens:
        chosen = sample(llm.logits(prompt + tokens)[-1], how, how.seed, len(tokens), prompt + tokens)
        tokens.append(chosen.token_id)
        logprobs.append(chosen.logprob)
        if chosen.token_id in llm.tokenizer.eos_token_ids and not how.ignore_eos:
            break
    output = llm.generate([prompt], how)[0]
    assert (output.token_ids, output.logprobs) == (tokens, logprobs)


@settings(max_examples=40)
@given(beginning=token_ids, left=token_ids, right=token_ids)
def test_a_common_beginning_is_computed_once(llm, beginning, left, right):
    how = SamplingParams(max_tokens=2, temperature=0, logprobs=True, ignore_eos=True)
    llm.reset_prefix_cache()
    fresh = llm.generate([beginning + right], how)[0]
    llm.generate([beginning + left], how)
    again = llm.generate([beginning + right], how)[0]
    known = min(len(beginning), len(beginning + right) - 1)  # the last is always computed
    assert again.metrics.num_cached_tokens >= known // 4 * 4  # in whole blocks
    assert again.metrics.num_cached_tokens % 4 == 0
    assert again.metrics.num_cached_tokens < len(beginning + right)
    assert essence(again) == essence(fresh)


@settings(max_examples=30)
@given(prompt=token_ids, how=params)
def test_a_stream_is_the_same_answer_in_pieces(llm, prompt, how):
    deltas = list(llm.stream(prompt, how))
    output = llm.generate([prompt], how)[0]
    assert "".join(delta.text for delta in deltas) == output.text
    assert [delta.token_id for delta in deltas] == output.token_ids
    assert [delta.logprob for delta in deltas] == output.logprobs
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == output.finish_reason
    assert output.text == llm.tokenizer.decode(output.token_ids)


@settings(max_examples=30)
@given(prompt=token_ids, chunk=st.integers(1, 40))
def test_logits_have_the_same_bits_for_any_prefill_chunk(llm, prompt, chunk):
    whole, lengths = llm.logits(prompt), []
    forward = llm.transformer.forward

    def watched(batch, *args, **kwargs):
        lengths.append(batch.num_tokens)
        return forward(batch, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minillm.llm, "PREFILL_CHUNK", chunk)
        patch.setattr(llm.transformer, "forward", watched)
        np.testing.assert_array_equal(llm.logits(prompt), whole)
    assert lengths == [chunk] * (len(prompt) // chunk) + [len(prompt) % chunk] * (len(prompt) % chunk > 0)
    assert whole.shape == (len(prompt), 262)
    assert whole.dtype == np.float32


@settings(max_examples=30)
@given(prompt=token_ids, how=params)
def test_logprobs_are_the_models_own(llm, prompt, how):
    output = llm.generate([prompt], how)[0]
    logits = llm.logits(prompt + output.token_ids)[len(prompt) - 1 : -1]
    expected = torch.log_softmax(torch.tensor(logits).double(), -1).gather(1, torch.tensor([output.token_ids]).T)
    np.testing.assert_allclose(output.logprobs, expected[:, 0], atol=1e-9)


@settings(max_examples=60)
@given(prompt=token_ids, seed=st.integers(0, 100), cut=st.integers(0, 30), length=st.integers(1, 5))
def test_text_ends_before_a_stop_string(llm, prompt, seed, cut, length):
    how = {"max_tokens": 20, "temperature": 1.5, "seed": seed, "ignore_eos": True}
    full = llm.generate([prompt], SamplingParams(**how))[0]
    stop = full.text[cut : cut + length]
    if not stop:
        return
    output = llm.generate([prompt], SamplingParams(**how, stop=stop))[0]
    assert output.text == full.text[: full.text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    assert stop in llm.tokenizer.decode(output.token_ids)


@settings(max_examples=30)
@given(prompt=token_ids, seed=st.integers(0, 100))
def test_ends_of_an_answer(llm, prompt, seed):
    how = {"max_tokens": 15, "temperature": 2.0, "seed": seed}
    full = llm.generate([prompt], SamplingParams(**how, ignore_eos=True))[0].token_ids
    assert len(full) == 15
    (eos,) = llm.tokenizer.eos_token_ids
    for ends, extra in (((eos,), {}), ((eos, full[3]), {"stop_token_ids": [full[3]]})):
        output = llm.generate([prompt], SamplingParams(**how, **extra))[0]
        first = next((n for n, token in enumerate(full) if token in ends), None)
        assert output.token_ids == (full if first is None else full[: first + 1])
        assert output.finish_reason == ("length" if first is None else "stop")


def test_a_stop_string_on_the_last_permitted_token_counts(llm):
    how = {"max_tokens": 6, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    text = llm.generate("hello", SamplingParams(**how))[0].text
    for stop in (text[-1], text[-2:]):
        assert llm.generate("hello", SamplingParams(**how, stop=stop))[0].finish_reason == "stop"


def test_unseeded_requests_differ_and_seeded_ones_do_not(llm):
    def tokens(seed):
        return llm.generate("hello", SamplingParams(max_tokens=12, temperature=3.0, ignore_eos=True, seed=seed))[
            0
        ].token_ids

    assert tokens(None) != tokens(None)
    assert tokens(5) == tokens(5) != tokens(6)


def test_special_tokens_are_shown_if_asked_for(llm):
    for seed in range(100):
        how = {"max_tokens": 30, "temperature": 3.0, "seed": seed, "ignore_eos": True}
        output = llm.generate("hello", SamplingParams(**how))[0]
        if 2 in output.token_ids:
            break
    assert "</s>" not in output.text
    assert "</s>" in llm.generate("hello", SamplingParams(**how, skip_special_tokens=False))[0].text


def test_a_chat_prompt_is_not_given_special_tokens_twice(tmp_path):
    def edit(writer):
        writer.add_chat_template(TEMPLATE)
        writer.add_add_bos_token(True)

    path = write_gguf(tmp_path / "bos.gguf", random_llama(vocab_size=262), with_tokenizer=True, edit=edit)
    llm = LLM(path)
    assert llm.encode("hello")[0] == llm.tokenizer.bos_token_id
    chat = llm.encode_chat([{"role": "user", "content": "hello"}])
    assert chat[:2] == llm.tokenizer.encode("<s>u", add_special_tokens=False)[:2]
    assert chat[1] != llm.tokenizer.bos_token_id


def test_many_prompts_come_back_in_order(llm):
    how = SamplingParams(max_tokens=4, temperature=0)
    prompts = ["hello", [7, 8, 9], "world"]
    outputs = llm.generate(prompts, how)
    assert [output.prompt_token_ids for output in outputs] == [llm.encode(prompt) for prompt in prompts]
    assert essence(llm.generate("hello", how)[0]) == essence(outputs[0])
    assert essence(llm.generate([7, 8, 9], how)[0]) == essence(outputs[1])
    assert essence(llm.generate(np.array([7, 8, 9]), how)[0]) == essence(outputs[1])
    assert llm.generate([], how) == []


@settings(max_examples=30)
@given(requests=st.lists(st.tuples(token_ids, params), min_size=1, max_size=5))
def test_prompts_answered_together_are_answered_as_each_alone(llm, requests):
    prompts, hows = [list(column) for column in zip(*requests, strict=True)]
    together = llm.generate(prompts, hows)
    for (prompt, how), output in zip(requests, together, strict=True):
        assert output.prompt_token_ids == prompt
        assert essence(output) == essence(llm.generate([prompt], how)[0])


def test_several_completions_of_one_prompt(llm):
    """The first is what the request alone gives; the others are drawn apart, and a stream tells them apart."""
    how = {"max_tokens": 10, "temperature": 2.0, "seed": 3, "logprobs": True, "ignore_eos": True}
    single = llm.generate([[5] * 9], SamplingParams(**how))[0]
    output = llm.generate([[5] * 9], SamplingParams(**how, n=3))[0]
    assert len(output.completions) == 3
    assert essence(output) == essence(output.completions[0]) == essence(single)
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 3
    assert [completion.metrics.num_generated_tokens for completion in output.completions] == [10] * 3
    deltas = list(llm.stream([5] * 9, SamplingParams(**how, n=3)))
    for number, completion in enumerate(output.completions):
        own = [delta for delta in deltas if delta.completion == number]
        assert [delta.token_id for delta in own] == completion.token_ids
        assert "".join(delta.text for delta in own) == completion.text
        assert own[-1].finish_reason == completion.finish_reason == "length"
    greedy = llm.generate([[5]], SamplingParams(max_tokens=5, temperature=0, n=2))[0]
    assert greedy.completions[0].token_ids == greedy.completions[1].token_ids


def test_a_request_aborted_by_somebody_else_ends(llm):
    stream = llm.stream([1, 2], SamplingParams(max_tokens=50, ignore_eos=True, n=2))
    next(stream)
    (request_id,) = {sequence.request_id for sequence in llm.engine.scheduler.running}
    llm.engine.abort(request_id)
    assert len(list(stream)) < 5
    assert llm.engine.scheduler.blocks.num_held == 0


def test_steps_taken_by_hand_go_to_whoever_asked(llm):
    how = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    stream = llm.stream([1, 2], how)
    first = next(stream)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [first.token_id, *(delta.token_id for delta in stream)] == llm.generate([[1, 2]], how)[0].token_ids


def test_metrics_add_up(llm):
    llm.reset_prefix_cache()
    metrics = llm.generate([[5] * 20], SamplingParams(max_tokens=5, ignore_eos=True))[0].metrics
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_generated_tokens) == (20, 0, 5)
    assert 0 < metrics.prefill_seconds < metrics.time_to_first_token  # sampling comes between
    assert metrics.decode_seconds > 0
    assert metrics.prefill_tokens_per_second == pytest.approx(20 / metrics.prefill_seconds)
    assert metrics.decode_tokens_per_second == pytest.approx(4 / metrics.decode_seconds)
    assert metrics.kv_bytes == 6 * 4 * llm.kv_cache.bytes_per_token  # 24 positions in 6 blocks of 4


def test_each_delta_keeps_its_own_metrics(llm):
    deltas = list(llm.stream("hello", SamplingParams(max_tokens=5, ignore_eos=True)))
    assert [delta.metrics.num_generated_tokens for delta in deltas] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core has no threads to compare")
def test_threads_change_no_bit_and_hold_in_every_thread(model_file):
    how = SamplingParams(max_tokens=20, temperature=1, seed=1, logprobs=True)
    answers, seen = [], []
    for threads in (1, 2):
        llm = LLM(model_file, threads=threads)
        forward = llm.transformer.forward

        def watched(*args, forward=forward, **kwargs):
            seen.append(numba.get_num_threads())
            return forward(*args, **kwargs)

        llm.transformer.forward = watched
        asker = threading.Thread(target=lambda llm=llm: answers.append(essence(llm.generate([[1] * 20], how)[0])))
        asker.start()
        asker.join()
    assert answers[0] == answers[1]
    assert seen == [1] * (len(seen) // 2) + [2] * (len(seen) // 2)


def test_a_conversation_continues_in_the_cache(llm):
    how = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    messages = [{"role": "user", "content": "hello"}]
    first = llm.chat(messages, how)
    assert first.prompt_token_ids == llm.tokenizer.encode(TEMPLATE_TEXT, add_special_tokens=False)
    messages += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "bye"}]
    second = llm.chat(messages, how)
    assert second.metrics.num_cached_tokens >= len(first.prompt_token_ids) // 4 * 4
    streamed = list(llm.stream_chat(messages, how))
    assert [delta.token_id for delta in streamed] == second.token_ids


TEMPLATE_TEXT = "<s>user: hello</s><s>assistant:"


def test_streams_share_the_engine(llm):
    """Whoever is read, all go on; and what comes for one is not lost while another is read."""
    how = SamplingParams(max_tokens=12, temperature=1, seed=5, logprobs=True, ignore_eos=True)
    prompts = [[1, 2, 3], [4] * 9, [5]]
    expected = [essence(llm.generate([prompt], how)[0]) for prompt in prompts]
    streams = [llm.stream(prompt, how) for prompt in prompts]
    seen = [[next(stream)] for stream in streams]
    between = essence(llm.generate([prompts[1]], how)[0])
    llm.logits([1, 2])
    for stream, deltas in reversed(list(zip(streams, seen, strict=True))):
        deltas += stream
    for deltas, (token_ids, logprobs, text, finish_reason) in zip(seen, expected, strict=True):
        assert [delta.token_id for delta in deltas] == token_ids
        assert [delta.logprob for delta in deltas] == logprobs
        assert "".join(delta.text for delta in deltas) == text
        assert deltas[-1].finish_reason == finish_reason
    assert between == expected[1]


def test_walking_away_from_a_stream_frees_its_blocks_at_once(llm):
    how = SamplingParams(max_tokens=50, ignore_eos=True)
    for leave in (lambda stream: stream.close(), lambda stream: None):
        stream = llm.stream([1, 2, 3], how)
        next(stream)
        assert llm.engine.scheduler.blocks.num_held == 1
        leave(stream)
        del stream
        gc.collect()
        assert llm.engine.scheduler.blocks.num_held == 0
        assert not llm.engine.has_unfinished
    never_begun = llm.stream([1, 2, 3], how)
    assert not llm.engine.has_unfinished
    del never_begun


def test_a_stream_thrown_away_during_a_step_ends_before_the_next(llm):
    """As the garbage collector may do it, at any time."""
    how = SamplingParams(max_tokens=3, ignore_eos=True)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    forward = llm.transformer.forward

    def closing(*args, **kwargs):
        stream.close()
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.transformer, "forward", closing)
        other = llm.stream([4], how)
        next(other)
    assert llm.engine.has_unfinished
    assert len(list(other)) == 2
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.blocks.num_held == 0


def test_requests_that_cannot_be_served(llm):
    most = llm.context_length
    assert most == 128
    bad = [
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
        ([1] * 128, r"128 tokens and max_tokens of 1 need 129 positions, but the context has 128"),
    ]
    for prompt, message in bad:
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match=message):
            llm.stream(prompt, SamplingParams(max_tokens=1))  # at once, not at the first token
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
    # nothing of that has hurt
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
            RequestError, match=r"empty|need 1001 positions|params are dict|2 prompts came with 1 params"
        ):
            llm.generate(prompts, params)
        assert llm.engine.step().step == before + 1
        assert not llm.engine.has_unfinished


def test_a_model_without_tokenizer_takes_ids(tmp_path):
    path, _ = write_hf_folder(tmp_path)
    llm = LLM(path)
    assert llm.tokenizer is None
    assert not llm.can_chat
    output = llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0]
    assert (len(output.token_ids), output.text) == (3, "")
    for ask in (
        lambda: llm.generate("hi"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.generate([[1]], SamplingParams(max_tokens=3, stop="x")),
    ):
        with pytest.raises(RequestError, match="has no tokenizer"):
            ask()


def test_a_model_without_template_does_not_chat(tmp_path):
    path, _ = write_hf_folder(tmp_path, with_tokenizer=True)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        LLM(path).chat([{"role": "user", "content": "hi"}])


def test_damaged_weights_show_as_an_error_not_as_text(tmp_path):
    model = random_llama(vocab_size=262)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    llm = LLM(write_gguf(tmp_path / "damaged.gguf", model))
    for _ in range(2):  # and again: it has not been left busy
        with pytest.raises(NumericError, match="NaN or infinity"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5))


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
        ({"threads": 10**6}, "threads is 1000000; this machine has 1 to"),
        ({"context_length": 129}, "context_length is 129"),
        ({"engine": EngineConfig(block_size=0)}, "block_size is 0"),
        ({"engine": EngineConfig(num_blocks=0)}, "num_blocks is 0"),
        ({"engine": EngineConfig(max_sequences=0)}, "max_sequences is 0"),
        ({"engine": EngineConfig(policy="clever")}, "policy is 'clever'"),
    ],
)
def test_arguments_out_of_range(model_file, arguments, message):
    with pytest.raises(ValueError, match=message):
        LLM(model_file, **arguments)


def test_a_cache_beyond_memory_is_an_error_with_a_way_out(tmp_path):
    path, _ = write_hf_folder(tmp_path, max_position_embeddings=2**31 - 1)
    assert LLM(path).context_length == 8192
    with pytest.raises(CapacityError, match=r"2,147,483,648 positions does not fit .* smaller context_length"):
        LLM(path, context_length=2**31 - 1)


def test_threads_take_turns_or_are_refused(llm):
    """Whoever is let in gets a right answer; nobody waits, nobody gets a wrong one."""
    how = SamplingParams(max_tokens=8, temperature=1, seed=3, ignore_eos=True)
    prompts = [[n, n + 1, n + 2] for n in range(4)]
    expected = [essence(llm.generate([prompt], how)[0]) for prompt in prompts]
    served, refused = [], []

    def ask(n):
        for _ in range(30):
            try:
                served.append(essence(llm.generate([prompts[n]], how)[0]) == expected[n])
            except BusyError as error:
                refused.append("another thread's request is running" in str(error))

    threads = [threading.Thread(target=ask, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served
    assert all(served)
    assert all(refused)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_child_is_told(llm):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1, 2]], SamplingParams(max_tokens=1))
        except RequestError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as answer:
        assert 'get_context("spawn")' in answer.read()
    os.waitpid(child, 0)


@pytest.mark.parametrize("block_size", [1, 7, 128, 1000])
def test_block_size_changes_nothing(llm, model_file, block_size):
    how = SamplingParams(max_tokens=20, temperature=1, seed=1, logprobs=True)
    other = LLM(model_file, engine=EngineConfig(block_size=block_size), context_length=100)
    assert essence(other.generate("hello", how)[0]) == essence(llm.generate("hello", how)[0])
    assert "blocks of" in repr(other)


def test_keys_and_values_in_float16_take_half_the_memory_and_move_scores_a_little(model_file):
    exact, halved = LLM(model_file), LLM(model_file, engine=EngineConfig(kv_dtype="float16"))
    assert halved.kv_cache.num_bytes * 2 == exact.kv_cache.num_bytes
    token_ids = exact.encode("hello world, hello")
    left, right = exact.logits(token_ids), halved.logits(token_ids)
    assert 0 < np.abs(left - right).max() <= 1e-2 * np.abs(left).max()
    np.testing.assert_allclose(
        LLM(model_file, backend="numpy", engine=EngineConfig(kv_dtype="float16")).logits(token_ids),
        right,
        atol=2e-5 * np.abs(right).max(),
    )


def test_other_types_of_keys_and_values_are_refused(model_file):
    with pytest.raises(ValueError, match="kv_dtype is 'int8'; keys and values can be stored as float32 or float16"):
        LLM(model_file, engine=EngineConfig(kv_dtype="int8"))
