"""The numbers: what a model is, its weights, the forward pass and the cache it reads. See `minillm.model.transformer`."""
