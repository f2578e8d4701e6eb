"""`minillm info`: describe a model without loading it."""

from __future__ import annotations

from rich.console import Console

from minillm import catalog
from minillm.checkpoints import open_checkpoint
from minillm.info.memory import Memory, find_memory
from minillm.info.report import show


def run(model: str | None, *, memory_gigabytes: float | None = None) -> None:
    """Print the facts of a model, which is found and, if necessary, fetched as by `LLM`.

    Parameters
    ----------
    model : as for `LLM`; None for the default model.
    memory_gigabytes : available memory to assume; None for this machine's.

    Raises
    ------
    CatalogError, CheckpointError, UnsupportedError, TokenizerError
        The model cannot be found, is damaged, or needs something that is not supported.
    ValueError
        `memory_gigabytes` is not a finite number above 0.
    """
    memory = find_memory()
    if memory_gigabytes is not None:
        if not 0 < memory_gigabytes < float("inf"):
            raise ValueError(f"--memory is {memory_gigabytes}; it must be a finite number of gigabytes, above 0")
        memory = Memory(total=int(memory_gigabytes * 1e9), available=int(memory_gigabytes * 1e9))
    show(open_checkpoint(catalog.resolve(model)), memory, Console())
