// The colours are chosen before anything is drawn: the theme does so last of all, and then all is styled again.
const root = document.documentElement;
if (root.dataset.mode === "auto") root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

// A page can be read before all of it is laid out: while it arrives the sections below the first screen wait (book.css),
// and then take their turn. A page that is entered further down is laid out at once.
const WAITING = ".arriving .bd-article > section > section:nth-of-type(n + 2):not(.arrived)";
const enters = !location.hash && performance.getEntriesByType("navigation")[0]?.type === "navigate";
root.classList.toggle("arriving", enters);
addEventListener("load", async () => {
  for (const section of document.querySelectorAll(WAITING)) {
    await new Promise(next => (window.requestIdleCallback ?? setTimeout)(next));
    section.classList.add("arrived");
  }
  arrive();
});
// Nor does whoever follows a link within the page wait: its place is known only once all is laid out.
addEventListener("hashchange", () => {
  if (!root.classList.contains("arriving")) return;
  arrive();
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
});
function arrive() {
  root.classList.remove("arriving");
  widen();
}

// What scrolls sideways can be reached and scrolled from the keyboard (the theme does so for code).
const reach = new ResizeObserver(boxes => {
  for (const { target } of boxes) {
    const scrolls = target.scrollWidth > target.clientWidth + 1 && getComputedStyle(target).overflowX === "auto";
    if (scrolls) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
    target.classList.toggle("scrolls", scrolls);
    mark({ target });
  }
});

// Whether a table or a listing goes on to the right of what is seen of it.
function mark({ target }) {
  target.classList.toggle("more", target.scrollLeft + target.clientWidth < target.scrollWidth - 1);
}

// Listings and tables that are wider than the text take what they need of the margin to the right, and no more; while one
// of them is on the screen the contents that stand there are hidden.
const passing = new Set();
const watch = new IntersectionObserver(boxes => {
  for (const { target, isIntersecting } of boxes) isIntersecting ? passing.add(target) : passing.delete(target);
  document.querySelector(".bd-sidebar-secondary")?.classList.toggle("hide", passing.size > 0);
}, { rootMargin: "0px 0px -33% 0px" });

function widen() {
  const article = document.querySelector(".bd-article"), content = document.querySelector(".bd-content");
  if (!article) return;
  const room = content.getBoundingClientRect().right - article.getBoundingClientRect().right - 16;
  const wide = [...article.querySelectorAll("div.highlight > pre, table.table")].filter(box => !box.closest(WAITING));
  const boxes = wide.map(box => {
    const outer = box.closest("div.cell_input") ?? box.closest("div.highlight") ?? box;
    return [box, outer, box.scrollWidth - box.clientWidth + parseFloat(outer.style.getPropertyValue("--wider") || 0)];
  });
  for (const [box, outer, needed] of boxes) {
    const wide = needed > 1 && room > 32 && innerWidth >= 1200;
    outer.classList.toggle("wide", wide);
    outer.style.setProperty("--wider", wide ? `${Math.min(Math.ceil(needed), room)}px` : "0px");
    wide ? watch.observe(outer) : watch.unobserve(outer);
  }
}

// The theme's search opens only once all of a page is loaded; until then it is opened here.
function search(event) {
  const key = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k";
  const dialog = document.querySelector("dialog#pst-search-dialog:not([open])");
  if (!dialog || !key && !event.target.closest?.(".search-button__button")) return;
  event.preventDefault();
  dialog.showModal();
}
for (const kind of ["keydown", "click"]) {
  addEventListener(kind, search);
  addEventListener("load", () => removeEventListener(kind, search));
}

addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".bd-article :is(table, .katex-display)")) {
    reach.observe(box);
    box.addEventListener("scroll", mark, { passive: true });
  }
  // a short formula and the comma after it stay together
  for (const math of document.querySelectorAll(".bd-article span.math")) {
    const after = math.nextSibling, mark = after?.nodeType === 3 && after.data.match(/^[,.;:!?)]+/)?.[0];
    if (!mark || (math.querySelector("annotation")?.textContent.length ?? 99) > 14) continue;
    const whole = document.createElement("span");
    whole.className = "whole";
    math.replaceWith(whole);
    whole.append(math, mark);
    after.data = after.data.slice(mark.length);
  }
  for (const box of document.querySelectorAll(".bd-article div.highlight pre")) {
    new ResizeObserver(([listing]) => mark(listing)).observe(box);
    box.addEventListener("scroll", mark, { passive: true });
  }
  for (const toggle of document.querySelectorAll(".bd-links details > summary")) {
    toggle.setAttribute("aria-label", `Pages under ${toggle.closest("li").querySelector("a").textContent.trim()}`);
  }
  // the theme remembers how far the side bar was scrolled; the page one reads must be in sight all the same
  addEventListener("load", () => {
    const bar = document.querySelector(".bd-sidebar-primary"), here = bar?.querySelector(".bd-links li.current.active > a, .bd-links a.current");
    if (!here) return;
    const { top, bottom } = here.getBoundingClientRect(), { clientHeight } = bar;
    if (top < 80 || bottom > clientHeight - 60) bar.scrollTop += top - clientHeight / 2;
  });
  widen();
  addEventListener("resize", widen);
  addEventListener("toggle", widen, true); // what was folded has no width
});
