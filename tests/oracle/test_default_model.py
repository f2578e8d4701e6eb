"""The default model against transformers in float32 on the same dequantized weights."""

import numpy as np
import pytest
import torch
import transformers

from minillm import LLM, SamplingParams
from minillm.bench.exactness import CHAT, PROMPTS

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def oracle(default_gguf):
    """What transformers makes of each prompt, from the same file: ids, logits, greedy continuation."""
    where = {"pretrained_model_name_or_path": default_gguf.parent, "gguf_file": default_gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)

    def answer(prompt):
        if prompt is CHAT:
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
            greedy = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0
            )
        return ids, logits, greedy[0, len(ids) :].tolist()

    return {name: answer(prompt) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module", params=["numba", "numpy"])
def llm(request, default_gguf):
    return LLM(default_gguf, backend=request.param, context_length=256)


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_logits_and_greedy_tokens(llm, oracle, name):
    prompt = PROMPTS[name]
    expected_ids, expected, continued = oracle[name]
    ids = llm.encode_chat(prompt) if prompt is CHAT else llm.encode(prompt)
    assert ids == expected_ids

    logits = llm.logits(ids)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 2e-3
    np.testing.assert_array_equal(np.argsort(-logits)[:, :5], np.argsort(-expected)[:, :5])

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert llm.generate([ids], params)[0].token_ids == continued
