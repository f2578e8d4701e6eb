"""The engine: requests in, steps, records out. See `minillm.engine.engine` for the loop."""

from minillm.engine.config import EngineConfig
from minillm.engine.engine import Engine, check_token_ids, stream_seed

__all__ = ["Engine", "EngineConfig", "check_token_ids", "stream_seed"]
