"""Tiny random Llama checkpoints, written by transformers (folders) and by the gguf package (files)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Hugging Face's part of a name -> llama.cpp's.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


# Types that the gguf package reads but does not write -> where in a block's bytes its float16 numbers stand.
ONLY_READ = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,)},
}


def random_llama(seed: int = 0, **config_overrides) -> transformers.LlamaForCausalLM:
    """A LlamaForCausalLM in float32 whose every parameter, biases and norms too, is random.

    `config_overrides` are LlamaConfig's arguments over `TINY`, such as `rope_parameters={"rope_type":
    "linear", "rope_theta": 1e4, "factor": 2.0}`.
    """
    config = transformers.LlamaConfig(**(TINY | config_overrides))
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else 0.2 * noise)
    return model


def write_hf_folder(
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    with_tokenizer: bool = False,
    **config_overrides,
) -> tuple[Path, transformers.LlamaForCausalLM]:
    """Save a random tiny Llama as a Hugging Face folder at `path`; returns the path and the model saved."""
    model = random_llama(seed, **config_overrides).to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        tokenizer().save(str(Path(path) / "tokenizer.json"))
    return Path(path), model


def write_gguf(
    path: Path,
    model: transformers.LlamaForCausalLM,
    storage: str = "F32",
    *,
    with_tokenizer: bool = False,
    alignment: int | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write `model` as llama.cpp's converter would: its keys, its names, Q and K permuted.

    Matrices are stored as `storage` where their rows are whole blocks of it, else, like vectors, as F32. Of a type in
    `ONLY_READ` they hold `random_blocks` instead of the model's numbers.
    `edit` may change the writer's `kv_data[0]` and `tensors[0]` just before they are written.
    """
    config, rope = model.config, model.config.rope_parameters
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_frequency_factors(config))
    if with_tokenizer:
        _add_tokenizer(writer)
    for name, parameter in model.named_parameters():  # leaves a tied head out
        values = parameter.detach().to(torch.float32).numpy()
        if ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        kind = storage_for(values.shape, storage)
        if kind.name in ONLY_READ:
            stored = random_blocks(kind, values.shape, np.random.default_rng(len(writer.tensors[0])))
        else:
            stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def storage_for(shape: tuple[int, ...], storage: str) -> GGMLQuantizationType:
    kind = GGMLQuantizationType[storage]
    whole_blocks = shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    return kind if len(shape) == 2 and whole_blocks else GGMLQuantizationType.F32


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """A matrix of a type in `ONLY_READ`, as its bytes, at random but for the scales: those make weights below 1."""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block_size, num_bytes), np.uint8)
    for place in ONLY_READ[kind.name]:
        scales = rng.uniform(-2e-4, 2e-4, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def gguf_name(hf_name: str) -> str:
    module, _, kind = hf_name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, one row at a time: 0, K/2, 1, K/2 + 1, ..."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(rows[order])


def llama3_frequency_factors(config: transformers.LlamaConfig) -> np.ndarray:
    """float32 [K/2]: what each rotary frequency is divided by, as transformers computes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return ((1.0 / config.rope_parameters["rope_theta"] ** exponents) / scaled).numpy()


def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of 262 tokens: 3 specials, the 256 bytes and 3 merges."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    built = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(words[:3])
    return built


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = sorted(tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([word for word, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
