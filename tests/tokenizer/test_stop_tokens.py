"""Stop strings that name special tokens."""

import pytest

from minillm import LLM, RequestError, SamplingParams


@pytest.fixture(scope="module")
def llm(default_gguf):
    return LLM(default_gguf, context_length=128)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_that_is_a_special_token_ends_the_answer(llm, skip):
    prompt = llm.encode_chat([{"role": "user", "content": "Say hi."}])
    params = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "skip_special_tokens": skip}
    by_id = llm.generate([prompt], SamplingParams(**params, stop_token_ids=[2]))[0]
    by_text = llm.generate([prompt], SamplingParams(**params, stop="<|im_end|>"))[0]
    assert by_text.finish_reason == by_id.finish_reason == "stop"
    assert by_text.token_ids == by_id.token_ids
    assert by_text.token_ids[-1] == 2
    assert "<|im_end|>" not in by_text.text


def test_a_stop_string_around_a_special_token_is_refused(llm):
    params = SamplingParams(max_tokens=2, stop="<|im_end|>\n")
    with pytest.raises(RequestError, match=r"contains a special token, .* stop_token_ids, or set skip_special_tokens"):
        llm.generate("Hi", params)
    unskipped = SamplingParams(max_tokens=2, stop="<|im_end|>\n", skip_special_tokens=False)
    assert len(llm.generate("Hi", unskipped)[0].token_ids) <= 2
