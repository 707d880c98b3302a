// A state to play with. Every picture is computed from all tokens so far, so that any number may be changed.
for (const root of document.querySelectorAll("#%ID%:not([data-live])")) {
  const given = %DATA%, {columns, most} = given;
  const find = name => root.querySelector(".explorable-" + name);
  const [picture, readout, told] = ["picture", "readout", "told"].map(find);
  const [kindList, lengthList] = root.querySelectorAll("select");
  const [stepButton, playButton, resetButton] = find("buttons").children;
  const cells = [...root.querySelectorAll("[data-cell]")];
  const [kindSeen, stepSeen] = given.seen;
  let tape, gates, at, own, shown, timer = 0;  // own: numbers that a reader has changed

  const show = x => String(+x.toFixed(2)).replace("-", "−");
  const list = row => `(${row.map(show).join(", ")})`;
  const percent = x => `${show(100 * x)} %`;
  const each = (names, as) => Object.fromEntries(names.map(name => [name, as]));
  const row = (name, i, n) => Array.from({length: n}, (_, j) => `${name}.${i}.${j}`);
  const several = (all, none) => all.length ? all.join(", ") : none;

  // One token after the other: its gate fades the rows, its key and value are written, its query reads.
  const tokenByToken = kind => {
    const [K, V] = [given.K, given.V], all = [];
    let S = Array.from({length: K}, () => Array(V).fill(0));
    const add = (t, what, values, lit, notes, words) =>
      all.push({t, what, values: {S, ...tape[t], ...values}, lit, notes, words});
    add(0, "start", {k: [], v: [], q: []}, {}, {}, "The state is empty.");
    tape.forEach(({k, v, q, name}, t) => {
      const alpha = gates[kind][t], who = name ?? `Token ${t + 1}`;
      const lit = {}, notes = {};
      const fades = kind !== "none" && alpha.some(x => x !== 1);  // a gate of ones has nothing to show
      if (k && fades) {
        S = fade(S, alpha);
        for (let i = 0; i < K; i++) {
          if (alpha[i] === 1) continue;
          for (const cell of row("S", i, V)) [lit[cell], notes[cell]] = ["fade", `× ${show(alpha[i])}`];
        }
        const same = alpha.every(x => x === alpha[0]);
        const kept = same ? `every row keeps ${percent(alpha[0])}`
          : alpha.map((x, i) => `row ${i + 1} keeps ${percent(x)}`).join(", ");
        add(t, "gate", {q: []}, {...lit}, {...notes}, `${who}. First the gate: ${kept}.`);
      }
      if (k) {
        S = write(S, k, v);
        const lit = {}, notes = {};
        k.forEach((x, i) => v.forEach((y, j) => {
          if (!x) return;
          lit[`k.${i}`] = lit[`v.${j}`] = "made";
          if (y) [lit[`S.${i}.${j}`], notes[`S.${i}.${j}`]] = ["made", (x * y < 0 ? "" : "+") + show(x * y)];
        }));
        const rows = k.map((x, i) => x && `${show(x)} × the value to row ${i + 1}${columns ? "" : `, now ${list(S[i])}`}`)
          .filter(Boolean);
        const gate = kind === "none" || fades ? "" : "The gate keeps every row. ";
        add(t, "write", {q: []}, lit, notes, `${who}. ${gate}Write: the key adds ${rows.join("; ") || "nothing"}.`);
      }
      if (q) {
        const o = read(q, S), lit = {}, notes = {};
        q.forEach((x, i) => {
          if (!x) return;
          lit[`q.${i}`] = "read";
          for (const cell of row("S", i, V)) [lit[cell], notes[cell]] = ["read", `${show(x)} ×`];
        });
        for (let j = 0; j < V; j++) lit[`o.${j}`] = "made";
        const found = o.map((x, j) => [x, columns?.[j]]).filter(([x]) => Math.abs(x) > .005);
        const out = columns ? several(found.map(([x, word]) => `${word} ${show(x)}`), "nothing") : list(o);
        add(t, "read", {o, ...(k ? {} : {k: [], v: []})}, lit, notes, `${who}. Read: the query adds up the rows, out comes ${out}.`);
      }
    });
    return all;
  };

  // Chunk by chunk: the state stands still inside a chunk, and its own pairs meet as scores.
  const byChunks = kind => {
    const {K, V} = given, C = +lengthList.value, T = tape.length, all = [];
    const [q, k, v] = ["q", "k", "v"].map(name => tape.map(token => token[name]));
    const blank = width => Array.from({length: T}, () => Array(width).fill(null));
    let S = Array.from({length: K}, () => Array(V).fill(0)), [P, o] = [blank(T), blank(V)];
    const add = (t, what, lit, words) => all.push({t, what, values: {S, P, o, q, k, v}, lit, notes: {}, words});
    add(0, "start", {}, `The state is empty, the tokens come in chunks of ${C}.`);
    for (let start = 0; start < T; start += C) {
      const stop = start + C, done = chunk(q, k, v, gates[kind], S, start, stop);
      const own = (name, width) => Array.from({length: C}, (_, n) => row(name, start + n, width)).flat();
      const held = Array.from({length: K}, (_, i) => row("S", i, V)).flat();
      const set = (matrix, rows) => matrix.map((old, t) => t >= start && t < stop ? rows[t - start] : old);
      const pairs = [];
      for (let i = start; i < stop; i++) for (let j = start; j <= i; j++) pairs.push(`P.${i}.${j}`);
      const who = C > 1 ? `Tokens ${start + 1} to ${stop}` : `Token ${stop}`, one = C > 1 ? "" : "s";
      o = set(o, done.inter);
      add(start, "inter", {...each([...own("q", K), ...held], "read"), ...each(own("o", V), "made")},
        `${who} read${one} the state before the chunk, each query faded by the gates since then.`);
      P = set(P, done.scores.map((scores, n) => Array.from({length: T}, (_, j) =>
        j >= start && j <= start + n ? scores[j - start] : null)));
      add(start, "scores", {...each([...own("q", K), ...own("k", K)], "read"), ...each(pairs, "made")},
        one ? `${who} scores itself: the only pair inside the chunk.`
          : `${who} score each other: the ${pairs.length} pairs inside the chunk, faded by the gates between.`);
      o = set(o, done.o);
      add(start, "output", {...each([...pairs, ...own("v", V)], "read"), ...each(own("o", V), "made")},
        `Scores times values are added: the outputs ${done.o.map(list).join(", ")}.`);
      S = done.after;
      add(start, "write", {...each([...own("k", K), ...own("v", V)], "read"), ...each(held, "made")},
        `${who} ${one ? "is written" : "are written at once"}: the state becomes ${S.map(list).join(", ")}.`);
    }
    return all;
  };

  const records = () => (lengthList ? byChunks : tokenByToken)(kindList.value);

  const draw = () => {
    const kind = kindList.value, all = records();
    at = Math.min(at, all.length - 1);
    const {t, what, values, lit, notes, words} = all[at];
    shown = {t, what};
    for (const cell of cells) {
      const value = cell.dataset.cell.split(".").reduce((x, n) => x?.[n], values);
      const [number, note] = cell.children, there = typeof value === "number";
      number.textContent = there ? show(value) : "";
      note.textContent = notes[cell.dataset.cell] ?? "";
      cell.dataset.lit = lit[cell.dataset.cell] ?? "";
      cell.dataset.sign = there ? Math.sign(value) : 0;
      cell.style.setProperty("--size", there ? Math.min(1, Math.abs(value) / most) : 0);
      cell.dataset.say = cell.dataset.name + (there ? `: ${show(value)}${note.textContent && `, ${note.textContent} in this step`}` : ": nothing yet");
    }
    for (const input of root.querySelectorAll("[data-number]")) {
      const [name, i] = input.dataset.number.split(".");
      if (input !== document.activeElement) input.value = tape[t][name]?.[i] ?? "";
      input.dataset.lit = lit[input.dataset.number] ?? "";
    }
    for (const input of root.querySelectorAll("[data-gate]")) {
      const [token, i] = place(input, t);
      input.value = gates[kind][token]?.[i] ?? 1;
      input.disabled = !gates[kind][token];
      input.nextElementSibling.textContent = show(+input.value);
    }
    const token = root.querySelector(".playable-token");
    if (token) token.textContent = `token ${t + 1} of ${tape.length}`;
    readout.textContent = guess.say(words, there());
    tell();
  };
  // At the step that shows the answer to the question.
  const there = () => !own && kindList.value === kindSeen && (lengthList ? at === records().length - 1 : at === stepSeen);
  // The same step of the same token, of which there may be more or fewer now.
  const stay = (t, what) => {
    const all = records(), same = step => all.findIndex(record => record.t === t && record.what === step);
    at = [same(what), same("write")].find(i => i >= 0) ?? all.findLastIndex(record => record.t <= t);
  };
  // The token that has written last: a question fades nothing, so its gates would be sliders without an effect.
  const writer = t => {
    while (t > 0 && !tape[t].k) t--;
    return t;
  };
  // Which token and row a gate belongs to; without a token's number it is that of the last write.
  const place = (input, t) => {
    const numbers = input.dataset.gate.split(".").map(Number);
    return numbers.length > 1 ? numbers : [writer(t), ...numbers];
  };

  const pause = () => {
    clearInterval(timer);
    timer = 0;
    playButton.textContent = "Play";
    readout.ariaLive = "polite";
  };
  const step = () => {
    const last = records().length - 1;
    at = at < last ? at + 1 : 0;
    guess.speak();
    draw();
    if (at === last || guess.stops(there())) pause();
  };
  const play = () => {
    timer = setInterval(step, 1200);
    playButton.textContent = "Pause";
    readout.ariaLive = "off";
    step();
  };
  const reset = () => {
    pause();
    ({tape, gates} = structuredClone(given));
    [at, own] = [0, false];
    kindList.value = guess.answer() ? kindSeen : given.kind;
    if (lengthList) lengthList.value = given.C;
    draw();
  };
  stepButton.onclick = () => { pause(); step(); };
  playButton.onclick = () => timer ? pause() : play();
  resetButton.onclick = reset;

  // A reader's own token comes after those that have been read.
  for (const button of root.querySelectorAll("[data-token]")) {
    button.onclick = () => {
      pause();
      guess.speak();
      own = true;
      const {t} = shown, n = at ? t + 1 : 0, before = writer(t);
      tape = [...tape.slice(0, n), given.offered[button.dataset.token]];
      for (const kind in gates) gates[kind] = [...gates[kind].slice(0, n), gates[kind][before].slice()];
      at = records().findIndex((record, i) => i > 0 && record.t === n) - 1;
      play();
    };
  }
  root.addEventListener("input", ({target}) => {
    pause();
    guess.speak();
    const {t, what} = shown;
    if (target.dataset.gate && kindList.value === "none") {  // a gate that is touched is a gate of its own
      gates.vector = gates.none.map(row => row.slice());
      kindList.value = "vector";
    }
    const kind = kindList.value;
    own ||= target.tagName !== "SELECT";
    if (target.dataset.number && Number.isFinite(target.valueAsNumber)) {
      const [name, i] = target.dataset.number.split(".");
      tape[t][name][i] = target.valueAsNumber;
    }
    if (target.dataset.gate) {  // a constant is the same everywhere, a scalar the same for all rows
      const [token, row] = place(target, t);
      gates[kind].forEach((gate, s) => gate.forEach((_, i) => {
        if (kind === "constant" || s === token && (kind === "scalar" || i === row)) gate[i] = +target.value;
      }));
    }
    stay(t, what);
    draw();
  });

  const {tell} = pointing(picture, told, part => tell(part));
  const guess = guessing(root, reset);
  root.dataset.live = "";
  for (const hidden of root.querySelectorAll("[hidden]")) hidden.hidden = false;
  for (const input of root.querySelectorAll("input")) input.disabled = false;
  reset();
}
