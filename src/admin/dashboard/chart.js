// Charts over a time range. Lines and areas are SVG, which scales with the page. Texts are HTML.

import { find, formatNumber, formatTime, make, makeSvg, setText } from "./dom.js";

const [WIDTH, HEIGHT] = [900, 100];
/** A line has a gap if samples are missing for at least this multiple of the length of a sample. */
const GAP_LENGTHS = 3;
/**
 * A value is high if it exceeds this multiple of the 95th percentile. High values in at most `MAX_OUTLIER_SAMPLES`
 * consecutive samples are outliers.
 */
const OUTLIER_FACTOR = 2.5;
const MAX_OUTLIER_SAMPLES = 2;
/** With fewer values, no value is treated as an outlier, because the 95th percentile could be an outlier itself. */
const MIN_VALUES = 30;
/** Maximum number of marks above a chart. */
const MAX_MARKS = 40;

/** All charts of the page. If the pointer is over a chart, all charts show their values at that time. */
const charts = [];

/** Return a scale from 0 to at least `value`: the distance between grid lines, and the maximum. */
function niceScale(value) {
  const rough = Math.max(value, 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  return { step, maximum: step * Math.ceil(Math.max(value, 1) / step - 1e-9) };
}

/**
 * Return the maximum of the vertical axis of a chart. Outliers are ignored, so that they do not flatten the other
 * values.
 */
function shownMaximum(values) {
  const maximum = values.reduce((max, value) => Math.max(max, value), 0);
  if (values.length < MIN_VALUES) return maximum;
  const usual = values.toSorted((a, b) => a - b)[Math.floor(values.length * 0.95) - 1];
  const isHigh = (value) => value > usual * OUTLIER_FACTOR;
  if (!usual || !isHigh(maximum)) return maximum;
  // High values in more than `MAX_OUTLIER_SAMPLES` consecutive samples are not outliers.
  let [shown, run] = [0, []];
  for (const value of values) {
    run = isHigh(value) ? [...run, value] : [];
    if (!run.length) shown = Math.max(shown, value);
    else if (run.length > MAX_OUTLIER_SAMPLES) shown = Math.max(shown, ...run);
  }
  return shown;
}

/** Split samples into runs without a gap and without a missing value. */
function splitRuns(samples, read) {
  const runs = [];
  let last = null;
  for (const sample of samples) {
    const value = read(sample);
    if (value == null) {
      last = null;
      continue;
    }
    if (!last || sample.at_ms - last.at_ms > GAP_LENGTHS * sample.ms) runs.push([]);
    runs.at(-1).push({ at: sample.at_ms, start: sample.at_ms - sample.ms, value, base: 0, sample });
    last = sample;
  }
  return runs;
}

/** Return functions that convert times and values to SVG coordinates. */
function coordinates(end, rangeMs, maximum) {
  const x = (at) => Math.max(0, WIDTH * (1 - (end - at) / rangeMs)).toFixed(1);
  const y = (value) => (HEIGHT * (1 - Math.min(value / maximum, 1))).toFixed(1);
  return { x, y };
}

/** Return the SVG path of a line through the runs. A run starts at the beginning of its first sample. */
function linePath(runs, { x, y }) {
  return runs.map((run) => `M${x(run[0].start)} ${y(run[0].value)}${run.map((point) => `L${x(point.at)} ${y(point.value)}`).join("")}`).join("");
}

/** Return the SVG path of the areas between `base` and `value` of the points. */
function areaPath(runs, { x, y }) {
  return runs.map((run) => {
    const back = run.toReversed().map((point) => `L${x(point.at)} ${y(point.base)}`).join("");
    return `${linePath([run], { x, y })}${back}L${x(run[0].start)} ${y(run[0].base)}Z`;
  }).join("");
}

/** Return the runs of each series of a stacked chart. Each series is on top of the previous one. */
function stackRuns(samples, series) {
  const total = (sample, count) => series.slice(0, count).reduce((sum, { read }) => sum + read(sample), 0);
  return series.map((_, index) => splitRuns(samples, (sample) => total(sample, index + 1)).map((run) =>
    run.map((point) => ({ ...point, base: total(point.sample, index) }))));
}

/** Label the time axis in minutes before now. */
function showTimes(element, minutes) {
  if (element.dataset.minutes === String(minutes)) return;
  element.dataset.minutes = minutes;
  const distance = [1, 5, 15].find((each) => minutes / each <= 5);
  element.replaceChildren(...Array.from({ length: minutes / distance + 1 }, (_, index) => {
    const ago = minutes - index * distance;
    return make("span", {}, ago ? `${index ? "" : "−"}${ago}${index ? "" : " min"}` : "now");
  }));
}

/** Show the values at the time `at` in all charts. If `at` is `null`, hide them. */
function setCursor(at, isSpoken) {
  for (const each of charts) each.showCursor(at);
  if (isSpoken) setText(find("#spoken"), charts.map((each) => each.cursorText()).filter(Boolean).join("; "));
}

/**
 * Add a chart to an element. `series` are `{ name, kind, read(sample) }`. With `isStacked`, the chart stacks the series
 * as areas. Return a function that draws samples: `draw(samples, { end, rangeMs, rangeText })`.
 */
export function chart(parent, { series, unit, isStacked }) {
  const grid = makeSvg("g");
  const areas = series.map(({ kind }) => makeSvg("path", { class: `area ${kind}` }));
  const lines = series.map(({ kind }) => makeSvg("path", { class: `line ${kind}` }));
  const cursor = makeSvg("line", { class: "cursor", y1: 0, y2: HEIGHT });
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, grid,
    ...(isStacked ? areas : []), ...lines.toReversed(), cursor);
  const marks = make("div", { class: "marks", "aria-hidden": "true" });
  const tip = make("div", { class: "tip", "aria-hidden": "true", hidden: "" });
  const canvas = make("div", { class: "canvas", role: "img", tabindex: "0" }, svg, marks, tip);
  const scale = make("div", { class: "scale", "aria-hidden": "true" });
  const times = make("div", { class: "times", "aria-hidden": "true" });
  const legend = make("ul", { class: "legend" });
  const values = series.map(({ name, kind }) => {
    const value = make("b");
    legend.append(make("li", {}, make("span", { class: `swatch ${kind}` }), `${name} `, value));
    return value;
  });
  const note = make("p", { class: "note outliers", hidden: "" });
  parent.append(make("div", { class: "plot" }, scale, canvas, times), legend, note);

  let shown = { samples: [], end: 0, rangeMs: 1 };
  let selected = null;
  const valueText = (value) => (value == null ? "–" : `${formatNumber(value)}${unit === "ms" ? " ms" : "/s"}`);

  function showCursor(at) {
    const { samples, end, rangeMs } = shown;
    const distance = (sample) => Math.abs(sample.at_ms - sample.ms / 2 - at);
    selected = at == null ? null : samples.reduce((best, sample) => (!best || distance(sample) < distance(best) ? sample : best), null);
    cursor.classList.toggle("visible", !!selected);
    tip.hidden = !selected;
    if (!selected) return;
    const { x } = coordinates(end, rangeMs, 1);
    const position = x(selected.at_ms);
    cursor.setAttribute("x1", position);
    cursor.setAttribute("x2", position);
    tip.replaceChildren(make("b", {}, formatTime(selected.at_ms)), ...series.toReversed().map(({ name, kind, read }) =>
      make("span", {}, make("span", { class: `swatch ${kind}` }), `${name} `, make("b", {}, valueText(read(selected))))));
    const isRight = position > WIDTH / 2;
    tip.style.left = isRight ? "auto" : `calc(${(position / WIDTH) * 100}% + .6rem)`;
    tip.style.right = isRight ? `calc(${100 - (position / WIDTH) * 100}% + .6rem)` : "auto";
  }

  const timeAt = (event) => {
    const { left, width } = canvas.getBoundingClientRect();
    return shown.end - shown.rangeMs * (1 - (event.clientX - left) / width);
  };
  canvas.addEventListener("pointermove", (event) => setCursor(timeAt(event)));
  canvas.addEventListener("pointerdown", (event) => setCursor(timeAt(event)));
  canvas.addEventListener("pointerleave", () => setCursor(null));
  canvas.addEventListener("blur", () => setCursor(null));
  canvas.addEventListener("keydown", (event) => {
    const { samples } = shown;
    const last = samples.length - 1;
    const current = selected ? samples.indexOf(selected) : last;
    const steps = { ArrowLeft: current - (selected ? 1 : 0), ArrowRight: current + 1, Home: 0, End: last };
    if (event.key === "Escape") setCursor(null);
    else if (event.key in steps && last >= 0) {
      event.preventDefault();
      const target = samples[Math.min(last, Math.max(0, steps[event.key]))];
      setCursor(target.at_ms - target.ms / 2, true);
    }
  });
  charts.push({
    showCursor,
    cursorText: () => selected && `${formatTime(selected.at_ms)}: ${series.map(({ name, read }) => `${name} ${valueText(read(selected))}`).join(", ")}`,
  });

  return (samples, { end, rangeMs, rangeText }) => {
    shown = { samples, end, rangeMs };
    const total = (sample) => (isStacked
      ? series.reduce((sum, { read }) => sum + read(sample), 0)
      : series.reduce((maximum, { read }) => Math.max(maximum, read(sample) ?? 0), 0));
    const totals = samples.map(total);
    const { step, maximum } = niceScale(shownMaximum(totals));
    const toCoordinates = coordinates(end, rangeMs, maximum);
    const allRuns = isStacked ? stackRuns(samples, series) : series.map(({ read }) => splitRuns(samples, read));
    allRuns.forEach((runs, index) => {
      lines[index].setAttribute("d", linePath(runs, toCoordinates));
      areas[index].setAttribute("d", areaPath(runs, toCoordinates));
    });
    const ticks = Array.from({ length: Math.round(maximum / step) + 1 }, (_, index) => index * step);
    grid.replaceChildren(...ticks.map((tick) => makeSvg("line", { class: "grid", x1: 0, x2: WIDTH, y1: toCoordinates.y(tick), y2: toCoordinates.y(tick) })));
    scale.replaceChildren(...ticks.map((tick) => {
      const label = make("span", {}, formatNumber(tick));
      label.style.bottom = `${(tick / maximum) * 100}%`;
      return label;
    }));
    showTimes(times, rangeMs / 60_000);

    const outliers = samples.filter((_, index) => totals[index] > maximum);
    marks.replaceChildren(...outliers.slice(-MAX_MARKS).map((sample) => {
      const mark = make("span", {}, "▲");
      mark.style.left = `${(toCoordinates.x(sample.at_ms) / WIDTH) * 100}%`;
      return mark;
    }));
    note.hidden = !outliers.length;
    if (outliers.length) {
      const highest = outliers.reduce((best, sample) => (total(sample) > total(best) ? sample : best));
      setText(note, `▲ ${outliers.length} above the scale, highest ${valueText(total(highest))} at ${formatTime(highest.at_ms)}`);
    }

    const summaries = series.map(({ name, read }, index) => {
      const current = samples.length ? read(samples.at(-1)) : null;
      const highest = samples.reduce((max, sample) => Math.max(max, read(sample) ?? 0), 0);
      setText(values[index], valueText(current));
      return `${name} ${current == null ? "no value" : formatNumber(current)} now, maximum ${formatNumber(highest)}`;
    });
    canvas.setAttribute("aria-label", `Last ${rangeText}, ${unit}: ${summaries.join("; ")}. Arrow keys show single values.`);
    if (selected) showCursor(selected.at_ms - selected.ms / 2);
  };
}

/** Return a cell with a small chart of allowed and denied decisions. `intervals` are `{ at_ms, ms, counts }`. */
export function sparklineCell(intervals, { end, rangeMs, rangeText }) {
  return {
    kind: "spark",
    update(cell) {
      if (!cell.children.length) {
        const paths = ["allowed", "denied"].map((kind) => makeSvg("path", { class: `area ${kind}` }));
        cell.append(makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...paths));
      }
      const svg = cell.children[0];
      const rate = (kind) => ({ counts, ms }) => (counts[kind] * 1000) / ms;
      const series = [{ read: rate(0) }, { read: rate(1) }];
      const sum = (sample) => series[0].read(sample) + series[1].read(sample);
      const maximum = Math.max(shownMaximum(intervals.map(sum)), 0.001);
      const toCoordinates = coordinates(end, rangeMs, maximum);
      stackRuns(intervals, series).forEach((runs, index) => svg.children[index].setAttribute("d", areaPath(runs, toCoordinates)));
      const highest = series.map(({ read }) => intervals.reduce((max, sample) => Math.max(max, read(sample)), 0));
      svg.setAttribute("aria-label", `Last ${rangeText}: at most ${formatNumber(highest[0])} allowed and ${formatNumber(highest[1])} denied per second`);
    },
  };
}
