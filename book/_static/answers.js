// Exercises that are answered in the page. Each form carries rules that gla_ref.exercises made: the first whose
// intervals hold the answer's numbers says its sentence.
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

// 0.5, 1/16, 32,768 or 1e-3; NaN for what is none of them, such as 0,625: no group of thousands follows a 0
function read(text) {
  text = text.trim().replace(/\u2212/g, "-").replace(/^([+-]?[1-9]\d{0,2})((,\d{3})+)(?=$|[./])/, (_, a, b) => a + b.replace(/,/g, ""));
  const [over, under = "1", ...more] = text.split("/").map(part => part.trim());
  return more.length || !NUMBER.test(over) || !NUMBER.test(under) ? NaN : Number(over) / Number(under);
}

// the numbers of an answer; what is wrong with it, or missing, comes as a text
function numbers(form) {
  const all = [], boxes = [...form.querySelectorAll("input[type=checkbox]")];
  if (boxes.length && !boxes.some(box => box.checked)) return "Your turn: tick what belongs to the answer.";
  for (const part of form.querySelectorAll("fieldset, label:not(fieldset label)")) {
    const inputs = [...part.querySelectorAll("input")], chosen = inputs.filter(input => input.checked);
    if (inputs[0].type === "checkbox") all.push(...inputs.map(input => Number(input.checked)));
    else if (inputs[0].type === "radio" && chosen.length) all.push(Number(chosen[0].value));
    else if (inputs[0].type === "radio" || !inputs[0].value.trim()) return "Your turn: one of the answers is still missing.";
    else all.push(read(inputs[0].value));
  }
  return all.some(Number.isNaN) ? "Expected a number, such as 0.5, 1/16 or 1e-3, with a point for the decimals." : all;
}

const holds = (place, x) => place.every((interval, i) => !interval || interval[0] <= x[i] && x[i] <= interval[1]);

for (const form of document.querySelectorAll("form.answer")) {
  const { rules, sentences } = JSON.parse(form.querySelector("script").textContent);
  const verdict = form.querySelector(".verdict");
  const say = (status, text) => {
    verdict.className = `verdict verdict-${status}`;
    verdict.textContent = text;
  };
  form.addEventListener("submit", event => {
    event.preventDefault();
    const x = numbers(form);
    if (typeof x === "string") return say("open", `… ${x}`);
    const [, sentence] = rules.find(([place]) => holds(place, x));
    say(sentence ? "wrong" : "right", `${sentence ? "✗" : "✓"} ${sentences[sentence]}`); // the first one is "Right."
  });
  form.addEventListener("input", () => say("none", "")); // it was about another answer
}
