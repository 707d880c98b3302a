// The same for every explorable: find the frame that the controls point at, and show it.
for (const root of document.querySelectorAll("#%ID%:not([data-live])")) {
  const {pieces, frames, labels, play, first, seen} = %DATA%;
  const find = name => root.querySelector(".explorable-" + name);
  const [picture, readout, told] = ["picture", "readout", "told"].map(find);
  const svg = picture.querySelector("svg");
  const controls = [...find("controls").querySelectorAll("input, select")];
  const slider = controls[play];
  const [stepButton, playButton, resetButton] = find("buttons").children;
  let timer = 0;

  // At the frame that shows what the guess leads to.
  const there = () => seen[guess.answer()]?.every((value, n) => value === +controls[n].value);
  const draw = () => {
    let node = frames;
    controls.forEach((control, n) => {
      if (control.type === "range") {
        control.max = node.length - 1;
        const label = labels[n][control.value];
        control.setAttribute("aria-valuetext", label);
        control.parentNode.querySelector("b").textContent = label;
      }
      node = node[control.value];
    });
    const [words, ...shown] = node;
    svg.innerHTML = shown.map(i => pieces[i]).join("");
    readout.textContent = guess.say(words, there());
    tell();
  };
  const move = () => { pause(); guess.speak(); draw(); };

  // Play, step and reset move one of the sliders; the readout is not read aloud while it runs.
  const pause = () => {
    clearInterval(timer);
    timer = 0;
    playButton.textContent = "Play";
    readout.ariaLive = "polite";
  };
  const step = () => {
    slider.value = +slider.value < +slider.max ? +slider.value + 1 : 0;
    guess.speak();
    draw();
    if (slider.value === slider.max || guess.stops(there())) pause();
  };
  stepButton.onclick = () => { pause(); step(); };
  playButton.onclick = () => {
    if (timer) return pause();
    timer = setInterval(step, Math.max(200, Math.min(900, 24000 / labels[play].length)));
    playButton.textContent = "Pause";
    readout.ariaLive = "off";
    step();
  };
  const reset = () => {
    pause();
    const place = seen[guess.answer()];
    controls.forEach((control, n) => {
      control.max = labels[n].length - 1;
      control.value = !place ? first[n] : n === play ? 0 : place[n];
    });
    draw();
  };
  resetButton.onclick = reset;

  // Some parts of the picture can be chosen: a click sets the controls that they name.
  const {tell, parts} = pointing(picture, told, part => {
    for (const pair of (part.dataset.set ?? "").split(" ").filter(Boolean)) {
      const [n, value] = pair.split(":");
      controls[n].max = labels[n].length - 1;
      controls[n].value = value;
    }
    const words = part.dataset.say;
    move();
    tell(parts().find(other => other.dataset.say === words));
  });

  const guess = guessing(root, reset);
  root.dataset.live = "";
  for (const hidden of root.querySelectorAll("[hidden]")) hidden.hidden = false;
  root.addEventListener("input", move);
  reset();
}
