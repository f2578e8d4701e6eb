"""The models that the tests of the engine serve."""

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Tiny models with float or quantized weights, and with windows in no layers, all layers or some layers."""
    # These import torch, which the other tests of this folder do not need.
    from support.builders import random_llama, write_gguf
    from support.engine_cases import MODELS, SIZES, ServedModel

    folder = tmp_path_factory.mktemp("models")
    paths = {
        storage: write_gguf(
            folder / f"{storage}.gguf",
            random_llama(seed, **size, vocab_size=262, intermediate_size=32),
            storage,
            with_tokenizer=True,
        )
        for seed, (storage, size) in enumerate(SIZES.items())
    }
    return [ServedModel(paths[storage], *windows) for storage, *windows in MODELS]
