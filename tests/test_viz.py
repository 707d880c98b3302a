"""Explorables: the class, and the numbers in the pictures against the package's (chapters 1, 2, 4 and 6)."""

from __future__ import annotations

import json
import re

import pytest
import torch
from cases import thin
from pictures import EXPLORABLES, at, frames, rects, texts

from gla_ref import linear_attention, softmax
from gla_ref.book.chunk_size import LENGTHS, MAPS, chunk_size
from gla_ref.book.costs import cost
from gla_ref.book.viz import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from gla_ref.book.viz._explorable import COLOURS
from gla_ref.book.viz._svg import part, rect
from gla_ref.book.viz.attention_weights import DIRECTIONS, SCALES, attention_weights, query
from gla_ref.book.viz.attention_weights import KEYS as ATTENTION_KEYS
from gla_ref.book.viz.attention_weights import VALUES as ATTENTION_VALUES
from gla_ref.book.viz.online_softmax import BAR, BASE, TILES, VALUES, WEIGHTS, online_softmax
from gla_ref.book.viz.prefix_sum import KEYS, prefix_sum
from gla_ref.book.viz.prefix_sum import VALUES as STATE_VALUES
from gla_ref.book.viz.programs import BLOCKS, END, programs
from gla_ref.book.viz.programs import LENGTHS as VECTORS
from gla_ref.book.viz.strides import VIEWS, strides
from gla_ref.prefix_sum import chunked

bs4 = pytest.importorskip("bs4", reason="the book's tools are not installed")


def toy(**changes) -> Explorable:
    frames = [
        [Frame((f"<text>{a}</text>", "<path/>"), f"{a} at {i} </script>") for i in range(n)]
        for a, n in (("one", 2), ("two", 3))
    ]
    given = dict(title="Toy & more", notice="See.", alt="A toy.", frames=frames, height=50, start=(1, 2))
    controls = Choice("which", ["one", "two"]), Slider("step", range(3))
    return Explorable(**(given | {"controls": controls} | changes))


def sent(explorable: Explorable) -> dict:
    """What the page's script gets."""
    (data,) = re.findall(r"seen\} = (\{.*\});", explorable._repr_html_())
    return json.loads(data)


def test_page_gets_every_frame_and_shows_the_first():
    html = toy()._repr_html_()
    data, figure = sent(toy()), bs4.BeautifulSoup(html, "html.parser").figure
    assert data["pieces"] == ["<text>one</text>", "<path/>", "<text>two</text>"]
    assert data["frames"][0] == [["one at 0 </script>", 0, 1], ["one at 1 </script>", 0, 1]]
    assert len(data["frames"][1]) == 3 and data["labels"] == [["one", "two"], ["0", "1", "2"]]
    assert figure["class"] == ["explorable"] and re.fullmatch("explorable-[0-9a-f]{8}", figure["id"])
    assert data["play"] == 1
    assert figure.select_one(".explorable-picture svg").decode_contents() == "<text>two</text><path></path>"
    assert figure.select_one(".explorable-readout[aria-live=polite]").text == "two at 2 </script>"
    assert figure.select_one("select option[selected]").text == "two"
    assert figure.select_one("input")["value"] == "2"
    assert html.count("</script>") == 1 and "%" not in re.sub(r"\d%", "", html)
    assert toy()._repr_html_() == html and figure["id"] not in toy(title="Other")._repr_html_()


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(start=(1,)), "start: expected 2 indices, got (1,)"),
        (dict(start=(0, 2)), "start: expected 'step' in [0, 2), got 2"),
        (dict(controls=(Choice("which", "abc"), Slider("step", range(3)))), "frames: expected 3 for 'which', got 2"),
        (dict(controls=(Choice("which", "ab"), Slider("step", range(2)))), "frames: expected 2 for 'step', got 3"),
        (dict(controls=(Choice("which", "ab"),), start=(0,)), "frames: expected a Frame, got list"),
        (dict(play=0), "play: expected a slider, got 'which'"),
        (dict(question=Question("Why?", "so", {"thus": "No."}, (0, 0))), "question: expected one of its answers"),
        (dict(question=Question("Why?", "so", {"so": "Yes."}, (0,))), "question: expected 2 indices, got [0]"),
        (dict(question=Question("Why?", "so", {"so": "Yes."}, {})), "question.seen: expected a frame for each answer"),
        (dict(question=Question("Why?", "so", {"so": "Yes."}, (1, 2), (0, 2))), "question: expected 'step' in [0, 2)"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        toy(**changes)


def test_page_gets_question_legend_and_parts():
    question = Question("Is 1 > 0?", "yes", {"yes": "It is.", "no": "1 − 0 is 1."}, (1, 0))
    picture = part('The "one" tile', rect(1, 2, 3, 4, "sky"), choose={1: 2, 0: 1})
    frames = [[Frame((picture,), "said")]] * 2
    html = toy(frames=frames, start=(0, 0), question=question, legend=[Key("sky", "x < y")])._repr_html_()
    figure = bs4.BeautifulSoup(html, "html.parser").figure
    told = figure.select_one("[data-say]")
    assert (told["data-say"], told["data-set"]) == ('The "one" tile', "1:2 0:1")
    assert figure.select_one(".explorable-legend").text == "x < y" and figure.select_one(".explorable-legend .sky")
    assert "Is 1 > 0?" in figure.select_one(".explorable-question").text
    said = {button.text: button["data-why"] for button in figure.select(".explorable-question button")}
    assert said == {"yes": "Right. It is.", "no": "Not so. 1 − 0 is 1."}
    assert not bs4.BeautifulSoup(toy()._repr_html_(), "html.parser").select(".explorable-question, .explorable-legend")


# -- every explorable --------------------------------------------------------------------------


@pytest.mark.parametrize("name", thin(EXPLORABLES, *(set(EXPLORABLES) - {"gate_strength"})))
def test_every_control_changes_picture_and_readout(name):
    explorable = EXPLORABLES[name]()
    first = at(explorable, explorable.start)
    for n in range(len(explorable.controls)):
        for step in (-1, 1):
            moved = list(explorable.start)
            moved[n] += step
            other = at(explorable, moved)
            assert list(other.pieces) != list(first.pieces) and other.readout != first.readout


@pytest.mark.parametrize("name", EXPLORABLES)
def test_pictures_are_whole_and_light(name):
    explorable = EXPLORABLES[name]()
    assert len(explorable._repr_html_()) < 200 * 1024
    shown = frames(explorable.frames)
    assert all("nan" not in frame.readout and len(frame.readout) < 180 for frame in shown)
    drawing = bs4.BeautifulSoup("".join({p for f in shown for p in f.pieces}), "html.parser")
    for box in drawing.find_all("rect"):
        x, y, width, height = (float(box[a]) for a in ("x", "y", "width", "height"))
        assert 0 <= x and x + width <= WIDTH and 0 <= y and y + height <= explorable.height
    for mark in drawing.find_all("text"):
        half = 3.6 * len(mark.text)  # 13 units high, about 7 wide
        anchor = {"start": half, "end": -half}.get((mark.get("class") or [""])[0], 0)
        middle = float(mark["x"]) + anchor
        assert 0 <= middle - half and middle + half <= WIDTH, mark.text
        assert 6 <= float(mark["y"]) <= explorable.height - 6


@pytest.mark.parametrize("name", EXPLORABLES)
def test_every_colour_and_outline_is_in_the_legend(name):
    explorable = EXPLORABLES[name]()
    drawing = bs4.BeautifulSoup("".join({p for f in frames(explorable.frames) for p in f.pieces}), "html.parser")
    drawn = {kind for shape in drawing.select("rect, circle, path") for kind in shape.get("class") or []}
    legend = {word for key in explorable.legend for word in key.kind.split()}

    def colours(kinds):
        return {kind.removeprefix("line-") for kind in kinds} & {*COLOURS, "dashed", "dotted", "ink", "hollow"}

    assert colours(drawn) == colours(legend)
    assert len({key.words for key in explorable.legend}) == len(explorable.legend)


@pytest.mark.parametrize("name", EXPLORABLES)
def test_there_is_a_question_and_every_answer_is_met(name):
    """The figure does not open on the frame that shows the answer; play reaches it from the beginning of its case."""
    explorable = EXPLORABLES[name]()
    question, play = explorable.question, explorable.play % len(explorable.controls)
    assert question.words.endswith("?") and len(question.answers) >= 2
    assert all(len(why) > 20 for why in question.answers.values())
    data = sent(explorable)
    assert data["first"] != data["seen"][question.right] and list(data["seen"]) == list(question.answers)
    assert at(explorable, data["first"]).readout != at(explorable, data["seen"][question.right]).readout
    for place in data["seen"].values():
        begin = [0 if n == play else i for n, i in enumerate(place)]
        assert isinstance(at(explorable, begin), Frame)


@pytest.mark.parametrize("name", EXPLORABLES)
def test_parts_explain_themselves_and_choose_what_there_is(name):
    explorable = EXPLORABLES[name]()
    drawing = bs4.BeautifulSoup("".join({p for f in frames(explorable.frames) for p in f.pieces}), "html.parser")
    parts = drawing.select("[data-say]")
    assert parts and all(len(told["data-say"]) < 130 for told in parts)
    for chosen in {told["data-set"] for told in parts if told.get("data-set")}:
        for control, value in (map(int, pair.split(":")) for pair in chosen.split()):
            assert 0 <= value < len(explorable.controls[control].values)


# -- attention weights (chapter 1) -------------------------------------------------------------


@pytest.mark.parametrize("s", SCALES)
def test_attention_weights_are_those_of_attention(s):
    """Scores, weights, bars and output of every direction; at 45 degrees and scale 1 the example by hand."""
    k, v = torch.tensor(ATTENTION_KEYS).double(), torch.tensor(ATTENTION_VALUES).double()
    for degrees, row in zip(DIRECTIONS, attention_weights().frames, strict=True):
        frame, q = row[SCALES.index(s)], query(degrees)
        x = s * k @ q
        a = torch.softmax(x, 0)
        shown = [float(y.replace("−", "-")) for y in texts(frame, "end") if y != "score"]
        assert shown[::2] == pytest.approx(x.tolist(), abs=0.0051)
        assert shown[1::2] == pytest.approx(a.tolist(), abs=0.00051)
        assert [bar["width"] for bar in rects(frame, "orange edge")] == pytest.approx((80 * a).tolist(), abs=0.051)
        output = re.findall(r"[\d.]+", texts(frame, "on")[0])
        assert [float(y) for y in output] == pytest.approx((a @ v).tolist(), abs=0.0051)
        assert texts(frame, "on")[0].removeprefix("o = ") in frame.readout
    by_hand = attention_weights().frames[1][SCALES.index(1)]
    assert query(45).tolist() == pytest.approx([1, 1])
    assert texts(by_hand, "on") == [f"o = ({7 / 12:.2f}, {8 / 12:.2f}, {9 / 12:.2f})"]


def test_attention_weights_say_who_takes_the_weight():
    frames = attention_weights().frames
    assert all("all scores are equal" in row[0].readout for row in frames)
    assert "key 4 takes 50.0% of" in frames[1][SCALES.index(1)].readout
    assert "keys 2 and 4 have the same score; they share" in frames[0][-1].readout
    assert all("takes all but a trace" in row[-1].readout for row in frames[1::2])


# -- online softmax (chapter 2) ----------------------------------------------------------------


@pytest.mark.parametrize("b", TILES)
def test_online_softmax_shows_the_statistics_of_the_keys_read(b):
    x, v = torch.tensor(WEIGHTS).double().log(), torch.tensor(VALUES).double()
    row, m_old = online_softmax().frames[TILES.index(b)], -torch.inf
    assert len(row) == 1 + 2 * -(-len(x) // b)
    for n, (reads, adds) in enumerate(zip(row[1::2], row[2::2], strict=True)):
        end = min((n + 1) * b, len(x))
        m, d = softmax.statistics(x[:end])
        o = softmax.online(x[:end]) @ v[:end]
        vector = ", ".join(f"{y:.2f}" for y in o)
        assert texts(adds, "on") == [f"m = {m:.2f}", f"d′ = {d:.2f}", f"o′ = ({vector})"]
        bars = rects(adds, "grey edge", "orange edge")
        heights = torch.tensor([bar["height"] for bar in bars]).double() / BAR
        assert len(bars) == end and torch.allclose(heights, (x[:end] - m).exp(), atol=0.1 / BAR)
        assert all(bar["y"] + bar["height"] == pytest.approx(BASE, abs=0.2) for bar in bars)
        assert len(rects(adds, "orange edge")) == end - n * b and f"= {d:.2f}." in adds.readout
        ghosts = rects(reads, "line dashed")
        assert len(ghosts) == (n * b if m > m_old else 0)
        if n and m > m_old:
            factor = f"= {(m_old - m).exp():.2f} takes d′"
            assert factor in reads.readout and len(rects(reads, "grey edge")) == n * b
        elif n:
            assert "The factor is 1" in reads.readout
        m_old = m
    if b == 1:  # by hand, in the chapter
        sums = [texts(frame, "on")[1] for frame in row[2:9:2]]
        assert sums == ["d′ = 1.00", "d′ = 1.50", "d′ = 2.00", "d′ = 2.00"]
        assert texts(row[8], "on")[2] == "o′ = (0.58, 0.67, 0.75)"


# -- chunk length (chapter 6) ------------------------------------------------------------------


def test_chunk_size_shows_the_costs_and_who_meets_where(axes_of):
    *maps, flops, steps = axes_of(chunk_size)
    for C, ax in zip(MAPS, maps, strict=True):
        through = [bar.get_width() for bar in ax.containers[1]]
        assert through == [t // C * C for t in range(64)]
    one = cost("linear_attention", "chunkwise", B=1, T=64, H=1, K=16, V=16, C=1).matmul_flops
    for C, *shown in zip(LENGTHS, *(ax.lines[0].get_ydata() for ax in (flops, steps)), strict=True):
        n = cost("linear_attention", "chunkwise", B=1, T=64, H=1, K=16, V=16, C=C)
        assert shown == [n.matmul_flops / one, n.steps]
    whole = cost("linear_attention", "parallel", B=1, T=64, H=1, K=16, V=16)
    assert (n.matmul_flops, n.steps) == (whole.matmul_flops, whole.steps)


def test_chunk_size_tells_the_truth_in_its_notice():
    flops = [cost("linear_attention", "chunkwise", B=1, T=64, H=1, K=16, V=16, C=C).matmul_flops for C in LENGTHS]
    assert flops[LENGTHS.index(16)] < 2 * flops[0] < flops[LENGTHS.index(32)]
    growth = [b / a for a, b in zip(flops, flops[1:], strict=False)]
    assert growth == sorted(growth) and growth[-2:] == pytest.approx([3 / 2, 5 / 3], abs=0.01)


# -- prefix sums (chapter 6) -------------------------------------------------------------------


@pytest.mark.parametrize("C", [1, 2, 3, 4, 6, 12])
def test_prefix_sum_shows_the_rows_of_chunked(C):
    row = prefix_sum().frames[[1, 2, 3, 4, 6, 12].index(C)]
    local, carry, result = (y.tolist() for y in chunked(torch.arange(12), C))
    N = 12 // C
    assert len(row) == 1 + (C - 1) + (N - 1)  # the chapter's depth
    wanted = [*range(12), *local, *(carry[t // C] for t in range(12)), *result]
    assert texts(row[-1], "on") == [str(y) for y in wanted]
    assert f"{(12 - N) + (12 - C)} additions, {C + N - 2} in a row" in row[-1].readout
    for frame in row[1:]:
        equations = re.findall(r"(\d+) \+ (\d+) = (\d+)", frame.readout)
        assert equations and all(int(a) + int(b) == int(y) for a, b, y in equations)
    done = [sum(len(re.findall("=", f.readout)) for f in row[: i + 1]) for i in range(len(row))]
    said = [int(re.search(r"far (\d+)", f.readout)[1]) for f in row[1:]]
    assert said == done[1:]  # every addition was shown


def test_prefix_sum_of_states_ends_in_the_states_of_linear_attention():
    k, v = (torch.tensor(x).double()[None, :, None] for x in (KEYS, STATE_VALUES))
    explorable = prefix_sum(states=True)
    states = []
    for t in range(1, 13):
        _, S = linear_attention.recurrent(k[:, :t], k[:, :t], v[:, :t])
        states.append(S[0, 0])
    states = torch.stack(states)
    for row in explorable.frames:
        for kind, of in (("ink", states > 0), ("hollow", states < 0)):
            squares = [r for r in rects(row[-1], kind) if r["y"] > 206]
            assert len(squares) == int(of.sum())
        areas = sum(r["width"] ** 2 for r in rects(row[-1], "ink") if r["y"] > 206)
        wanted = 8.5**2 * (states.clamp(min=0) / states.abs().max()).sum().item()
        assert areas == pytest.approx(wanted, rel=0.02)  # sides are rounded to a tenth


# -- programs and strides (chapter 4) ----------------------------------------------------------


@pytest.mark.parametrize("N", VECTORS)
def test_every_number_has_one_program(N):
    for BLOCK, row in zip(BLOCKS, programs().frames[VECTORS.index(N)], strict=True):
        owned, masked = [], []
        for frame in row:
            cells = bs4.BeautifulSoup("".join(frame.pieces), "html.parser").find_all("rect")[: END + 1]
            colours = [" ".join(cell["class"]) for cell in cells if cell["height"] == "24"][:END]
            owned += [n for n, colour in enumerate(colours) if colour == "sky"]
            masked += [n for n, colour in enumerate(colours) if colour == "pale-red"]
            assert texts(frame, "on")[-BLOCK:].count("×") == colours.count("pale-red")
        assert owned == list(range(N))
        assert masked == list(range(N, BLOCK * len(row)))


@pytest.mark.parametrize("name", VIEWS)
def test_strides_lead_to_the_tile(name):
    """The numbers of memory that are coloured are those that the view has in the tile."""
    x, tiles = VIEWS[name], strides().frames[list(VIEWS).index(name)]
    seen = []
    for i, row in enumerate(tiles):
        for j, frame in enumerate(row):
            want = sorted(x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten().tolist())
            strip = [r for r in rects(frame, "sky", "white") if r["y"] > 200]
            sky = {r["x"] for r in rects(frame, "sky") if r["y"] > 200}
            assert [n for n, r in enumerate(strip) if r["x"] in sky] == want
            said = [int(n) for n in re.search(r"offsets ([\d, ]+)\.", frame.readout)[1].split(",")]
            assert sorted(n + x.storage_offset() for n in said) == want
            seen += want
    assert sorted(seen) == sorted(x.flatten().tolist())
