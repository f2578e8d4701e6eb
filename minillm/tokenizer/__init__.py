"""Text to token ids and back.

tokenizer.py        the `Tokenizer` of a model
hf_folder.py        reads a tokenizer from a folder in Hugging Face layout
gguf/               builds a tokenizer from the metadata of a GGUF file
backend_errors.py   converts the exceptions of the `tokenizers` library
detokenizer.py      token ids to text, one token at a time
chat_template.py    conversations to text
sandbox/            limits the work of chat templates and tokenizer steps, which come from model files
"""

from minillm.tokenizer.detokenizer import StreamingDecoder
from minillm.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamingDecoder", "Tokenizer"]
