// The search page: every word must occur in a page; chapters come before appendices, and these before the API.
// SEARCH_PAGES (search-data.js, written by the build) has the text of each section, without listings.
(() => {
  const SHOWN = 6; // pages, before one asks for more
  const WEIGHT = { chapter: 1, appendix: 0.6, api: 0.3 };
  const KIND = { chapter: "Chapter", appendix: "Reference", api: "API" };
  const SMALL = /^(a|an|and|by|for|how|i|in|is|it|my|of|on|or|the|to|what|with|your)$/; // say nothing of a subject
  const root = document.documentElement.dataset.content_root || "./";
  const escape = text => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const fold = text => text.normalize("NFKC").toLowerCase();

  // Where a word begins with this, also in its plural and without; three letters are a word of their own ("SM" is not in
  // "small"). Words of a name may be written together. Chinese has no borders between words.
  const pattern = words => new RegExp(words.map(word => {
    const stem = /^[a-z]{4,}s$/.test(word) && !word.endsWith("ss") ? word.slice(0, -1) : word;
    const spelt = escape(stem).replace(/[\s-]+/g, "[\\s-]*");
    if (!/^[\p{L}\p{N}_]/u.test(stem) || /\p{Script=Han}/u.test(stem)) return spelt;
    return "(?<![\\p{L}\\p{N}])" + spelt + (stem.length <= 3 ? "s?(?![\\p{L}\\p{N}])" : "");
  }).join("|"), "giu");
  const bare = title => title.replace(/^\d+[a-z]?\. /, "");
  const count = (text, re) => (text.match(re) || []).length;

  const pages = SEARCH_PAGES;
  const terms = pages.flatMap(page => page.terms.map(([anchor, names, text]) => ({ page, anchor, names, text })));

  // A query that is a name of a term is searched by all its names; else word by word.
  function needles(query) {
    const asked = fold(query).trim();
    const term = terms.find(t => t.names.some(name => fold(name) === asked));
    if (term) return { term, parts: [pattern([asked, ...term.names.map(fold)])] };
    const words = asked.split(/[\s,;]+/).filter(Boolean), telling = words.filter(word => !SMALL.test(word));
    return { parts: (telling.length ? telling : words).map(word => pattern([word])) };
  }

  function rank(query) {
    const { term, parts } = needles(query);
    if (!parts.length) return { found: [], objects: [] };
    const any = new RegExp(parts.map(re => re.source).join("|"), "giu");
    const whole = pattern([fold(query).trim()]);
    // a word that few sections have says more
    const all = pages.flatMap(page => page.sections);
    const weight = parts.map(re => Math.log(1 + all.length / (1 + all.filter(([, h, t]) => count(h + " " + t, re)).length)));
    const found = [];
    for (const page of pages) {
      const scored = page.sections.map(([anchor, heading, text]) => ({
        anchor, heading, text,
        score: parts.reduce((sum, re, i) => sum + weight[i]
          * (4 * Math.min(1, count(heading, re)) + Math.min(4, Math.log2(1 + count(text, re)))), 0)
          + 4 * Math.min(1, count(heading, whole)) + Math.min(1, count(text, whole)),
      })).filter(section => section.score > 0).sort((a, b) => b.score - a.score);
      const everything = [page.title, ...scored.flatMap(s => [s.heading, s.text])].join("\n");
      if (!parts.every(re => count(everything, re))) continue;
      const title = parts.reduce((sum, re, i) => sum + 8 * weight[i] * Math.min(1, count(page.title, re)), 0)
        + 8 * Math.min(1, count(page.title, whole));
      const score = title + scored.slice(0, 4).reduce((sum, s, i) => sum + s.score / (i + 1), 0);
      // the beginning of a page has no heading of its own to show
      const shown = scored.filter(s => s.heading !== bare(page.title) || count(s.text, any));
      found.push({ page, sections: (shown.length ? shown : scored).slice(0, 2), score: score * WEIGHT[page.kind] });
    }
    const objects = pages.flatMap(page => page.objects.map(([anchor, name, text]) => ({ page, anchor, name, text })))
      .filter(o => parts.every(re => count(o.name.replaceAll(/[._]/g, " ") + " " + o.name + " " + o.text, re)))
      .sort((a, b) => count(b.name, whole) - count(a.name, whole) || a.name.length - b.name.length);
    found.sort((a, b) => (a.page.kind === "api") - (b.page.kind === "api") || b.score - a.score);
    return { term, found, objects, words: any };
  }

  function element(tag, options, ...children) {
    const made = Object.assign(document.createElement(tag), options);
    made.append(...children.filter(child => child !== undefined && child !== ""));
    return made;
  }

  // Some words before the first hit and some after it, the hits marked.
  function excerpt(text, words, size = 200) {
    const first = Math.max(0, text.search(words));
    let from = Math.max(0, first - 70);
    if (from) {
      // at a word before another word, not in the middle of a formula
      const begins = /(?<=[\s(])\p{L}{2,}[,;:.]? \p{L}{2,}(?![\p{L}\p{N}(^_])/gu;
      begins.lastIndex = from;
      const begun = begins.exec(text)?.index ?? first;
      from = begun <= first ? begun : text.lastIndexOf(" ", first) + 1;
    }
    let to = Math.min(text.length, from + size);
    if (to < text.length) to = text.lastIndexOf(" ", to);
    const shown = text.slice(from, to), box = element("p", { className: "context" }, from ? "… " : "");
    let at = 0;
    for (const hit of shown.matchAll(words)) {
      if (!hit[0]) break;
      box.append(shown.slice(at, hit.index), element("mark", {}, hit[0]));
      at = hit.index + hit[0].length;
    }
    box.append(shown.slice(at), to < text.length ? " …" : "");
    return box;
  }

  const link = (page, anchor, text, words) => {
    const made = element("a", { href: root + page.url + (anchor ? "#" + anchor : "") });
    made.append(...excerpt(text, words, 1e4).childNodes);
    return made;
  };

  function show(query) {
    const box = document.getElementById("search-results"), status = document.getElementById("search-status");
    box.replaceChildren();
    status.textContent = "";
    if (!query.trim()) return;
    const { term, found, objects, words } = rank(query);
    status.textContent = found.length + objects.length
      ? `${found.length} page${found.length === 1 ? "" : "s"} and ${objects.length} of the API for “${query.trim()}”`
      : `Nothing for “${query.trim()}”. Fewer or shorter words find more; the glossary lists the terms.`;
    if (term) box.append(element("aside", { className: "search-term" },
      element("strong", {}, link(term.page, term.anchor, term.names[0], words)), " ", term.text));
    const item = (kind, head, ...rest) => element("li", {}, element("span", { className: "search-kind" }, KIND[kind]), head, ...rest);
    const list = element("ul", {});
    for (const { page, sections } of found) {
      list.append(item(page.kind, link(page, "", page.title, words), ...sections.map((s, i) =>
        element("div", { className: "search-section" },
          s.heading === bare(page.title) ? "" : link(page, s.anchor, s.heading, words),
          i < 1 && s.text ? excerpt(s.text, words) : ""))));
    }
    for (const { page, anchor, name, text } of objects.slice(0, 30)) {
      list.append(item("api", link(page, anchor, name, words), element("p", { className: "context" }, text)));
    }
    box.append(list);
    // the best first; the rest when asked for
    const rest = [...list.children].slice(SHOWN);
    if (!rest.length) return;
    const more = element("button", { type: "button", className: "btn btn-sm search-more" }, `${rest.length} more`);
    for (const entry of rest) entry.hidden = true;
    more.onclick = () => {
      for (const entry of rest) entry.hidden = false;
      rest[0].querySelector("a").focus();
      more.remove();
    };
    box.append(more);
  }

  const field = document.querySelector(".bd-search-container input[type=search]");
  field.value = new URLSearchParams(location.search).get("q") || "";
  show(field.value);
  field.addEventListener("input", () => show(field.value));
  field.focus();
  field.select();
})();
