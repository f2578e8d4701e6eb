"""Text <-> token ids: reading a model's tokenizer, decoding as tokens come, the chat template."""

from minillm.tokenizer.detokenizer import StreamingDecoder
from minillm.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamingDecoder", "Tokenizer"]
