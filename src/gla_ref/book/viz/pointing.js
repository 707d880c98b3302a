// Parts of a picture (those with data-say) say what they are: to a mouse, to a finger, and to the arrow keys.
const pointing = (picture, told, choose) => {
  const hint = told.textContent;
  const parts = () => [...picture.querySelectorAll("[data-say]")];
  const marked = () => picture.querySelector("[data-told]");
  const tell = part => {
    marked()?.removeAttribute("data-told");
    part?.setAttribute("data-told", "");
    told.textContent = part ? part.dataset.say : hint;
  };
  const middle = part => {
    const box = part.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const next = (x, y) => {  // the nearest part in a direction
    const from = marked(), all = parts();
    if (!from) return all[0];
    const [x0, y0] = middle(from);
    let [best, least] = [from, Infinity];
    for (const part of all) {
      const [x1, y1] = middle(part), along = (x1 - x0) * x + (y1 - y0) * y;
      const far = along + 2 * Math.abs((x1 - x0) * y + (y1 - y0) * x);
      if (along > 1 && far < least) [best, least] = [part, far];
    }
    return best;
  };
  const arrows = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]};
  picture.addEventListener("pointerover", event => {
    const part = event.target.closest("[data-say]");
    if (part) tell(part);
  });
  picture.addEventListener("click", event => {
    const part = event.target.closest("[data-say]");
    if (part) choose(part);
  });
  picture.addEventListener("keydown", event => {
    if (event.target !== picture) return;
    if (arrows[event.key]) tell(next(...arrows[event.key]));
    else if (event.key === "Enter" && marked()) choose(marked());
    else return;
    event.preventDefault();
  });
  return {tell, parts};
};
