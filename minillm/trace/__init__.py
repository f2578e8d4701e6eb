"""What happened in a run, step by step: records, the file that keeps them, and what can be measured from them."""

from minillm.engine.block_allocator import GIVEN_BACK, held, num_held
from minillm.trace.file import Trace, from_json, to_json
from minillm.trace.metrics import RequestMetrics, RunMetrics, percentile, request_metrics, run_metrics
from minillm.trace.records import (
    DECODE,
    PREFILL,
    STAGES,
    Admission,
    Arrival,
    BlockCopy,
    ChunkRecord,
    Finish,
    PoolState,
    Preemption,
    RunFacts,
    RunningSequence,
    SampledToken,
    StepRecord,
    sequence_name,
)

__all__ = [
    "DECODE",
    "GIVEN_BACK",
    "PREFILL",
    "STAGES",
    "Admission",
    "Arrival",
    "BlockCopy",
    "ChunkRecord",
    "Finish",
    "PoolState",
    "Preemption",
    "RequestMetrics",
    "RunFacts",
    "RunMetrics",
    "RunningSequence",
    "SampledToken",
    "StepRecord",
    "Trace",
    "from_json",
    "held",
    "num_held",
    "percentile",
    "request_metrics",
    "run_metrics",
    "sequence_name",
    "to_json",
]
