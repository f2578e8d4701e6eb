"""The engine: requests in, steps, records out. `minillm.engine.engine` has the loop."""

from minillm.engine.config import EngineConfig
from minillm.engine.engine import Engine
from minillm.engine.request import check_token_ids, stream_seed

__all__ = ["Engine", "EngineConfig", "check_token_ids", "stream_seed"]
