"""The model: its config, its weights, its forward pass and its KV cache. See `minillm.model.transformer`."""
