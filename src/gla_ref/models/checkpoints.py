"""Models in files: config.json and safetensors, as flash-linear-attention has them (chapter 17).

A GLA model saved here is read by fla's GLAForCausalLM, and the reverse: tensors have the same names and shapes.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

try:
    from safetensors.torch import load_file, save_file
except ImportError as reason:
    raise ImportError(f'{reason}; pip install "gla-ref[models]" has what models in files need') from reason

from .config import Config
from .language_model import LanguageModel

__all__ = ["load", "save"]


def save(model: LanguageModel, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` into a folder, which is made if it is missing.

    Args:
        model: a language model, compiled or not: names in the file are those of the plain model.
        folder: a checkpoint that it already holds is replaced if this one can be written, and else stays as it was.

    Raises:
        TypeError, ValueError: this is no language model, or a part of it is wrapped, sharded or without memory, so that
            :func:`load` would not read the file; the message names the tensor.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile's wrapper
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
    tensors = {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}
    expected = _without_memory(model.config).state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        wanted, x = expected.get(name), tensors.get(name)
        if wanted is None or x is None or x.shape != wanted.shape or type(x) is not Tensor or x.is_meta:
            got = f"{_kind(x)}{' on meta' if x is not None and x.is_meta else ''}"
            raise ValueError(f"model: expected {_kind(wanted)} as {name}, got {got}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")


def load(folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> LanguageModel:
    """Load the model of a folder: `config.json`, and `model.safetensors` or the files that its index names.

    Args:
        folder: a folder that :func:`save` or fla has written; its other files are not read.
        device: the device of the model.
        dtype: the dtype of its weights; None: the file's dtype.

    Raises:
        FileNotFoundError: there is no config.json, or neither `model.safetensors` nor its index.
        TypeError, ValueError: a field of config.json does not fit; the message names it.
        RuntimeError: the file's tensors do not fit the model; the message names them.
    """
    folder = Path(folder)
    config = Config.from_dict(json.loads((folder / "config.json").read_text()))
    tensors = {name: x for file in _files(folder) for name, x in load_file(file, device=str(device)).items()}
    model = _without_memory(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model if dtype is None else model.to(dtype)


def _without_memory(config: Config) -> LanguageModel:
    """The model of a config on meta."""
    with torch.device("meta"):
        return LanguageModel(config)


def _kind(x: Tensor | None) -> str:
    """The type and shape of an entry of a state dict, in words."""
    return "no tensor" if x is None else f"a {type(x).__name__} {list(x.shape)}"


def _files(folder: Path) -> list[Path]:
    """The files that hold the folder's model, as transformers chooses them."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if not index.exists():
        raise FileNotFoundError(f"folder: expected {whole.name} or {index.name} in {folder}, found neither")
    return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
