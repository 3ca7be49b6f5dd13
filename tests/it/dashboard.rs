//! The dashboard and its event stream: security headers, access control, and the content of an event.

use crate::support::admin_listener::{HERE, ask, with_admin};
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::grpc::Grpc;
use crate::support::upstream::Upstream;
use serde_json::{Value, json};
use sluicegate::payload::envoy::{Entry, RateLimitDescriptor, RateLimitRequest, RateLimitResponse};

const TOKEN: (&str, &str) = ("authorization", "Bearer open-sesame");
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// The maximum number of concurrent event streams.
const FOLLOWERS: usize = 16;

fn gateway(token: &str) -> Gateway {
    Gateway::start(&with_admin(&format!(
        "{token}[limit.three]\nby = \"ip\"\nquota = \"3/3650d\"\nalgorithm = \"fixed-window\"\n\
         [limit.same]\nby = \"route\"\nquota = \"3/3650d\"\nalgorithm = \"fixed-window\"\n\
         [upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"hello\"\npath = \"/hello\"\nlimits = [\"three\", \"same\"]\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n"
    )))
}

/// A client that reads the event stream of the dashboard.
struct Events(Client);

impl Events {
    fn follow(gateway: &Gateway, headers: &[(&str, &str)]) -> (Reply, Events) {
        let mut client = Client::connect(gateway.admin());
        let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        client.send(format!("GET /api/live HTTP/1.1\r\n{lines}\r\n").as_bytes());
        (client.head().unwrap(), Events(client))
    }

    /// Return the name and data of the next event, or `None` at the end of the stream.
    fn next(&mut self) -> Option<(String, Value)> {
        use std::io::{BufRead, Read};
        let mut size = String::new();
        let read = self.0.stream.read_line(&mut size);
        if read.is_err() || size.is_empty() || size.trim() == "0" {
            return None;
        }
        let mut chunk = vec![0; usize::from_str_radix(size.trim(), 16).unwrap() + 2];
        self.0.stream.read_exact(&mut chunk).unwrap();
        let text = String::from_utf8(chunk).unwrap();
        let event = text.strip_suffix("\n\n\r\n").unwrap_or_else(|| panic!("no end: {text}"));
        let (name, data) = event.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        Some((name.strip_prefix("event: ").unwrap().to_owned(), data))
    }

    fn second(&mut self) -> Value {
        let (name, data) = self.next().expect("the stream continues");
        assert_eq!(name, "second", "{data}");
        data
    }
}

fn kinds(second: &Value) -> [u64; 3] {
    ["allowed", "denied", "errors"].map(|kind| second[kind].as_u64().unwrap())
}

fn sum(seconds: &[Value]) -> [u64; 3] {
    seconds.iter().map(kinds).fold([0; 3], |sum, one| std::array::from_fn(|place| sum[place] + one[place]))
}

#[test]
fn event_of_a_second_has_its_requests_and_decisions() {
    let gateway = gateway("");
    let (head, mut events) = Events::follow(&gateway, &[HERE]);
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    let (name, before) = events.next().unwrap();
    assert_eq!((&*name, &before["window_seconds"]), ("history", &900.into()), "{before}");
    assert!(before["version"].is_string(), "{before}");
    let mut seconds = before["seconds"].as_array().unwrap().clone();
    let statuses: Vec<_> = (0..5).map(|_| gateway.get("/hello").status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    assert_eq!((gateway.get("/gone").status, gateway.get("/nowhere").status), (502, 404));
    let last = loop {
        let now = events.second();
        seconds.push(now["second"].clone());
        if sum(&seconds) == [3, 2, 1] {
            break now;
        }
        assert!(seconds.len() < 60, "the decisions are in no event: {seconds:?}");
    };
    // The total counts each request once, even if several limits denied it. Each limit has its own counts.
    for (limit, name) in last["limits"].as_array().unwrap().iter().zip(["same", "three"]) {
        let decisions = &limit["decisions"];
        assert_eq!((&limit["limit"], &limit["quota"]), (&name.into(), &"3/3650d".into()), "{limit}");
        assert_eq!((&decisions["allowed"], &decisions["denied"]), (&3.into(), &2.into()), "{limit}");
        assert_eq!((&limit["shadow"], &limit["on_store_error"]), (&false.into(), &"local".into()), "{limit}");
    }
    // For each route and each upstream, the event contains the number of requests since the start of the gateway.
    let [hello, gone] = [("hello", [3, 2, 0]), ("gone", [0, 0, 1])].map(|(route, [allowed, denied, errors])| {
        json!({ "route": route, "allowed": allowed, "denied": denied, "errors": errors, "gateway_errors": 0, "p95_ms": null })
    });
    assert_eq!((&last["routes"][0], &last["routes"][1]), (&hello, &gone), "{last}");
    assert_eq!(last["statuses"], json!({ "404": 1, "429": 2, "502": 1 }), "{last}");
    assert_eq!(last["unmatched"], 1, "{last}");
    assert_eq!(before["example"], format!("curl -i http://{}/hello", gateway.address));
    assert_eq!(last["upstreams"], json!([{ "upstream": "gone", "requests": 1, "errors": 1 }]), "{last}");
    let timed: Vec<_> = seconds.iter().filter(|second| !second["p50_ms"].is_null()).collect();
    assert!(!timed.is_empty(), "{seconds:?}");
    let is_sorted = |second: &&Value| {
        ["p50_ms", "p95_ms", "p99_ms"].map(|name| second[name].as_f64()).is_sorted_by(|one, next| one <= next)
    };
    assert!(timed.iter().all(is_sorted), "{timed:?}");
    assert!(timed.iter().all(|second| second["p50_ms"].as_f64() > Some(0.0)), "{timed:?}");
    assert!(timed.iter().any(|second| second["decision_p99_ms"].as_f64() > Some(0.0)), "{timed:?}");
    assert_eq!(last["health"]["status"], "ready");
    assert_eq!(last["health"]["upstreams"]["gone"][0]["server"], "127.0.0.1:1");
    assert_eq!(last["configuration"]["loaded_at"], ask(&gateway, "/api/config").json()["loaded_at"]);
    assert!(last["connections"]["max"].as_u64() > Some(0), "{last}");
    let quiet = events.second();
    assert_eq!((kinds(&quiet["second"]), &quiet["second"]["p50_ms"]), ([0; 3], &Value::Null), "{quiet}");
    // A client that subscribes later first gets the whole history, without gaps or repetitions.
    let (_, mut later) = Events::follow(&gateway, &[HERE]);
    let (_, before) = later.next().unwrap();
    let told = before["seconds"].as_array().unwrap();
    assert_eq!(sum(told), [3, 2, 1], "{before}");
    let ends: Vec<_> = told.iter().map(|second| second["at_ms"].as_u64().unwrap()).collect();
    assert!(ends.is_sorted_by(|one, next| one < next), "{ends:?}");
    let next = later.second();
    assert!(next["second"]["at_ms"].as_u64() > ends.last().copied(), "{next} {ends:?}");
}

#[test]
fn event_of_a_second_has_the_calls_of_the_rate_limit_service() {
    let gateway = Gateway::start(&with_admin(
        "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n\
         [limit.user]\nby = \"entry:user\"\nquota = \"3/3650d\"\nalgorithm = \"fixed-window\"\n\
         [[descriptor]]\ndomain = \"edge\"\nentries = [\"user\"]\nlimits = [\"user\"]\n\
         [[descriptor]]\ndomain = \"edge\"\nentries = [\"free\"]\nunlimited = true\n",
    ));
    let (_, mut events) = Events::follow(&gateway, &[HERE]);
    let (_, before) = events.next().unwrap();
    assert!(before["example"].is_null(), "no route answers: {before}");
    let client = Grpc::connect(gateway.address);
    for key in ["user", "user", "user", "user", "user", "free"] {
        let entries = vec![Entry { key: key.into(), value: "ada".into() }];
        let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
        let request = RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 0 };
        client.call(SHOULD_RATE_LIMIT, &request, &[]).message::<RateLimitResponse>();
    }
    let mut seconds = before["seconds"].as_array().unwrap().clone();
    let last = loop {
        let now = events.second();
        seconds.push(now["second"].clone());
        if sum(&seconds) == [4, 2, 0] {
            break now;
        }
        assert!(seconds.len() < 60, "the calls are in no event: {seconds:?}");
    };
    let [user, free] = [("edge user", json!(["user"]), [3, 2]), ("edge free", json!([]), [1, 0])].map(
        |(descriptor, limits, [allowed, denied])| {
            json!({ "descriptor": descriptor, "limits": limits, "allowed": allowed, "denied": denied, "errors": 0 })
        },
    );
    assert_eq!(last["descriptors"], json!([user, free]), "{last}");
    assert!(seconds.iter().any(|second| second["p50_ms"].as_f64() > Some(0.0)), "{seconds:?}");
    // `sluicegate status` prints these numbers.
    assert_eq!(kinds(&ask(&gateway, "/api/status").json()["last_minute"]), [4, 2, 0]);
}

#[test]
fn interval_has_the_requests_of_its_seconds_and_the_decisions_of_each_limit() {
    let gateway = gateway("");
    let (_, mut events) = Events::follow(&gateway, &[HERE]);
    let (_, before) = events.next().unwrap();
    assert_eq!(
        (&before["interval_seconds"], &before["interval_window_seconds"]),
        (&10.into(), &3600.into()),
        "{before}"
    );
    assert_eq!((&before["intervals"], &before["limit_intervals"]), (&json!([]), &json!([])), "{before}");
    let mut seconds = before["seconds"].as_array().unwrap().clone();
    let statuses: Vec<_> = (0..5).map(|_| gateway.get("/hello").status).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    let last = loop {
        let now = events.second();
        seconds.push(now["second"].clone());
        if !now["interval"].is_null() {
            break now;
        }
        assert!(seconds.len() < 60, "an interval is ten seconds: {seconds:?}");
        assert!(now["limits"].as_array().unwrap().iter().all(|limit| limit["interval"].is_null()), "{now}");
    };
    assert_eq!(kinds(&last["interval"]), [3, 2, 0], "{last}");
    assert_eq!(kinds(&last["interval"]), sum(&seconds), "{last}");
    assert!((9_500..12_000).contains(&last["interval"]["ms"].as_u64().unwrap()), "{last}");
    assert!(last["interval"]["p95_ms"].as_f64() > Some(0.0), "{last}");
    let decisions: Vec<_> = last["limits"].as_array().unwrap().iter().map(|limit| &limit["interval"]).collect();
    assert_eq!(decisions, [&json!([3, 2]), &json!([3, 2])], "{last}");
    // The history that a client gets when it subscribes later contains this interval.
    let (_, mut later) = Events::follow(&gateway, &[HERE]);
    let (_, history) = later.next().unwrap();
    assert_eq!(history["intervals"], json!([last["interval"]]), "{history}");
    let expected = json!([{ "limit": "same", "decisions": [[3, 2]] }, { "limit": "three", "decisions": [[3, 2]] }]);
    assert_eq!(history["limit_intervals"], expected, "{history}");
}

#[test]
fn dashboard_has_a_content_security_policy() {
    let gateway = gateway("");
    let page = ask(&gateway, "/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    // The page must not contain inline scripts, inline styles, or URLs of other hosts.
    for forbidden in ["<style", "style=", "<script>", "onclick", "onload", "http:", "https:", "//"] {
        let text = page.text().replace("http://www.w3.org/2000/svg", "");
        assert!(!text.contains(forbidden), "{forbidden} in {text}");
    }
    let mut files = vec!["/".to_owned(), "/page.css".to_owned(), "/page.js".to_owned()];
    let mut next = 0;
    while let Some(file) = files.get(next).cloned() {
        next += 1;
        let reply = ask(&gateway, &file);
        let (kind, text) = (reply.header("content-type").unwrap_or_default(), reply.text());
        let expected = match file.rsplit('.').next() {
            Some("css") => "text/css; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            _ => "text/html; charset=utf-8",
        };
        assert_eq!((reply.status, kind), (200, expected), "{file}");
        for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(markup), "{file} makes markup of text: {markup}");
        }
        // Follow the imports of each module. Several modules may import the same module.
        for module in text.lines().filter_map(|line| line.split(" from \"./").nth(1)?.strip_suffix("\";")) {
            let module = format!("/{module}");
            if !files.contains(&module) {
                files.push(module);
            }
        }
    }
    assert!(files.len() > 8, "the imports are followed: {files:?}");
    for path in ["/", "/page.js", "/api/top", "/api/config", "/metrics", "/nothing"] {
        let reply = ask(&gateway, path);
        let policy = reply.header("content-security-policy").unwrap_or_default();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"),
            "{path}"
        );
        assert!(policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"), "{path}: {policy}");
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(reply.header("cache-control"), Some("no-store"), "{path}");
        assert_eq!(reply.header("referrer-policy"), Some("no-referrer"), "{path}");
    }
    for path in ["/", "/page.js", "/api/live"] {
        let reply = Client::connect(gateway.admin()).request("POST", path, &[HERE], b"");
        assert_eq!((reply.status, reply.header("allow")), (405, Some("GET, HEAD")), "{path}");
    }
}

#[test]
fn dashboard_needs_no_token_and_its_data_does() {
    let open = gateway("");
    assert!(ask(&open, "/").text().contains("<body data-token=\"none\">"));
    let (head, _) = Events::follow(&open, &[("host", "evil.example")]);
    assert_eq!(head.status, 403);
    let closed = gateway("token = \"open-sesame\"\n");
    let page = ask(&closed, "/");
    assert!(page.text().contains("<body data-token=\"required\">"), "{}", page.text());
    assert!(!page.text().contains("three") && !page.text().contains("sesame"), "{}", page.text());
    assert_eq!(ask(&closed, "/page.js").status, 200);
    let wrong = ("authorization", "Bearer open");
    for headers in [&[HERE][..], &[HERE, wrong]] {
        let (head, _) = Events::follow(&closed, headers);
        assert_eq!((head.status, head.header("www-authenticate")), (401, Some("Bearer")), "{headers:?}");
    }
    let (head, mut events) = Events::follow(&closed, &[("host", "gateway.example"), TOKEN]);
    assert_eq!(head.status, 200);
    assert_eq!(events.next().unwrap().0, "history");
}

#[test]
fn number_of_event_streams_is_bounded() {
    let gateway = gateway("");
    let mut followers: Vec<_> = (0..FOLLOWERS).map(|_| Events::follow(&gateway, &[HERE])).collect();
    assert!(followers.iter().all(|(head, _)| head.status == 200));
    ask(&gateway, "/api/live").assert_problem(503, "one stream too many");
    assert_eq!(ask(&gateway, "/healthz").status, 200, "other requests are served");
    followers.pop();
    let (_, another) = &mut followers[0];
    eventually("a permit is free again", || {
        // The gateway notices a closed stream when it sends the next event.
        another.next();
        Events::follow(&gateway, &[HERE]).0.status == 200
    });
}

#[test]
fn event_stream_ends_with_the_process() {
    let mut gateway = gateway("");
    let (_, mut events) = Events::follow(&gateway, &[HERE]);
    assert_eq!(events.next().unwrap().0, "history");
    gateway.terminate();
    assert!(gateway.wait().success());
    while events.next().is_some() {}
}

#[test]
fn settled_costs_are_in_the_events_and_in_the_list_of_clients() {
    let upstream = Upstream::responding(|_| {
        let text = "{\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}";
        let length = text.len();
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{text}")
            .into_bytes()
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "[limit.tokens]\nby = \"ip\"\nquota = \"100000/day\"\nalgorithm = \"fixed-window\"\nunit = \"tokens\"\n\
         cost = {{ llm = \"auto\" }}\n[limit.requests]\nby = \"ip\"\nquota = \"100/s\"\n\
         [upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nlimits = [\"tokens\", \"requests\"]\nupstream = \"u\"\n",
        upstream.url()
    )));
    for _ in 0..3 {
        assert_eq!(gateway.client().request("POST", "/v1/chat/completions", &[], b"{\"max_tokens\":5}").status, 200);
    }
    eventually("the costs are in the list", || ask(&gateway, "/api/top?by=cost").json()["limits"][0]["cost"] == 30);
    let top = ask(&gateway, "/api/top?by=cost").json();
    let limit = &top["limits"][0];
    assert_eq!((&limit["limit"], &limit["unit"]), (&"tokens".into(), &"tokens".into()), "{top}");
    assert_eq!(top["limits"].as_array().unwrap().len(), 1, "only limits that count tokens: {top}");
    let client = &limit["identities"][0];
    assert_eq!((&client["parts"], &client["cost_at_most"]), (&json!({"ip": "127.0.0.1"}), &30.into()), "{top}");
    assert_eq!(ask(&gateway, "/api/top?by=age").status, 400);
    assert_eq!(ask(&gateway, "/api/top").json()["limits"].as_array().unwrap().len(), 2, "denials of all limits");
    let (_, mut events) = Events::follow(&gateway, &[HERE]);
    assert_eq!(events.next().unwrap().0, "history");
    let limits = events.second()["limits"].clone();
    assert_eq!((&limits[0]["settled"], &limits[1]["settled"]), (&Value::Null, &30.into()), "{limits}");
}

#[test]
fn settled_costs_are_listed_for_the_identity_of_each_limit() {
    let upstream = Upstream::responding(|_| {
        let text = "{\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}";
        let length = text.len();
        format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{text}")
            .into_bytes()
    });
    let identities = [("ip", "127.0.0.1"), ("method", "POST"), ("host", "gateway.test")];
    let limits = identities.map(|(by, _)| {
        format!(
            "[limit.{by}]\nby = \"{by}\"\nquota = \"100000/day\"\nalgorithm = \"fixed-window\"\nunit = \"tokens\"\n\
             cost = {{ llm = \"auto\" }}\n"
        )
    });
    let gateway = Gateway::start(&with_admin(&format!(
        "{}[upstream.u]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\n\
         limits = [\"method\", \"ip\", \"host\"]\nupstream = \"u\"\n",
        limits.concat(),
        upstream.url()
    )));
    assert_eq!(gateway.client().request("POST", "/v1/chat/completions", &[], b"{\"max_tokens\":5}").status, 200);
    let top = || ask(&gateway, "/api/top?by=cost").json()["limits"].as_array().unwrap().clone();
    eventually("the costs are in the list", || top().iter().filter(|limit| limit["cost"] == 10).count() == 3);
    for (by, value) in identities {
        let limits = top();
        let limit = limits.iter().find(|limit| limit["limit"] == by).unwrap();
        assert_eq!(limit["identities"][0]["parts"], json!({ by: value }), "{limits:?}");
    }
}

#[test]
fn errors_of_the_gateway_are_told_apart_from_those_of_the_upstream() {
    let gateway = Gateway::start(&with_admin(
        "[store]\nurl = \"redis://127.0.0.1:1\"\n[limit.l]\nby = \"ip\"\nquota = \"9/s\"\non_store_error = \"deny\"\n\
         [upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"both\"\npath = \"/both\"\nupstream = \"gone\"\n\
         [[route]]\nname = \"checked\"\npath = \"/checked\"\nlimits = [\"l\"]\nupstream = \"gone\"\n",
    ));
    let (_, mut events) = Events::follow(&gateway, &[HERE]);
    events.next().unwrap();
    eventually("the store is down", || ask(&gateway, "/readyz").json()["status"] == "degraded");
    for _ in 0..3 {
        assert_eq!((gateway.get("/both").status, gateway.get("/checked").status), (502, 503));
    }
    // The percentile of a route needs the end of an interval of 10 s.
    let mut seconds = (0..60).map(|_| {
        gateway.get("/both");
        events.second()
    });
    let last = seconds.find(|last| !last["routes"][0]["p95_ms"].is_null()).expect("a percentile");
    let [both, checked] = [0, 1].map(|index| &last["routes"][index]);
    assert_eq!(both["gateway_errors"], 0, "{last}");
    assert_eq!((&checked["errors"], &checked["gateway_errors"]), (&3.into(), &3.into()), "{last}");
    assert!(both["p95_ms"].as_f64() > Some(0.0), "{last}");
    assert_eq!(last["limits"][0]["on_store_error"], "deny", "{last}");
}

#[test]
fn warnings_about_the_configuration_are_listed() {
    // `check` warns about a redirect that leads to the same route.
    let warned = "[[route]]\nname = \"r\"\npath = \"/r/{*x}\"\nredirect = { to = \"/r/x/{x}\" }\n";
    let gateway = Gateway::start(&with_admin(warned));
    let warnings = || ask(&gateway, "/api/config").json()["warnings"].as_array().unwrap().clone();
    assert!(
        warnings()
            .iter()
            .any(|warning| warning.as_str().unwrap().contains("gateway.toml:")
                && warning.to_string().contains("redirect")),
        "{:?}",
        warnings()
    );
    let fine = "[[route]]\nname = \"r\"\npath = \"/r\"\nrespond = { status = 200 }\n";
    gateway.put(&with_admin(fine));
    eventually("the warnings about the routes end", || {
        !warnings().iter().any(|warning| warning.to_string().contains("redirect"))
    });
}
