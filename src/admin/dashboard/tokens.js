// Limits that count LLM tokens: the settled cost per minute, and the clients with the highest cost.

import { request } from "./api.js";
import { find, formatNumber, numberCell, updateTable } from "./dom.js";
import { clientName, inspect } from "./inspect.js";

/** Rates per minute are averages over this many seconds. */
const WINDOW_SECONDS = 60;
/** Maximum number of clients that are shown. */
const SHOWN_CLIENTS = 10;

let samples = [];

/** Remove all samples, because a restart of the gateway may have reset the counters. */
export function clearTokens() {
  samples = [];
}

/** Add the settled costs of an event to the samples, and show the settled cost of each limit per minute. */
export function showTokens({ second, limits }) {
  const counted = limits.filter(({ settled }) => settled != null);
  samples = [...samples, { at_ms: second.at_ms, settled: new Map(counted.map(({ limit, settled }) => [limit, settled])) }]
    .filter(({ at_ms }) => at_ms >= second.at_ms - WINDOW_SECONDS * 1000 - 500);
  const first = samples[0];
  const elapsed = (second.at_ms - first.at_ms) / 1000;
  updateTable(find("#token-rates table"), counted.map(({ limit, unit, settled }) => {
    const before = first.settled.get(limit);
    const perMinute = before == null || !elapsed ? null : (Math.max(0, settled - before) * 60) / elapsed;
    return { key: limit, cells: [limit, unit, numberCell(perMinute), numberCell(settled)] };
  }));
  find("#tokens").hidden = find("nav a[href='#tokens']").hidden = !counted.length;
}

/** Show the clients with the highest settled cost. */
export async function showTopCosts() {
  if (find("#tokens").hidden) return;
  const { limits } = await (await request("api/top?by=cost")).json();
  const clients = limits.flatMap(({ limit, unit, identities }) => identities.map((each) => ({ limit, unit, ...each })));
  clients.sort((a, b) => b.cost_at_most - a.cost_at_most);
  updateTable(find("#top-costs table"), clients.slice(0, SHOWN_CLIENTS).map((each) => {
    const { limit, unit, identity, cost_at_least, cost_at_most } = each;
    const client = clientName(each.parts);
    return {
      key: `${limit} ${identity}`,
      cells: [
        client, limit, unit,
        cost_at_least === cost_at_most
          ? numberCell(cost_at_most)
          : { text: `${formatNumber(cost_at_least)} to ${formatNumber(cost_at_most)}`, kind: "number" },
      ],
      actions: [{ text: "Inspect", label: `Inspect ${client} with ${limit}`, run: () => inspect(limit, identity) }],
    };
  }));
  find("#top-costs").hidden = !clients.length;
  find("#no-costs").hidden = clients.length > 0;
}
