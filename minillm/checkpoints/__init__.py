"""Bytes on disk -> config, named tensors, tokenizer. One module per file format, one `Checkpoint` from all."""

from __future__ import annotations

from pathlib import Path

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor
from minillm.checkpoints.gguf_models import open_gguf
from minillm.checkpoints.hf_models import open_folder
from minillm.errors import CheckpointError

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a `.gguf` file, or a folder in Hugging Face's layout (`config.json` and `*.safetensors`).

    Raises
    ------
    CheckpointError when files are absent, damaged, or contradict each other.
    UnsupportedError when they are in order but describe a model that is not implemented here.
    """
    path = Path(path)
    if path.is_dir():
        return open_folder(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: holds weights but no config; open the folder it lies in")
    return open_gguf(path)
