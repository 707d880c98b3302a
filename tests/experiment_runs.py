"""Small runs and texts that the tests of experiments share."""

from dataclasses import replace
from pathlib import Path

import torch

from gla_ref.experiments import EXPERIMENTS, texts

PARTS = {"test": 3, "validation": 2, "training": 7}
BOOK = "".join(chr(97 + i * i % 23) for i in range(150))


def encode_bytes(documents: list[texts.Document]) -> texts.Corpus:
    """A corpus whose tokens are bytes, which needs no library."""
    pieces = [torch.frombuffer(bytearray(d.text.encode() + bytes([texts.END])), dtype=torch.uint8) for d in documents]
    return texts.joined(pieces, documents, 256)


def save_speeches(folder: Path) -> None:
    """Save speeches of 150 bytes: three are held out, two are for validation, seven for training."""
    names = [f"sotu/{i}" for i in range(200)]
    names = [n for part, k in PARTS.items() for n in [n for n in names if texts.part_of(n) == part][:k]]
    speeches = [texts.Document(name, BOOK[i:] + BOOK[:i]) for i, name in enumerate(names)]
    encode_bytes(speeches).save(folder / texts.FILE)


def fixed(run, rate=1e-2):
    """A run with a rate of its own, which needs no trials."""
    return replace(run, training=replace(run.training, learning_rate=rate))


def tiny(name: str, **changes):
    """The runs of a tiny setting."""
    module = EXPERIMENTS[name]
    return module.runs(replace(module.Settings.tiny(), **changes), 1)
