// An MCP server with the TypeScript SDK: `agents_server.mjs PORT`. It counts the calls of its tool.
import { createServer } from "node:http";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import { z } from "zod";

let calls = 0;
function server() {
  const server = new McpServer({ name: "typescript", version: "1.0.0" });
  server.registerTool("search", { inputSchema: { text: z.string() } }, async ({ text }) => {
    calls += 1;
    return { content: [{ type: "text", text }] };
  });
  server.registerTool("count", { inputSchema: {} }, async () => ({ content: [{ type: "text", text: `${calls}` }] }));
  return server;
}

createServer(async (request, response) => {
  // Disable sessions, so that each request may take another gateway.
  const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined });
  response.on("close", () => transport.close());
  await server().connect(transport);
  await transport.handleRequest(request, response);
}).listen(Number(process.argv[2]), "127.0.0.1");
