// The map of K: a table of buttons, one a cell, of which one at a time is in the tab order.
import { paint } from "./colours.js";
import { batchName, contextName, html, say } from "./text.js";

const narrow = matchMedia("(max-width: 640px)");

export class HeatMap {
  // onSelect(cell) when a person chooses one; onTurn() when it has to be built again.
  constructor(place, onSelect, onTurn) {
    this.place = place;
    this.onSelect = onSelect;
    this.built = "";
    this.buttons = [];
    narrow.addEventListener("change", onTurn);
    place.addEventListener("keydown", (event) => this.move(event));
    place.addEventListener("focusin", (event) => this.choose(event.target));
    place.addEventListener("click", (event) => this.choose(event.target));
  }

  update(server, selected) {
    const key = JSON.stringify([server.batches, server.contexts, narrow.matches]);
    if (key !== this.built) this.build(server, key);
    server.cells.forEach((cell, index) => {
      const button = this.buttons[index];
      const option = cell.options.find(([k]) => k === cell.steps);
      const predicted = Boolean(option) && !option[6];
      say(button, String(cell.steps));
      paint(button, cell.steps, server.candidate_steps);
      button.classList.toggle("predicted", predicted);
      button.classList.toggle("visited", cell.visits > 0);
      button.classList.toggle("now", index === server.busiest);
      set(button, "aria-label", this.name(server, index, cell, predicted));
      set(button, "aria-pressed", String(index === selected));
      set(button, "tabindex", index === selected ? "0" : "-1");
    });
  }

  name(server, index, cell, predicted) {
    const columns = server.contexts.length;
    const batch = batchName(server.batches[Math.floor(index / columns)]);
    const context = contextName(server.contexts[index % columns]);
    const notes = [predicted ? ", predicted" : "", index === server.busiest ? ", running now" : ""].join("");
    return `batch ${batch}, ${context === "any context" ? context : `${context} tokens`}: K=${cell.steps}${notes}`;
  }

  // Batch sizes run across on a wide screen and down on a narrow one.
  build(server, key) {
    this.built = key;
    const focused = this.buttons.indexOf(document.activeElement);
    const rows = server.batches.length;
    const columns = server.contexts.length;
    this.across = narrow.matches ? columns : rows;
    this.indexAt = narrow.matches ? (row, column) => row * columns + column : (row, column) => column * columns + row;
    this.buttons = server.cells.map((_, index) => html("button", { type: "button", "data-cell": index, "aria-describedby": "why-text" }));
    const [tops, sides] = narrow.matches
      ? [server.contexts.map(contextName), server.batches.map(batchName)]
      : [server.batches.map(batchName), server.contexts.map(contextName)];
    // Not more labels than there is room for: those of powers of two, and the last.
    const sparse = tops.length > 12;
    const upper = (name) => (sparse ? name.split("–").at(-1) : name);
    const shown = (name, i) => !sparse || i === tops.length - 1 || (i < tops.length - 2 && Number.isInteger(Math.log2(upper(name))));
    const corner = narrow.matches ? "batch ↓ context →" : "context ↓ batch →";
    const head = html("tr", {}, html("th", { class: "axis", scope: "col" }, corner.split(" ").slice(0, 2).join(" ")),
      ...tops.map((name, i) => html("th", { scope: "col", "aria-label": name }, shown(name, i) ? upper(name) : "")));
    const body = sides.map((side, row) => html("tr", {}, html("th", { scope: "row" }, side),
      ...tops.map((_, column) => html("td", {}, this.buttons[this.indexAt(row, column)]))));
    const table = html("table", { "aria-label": "K by batch size and context" },
      html("colgroup", {}, html("col", { class: "head" }), ...tops.map(() => html("col"))),
      html("thead", {}, head), html("tbody", {}, ...body));
    this.place.replaceChildren(table);
    this.height = sides.length;
    if (focused >= 0) this.buttons[focused]?.focus();
  }

  choose(target) {
    const cell = target.closest?.("[data-cell]");
    if (cell) this.onSelect(Number(cell.dataset.cell));
  }

  move(event) {
    const index = this.buttons.indexOf(event.target);
    if (index < 0) return;
    const columns = this.buttons.length / (narrow.matches ? this.height : this.across);
    let [column, row] = narrow.matches ? [index % columns, Math.floor(index / columns)] : [Math.floor(index / columns), index % columns];
    const moves = {
      ArrowRight: [column + 1, row], ArrowLeft: [column - 1, row], ArrowDown: [column, row + 1], ArrowUp: [column, row - 1],
      Home: [0, row], End: [this.across - 1, row], PageUp: [column, 0], PageDown: [column, this.height - 1],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    [column, row] = moves[event.key];
    if (column < 0 || row < 0 || column >= this.across || row >= this.height) return;
    this.buttons[this.indexAt(row, column)].focus();
  }
}

function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}
