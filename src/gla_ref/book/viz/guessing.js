// A guess comes first: until there is one, or something is moved, caption and readout are silent. An answer takes the figure
// to the beginning of its case (`begin`); where play reaches the place that shows the answer, the guess is named.
const guessing = (root, begin) => {
  const answers = [...root.querySelectorAll(".explorable-answers button")];
  const verdict = root.querySelector(".explorable-verdict");
  const right = answers.find(answer => "right" in answer.dataset);
  let guess = null, waits = false;
  if (right) root.dataset.silent = "";
  const speak = () => delete root.dataset.silent;
  for (const answer of answers) {
    answer.onclick = () => {
      for (const other of answers) other.ariaPressed = other === answer;
      [guess, waits] = [answer, true];
      verdict.textContent = `${answer.dataset.why} Press Play to see it.`;
      speak();
      begin();
    };
  }
  return {
    speak,
    answer: () => guess?.textContent,
    // What the readout says of a frame: nothing yet, its words, or its words and what they say of the guess.
    say: (words, there) => {
      if ("silent" in root.dataset) return "Guess first. Or press Play, and see.";
      if (!there || !guess) return words;
      verdict.textContent = guess.dataset.why;
      return `${words} So ${guess === right ? "it is" : `it is not “${guess.textContent}” but`} “${right.textContent}”.`;
    },
    // Whether this is the first time that play has come to the place: then it stops there.
    stops: there => {
      const stop = waits && there && !!guess;
      if (stop) waits = false;
      return stop;
    },
  };
};
