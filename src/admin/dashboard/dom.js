// What the parts of the page share: elements and figures. Text goes in as text only, never as markup.

export const at = (selector) => document.querySelector(selector);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Sets a text that changed; what is the same stays, selected or read out as it may be. */
export function write(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

/** A list of terms, each with its figure. */
export function tiles(list, pairs) {
  while (list.children.length < pairs.length) list.append(make("div", {}, make("dt"), make("dd")));
  pairs.forEach(([term, figure, kind = ""], place) => {
    const [dt, dd] = list.children[place].children;
    write(dt, term);
    write(dd, figure);
    dd.className = kind;
  });
}

/** Brings a table up to date: rows have a key, texts, and perhaps something to do. Rows that stay keep their focus. */
export function fill(table, rows) {
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const focused = document.activeElement;
  const keys = new Set(rows.map(({ key }) => key));
  for (const [key, row] of old) if (!keys.has(key)) row.remove();
  for (const [index, { key, cells, act }] of rows.entries()) {
    const row = old.get(key) ?? make("tr", { "data-key": key });
    cells.forEach((cell, place) => {
      const { text, kind = "" } = typeof cell === "object" ? cell : { text: cell };
      if (!row.cells[place]) row.append(place ? make("td") : make("th", { scope: "row" }));
      write(row.cells[place], text);
      row.cells[place].className = kind;
    });
    if (act && !row.querySelector("button")) {
      const button = make("button", { type: "button", "aria-label": act.label }, act.text);
      button.addEventListener("click", act.run);
      row.append(make("td", {}, button));
    }
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  }
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
  for (const [place, head] of [...table.tHead.rows[0].cells].entries()) {
    head.className = body.rows[0]?.cells[place]?.className === "number" ? "number" : "";
  }
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export const figure = (value) => (value == null ? "–" : (value < 10 ? fine : whole).format(value));
export const number = (value) => ({ text: figure(value), kind: "number" });

/** A wait in the largest unit that says it well. */
export function wait(seconds) {
  if (seconds == null) return "–";
  if (seconds < 120) return `${figure(seconds)} s`;
  if (seconds < 7200) return `${whole.format(seconds / 60)} min`;
  return seconds < 172800 ? `${whole.format(seconds / 3600)} h` : `${whole.format(seconds / 86400)} d`;
}
