"""The printed edition: nothing outside its page, every chapter where the contents say (make pdf)."""

import browser as tools
import make_pdf
import pypdfium2
import pytest

pytestmark = pytest.mark.xdist_group("pdf")  # one process prints

POINTS = 72 / 25.4  # a millimetre
IMAGE = pypdfium2.raw.FPDF_PAGEOBJ_IMAGE


@pytest.fixture(scope="module")
def pdf():
    make_pdf.print_book(make_pdf.PDF)
    with pypdfium2.PdfDocument(make_pdf.PDF) as document:
        yield document


def boxes(page):
    """(left, bottom, right, top) of every line of text and of every image, on the page."""
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


def test_no_text_and_no_image_outside_its_page(pdf):
    assert len(pdf) > 100
    found, edge = [], 15 * POINTS  # of the margins of 18 mm; indices and accents reach a little out
    for number, page in enumerate(pdf, 1):
        width, height = page.get_size()
        for left, bottom, right, top in boxes(page):
            if left < edge or right > width - edge or bottom < 0 or top > height:
                found.append(f"page {number}: {left:.0f} to {right:.0f}, {bottom:.0f} to {top:.0f}")
    assert not found, "\n".join(found)


def test_contents_and_bookmarks_lead_to_the_chapters(pdf):
    def squeeze(text):
        return "".join(text.split())

    marks = [(m.level, squeeze(m.get_title()), m.get_dest().get_index()) for m in pdf.get_toc()]
    chapters = [(title, index) for level, title, index in marks if level == 0]
    assert len(chapters) == len(tools.book_pages())
    texts = [squeeze(page.get_textpage().get_text_bounded()) for page in pdf]
    contents = "".join(texts[: chapters[0][1]])
    for title, index in chapters:
        assert texts[index].startswith(title), (title, index + 1)
        assert f"{title}{index + 1}" in contents, (title, index + 1)
