"""The default model: requests in a pool too small for all of them get the same bits as each alone."""

import random

from minillm import LLM, EngineConfig, SamplingParams

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "quiet", "hills", "and", "ships"]


def test_requests_get_the_same_bits_in_a_pool_that_preempts_as_alone(default_gguf):
    rng = random.Random(0)
    prefixes = [" ".join(rng.choices(WORDS, k=12)) for _ in range(3)]
    prompts = [f"{rng.choice(prefixes)} {' '.join(rng.choices(WORDS, k=3))}" for _ in range(24)]
    params = [
        SamplingParams(max_tokens=rng.randint(4, 16), temperature=seed % 2, seed=seed, logprobs=True, ignore_eos=True)
        for seed in range(24)
    ]
    config = EngineConfig(num_blocks=10, block_size=4, max_sequences=24, max_batch_tokens=48, watermark=0)
    llm, preempted, prefix_hits = LLM(default_gguf, engine=config), [], []
    llm.engine.listeners.append(lambda record: preempted.extend(record.preempted))
    llm.engine.listeners.append(lambda record: prefix_hits.extend(record.prefix_hits))
    together = llm.generate(prompts, params)
    assert len(preempted) > 10
    assert len(prefix_hits) > 10
    assert llm.engine.scheduler.blocks.num_held == 0
    for prompt, sampling, output in zip(prompts, params, together, strict=True):
        llm.reset_prefix_cache()
        (expected,) = llm.generate(prompt, sampling)
        assert (output.token_ids, output.logprobs, output.text) == (
            expected.token_ids,
            expected.logprobs,
            expected.text,
        )
