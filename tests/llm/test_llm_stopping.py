"""The end of an answer: stop strings, stop tokens, the EOS token and max_tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.llm_cases import token_ids

from minillm import SamplingParams


@settings(max_examples=60)
@given(prompt=token_ids, seed=st.integers(0, 100), start=st.integers(0, 30), length=st.integers(1, 5))
def test_text_ends_before_a_stop_string(llm, prompt, seed, start, length):
    options = {"max_tokens": 20, "temperature": 1.5, "seed": seed, "ignore_eos": True}
    full = llm.generate([prompt], SamplingParams(**options))[0]
    stop = full.text[start : start + length]
    if not stop:
        return
    output = llm.generate([prompt], SamplingParams(**options, stop=stop))[0]
    assert output.text == full.text[: full.text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    assert stop in llm.tokenizer.decode(output.token_ids)


@settings(max_examples=30)
@given(prompt=token_ids, seed=st.integers(0, 100))
def test_an_answer_ends_with_eos_a_stop_token_or_max_tokens(llm, prompt, seed):
    options = {"max_tokens": 15, "temperature": 2.0, "seed": seed}
    full = llm.generate([prompt], SamplingParams(**options, ignore_eos=True))[0].token_ids
    assert len(full) == 15
    (eos,) = llm.tokenizer.eos_token_ids
    for ends, extra in (((eos,), {}), ((eos, full[3]), {"stop_token_ids": [full[3]]})):
        output = llm.generate([prompt], SamplingParams(**options, **extra))[0]
        first = next((n for n, token in enumerate(full) if token in ends), None)
        assert output.token_ids == (full if first is None else full[: first + 1])
        assert output.finish_reason == ("length" if first is None else "stop")


def test_a_stop_string_that_max_tokens_completes_counts_as_a_stop(llm):
    options = {"max_tokens": 6, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    text = llm.generate("hello", SamplingParams(**options))[0].text
    for stop in (text[-1], text[-2:]):
        assert llm.generate("hello", SamplingParams(**options, stop=stop))[0].finish_reason == "stop"
