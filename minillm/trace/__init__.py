"""What happened in a run, step by step: events, records, the trace file, and the metrics computed from them."""

from minillm.reprs import sequence_name
from minillm.trace.events import (
    DECODE,
    PREFILL,
    Admission,
    Arrival,
    BlockCopy,
    Finish,
    Preemption,
    SampledToken,
    ScheduledChunk,
)
from minillm.trace.file import Trace
from minillm.trace.json_reader import from_json, to_json
from minillm.trace.metrics import RequestMetrics, RunMetrics, percentile, request_metrics, run_metrics
from minillm.trace.records import FREED, STAGES, PoolState, RunFacts, RunningSequence, StepRecord

__all__ = [
    "DECODE",
    "FREED",
    "PREFILL",
    "STAGES",
    "Admission",
    "Arrival",
    "BlockCopy",
    "Finish",
    "PoolState",
    "Preemption",
    "RequestMetrics",
    "RunFacts",
    "RunMetrics",
    "RunningSequence",
    "SampledToken",
    "ScheduledChunk",
    "StepRecord",
    "Trace",
    "from_json",
    "percentile",
    "request_metrics",
    "run_metrics",
    "sequence_name",
    "to_json",
]
