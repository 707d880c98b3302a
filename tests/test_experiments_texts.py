"""The texts of experiments: documents of three packages, what is held out, byte pairs."""

import gzip
import json

import pytest
from experiment_runs import BOOK

from gla_ref.experiments import texts


@pytest.fixture
def sources(tmp_path):
    """Three packages in little."""
    doc, data = tmp_path / "Documentation", tmp_path / "data"
    for name, text in (("a.rst", b"A\n"), ("b/c.rst.gz", gzip.compress(b"C\n" * 40)), ("translations/x.rst", b"X")):
        (doc / name).parent.mkdir(parents=True, exist_ok=True)
        (doc / name).write_bytes(text)
    (doc / "other.txt").write_text("no")
    entries = "".join(f"Word{i} \\Word\\, n.\n   Meaning {i}.\n\n   More.\n\n" for i in range(60))
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(entries.encode()))
    data.mkdir()
    for year in range(1900, 1960):
        (data / f"{year}_x.json").write_text(
            json.dumps({"text": f"Speech of {year}. \u00e9" * (1800 if year % 2 else 2)})
        )
    return doc, tmp_path / "gcide.dict.dz", data


def test_documents_of_three_packages(sources):
    doc, dictionary, data = sources
    assert [d.name for d in texts.linux_doc(doc)] == ["linux-doc/a.rst", "linux-doc/b/c.rst.gz"]
    entries = texts.gcide(dictionary)
    assert len(entries) == 60 and entries[3].text == "Word3 \\Word\\, n.\n   Meaning 3.\n\n   More.\n"
    speeches = texts.sotu(data)
    assert len(speeches) == 60 and speeches[0].name == "sotu/1900_x" and speeches[0].text.startswith("Speech of 1900.")
    for read_one, name in ((texts.linux_doc, "linux_doc"), (texts.sotu, "sotu")):
        with pytest.raises(FileNotFoundError, match=f"^{name}: expected"):
            read_one(dictionary.parent / "nothing")


def test_held_out_documents_are_whole_and_apart(corpora):
    corpus = texts.load(corpora, "speeches")
    training, validation, held = map(corpus.documents, ("training", "validation", "test"))
    assert (len(training), len(validation), len(held), corpus.vocab_size) == (7, 2, 3, 256)
    assert all(len(x) == 151 and x[-1] == texts.END and not (x[:-1] == texts.END).any() for x in training + held)
    assert bytes(held[0][:-1].tolist()).decode() == BOOK
    assert corpus.held.tolist() == [texts.held_out(name) for name in corpus.names]
    share = sum(texts.held_out(f"gcide/{i}") for i in range(4000)) / 4000
    assert 0.04 < share < 0.06
    parts = [texts.part_of(f"gcide/{i}") for i in range(4000)]
    assert 0.035 < parts.count("validation") / 4000 < 0.06 and parts.count("test") / 4000 == share
    with pytest.raises(ValueError, match="^part: expected one of training, validation, test"):
        corpus.documents("held")
    with pytest.raises(FileNotFoundError, match="^texts: expected texts.pt in the folder"):
        texts.load(corpora, "texts")


def test_byte_pairs(sources, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    documents = [*texts.gcide(sources[1]), *texts.sotu(sources[2])]
    made = texts.prepare(documents, tmp_path, 300)
    corpus = texts.load(tmp_path, "texts")
    assert corpus.vocab_size == 300 and corpus.tokenizer == made["texts"].tokenizer
    assert corpus.tokens.max() < 300 and len(corpus.tokens) < corpus.bytes.sum() / 2
    tokenizer = tokenizers.Tokenizer.from_str(corpus.tokenizer)
    first = corpus.documents(texts.part_of(corpus.names[0]))[0]
    assert first[-1] == texts.END and tokenizer.decode(first[:-1].tolist()) == documents[0].text
    assert len(texts.load(tmp_path, "speeches").names) == 30  # the long ones
    with pytest.raises(ValueError, match="^vocab_size: expected more than 256"):
        texts.encode_pairs(documents, 256)
