//! The upstream gets the same headers that the gateway used for routing, limits and authentication, even if headers are
//! removed, joined or malformed.

use crate::support::gateway::Gateway;
use crate::support::upstream::Upstream;

/// Return a configuration with an authentication server that accepts all requests as `x-user: alice`, and with an
/// upstream.
fn with_server(server: &Upstream, upstream: &Upstream, more: &str) -> String {
    format!(
        "[auth.sso]\nkind = \"forward\"\nurl = \"{}/verify\"\nresponse_headers = [\"x-user\"]\n{more}\n\
         [upstream.api]\nservers = [\"{}\"]\n",
        server.url(),
        upstream.url()
    )
}

fn admitting() -> Upstream {
    Upstream::responding(|_| b"HTTP/1.1 200 OK\r\nX-User: alice\r\nContent-Length: 0\r\n\r\n".to_vec())
}

#[test]
fn headers_that_untrusted_clients_must_not_send_match_and_identify_nothing() {
    let (server, upstream) = (admitting(), Upstream::start());
    let routes = "[[route]]\nname = \"admin\"\npath = \"/x\"\nupstream = \"api\"\nrewrite = \"/admin\"\n\
                  match = { headers = { x-user = { exact = \"admin\" } } }\n\
                  [[route]]\nname = \"https\"\npath = \"/y\"\nupstream = \"api\"\nrewrite = \"/https\"\n\
                  match = { headers = { x-forwarded-proto = { exact = \"https\" } } }\n\
                  [[route]]\nname = \"other\"\npath = \"/x\"\nupstream = \"api\"\n\
                  [[route]]\nname = \"plain\"\npath = \"/y\"\nupstream = \"api\"\n\
                  [[route]]\nname = \"limited\"\npath = \"/limited\"\nupstream = \"api\"\nrequire = [\"sso\"]\nlimits = [\"user\"]\n";
    let limit = "[limit.user]\nby = \"header:x-user\"\non_missing = \"ip\"\nquota = \"1/hour\"\n";
    let config = with_server(&server, &upstream, "") + limit + routes;
    let gateway = Gateway::start(&config);
    for (path, name, value) in [("/x", "x-user", "admin"), ("/y", "x-forwarded-proto", "https")] {
        assert_eq!(gateway.client().get_with(path, &[(name, value)]).status, 200);
        let seen = upstream.last();
        assert_eq!((seen.target(), seen.headers(name).contains(&value)), (path, false), "{}", seen.head);
    }
    // Clients cannot choose their identity by sending `x-user`: both requests share one bucket.
    let statuses = ["r0", "r1"].map(|user| gateway.client().get_with("/limited", &[("x-user", user)]).status);
    assert_eq!(statuses, [200, 429]);
    assert_eq!(upstream.last().headers("x-user"), ["alice"]);
    let trusting = Gateway::start(&(config + "[client_ip]\ntrusted_proxies = [\"127.0.0.1/32\"]\n"));
    assert_eq!(trusting.client().get_with("/y", &[("x-forwarded-proto", "https")]).status, 200);
    assert_eq!(upstream.last().target(), "/https", "a trusted proxy may send `X-Forwarded-Proto`");
}

#[test]
fn alias_of_an_identity_header_is_removed_even_if_it_is_read() {
    let (server, upstream) = (admitting(), Upstream::start());
    let config = with_server(&server, &upstream, "")
        + "[limit.other]\nby = \"header:x_user\"\non_missing = \"skip\"\nquota = \"100/hour\"\n\
           [[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"api\"\nrequire = [\"sso\"]\n\
           [[route]]\nname = \"s\"\npath = \"/s\"\nupstream = \"api\"\nlimits = [\"other\"]\n";
    let gateway = Gateway::start(&config);
    for path in ["/r", "/s"] {
        assert_eq!(gateway.client().get_with(path, &[("X_User", "mallory"), ("X.User", "mallory")]).status, 200);
        let seen = upstream.last();
        assert!(!seen.head.contains("mallory"), "{}", seen.head);
    }
}

#[test]
fn authentication_server_gets_no_identity_headers_of_the_client() {
    let (server, upstream) = (admitting(), Upstream::start());
    let headers = "request_headers = [\"x-user\", \"x-real-ip\", \"x-forwarded-user\", \"x-plan\"]";
    let config = with_server(&server, &upstream, headers)
        + "[[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"api\"\nrequire = [\"sso\"]\n";
    let gateway = Gateway::start(&config);
    let sent = [("X-User", "m"), ("X-Real-IP", "6.6.6.6"), ("X-Forwarded-User", "root"), ("X-Plan", "free")];
    assert_eq!(gateway.client().get_with("/r", &sent).status, 200);
    let told = server.last();
    let names = ["x-user", "x-real-ip", "x-forwarded-user", "x-plan"].map(|name| told.headers(name).len());
    assert_eq!(names, [0, 0, 0, 1], "{}", told.head);
}

#[test]
fn cookie_conditions_test_the_joined_cookies() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"denied\"\npath = \"/\"\nrespond = {{ status = 403 }}\n\
         match = {{ headers = {{ cookie = {{ regex = '(.*; *)?plan=free(;.*)?' }} }} }}\n\
         [[route]]\nname = \"other\"\npath = \"/\"\nupstream = \"api\"\n",
        upstream.url()
    ));
    for cookies in [&["plan=free; a=1"][..], &["plan=free", "a=1"], &["a=1", "plan=free"], &["a=1", "b=2", "plan=free"]]
    {
        let headers: Vec<_> = cookies.iter().map(|cookie| ("cookie", *cookie)).collect();
        assert_eq!(gateway.client().get_with("/", &headers).status, 403, "{cookies:?}");
    }
    assert_eq!(gateway.client().get_with("/", &[("cookie", "plan=free2")]).status, 200);
}

#[test]
fn malformed_authorization_is_neither_ignored_nor_forwarded() {
    let upstream = Upstream::start();
    let consumers = "[[consumer]]\nname = \"alice\"\n\
                     keys = [\"sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683\"]\n";
    let config = format!(
        "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\nheader = \"authorization\"\nscheme = \"Bearer\"\n\
         [upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"api\"\nidentify = [\"keys\"]\n\
         [[route]]\nname = \"open\"\npath = \"/open\"\nupstream = \"api\"\n",
        upstream.url()
    );
    let gateway = Gateway::start_with(&config, &[("consumers.toml", consumers)]);
    let send = |path: &str, value: &[u8]| {
        let mut client = gateway.client();
        let head = format!("GET {path} HTTP/1.1\r\nHost: gateway.test\r\nAuthorization: ");
        client.send(&[head.as_bytes(), value, b"\r\n\r\n"].concat());
        client.reply().unwrap().status
    };
    let jwt_shaped = b"eyJhbGciOiJIUzI1NiJ9.e30.c2ln";
    let before = upstream.count();
    for value in [
        &b"Bearer\xa0key"[..],
        b"Bearer\tkey",
        b"Bearer,key",
        b"Bearer:key",
        b"basic:a2V5",
        b"Bearer k\xc3\xa9y",
        jwt_shaped,
    ] {
        assert_eq!(send("/r", value), 400, "{}", String::from_utf8_lossy(value));
    }
    assert_eq!(upstream.count(), before);
    for value in [&b"Token key"[..], b"a2V5OnNlY3JldA==", b"AWS4-HMAC-SHA256 Credential=a/b, Signature=c"] {
        assert_eq!(send("/r", value), 200, "{}", String::from_utf8_lossy(value));
    }
    assert_eq!(send("/open", b"Bearer:key"), 200, "no provider of this route reads `Authorization`");
}

#[test]
fn invalid_response_of_the_authentication_server_admits_no_request() {
    let cookies = "Set-Cookie: a=; Max-Age=0\r\n".repeat(120);
    let answer = format!("HTTP/1.1 302 Found\r\nLocation: /login\r\n{cookies}Content-Length: 0\r\n\r\n");
    let server = Upstream::responding(move |_| answer.clone().into_bytes());
    let broken = Upstream::responding(|_| b"HTTP/1.1 two hundred\r\n\r\n".to_vec());
    let closing = Upstream::responding(|_| Vec::new());
    let upstream = Upstream::start();
    for (server, status) in [(&server, 503), (&broken, 503), (&closing, 200)] {
        let config = with_server(server, &upstream, "on_error = \"allow\"\ntimeout = \"1s\"")
            + "[[route]]\nname = \"r\"\npath = \"/r\"\nupstream = \"api\"\nrequire = [\"sso\"]\n";
        let before = upstream.count();
        assert_eq!(Gateway::start(&config).get("/r").status, status);
        assert_eq!(upstream.count() - before, usize::from(status == 200));
    }
}

#[test]
fn redirect_by_a_regular_expression_forms_a_canonical_path() {
    let gateway = Gateway::start(
        "[[route]]\nname = \"r\"\npath_regex = '/rf(?<a>[^/]*)/(?<rest>.*)'\nredirect = { to = \"/{a}/{rest}\" }\n",
    );
    assert_eq!(gateway.get("/rf../admin").status, 400);
    let reply = gateway.get("/rfx/admin");
    assert_eq!((reply.status, reply.header("location")), (308, Some("/x/admin")));
}
