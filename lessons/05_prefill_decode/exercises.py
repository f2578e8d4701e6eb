"""Lesson 5's exercises. `pytest lessons/05_prefill_decode` tells you whether they are right."""

from collections.abc import Sequence

from minillm.model.config import ModelConfig
from minillm.trace.roofline import Work

ANSWERS = {
    "layer_flops": "minillm.trace.roofline.layer_flops",
    "prefill_work": "minillm.trace.roofline.prefill_work",
    "decode_work": "minillm.trace.roofline.decode_work",
}


def layer_flops(config: ModelConfig) -> int:
    """Operations that one token costs in the matrix products of all layers: two a weight.

    A layer's matrices are q, k, v and the output of attention, and gate, up and down of the feed-forward part. Mind
    that queries have `num_heads` heads, keys and values `num_kv_heads`, and that a head's size, `head_dim`, need not be
    `hidden_size / num_heads`. Embedding and head are no part of a layer; norms and biases are too small to count.

    Hint: `config.tensor_shapes()` names every tensor of the model.
    """
    raise NotImplementedError("your turn")


def prefill_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int) -> Work:
    """What one prompt of `num_tokens` computes and moves: a `Work(num_bytes=..., flops=...)`.

    Operations: every token goes through the layers (`layer_flops`), and only the last through the head, which costs two
    a weight, too. Each token looks at itself and at all before it: four operations for each number of a query head, in
    each head of each layer. Bytes: the weights are read once, and the keys and values of every token once.
    """
    raise NotImplementedError("your turn")


def decode_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, contexts: Sequence[int]) -> Work:
    """What one step computes and moves that adds one token to each sequence; s has `contexts[s]` tokens before it.

    Each new token goes through layers and head, and looks at those before it and at itself. All sequences share one
    reading of the weights; keys and values, those of the new tokens included, are each sequence's own.
    """
    raise NotImplementedError("your turn")
