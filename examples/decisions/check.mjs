// Ask Sluicegate for a decision before a program serves a request: check.mjs URL TOKEN CLIENT_IP

const [endpoint, token, clientIp] = process.argv.slice(2);

/** Return the decision: `admitted`, and the `status`, `headers` and `body` of a denial. */
async function check(method, url, headers) {
  const response = await fetch(`${endpoint}/v1/check`, {
    method: "POST",
    headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
    body: JSON.stringify({ method, url, client_ip: clientIp, headers }),
    signal: AbortSignal.timeout(2000),
  });
  if (!response.ok) {
    throw new Error(`${response.status}: ${await response.text()}`);
  }
  return response.json();
}

const decision = await check("GET", "https://shop.example/orders", { "X-Api-Key": "demo-key" });
if (decision.admitted) {
  console.log("admitted", decision.headers["x-user"]);
} else {
  console.log("denied", decision.status, decision.headers["retry-after"]);
}
