"""Small runs, texts and a stand-in for fla that the tests of experiments share."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from gla_ref import FORMS
from gla_ref.experiments import EXPERIMENTS, texts
from gla_ref.models import Config, LanguageModel

PARTS = {"test": 3, "validation": 2, "training": 7}
BOOK = "".join(chr(97 + i * i % 23) for i in range(150))


def save_speeches(folder: Path) -> None:
    """Save speeches of 150 bytes: three are held out, two are for validation, seven for training."""
    names = [f"sotu/{i}" for i in range(200)]
    names = [n for part, k in PARTS.items() for n in [n for n in names if texts.part_of(n) == part][:k]]
    speeches = [texts.Document(name, BOOK[i:] + BOOK[:i]) for i, name in enumerate(names)]
    texts.encode_bytes(speeches).save(folder / "speeches.pt")


def fixed(run, rate=1e-2):
    """A run with a rate of its own, which needs no trials."""
    return replace(run, training=replace(run.training, learning_rate=rate))


def tiny(name: str, **changes):
    """The runs of a tiny setting."""
    module = EXPERIMENTS[name]
    return module.runs(replace(module.Settings.tiny(), **changes), 1)


def leaves(x) -> list[torch.Tensor]:
    """All tensors of nested tuples."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [z for y in x for z in leaves(y)] if isinstance(x, tuple) else []  # None has no leaves


def stand_in_for_fla(monkeypatch) -> list[str]:
    """Make `fla` importable: its model is ours, its operator is ours under its name. Returns what will be called."""
    called = []

    class Theirs(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            fields = {k: x for k, x in vars(config).items() if k not in ("architectures", "model_type")}
            self.ours = LanguageModel(Config(**fields))

        def load_state_dict(self, tensors, strict):
            assert strict
            return self.ours.load_state_dict(tensors)

        def gradient_checkpointing_enable(self):
            called.append("checkpointing")

        def forward(self, tokens, labels, use_cache):
            assert labels is tokens and not use_cache
            return SimpleNamespace(loss=self.ours.loss(tokens)[0])

    def chunk_gla(q, k, v, g):
        called.append("chunk_gla")
        return FORMS["gla"]["chunkwise_two_level"](q, k, v, g)

    for name in ("fla", "fla.models", "fla.ops", "fla.ops.gla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.models"].GLAConfig = lambda **fields: SimpleNamespace(**fields)
    sys.modules["fla.models"].GLAForCausalLM = Theirs
    sys.modules["fla.ops.gla"].chunk_gla = chunk_gla
    return called
