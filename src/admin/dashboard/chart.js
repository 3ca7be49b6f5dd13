// Lines over the last 15 minutes, as SVG that stretches; words and figures beside it are HTML.

import { figure, make, write } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [900, 100];
/** A second that is missing for longer interrupts a line. */
const GAP_MS = 3000;

function draw(parent, tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

/** The next 1, 2 or 5 with zeros: the top of a scale that is easy to read. */
function top(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

/** One line; seconds without a value interrupt it. */
function path(seconds, read, end, most) {
  let [text, last] = ["", null];
  for (const second of seconds) {
    const value = read(second);
    if (value == null) {
      last = null;
      continue;
    }
    const x = (WIDTH - (end - second.at_ms) / 1000).toFixed(1);
    const y = (HEIGHT - (value / most) * HEIGHT).toFixed(1);
    // A point alone is a line of no length, with round ends.
    text += last != null && second.at_ms - last < GAP_MS ? `L${x} ${y}` : `M${x} ${y}h0`;
    last = second.at_ms;
  }
  return text;
}

/** A chart in an element: `series` are names and how to read them from a second; `show(seconds)` draws it anew. */
export function chart(parent, series, unit) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  for (const y of [0, 0.5, 1]) {
    draw(svg, "line", { class: "grid", x1: 0, x2: WIDTH, y1: y * HEIGHT, y2: y * HEIGHT });
  }
  // The last is drawn first: what is most comes to lie above.
  const lines = series.map((_, place) => draw(svg, "path", { class: `line s${place}` })).reverse();
  svg.append(...lines);
  lines.reverse();
  const scale = make("div", { class: "scale", "aria-hidden": "true" }, make("span"), make("span"), make("span", {}, "0"));
  const span = make("div", { class: "span", "aria-hidden": "true" });
  span.append(...["15 min ago", "10", "5", "now"].map((text) => make("span", {}, text)));
  const legend = make("ul", { class: "legend" });
  const figures = series.map(([name], place) => {
    const sample = document.createElementNS(SVG, "svg");
    sample.setAttribute("viewBox", "0 0 30 10");
    sample.setAttribute("aria-hidden", "true");
    draw(sample, "path", { class: `line s${place}`, d: "M1 5h28" });
    const value = make("span");
    legend.append(make("li", {}, sample, `${name} `, value));
    return value;
  });
  parent.append(make("div", { class: "plot" }, scale, svg, span), legend);
  return (seconds) => {
    const end = seconds.at(-1)?.at_ms ?? 0;
    const highest = series.map(([, read]) => seconds.reduce((most, second) => Math.max(most, read(second) ?? 0), 0));
    const most = top(Math.max(...highest));
    const words = series.map(([name, read], place) => {
      const now = seconds.length ? read(seconds.at(-1)) : null;
      lines[place].setAttribute("d", path(seconds, read, end, most));
      write(figures[place], now == null ? "–" : `${figure(now)} ${unit}`);
      return `${name} ${now == null ? "none" : figure(now)} now, ${figure(highest[place])} at most`;
    });
    [most, most / 2].forEach((value, place) => write(scale.children[place], figure(value)));
    svg.setAttribute("aria-label", `The last 15 minutes, ${unit}: ${words.join("; ")}`);
  };
}
