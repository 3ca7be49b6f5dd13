// The traffic flow: a node for each route, limit and upstream, and a line for each way of requests between them.

import { find, formatMs, formatNumber, make, makeSvg, setText } from "./dom.js";

/** Maximum number of routes that are shown until the user clicks the button for all routes. */
const SHOWN_ROUTES = 6;
const MAX_LINE_PX = 14;
const MIN_LINE_PX = 1.5;

let showAll = false;
/** The lines of the last update, which are drawn again when the size of the picture changes. */
let lines = [];

/** The key and name of the node for routes without limits. It is not the name of a limit, because it has a space. */
const NO_LIMITS = "no limits";

/** Return the methods, the first host and the path of a route. */
function describeMatch({ methods, hosts, path, path_regex: expression }) {
  const more = hosts?.length > 1 ? ` (+${hosts.length - 1}) ` : "";
  return `${methods?.join(" ") ?? ""} ${hosts?.[0] ?? ""}${more}${path ?? expression ?? ""}`.trim();
}

/** Return where the requests of a route go: the key, the name, and the share of the requests. */
function targetsOf(route) {
  if (route.is_descriptor) return [{ key: "respond", name: "answers the proxy", share: 1 }];
  if (route.respond) return [{ key: "respond", name: `responds with ${route.respond.status ?? 200}`, share: 1 }];
  if (route.redirect) return [{ key: "respond", name: `redirects to ${route.redirect.to ?? route.redirect.scheme}`, share: 1 }];
  const weights = typeof route.upstream === "string" ? { [route.upstream]: 1 } : route.upstream ?? {};
  const sum = Object.values(weights).reduce((total, weight) => total + weight, 0);
  return Object.entries(weights).map(([name, weight]) => ({ key: `upstream ${name}`, upstream: name, name, share: sum ? weight / sum : 0 }));
}

/** Return the state of an upstream in words, and the class of these words. */
function describeHealth(endpoints) {
  const healthy = endpoints.filter(({ state }) => state === "healthy").length;
  const unchecked = endpoints.filter(({ state }) => state === "not checked").length;
  return {
    state: `${healthy} of ${endpoints.length} healthy${unchecked ? `, ${unchecked} not checked` : ""}`,
    kind: healthy + unchecked < endpoints.length ? "bad" : unchecked ? "" : "good",
  };
}

/** Update the nodes of a column. A node has a key, a name, a rate, and lines of `[text, class]`. */
function updateNodes(list, nodes) {
  const old = new Map([...list.children].map((node) => [node.dataset.key, node]));
  nodes.forEach(({ key, name, rate, details }, index) => {
    const node = old.get(key) ?? make("li", { class: "node", "data-key": key }, make("b"), make("span", { class: "rate" }), make("div", { class: "details" }));
    old.delete(key);
    if (list.children[index] !== node) list.insertBefore(node, list.children[index] ?? null);
    setText(node.children[0], name);
    setText(node.children[1], rate == null ? "" : `${formatNumber(rate)}/s`);
    const shown = details.filter(([text]) => text);
    const place = node.children[2];
    while (place.children.length > shown.length) place.lastChild.remove();
    shown.forEach(([text, kind], line) => {
      const element = place.children[line] ?? place.appendChild(make("span"));
      setText(element, text);
      element.className = kind;
    });
  });
  for (const node of old.values()) node.remove();
}

/** Draw the lines between the nodes. */
function drawLines() {
  const svg = find("#lines");
  const frame = svg.getBoundingClientRect();
  const nodes = new Map([...document.querySelectorAll("#flow-picture .node")].map((node) => [`${node.parentElement.id} ${node.dataset.key}`, node.getBoundingClientRect()]));
  const maximum = Math.max(...lines.map(({ rate }) => rate), 1e-9);
  const old = new Map([...svg.children].map((path) => [path.dataset.key, path]));
  for (const { from, to, rate } of lines) {
    const [start, end] = [nodes.get(from), nodes.get(to)];
    if (!start || !end) continue;
    const key = `${from} > ${to}`;
    const path = old.get(key) ?? svg.appendChild(makeSvg("path", { "data-key": key }));
    old.delete(key);
    const [x1, x2] = [start.right - frame.left, end.left - frame.left];
    const [y1, y2] = [start, end].map(({ top, height }) => top + height / 2 - frame.top);
    const middle = (x1 + x2) / 2;
    path.setAttribute("d", `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
    path.setAttribute("stroke-width", Math.max(MIN_LINE_PX, MAX_LINE_PX * (rate / maximum)).toFixed(1));
    path.setAttribute("class", rate ? "busy" : "idle");
  }
  for (const path of old.values()) path.remove();
}

/**
 * Show the routes and the descriptors, the busiest ones first, with their limits and upstreams. `rates` contains the requests per second of
 * each route by outcome, `totals` the number of requests of each route since the start of the gateway, `latencies` the
 * p95 of each route in ms, `limitRates` and `upstreamRates` the rates of each limit and upstream. Errors of the gateway
 * itself belong to the route, the other errors to the upstream.
 */
export function showFlow(routes, { rates, totals, latencies, upstreams, shadow, limitRates, upstreamRates }) {
  const sorted = routes.length > SHOWN_ROUTES
    ? routes.toSorted((a, b) => (totals.get(b.name) ?? 0) - (totals.get(a.name) ?? 0))
    : routes;
  const shown = showAll ? sorted : sorted.slice(0, SHOWN_ROUTES);
  const rateOf = (name) => rates.get(name) ?? { allowed: 0, denied: 0, errors: 0 };
  const limitName = (name) => name + (shadow.has(name) ? " (shadow)" : "");
  const [limits, targets, between] = [new Map(), new Map(), new Map()];
  const addLine = (from, to, rate) => {
    const key = `${from} > ${to}`;
    between.set(key, { from, to, rate: (between.get(key)?.rate ?? 0) + rate });
  };
  const nodes = shown.map((route) => {
    const { allowed, denied, errors, gateway_errors: own = 0 } = rateOf(route.name);
    const passed = allowed + Math.max(0, errors - own);
    const ways = targetsOf(route);
    const names = route.limits?.length ? route.limits : [NO_LIMITS];
    for (const { key, upstream, share } of ways) {
      const target = targets.get(key) ?? { key, upstream, rate: 0 };
      targets.set(key, { ...target, rate: target.rate + passed * share });
      for (const name of names) addLine(`gates ${name}`, `targets ${key}`, passed * share);
    }
    for (const name of names) {
      limits.set(name, (limits.get(name) ?? 0) + passed);
      addLine(`lanes ${route.name}`, `gates ${name}`, allowed + denied + errors);
    }
    const p95 = latencies.get(route.name);
    const way = ways.map(({ name, share }) => (ways.length > 1 ? `${name} ${formatNumber(100 * share)} %` : name)).join(", ");
    return {
      key: route.name, name: route.name, rate: allowed + denied + errors,
      details: [
        [describeMatch(route), "match"],
        [`${names.map(limitName).join(", ")} → ${way}`, "way"],
        [p95 == null ? "" : `p95 ${formatMs(p95)}`, ""],
        [denied ? `${formatNumber(denied)}/s denied` : "", "denied"],
        [own ? `${formatNumber(own)}/s errors` : "", "errors"],
      ],
    };
  });
  updateNodes(find("#lanes"), nodes);
  updateNodes(find("#gates"), [...limits].map(([name, passed]) => {
    if (name === NO_LIMITS) return { key: name, name, rate: passed, details: [] };
    const { allowed = null, denied = 0, shadow_denied: wouldDeny = 0 } = limitRates.get(name) ?? {};
    return {
      key: name, name: limitName(name), rate: allowed == null ? null : allowed + denied,
      details: [
        [denied ? `${formatNumber(denied)}/s denied` : "", "denied"],
        [wouldDeny ? `${formatNumber(wouldDeny)}/s would be denied` : "", "denied"],
      ],
    };
  }));
  updateNodes(find("#targets"), [...targets.values()].map(({ key, upstream, rate }) => {
    if (!upstream) return { key, name: "the gateway", rate, details: [["responds itself", ""]] };
    const { state, kind } = describeHealth(upstreams[upstream] ?? []);
    const { requests = null, errors } = upstreamRates.get(upstream) ?? {};
    return { key, name: upstream, rate: requests, details: [[state, kind], [errors ? `${formatNumber(errors)}/s errors` : "", "errors"]] };
  }));
  lines = [...between.values()];
  drawLines();
  const more = find("#more-routes");
  more.hidden = routes.length <= SHOWN_ROUTES;
  setText(more, showAll ? `Show the ${SHOWN_ROUTES} busiest routes` : `Show all ${routes.length} routes`);
}

export function initFlow(update) {
  find("#more-routes").addEventListener("click", () => {
    showAll = !showAll;
    update();
  });
  new ResizeObserver(drawLines).observe(find("#flow-picture"));
}
