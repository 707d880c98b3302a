"""Language models around this book's mechanisms: the GLA layer, its Transformer, and mixers to compare (chapter 17).

    model = LanguageModel(Config(vocab_size=256, hidden_size=128, num_hidden_layers=2, mixer="gla"))
    loss, state = model.loss(tokens)
    text, state = model.generate(prompts, 100)

On a GPU mixers run on the kernels (softmax attention with a cache on PyTorch's), elsewhere on the references.
:mod:`gla_ref.models.checkpoints` reads and writes files; it needs safetensors.
"""

from .config import Config
from .language_model import LanguageModel, detach, next_tokens
from .mixers import MIXERS

__all__ = ["MIXERS", "Config", "LanguageModel", "detach", "next_tokens"]
