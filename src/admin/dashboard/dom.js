// Helper functions for DOM elements and for formatting. Text is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const find = (selector) => document.querySelector(selector);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * Set the text of an element if it changed. An unchanged text keeps its selection, and screen readers do not read it
 * again.
 */
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

/** Update a `<dl>` list. A tile is an array `[term, value, class]`. */
export function updateTiles(list, tiles) {
  while (list.children.length < tiles.length) list.append(make("div", {}, make("dt"), make("dd")));
  tiles.forEach(([term, value, kind = ""], index) => {
    const [dt, dd] = list.children[index].children;
    setText(dt, term);
    setText(dd, value);
    dd.className = kind;
  });
}

/**
 * Update a table. A row has a key, cells, and optionally buttons (`actions`). A cell is a text, `{ text, kind }`, or
 * `{ update(td), kind }` for other content. A focused row keeps the focus if its key is in `rows`.
 */
export function updateTable(table, rows) {
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const focused = document.activeElement;
  const keys = new Set(rows.map(({ key }) => key));
  for (const [key, row] of old) if (!keys.has(key)) row.remove();
  for (const [rowIndex, { key, cells, actions }] of rows.entries()) {
    const row = old.get(key) ?? make("tr", { "data-key": key });
    cells.forEach((cell, index) => {
      const { text, kind = "", update } = typeof cell === "object" ? cell : { text: cell };
      if (!row.cells[index]) row.append(index ? make("td") : make("th", { scope: "row" }));
      const element = row.cells[index];
      if (update) update(element);
      else setText(element, text);
      element.className = kind;
    });
    if (actions?.length) {
      if (!row.cells[cells.length]) row.append(make("td", { class: "actions" }));
      const cell = row.cells[cells.length];
      while (cell.children.length > actions.length) cell.lastChild.remove();
      actions.forEach(({ text, label, run }, index) => {
        const button = cell.children[index] ?? cell.appendChild(make("button", { type: "button" }));
        setText(button, text);
        button.setAttribute("aria-label", label);
        button.onclick = run;
      });
    }
    if (body.rows[rowIndex] !== row) body.insertBefore(row, body.rows[rowIndex] ?? null);
  }
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
  for (const [index, header] of [...table.tHead.rows[0].cells].entries()) {
    header.className = body.rows[0]?.cells[index]?.classList.contains("number") ? "number" : "";
  }
}

/** Return the suffix that names the unit of a quota. The suffix is empty if the unit is requests. */
export const unitText = (unit) => (unit === "requests" || unit === "concurrent-requests" ? "" : ` ${unit}`);

/** Return a cell with the remaining quota as text and a bar that shows the used part of the quota. */
export function usageCell(remaining, capacity) {
  const text = `${formatNumber(remaining)} of ${formatNumber(capacity)}`;
  return {
    kind: "usage",
    update(cell) {
      if (!cell.children.length) cell.append(make("span"), make("span", { class: "bar", "aria-hidden": "true" }, make("span")));
      setText(cell.children[0], text);
      const used = capacity ? Math.min(1, Math.max(0, 1 - remaining / capacity)) : 1;
      const fill = cell.children[1].children[0];
      fill.style.width = `${used * 100}%`;
      fill.className = used >= 1 ? "full" : used > 0.8 ? "high" : "";
    },
  };
}

/** Mark the tables that are wider than their container, so that a note below them says that they scroll. */
export function initScrollHints() {
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const wide = target.closest(".wide");
      wide.classList.toggle("scrolls", wide.scrollWidth > wide.clientWidth + 1);
    }
  });
  for (const wide of document.querySelectorAll(".wide")) {
    wide.after(make("p", { class: "scroll-hint", "aria-hidden": "true" }, "scroll for more columns →"));
    observer.observe(wide);
    observer.observe(wide.querySelector("table"));
  }
}

const integerFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const smallFormat = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export const formatNumber = (value) => (value == null ? "–" : (value < 10 ? smallFormat : integerFormat).format(value));
export const formatMs = (value) => (value == null ? "–" : `${formatNumber(value)} ms`);
export const numberCell = (value) => ({ text: formatNumber(value), kind: value ? "number" : "number zero" });

/** Format a number of seconds in s, min, h or d. */
export function formatDuration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 120) return `${formatNumber(seconds)} s`;
  if (seconds < 7200) return `${integerFormat.format(seconds / 60)} min`;
  return seconds < 172800 ? `${integerFormat.format(seconds / 3600)} h` : `${integerFormat.format(seconds / 86400)} d`;
}

/** Format ms since the Unix epoch as a time of day. */
export const formatTime = (ms, options = { hour: "2-digit", minute: "2-digit", second: "2-digit" }) =>
  new Date(ms).toLocaleTimeString([], { hourCycle: "h23", ...options });
