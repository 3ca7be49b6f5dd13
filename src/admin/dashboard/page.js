// The dashboard: subscribes to the events of the gateway and shows them.

import { clearToken, hasToken, isValidToken, request, storeToken, subscribe, token } from "./api.js";
import { chart } from "./chart.js";
import { find, formatNumber, make, numberCell, setText, updateTable, updateTiles } from "./dom.js";
import { initInspectForm, inspect } from "./inspect.js";

/** The rates of limits are averages over this many seconds. */
const RATE_SECONDS = 10;
const TOP_INTERVAL_MS = 5000;
const MAX_RETRY_DELAY_MS = 8000;

const perSecond = (read) => (second) => (read(second) * 1000) / second.ms;
const RATES = [
  ["allowed", perSecond((s) => s.allowed)], ["denied", perSecond((s) => s.denied)], ["errors", perSecond((s) => s.errors)],
];
const LATENCIES = [
  ["p50", (s) => s.p50_ms], ["p99", (s) => s.p99_ms], ["rate limit check p99", (s) => s.decision_p99_ms],
];

let seconds = [];
let recentEvents = [];
let historySeconds = 0;
let shownConfiguration = null;
const drawRates = chart(find("#rates"), RATES, "per second");
const drawLatencies = chart(find("#latencies"), LATENCIES, "ms");

function showStatus(text, kind) {
  setText(find("#status"), text);
  find("#status").className = kind;
}

const formatMs = (value) => (value == null ? "–" : `${formatNumber(value)} ms`);

function showCurrent({ second, connections, health }) {
  updateTiles(find("#current"), [
    ...RATES.map(([name, read]) => [`${name}/s`, formatNumber(read(second))]),
    ["p50", formatMs(second.p50_ms)],
    ["p99", formatMs(second.p99_ms)],
    ["connections", `${formatNumber(connections.open)} of ${formatNumber(connections.max)}`],
  ]);
  const { name, failing } = health.store;
  updateTiles(find("#store"), [
    ["store", name],
    ["available", failing.length ? `no: ${failing.join(", ")}` : "yes", failing.length ? "bad" : "good"],
    ["store round trip p99", formatMs(second.store_p99_ms)],
    ["rate limit check p99", formatMs(second.decision_p99_ms)],
  ]);
  const kind = { ready: "good", degraded: "bad", stopping: "bad" }[health.status];
  showStatus(health.status === "degraded" ? "degraded: store unavailable" : health.status, kind);
  const endpoints = Object.entries(health.upstreams).flatMap(([upstream, all]) => all.map((endpoint) => [upstream, endpoint]));
  updateTable(find("#health table"), endpoints.map(([upstream, { server, state, in_flight }], index) => ({
    key: `${index}`,
    cells: [server, upstream, { text: state, kind: state === "healthy" ? "good" : "bad" }, numberCell(in_flight)],
  })));
  find("#health table").hidden = !endpoints.length;
}

function showLimits(event) {
  recentEvents.push(event);
  recentEvents = recentEvents.slice(-RATE_SECONDS - 1);
  const first = recentEvents[0];
  const before = new Map(first.limits.map(({ limit, decisions }) => [limit, decisions]));
  const elapsed = (event.second.at_ms - first.second.at_ms) / 1000;
  updateTable(find("#limits table"), event.limits.map(({ limit, quota, shadow, decisions }) => {
    const sum = (counts, ...kinds) => kinds.reduce((total, kind) => total + counts[kind], 0);
    const rate = (...kinds) => {
      const old = before.get(limit);
      return numberCell(old && elapsed ? (sum(decisions, ...kinds) - sum(old, ...kinds)) / elapsed : null);
    };
    return {
      key: limit,
      cells: [
        limit + (shadow ? " (shadow)" : ""), quota, rate("allowed", "local_allowed"), rate("denied", "local_denied"),
        rate("shadow_denied"), rate("local_allowed", "local_denied"), rate("store_error"),
        numberCell(sum(decisions, "denied", "local_denied")),
      ],
    };
  }));
  const names = event.limits.map(({ limit }) => limit);
  const select = find("#limit");
  if (names.join("\n") !== [...select.options].slice(1).map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...names.map((name) => make("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : "";
  }
}

function showMinutes() {
  const minutes = new Map();
  for (const second of find("#by-minute").open ? seconds : []) {
    const minute = Math.floor(second.at_ms / 60_000);
    minutes.set(minute, [...(minutes.get(minute) ?? []), second]);
  }
  const mean = (all, read) => all.reduce((sum, s) => sum + read(s), 0) * 1000 / all.reduce((sum, s) => sum + s.ms, 0);
  const maximum = (all, read) => all.map(read).reduce((max, value) => (value == null ? max : Math.max(max ?? 0, value)), null);
  updateTable(find("#by-minute table"), [...minutes].reverse().map(([minute, all]) => ({
    key: `${minute}`,
    cells: [
      new Date((minute + 1) * 60_000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }),
      ...["allowed", "denied", "errors"].map((kind) => numberCell(mean(all, (s) => s[kind]))),
      numberCell(maximum(all, (s) => s.p50_ms)), numberCell(maximum(all, (s) => s.p99_ms)),
    ],
  })));
}

async function showTopDenied() {
  const { limits } = await (await request("api/top")).json();
  const clientName = (parts) => Object.entries(parts).map(([part, value]) => `${part}=${value ?? "(hidden)"}`).join(" ");
  const rows = limits.flatMap(({ limit, shadow, identities }) => identities.map((denied) => ({
    key: `${limit} ${denied.identity}`,
    cells: [
      clientName(denied.parts), limit + (shadow ? " (shadow)" : ""),
      denied.denied_at_least === denied.denied_at_most
        ? numberCell(denied.denied_at_most)
        : { text: `${formatNumber(denied.denied_at_least)} to ${formatNumber(denied.denied_at_most)}`, kind: "number" },
      { text: denied.identity, kind: "hash" },
    ],
    action: {
      text: "Inspect", label: `Inspect ${clientName(denied.parts)} with ${limit}`, run: () => inspect(limit, denied.identity),
    },
  })));
  updateTable(find("#denied table"), rows);
  find("#denied .wide").hidden = !rows.length;
  find("#no-denials").hidden = rows.length > 0;
}

async function showConfiguration() {
  const { file, loaded_at, configuration, last_error } = await (await request("api/config")).json();
  setText(find("#config-file"), file);
  setText(find("#loaded-at"), new Date(loaded_at).toLocaleString());
  find("#loaded-at").dateTime = loaded_at;
  setText(find("#active-config"), JSON.stringify(configuration, null, 2));
  find("#reload-error").hidden = !last_error;
  setText(find("#reload-error pre"), last_error?.error ?? "");
}

function handleEvent(name, data) {
  find("#content").hidden = find("nav").hidden = false;
  find("#token-form").hidden = true;
  find("#sign-out").hidden = !hasToken;
  if (name === "history") {
    ({ seconds, window_seconds: historySeconds } = data);
    recentEvents = [];
    setText(find("#version"), data.version);
    showTopDenied().catch(() => {});
  } else {
    seconds = [...seconds, data.second].slice(-historySeconds);
    showCurrent(data);
    showLimits(data);
    const { loaded_at, last_error_at } = data.configuration;
    if (shownConfiguration !== `${loaded_at} ${last_error_at}`) {
      shownConfiguration = `${loaded_at} ${last_error_at}`;
      showConfiguration().catch(() => { shownConfiguration = null; });
    }
  }
  drawRates(seconds);
  drawLatencies(seconds);
  showMinutes();
}

/** Show the sign-in form with a message. Resolve when a token was entered. */
function signIn(message) {
  showStatus("sign-in required", "");
  find("#content").hidden = find("nav").hidden = true;
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

/** Follow the event stream. Reconnect with a growing delay when it ends. */
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
        // If the page was loaded before a token was configured, load it again to get the sign-in form.
        if (hasToken) continue;
        location.reload();
      }
      showStatus(`${error.status ? error.message : "no connection"}; retrying`, "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(delay * 2, MAX_RETRY_DELAY_MS);
  }
}

find("#sign-out").addEventListener("click", () => {
  clearToken();
  location.reload();
});
find("#by-minute").addEventListener("toggle", showMinutes);
setInterval(() => find("#content").hidden || showTopDenied().catch(() => {}), TOP_INTERVAL_MS);
initInspectForm();
run();
