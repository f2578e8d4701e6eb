"""A step as one plain line: for pipes, logs and grep, where no terminal is."""

from __future__ import annotations

import re
from collections.abc import Iterable

from minillm.trace import DECODE, PREFILL, RunFacts, StepRecord, sequence_name

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def plain_header(facts: RunFacts) -> str:
    """The run, as one line of `key=value` fields."""
    values = {
        "model": quoted(facts.model),
        "policy": quoted(facts.policy),
        "admission": quoted(facts.admission),
        "blocks": f"{facts.num_blocks}x{facts.block_size}",
        "max_batch_tokens": facts.max_batch_tokens,
        "max_sequences": facts.max_sequences,
        "watermark": facts.watermark,
        "prefix_caching": "yes" if facts.prefix_caching else "no",
    }
    return "run " + _fields(values)


def plain_line(record: StepRecord) -> str:
    """The step, as one line of `key=value` fields: always the same keys in the same order, "-" for an empty list.

    Lists are separated by commas. Names that hold anything but letters, digits, dots, dashes and underscores, and all
    text, are quoted as Python quotes strings, so that no character can break the line or drive a terminal.

        step=3 tokens=9 running=2 waiting=1 held=7 cached=0 free=1 prefill=b[0:8] decode=a ... text=a:' the'
    """
    pool = record.pool
    values = {
        "step": record.step,
        "tokens": record.num_tokens,
        "running": len(record.running),
        "waiting": record.num_waiting,
        "held": pool.num_held,
        "cached": pool.num_cached,
        "free": pool.num_free,
        "prefill": _list(
            f"{_name(c)}[{c.start}:{c.start + c.num_tokens}]" for c in record.chunks if c.phase == PREFILL
        ),
        "decode": _list(_name(c) for c in record.chunks if c.phase == DECODE),
        "arrived": _list(f"{quoted(a.request_id)}[{a.num_prompt_tokens}+{a.max_tokens}]" for a in record.arrived),
        "admitted": _list(_name(a) for a in record.admitted),
        "found": _list(f"{_name(a)}:{a.num_cached_tokens}" for a in record.admitted if a.num_cached_tokens),
        "preempted": _list(f"{_name(p)}:{p.num_computed}" for p in record.preempted),
        "finished": _list(f"{_name(f)}:{quoted(f.reason)}" for f in record.finished),
        "queue": _list(quoted(name) for name in record.waiting),
        "evicted": _list(str(block) for block in pool.evicted),
        "copied": _list(f"{copy.source}>{copy.target}" for copy in pool.copies),
        "ms": f"{sum(record.milliseconds.values()):.2f}",
        "text": _list(
            f"{quoted(sequence_name(chunk.request_id, token.completion))}:{token.text!r}"
            for chunk in record.chunks
            for token in chunk.sampled
        ),
    }
    return _fields(values)


def quoted(name: str) -> str:
    """`name` if it is a plain one, else as Python quotes it."""
    return name if PLAIN_NAME.fullmatch(name) else repr(name)


def _name(part: object) -> str:
    return quoted(sequence_name(part.request_id, part.completion))


def _list(items: Iterable[str]) -> str:
    return ",".join(items) or "-"


def _fields(values: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
