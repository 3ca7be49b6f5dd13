// Where an identity stands with each limit, and how it starts afresh.

import { ask, wantsToken } from "./ask.js";
import { at, fill, number, wait, write } from "./dom.js";

const HASH = /^[0-9a-f]{32}$/i;

/** What an operator wrote, as a query: a hash, or parts whose values may have spaces. */
function query(limit, text) {
  const asked = new URLSearchParams(limit ? { limit } : {});
  if (HASH.test(text)) {
    asked.set("identity", text);
    return asked;
  }
  for (const part of text.split(/\s+(?=[^\s=]+=)/)) {
    const [, word, value] = /^([^\s=]+)=(.*)$/s.exec(part) ?? [];
    if (!word) throw new Error("an identity is written as PART=VALUE, or as a hash of 32 digits");
    asked.set(word, value);
  }
  return asked;
}

async function look() {
  const asked = query(at("#limit").value, at("#identity").value.trim());
  const { limits: standings } = await (await ask(`api/identities?${asked}`)).json();
  fill(at("#standings table"), standings.map((each) => ({
    key: `${each.limit} ${each.identity}`,
    cells: [
      each.limit + (each.shadow ? " (shadow)" : ""),
      { text: each.decision, kind: each.decision === "denied" || each.decision === "cost_too_large" ? "bad" : "good" },
      { text: `${each.remaining} of ${each.capacity}`, kind: "number" },
      each.quota,
      { text: wait(each.reset_seconds), kind: "number" },
      { text: wait(each.retry_seconds), kind: "number" },
      each.override ? `for ${wait(each.override.expires_in_seconds)}${each.override.note ? `: ${each.override.note}` : ""}` : "–",
      { text: each.identity, kind: "hash" },
    ],
    act: wantsToken && {
      text: "Reset", label: `Reset ${each.limit}`,
      run: () => attempt(() => reset(each)),
    },
  })));
  at("#standings").hidden = false;
  return standings.map((each) => `${each.limit}: ${each.decision}, ${each.remaining} of ${each.capacity} left`).join("; ");
}

async function reset({ limit, identity }) {
  const said = await (await ask("api/reset", { body: { limit, identity } })).json();
  await look();
  const known = `all gateways know within ${wait(said.effective_within_seconds)}`;
  return said.removed ? `It starts afresh with ${limit}; ${known}.` : `Nothing was counted with ${limit}; ${known}.`;
}

/** Says what came of it, good or bad. */
async function attempt(action) {
  const said = at("#inspected");
  try {
    write(said, await action());
    said.className = "";
  } catch (error) {
    write(said, error.message);
    said.className = "bad";
  }
}

/** Looks at an identity that stands elsewhere on the page. */
export function inspect(limit, identity) {
  at("#limit").value = limit;
  at("#identity").value = identity;
  at("#inspect").scrollIntoView();
  at("#identity").focus({ preventScroll: true });
  return attempt(look);
}

export function start() {
  at("#no-writes").hidden = wantsToken;
  at("#inspect-form").addEventListener("submit", (event) => {
    event.preventDefault();
    at("#standings").hidden = true;
    attempt(look);
  });
}
