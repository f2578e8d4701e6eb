"""minillm: LLM inference serving you can read, run and step through."""

from minillm.engine import Engine, EngineConfig
from minillm.engine.sampling import SamplingParams
from minillm.errors import (
    BenchmarkError,
    BusyError,
    CapacityError,
    CatalogError,
    ChatTemplateError,
    CheckpointError,
    FallbackWarning,
    LostTextWarning,
    MinillmError,
    NumericError,
    RequestError,
    SlowThreadsWarning,
    TokenizerError,
    TraceError,
    UnsupportedError,
    UnusedFieldsWarning,
)
from minillm.llm import LLM
from minillm.outputs import CompletionOutput, Delta, Metrics, RequestOutput

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "BenchmarkError",
    "BusyError",
    "CapacityError",
    "CatalogError",
    "ChatTemplateError",
    "CheckpointError",
    "CompletionOutput",
    "Delta",
    "Engine",
    "EngineConfig",
    "FallbackWarning",
    "LostTextWarning",
    "Metrics",
    "MinillmError",
    "NumericError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SlowThreadsWarning",
    "TokenizerError",
    "TraceError",
    "UnsupportedError",
    "UnusedFieldsWarning",
]
