// The traffic flow: one row per route, with its requests, its limits and its upstream.

import { find, formatMs, formatNumber, make, setText } from "./dom.js";

/** Maximum number of routes that are shown until the user clicks the button for all routes. */
const SHOWN_ROUTES = 6;
const MAX_PIPE_REM = 1.1;
const MIN_PIPE_REM = 0.1;

let showAll = false;

function makeLane(key) {
  return make("li", { class: "lane", "data-key": key },
    make("div", { class: "node route" }, make("b"), make("code"), make("span", { class: "rate" })),
    make("div", { class: "pipe", "aria-hidden": "true" }, ...["allowed", "errors", "denied"].map((kind) => make("span", { class: kind }))),
    make("div", { class: "node gate" }, make("ul", { class: "chips" }), make("span", { class: "rate" })),
    make("div", { class: "pipe", "aria-hidden": "true" }, ...["allowed", "errors"].map((kind) => make("span", { class: kind }))),
    make("div", { class: "node target" }, make("b"), make("span", { class: "state" }), make("span", { class: "rate" })));
}

/** Return the methods, the first host and the path of a route. */
function describeMatch({ methods, hosts, path, path_regex: expression }) {
  const more = hosts?.length > 1 ? ` (+${hosts.length - 1}) ` : "";
  return `${methods?.join(" ") ?? ""} ${hosts?.[0] ?? ""}${more}${path ?? expression}`.trim();
}

/** Return the name and the state of the target of a route: its upstreams, or the gateway itself. */
function describeTarget(route, upstreams) {
  if (route.respond) return { name: "the gateway", state: `responds with ${route.respond.status ?? 200}`, kind: "" };
  if (route.redirect) return { name: "redirect", state: `to ${route.redirect.to ?? route.redirect.scheme}`, kind: "" };
  const weights = typeof route.upstream === "string" ? { [route.upstream]: 1 } : route.upstream ?? {};
  const names = Object.keys(weights);
  const sum = Object.values(weights).reduce((total, weight) => total + weight, 0);
  const endpoints = names.flatMap((name) => upstreams[name] ?? []);
  const healthy = endpoints.filter(({ state }) => state === "healthy").length;
  const unchecked = endpoints.filter(({ state }) => state === "not checked").length;
  return {
    name: names.map((name) => (names.length > 1 ? `${name} ${formatNumber((100 * weights[name]) / sum)} %` : name)).join(", "),
    state: `${healthy} of ${endpoints.length} healthy${unchecked ? `, ${unchecked} not checked` : ""}`,
    kind: healthy + unchecked < endpoints.length ? "bad" : unchecked ? "" : "good",
  };
}

function updatePipe(pipe, rates, maximum) {
  [...pipe.children].forEach((part, index) => {
    const rate = rates[index];
    const size = rate ? Math.max(MIN_PIPE_REM, MAX_PIPE_REM * (rate / maximum)) : 0;
    part.style.setProperty("--size", `${size.toFixed(3)}rem`);
  });
  pipe.classList.toggle("empty", !rates.some(Boolean));
}

function updateChips(list, limits, shadow) {
  const names = limits.length ? limits : ["no limits"];
  const text = names.map((name) => name + (shadow.has(name) ? " (shadow)" : ""));
  if ([...list.children].map((chip) => chip.textContent).join("\n") === text.join("\n")) return;
  list.replaceChildren(...text.map((each) => make("li", { class: limits.length ? "chip" : "none" }, each)));
}

/**
 * Show the routes, the busiest ones first. `rates` contains the requests per second of each route by outcome, `totals`
 * the number of requests of each route since the start of the gateway, `latencies` the p95 of each route in ms. Errors of
 * the gateway itself belong to the box of the limits, the other errors to the box of the upstream.
 */
export function showFlow(routes, { rates, totals, latencies, upstreams, shadow }) {
  const list = find("#lanes");
  const sorted = routes.length > SHOWN_ROUTES
    ? routes.toSorted((a, b) => (totals.get(b.name) ?? 0) - (totals.get(a.name) ?? 0))
    : routes;
  const shown = showAll ? sorted : sorted.slice(0, SHOWN_ROUTES);
  const rateOf = (name) => rates.get(name) ?? { allowed: 0, denied: 0, errors: 0 };
  const sum = ({ allowed, denied, errors }) => allowed + denied + errors;
  const maximum = Math.max(...shown.map(({ name }) => sum(rateOf(name))), 1e-9);
  const old = new Map([...list.children].map((lane) => [lane.dataset.key, lane]));
  shown.forEach((route, index) => {
    const lane = old.get(route.name) ?? makeLane(route.name);
    old.delete(route.name);
    if (list.children[index] !== lane) list.insertBefore(lane, list.children[index] ?? null);
    const [source, before, gate, after, target] = lane.children;
    const { allowed, denied, errors, gateway_errors: own = 0 } = rateOf(route.name);
    const ofUpstream = Math.max(0, errors - own);
    setText(source.children[0], route.name);
    setText(source.children[1], describeMatch(route));
    setText(source.children[2], `${formatNumber(allowed + denied + errors)}/s`);
    updatePipe(before, [allowed, errors, denied], maximum);
    updateChips(gate.children[0], route.limits ?? [], shadow);
    gate.classList.toggle("open", !route.limits?.length);
    setText(gate.children[1], [denied && `${formatNumber(denied)}/s denied`, own && `${formatNumber(own)}/s errors`].filter(Boolean).join(", "));
    updatePipe(after, [allowed, ofUpstream], maximum);
    const { name, state, kind } = describeTarget(route, upstreams);
    setText(target.children[0], name);
    const p95 = latencies.get(route.name);
    setText(target.children[1], p95 == null ? state : `${state}, p95 ${formatMs(p95)}`);
    target.children[1].className = `state ${kind}`;
    setText(target.children[2], ofUpstream ? `${formatNumber(ofUpstream)}/s errors` : "");
  });
  for (const lane of old.values()) lane.remove();
  const more = find("#more-routes");
  more.hidden = routes.length <= SHOWN_ROUTES;
  setText(more, showAll ? `Show the ${SHOWN_ROUTES} busiest routes` : `Show all ${routes.length} routes`);
}

export function initFlow(update) {
  find("#more-routes").addEventListener("click", () => {
    showAll = !showAll;
    update();
  });
}
