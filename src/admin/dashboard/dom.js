// DOM and number helpers of the dashboard. Text is inserted as text only, never as markup.

export const find = (selector) => document.querySelector(selector);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set the text of an element if it changed. An unchanged text keeps its selection and is not read out again. */
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

/** Update a list of terms and values. */
export function updateTiles(list, tiles) {
  while (list.children.length < tiles.length) list.append(make("div", {}, make("dt"), make("dd")));
  tiles.forEach(([term, value, kind = ""], index) => {
    const [dt, dd] = list.children[index].children;
    setText(dt, term);
    setText(dd, value);
    dd.className = kind;
  });
}

/** Update a table. A row has a key, cells, and optionally a button (`action`). Rows that remain keep their focus. */
export function updateTable(table, rows) {
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const focused = document.activeElement;
  const keys = new Set(rows.map(({ key }) => key));
  for (const [key, row] of old) if (!keys.has(key)) row.remove();
  for (const [rowIndex, { key, cells, action }] of rows.entries()) {
    const row = old.get(key) ?? make("tr", { "data-key": key });
    cells.forEach((cell, index) => {
      const { text, kind = "" } = typeof cell === "object" ? cell : { text: cell };
      if (!row.cells[index]) row.append(index ? make("td") : make("th", { scope: "row" }));
      setText(row.cells[index], text);
      row.cells[index].className = kind;
    });
    if (action && !row.querySelector("button")) {
      const button = make("button", { type: "button", "aria-label": action.label }, action.text);
      button.addEventListener("click", action.run);
      row.append(make("td", {}, button));
    }
    if (body.rows[rowIndex] !== row) body.insertBefore(row, body.rows[rowIndex] ?? null);
  }
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
  for (const [index, header] of [...table.tHead.rows[0].cells].entries()) {
    header.className = body.rows[0]?.cells[index]?.className === "number" ? "number" : "";
  }
}

const integerFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const smallFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export const formatNumber = (value) => (value == null ? "–" : (value < 10 ? smallFormat : integerFormat).format(value));
export const numberCell = (value) => ({ text: formatNumber(value), kind: "number" });

/** Format a duration in s, min, h or d. */
export function formatDuration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 120) return `${formatNumber(seconds)} s`;
  if (seconds < 7200) return `${integerFormat.format(seconds / 60)} min`;
  return seconds < 172800 ? `${integerFormat.format(seconds / 3600)} h` : `${integerFormat.format(seconds / 86400)} d`;
}
