"""Text to token ids and back.

tokenizer.py      the `Tokenizer` of a model
hf_folder.py      reads a tokenizer from a folder in Hugging Face layout
gguf/             rebuilds a tokenizer from the metadata of a GGUF file
detokenizer.py    token ids to text, one token at a time
chat_template.py  conversations to text
sandbox/          runs chat templates safely
"""

from minillm.tokenizer.detokenizer import StreamingDecoder
from minillm.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamingDecoder", "Tokenizer"]
