"""The default model: requests that share an engine too small for them answer with the bits of each alone."""

import random

from minillm import LLM, EngineConfig, SamplingParams

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "quiet", "hills", "and", "ships"]


def test_requests_in_a_pool_that_preempts_and_each_alone(default_gguf):
    drawn = random.Random(0)
    beginnings = [" ".join(drawn.choices(WORDS, k=12)) for _ in range(3)]
    prompts = [f"{drawn.choice(beginnings)} {' '.join(drawn.choices(WORDS, k=3))}" for _ in range(24)]
    params = [
        SamplingParams(max_tokens=drawn.randint(4, 16), temperature=seed % 2, seed=seed, logprobs=True, ignore_eos=True)
        for seed in range(24)
    ]
    config = EngineConfig(num_blocks=10, block_size=4, max_sequences=24, max_batch_tokens=48, watermark=0)
    llm, preempted, found = LLM(default_gguf, engine=config), [], []
    llm.engine.listeners.append(lambda record: preempted.extend(record.preempted))
    llm.engine.listeners.append(lambda record: found.extend(record.prefix_hits))
    together = llm.generate(prompts, params)
    assert len(preempted) > 10
    assert len(found) > 10
    assert llm.engine.scheduler.blocks.num_held == 0
    for prompt, how, output in zip(prompts, params, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate(prompt, how)
        assert (alone.token_ids, alone.logprobs, alone.text) == (output.token_ids, output.logprobs, output.text)
