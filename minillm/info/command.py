"""`minillm info`: what a model is, before anything of it is loaded."""

from __future__ import annotations

from rich.console import Console

from minillm import catalog
from minillm.checkpoints import open_checkpoint
from minillm.info.memory import Memory, find_memory
from minillm.info.report import show


def run(model: str | None, *, memory_gigabytes: float | None = None) -> None:
    """Print the facts of a model, found (and fetched, if it must be) as `LLM` finds it.

    Parameters
    ----------
    model : as `LLM` takes it; None for the default model.
    memory_gigabytes : what to reckon with instead of what this machine has available.

    Raises
    ------
    CatalogError, CheckpointError, UnsupportedError, TokenizerError
        The model cannot be found, is damaged, or asks for what is not supported.
    ValueError
        `memory_gigabytes` is not over 0 and finite.
    """
    memory = find_memory()
    if memory_gigabytes is not None:
        if not 0 < memory_gigabytes < float("inf"):
            raise ValueError(f"--memory is {memory_gigabytes}; it must be a finite number of gigabytes, over 0")
        memory = Memory(*[int(memory_gigabytes * 1e9)] * 2)
    show(open_checkpoint(catalog.resolve(model)), memory, Console())
