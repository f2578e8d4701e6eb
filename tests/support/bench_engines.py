"""A fake engine for tests of the benchmark, and the config of a tiny model."""

from pathlib import Path

from minillm.model.config import ModelConfig

FAKE_ENGINE = """
import numpy as np

SHIFT = 0

class FakeEngine:
    def load(self, path, threads, **options):
        return {"version": f"fake with {threads}", "weight_bytes": 1000, "kv_bytes_per_token": 10}
    def prefill(self, tokens, repeats):
        return [0.5 * len(tokens)] * repeats
    def fill(self, prompts):
        assert len({len(prompt) for prompt in prompts}) == 1
        self.sequences = len(prompts)
    def decode(self, tokens, repeats):
        assert len(tokens) == self.sequences
        return [0.25] * repeats
    def logits(self, tokens, path):
        np.save(path, np.array([[token, 0.0] for token in tokens]) + SHIFT * len(tokens))
    def requantize(self, source, target, storage, threads):
        open(target, "w").write(storage)

ENGINE = FakeEngine
"""


CONFIG = ModelConfig("llama", 288, 64, 96, 2, 4, 2, 16, 128)


def engine_file(folder, text, name="engine.py"):
    """Write the module of an engine; return its path."""
    file = Path(folder) / name
    file.write_text(text, encoding="utf-8")
    return file
