//! Header rules: variables in header values, and rules for the headers of rejections.

use std::fmt::Write;

use aws_lc_rs::digest::{SHA256, digest};

use crate::support::client::Client;
use crate::support::gateway::{Gateway, binary};
use crate::support::redis::free_port;
use crate::support::upstream::Upstream;

const PROXY: [u8; 4] = [127, 0, 0, 9];

fn hash(key: &str) -> String {
    digest(&SHA256, key.as_bytes()).as_ref().iter().fold("sha256:".to_owned(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// Start a gateway with two consumers and one route. The route has a limit by API key. Clients without a key count as
/// anonymous.
fn gateway(upstream: &Upstream, route: &str) -> Gateway {
    let consumers = format!(
        "[[consumer]]\nname = \"acme\"\nkeys = [\"{}\"]\n[[consumer]]\nname = \" J\u{f6}rg\\r\\nx-evil: 1%\"\nkeys = [\"{}\"]\n",
        hash("key-of-acme"),
        hash("key-of-joerg")
    );
    let config = format!(
        "[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\n\
         [auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\non_missing = \"anonymous\"\n\
         [limit.key]\nby = \"api-key\"\nquota = \"1000/24h\"\n[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"items.v1\"\npath = \"/v1/{{*rest}}\"\nupstream = \"api\"\nidentify = [\"keys\"]\nlimits = [\"key\"]\n{route}\n",
        upstream.url()
    );
    Gateway::start_with(&config, &[("consumers.toml", &consumers)])
}

const ALL: &str = "x-all = \"{client_ip}|{consumer}|{route}|{host}|{method}|{path}|{scheme}\", x-id = \"{request_id}\"";

/// A trusted proxy reports the scheme of the client. The last element of a list is the one that the proxy has added.
#[test]
fn scheme_is_the_one_that_the_trusted_proxy_reports() {
    let upstream = Upstream::start();
    for (header, sent, expected) in [
        ("x-forwarded-for", &[("X-Forwarded-Proto", "https")][..], "https"),
        ("x-forwarded-for", &[("X-Forwarded-Proto", "https, https")], "https"),
        ("x-forwarded-for", &[("X-Forwarded-Proto", "HTTPS")], "https"),
        ("x-forwarded-for", &[("X-Forwarded-Proto", "https,http")], "http"),
        ("x-forwarded-for", &[("X-Forwarded-Proto", "https"), ("X-Forwarded-Proto", "http")], "http"),
        ("x-forwarded-for", &[("X-Forwarded-Proto", "https, wss")], "http"),
        ("x-forwarded-for", &[("Forwarded", "for=192.0.2.7;proto=https")], "http"),
        ("forwarded", &[("Forwarded", "for=192.0.2.7;proto=https")], "https"),
        ("forwarded", &[("Forwarded", "for=192.0.2.7;Proto=\"https\""), ("X-Forwarded-Proto", "http")], "https"),
        ("forwarded", &[("Forwarded", "for=x;proto=https, for=192.0.2.7;proto=http")], "http"),
        ("forwarded", &[("Forwarded", "for=192.0.2.7"), ("X-Forwarded-Proto", "https")], "https"),
    ] {
        let gateway = Gateway::start(&format!(
            "[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\nheader = \"{header}\"\n\
             [upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
             response_headers = {{ set = {{ x-scheme = \"{{scheme}}\" }} }}\n",
            upstream.url()
        ));
        for (from, expected) in [(PROXY, expected), ([127, 0, 0, 1], "http")] {
            let reply = Client::connect_from(from.into(), gateway.address).get_with("/", sent);
            assert_eq!(reply.header("x-scheme"), Some(expected), "{header}: {sent:?} from {from:?}");
        }
    }
}

#[test]
fn variables_are_replaced_in_request_and_response_headers() {
    let upstream = Upstream::start();
    let rules = format!(
        "rewrite = \"/internal/{{rest}}\"\nrequest_headers = {{ set = {{ {ALL}, x-plain = \"{{{{a}}}}\" }} }}\n\
         response_headers = {{ set = {{ {ALL} }} }}\n"
    );
    let gateway = gateway(&upstream, &rules);
    let asked = [("Host", "Shop.Example:8080"), ("X-Api-Key", "key-of-acme")];
    let proxied = [
        ("Host", "shop.example."),
        ("X-Api-Key", "key-of-acme"),
        ("X-Forwarded-For", "192.0.2.7"),
        ("X-Forwarded-Proto", "https"),
        ("X-Request-Id", "given"),
    ];
    for (from, headers, expected) in [
        ([127, 0, 0, 1], &asked[..], "127.0.0.1|acme|items.v1|shop.example|DELETE|/v1/a%20b/caf%C3%A9|http"),
        (PROXY, &proxied[..], "192.0.2.7|acme|items.v1|shop.example|DELETE|/v1/a%20b/caf%C3%A9|https"),
    ] {
        let mut client = Client::connect_from(from.into(), gateway.address);
        let reply = client.request("DELETE", "/v1//x/../a%20b/caf%c3%a9?q=1", headers, b"");
        let seen = upstream.last();
        assert_eq!(seen.target(), "/internal/a%20b/caf%C3%A9?q=1");
        assert_eq!(seen.headers("x-all"), [expected]);
        assert_eq!(reply.header("x-all"), Some(expected));
        assert_eq!(seen.headers("x-plain"), ["{a}"]);
        assert_eq!(seen.headers("x-id"), seen.headers("x-request-id"), "{}", seen.head);
        assert_eq!(reply.header("x-id"), Some(seen.headers("x-request-id")[0]));
        if from == PROXY {
            assert_eq!(reply.header("x-id"), Some("given"));
        }
    }
}

#[test]
fn variable_without_content_removes_the_header_and_its_aliases() {
    let upstream = Upstream::start();
    let rules = "request_headers = { set = { x-user = \"{consumer}\", x-account = \"user={consumer}\" } }\n\
                 response_headers = { set = { x-user = \"{consumer}\" } }\n";
    let gateway = gateway(&upstream, rules);
    let forged = [("X-User", "root"), ("X_User", "root"), ("X.Account", "user=root"), ("X-Account", "user=root")];
    for (key, user, account) in [
        (None, None, None),
        (Some("key-of-acme"), Some("acme"), Some("user=acme")),
        // The gateway percent-encodes control characters, `%` and non-ASCII characters of a consumer's name. A name
        // thus cannot end the header line and begin a new one.
        (Some("key-of-joerg"), Some("%20J%C3%B6rg%0D%0Ax-evil: 1%25"), Some("user=%20J%C3%B6rg%0D%0Ax-evil: 1%25")),
    ] {
        let headers: Vec<_> = forged.into_iter().chain(key.map(|key| ("X-Api-Key", key))).collect();
        let reply = gateway.client().get_with("/v1/a", &headers);
        assert_eq!(reply.status, 200);
        let seen = upstream.last();
        assert_eq!(seen.headers("x-user"), Vec::from_iter(user), "{key:?}");
        assert_eq!(seen.headers("x-account"), Vec::from_iter(account), "{key:?}");
        assert!(!seen.head.to_ascii_lowercase().contains("root"), "{}", seen.head);
        assert!(seen.headers("x-evil").is_empty(), "{}", seen.head);
        assert_eq!(reply.header("x-user"), user);
    }
}

#[test]
fn upstream_headers_of_the_same_name_are_replaced_or_removed() {
    let upstream = Upstream::responding(|_| {
        b"HTTP/1.1 200 OK\r\nX-User: forged\r\nX-Route: forged\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    let gateway =
        gateway(&upstream, "response_headers = { set = { x-user = \"{consumer}\", x-route = \"{route}\" } }\n");
    let reply = gateway.get("/v1/a");
    assert_eq!((reply.header("x-user"), reply.header("x-route")), (None, Some("items.v1")));
}

/// Return a configuration with one route per kind of rejection. Each route has the header rules `rules`.
fn rejecting(rules: &str) -> String {
    let mut text = format!(
        "[limit.one]\nby = \"ip\"\nquota = \"1/24h\"\n[limit.key]\nby = \"api-key\"\nquota = \"9/24h\"\n\
         [limit.tenant]\nby = \"header:x-tenant\"\nquota = \"9/24h\"\n[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n\
         [upstream.gone]\nservers = [\"http://127.0.0.1:{}\"]\n",
        free_port()
    );
    for (name, more) in [
        ("anonymous", "identify = [\"keys\"]\nlimits = [\"key\"]\nrespond = { status = 200 }"),
        ("tenant", "limits = [\"tenant\"]\nrespond = { status = 200 }"),
        ("limited", "limits = [\"one\"]\nrespond = { status = 200 }"),
        ("large", "max_body = \"1B\"\nrespond = { status = 200 }"),
        ("gone", "upstream = \"gone\""),
        ("missing", "respond = { status = 404 }"),
    ] {
        writeln!(text, "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\n{more}\n{rules}").unwrap();
    }
    text
}

#[test]
fn on_errors_sets_headers_on_rejections() {
    let set = "x-route = \"{route}\", x-id = \"{request_id}\", x-user = \"{consumer}\", x-frame-options = \"DENY\", \
               cache-control = \"public\", retry-after = \"1\", content-type = \"text/html\"";
    let rules = |on_errors: &str| {
        format!(
            "response_headers = {{ set = {{ {set} }}, remove = [\"www-authenticate\", \"ratelimit\"]{on_errors} }}\n"
        )
    };
    for (on_errors, is_set) in [(", on_errors = true", true), ("", false)] {
        let gateway = Gateway::start(&rejecting(&rules(on_errors)));
        gateway.get("/limited");
        for (path, status) in
            [("/anonymous", 401), ("/tenant", 400), ("/limited", 429), ("/large", 413), ("/gone", 502)]
        {
            let mut client = gateway.client();
            let reply = client.request("POST", path, &[], if path == "/large" { b"xx" } else { b"" });
            // The rejection keeps its content type and `Cache-Control: no-store`.
            reply.assert_problem(status, path);
            let route = path.strip_prefix('/').filter(|_| is_set);
            assert_eq!(reply.header("x-route"), route, "{path}");
            assert_eq!(reply.header("x-frame-options"), is_set.then_some("DENY"), "{path}");
            assert_eq!(reply.header("x-id").is_some(), is_set, "{path}");
            assert_eq!(reply.header("x-user"), None, "{path}");
            match status {
                401 => assert!(reply.header("www-authenticate").is_some()),
                429 => {
                    assert!(reply.header("ratelimit").is_some());
                    assert!(reply.header("retry-after").unwrap().parse::<u64>().unwrap() > 1);
                }
                502 if is_set => assert_eq!(reply.header("x-id"), reply.header("x-request-id")),
                _ => {}
            }
        }
        // A response from `respond` is not a rejection, so the rules always apply to it.
        let missing = gateway.get("/missing");
        assert_eq!((missing.status, missing.header("x-route")), (404, Some("missing")));
        assert_eq!(missing.header("cache-control"), Some("public"));
        // If no route matches, no rules apply.
        assert_eq!(gateway.get("/nowhere").header("x-frame-options"), None);
    }
}

#[test]
fn environment_is_literal_in_header_rules() {
    let upstream = Upstream::start();
    let config = format!(
        "[upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"api\"\n\
         request_headers = {{ set = {{ x-a = \"${{A}}/{{method}}\", x-b = \"$${{{{A}}}}\", x-c = \"${{NONE:-{{route}}}}\" }} }}\n",
        upstream.url()
    );
    let gateway = Gateway::start_by(&config, |path| {
        let mut command = binary();
        command.arg("--config").arg(path).env("A", "{\"a\":\"{client_ip}\"}");
        command
    });
    assert_eq!(gateway.get("/").status, 200);
    let seen = upstream.last();
    assert_eq!(seen.headers("x-a"), ["{\"a\":\"{client_ip}\"}/GET"], "braces in an environment variable are literal");
    assert_eq!(seen.headers("x-b"), ["${A}"], "`$${{` is a literal `${{`");
    assert_eq!(seen.headers("x-c"), ["r"], "variables in a default of the file are replaced");
}
