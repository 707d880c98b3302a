// The recurrence of gla_ref.gla, one head and scale 1, and its chunkwise form: rows of numbers. Tests hold it to that.
const read = (q, S) => S[0].map((_, j) => q.reduce((sum, x, i) => sum + x * S[i][j], 0));
const fade = (S, alpha) => S.map((row, i) => row.map(x => alpha[i] * x));
const write = (S, k, v) => S.map((row, i) => row.map((x, j) => x + k[i] * v[j]));
const decay = (alpha, from, to, c) => {  // of channel c, by the gates after token `from` up to token `to`
  let product = 1;
  for (let t = from + 1; t <= to; t++) product *= alpha[t][c];
  return product;
};

// Tokens [start, stop) of one chunk, from the state before it: what each token reads of that state, the scores
// of the chunk's own pairs, the outputs, and the state after it.
const chunk = (q, k, v, alpha, S, start, stop) => {
  const tokens = Array.from({length: stop - start}, (_, n) => start + n);
  const inter = tokens.map(i => read(q[i].map((x, c) => x * decay(alpha, start - 1, i, c)), S));
  const scores = tokens.map(i => tokens.map(
    j => j > i ? 0 : q[i].reduce((sum, x, c) => sum + x * k[j][c] * decay(alpha, j, i, c), 0)));
  const own = scores.map(row => read(row, tokens.map(j => v[j])));
  const o = inter.map((row, n) => row.map((x, c) => x + own[n][c]));
  let after = fade(S, S.map((_, c) => decay(alpha, start - 1, stop - 1, c)));
  for (const j of tokens) after = write(after, k[j].map((x, c) => x * decay(alpha, j, stop - 1, c)), v[j]);
  return {inter, scores, o, after};
};
