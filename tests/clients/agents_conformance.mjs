// The MCP server for the MCP conformance tests: `agents_conformance.mjs PORT`. It has sessions and sends requests to its clients.
import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { McpServer, ResourceTemplate } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import { CreateMessageResultSchema, ElicitResultSchema } from "@modelcontextprotocol/sdk/types.js";
import { z } from "zod";

const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
const text = (text) => ({ content: [{ type: "text", text }] });
const PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
const image = { type: "image", data: PIXEL, mimeType: "image/png" };
const embedded = (uri) => ({ type: "resource", resource: { uri, mimeType: "text/plain", text: "embedded" } });

function build() {
  const server = new McpServer(
    { name: "conformance", version: "1.0.0" },
    { capabilities: { logging: {}, resources: {}, tools: {}, prompts: {} } },
  );
  const tool = (name, handler, inputSchema) =>
    server.registerTool(name, { description: name, ...(inputSchema && { inputSchema }) }, (...given) =>
      inputSchema ? handler(...given) : handler({}, given[0]),
    );
  tool("test_simple_text", () => text("This is a simple text response for testing."));
  tool("test_image_content", () => ({ content: [image] }));
  tool("test_audio_content", () => ({ content: [{ type: "audio", data: "UklGRiQAAABXQVZF", mimeType: "audio/wav" }] }));
  tool("test_embedded_resource", () => ({ content: [embedded("test://embedded-resource")] }));
  tool("test_multiple_content_types", () => ({
    content: [{ type: "text", text: "Multiple content types test:" }, image, embedded("test://mixed-content-resource")],
  }));
  tool("test_error_handling", () => {
    throw new Error("This tool intentionally returns an error for testing");
  });
  tool("test_tool_with_logging", async (_, { sendNotification }) => {
    for (const data of ["Tool execution started", "Tool processing data", "Tool execution completed"]) {
      await sendNotification({ method: "notifications/message", params: { level: "info", data } });
      await pause();
    }
    return text("done");
  });
  tool("test_tool_with_progress", async (_, { sendNotification, _meta }) => {
    for (const progress of [0, 50, 100]) {
      const params = { progressToken: _meta?.progressToken, progress, total: 100 };
      await sendNotification({ method: "notifications/progress", params });
      await pause();
    }
    return text("done");
  });
  const sample = async ({ prompt }, { sendRequest }) => {
    const messages = [{ role: "user", content: { type: "text", text: prompt } }];
    const request = { method: "sampling/createMessage", params: { messages, maxTokens: 100 } };
    return text(`LLM response: ${(await sendRequest(request, CreateMessageResultSchema)).content.text}`);
  };
  tool("test_sampling", sample, { prompt: z.string() });
  const elicit = async (message, properties, required, { sendRequest }) => {
    const params = { message, requestedSchema: { type: "object", properties, required } };
    const result = await sendRequest({ method: "elicitation/create", params }, ElicitResultSchema);
    return text(`Elicitation completed: action=${result.action}, content=${JSON.stringify(result.content)}`);
  };
  const string = { type: "string" };
  tool(
    "test_elicitation",
    ({ message }, extra) => elicit(message, { username: string, email: string }, ["username", "email"], extra),
    { message: z.string() },
  );
  const defaults = {
    name: { type: "string", default: "John Doe" },
    age: { type: "integer", default: 30 },
    score: { type: "number", default: 95.5 },
    status: { type: "string", enum: ["active", "inactive", "pending"], default: "active" },
    verified: { type: "boolean", default: true },
  };
  tool("test_elicitation_sep1034_defaults", (_, extra) => elicit("defaults", defaults, [], extra));

  const plain = { mimeType: "text/plain" };
  server.registerResource("text", "test://static-text", plain, (uri) => ({
    contents: [{ uri: uri.href, ...plain, text: "This is the content of the static text resource." }],
  }));
  server.registerResource("binary", "test://static-binary", { mimeType: "image/png" }, (uri) => ({
    contents: [{ uri: uri.href, mimeType: "image/png", blob: PIXEL }],
  }));
  const template = new ResourceTemplate("test://template/{id}/data", { list: undefined });
  server.registerResource("template", template, { mimeType: "application/json" }, (uri, { id }) => ({
    contents: [{ uri: uri.href, mimeType: "application/json", text: JSON.stringify({ id }) }],
  }));
  const prompt = (...content) => ({ messages: content.map((content) => ({ role: "user", content })) });
  const line = (text) => ({ type: "text", text });
  server.registerPrompt("test_simple_prompt", {}, () => prompt(line("This is a simple prompt for testing.")));
  const argsSchema = { arg1: z.string(), arg2: z.string() };
  server.registerPrompt("test_prompt_with_arguments", { argsSchema }, ({ arg1, arg2 }) =>
    prompt(line(`Prompt with arguments: arg1='${arg1}', arg2='${arg2}'`)),
  );
  const uriSchema = { resourceUri: z.string() };
  server.registerPrompt("test_prompt_with_embedded_resource", { argsSchema: uriSchema }, ({ resourceUri }) =>
    prompt(embedded(resourceUri), line("Please process the embedded resource above.")),
  );
  server.registerPrompt("test_prompt_with_image", {}, () => prompt(image, line("Please analyze the image above.")));
  return server;
}

const sessions = new Map();
createServer(async (request, response) => {
  let transport = sessions.get(request.headers["mcp-session-id"]);
  if (!transport) {
    transport = new StreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      onsessioninitialized: (id) => sessions.set(id, transport),
    });
    await build().connect(transport);
  }
  await transport.handleRequest(request, response);
}).listen(Number(process.argv[2]), "127.0.0.1");
