"""The default model against transformers in float32 on the same dequantized weights."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from minillm import LLM, SamplingParams
from minillm.bench.exactness import CHAT, PROMPTS

NEW_TOKENS = 24
COMPARE = Path(__file__).parents[2] / "examples" / "compare_with_pytorch.py"


@pytest.fixture(scope="module")
def compare():
    """The names defined in examples/compare_with_pytorch.py."""
    return runpy.run_path(str(COMPARE))


@pytest.fixture(scope="module")
def model(compare, default_gguf):
    return compare["load_transformers"](default_gguf)


@pytest.fixture(scope="module")
def oracle(model, default_gguf):
    """The token ids, logits and greedy tokens of each prompt, computed by transformers from the same file."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)

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
def test_token_ids_logits_and_greedy_tokens(llm, oracle, name):
    prompt = PROMPTS[name]
    expected_ids, expected, expected_greedy = oracle[name]
    ids = llm.encode_chat(prompt) if prompt is CHAT else llm.encode(prompt)
    assert ids == expected_ids

    logits = llm.logits(ids)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 2e-3
    np.testing.assert_array_equal(np.argsort(-logits)[:, :5], np.argsort(-expected)[:, :5])

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert llm.generate([ids], params)[0].token_ids == expected_greedy


def test_probed_arrays(llm, model, compare):
    """Compare all arrays with hooks on the modules of transformers, and streams and weights with its outputs."""
    token_ids = llm.encode(PROMPTS["code"])
    differences = compare["compare"](llm, model, token_ids)
    arrays = llm.probe(token_ids)
    assert arrays.keys() == differences.keys() | {f"layers.{n}.attention.scores" for n in range(llm.config.num_layers)}
    assert max(differences.values()) <= 1e-4, max(differences, key=differences.get)

    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([token_ids]), output_hidden_states=True, output_attentions=True)
    for index, weights in enumerate(expected.attentions):
        name = f"layers.{index}.attention"
        np.testing.assert_allclose(arrays[f"{name}.weights"], weights[0].transpose(0, 1), atol=1e-5)
        scores, positions = arrays[f"{name}.scores"], np.arange(len(token_ids))
        is_later = np.broadcast_to(positions > positions[:, None, None], scores.shape)
        np.testing.assert_array_equal(scores == -np.inf, is_later)
        np.testing.assert_allclose(torch.softmax(torch.tensor(scores), -1), arrays[f"{name}.weights"], atol=1e-6)
    streams = ["embedding", *(f"layers.{index}" for index in range(llm.config.num_layers - 1)), "final_norm"]
    for name, stream in zip(streams, expected.hidden_states, strict=True):
        assert np.abs(arrays[name] - stream[0].numpy()).max() <= 1e-4 * np.abs(stream).max(), name
