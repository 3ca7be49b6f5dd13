// Line charts of the last 15 minutes: scalable SVG for the lines, HTML for the texts beside it.

import { formatNumber, make, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [900, 100];
/** A gap in the samples that is at least this long interrupts a line. */
const GAP_MS = 3000;

function draw(parent, tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

/** Return the maximum of the scale: the next 1, 2 or 5 times a power of ten. */
function scaleMaximum(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

/** Return the SVG path of a series. Seconds without a value interrupt it. */
function linePath(seconds, read, end, maximum) {
  let [path, last] = ["", null];
  for (const second of seconds) {
    const value = read(second);
    if (value == null) {
      last = null;
      continue;
    }
    const x = (WIDTH - (end - second.at_ms) / 1000).toFixed(1);
    const y = (HEIGHT - (value / maximum) * HEIGHT).toFixed(1);
    // A single point is a line of length 0: round line caps make it visible.
    path += last != null && second.at_ms - last < GAP_MS ? `L${x} ${y}` : `M${x} ${y}h0`;
    last = second.at_ms;
  }
  return path;
}

/** Add a chart to an element. `series` has names and functions that read a value of a second. Return the draw function. */
export function chart(parent, series, unit) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  for (const y of [0, 0.5, 1]) {
    draw(svg, "line", { class: "grid", x1: 0, x2: WIDTH, y1: y * HEIGHT, y2: y * HEIGHT });
  }
  // Append in reverse order, so that the first series is drawn on top.
  const lines = series.map((_, index) => draw(svg, "path", { class: `line s${index}` })).reverse();
  svg.append(...lines);
  lines.reverse();
  const scale = make("div", { class: "scale", "aria-hidden": "true" }, make("span"), make("span"), make("span", {}, "0"));
  const span = make("div", { class: "span", "aria-hidden": "true" });
  span.append(...["15 min ago", "10", "5", "now"].map((text) => make("span", {}, text)));
  const legend = make("ul", { class: "legend" });
  const values = series.map(([name], index) => {
    const sample = document.createElementNS(SVG, "svg");
    sample.setAttribute("viewBox", "0 0 30 10");
    sample.setAttribute("aria-hidden", "true");
    draw(sample, "path", { class: `line s${index}`, d: "M1 5h28" });
    const value = make("span");
    legend.append(make("li", {}, sample, `${name} `, value));
    return value;
  });
  parent.append(make("div", { class: "plot" }, scale, svg, span), legend);
  return (seconds) => {
    const end = seconds.at(-1)?.at_ms ?? 0;
    const maxima = series.map(([, read]) => seconds.reduce((maximum, second) => Math.max(maximum, read(second) ?? 0), 0));
    const maximum = scaleMaximum(Math.max(...maxima));
    const summaries = series.map(([name, read], index) => {
      const current = seconds.length ? read(seconds.at(-1)) : null;
      lines[index].setAttribute("d", linePath(seconds, read, end, maximum));
      setText(values[index], current == null ? "–" : `${formatNumber(current)} ${unit}`);
      return `${name} ${current == null ? "no value" : formatNumber(current)} now, maximum ${formatNumber(maxima[index])}`;
    });
    [maximum, maximum / 2].forEach((value, index) => setText(scale.children[index], formatNumber(value)));
    svg.setAttribute("aria-label", `Last 15 minutes, ${unit}: ${summaries.join("; ")}`);
  };
}
