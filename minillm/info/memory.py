"""The memory of this machine, and how many sequences' keys and values fit into it."""

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
CONTROL_GROUP = Path("/sys/fs/cgroup")  # version 2; holds the memory limit of a container
FIRST_CONTEXT, FACTOR = 1024, 4  # contexts in the table: the shortest, and the factor from one to the next


@dataclass(frozen=True)
class Memory:
    """The machine's total memory, and the part available to programs, in bytes."""

    total: int
    available: int


def find_memory() -> Memory | None:
    """Return this machine's memory, or the container's; None if the system does not report it.

    Only Linux reports what is available. Elsewhere, all memory counts as available.
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
    """Read a number from a file; return None if the file does not exist or contains "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def contexts(longest: int) -> list[int]:
    """Return the lengths of context for the table; the last is the model's own."""
    lengths, length = [], FIRST_CONTEXT
    while length < longest:
        lengths.append(length)
        length *= FACTOR
    return [*lengths, longest]


def positions_held(context: int, window: int | None, engine: EngineConfig) -> int:
    """Return the maximum number of positions that a sequence of length `context` holds, in layers with this window.

    Blocks before the window are freed as the sequence grows.
    """
    if window is None:
        return context
    num_blocks = max_live_blocks(context, engine.max_batch_tokens, engine.block_size, [window])
    return min(context, num_blocks * engine.block_size)


def sequence_bytes(config: ModelConfig, context: int, bytes_per_number: int, engine: EngineConfig) -> int:
    """Return the maximum size, in bytes, of the keys and values that a sequence of length `context` holds."""
    shape = CacheShape.from_config(config)
    positions = sum(positions_held(context, window, engine) for window in shape.windows)
    return positions * shape.layers_per_block * kv_bytes_per_token(config, bytes_per_number) // config.num_layers


def sequences_that_fit(free: int, num_bytes: int) -> int:
    """Return how many sequences of `num_bytes` each fit into `free` bytes, which may be negative."""
    return max(free, 0) // num_bytes
