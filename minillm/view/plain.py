"""One step as one plain line, for pipes, logs and grep."""

from __future__ import annotations

import re
from collections.abc import Iterable

from minillm.trace import DECODE, PREFILL, RunFacts, StepRecord, sequence_name

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def plain_header(facts: RunFacts) -> str:
    """Return the facts of a run as one line of `key=value` fields."""
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
    """Return a step as one line of `key=value` fields. The keys and their order never change; "-" is an empty list.

    Commas separate the items of a list. Text is quoted like a Python string, and so is every name with characters other
    than letters, digits, dots, dashes and underscores. No character can therefore break the line or control a terminal.

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
        "prefill": _list(f"{quoted(c.name)}[{c.start}:{c.stop}]" for c in record.chunks if c.phase == PREFILL),
        "decode": _list(quoted(c.name) for c in record.chunks if c.phase == DECODE),
        "arrived": _list(f"{quoted(a.request_id)}[{a.num_prompt_tokens}+{a.max_tokens}]" for a in record.arrived),
        "admitted": _list(quoted(a.name) for a in record.admitted),
        "hits": _list(f"{quoted(a.name)}:{a.num_cached_tokens}" for a in record.admitted if a.num_cached_tokens),
        "preempted": _list(f"{quoted(p.name)}:{p.num_computed}" for p in record.preempted),
        "finished": _list(f"{quoted(f.name)}:{quoted(f.reason)}" for f in record.finished),
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
    """Return `name` if it is a plain name, else its Python string literal."""
    return name if PLAIN_NAME.fullmatch(name) else repr(name)


def _list(items: Iterable[str]) -> str:
    return ",".join(items) or "-"


def _fields(values: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
