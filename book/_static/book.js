// What scrolls sideways can be reached and scrolled from the keyboard (the theme does so for code).
const reach = () => {
  for (const box of document.querySelectorAll(".bd-article :is(table, .katex-display, span.math)")) {
    if (box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX === "auto") box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
addEventListener("toggle", reach, true); // a table that was folded
