// Node's http module: reports each request as an application sees it. `node.cjs FOLDER lenient|strict PORT …`
const fs = require("fs");
const http = require("http");

const [folder, parser, ...ports] = process.argv.slice(2);
const hex = (value) => (value === undefined ? null : Buffer.from(value, "latin1").toString("hex"));

// Decode the path as Express and most routers do.
function path(target) {
  const raw = target.split("?")[0];
  try {
    return Buffer.from(decodeURIComponent(raw), "utf8").toString("hex");
  } catch {
    return hex(raw);
  }
}

function cookie(line) {
  for (const pair of (line ?? "").split(";")) {
    const at = pair.indexOf("=");
    if (at >= 0 && pair.slice(0, at).trim() === "sid") return pair.slice(at + 1).trim();
  }
}

for (const port of ports) {
  const options = { insecureHTTPParser: parser === "lenient", requireHostHeader: parser !== "lenient", keepAliveTimeout: 75_000 };
  http
    .createServer(options, (request, response) => {
      let length = 0;
      request.on("data", (piece) => (length += piece.length));
      request.on("error", () => {});
      request.on("close", () => {
        const { headers } = request;
        const seen = {
          case: headers["x-case"] ?? null,
          id: headers["x-request-id"] ?? null,
          method: request.method,
          path: path(request.url),
          target: request.url,
          host: headers.host ?? null,
          key: hex(headers["x-api-key"]),
          tenant: hex(headers["x-tenant"]),
          sid: hex(cookie(headers.cookie)),
          routed: headers["x-routed"] ?? null,
          headers: request.rawHeaders,
          length,
          complete: request.complete,
        };
        fs.appendFileSync(`${folder}/${port}.log`, JSON.stringify(seen) + "\n");
        if (request.complete) response.setHeader("content-type", "application/json").end(JSON.stringify({ case: seen.case, path: seen.path, length }));
      });
    })
    .listen(+port, "127.0.0.1");
}
