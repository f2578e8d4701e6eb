"""The numbers: what a model is, its weights, its forward pass and its cache. See `minillm.model.transformer`."""
