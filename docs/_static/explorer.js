// The pattern explorer: shows what explorer_data.js knows of the mask that is chosen. The address keeps the choice.
"use strict";

(() => {
  const form = document.getElementById("explorer").elements;
  const composed = "compose one";
  const colours = { 1: "#8fb3d9", 2: "#1f4e8c" };
  const show = (id) => document.getElementById(`explorer-${id}`);

  function fill(select, values) {
    select.replaceChildren(...values.map((value) => new Option(value, value)));
  }

  // One path for each colour, a rectangle for each run of cells in a row.
  function picture(cells, side) {
    const paths = { 1: "", 2: "" };
    for (let row = 0; row < side; row++) {
      for (let start = 0, end; start < side; start = end) {
        const state = cells[row * side + start];
        for (end = start + 1; end < side && cells[row * side + end] === state; end++);
        if (state in paths) paths[state] += `M${start} ${row}h${end - start}v1H${start}z`;
      }
    }
    const drawn = Object.entries(paths).map(([state, path]) => `<path fill="${colours[state]}" d="${path}"/>`);
    return `<svg viewBox="0 0 ${side} ${side}" width="320" height="320" shape-rendering="crispEdges"
      style="background: #f4f4f2" role="img" aria-label="who attends to whom">${drawn.join("")}</svg>`;
  }

  function update() {
    const own = form.preset.value === composed;
    form.near.disabled = form.far.disabled = !own;
    const name = own ? `${form.near.value} + ${form.far.value}` : form.preset.value;
    const mask = EXPLORER.masks[name];
    history.replaceState(null, "", `#${[...form].map((select) => encodeURIComponent(select.value)).join("&")}`);
    if (!mask) {
      show("picture").replaceChildren();
      show("passes").replaceChildren();
      show("code").textContent = show("cost").textContent = "";
      show("pairs").textContent = "Such a query sees nothing.";
      return;
    }
    const found = mask.lengths[form.tokens.value];
    const plan = found.plans[form.block.value];
    show("picture").innerHTML = picture(found.cells, EXPLORER.side);
    show("code").textContent = `mask = ${mask.code}\nprint(sl.describe(mask, ${form.tokens.value}))`;
    show("pairs").textContent = `${found.pairs}.`;
    show("passes").replaceChildren(
      ...plan.passes.map((text) => Object.assign(document.createElement("li"), { textContent: text })),
    );
    show("cost").textContent = `Predicted cost: ${plan.cost}.`;
  }

  fill(form.preset, [composed, ...EXPLORER.presets]);
  fill(form.near, EXPLORER.near);
  fill(form.far, EXPLORER.far);
  fill(form.tokens, EXPLORER.lengths);
  fill(form.block, EXPLORER.blocks);
  const start = [composed, EXPLORER.near[1], EXPLORER.far[2], "4096", "128"];
  const asked = location.hash.slice(1).split("&").map(decodeURIComponent);
  [...form].forEach((select, place) => {
    select.value = asked[place] || start[place];
    if (select.selectedIndex < 0) select.value = start[place];
    select.addEventListener("change", update);
  });
  update();
})();
