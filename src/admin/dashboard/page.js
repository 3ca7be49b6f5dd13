// The main script of the dashboard, which subscribes to the events of the gateway and shows their data.

import { clearToken, hasToken, isValidToken, request, storeToken, subscribe, token } from "./api.js";
import { chart } from "./chart.js";
import { find, formatMs, formatNumber, formatTime, initScrollHints, make, numberCell, setText, updateTable, updateTiles } from "./dom.js";
import { initFlow, showFlow } from "./flow.js";
import { initInspectForm, showOverrides, showTopDenied } from "./inspect.js";
import { showLimits } from "./limits.js";
import { clearTokens, showTokens, showTopCosts } from "./tokens.js";
import { initUsage, showUsageSection } from "./usage.js";

/** The rates of limits and routes are averages over this many seconds. */
const RATE_SECONDS = 10;
const LISTS_INTERVAL_MS = 5000;
const MAX_RETRY_DELAY_MS = 8000;
/** If no event arrives for this long, the values are marked as stale. The gateway sends one event per second. */
const STALE_AFTER_MS = 4000;
const STALE_CHECK_MS = 500;
const RANGE_KEY = "sluicegate-range";
const RANGES = { 5: "5 minutes", 15: "15 minutes", 60: "hour" };

const perSecond = (kind) => (sample) => (sample[kind] * 1000) / sample.ms;
const OUTCOMES = ["allowed", "denied", "errors"];
const RATES = OUTCOMES.map((kind) => ({ name: kind, kind, read: perSecond(kind) }));
const LATENCIES = ["p50", "p95", "p99"].map((name) => ({ name, kind: name, read: (sample) => sample[`${name}_ms`] }));

let seconds = [];
let intervals = [];
let windows = { seconds: 0, intervals: 0 };
let recentEvents = [];
let configuration = null;
let shownConfiguration = null;
let problems = [];
let example = null;
let lastEventAt = null;
let isConnected = false;
const drawRates = chart(find("#rates"), { series: RATES, unit: "per second", isStacked: true });
const drawLatencies = chart(find("#latencies"), { series: LATENCIES, unit: "ms" });

function showStatus(text, kind) {
  setText(find("#status"), text);
  find("#status").className = kind;
}

/** Return the selected time range, which ends with the last second that the gateway has sent. */
function selectedRange() {
  const minutes = Number(find("#range input:checked").value);
  return { end: seconds.at(-1)?.at_ms ?? 0, rangeMs: minutes * 60_000, rangeText: RANGES[minutes] };
}

/**
 * Return the samples of a time range: seconds if the gateway keeps seconds for the whole range, otherwise intervals of
 * 10 seconds.
 */
function samplesOf({ end, rangeMs }) {
  const samples = rangeMs <= windows.seconds * 1000 ? seconds : intervals;
  return samples.filter(({ at_ms }) => at_ms > end - rangeMs);
}

function showCurrent({ second, connections, health }) {
  updateTiles(find("#current"), [
    ...RATES.map(({ name, read }) => [`${name}/s`, formatNumber(read(second)), `tile-${name}`]),
    ...LATENCIES.map(({ name, read }) => [name, formatMs(read(second))]),
    ["connections", `${formatNumber(connections.open)} of ${formatNumber(connections.max)}`, "small"],
  ]);
  const { name, failing } = health.store;
  updateTiles(find("#store"), [
    ["store", name],
    ["available", failing.length ? `no: ${failing.join(", ")}` : "yes", failing.length ? "bad" : "good"],
    ["store round trip p99", formatMs(second.store_p99_ms)],
    ["rate limit check p99", formatMs(second.decision_p99_ms)],
  ]);
  const kind = { ready: "good", degraded: "bad", stalled: "bad", full: "bad", stopping: "bad" }[health.status];
  showStatus(health.status === "degraded" ? "degraded: store unavailable" : health.status, kind);
  const total = OUTCOMES.reduce((sum, outcome) => sum + perSecond(outcome)(second), 0);
  document.title = `${formatNumber(total)}/s · ${health.status} – Sluicegate`;
}

/** Return the requests per second between two counts, or `null` without an earlier count. */
const rateBetween = (later, earlier, elapsed) => (earlier == null || !elapsed ? null : Math.max(0, later - earlier) / elapsed);

/** The kinds of table cells by the state of a server. Other states are faults. */
const endpointKinds = { healthy: "good", "not checked": "" };

/** Show the error responses by status, and those without a route. */
function showCodes(event, first, elapsed) {
  const rate = (later, earlier) => formatNumber(rateBetween(later, earlier ?? 0, elapsed) ?? 0);
  const tiles = Object.entries(event.statuses).map(([status, count]) => [`${status}/s`, rate(count, first.statuses[status])]);
  if (event.unmatched) tiles.push(["unmatched/s", rate(event.unmatched, first.unmatched)]);
  find("#codes").hidden = !tiles.length;
  updateTiles(find("#codes dl"), tiles);
}

/** What limits do while the store is unavailable, by their `on_store_error`. */
const FALLBACKS = { local: "count by the share of this gateway", allow: "admit every request", deny: "deny every request with 503" };

/** Show what is wrong: the store, the state of the process, rejected files, and warnings about the configuration. */
function showBanner({ health, limits }) {
  const lines = [];
  if (health.store.failing.length) {
    const effects = Object.entries(FALLBACKS).map(([kind, effect]) => {
      const names = limits.filter(({ on_store_error: on }) => on === kind).map(({ limit }) => limit);
      return names.length && `${names.join(", ")} ${effect}`;
    });
    lines.push({ text: `The store is unavailable (${health.store.failing.join(", ")}). ${effects.filter(Boolean).join("; ")}`, kind: "bad" });
  }
  const states = {
    stalled: "A worker does not run: its connections get no responses.", full: "The memory is nearly used up: new requests get 503.",
    stopping: "The gateway is stopping.", pending: "A certificate is missing.",
  };
  if (states[health.status]) lines.push({ text: states[health.status], kind: "bad" });
  lines.push(...problems);
  const banner = find("#banner");
  banner.hidden = !lines.length;
  const key = JSON.stringify(lines);
  if (banner.dataset.key === key) return;
  banner.dataset.key = key;
  banner.className = lines.some(({ kind }) => kind) ? "severe" : "";
  find("#banner ul").replaceChildren(...lines.map(({ text, kind }) => make("li", { class: kind }, text)));
}

/** Return what is wrong with the configuration. */
function configurationProblems({ last_error: lastError, rejected_files: rejected, warnings }) {
  const firstLine = (text) => text.trim().split("\n")[0];
  return [
    ...(lastError ? [{ text: `The last reload was rejected; the previous configuration is active. ${firstLine(lastError.error)}`, kind: "bad" }] : []),
    ...rejected.map(({ kind, file, error }) => ({ text: `The ${kind} file ${file} was rejected; its previous content is in use. ${firstLine(error)}`, kind: "bad" })),
    ...warnings.map((warning) => ({ text: `Warning: ${warning}`, kind: "" })),
  ];
}

/** Return the counts of the routes and of the descriptors of an event, by name. Errors of a descriptor are those of the gateway. */
const lanesOf = ({ routes, descriptors }) => new Map([
  ...routes.map((route) => [route.route, route]),
  ...descriptors.map((each) => [each.descriptor, { ...each, gateway_errors: each.errors }]),
]);

/** Show the limits, routes and upstreams with their rates in the most recent events. */
function showRecent() {
  const event = recentEvents.at(-1);
  if (!event) return;
  const first = recentEvents[0];
  const elapsed = (event.second.at_ms - first.second.at_ms) / 1000;
  const range = selectedRange();
  showLimits(event.limits, {
    before: first.limits, elapsed, configuration, range,
    intervals: intervals.filter(({ at_ms }) => at_ms > range.end - range.rangeMs),
  });

  const lanes = lanesOf(event);
  const lanesBefore = lanesOf(first);
  const rates = new Map([...lanes].map(([name, counts]) => [name, Object.fromEntries([...OUTCOMES, "gateway_errors"].map((kind) =>
    [kind, rateBetween(counts[kind], lanesBefore.get(name)?.[kind], elapsed) ?? 0]))]));
  const totals = new Map([...lanes].map(([name, counts]) => [name, OUTCOMES.reduce((sum, kind) => sum + counts[kind], 0)]));
  const shadow = new Set(event.limits.filter((limit) => limit.shadow).map(({ limit }) => limit));
  const latencies = new Map(event.routes.map(({ route, p95_ms: p95 }) => [route, p95]));
  const { upstreams } = event.health;
  showCodes(event, first, elapsed);
  const isIdle = !event.unmatched && [...totals.values()].every((total) => !total);
  find("#first-run").hidden = !isIdle || !example;
  setText(find("#first-run code"), example ?? "");
  const decisionsBefore = new Map(first.limits.map(({ limit, decisions }) => [limit, decisions]));
  const limitRates = new Map(event.limits.map(({ limit, decisions }) => {
    const rate = (...kinds) => kinds.reduce((sum, kind) => sum + (rateBetween(decisions[kind], decisionsBefore.get(limit)?.[kind], elapsed) ?? 0), 0);
    return [limit, { allowed: rate("allowed", "local_allowed"), denied: rate("denied", "local_denied"), shadow_denied: rate("shadow_denied") }];
  }));
  const upstreamsBefore = new Map(first.upstreams.map((upstream) => [upstream.upstream, upstream]));
  const upstreamRates = new Map(event.upstreams.map((each) => [each.upstream, Object.fromEntries(["requests", "errors"].map((kind) =>
    [kind, rateBetween(each[kind], upstreamsBefore.get(each.upstream)?.[kind], elapsed)]))]));
  const descriptors = event.descriptors.map(({ descriptor: name, limits }) => ({ name, limits, is_descriptor: true }));
  const kinds = [...configuration?.route?.length ? ["Routes"] : [], ...descriptors.length ? ["Descriptors"] : []];
  setText(find("#lanes-title"), kinds.join(", ") || "Routes");
  if (configuration) showFlow([...configuration.route ?? [], ...descriptors], { rates, totals, latencies, upstreams, shadow, limitRates, upstreamRates });
  const endpoints = Object.entries(upstreams).flatMap(([upstream, all]) => all.map((endpoint) => [upstream, endpoint]));
  updateTable(find("#health table"), endpoints.map(([upstream, { server, state, in_flight }], index) => {
    // The events have rates per upstream, not per endpoint. Show them in the row of the upstream's first endpoint.
    const isFirst = endpoints.findIndex(([name]) => name === upstream) === index;
    const { requests = null, errors = null } = upstreamRates.get(upstream) ?? {};
    return {
      key: `${index}`,
      cells: [
        server, upstream, { text: state, kind: endpointKinds[state] ?? "bad" }, numberCell(in_flight),
        ...(isFirst ? [requests, errors].map(numberCell) : ["", ""]),
      ],
    };
  }));
  find("#health .wide").hidden = !endpoints.length;
}

function showMinutes() {
  const minutes = new Map();
  for (const sample of find("#by-minute").open ? samplesOf(selectedRange()) : []) {
    const minute = Math.floor((sample.at_ms - 1) / 60_000);
    minutes.set(minute, [...(minutes.get(minute) ?? []), sample]);
  }
  const mean = (all, kind) => all.reduce((sum, s) => sum + s[kind], 0) * 1000 / all.reduce((sum, s) => sum + s.ms, 0);
  const maximum = (all, read) => all.map(read).reduce((max, value) => (value == null ? max : Math.max(max ?? 0, value)), null);
  updateTable(find("#by-minute table"), [...minutes].reverse().map(([minute, all]) => ({
    key: `${minute}`,
    cells: [
      formatTime((minute + 1) * 60_000, { hour: "2-digit", minute: "2-digit" }),
      ...OUTCOMES.map((kind) => numberCell(mean(all, kind))),
      ...LATENCIES.map(({ read }) => numberCell(maximum(all, read))),
    ],
  })));
}

/**
 * Draw everything that depends on the time range. Draw nothing while the page is hidden. When the page becomes visible,
 * this function is called again.
 */
function draw() {
  if (document.hidden) return;
  const range = selectedRange();
  const samples = samplesOf(range);
  drawRates(samples, range);
  drawLatencies(samples, range);
  for (const element of document.querySelectorAll(".range-text")) setText(element, range.rangeText);
  showRecent();
  showMinutes();
}

function showLists() {
  if (find("#content").hidden || document.hidden || !isConnected) return;
  showTopDenied().catch(() => {});
  showTopCosts().catch(() => {});
  showOverrides().catch(() => {});
}

async function showConfiguration() {
  const view = await (await request("api/config")).json();
  const { file, loaded_at, configuration: written, last_error } = view;
  configuration = written;
  problems = configurationProblems(view);
  showUsageSection(written);
  setText(find("#config-file"), file);
  setText(find("#loaded-at"), new Date(loaded_at).toLocaleString());
  find("#loaded-at").dateTime = loaded_at;
  setText(find("#active-config"), JSON.stringify(written, null, 2));
  find("#reload-error").hidden = !last_error;
  setText(find("#reload-error pre"), last_error?.error ?? "");
  draw();
}

/** If the values are stale, show them in grey with the time of the last event. Otherwise, show them normally. */
function showStale() {
  const isStale = lastEventAt != null && !find("#content").hidden && (!isConnected || Date.now() - lastEventAt > STALE_AFTER_MS);
  document.body.classList.toggle("stale", isStale);
  find("#stale").hidden = !isStale;
  if (!isStale) {
    setText(find("#stale"), "");
    return;
  }
  setText(find("#stale"), `No data from the gateway since ${formatTime(lastEventAt)}. The page shows the last values and retries.`);
  document.title = "no data – Sluicegate";
  if (isConnected) showStatus("no data; retrying", "bad");
}

function handleEvent(name, data) {
  find("#content").hidden = find("nav").hidden = find("#range").hidden = false;
  find("#token-form").hidden = true;
  find("#sign-out").hidden = !hasToken;
  [isConnected, lastEventAt] = [true, Date.now()];
  if (name === "history") {
    ({ seconds } = data);
    windows = { seconds: data.window_seconds, intervals: data.interval_window_seconds };
    intervals = data.intervals.map((interval, index) => ({
      ...interval, decisions: new Map(data.limit_intervals.map(({ limit, decisions }) => [limit, decisions[index]])),
    }));
    recentEvents = [];
    clearTokens();
    ({ example } = data);
    setText(find("#version"), data.version);
    showLists();
  } else {
    const oldest = (windowSeconds) => ({ at_ms }) => at_ms > data.second.at_ms - windowSeconds * 1000;
    seconds = [...seconds, data.second].filter(oldest(windows.seconds));
    if (data.interval) {
      const decisions = new Map(data.limits.filter(({ interval }) => interval).map(({ limit, interval }) => [limit, interval]));
      intervals = [...intervals, { ...data.interval, decisions }].filter(oldest(windows.intervals));
    }
    recentEvents = [...recentEvents, data].slice(-RATE_SECONDS - 1);
    showCurrent(data);
    showTokens(data);
    showBanner(data);
    const { loaded_at, last_error_at, rejected_files } = data.configuration;
    const key = `${loaded_at} ${last_error_at} ${rejected_files}`;
    if (shownConfiguration !== key) {
      shownConfiguration = key;
      showConfiguration().catch(() => { shownConfiguration = null; });
    }
  }
  showStale();
  draw();
}

/** Show the sign-in form with a message. The promise resolves when the user has entered a token. */
function signIn(message) {
  showStatus("sign-in required", "");
  document.title = "Sign in – Sluicegate";
  find("#content").hidden = find("nav").hidden = find("#range").hidden = true;
  find("#sign-out").hidden = true;
  find("#token-form").hidden = false;
  setText(find("#token-error"), message);
  find("#token-error").className = message ? "bad" : "";
  find("#token").focus();
  return new Promise((resolve) => {
    find("#token-form").onsubmit = (event) => {
      event.preventDefault();
      const value = find("#token").value.trim();
      find("#token").value = "";
      if (isValidToken(value)) {
        storeToken(value);
        resolve();
      } else setText(find("#token-error"), "A token has visible ASCII characters only.");
    };
  });
}

/** Read the event stream. When it ends, reconnect with a growing delay. */
async function run() {
  let [delay, message] = [1000, ""];
  for (;;) {
    if (hasToken && !token()) await signIn(message);
    message = "";
    try {
      await subscribe("api/live", (name, data) => {
        delay = 1000;
        handleEvent(name, data);
      });
      showStatus("connection closed; retrying", "bad");
    } catch (error) {
      if (error.status === 401) {
        clearToken();
        message = "Wrong token.";
        // If the page was loaded before a token was configured, reload the page to get the sign-in form.
        if (hasToken) continue;
        location.reload();
      }
      showStatus(`${error.status ? error.message : "no connection"}; retrying`, "bad");
    }
    isConnected = false;
    showStale();
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(delay * 2, MAX_RETRY_DELAY_MS);
  }
}

find("#sign-out").addEventListener("click", () => {
  clearToken();
  location.reload();
});
find(`#range input[value="${CSS.escape(sessionStorage.getItem(RANGE_KEY) ?? "")}"]`)?.click();
find("#range").addEventListener("change", (event) => {
  sessionStorage.setItem(RANGE_KEY, event.target.value);
  draw();
});
find("#by-minute").addEventListener("toggle", showMinutes);
document.addEventListener("visibilitychange", () => {
  draw();
  showLists();
});
setInterval(showLists, LISTS_INTERVAL_MS);
setInterval(showStale, STALE_CHECK_MS);
initFlow(draw);
initInspectForm();
initUsage();
initScrollHints();
run();
