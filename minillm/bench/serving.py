"""Serving in a closed loop, where each client waits for its answer, on this machine or on a simulated one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import cast

import numpy as np

from minillm.engine import Engine, EngineConfig
from minillm.engine.sampling import SamplingParams
from minillm.errors import RequestError
from minillm.model.batch import Batch
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import CacheShape, KVCache
from minillm.model.transformer import Transformer
from minillm.ops import backend
from minillm.trace import Trace
from minillm.trace.roofline import ModelCosts, Roofline, step_work


def serve_clients(engine: Engine, requests: Iterable[tuple[list[int], int]], clients: int) -> Trace:
    """Serve requests to `clients` clients, each of which sends the next one when it has its answer; return the trace.

    A request is a prompt and the exact number of tokens of its answer.
    """
    trace = Trace(engine.facts)
    engine.listeners.append(trace.append)
    remaining = iter(requests)

    def send(count: int) -> None:
        for prompt, length in islice(remaining, count):
            engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True))

    send(clients)
    while engine.has_unfinished:
        send(len(engine.step().finished))
    engine.listeners.remove(trace.append)
    return trace


class SimulatedTransformer:
    """A transformer that computes nothing. Each step takes the shortest time that a roofline allows.

    Parameters
    ----------
    costs : the costs of the simulated model.
    roofline : the roofline of the simulated machine.

    Attributes
    ----------
    now : simulated seconds that all steps so far have taken.
    """

    config = ModelConfig("simulated", 2, 1, 1, 1, 1, num_kv_heads=1, head_dim=1, context_length=2**20)

    def __init__(self, costs: ModelCosts, roofline: Roofline):
        self.costs, self.roofline, self.now = costs, roofline, 0.0
        self.weight_bytes, self.ops = costs.weight_bytes, backend("numpy")
        self.cache_shape = CacheShape.from_config(self.config)

    def forward(self, batch: Batch, kv_cache: KVCache, **_: object) -> np.ndarray:
        """Return scores [S, 2] that are all 0, and advance the clock. Probes are not called."""
        starts = batch.positions[batch.query_starts[:-1]].tolist()
        chunks = zip(starts, np.diff(batch.query_starts).tolist(), strict=True)
        self.now += self.roofline.seconds(step_work(self.costs, chunks))
        return np.zeros((len(starts), self.config.vocab_size), np.float32)


class SimulatedEngine(Engine):
    """The real engine and scheduler around a `SimulatedTransformer`, with its clock."""

    def __init__(self, costs: ModelCosts, roofline: Roofline, options: EngineConfig):
        if options.num_blocks is None:
            raise RequestError("a simulated engine needs num_blocks: its model has no natural context length")
        simulated = SimulatedTransformer(costs, roofline)
        cache = KVCache(simulated.config, options.num_blocks, options.block_size)
        self._simulated = simulated
        super().__init__(cast(Transformer, simulated), cache, options.scheduler(cache), model="simulated")

    def clock(self) -> float:
        """Return the simulated time in seconds."""
        return self._simulated.now
