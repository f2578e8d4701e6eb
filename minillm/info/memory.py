"""What memory this machine has, and what of a model's keys and values fits into it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from minillm.engine import EngineConfig
from minillm.engine.block_demand import max_live_blocks
from minillm.model.config import ModelConfig
from minillm.model.kv_cache import CacheShape
from minillm.trace.roofline import kv_bytes_per_token

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # version 2; where a container's limit stands
SHORTEST, STEP = 1024, 4  # contexts that are worked out: this long, and then so many times as long as the one before


@dataclass(frozen=True)
class Memory:
    """Bytes of memory: all there is, and what programs could still be given."""

    total: int
    available: int


def find_memory() -> Memory | None:
    """This machine's memory, or the container's; None where the system does not tell.

    Only Linux tells what is available; elsewhere all counts as such.
    """
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no such call
        return None
    available = min(_available() or total, total)
    if (limit := _number(CONTROL_GROUP / "memory.max")) and limit < total:
        used = _number(CONTROL_GROUP / "memory.current") or 0
        total, available = limit, min(available, max(limit - used, 0))
    return Memory(total, available)


def _available() -> int | None:
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def _number(path: Path) -> int | None:
    """What a file of one number holds; None if there is no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def contexts(longest: int) -> list[int]:
    """Lengths of context to look at, the model's longest the last."""
    lengths, length = [], SHORTEST
    while length < longest:
        lengths.append(length)
        length *= STEP
    return [*lengths, longest]


def positions_held(context: int, window: int | None, engine: EngineConfig) -> int:
    """For how many positions a sequence of `context` has blocks at most, at any one time, in layers of this window.

    What lies behind the window is given back as the sequence grows.
    """
    if window is None:
        return context
    num_blocks = max_live_blocks(context, engine.max_batch_tokens, engine.block_size, [window])
    return min(context, num_blocks * engine.block_size)


def sequence_bytes(config: ModelConfig, context: int, bytes_per_number: int, engine: EngineConfig) -> int:
    """Bytes of keys and values that a sequence of `context` positions holds at most, at any one time."""
    shape = CacheShape.from_config(config)
    positions = sum(positions_held(context, window, engine) for window in shape.windows)
    return positions * shape.layers_per_block * kv_bytes_per_token(config, bytes_per_number) // config.num_layers


def sequences_that_fit(free: int, num_bytes: int) -> int:
    """How many sequences that hold `num_bytes` each have room in `free` bytes, which may be less than none."""
    return max(free, 0) // num_bytes
