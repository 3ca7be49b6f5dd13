//! Limits by MCP tool and method and by JSON-RPC method: headers that must match the body, batches, costs per tool, and
//! errors in JSON-RPC form.

use serde_json::{Value, json};

use crate::support::client::Reply;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::upstream::Upstream;

const VERSION: (&str, &str) = ("mcp-protocol-version", "2026-07-28");

/// Return a configuration with a limit of `quota` calls per hour in front of an MCP server.
fn config(store: &str, server: &Upstream, by: &str, quota: u64, limit: &str) -> String {
    format!(
        "{store}[limit.calls]\nby = {by}\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\n\
         quota = \"{quota}/hour\"\n{limit}\n[upstream.server]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"mcp\"\npath = \"/mcp\"\nlimits = [\"calls\"]\nupstream = \"server\"\n",
        server.url()
    )
}

fn post(gateway: &Gateway, headers: &[(&str, &str)], body: &Value) -> Reply {
    gateway.client().request("POST", "/mcp", headers, body.to_string().as_bytes())
}

/// A tool call as sent by clients of protocol revisions earlier than 2026-07-28.
fn call(id: u64, tool: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": tool, "arguments": {}}})
}

/// A tool call in protocol revision 2026-07-28.
fn new_call(tool: &str) -> Value {
    let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28"});
    json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": {}, "_meta": meta}})
}

/// Assert that the response is a JSON-RPC error with this status, code and id. Return its message.
fn rpc_error(reply: &Reply, status: u16, code: i64, id: &Value) -> String {
    assert_eq!((reply.status, reply.header("content-type")), (status, Some("application/json")), "{}", reply.text());
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    let body = reply.json();
    assert_eq!((&body["jsonrpc"], &body["id"], &body["error"]["code"]), (&json!("2.0"), id, &json!(code)), "{body}");
    assert_eq!(body["error"]["data"]["status"], status, "`data` is the problem document");
    body["error"]["message"].as_str().unwrap().to_owned()
}

#[test]
fn each_tool_has_its_own_quota() {
    let server = Upstream::start();
    let gateway = Gateway::start(&config("", &server, "\"mcp:tool\"", 2, ""));
    for tool in ["search", "sql"] {
        let statuses: Vec<_> = (0..3).map(|id| post(&gateway, &[], &call(id, tool)).status).collect();
        assert_eq!(statuses, [200, 200, 429], "{tool}");
    }
    let escaped = br#"{"jsonrpc":"2.0","id":1,"m\u0065thod":"tools\/call","params":{"n\u0061me":"\u0073earch"}}"#;
    assert_eq!(gateway.client().request("POST", "/mcp", &[], escaped).status, 429);
    // MCP sessions continue although the limit is used up, because these requests call no tool.
    for _ in 0..5 {
        for (method, body) in [
            ("POST", json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}).to_string()),
            ("POST", json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"}).to_string()),
            ("POST", json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string()),
            ("POST", json!({"jsonrpc": "2.0", "id": 3, "result": {}}).to_string()),
            ("GET", String::new()),
            ("DELETE", String::new()),
        ] {
            let reply = gateway.client().request(method, "/mcp", &[], body.as_bytes());
            assert_eq!((reply.status, reply.header("ratelimit")), (200, None), "{method} {body}");
        }
    }
}

#[test]
fn denial_is_a_json_rpc_error_with_the_id_of_the_request() {
    let server = Upstream::start();
    let gateway = Gateway::start(&config("", &server, "\"mcp:method\"", 1, ""));
    assert_eq!(post(&gateway, &[], &call(1, "search")).status, 200);
    for (id, expected) in [
        (json!(7), json!(7)),
        (json!("a\"b"), json!("a\"b")),
        (json!(u64::MAX), json!(u64::MAX)),
        (Value::Null, Value::Null),
        (json!(1.5), Value::Null),
        (json!("9".repeat(2000)), Value::Null),
    ] {
        let mut body = call(1, "search");
        body["id"] = id;
        let reply = post(&gateway, &[], &body);
        let message = rpc_error(&reply, 429, 429, &expected);
        assert!(message.starts_with("try again in "), "{message}");
        assert!(reply.header("retry-after").unwrap().parse::<u64>().unwrap() > 3500);
        assert_eq!(reply.header("ratelimit").unwrap().split(';').next(), Some("\"calls\""));
        assert_eq!(reply.json()["error"]["data"]["violated-policies"], json!(["calls"]));
    }
    let reply = post(&gateway, &[], &json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}));
    assert_eq!(reply.status, 200, "the request calls another method");
    let reply = gateway.client().request("POST", "/mcp", &[], b"{");
    rpc_error(&reply, 400, -32700, &Value::Null);
}

#[test]
fn errors_of_the_upstream_and_of_the_store_are_json_rpc_errors() {
    let server = Upstream::responding(|_| b"broken".to_vec());
    let gateway = Gateway::start(&config("", &server, "\"mcp:tool\"", 9, ""));
    rpc_error(&post(&gateway, &[], &call(7, "a")), 502, 502, &json!(7));
    let store = "[store]\nurl = \"redis://127.0.0.1:1\"\ntimeout = \"50ms\"\n";
    let gateway = Gateway::start(&config(store, &server, "\"mcp:tool\"", 9, "on_store_error = \"deny\""));
    rpc_error(&post(&gateway, &[], &call(8, "a")), 503, 503, &json!(8));
}

#[test]
fn headers_that_do_not_match_the_body_are_refused() {
    let server = Upstream::start();
    let gateway = Gateway::start(&config("", &server, "\"mcp:tool\"", 100, ""));
    let (method, name) = (("mcp-method", "tools/call"), ("mcp-name", "search"));
    let reply = post(&gateway, &[VERSION, method, name], &new_call("search"));
    assert_eq!((reply.status, reply.remaining("calls")), (200, 99), "{}", reply.text());
    assert_eq!(
        post(&gateway, &[VERSION, method, ("mcp-name", "=?base64?c2VhcmNo?=")], &new_call("search")).status,
        200
    );
    let before = server.count();
    for (headers, body) in [
        (vec![VERSION, method, ("mcp-name", "cheap")], new_call("search")),
        (vec![VERSION, ("mcp-method", "tools/list"), name], new_call("search")),
        (vec![VERSION, method], new_call("search")),
        (vec![VERSION, name], new_call("search")),
        (vec![VERSION, method, name, name], new_call("search")),
        (vec![VERSION, method, ("mcp-name", "cheap"), name], new_call("search")),
        (vec![VERSION, method, ("mcp-name", "s\u{e4}")], new_call("s\u{e4}")),
        (vec![("mcp-protocol-version", "2025-06-18"), method, name], new_call("search")),
        (vec![method, name], new_call("search")),
        // MCP headers must match the body even in protocol revisions that do not define these headers, because another
        // server may trust them.
        (vec![method, ("mcp-name", "cheap")], call(1, "search")),
        (vec![VERSION], json!([call(1, "search")])),
    ] {
        let id = if body.is_array() { Value::Null } else { json!(1) };
        let message = rpc_error(&post(&gateway, &headers, &body), 400, -32020, &id);
        assert!(message.starts_with("Header mismatch: "), "{message}");
    }
    assert_eq!(server.count(), before, "no rejected request reaches the server");
    assert_eq!(post(&gateway, &[], &call(1, "search")).remaining("calls"), 97, "rejected requests are not charged");
}

#[test]
fn method_of_json_rpc_needs_no_headers() {
    let server = Upstream::start();
    let gateway = Gateway::start(&config("", &server, "\"jsonrpc:method\"", 2, ""));
    let send = |method: &str| {
        let body = json!({"jsonrpc": "2.0", "id": "x", "method": method, "params": {"message": {}}});
        post(&gateway, &[("mcp-method", "other")], &body).status
    };
    assert_eq!([send("message/send"), send("message/send"), send("message/send")], [200, 200, 429]);
    assert_eq!(send("tasks/get"), 200);
}

#[test]
fn every_message_of_a_batch_is_counted() {
    let server = Upstream::start();
    let gateway = Gateway::start(&config("", &server, "\"mcp:tool\"", 2000, ""));
    let batch = |messages: Vec<Value>| post(&gateway, &[], &Value::from(messages));
    let reply = batch((0..1000).map(|id| call(id, "search")).collect());
    assert_eq!((reply.status, reply.remaining("calls")), (200, 1000));
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    let reply = batch(vec![call(1, "search"), list.clone(), call(2, "search")]);
    assert_eq!(
        (reply.status, reply.remaining("calls")),
        (200, 998),
        "`tools/list` is charged as a request that calls no tool"
    );
    rpc_error(&batch((0..999).map(|id| call(id, "search")).collect()), 429, 429, &Value::Null);
    let reply = batch(vec![call(1, "search"), call(2, "sql")]);
    assert!(rpc_error(&reply, 400, 400, &Value::Null).contains("different values of the MCP tool"), "{}", reply.text());
    rpc_error(&batch((0..1001).map(|id| call(id, "search")).collect()), 400, -32600, &Value::Null);
    rpc_error(&batch(Vec::new()), 400, -32600, &Value::Null);
    rpc_error(&batch(vec![json!([call(1, "search")])]), 400, -32600, &Value::Null);
    assert_eq!(batch(vec![list]).status, 200, "the batch contains no call");
    let last = batch(vec![call(1, "search")]);
    assert_eq!(last.remaining("calls"), 997, "rejected batches are not charged");
}

#[test]
fn tools_have_costs() {
    let server = Upstream::start();
    let cost = "cost = { tools = { search = 5, \"sql_*\" = 20, sql_ping = 0 }, default = 1 }";
    let gateway = Gateway::start(&config("", &server, "\"header:x-agent\"", 100, cost));
    let agent = ("x-agent", "a");
    let mut expected = 100;
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    for (body, cost) in [
        (call(1, "search"), 5),
        (call(1, "sql_query"), 20),
        (call(1, "sql_ping"), 0),
        (call(1, "other"), 1),
        (list.clone(), 1),
        (json!([call(1, "search"), call(2, "sql_query"), list]), 26),
        (json!({"jsonrpc": "2.0", "method": "search"}), 1),
    ] {
        let reply = post(&gateway, &[agent], &body);
        expected -= cost;
        assert_eq!((reply.status, reply.remaining("calls")), (200, expected), "{body}");
    }
    // A request without a body has the default cost.
    let reply = gateway.client().request("GET", "/mcp", &[agent], b"");
    assert_eq!(reply.remaining("calls"), expected - 1);
    assert_eq!(
        post(&gateway, &[agent, ("mcp-name", "sql_ping")], &call(1, "sql_query")).status,
        400,
        "the header names another tool than the body"
    );
    let reply = post(&gateway, &[agent], &json!([call(1, "sql_a"), call(2, "sql_b"), call(3, "sql_c")]));
    rpc_error(&reply, 429, 429, &Value::Null);
}

#[test]
fn hostile_messages_are_refused() {
    let server = Upstream::start();
    let config =
        config("", &server, "\"mcp:tool\"", 100, "").replacen("[limit", "[server]\ninspect_body = \"4KiB\"\n[limit", 1);
    let gateway = Gateway::start(&config);
    let deep = format!(
        r#"{{"id":1,"method":"tools/call","params":{{"name":"a","arguments":{}{}}}}}"#,
        "[".repeat(200),
        "]".repeat(200)
    );
    let padded = |length: usize| {
        let text = r#"{"id":1,"method":"tools/call","params":{"name":"a","p":""}}"#;
        text.replace("\"p\":\"", &format!("\"p\":\"{}", "x".repeat(length - text.len())))
    };
    for (body, status, code) in [
        (r#"{"id":1,"method":"tools/list","method":"tools/call","params":{"name":"a"}}"#.to_owned(), 400, -32600),
        (r#"{"id":1,"method":"tools/call","params":{"name":"a","name":"b"}}"#.to_owned(), 400, -32602),
        (r#"{"id":1,"method":"tools/call","params":{"name":"a","Name":"b"}}"#.to_owned(), 400, -32602),
        (r#"{"id":1,"Method":"tools/call","params":{"name":"a"}}"#.to_owned(), 400, -32600),
        (r#"{"id":1,"method":"tools/call","params":{"name":7}}"#.to_owned(), 400, -32602),
        (r#"{"id":1,"method":"tools/call","params":{}}"#.to_owned(), 400, -32602),
        (r#"{"id":1,"method":["tools/call"]}"#.to_owned(), 400, -32600),
        ("\"tools/call\"".to_owned(), 400, -32600),
        (deep, 400, -32700),
        (padded(4097), 413, 413),
    ] {
        let reply = gateway.client().request("POST", "/mcp", &[], body.as_bytes());
        rpc_error(&reply, status, code, &Value::Null);
    }
    let reply = gateway.client().request("POST", "/mcp", &[("content-encoding", "gzip")], b"x");
    rpc_error(&reply, 400, 400, &Value::Null);
    assert_eq!(server.count(), 0);
    assert_eq!(gateway.client().request("POST", "/mcp", &[], padded(4096).as_bytes()).status, 200);
}

#[test]
fn two_gateways_admit_the_exact_number_of_calls() {
    let redis = Redis::start();
    let server = Upstream::start();
    let config = config(&redis.store(), &server, "[\"header:x-agent\", \"mcp:tool\"]", 50, "");
    let gateways = [Gateway::start(&config), Gateway::start(&config)];
    let send = |worker: usize| {
        let calls =
            (0..20).map(|id| post(&gateways[(worker + id) % 2], &[("x-agent", "a")], &call(id as u64, "search")));
        calls.filter(|reply| reply.status == 200).count()
    };
    let admitted: usize = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..8).map(|worker| scope.spawn(move || send(worker))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!((admitted, server.count()), (50, 50));
}

#[test]
fn request_without_a_credential_is_not_read() {
    let server = Upstream::start();
    let config = config("", &server, "\"mcp:tool\"", 50, "").replace("limits = ", "require = [\"keys\"]\nlimits = ")
        + "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n";
    let gateway = Gateway::start_with(&config, &[("consumers.toml", "[[consumer]]\nname = \"a\"\nkeys = []\n")]);
    let mut client = gateway.client();
    client.send(b"POST /mcp HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 17\r\n\r\n");
    let reply = client.reply().unwrap();
    reply.assert_problem(401, "a problem document, since the id is not known");
    assert!(reply.header("www-authenticate").is_some());
}

#[test]
fn only_the_message_may_be_missing() {
    let server = Upstream::start();
    let gateway = Gateway::start(&config("", &server, "[\"header:x-agent\", \"mcp:tool\"]", 50, ""));
    rpc_error(&post(&gateway, &[], &call(1, "search")), 400, 400, &json!(1));
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    assert_eq!(post(&gateway, &[], &list).status, 200);
    for (on_missing, expected) in [("skip", 200), ("reject", 400)] {
        let limit = format!("on_missing = \"{on_missing}\"");
        let gateway = Gateway::start(&config("", &server, "[\"header:x-agent\", \"mcp:tool\"]", 50, &limit));
        assert_eq!(post(&gateway, &[], &call(1, "search")).status, expected, "{on_missing}");
        assert_eq!(post(&gateway, &[("x-agent", "a")], &list).status, expected, "{on_missing}");
    }
}

#[test]
fn streams_of_events_pass_through() {
    const EVENTS: &str = "event: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n";
    let server = Upstream::responding(|_| {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nMcp-Session-Id: s\r\nContent-Length: ";
        format!("{head}{}\r\n\r\n{EVENTS}", EVENTS.len()).into_bytes()
    });
    let gateway = Gateway::start(&config("", &server, "\"mcp:method\"", 9, ""));
    let reply = post(&gateway, &[VERSION, ("mcp-method", "tools/call"), ("mcp-name", "a")], &new_call("a"));
    assert_eq!((reply.text(), reply.header("mcp-session-id")), (EVENTS, Some("s")));
    let seen = server.last();
    assert_eq!((seen.headers("mcp-name"), seen.headers("mcp-method")), (vec!["a"], vec!["tools/call"]));
}

/// A server of MCP that lists four tools: as JSON, as an event stream, and in a batch.
fn tool_server() -> Upstream {
    Upstream::responding(|seen| {
        let tools: Vec<_> = ["get_user", "get_secret", "set_user", "search"].map(|name| json!({"name": name})).into();
        let list = json!({"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}});
        let body = String::from_utf8_lossy(&seen.body).into_owned();
        let (kind, text) = match () {
            () if seen.headers("accept") == ["text/event-stream"] => {
                ("text/event-stream", format!("event: message\ndata: {list}\n\ndata: {{\"id\":2}}\n\n"))
            }
            () if body.starts_with('[') => ("application/json", json!([list, {"id": 2, "result": {}}]).to_string()),
            () => ("application/json", list.to_string()),
        };
        let coding = if body.contains("compress") { "Content-Encoding: gzip\r\n" } else { "" };
        let length = text.len();
        format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{coding}Content-Length: {length}\r\n\r\n{text}")
            .into_bytes()
    })
}

/// The rules of the route and of the consumer hold for calls, for batches, and for lists of tools.
#[test]
fn tools_that_are_not_permitted_are_neither_called_nor_listed() {
    let server = tool_server();
    let config = format!(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"c.toml\"\n[upstream.server]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"mcp\"\npath = \"/mcp\"\nupstream = \"server\"\nrequire = [\"keys\"]\n\
         mcp_tools = {{ deny = [\"get_secret\"] }}\n\
         [limit.user]\nby = \"form:user\"\nquota = \"1000/day\"\non_missing = \"skip\"\n\
         [[route]]\nname = \"form\"\npath = \"/form\"\nupstream = \"server\"\nrequire = [\"keys\"]\n\
         limits = [\"user\"]\nmcp_tools = {{ deny = [\"get_secret\"] }}\n\
         [[route]]\nname = \"open\"\npath = \"/open\"\nupstream = \"server\"\nrequire = [\"keys\"]\n",
        server.url()
    );
    let consumer = |name: &str, more: &str| {
        let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, name.as_bytes());
        let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[consumer]]\nname = \"{name}\"\n{more}\nkeys = [\"sha256:{hash}\"]\n")
    };
    let consumers = consumer("all", "") + &consumer("reader", "mcp_tools = { allow = [\"get_*\", \"search\"] }");
    let gateway = Gateway::start_with(&config, &[("c.toml", &consumers)]);
    let ask = |path: &str, name: &str, headers: &[(&str, &str)], body: &str| {
        let headers = [&[("x-api-key", name)], headers].concat();
        gateway.client().request("POST", path, &headers, body.as_bytes())
    };
    for (name, tool, status) in [
        ("all", "set_user", 200),
        ("all", "get_secret", 403),
        ("reader", "get_user", 200),
        ("reader", "search", 200),
        ("reader", "set_user", 403),
        ("reader", "get_secret", 403),
    ] {
        let (single, forwarded) = (call(7, tool), server.seen.lock().unwrap().len());
        let reply = ask("/mcp", name, &[], &single.to_string());
        assert_eq!(reply.status, status, "{name} {tool}: {}", reply.text());
        let escaped = single.to_string().replace('_', "\\u005f").replace("method", "m\\u0065thod");
        assert_eq!(ask("/mcp", name, &[], &escaped).status, status, "{escaped}");
        let batch = json!([call(1, "get_user"), single]).to_string();
        let batched = ask("/mcp", name, &[], &batch);
        assert_eq!(batched.status, status, "{batch}");
        let is_forwarded = server.seen.lock().unwrap().len() > forwarded;
        assert_eq!(is_forwarded, status == 200, "{name} {tool}");
        if status == 403 {
            let message = rpc_error(&reply, 403, -32602, &json!(7));
            assert!(message.contains(&format!("the tool `{tool}` is not permitted")), "{message}");
            rpc_error(&batched, 403, -32602, &Value::Null);
        }
        assert_eq!(ask("/open", name, &[], &call(7, tool).to_string()).status, 200, "the other route has no rules");
    }
    let form = [("content-type", "application/x-www-form-urlencoded")];
    for headers in [&form[..], &[("content-type", "multipart/form-data; boundary=x")]] {
        let forwarded = server.seen.lock().unwrap().len();
        let reply = ask("/form", "all", headers, &call(7, "get_secret").to_string());
        assert_eq!(reply.status, 400, "a message that declares to be a form: {}", reply.text());
        assert_eq!(server.seen.lock().unwrap().len(), forwarded);
    }
    let names = |list: &Value| {
        let tools = list["result"]["tools"].as_array().unwrap();
        tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).to_string();
    let (all, reader) = (["get_user", "set_user", "search"], ["get_user", "search"]);
    for (name, expected) in [("all", &all[..]), ("reader", &reader[..])] {
        let reply = ask("/mcp", name, &[], &list);
        assert_eq!(
            (reply.status, names(&reply.json())),
            (200, expected.iter().map(|name| (*name).to_owned()).collect())
        );
        let batch = ask("/mcp", name, &[], &format!("[{list}]")).json();
        assert_eq!((names(&batch[0]), &batch[1]), (names(&reply.json()), &json!({"id": 2, "result": {}})));
        let streamed = ask("/mcp", name, &[("accept", "text/event-stream")], &list);
        let stream = streamed.text();
        let events: Vec<_> = stream.lines().filter_map(|line| line.strip_prefix("data:")).collect();
        let first: Value = serde_json::from_str(events[0]).unwrap();
        assert_eq!(
            (names(&first), events.len(), stream.lines().next()),
            (names(&reply.json()), 2, Some("event: message"))
        );
        assert_eq!(server.last().headers("accept-encoding"), ["identity"]);
    }
    assert_eq!(names(&ask("/open", "reader", &[], &list).json()).len(), 4);
    let compressed = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"compress": 1}});
    let reply = ask("/mcp", "reader", &[], &compressed.to_string());
    assert_eq!(reply.status, 502, "it cannot be filtered");
    assert!(reply.json()["error"]["message"].is_string(), "an error of the gateway: {}", reply.text());
    for invalid in ["no json", "", "{}"] {
        let status = ask("/mcp", "reader", &[], invalid).status;
        assert_eq!(status, if invalid == "no json" { 400 } else { 200 }, "{invalid}");
    }
}
