"""Models in files: config.json and safetensors, as flash-linear-attention has them (chapter 17).

A GLA model saved here is read by fla's GLAForCausalLM, and the reverse: tensors have the same names and shapes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

try:
    from safetensors.torch import load_file, save_file
except ImportError as reason:
    raise ImportError(f'{reason}; pip install "gla-ref[models]" has what models in files need') from reason

from .config import Config
from .language_model import LanguageModel

__all__ = ["load", "save"]


def save(model: LanguageModel, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` into a folder, which is made if it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> LanguageModel:
    """Load the model of a folder with `config.json` and one or several `*.safetensors`.

    Args:
        folder: a folder that :func:`save` or fla has written.
        device: the device of the model.
        dtype: the dtype of its weights; None: the file's dtype.

    Raises:
        FileNotFoundError: there is no config.json, or no safetensors.
        TypeError, ValueError: a field of config.json does not fit; the message names it.
        RuntimeError: the file's tensors do not fit the model; the message names them.
    """
    folder = Path(folder)
    config = Config.from_dict(json.loads((folder / "config.json").read_text()))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"folder: expected *.safetensors in {folder}, found none")
    tensors = {name: x for file in files for name, x in load_file(file, device=str(device)).items()}
    with torch.device("meta"):  # allocate no weights, because the file's weights replace them
        model = LanguageModel(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model if dtype is None else model.to(dtype)
