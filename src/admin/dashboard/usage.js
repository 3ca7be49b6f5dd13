// The clients with the highest usage of limits with `usage = true`, in a period that the user selects.

import { request } from "./api.js";
import { find, formatNumber, numberCell, setText, updateTable } from "./dom.js";
import { inspect } from "./inspect.js";

/** Maximum number of clients of each limit that are shown. */
const SHOWN_CLIENTS = 10;

/** Show the section if a limit counts usage. */
export function showUsageSection(configuration) {
  const counts = Object.values(configuration.limit ?? {}).some(({ usage }) => usage);
  find("#clients").hidden = find("nav a[href='#clients']").hidden = !counts;
}

/** Return the first day of a period that ends today, in UTC. */
function firstDay(period) {
  const today = new Date().toISOString().slice(0, 10);
  return period === "month" ? `${today.slice(0, 8)}01` : today;
}

/**
 * Ask the gateway for the highest totals, and show them. The gateway reads the totals of all clients for this, so the
 * page asks only when the user clicks a button.
 */
async function showTopClients(period) {
  const from = firstDay(period);
  const report = await (await request(`api/usage?by=identity&from=${from}&count=${SHOWN_CLIENTS}`)).json();
  const totals = new Map(report.totals.map(({ limit, cost }) => [limit, cost]));
  updateTable(find("#top-clients table"), report.usage.map(({ limit, unit, identity, consumer, cost }) => {
    const client = consumer ?? identity;
    const total = totals.get(limit);
    return {
      key: `${limit} ${identity}`,
      cells: [
        consumer ? `api-key=${consumer}` : { text: identity, kind: "hash" }, limit, numberCell(cost), unit,
        { text: total > 0 ? `${formatNumber((100 * cost) / total)} %` : "–", kind: "number" },
      ],
      actions: [{ text: "Inspect", label: `Inspect ${client} with ${limit}`, run: () => inspect(limit, identity) }],
    };
  }));
  find("#top-clients").hidden = !report.usage.length;
  setText(find("#top-clients .from"), from);
  return report.usage.length ? "" : `No usage since ${from}.`;
}

export function initUsage() {
  for (const button of document.querySelectorAll("#clients button")) {
    button.addEventListener("click", async () => {
      const result = find("#clients-result");
      try {
        setText(result, await showTopClients(button.value));
        result.className = "note";
      } catch (error) {
        setText(result, error.message);
        result.className = "bad";
      }
    });
  }
}
