"""A tiny model with a tokenizer and a chat template."""

import pytest
from support.builders import random_llama, write_gguf
from support.llm_cases import TEMPLATE

from minillm import LLM, EngineConfig


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    """A GGUF file with a tiny random Llama in Q8_0, a tokenizer of 262 tokens and a chat template."""

    def add_template(writer):
        writer.add_chat_template(TEMPLATE)

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, random_llama(vocab_size=262), "Q8_0", with_tokenizer=True, edit=add_template)


@pytest.fixture(scope="session")
def llm(model_file):
    """An LLM with the tiny model and blocks of 4 positions. All other settings are the defaults."""
    return LLM(model_file, engine=EngineConfig(block_size=4))
