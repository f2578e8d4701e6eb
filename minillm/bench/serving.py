"""Serving in a closed loop: clients that wait for their answer, on a real machine or on a model of one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from minillm.engine import Engine, EngineConfig
from minillm.engine.sampling import SamplingParams
from minillm.model.batch import Batch
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import CacheShape, KVCache
from minillm.ops import backend
from minillm.trace import Trace
from minillm.trace.roofline import ModelCosts, Roofline, step_work


def serve_clients(engine: Engine, requests: Iterable[tuple[list[int], int]], clients: int) -> Trace:
    """The trace of so many clients, each of whom sends the next request when it has its answer.

    A request is a prompt and how many tokens its answer shall have: exactly so many.
    """
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    requests = iter(requests)

    def send(count: int) -> None:
        for prompt, length in islice(requests, count):
            engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True))

    send(clients)
    while engine.has_unfinished:
        send(len(engine.step().finished))
    engine.listeners.remove(trace.append)
    return trace


class ImaginedTransformer:
    """A transformer that computes nothing, and takes for each step the time that a roofline allows it at best.

    Parameters
    ----------
    costs : of the model that is imagined.
    roofline : of the machine.

    Attributes
    ----------
    now : seconds that all steps so far would have taken.
    """

    config = ModelConfig("imagined", 2, 1, 1, 1, 1, num_kv_heads=1, head_dim=1, context_length=2**20)

    def __init__(self, costs: ModelCosts, roofline: Roofline):
        self.costs, self.roofline, self.now = costs, roofline, 0.0
        self.weight_bytes, self.ops = costs.weight_bytes, backend("numpy")
        self.cache_shape = CacheShape.from_config(self.config)

    def forward(self, batch: Batch, kv_cache: KVCache, **_: object) -> np.ndarray:
        """Scores [S, 2] that are all 0; a probe is shown nothing."""
        starts = batch.positions[batch.query_starts[:-1]].tolist()
        chunks = zip(starts, np.diff(batch.query_starts).tolist(), strict=True)
        self.now += self.roofline.seconds(step_work(self.costs, chunks))
        return np.zeros((len(starts), self.config.vocab_size), np.float32)


class ImaginedEngine(Engine):
    """The engine and its scheduler as they are, around an `ImaginedTransformer`, whose clock is theirs."""

    def __init__(self, costs: ModelCosts, roofline: Roofline, options: EngineConfig):
        transformer = ImaginedTransformer(costs, roofline)
        cache = KVCache(transformer.config, options.num_blocks, options.block_size)
        super().__init__(transformer, cache, options.scheduler(cache), model="imagined")

    def clock(self) -> float:
        """Seconds of the imagined machine."""
        return self.transformer.now
