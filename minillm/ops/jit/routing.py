"""Expert routing. It takes only a few numbers per token, so a plain loop without threads is enough."""

from __future__ import annotations

import numpy as np

from minillm.ops.jit.compiling import compiled
from minillm.ops.jit.pointwise import exp


@compiled
def route(scores, count, normalize):
    """Choose the `count` most likely of E experts for every token of [T, E], and their weights; see `reference`."""
    tokens, experts = scores.shape
    chosen, routing_weights = np.empty((tokens, count), np.int64), np.empty((tokens, count), np.float32)
    exponentials = np.empty(experts, np.float32)
    for t in range(tokens):
        largest, total = scores[t].max(), np.float32(0)
        for e in range(experts):
            exponentials[e] = exp(scores[t, e] - largest)
            total += exponentials[e]
        total_chosen = np.float32(0)
        for rank in range(count):
            best = np.argmax(exponentials)
            chosen[t, rank], routing_weights[t, rank] = best, exponentials[best]
            total_chosen += exponentials[best]
            exponentials[best] = -1
        for rank in range(count):
            routing_weights[t, rank] /= total_chosen if normalize else total
    return chosen, routing_weights
