"""Files that are shortened after they were opened: reading a tensor raises an error instead of ending the process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from support.builders import random_llama, write_gguf, write_hf_folder

from minillm import LLM, CheckpointError
from minillm.checkpoints import open_checkpoint


def write(kind, folder):
    """Write a model; return its path and the file with its weights."""
    if kind == "gguf":
        path = write_gguf(folder / "tiny.gguf", random_llama(), "Q8_0")
        return path, path
    path, _ = write_hf_folder(folder / "tiny")
    return path, path / "model.safetensors"


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_every_tensor_of_a_shortened_file_is_refused(kind, tmp_path):
    path, file = write(kind, tmp_path)
    checkpoint = open_checkpoint(path)
    size = file.stat().st_size
    os.truncate(file, size // 2)
    for tensor in checkpoint.tensors.values():
        with pytest.raises(
            CheckpointError, match=rf"{file.name}, tensor .*had {size:,} bytes .* now has {size // 2:,}"
        ):
            tensor.read()


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_tensors_that_were_read_do_not_need_the_file(kind, tmp_path):
    path, file = write(kind, tmp_path)
    before, after = ({name: tensor.read() for name, tensor in open_checkpoint(path).tensors.items()} for _ in range(2))
    os.truncate(file, 0)
    for name, tensor in before.items():
        if isinstance(tensor, np.ndarray):
            np.testing.assert_array_equal(tensor, after[name])
        else:
            np.testing.assert_array_equal(tensor.dequantize(), after[name].dequantize())


ANSWER_AFTER_TRUNCATION = """
import os, sys
from minillm import LLM, SamplingParams
llm = LLM(sys.argv[1])
os.truncate(sys.argv[2], 0)
print(len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
"""


def test_a_loaded_model_does_not_need_its_file(tmp_path):
    path, file = write("folder", tmp_path)
    command = [sys.executable, "-c", ANSWER_AFTER_TRUNCATION, path, file]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stdout) == (0, "4\n"), process.stderr


def test_a_file_shortened_while_the_model_loads(tmp_path, monkeypatch):
    path, file = write("gguf", tmp_path)
    monkeypatch.setattr("minillm.llm.KVCache.num_blocks_for", lambda *_: os.truncate(file, 100) or 4)
    with pytest.raises(CheckpointError, match="changed while the model was loading"):
        LLM(path)
