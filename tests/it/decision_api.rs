//! The JSON API of decisions: `POST /v1/check` on a listener with `protocol = "decisions"`.

use serde_json::{Value, json};

use crate::support::client::Reply;
use crate::support::gateway::{CONSUMERS, Gateway};

/// No proxy is trusted: the token alone authenticates programs.
const CONFIG: &str = r#"
[[listener]]
address = "127.0.0.1:0"
protocol = "decisions"
denied_status = 403
api_token = "sesame"

[auth.keys]
kind = "api-key"
consumers = "consumers.toml"

[limit.orders]
by = "ip"
quota = "50/day"
algorithm = "fixed-window"

[[route]]
name = "orders"
path = "/orders"
hosts = ["shop.example"]
identify = ["keys"]
limits = ["orders"]
request_headers = { set = { x-user = "{consumer}", x-client = "{client_ip} {scheme}" } }
respond = { status = 200 }

[[route]]
name = "members"
path = "/members"
require = ["keys"]
respond = { status = 200 }
"#;

fn start() -> Gateway {
    Gateway::start_with(CONFIG, &[("consumers.toml", CONSUMERS)])
}

fn call(gateway: &Gateway, authorization: &[(&str, &str)], body: &[u8]) -> Reply {
    gateway.client().request("POST", "/v1/check", authorization, body)
}

const TOKEN: [(&str, &str); 1] = [("Authorization", "Bearer sesame")];

fn check(gateway: &Gateway, body: &Value) -> Value {
    let reply = call(gateway, &TOKEN, body.to_string().as_bytes());
    assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")), "{reply:?}");
    reply.json()
}

fn order(client: &str) -> Value {
    json!({ "method": "GET", "url": "https://shop.example/orders?page=2", "client_ip": client })
}

#[test]
fn described_requests_are_decided_as_if_the_client_had_sent_them() {
    let gateway = start();
    let mut known = order("192.0.2.1");
    known["headers"] = json!({ "X-Api-Key": "demo-key", "X-User": "root" });
    let decision = check(&gateway, &known);
    assert_eq!((&decision["admitted"], &decision["status"]), (&json!(true), &json!(200)), "{decision}");
    let headers = &decision["headers"];
    assert_eq!((&headers["x-user"], &headers["x-client"]), (&json!("demo"), &json!("192.0.2.1 https")));
    assert!(headers["ratelimit"].as_str().unwrap().starts_with("\"orders\";r=49;"), "{decision}");
    assert_eq!(check(&gateway, &order("192.0.2.1"))["headers"]["x-user"], json!(""));
    let members = json!({ "method": "GET", "url": "http://shop.example/members", "client_ip": "192.0.2.1" });
    let decision = check(&gateway, &members);
    assert_eq!((&decision["admitted"], &decision["status"]), (&json!(false), &json!(401)), "{decision}");
    assert!(decision["headers"]["www-authenticate"].is_string() && decision["body"].is_string(), "{decision}");
}

#[test]
fn list_of_requests_is_charged_exactly() {
    let gateway = start();
    let mut requests = vec![order("192.0.2.1"); 98];
    requests.push(order("192.0.2.2"));
    requests.push(json!({ "method": "GET", "url": "https://shop.example/%2F", "client_ip": "192.0.2.1" }));
    let decisions = check(&gateway, &json!({ "requests": requests }));
    let decisions = decisions["decisions"].as_array().unwrap();
    let statuses: Vec<_> = decisions.iter().map(|decision| decision["status"].as_u64().unwrap()).collect();
    let count = |status| statuses[..98].iter().filter(|found| **found == status).count();
    assert_eq!((count(200), count(429)), (50, 48), "`denied_status` does not concern the API: {statuses:?}");
    assert_eq!(statuses[98..], [200, 400]);
    let denied = decisions.iter().find(|decision| decision["status"] == json!(429)).unwrap();
    assert!(denied["headers"]["retry-after"].is_string(), "{denied}");
    let one = json!({ "requests": [order("192.0.2.3")] });
    assert_eq!(check(&gateway, &one)["decisions"].as_array().unwrap().len(), 1);
}

#[test]
fn invalid_description_is_denied() {
    let gateway = start();
    for (key, value) in [
        ("method", "get"),
        ("method", "G ET"),
        ("method", ""),
        ("url", "/orders"),
        ("url", "ftp://shop.example/orders"),
        ("url", "https://shop.example"),
        ("url", "https://shop.example?/orders"),
        ("url", "https://shop.example#/orders"),
        ("url", "https://a@shop.example/orders"),
        ("url", "https:///orders"),
        ("url", "https://shop.example/orders#/x"),
    ] {
        let mut described = order("192.0.2.1");
        described[key] = json!(value);
        assert_eq!(check(&gateway, &described)["status"], json!(400), "{key}: {value}");
    }
    for name in ["X_User", "x.client", "a b", ""] {
        let mut described = order("192.0.2.1");
        described["headers"] = json!({ name: "root" });
        assert_eq!(check(&gateway, &described)["status"], json!(400), "{name}");
    }
}

#[test]
fn calls_need_the_token_and_a_valid_body() {
    let gateway = start();
    let body = order("192.0.2.1").to_string();
    let wrong: [&[(&str, &str)]; 5] = [
        &[],
        &[("Authorization", "Bearer wrong")],
        &[("Authorization", "Bearer ")],
        &[("Authorization", "Basic sesame")],
        &[("Authorization", "Bearer sesame"), ("Authorization", "Bearer sesame")],
    ];
    for authorization in wrong {
        let reply = call(&gateway, authorization, body.as_bytes());
        reply.assert_problem(401, "the token is wrong");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"), "{authorization:?}");
    }
    assert_eq!(gateway.client().get_with("/v1/check", &TOKEN).status, 405);
    let several = |count| json!({ "requests": vec![order("192.0.2.1"); count] }).to_string();
    let bodies = [
        String::new(),
        "[]".to_owned(),
        "{".to_owned(),
        body.replace("method", "verb"),
        body.replace("192.0.2.1", "client"),
        body.replace("}", ",\"more\":1}"),
        several(0),
        several(101),
    ];
    for body in bodies {
        call(&gateway, &TOKEN, body.as_bytes()).assert_problem(400, &body[..body.len().min(99)]);
    }
    // Only the head, because the gateway closes the connection without reading the body.
    let mut client = gateway.client();
    let length = (1 << 20) + 1;
    let (name, token) = TOKEN[0];
    client.send(
        format!("POST /v1/check HTTP/1.1\r\nHost: a.test\r\n{name}: {token}\r\nContent-Length: {length}\r\n\r\n")
            .as_bytes(),
    );
    client.reply().unwrap().assert_problem(413, "the body is too long");
    let described = [("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/"), ("X-Forwarded-For", "192.0.2.1")];
    let proxied = gateway.client().get_with("/decide/forwarded", &[&described[..], &TOKEN].concat());
    assert_eq!(proxied.status, 403, "the token makes no trusted proxy");
    let off = Gateway::start_with(
        &CONFIG.replace("api_token = \"sesame\"", "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]"),
        &[("consumers.toml", CONSUMERS)],
    );
    call(&off, &TOKEN, body.as_bytes()).assert_problem(403, "the API is off");
    assert_eq!(call(&gateway, &TOKEN, several(100).as_bytes()).status, 200);
    assert_eq!(check(&gateway, &order("192.0.2.1"))["status"], json!(429), "only the last call was charged: 100 of 50");
}
