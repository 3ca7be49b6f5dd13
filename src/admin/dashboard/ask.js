// Requests to this gateway. Its token is kept in this tab only, and sent to nobody else.

const KEY = "sluicegate-token";

/** Whether the gateway has a token: then it is asked for, and then only something can be changed. */
export const wantsToken = document.body.dataset.token === "wanted";

export const token = () => sessionStorage.getItem(KEY);
export const keep = (value) => sessionStorage.setItem(KEY, value);
export const forget = () => sessionStorage.removeItem(KEY);

/** What a field value can carry; no token is anything else. */
export const canBeSent = (value) => /^[\x21-\x7e]+$/.test(value);

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (token()) headers.authorization = `Bearer ${token()}`;
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method: body ? "POST" : "GET",
    headers, signal, body: body && JSON.stringify(body),
    credentials: "omit", redirect: "error", cache: "no-store",
  });
  if (answer.ok) return answer;
  const said = (await answer.text()).trim();
  const isProblem = answer.headers.get("content-type") === "application/problem+json";
  throw new Refused(answer.status, isProblem ? JSON.parse(said).detail : said);
}

/** Follows the events of a path until they end: `take(name, data)`. Silence for too long counts as an end. */
export async function follow(path, take, silence = 10_000) {
  const abort = new AbortController();
  let timer;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), silence);
  };
  try {
    wait();
    const answer = await ask(path, { signal: abort.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      wait();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(event);
        take(name, JSON.parse(data));
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
