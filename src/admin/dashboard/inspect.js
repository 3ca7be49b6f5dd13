// Inspect form: show and reset the usage of an identity.

import { hasToken, request } from "./api.js";
import { find, formatDuration, setText, updateTable } from "./dom.js";

const HASH = /^[0-9a-f]{32}$/i;

/** Parse the identity field into query parameters: a hash, or PART=VALUE pairs whose values may contain spaces. */
function parseIdentity(limit, text) {
  const parameters = new URLSearchParams(limit ? { limit } : {});
  if (HASH.test(text)) {
    parameters.set("identity", text);
    return parameters;
  }
  for (const pair of text.split(/\s+(?=[^\s=]+=)/)) {
    const [, part, value] = /^([^\s=]+)=(.*)$/s.exec(pair) ?? [];
    if (!part) throw new Error("write the identity as PART=VALUE, or as a hash of 32 hexadecimal digits");
    parameters.set(part, value);
  }
  return parameters;
}

function overrideText(override) {
  if (!override) return "–";
  return `for ${formatDuration(override.expires_in_seconds)}${override.note ? `: ${override.note}` : ""}`;
}

/** Show the usage of the identity in the form. Return a summary. */
async function showUsage() {
  const parameters = parseIdentity(find("#limit").value, find("#identity").value.trim());
  const { limits } = await (await request(`api/identities?${parameters}`)).json();
  updateTable(find("#usage table"), limits.map((usage) => ({
    key: `${usage.limit} ${usage.identity}`,
    cells: [
      usage.limit + (usage.shadow ? " (shadow)" : ""),
      { text: usage.decision, kind: usage.decision === "denied" || usage.decision === "cost_too_large" ? "bad" : "good" },
      { text: `${usage.remaining} of ${usage.capacity}`, kind: "number" },
      usage.quota,
      { text: formatDuration(usage.reset_seconds), kind: "number" },
      { text: formatDuration(usage.retry_seconds), kind: "number" },
      overrideText(usage.override),
      { text: usage.identity, kind: "hash" },
    ],
    action: hasToken && {
      text: "Reset", label: `Reset ${usage.limit}`,
      run: () => showResult(() => reset(usage)),
    },
  })));
  find("#usage").hidden = false;
  return limits.map(({ limit, decision, remaining, capacity }) => `${limit}: ${decision}, ${remaining} of ${capacity} remaining`).join("; ");
}

async function reset({ limit, identity }) {
  const { removed, effective_within_seconds } = await (await request("api/reset", { body: { limit, identity } })).json();
  await showUsage();
  const effective = `effective on all gateways within ${formatDuration(effective_within_seconds)}`;
  return removed ? `Usage of ${limit} reset; ${effective}.` : `No usage of ${limit} to reset; ${effective}.`;
}

/** Run an action and show its result or its error. */
async function showResult(action) {
  const result = find("#inspect-result");
  try {
    setText(result, await action());
    result.className = "";
  } catch (error) {
    setText(result, error.message);
    result.className = "bad";
  }
}

/** Inspect an identity of another table. */
export function inspect(limit, identity) {
  find("#limit").value = limit;
  find("#identity").value = identity;
  find("#inspect").scrollIntoView();
  find("#identity").focus({ preventScroll: true });
  return showResult(showUsage);
}

export function initInspectForm() {
  find("#no-writes").hidden = hasToken;
  find("#inspect-form").addEventListener("submit", (event) => {
    event.preventDefault();
    find("#usage").hidden = true;
    showResult(showUsage);
  });
}
