// What scrolls sideways can be reached and scrolled from the keyboard (the theme does so for code).
const reach = new ResizeObserver(boxes => {
  for (const { target } of boxes) {
    if (target.scrollWidth > target.clientWidth && getComputedStyle(target).overflowX === "auto") target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".bd-article :is(table, .katex-display)")) reach.observe(box);
});
