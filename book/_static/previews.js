// A term, an equation or a citation shows itself when its link is pointed at or focused; Escape closes it.
// Files in previews/ (gla_previews.py) are scripts that call addPreviews, so that they load from the disk too.
const previews = new Map(), asked = new Map();
function addPreviews(page, found) {
  previews.set(page, found);
}

(() => {
  const LINKS = 'a.reference.internal[href*="#equation-"], a.reference.internal[href*="#term-"], a.reference.internal[href*="bibliography.html#"]';
  const root = document.documentElement.dataset.content_root || "./";
  const box = document.createElement("div");
  box.id = "preview";
  box.setAttribute("role", "tooltip");
  let link = null, timer = 0;

  function load(page) {
    if (!asked.has(page)) {
      asked.set(page, new Promise(done => {
        const script = document.createElement("script");
        script.src = `${root}_static/previews/${page}.js`;
        script.onload = script.onerror = done;
        document.head.append(script);
      }));
    }
    return asked.get(page);
  }

  async function open(target) {
    link = target;
    const url = new URL(target.href);
    const page = url.pathname.split("/").pop().replace(/\.html$/, "");
    await load(page);
    const html = previews.get(page)?.[decodeURIComponent(url.hash.slice(1))];
    if (!html || link !== target) return;
    box.innerHTML = html;
    document.body.append(box);
    target.setAttribute("aria-describedby", box.id);
    const at = target.getClientRects()[0], size = box.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    box.style.left = `${scrollX + Math.max(8, Math.min(at.left, wide - size.width - 8))}px`;
    const above = at.bottom + size.height + 8 > innerHeight && at.top > size.height + 8;
    box.style.top = `${scrollY + (above ? at.top - size.height - 6 : at.bottom + 6)}px`;
  }

  function close() {
    link?.removeAttribute("aria-describedby");
    link = null;
    box.remove();
  }

  const later = (wait, action) => { clearTimeout(timer); timer = setTimeout(action, wait); };
  addEventListener("DOMContentLoaded", () => {
    for (const target of document.querySelectorAll(".bd-article :is(" + LINKS + ")")) {
      target.removeAttribute("title"); // the browser's own tip would lie over ours
      target.addEventListener("pointerenter", event => event.pointerType === "mouse" && later(250, () => open(target)));
      target.addEventListener("pointerleave", () => later(250, close));
      target.addEventListener("focus", () => target.matches(":focus-visible") && later(0, () => open(target)));
      target.addEventListener("blur", () => later(0, close));
    }
    box.addEventListener("pointerenter", () => clearTimeout(timer));
    box.addEventListener("pointerleave", () => later(250, close));
    addEventListener("keydown", event => event.key === "Escape" && close());
  });
})();
