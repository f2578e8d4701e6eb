"""The exercises of lesson 5. Run `pytest lessons/05_prefill_decode` to test your solutions."""

from collections.abc import Sequence

from minillm.model.config import ModelConfig
from minillm.trace.roofline import Work

ANSWERS = {
    "layer_flops": "minillm.trace.roofline.layer_flops",
    "prefill_work": "minillm.trace.roofline.prefill_work",
    "decode_work": "minillm.trace.roofline.decode_work",
}


def layer_flops(config: ModelConfig) -> int:
    """Return the operations of one token in the matrix products of all layers: two per weight.

    A layer's matrices are q, k, v and the output of attention, and gate, up and down of the feed-forward layer. Queries
    have `num_heads` heads, keys and values have `num_kv_heads`, and the size of a head, `head_dim`, can differ from
    `hidden_size / num_heads`. Embedding and head do not belong to a layer; norms and biases are too small to count.

    Hint: `config.tensor_shapes()` lists every tensor of the model.
    """
    raise NotImplementedError("your turn")


def prefill_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, num_tokens: int) -> Work:
    """Return the work of one prompt of `num_tokens` tokens: a `Work(num_bytes=..., flops=...)`.

    Operations: every token passes through the layers (`layer_flops`), but only the last one through the head, which
    also costs two operations per weight. Each token reads itself and all earlier ones: four operations for each number
    of a query head, in each head of each layer. Bytes: the weights are read once, and the keys and values of every
    token once.
    """
    raise NotImplementedError("your turn")


def decode_work(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int, contexts: Sequence[int]) -> Work:
    """Return the work of a step that adds one token to each sequence; sequence s has `contexts[s]` tokens before it.

    Each new token passes through layers and head, and reads itself and all earlier tokens of its sequence. The weights
    are read once for all sequences. Each sequence has its own keys and values, also for its new token.
    """
    raise NotImplementedError("your turn")
