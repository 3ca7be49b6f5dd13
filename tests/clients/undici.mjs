// undici: fetch, pipelining, HTTP/2, retries and WebSockets. Arguments: the plaintext address, the TLS address, the certificate.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { Agent, Client, RetryAgent, WebSocket, fetch } from "undici";

const [clear, tls, certificate] = process.argv.slice(2);
const connect = { ca: readFileSync(certificate) };
const { version } = createRequire(import.meta.url)("undici/package.json");

async function talk(url, dispatcher) {
  const ask = (path, options) => fetch(url + path, { dispatcher, ...options });
  let got = await (await ask("/echo?a=b%20c", { headers: { "x-a": "1" } })).json();
  assert.deepEqual([got.method, got.target, got.headers["x-a"]], ["GET", "/echo?a=b%20c", "1"]);
  got = await (await ask("/echo", { method: "POST", body: "x".repeat(1 << 20) })).json();
  assert.equal(got.length, 1 << 20);
  // A stream is sent without Content-Length.
  const body = new Blob(["y".repeat(100_000)]).stream();
  got = await (await ask("/echo", { method: "PUT", body, duplex: "half" })).json();
  assert.equal(got.length, 100_000);
  assert.equal((await (await ask("/large")).arrayBuffer()).byteLength, 4 << 20);
  assert.equal((await (await ask("/gzip")).json()).method, "GET");
  assert.equal(await (await ask("/events")).text(), "data: 0\n\ndata: 1\n\ndata: 2\n\n");
  const denied = await ask("/closed");
  assert.deepEqual([denied.status, (await denied.json()).status], [429, 429]);
  const statuses = await Promise.all(Array.from({ length: 50 }, async () => (await ask("/own")).status));
  assert.ok(statuses.every((status) => status === 200), `${statuses}`);
}

async function pipelined() {
  const client = new Client(clear, { pipelining: 10 });
  const targets = Array.from({ length: 100 }, (_, index) => `/echo?${index}`);
  const answers = await Promise.all(
    targets.map(async (path) => (await (await client.request({ path, method: "GET" })).body.json()).target),
  );
  assert.deepEqual(answers, targets);
  await client.close();
}

async function patient() {
  const agent = new RetryAgent(new Agent(), { statusCodes: [429], maxRetries: 1 });
  for (let round = 0; round < 2; round += 1) {
    const { statusCode, body } = await agent.request({ origin: clear, path: "/patient/undici", method: "GET" });
    await body.dump();
    assert.equal(statusCode, 200, `round ${round}`);
  }
  await agent.close();
}

function socket(url, dispatcher) {
  return new Promise((resolve, reject) => {
    const heard = [];
    const socket = new WebSocket(`${url.replace("http", "ws")}/socket`, { dispatcher });
    socket.binaryType = "arraybuffer";
    socket.onerror = ({ error }) => reject(error ?? new Error("no WebSocket"));
    socket.onmessage = ({ data }) => {
      heard.push(typeof data === "string" ? data : data.byteLength);
      if (heard.length === 1) socket.send("text");
      else if (heard.length === 2) socket.send(new Uint8Array(1 << 20));
      else socket.close(1000, "enough");
    };
    socket.onclose = ({ code, wasClean }) => {
      assert.deepEqual([heard, code, wasClean], [["hello", "text", 1 << 20], 1000, true]);
      resolve();
    };
  });
}

await talk(clear, new Agent());
await talk(tls, new Agent({ connect }));
const http2 = new Agent({ connect, allowH2: true });
await talk(tls, http2);
await pipelined();
await patient();
await socket(clear, new Agent());
await socket(tls, new Agent({ connect }));
console.log(`undici ${version} (Node ${process.versions.node}): fetch, HTTP/2, 10 requests in the pipe, RetryAgent, WebSocket`);
process.exit(0);
