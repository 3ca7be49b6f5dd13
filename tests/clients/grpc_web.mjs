// grpc-web through the gateway: the client of Connect for browsers, and a server of Connect for Node.
// Arguments: the URL of the gateway, its URL with TLS, and the CA certificate of the latter.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import http from "node:http";
import { create, createFileRegistry } from "@bufbuild/protobuf";
import { FileDescriptorProtoSchema, file_google_protobuf_wrappers } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { createGrpcWebTransport } from "@connectrpc/connect-web";

const TEXT = ".google.protobuf.StringValue";
const method = (name, serverStreaming) => ({ name, inputType: TEXT, outputType: TEXT, serverStreaming });
const wrappers = "google/protobuf/wrappers.proto";
const file = create(FileDescriptorProtoSchema, {
  name: "web.proto",
  package: "test",
  syntax: "proto3",
  dependency: [wrappers],
  service: ["Web", "LimitedWeb"].map((name) => ({
    name,
    method: [method("Unary", false), method("Stream", true)],
  })),
});
const registry = createFileRegistry(file, (name) => (name === wrappers ? file_google_protobuf_wrappers : undefined));

function serve() {
  const implementation = {
    unary(request, context) {
      if (request.value === "missing") throw new ConnectError("no such thing: 100 %", Code.NotFound);
      context.responseTrailer.set("x-trailer", "last");
      return { value: (context.requestHeader.get("x-more") ?? "") + request.value };
    },
    async *stream(request) {
      for (let number = 0; number < 100; number++) yield { value: `${request.value} ${number}` };
    },
  };
  const routes = (router) =>
    ["test.Web", "test.LimitedWeb"].forEach((name) => router.service(registry.getService(name), implementation));
  const server = http.createServer(connectNodeAdapter({ routes, connect: false, grpc: false, grpcWeb: true }));
  server.listen(0, "127.0.0.1", () => console.log(`127.0.0.1:${server.address().port}`));
}

async function failure(call) {
  try {
    await call();
  } catch (error) {
    return ConnectError.from(error);
  }
  throw new Error("the call succeeds");
}

async function check(url) {
  // Count the content types, so that a client which speaks another protocol does not pass.
  const types = new Set();
  const observed = async (input, init) => {
    const response = await fetch(input, init);
    types.add(response.headers.get("content-type"));
    return response;
  };
  const transport = createGrpcWebTransport({ baseUrl: url, useBinaryFormat: true, fetch: observed });
  const web = createClient(registry.getService("test.Web"), transport);
  let trailers;
  const options = { headers: { "x-more": "more-" }, onTrailer: (received) => (trailers = received) };
  assert.equal((await web.unary({ value: "hello" }, options)).value, "more-hello");
  assert.equal(trailers.get("x-trailer"), "last");
  const large = "ä".repeat(1 << 20);
  assert.equal((await web.unary({ value: large })).value, large, "2 MiB both ways");
  const values = [];
  for await (const { value } of web.stream({ value: "part" })) values.push(value);
  assert.deepEqual(values, Array.from({ length: 100 }, (_, number) => `part ${number}`));
  const missing = await failure(() => web.unary({ value: "missing" }));
  assert.deepEqual([missing.code, missing.rawMessage], [Code.NotFound, "no such thing: 100 %"]);
  assert.deepEqual([...types], ["application/grpc-web+proto"]);
}

async function checkLimit(url) {
  // The client takes the code from the status 429 (https://connectrpc.com/docs/protocol, HTTP to error code).
  const transport = createGrpcWebTransport({ baseUrl: url, useBinaryFormat: true });
  const limited = createClient(registry.getService("test.LimitedWeb"), transport);
  for (let call = 0; call < 3; call++) assert.equal((await limited.unary({ value: "x" })).value, "x");
  assert.equal((await failure(() => limited.unary({ value: "x" }))).code, Code.Unavailable);
}

const [first, tls, certificate] = process.argv.slice(2);
if (first === "serve") serve();
else if (first === "check") await check(tls);
else {
  await check(first);
  await checkLimit(first);
  // Node reads its CA certificates when it starts.
  const env = { ...process.env, NODE_EXTRA_CA_CERTS: certificate };
  execFileSync(process.execPath, [import.meta.filename, "check", tls], { env, stdio: ["ignore", "inherit", "inherit"] });
  console.log("grpc-web: unary, streams, trailers, errors and a denial, in clear text and over TLS");
}
