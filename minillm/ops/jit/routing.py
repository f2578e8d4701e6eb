"""Which experts a token takes: a few numbers a token, so one plain loop."""

from __future__ import annotations

import numpy as np

from minillm.ops.jit.compiling import compiled
from minillm.ops.jit.pointwise import exp


@compiled
def route(scores, count, normalize):
    """The `count` likeliest of E experts for every token of [T, E], and their routing_weights; see `reference`."""
    tokens, experts = scores.shape
    chosen, routing_weights = np.empty((tokens, count), np.int64), np.empty((tokens, count), np.float32)
    likely = np.empty(experts, np.float32)
    for t in range(tokens):
        largest, total = scores[t].max(), np.float32(0)
        for e in range(experts):
            likely[e] = exp(scores[t, e] - largest)
            total += likely[e]
        taken = np.float32(0)
        for rank in range(count):
            best = np.argmax(likely)
            chosen[t, rank], routing_weights[t, rank] = best, likely[best]
            taken += likely[best]
            likely[best] = -1
        for rank in range(count):
            routing_weights[t, rank] /= taken if normalize else total
    return chosen, routing_weights
