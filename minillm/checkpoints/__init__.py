"""Open model files: read the config, the named tensors and the tokenizer. Every format becomes a `Checkpoint`."""

from __future__ import annotations

from pathlib import Path

from minillm.checkpoints.checkpoint import Checkpoint, StoredTensor
from minillm.checkpoints.gguf_models import open_gguf
from minillm.checkpoints.hf_models import open_folder
from minillm.errors import CheckpointError

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a `.gguf` file, or a folder in Hugging Face format (`config.json` and `*.safetensors`).

    Raises
    ------
    CheckpointError
        A file is missing or damaged, or two files contradict each other.
    UnsupportedError
        The files are valid, but minillm does not implement the model they describe.
    """
    path = Path(path)
    if path.is_dir():
        return open_folder(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: holds weights but no config; open the folder that contains it")
    return open_gguf(path)
