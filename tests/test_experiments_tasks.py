"""The tasks of experiments and their texts: questions, baselines, sizes of states, what is held out, byte pairs."""

import gzip
import json
import math
from dataclasses import replace

import pytest
import torch
from cases import tensors_in
from experiment_runs import BOOK, encode_bytes

from gla_ref.experiments import language, mqar, texts
from gla_ref.experiments.mqar import answer_logits, distinct, judged
from gla_ref.experiments.runs import Place, dice
from gla_ref.models import MIXERS, Config, LanguageModel


def test_questions_of_mqar():
    n, T, pairs, half = 50, 40, 5, 16
    x = mqar.questions(n, T, pairs, 2 * half, dice("cpu", "a test"))
    keys, values = x.tokens[:, : 2 * pairs : 2], x.tokens[:, 1 : 2 * pairs : 2]
    assert ((keys > 0) & (keys < half)).all() and ((values >= half) & (values < 2 * half)).all()
    for row in range(n):
        told = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert len(told) == len(set(told.values())) == pairs
        asked = x.tokens[row, x.places[row]].tolist()
        assert sorted(asked) == sorted(told) and [told[key] for key in asked] == x.answers[row].tolist()
    assert x.places.min() >= 2 * pairs and x.places.max() < T and (x.places % 2 == 0).all()
    assert all(len(set(row)) == pairs for row in x.places.tolist())
    near = (x.places < (2 * pairs + T) // 2).float().mean()
    assert near > 0.6, "a power law: early rather than late"


def test_answers_are_those_of_the_whole_logits():
    torch.manual_seed(0)
    model = LanguageModel(Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2))
    x = mqar.questions(5, 16, 2, 32, dice("cpu", "a test"))
    with torch.no_grad():
        whole = model(x.tokens)[0]
        found = answer_logits(model, x.tokens, x.places)
        said, nats = judged(model, x, 2)
    for row in range(5):
        torch.testing.assert_close(found[row], whole[row, x.places[row]])
    assert torch.equal(said, found.argmax(-1) == x.answers)
    torch.testing.assert_close(nats, -found.log_softmax(-1).gather(2, x.answers[..., None])[..., 0])


def test_different_numbers_in_any_order():
    x = distinct(4000, 5, 3, dice("cpu", "a test"))
    assert all(len(set(row)) == 3 for row in x.tolist()) and x.min() == 0 and x.max() == 4
    orders = torch.unique(x, dim=0, return_counts=True)[1]
    assert len(orders) == 60 and orders.min() > 35 and orders.max() < 105  # 66.7 expected
    assert sorted(distinct(1, 7, 7, dice("cpu", 0))[0].tolist()) == list(range(7))


def test_keys_that_are_written_twice():
    """The second value counts; half of the keys have one, and no place tells which."""
    n, T, pairs = 200, 40, 4
    x = mqar.questions(n, T, pairs, 32, dice("cpu", "a test"), overwritten=True)
    first = []
    for row, tokens in enumerate(x.tokens.tolist()):
        written = list(zip(tokens[:12:2], tokens[1:12:2], strict=True))
        assert len({v for _, v in written}) == 6 and [k for k, _ in written[:4]] != [k for k, _ in written[4:]]
        told = dict(written)  # a later pair replaces an earlier one
        again = {k for k, _ in written[4:]}
        assert len(told) == 4 and len(again) == 2
        asked = [tokens[i] for i in x.places[row].tolist()]
        assert [told[key] for key in asked] == x.answers[row].tolist()
        assert {key for key in asked[:2]} == again  # overwritten ones come first in `places`
        first.append(written[0][0] in again)
    assert 0.35 < sum(first) / n < 0.65


def test_a_gpu_trains_on_the_texts_of_a_cpu():
    """Nothing is drawn on the device: "meta" has no random numbers."""
    x = mqar.Mqar(mqar.Settings.tiny(), 0, "meta").batch(0)
    assert all(y.device.type == "meta" for y in x)


def test_validation_test_and_training_are_other_texts():
    s = mqar.Settings.tiny()
    drawn = []

    class Model(LanguageModel):
        def __init__(self):
            super().__init__(Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2))
            self.model.register_forward_pre_hook(lambda _, args: drawn.append(args[0]))

    for part in ("validation", "test"):
        mqar.Mqar(s, 0, "cpu", part).evaluate(Model())
    drawn.append(mqar.Mqar(s, 0, "cpu").batch(0).tokens)
    ours = [x for x in drawn if x.shape[1] == 16]
    assert len(ours) >= 3 and not any(torch.equal(x[:4], y[:4]) for x, y in zip(ours, ours[1:], strict=False))


def test_scores_have_baselines():
    s = replace(mqar.Settings.tiny(), lengths=((16, 2), (24, 4)))
    assert mqar.Mqar(s, 0, "cpu").baselines() == {"loss": math.log(16), "chance": 1 / 16, "majority": 3 / 8}
    twice = replace(s, lengths=((20, 4),), overwritten=True)
    assert mqar.Mqar(twice, 0, "cpu").baselines()["majority"] == 1 / 6


def test_the_unigram_baseline_is_by_the_training_text():
    found = language.unigram(torch.tensor([0, 0, 0, 1]), 3)
    assert found.tolist() == pytest.approx([-math.log(n / 7) for n in (4, 2, 1)])


def test_language_has_baselines(place):
    found = language.Language(replace(language.Settings.tiny(), vocab_size=256), 0, place).baselines()
    assert 0 < found["loss"] < math.log(256) and 0 < found["bits a byte"] < found["chance"] <= 8


@pytest.mark.parametrize("mixer", [*MIXERS, ("gla", "softmax")])
@torch.no_grad()
def test_a_state_has_as_many_numbers_as_it_is_said_to(mixer):
    for conv in (False, True):
        config = Config(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_heads=2, mixer=mixer, use_short_conv=conv
        )
        _, state = LanguageModel(config)(torch.zeros(1, 9, dtype=torch.int64))
        assert config.state_size(9) == sum(x.numel() for x in tensors_in(state))


def test_an_epoch_reads_every_sequence_once(place):
    task = language.Language(language.Settings.tiny(), 0, place)
    steps = -(-task.cuts // task.rows)
    starts = torch.cat([task.starts(step) for step in range(steps)])[: task.cuts]
    offset = int(starts.min())
    assert sorted(starts.tolist()) == [offset + i * task.T for i in range(task.cuts)] and offset < task.T
    assert offset + task.cuts * task.T + 1 <= len(task.training) + 1
    again = language.Language(language.Settings.tiny(), 0, place)
    assert torch.equal(again.starts(steps + 2), task.starts(steps + 2))  # another epoch, asked for at once
    assert not torch.equal(language.Language(language.Settings.tiny(), 1, place).starts(0), task.starts(0))


def test_language_models_start_equally_quiet():
    """Every mixer adds less than a tenth of an embedding before the first step, with no lead for any (chapter 19)."""
    added = {}
    for mixer in language.Settings().mixers:
        torch.manual_seed(0)
        model, seen = LanguageModel(language.model_of("10M", mixer, 512)), []
        for block in model.model.layers:
            block.attn.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out[0].square().mean()))
        tokens = torch.randint(512, (1, 128))
        with torch.no_grad():
            model.model(tokens)
            added[mixer] = torch.stack(seen).mean().sqrt() / model.model.embeddings(tokens).square().mean().sqrt()
    assert max(added.values()) < 0.1 and max(added.values()) < 4 * min(added.values()), added


def test_perplexity_counts_every_held_out_token_once(place):
    """A model that knows nothing has a perplexity of the vocabulary."""
    task = language.Language(language.Settings.tiny(), 0, place)
    model = LanguageModel(language.model_of("tiny", "gla", 256))
    torch.nn.init.zeros_(model.lm_head.weight)
    with torch.no_grad():
        found = task.evaluate(model)
    assert found["perplexity"] == pytest.approx(256, rel=1e-5) and found["loss"] == pytest.approx(math.log(256))
    ((tokens, size),) = task.sources.values()
    assert size == len(tokens) == 3 * 151
    assert found["bits a byte"] == pytest.approx(8 * (size - 1) / size, rel=1e-5)


def test_small_steps_are_evaluated_in_large_batches(place):
    """The tiny setting's steps have four sequences; held-out texts are read many at a time."""
    task, batches = language.Language(language.Settings.tiny(), 0, place), []

    class Model:
        def loss(self, x, y):
            batches.append(len(x))
            return torch.zeros(()), None

    task.nats(Model(), torch.zeros(16 * 300 + 1, dtype=torch.uint8))
    assert task.rows == 4 and batches == [256, 44]


def test_scores_by_source_add_up(tmp_path):
    names = [f"{source}/{i}" for source in ("gcide", "sotu") for i in range(200)]
    corpus = encode_bytes([texts.Document(n, BOOK[: 40 + (n[0] == "g")]) for n in names])
    corpus.save(tmp_path / texts.FILE)
    task = language.Language(language.Settings.tiny(), 0, Place("cpu", tmp_path, texts=tmp_path))
    torch.manual_seed(0)
    model = LanguageModel(language.model_of("tiny", "gla", 256))
    with torch.no_grad():
        found = task.evaluate(model)
    one, two = (found["by source"][source] for source in ("gcide", "sotu"))
    n, m = (len(tokens) - 1 for tokens, _ in task.sources.values())
    assert found["loss"] == pytest.approx((n * one["loss"] + m * two["loss"]) / (n + m))
    assert one["loss"] != two["loss"]


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
    corpus = texts.load(corpora)
    training, validation, held = map(corpus.documents, ("training", "validation", "test"))
    assert (len(training), len(validation), len(held), corpus.vocab_size) == (7, 2, 3, 256)
    assert all(len(x) == 151 and x[-1] == texts.END and not (x[:-1] == texts.END).any() for x in training + held)
    assert bytes(held[0][:-1].tolist()).decode() == BOOK
    share = sum(texts.held_out(f"gcide/{i}") for i in range(4000)) / 4000
    assert 0.04 < share < 0.06
    parts = [texts.part_of(f"gcide/{i}") for i in range(4000)]
    assert 0.035 < parts.count("validation") / 4000 < 0.06 and parts.count("test") / 4000 == share
    with pytest.raises(ValueError, match="^part: expected one of training, validation, test"):
        corpus.documents("held")
    with pytest.raises(FileNotFoundError, match="^texts: expected texts.pt in the folder"):
        texts.load(corpora / "elsewhere")


def test_byte_pairs(sources, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    documents = [*texts.gcide(sources[1]), *texts.sotu(sources[2])]
    made = texts.encode_pairs(documents, 300)
    made.save(tmp_path / texts.FILE)
    corpus = texts.load(tmp_path)
    assert corpus.vocab_size == 300 and corpus.tokenizer == made.tokenizer
    assert corpus.tokens.max() < 300 and len(corpus.tokens) < corpus.bytes.sum() / 2
    tokenizer = tokenizers.Tokenizer.from_str(corpus.tokenizer)
    first = corpus.documents(texts.part_of(corpus.names[0]))[0]
    assert first[-1] == texts.END and tokenizer.decode(first[:-1].tolist()) == documents[0].text
    with pytest.raises(ValueError, match="^vocab_size: expected more than 256"):
        texts.encode_pairs(documents, 256)
