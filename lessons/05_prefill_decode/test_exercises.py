"""Tests of the exercises of lesson 5."""

from dataclasses import replace

import pytest

from minillm.model.config import ModelConfig

# V = 100, D = 8, F = 16, L = 3, H = 4, G = 2, K = 5 (and not D / H). Weights of a layer:
#     q 20 * 8, k and v 10 * 8 each, output 8 * 20, gate, up and down 16 * 8 each: 864
SMALL = ModelConfig("llama", 100, 8, 16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=5, context_length=64)
LAYERS = 2 * 3 * 864
HEAD = 2 * 100 * 8
READ = 4 * 3 * 4 * 5  # one token reading one token

# layer_flops


def test_layer_flops_are_two_for_every_weight_of_every_layer(exercises):
    assert exercises.layer_flops(SMALL) == LAYERS
    assert exercises.layer_flops(replace(SMALL, num_layers=6)) == 2 * LAYERS


@pytest.mark.parametrize(
    ("change", "weights"),
    [
        ({"num_kv_heads": 1}, 864 - 2 * 5 * 8),  # half the keys and values
        ({"intermediate_size": 17}, 864 + 3 * 8),
        ({"vocab_size": 7}, 864),  # not part of a layer
        ({"tie_embeddings": True}, 864),
        ({"attention_bias": True, "mlp_bias": True}, 864),  # biases are not counted
    ],
)
def test_layer_flops_count_each_matrix(exercises, change, weights):
    assert exercises.layer_flops(replace(SMALL, **change)) == 2 * 3 * weights


def test_layer_flops_of_a_known_model(exercises):
    llama_3_8b = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192)
    assert exercises.layer_flops(llama_3_8b) == 13_958_643_712  # 2 for each of 6.98 billion weights


# prefill_work


@pytest.mark.parametrize(("tokens", "reads"), [(1, 1), (2, 3), (10, 55)])
def test_prefill_work_counts_the_tokens_that_each_token_reads(exercises, tokens, reads):
    assert exercises.prefill_work(SMALL, 0, 0, tokens).flops == tokens * LAYERS + HEAD + reads * READ


def test_prefill_work_reads_the_weights_once_and_the_cache_once_a_token(exercises):
    assert exercises.prefill_work(SMALL, 1000, 30, 1).num_bytes == 1030
    assert exercises.prefill_work(SMALL, 1000, 30, 50).num_bytes == 2500


def test_prefill_work_grows_more_intense_with_length(exercises):
    intensities = [exercises.prefill_work(SMALL, 7000, 30, tokens).intensity for tokens in (1, 2, 4, 8, 16)]
    assert intensities == sorted(intensities)
    assert intensities[-1] > 8 * intensities[0]


# decode_work


def test_decode_work_of_one_sequence_counts_the_token_itself(exercises):
    assert exercises.decode_work(SMALL, 0, 0, [0]).flops == LAYERS + HEAD + READ
    assert exercises.decode_work(SMALL, 0, 0, [9]).flops == LAYERS + HEAD + 10 * READ
    assert exercises.decode_work(SMALL, 1000, 30, [9]).num_bytes == 1300


def test_decode_work_shares_the_weights_but_not_the_cache(exercises):
    work = exercises.decode_work(SMALL, 1000, 30, [9, 19, 4])
    assert work.num_bytes == 1000 + 30 * (10 + 20 + 5)
    assert work.flops == 3 * (LAYERS + HEAD) + 35 * READ


def test_decode_work_after_a_prompt_is_what_the_longer_prompt_would_add(exercises):
    for tokens in (1, 5, 20):
        longer, shorter = (exercises.prefill_work(SMALL, 0, 30, n) for n in (tokens + 1, tokens))
        step = exercises.decode_work(SMALL, 0, 30, [tokens])
        assert step.flops == longer.flops - shorter.flops + HEAD
        assert step.num_bytes == longer.num_bytes
