"""LLM.chat, chat prompts and special tokens."""

import pytest
from support.builders import random_llama, write_gguf, write_hf_folder
from support.llm_cases import TEMPLATE

from minillm import LLM, ChatTemplateError, SamplingParams


def test_special_tokens_are_shown_on_request(llm):
    for seed in range(100):
        options = {"max_tokens": 30, "temperature": 3.0, "seed": seed, "ignore_eos": True}
        output = llm.generate("hello", SamplingParams(**options))[0]
        if 2 in output.token_ids:
            break
    assert "</s>" not in output.text
    assert "</s>" in llm.generate("hello", SamplingParams(**options, skip_special_tokens=False))[0].text


def test_a_chat_prompt_gets_no_second_bos_token(tmp_path):
    def edit(writer):
        writer.add_chat_template(TEMPLATE)
        writer.add_add_bos_token(True)

    path = write_gguf(tmp_path / "bos.gguf", random_llama(vocab_size=262), with_tokenizer=True, edit=edit)
    llm = LLM(path)
    assert llm.encode("hello")[0] == llm.tokenizer.bos_token_id
    token_ids = llm.encode_chat([{"role": "user", "content": "hello"}])
    assert token_ids[:2] == llm.tokenizer.encode("<s>u", add_special_tokens=False)[:2]
    assert token_ids[1] != llm.tokenizer.bos_token_id


def test_a_conversation_reuses_its_cached_prefix(llm):
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    messages = [{"role": "user", "content": "hello"}]
    first = llm.chat(messages, params)
    assert first.prompt_token_ids == llm.tokenizer.encode("<s>user: hello</s><s>assistant:", add_special_tokens=False)
    messages += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "bye"}]
    second = llm.chat(messages, params)
    assert second.metrics.num_cached_tokens >= len(first.prompt_token_ids) // 4 * 4
    streamed = list(llm.stream_chat(messages, params))
    assert [delta.token_id for delta in streamed] == second.token_ids


def test_a_model_without_a_chat_template_refuses_to_chat(tmp_path):
    path, _ = write_hf_folder(tmp_path, with_tokenizer=True)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        LLM(path).chat([{"role": "user", "content": "hi"}])
