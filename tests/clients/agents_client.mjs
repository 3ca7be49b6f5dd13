// A client with the TypeScript SDK: `agents_client.mjs CALLS URL …`. Prints the numbers of results and denials, and the result of `count`.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const [calls, ...urls] = process.argv.slice(2);
const clients = [];
for (const url of urls) {
  const client = new Client({ name: "client", version: "1.0.0" });
  await client.connect(new StreamableHTTPClientTransport(new URL(url)));
  clients.push(client);
}
const results = { admitted: 0, denied: 0, errors: [] };
await Promise.all(
  Array.from({ length: Number(calls) }, async (_, index) => {
    try {
      const called = { name: "search", arguments: { text: `${index}` } };
      const result = await clients[index % clients.length].callTool(called);
      if (result.content[0].text !== `${index}`) throw new Error(`another text: ${JSON.stringify(result)}`);
      results.admitted += 1;
    } catch (error) {
      const message = String(error);
      if (message.includes("429") && message.includes("try again in")) results.denied += 1;
      else results.errors.push(message);
    }
  }),
);
results.count = Number((await clients[0].callTool({ name: "count", arguments: {} })).content[0].text);
console.log(JSON.stringify(results));
await Promise.all(clients.map((client) => client.close()));
