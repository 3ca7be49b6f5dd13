// Requests to this gateway. The admin token is stored only for this browser tab, and is sent to no other host.

const TOKEN_KEY = "sluicegate-token";

/** Whether `admin.token` is configured. If so, requests need the token, and changes are possible. */
export const hasToken = document.body.dataset.token === "required";

export const token = () => sessionStorage.getItem(TOKEN_KEY);
export const storeToken = (value) => sessionStorage.setItem(TOKEN_KEY, value);
export const clearToken = () => sessionStorage.removeItem(TOKEN_KEY);

/** Whether a text can be a token: visible ASCII characters, as in a header value. */
export const isValidToken = (value) => /^[\x21-\x7e]+$/.test(value);

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/**
 * Send a request. The default method is POST if there is a `body`, otherwise GET. Throw an `ApiError` unless the status
 * is 2xx.
 */
export async function request(path, { body, signal, method = body ? "POST" : "GET" } = {}) {
  const headers = {};
  if (token()) headers.authorization = `Bearer ${token()}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method, headers, signal, body: body && JSON.stringify(body),
    credentials: "omit", redirect: "error", cache: "no-store",
  });
  if (response.ok) return response;
  const text = (await response.text()).trim();
  const isProblem = response.headers.get("content-type") === "application/problem+json";
  throw new ApiError(response.status, isProblem ? JSON.parse(text).detail : text);
}

/**
 * Read server-sent events until the stream ends, and call `onEvent(name, data)` for each. Abort after `timeoutMs`
 * without data.
 */
export async function subscribe(path, onEvent, timeoutMs = 10_000) {
  const abort = new AbortController();
  let timer;
  const restartTimer = () => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), timeoutMs);
  };
  try {
    restartTimer();
    const response = await request(path, { signal: abort.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      restartTimer();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(event);
        onEvent(name, JSON.parse(data));
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
