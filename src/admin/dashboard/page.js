// The live page: follows the events of the gateway and shows them.

import { canBeSent, ask, follow, forget, keep, token, wantsToken } from "./ask.js";
import { chart } from "./chart.js";
import { at, figure, fill, make, number, tiles, write } from "./dom.js";
import { inspect, start } from "./inspect.js";

/** Rates of limits are those of so many seconds. */
const RECENT = 10;
const TOP_EVERY_MS = 5000;
const LONGEST_PAUSE_MS = 8000;

const rate = (read) => (second) => (read(second) * 1000) / second.ms;
const RATES = [["allowed", rate((s) => s.allowed)], ["denied", rate((s) => s.denied)], ["errors", rate((s) => s.errors)]];
const TIMES = [
  ["p50", (s) => s.p50_ms], ["p99", (s) => s.p99_ms], ["rate limit check p99", (s) => s.decision_p99_ms],
];

let seconds = [];
let recent = [];
let most = 0;
let configuration = null;
const showRates = chart(at("#rates"), RATES, "per second");
const showTimes = chart(at("#times"), TIMES, "ms");

function state(text, kind) {
  write(at("#state"), text);
  at("#state").className = kind;
}

function showNow({ second, connections, health }) {
  tiles(at("#now"), [
    ...RATES.map(([name, read]) => [`${name}/s`, figure(read(second))]),
    ["p50", second.p50_ms == null ? "–" : `${figure(second.p50_ms)} ms`],
    ["p99", second.p99_ms == null ? "–" : `${figure(second.p99_ms)} ms`],
    ["connections", `${figure(connections.open)} of ${figure(connections.max)}`],
  ]);
  const { name, failing } = health.store;
  tiles(at("#store"), [
    ["store", name],
    ["reachable", failing.length ? `not: ${failing.join(", ")}` : "yes", failing.length ? "bad" : "good"],
    ["store round trip p99", second.store_p99_ms == null ? "–" : `${figure(second.store_p99_ms)} ms`],
    ["rate limit check p99", second.decision_p99_ms == null ? "–" : `${figure(second.decision_p99_ms)} ms`],
  ]);
  const kind = { ready: "good", degraded: "bad", stopping: "bad" }[health.status];
  state(health.status === "degraded" ? "degraded: the store does not answer" : health.status, kind);
  const servers = Object.entries(health.upstreams).flatMap(([upstream, all]) => all.map((one) => [upstream, one]));
  fill(at("#health table"), servers.map(([upstream, one], place) => ({
    key: `${place}`,
    cells: [one.server, upstream, { text: one.state, kind: one.state === "healthy" ? "good" : "bad" }, number(one.in_flight)],
  })));
  at("#health table").hidden = !servers.length;
}

function showLimits(event) {
  recent.push(event);
  recent = recent.slice(-RECENT - 1);
  const first = recent[0];
  const before = new Map(first.limits.map((each) => [each.limit, each.decisions]));
  const span = (event.second.at_ms - first.second.at_ms) / 1000;
  fill(at("#limits table"), event.limits.map(({ limit, quota, shadow, decisions }) => {
    const sum = (of, ...kinds) => kinds.reduce((all, kind) => all + of[kind], 0);
    const per = (...kinds) => {
      const old = before.get(limit);
      return number(old && span ? (sum(decisions, ...kinds) - sum(old, ...kinds)) / span : null);
    };
    return {
      key: limit,
      cells: [
        limit + (shadow ? " (shadow)" : ""), quota, per("allowed", "local_allowed"), per("denied", "local_denied"),
        per("shadow_denied"), per("local_allowed", "local_denied"), per("store_error"),
        number(sum(decisions, "denied", "local_denied")),
      ],
    };
  }));
  const names = event.limits.map((each) => each.limit);
  const select = at("#limit");
  if (names.join("\n") !== [...select.options].slice(1).map((option) => option.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(select.options[0], ...names.map((name) => make("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : "";
  }
}

function showMinutes() {
  const minutes = new Map();
  for (const second of at("#by-minute").open ? seconds : []) {
    const minute = Math.floor(second.at_ms / 60_000);
    minutes.set(minute, [...(minutes.get(minute) ?? []), second]);
  }
  const mean = (all, read) => all.reduce((sum, s) => sum + read(s), 0) * 1000 / all.reduce((sum, s) => sum + s.ms, 0);
  const longest = (all, read) => all.map(read).reduce((most, one) => (one == null ? most : Math.max(most ?? 0, one)), null);
  fill(at("#by-minute table"), [...minutes].reverse().map(([minute, all]) => ({
    key: `${minute}`,
    cells: [
      new Date((minute + 1) * 60_000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }),
      ...["allowed", "denied", "errors"].map((kind) => number(mean(all, (s) => s[kind]))),
      number(longest(all, (s) => s.p50_ms)), number(longest(all, (s) => s.p99_ms)),
    ],
  })));
}

async function showTop() {
  const { limits } = await (await ask("api/top")).json();
  const who = (parts) => Object.entries(parts).map(([word, value]) => `${word}=${value ?? "(hidden)"}`).join(" ");
  const rows = limits.flatMap(({ limit, shadow, identities }) => identities.map((each) => ({
    key: `${limit} ${each.identity}`,
    cells: [
      who(each.parts), limit + (shadow ? " (shadow)" : ""),
      each.denied_at_least === each.denied_at_most
        ? number(each.denied_at_most)
        : { text: `${figure(each.denied_at_least)} to ${figure(each.denied_at_most)}`, kind: "number" },
      { text: each.identity, kind: "hash" },
    ],
    act: { text: "Inspect", label: `Inspect ${who(each.parts)} with ${limit}`, run: () => inspect(limit, each.identity) },
  })));
  fill(at("#denied table"), rows);
  at("#denied .wide").hidden = !rows.length;
  at("#nobody").hidden = rows.length > 0;
}

async function showConfiguration() {
  const shown = await (await ask("api/config")).json();
  write(at("#file"), shown.file);
  write(at("#since"), new Date(shown.loaded_at).toLocaleString());
  at("#since").dateTime = shown.loaded_at;
  write(at("#written"), JSON.stringify(shown.configuration, null, 2));
  at("#refused").hidden = !shown.last_error;
  write(at("#refused pre"), shown.last_error?.error ?? "");
}

function take(name, data) {
  at("#content").hidden = at("nav").hidden = false;
  at("#token-form").hidden = true;
  at("#forget").hidden = !wantsToken;
  if (name === "history") {
    ({ seconds, window_seconds: most } = data);
    recent = [];
    write(at("#version"), data.version);
    showTop().catch(() => {});
  } else {
    seconds = [...seconds, data.second].slice(-most);
    showNow(data);
    showLimits(data);
    const { loaded_at, last_error_at } = data.configuration;
    if (configuration !== `${loaded_at} ${last_error_at}`) {
      configuration = `${loaded_at} ${last_error_at}`;
      showConfiguration().catch(() => { configuration = null; });
    }
  }
  showRates(seconds);
  showTimes(seconds);
  showMinutes();
}

/** Waits until somebody has given a token. */
function given(said) {
  state("a token is needed", "");
  at("#content").hidden = at("nav").hidden = true;
  at("#forget").hidden = true;
  at("#token-form").hidden = false;
  write(at("#token-said"), said);
  at("#token-said").className = said ? "bad" : "";
  at("#token").focus();
  return new Promise((resolve) => {
    at("#token-form").onsubmit = (event) => {
      event.preventDefault();
      const value = at("#token").value.trim();
      at("#token").value = "";
      if (canBeSent(value)) {
        keep(value);
        resolve();
      } else write(at("#token-said"), "No token looks like this.");
    };
  });
}

async function live() {
  let [pause, said] = [1000, ""];
  for (;;) {
    if (wantsToken && !token()) await given(said);
    said = "";
    try {
      await follow("api/live", (name, data) => {
        pause = 1000;
        take(name, data);
      });
      state("the connection has ended; trying again", "bad");
    } catch (error) {
      if (error.status === 401) {
        forget();
        said = "This is not its token.";
        // The page may be older than the token.
        if (wantsToken) continue;
        location.reload();
      }
      state(`${error.status ? error.message : "no connection"}; trying again`, "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

at("#forget").addEventListener("click", () => {
  forget();
  location.reload();
});
at("#by-minute").addEventListener("toggle", showMinutes);
setInterval(() => at("#content").hidden || showTop().catch(() => {}), TOP_EVERY_MS);
start();
live();
