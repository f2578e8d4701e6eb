"""Compare every intermediate result with PyTorch's, layer by layer, on the same weights.

    python examples/compare_with_pytorch.py
    python examples/compare_with_pytorch.py --backend numpy --prompt "def fibonacci(n):"

Both models compute in float32 but add in different orders, so their last bits differ. Each printed number is the
largest difference between two arrays, divided by the largest value of PyTorch's array. The script needs PyTorch and
transformers, which the extra `test` installs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.models.llama.modeling_llama import eager_attention_forward

from minillm import LLM, catalog, cli
from minillm.model.probe import difference

# Names that the probe of `Transformer.forward` gives to one layer's results, in the order they are computed. The empty
# name stands for the layer's output.
LAYER_RESULTS = [
    "attention_norm",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.weights",
    "attention.gathered",
    "attention.output",
    "mlp_norm",
    "mlp.gated",
    "mlp.output",
    "",
]


def their_intermediates(model: transformers.LlamaForCausalLM, token_ids: list[int]) -> dict[str, np.ndarray]:
    """Return the arrays that `LLM.probe` returns, computed by transformers.

    Hooks record the output of each module. Queries, keys, values and weights come from a wrapper around the attention
    function of transformers.
    """
    intermediates: dict[str, np.ndarray] = {}
    hooks = []

    def record(name: str, value: torch.Tensor) -> None:
        intermediates[name] = value.detach()[0].numpy().copy()

    def record_output(module: torch.nn.Module, name: str) -> None:
        hooks.append(module.register_forward_hook(lambda module, inputs, output: record(name, output)))

    def record_input(module: torch.nn.Module, name: str) -> None:
        hooks.append(module.register_forward_hook(lambda module, inputs, output: record(name, inputs[0])))

    def recorded_attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"layers.{module.layer_idx}.attention"
        gathered, weights = eager_attention_forward(module, query, key, value, *args, **kwargs)
        for part, tensor in (("q", query), ("k", key), ("v", value), ("weights", weights)):
            record(f"{name}.{part}", tensor.transpose(1, 2))
        record(f"{name}.gathered", gathered)
        return gathered, weights

    transformers.AttentionInterface.register("recorded", recorded_attention)
    transformers.AttentionMaskInterface.register("recorded", transformers.masking_utils.eager_mask)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("recorded")
    record_output(model.model.embed_tokens, "embedding")
    for index, layer in enumerate(model.model.layers):
        name = f"layers.{index}"
        record_output(layer.input_layernorm, f"{name}.attention_norm")
        record_output(layer.self_attn.o_proj, f"{name}.attention.output")
        record_output(layer.post_attention_layernorm, f"{name}.mlp_norm")
        record_input(layer.mlp.down_proj, f"{name}.mlp.gated")
        record_output(layer.mlp, f"{name}.mlp.output")
        record_output(layer, name)
    record_output(model.model.norm, "final_norm")
    record_output(model.lm_head, "logits")
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(implementation)
    return intermediates


def load_transformers(path: Path) -> transformers.LlamaForCausalLM:
    """Load the same file or folder with transformers, its weights widened to float32."""
    gguf_file = path.name if path.is_file() else None
    folder = path.parent if path.is_file() else path
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, dtype=torch.float32).eval()


def compare(llm: LLM, model: transformers.LlamaForCausalLM, token_ids: list[int]) -> dict[str, float]:
    """Return, for every intermediate, the largest difference divided by the largest value."""
    ours, theirs = llm.probe(token_ids), their_intermediates(model, token_ids)
    return {name: difference(ours[name], theirs[name].reshape(ours[name].shape)) for name in theirs}


def difference_table(differences: dict[str, float]) -> Table:
    """Return a table with one row per layer and one column per intermediate."""
    table = Table(title="largest difference / largest value")
    for column in ["layer", *LAYER_RESULTS[:-1], "layer's output"]:
        table.add_column(column.removeprefix("attention."), justify="right")
    layers = sorted({int(name.split(".")[1]) for name in differences if name.startswith("layers.")})
    for index in layers:
        names = [f"layers.{index}.{part}".removesuffix(".") for part in LAYER_RESULTS]
        table.add_row(str(index), *(f"{differences[name]:.1e}" for name in names))
    return table


def main() -> None:
    """Load the model with both libraries, run both and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog, and then")
    cli.add_model_options(parser)
    options = parser.parse_args()

    path = catalog.resolve(options.model)
    llm = LLM(path, backend=options.backend, threads=options.threads)
    differences = compare(llm, load_transformers(path), llm.encode(options.prompt))

    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(difference_table(differences))
    for name in ("embedding", "final_norm", "logits"):
        console.print(f"{name:>10}  {differences[name]:.1e}")
    worst = max(differences, key=lambda name: differences[name])
    console.print(f"largest of {len(differences)} differences: {differences[worst]:.1e}, at {worst}")


if __name__ == "__main__":
    sys.exit(cli.run_safely(main))
