"""The printed edition: nothing outside its page, every chapter where the contents say (make pdf)."""

import browser as tools
import make_pdf
import pypdfium2
import pytest

pytestmark = pytest.mark.browser

EDGE = 15 * 72 / 25.4  # of the margins of 18 mm: indices and accents reach a little out
IMAGE = pypdfium2.raw.FPDF_PAGEOBJ_IMAGE


def boxes(page):
    """(left, bottom, right, top) of every piece of text and of every image, on the page."""
    text = page.get_textpage()
    yield from (text.get_rect(i) for i in range(text.count_rects()))
    for image in page.get_objects(filter=[IMAGE]):
        left, bottom, right, top = image.get_bounds()
        corners = [(x, y) for x in (left, right) for y in (bottom, top)]
        around = image.container
        while around is not None:  # an object in a form has the form's coordinates
            corners = [around.get_matrix().on_point(x, y) for x, y in corners]
            around = around.container
        xs, ys = zip(*corners, strict=True)
        yield min(xs), min(ys), max(xs), max(ys)


def outside(page):
    width, height = page.get_size()
    return [box for box in boxes(page) if box[0] < EDGE or box[2] > width - EDGE or box[1] < 0 or box[3] > height]


def assert_contents_and_bookmarks_lead_to_the_chapters(pdf):
    def squeeze(text):
        return "".join(text.split())

    marks = [mark for mark in pdf.get_toc() if mark.level == 0]
    assert len(marks) == len(tools.book_pages())
    contents = squeeze(
        "".join(pdf[i].get_textpage().get_text_bounded() for i in range(1, marks[0].get_dest().get_index()))
    )
    for mark in marks:
        title, index = squeeze(mark.get_title()), mark.get_dest().get_index()
        assert title in squeeze(pdf[index].get_textpage().get_text_bounded()), title
        assert f"{title}{index + 1}" in contents, title


@pytest.mark.deep
def test_the_printed_book(chromium):
    """Nothing outside its page, and the contents are right: one test, so that the book is printed once."""
    make_pdf.print_book(chromium, make_pdf.PDF)
    with pypdfium2.PdfDocument(make_pdf.PDF) as pdf:
        assert len(pdf) > 100
        found = {number: wrong for number, page in enumerate(pdf, 1) if (wrong := outside(page))}
        assert not found
        assert_contents_and_bookmarks_lead_to_the_chapters(pdf)


@pytest.mark.parametrize("cut", ["overflow: hidden", "width: 900px", "", "margin-left: -40px"])
def test_what_would_be_cut_off_is_refused(chromium, tmp_path, cut):
    tab = chromium.new_page(viewport={"width": make_pdf.WIDTH, "height": 960})
    words = "word " * (2 if "margin" in cut else 200)
    html = f'<article><p style="white-space: nowrap; {cut}">{words}</p></article>'
    with pytest.raises(RuntimeError, match="wider than the paper"):
        make_pdf.print_page(tab, html, tmp_path / "a.pdf")
    tab.close()


@pytest.mark.parametrize("margin, count", [(5, 1), (18, 0)])
def test_what_is_outside_is_seen(chromium, tmp_path, margin, count):
    tab = chromium.new_page(viewport={"width": make_pdf.WIDTH, "height": 960})
    html = f"<style>@page {{ size: A4; margin: {margin}mm }} body {{ margin: 0 }}</style><article>word</article>"
    make_pdf.print_page(tab, html, tmp_path / "a.pdf")
    tab.close()
    with pypdfium2.PdfDocument(tmp_path / "a.pdf") as document:
        assert len(outside(document[0])) == count
