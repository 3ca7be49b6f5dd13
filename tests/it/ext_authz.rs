//! Envoy's external authorization over gRPC, on a listener with `protocol = "decisions"`.

use std::collections::BTreeMap;

use bytes::Bytes;
use sluicegate::payload::ext_authz::{
    Address, Attributes, CheckRequest, CheckResponse, Header, HeaderList, HeaderOption, HttpRequest, HttpResponse,
    Peer, Request, SocketAddress,
};

use crate::support::gateway::{CONSUMERS, Gateway};
use crate::support::grpc::Grpc;

const METHOD: &str = "/envoy.service.auth.v3.Authorization/Check";

const CONFIG: &str = r#"
[[listener]]
address = "127.0.0.1:0"
protocol = "decisions"

[client_ip]
trusted_proxies = ["127.0.0.1"]

[auth.keys]
kind = "api-key"
consumers = "consumers.toml"

[limit.login]
by = "ip"
quota = "2/day"
algorithm = "fixed-window"

[[route]]
name = "login"
path = "/login"
hosts = ["shop.example"]
methods = ["POST"]
identify = ["keys"]
limits = ["login"]
request_headers = { set = { x-user = "{consumer}", x-client = "{client_ip} {scheme}" }, remove = ["x-internal"] }
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

/// POST https://shop.example/login with these headers.
fn http(headers: &[(&str, &str)]) -> HttpRequest {
    let pseudo = [(":method", "POST"), (":path", "/login"), (":authority", "shop.example"), (":scheme", "https")];
    let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), value.as_bytes().to_vec());
    HttpRequest {
        method: "POST".into(),
        headers: pseudo.iter().chain(headers).map(pair).collect(),
        path: "/login?a=1".into(),
        host: "shop.example".into(),
        scheme: "https".into(),
        header_map: None,
    }
}

fn check(http: HttpRequest, address: &str) -> CheckRequest {
    let socket_address = Some(SocketAddress { address: address.to_owned() });
    let source = Some(Peer { address: Some(Address { socket_address }) });
    CheckRequest { attributes: Some(Attributes { source, request: Some(Request { http: Some(http) }) }) }
}

/// The decision: the status, and the names and values of the headers.
#[derive(Debug)]
struct Decision {
    code: i32,
    status: i32,
    headers: Vec<(String, String)>,
    removed: Vec<String>,
    for_client: Vec<(String, String)>,
    body: String,
}

impl Decision {
    fn ask(client: &Grpc, check: &CheckRequest) -> Decision {
        let response: CheckResponse = client.call(METHOD, check, &[]).message();
        let code = response.status.unwrap().code;
        let empty = Decision {
            code,
            status: 200,
            headers: Vec::new(),
            removed: Vec::new(),
            for_client: Vec::new(),
            body: String::new(),
        };
        match response.response.unwrap() {
            HttpResponse::Admitted(admission) => Decision {
                headers: pairs(&admission.headers),
                removed: admission.headers_to_remove,
                for_client: pairs(&admission.response_headers_to_add),
                ..empty
            },
            HttpResponse::Denied(denied) => Decision {
                status: denied.status.unwrap().code,
                for_client: pairs(&denied.headers),
                body: denied.body,
                ..empty
            },
        }
    }

    fn for_client(&self, name: &str) -> Option<&str> {
        self.for_client.iter().find(|(found, _)| found == name).map(|(_, value)| &**value)
    }
}

fn pairs(options: &[HeaderOption]) -> Vec<(String, String)> {
    let pair = |option: &HeaderOption| {
        assert_eq!(option.append, Some(false), "the value replaces that of the client: {option:?}");
        let header = option.header.as_ref().unwrap();
        (header.key.clone(), String::from_utf8(header.value.to_vec()).unwrap())
    };
    options.iter().map(pair).collect()
}

#[test]
fn calls_are_decided_by_the_routes_and_replace_the_headers_of_the_client() {
    let gateway = start();
    let client = Grpc::connect(gateway.address);
    let forged = [("x-user", "root"), ("x-internal", "1"), ("x-forwarded-for", "198.51.100.1"), ("x-other", "1")];
    let known = [&forged[..], &[("x-api-key", "demo-key")]].concat();
    let admitted = Decision::ask(&client, &check(http(&known), "192.0.2.1"));
    assert_eq!((admitted.code, admitted.status), (0, 200), "{admitted:?}");
    let expected = [("x-client", "192.0.2.1 https"), ("x-user", "demo")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(admitted.headers, expected);
    assert_eq!(admitted.removed, ["x-api-key", "x-internal"]);
    assert!(admitted.for_client("ratelimit").unwrap().starts_with("\"login\";r=1;"), "{admitted:?}");
    let anonymous = Decision::ask(&client, &check(http(&forged), "192.0.2.1"));
    assert_eq!(anonymous.removed, ["x-internal", "x-user"]);
    let denied = Decision::ask(&client, &check(http(&forged), "192.0.2.1"));
    assert_eq!((denied.code, denied.status), (8, 429));
    assert!(denied.for_client("retry-after").is_some() && denied.for_client("ratelimit").is_some(), "{denied:?}");
    assert!(denied.body.contains("try again in"), "{denied:?}");
    assert_eq!(Decision::ask(&client, &check(http(&[]), "192.0.2.2")).status, 200, "another client");
    let members = HttpRequest { path: "/members".into(), ..http(&[]) };
    let members = Decision::ask(&client, &check(members, "192.0.2.1"));
    assert_eq!((members.code, members.status), (16, 401));
    assert!(members.for_client("www-authenticate").is_some(), "{members:?}");
}

#[test]
fn raw_headers_count_like_headers() {
    let gateway = start();
    let client = Grpc::connect(gateway.address);
    let raw = |name: &str, value: &str| Header {
        key: name.to_owned(),
        value: Bytes::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    let list =
        |headers| HttpRequest { header_map: Some(HeaderList { headers }), headers: BTreeMap::new(), ..http(&[]) };
    let known = list(vec![raw(":path", "/login"), raw("x-api-key", "demo-key")]);
    let admitted = Decision::ask(&client, &check(known, "192.0.2.1"));
    assert!(admitted.headers.contains(&("x-user".to_owned(), "demo".to_owned())), "{admitted:?}");
    assert_eq!(Decision::ask(&client, &check(list(vec![raw("X_User", "root")]), "192.0.2.1")).status, 400);
}

#[test]
fn incomplete_or_forged_description_is_denied() {
    let gateway = start();
    let client = Grpc::connect(gateway.address);
    let described = |change: fn(&mut HttpRequest)| {
        let mut http = http(&[]);
        change(&mut http);
        check(http, "192.0.2.1")
    };
    let mut cases = vec![
        CheckRequest { attributes: None },
        CheckRequest { attributes: Some(Attributes { source: None, request: None }) },
        check(http(&[]), ""),
        check(http(&[]), "client"),
        described(|http| http.method = Bytes::new()),
        described(|http| http.method = "P OST".into()),
        described(|http| http.path = Bytes::new()),
        described(|http| http.path = "login".into()),
        described(|http| http.path = "http://shop.example/login".into()),
        described(|http| http.path = "/a#/../login".into()),
        described(|http| http.path = "/%2Flogin".into()),
        described(|http| http.host = Bytes::new()),
        described(|http| http.host = "a@b".into()),
        described(|http| http.scheme = Bytes::new()),
        described(|http| http.scheme = "ftp".into()),
        check(http(&[("x-line", "a\r\nb")]), "192.0.2.1"),
        check(http(&[("a b", "1")]), "192.0.2.1"),
    ];
    cases
        .extend(["x_user", "x.user", "x_client", "x~internal"].map(|name| check(http(&[(name, "root")]), "192.0.2.1")));
    for case in cases {
        let decision = Decision::ask(&client, &case);
        assert_eq!((decision.status, decision.code), (400, 7), "{case:?}");
    }
    assert_eq!(Decision::ask(&client, &check(http(&[]), "192.0.2.1")).status, 200, "the connection is usable");
}

#[test]
fn untrusted_peers_and_malformed_calls_get_no_decision() {
    let config = CONFIG.replace("trusted_proxies = [\"127.0.0.1\"]", "trusted_proxies = [\"192.0.2.0/24\"]");
    let untrusted = Gateway::start_with(&config, &[("consumers.toml", CONSUMERS)]);
    let decision = Decision::ask(&Grpc::connect(untrusted.address), &check(http(&[]), "192.0.2.1"));
    assert_eq!((decision.status, decision.code), (403, 7));
    let gateway = start();
    let client = Grpc::connect(gateway.address);
    let status = |path: &str, body: &[u8]| client.send("POST", path, &[], Bytes::copy_from_slice(body)).code();
    assert_eq!(status(METHOD, b"\0\0\0\0\x01\xff"), 3, "not a message");
    assert_eq!(status(METHOD, b"\0\0"), 3, "an incomplete message");
    assert_eq!(status(METHOD, &[vec![0, 0, 8, 0, 0], vec![0; 8 << 16]].concat()), 8, "a long message");
    assert_eq!(status("/envoy.service.auth.v3.Authorization/Other", b"\0\0\0\0\0"), 12);
    assert_eq!(Decision::ask(&client, &check(http(&[]), "192.0.2.1")).status, 200, "the connection is usable");
}
