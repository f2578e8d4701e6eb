"""minillm: LLM inference serving you can read, run and step through."""

from minillm.errors import (
    BenchmarkError,
    BusyError,
    CapacityError,
    CatalogError,
    ChatTemplateError,
    CheckpointError,
    MinillmError,
    NumericError,
    RequestError,
    TokenizerError,
    TraceError,
    UnsupportedError,
)
from minillm.llm import LLM, Delta, Metrics, RequestOutput
from minillm.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BenchmarkError",
    "BusyError",
    "CapacityError",
    "CatalogError",
    "ChatTemplateError",
    "CheckpointError",
    "Delta",
    "Metrics",
    "MinillmError",
    "NumericError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenizerError",
    "TraceError",
    "UnsupportedError",
]
