"""Hugging Face transformers on PyTorch's CPU kernels."""

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers


class Transformers:
    """See `minillm.bench.engines`."""

    def load(self, path: str, threads: int, dtype: str) -> dict[str, Any]:
        """Load the model as `dtype`, "float32" or "bfloat16". A GGUF file is dequantized."""
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        file = Path(path)
        source = (
            {"pretrained_model_name_or_path": path}
            if file.is_dir()
            else {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, dtype))
        self.model = model.eval()
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def prefill(self, tokens: list[int], repeats: int) -> list[float]:
        """Time the prompt, with a new cache each time."""
        return [self._timed_forward(torch.tensor([tokens]), transformers.DynamicCache()) for _ in range(repeats)]

    def fill(self, prompts: list[list[int]]) -> None:
        """Compute all prompts in one batch."""
        self.cache = transformers.DynamicCache()
        self.model(torch.tensor(prompts), past_key_values=self.cache, logits_to_keep=1)

    def decode(self, tokens: list[int], repeats: int) -> list[float]:
        """Time steps. What a step adds to the cache is removed after it."""
        seconds = []
        for _ in range(repeats):
            seconds.append(self._timed_forward(torch.tensor(tokens)[:, None], self.cache))
            self.cache.crop(-1)
        return seconds

    def logits(self, tokens: list[int], path: str) -> None:
        """Save the logits to `path`, as float32."""
        np.save(path, self.model(torch.tensor([tokens])).logits[0].float().numpy())

    def _timed_forward(self, tokens: torch.Tensor, cache: transformers.DynamicCache) -> float:
        started = perf_counter()
        self.model(tokens, past_key_values=cache, logits_to_keep=1)
        return perf_counter() - started


ENGINE = Transformers
