// Identities: inspect and reset usage, set and remove quota overrides, and list the identities with the most denials.

import { hasToken, request } from "./api.js";
import { askOverride, confirmChange } from "./dialogs.js";
import { find, formatDuration, formatNumber, numberCell, setText, unitText, updateTable, usageCell } from "./dom.js";

const HASH = /^[0-9a-f]{32}$/i;
/** Maximum number of top denied identities that are shown. */
const SHOWN_DENIED = 10;

/** An IPv4 or IPv6 address. The gateway rejects what is not one. */
const ADDRESS = /^(\d+\.\d+\.\d+\.\d+|[0-9a-f]*:[0-9a-f:.]*)$/i;

/** Parse the identity field into query parameters: a hash, an address, or PART=VALUE pairs whose values may contain spaces. */
function parseIdentity(limit, text) {
  const parameters = new URLSearchParams(limit ? { limit } : {});
  if (HASH.test(text)) {
    parameters.set("identity", text);
    return parameters;
  }
  if (ADDRESS.test(text)) {
    parameters.set("ip", text);
    return parameters;
  }
  for (const pair of text.split(/\s+(?=[^\s=]+=)/)) {
    const [, part, value] = /^([^\s=]+)=(.*)$/s.exec(pair) ?? [];
    if (!part) throw new Error("write the identity as PART=VALUE, or as a hash of 32 hexadecimal digits");
    parameters.set(part, value);
  }
  return parameters;
}

const getUsage = async (parameters) => (await (await request(`api/identities?${parameters}`)).json()).limits;

function overrideText(override) {
  if (!override) return "–";
  return `for ${formatDuration(override.expires_in_seconds)}${override.note ? `: ${override.note}` : ""}`;
}

const isDenied = ({ decision }) => decision === "denied" || decision === "cost_too_large";

/** Show the usage of the identity in the form. Return a summary as text. */
async function showUsage() {
  const limits = await getUsage(parseIdentity(find("#limit").value, find("#identity").value.trim()));
  updateTable(find("#usage table"), limits.map((usage) => ({
    key: `${usage.limit} ${usage.identity}`,
    cells: [
      usage.limit + (usage.shadow ? " (shadow)" : ""),
      { text: usage.decision, kind: isDenied(usage) ? "bad" : "good" },
      usageCell(usage.remaining, usage.capacity),
      usage.quota + unitText(usage.unit),
      { text: formatDuration(usage.reset_seconds), kind: "number" },
      { text: formatDuration(usage.retry_seconds), kind: "number" },
      overrideText(usage.override),
      { text: usage.identity, kind: "hash" },
    ],
    actions: hasToken && [
      { text: "Reset", label: `Reset ${usage.limit}`, run: () => showResult(() => reset(usage)) },
      { text: "Override", label: `Override the quota of ${usage.limit}`, run: () => showResult(() => setOverride(usage)) },
      ...(usage.override ? [{ text: "Remove override", label: `Remove the override of ${usage.limit}`, run: () => showResult(() => removeOverride(usage)) }] : []),
    ],
  })));
  find("#usage").hidden = false;
  return limits.map(({ limit, decision, remaining, capacity }) => `${limit}: ${decision}, ${remaining} of ${capacity} remaining`).join("; ");
}

const formIsFilled = () => find("#identity").value.trim() && !find("#usage").hidden;

async function reset({ limit, identity }) {
  const result = await confirmChange({
    title: `Reset the usage of ${limit}?`,
    text: `This restores the full quota of ${find("#identity").value.trim() || identity} on all gateways with this store. It cannot be undone.`,
    button: "Reset usage",
    run: async () => (await request("api/reset", { body: { limit, identity } })).json(),
  });
  if (!result) return null;
  await showUsage();
  const effective = `all gateways apply the change within ${formatDuration(result.effective_within_seconds)}`;
  return result.removed ? `Usage of ${limit} reset; ${effective}.` : `No usage of ${limit} to reset; ${effective}.`;
}

async function setOverride({ limit, identity, quota, algorithm }, name) {
  const result = await askOverride({
    title: `Override the quota of ${limit}${name ? ` for ${name}` : ""}`, quota, hasBurst: algorithm === "token-bucket",
    run: async (values) => (await request("api/overrides", { body: { limit, identity, ...values } })).json(),
  });
  if (!result) return null;
  await Promise.all([formIsFilled() && showUsage(), showOverrides()]);
  return `Override of ${limit} set: ${result.override.quota} for ${formatDuration(result.override.expires_in_seconds)}.`;
}

async function removeOverride({ limit, identity }) {
  const result = await confirmChange({
    title: `Remove the override of ${limit}?`,
    text: "The quota of the configuration applies again.",
    button: "Remove override",
    run: async () => (await request(`api/overrides?${new URLSearchParams({ limit, identity })}`, { method: "DELETE" })).json(),
  });
  if (!result) return null;
  await Promise.all([formIsFilled() && showUsage(), showOverrides()]);
  return result.removed ? `Override of ${limit} removed.` : `${limit} has no override for this identity.`;
}

/** Run an action and show its result or its error. */
async function showResult(action) {
  const result = find("#inspect-result");
  try {
    const text = await action();
    if (text == null) return;
    setText(result, text);
    result.className = "";
  } catch (error) {
    setText(result, error.message);
    result.className = "bad";
  }
}

/** Put a limit and an identity from another table into the form, and show the usage of the identity. */
export function inspect(limit, identity) {
  find("#limit").value = limit;
  find("#identity").value = identity;
  find("#inspect").scrollIntoView();
  find("#identity").focus({ preventScroll: true });
  return showResult(showUsage);
}

/** Return the parts of an identity as text. */
export const clientName = (parts) => Object.entries(parts).map(([part, value]) => `${part}=${value ?? "(hidden)"}`).join(" ");

/** Show the identities with the most denials, and their remaining quota. */
export async function showTopDenied() {
  const { limits } = await (await request("api/top")).json();
  const denied = limits.flatMap(({ limit, shadow, identities }) => identities.map((each) => ({ limit, shadow, ...each })));
  denied.sort((a, b) => b.denied_at_most - a.denied_at_most);
  const shown = denied.slice(0, SHOWN_DENIED);
  // If the store is unavailable, show the identities without their usage.
  // The gateway knows the tier of a client from the parts of its identity, not from the hash of several parts.
  const isKnown = (parts) => Object.values(parts).every((value) => value != null);
  const usages = await Promise.all(shown.map(({ limit, identity, parts }) =>
    getUsage(new URLSearchParams(isKnown(parts) ? { limit, ...parts } : { limit, identity }))
      .then(([usage]) => usage, () => null)));
  updateTable(find("#denied table"), shown.map((each, index) => {
    const { limit, shadow, identity, denied_at_least, denied_at_most } = each;
    const [client, usage] = [clientName(each.parts), usages[index]];
    return {
      key: `${limit} ${identity}`,
      cells: [
        client, limit + (shadow ? " (shadow)" : ""),
        denied_at_least === denied_at_most
          ? numberCell(denied_at_most)
          : { text: `${formatNumber(denied_at_least)} to ${formatNumber(denied_at_most)}`, kind: "number" },
        usage ? usageCell(usage.remaining, usage.capacity) : "–",
        { text: formatDuration(usage?.retry_seconds), kind: "number" },
      ],
      actions: [
        { text: "Inspect", label: `Inspect ${client} with ${limit}`, run: () => inspect(limit, identity) },
        ...(hasToken && usage ? [{
          text: "Override", label: `Override the quota of ${client} with ${limit}`,
          run: () => showResult(() => setOverride(usage, client)),
        }] : []),
      ],
    };
  }));
  find("#denied .wide").hidden = !shown.length;
  find("#no-denials").hidden = shown.length > 0;
  const hidden = denied.length - shown.length;
  find("#more-denied").hidden = !hidden;
  setText(find("#more-denied"), `${formatNumber(hidden)} more identities were denied less often: GET /api/top has them.`);
}

/** Show the active overrides. */
export async function showOverrides() {
  const { overrides, store_error: storeError } = await (await request("api/overrides")).json();
  updateTable(find("#overrides table"), overrides.map((override) => ({
    key: `${override.limit} ${override.identity}`,
    cells: [
      override.limit, { text: override.identity, kind: "hash" }, override.quota + (override.burst ? `, burst ${formatNumber(override.burst)}` : ""),
      { text: formatDuration(override.expires_in_seconds), kind: "number" }, override.note ?? "–",
    ],
    actions: [
      { text: "Inspect", label: `Inspect ${override.identity} with ${override.limit}`, run: () => inspect(override.limit, override.identity) },
      ...(hasToken ? [{
        text: "Remove", label: `Remove the override of ${override.limit} for ${override.identity}`,
        run: () => showResult(() => removeOverride(override)),
      }] : []),
    ],
  })));
  find("#overrides .wide").hidden = !overrides.length;
  find("#no-overrides").hidden = overrides.length > 0;
  setText(find("#overrides-error"), storeError ?? "");
}

export function initInspectForm() {
  find("#no-writes").hidden = hasToken;
  find("#inspect-form").addEventListener("submit", (event) => {
    event.preventDefault();
    find("#usage").hidden = true;
    showResult(showUsage);
  });
}
