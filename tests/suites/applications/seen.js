// nginx with njs: writes each request to the access log, as nginx's variables show it.
function bytes(request, name) {
    const value = request.rawVariables[name];
    return value === undefined || value.length === 0 && !present(request, name) ? null : value.toString("hex");
}

function present(request, name) {
    if (!name.startsWith("http_")) return false;
    return request.rawHeadersIn.some((line) => line[0].toLowerCase().replace(/-/g, "_") === name.slice(5));
}

function echo(request) {
    const variables = request.variables;
    const id = variables.http_x_case === undefined ? null : variables.http_x_case;
    const length = (request.requestBuffer || "").length;
    const path = bytes(request, "uri");
    variables.seen = JSON.stringify({
        case: id,
        id: variables.http_x_request_id || null,
        method: request.method,
        path,
        target: variables.request_uri,
        host: variables.http_host === undefined ? null : variables.host,
        key: bytes(request, "http_x_api_key"),
        tenant: bytes(request, "http_x_tenant"),
        sid: bytes(request, "cookie_sid"),
        routed: variables.http_x_routed || null,
        headers: request.rawHeadersIn,
        length,
        complete: true,
    });
    request.headersOut["content-type"] = "application/json";
    request.return(200, JSON.stringify({ case: id, path, length }));
}

export default { echo };
