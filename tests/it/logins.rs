//! Limits for logins: by a field of an HTML form, by a member of a JSON body, and by the user name of Basic credentials.

use http::Request;

use crate::support::client::Reply;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::upstream::{Seen, Upstream};

const URL_ENCODED: &str = "application/x-www-form-urlencoded";
const MULTIPART: &str = "multipart/form-data; boundary=----WebKitFormBoundaryx7";
const JSON: &str = "application/json";

/// A login server, whose only password is `right`. A failed form login gets 401, as a failed JSON login does.
fn login_server() -> Upstream {
    Upstream::responding(|seen: &Seen| {
        let body = String::from_utf8_lossy(&seen.body);
        let status = if body.contains("right") { "200 OK" } else { "401 Unauthorized" };
        format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes()
    })
}

/// The recipe of the manual for a login server.
fn recipe(upstream: &Upstream, identity: &str) -> String {
    format!(
        "[upstream.api]\nservers = [\"{}\"]\n\
         [limit.login]\nby = [\"ip\", \"{identity}\"]\nalgorithm = \"sliding-log\"\nquota = \"5/15m\"\n\
         refund_on = [\"2xx\"]\non_store_error = \"deny\"\n\
         [limit.login-address]\nby = \"ip\"\nalgorithm = \"sliding-buckets\"\nquota = \"50/15m\"\n\
         refund_on = [\"2xx\"]\non_store_error = \"deny\"\n\
         [[route]]\nname = \"login\"\npath = \"/login\"\nmethods = [\"POST\"]\nupstream = \"api\"\n\
         limits = [\"login\", \"login-address\"]\n",
        upstream.url()
    )
}

fn body(media_type: &str, user: &str, password: &str) -> String {
    match media_type {
        JSON => format!(r#"{{"username":"{user}","password":"{password}"}}"#),
        MULTIPART => {
            let part = |name: &str, value: &str| {
                format!(
                    "------WebKitFormBoundaryx7\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
                )
            };
            format!("{}{}------WebKitFormBoundaryx7--\r\n", part("username", user), part("password", password))
        }
        _ => format!("username={user}&password={password}"),
    }
}

fn log_in(gateway: &Gateway, media_type: &str, user: &str, password: &str, header: &str) -> Reply {
    let headers = [("content-type", media_type), ("x-user", header)];
    gateway.client().request("POST", "/login", &headers, body(media_type, user, password).as_bytes())
}

#[test]
fn five_failed_logins_of_an_account_are_followed_by_429() {
    for (media_type, identity) in
        [(URL_ENCODED, "form:username"), (MULTIPART, "form:username"), (JSON, "json:/username")]
    {
        let server = login_server();
        let gateway = Gateway::start(&recipe(&server, identity));
        for _ in 0..8 {
            assert_eq!(log_in(&gateway, media_type, "alice", "right", "a").status, 200, "{media_type}");
        }
        for attempt in 0..5 {
            let header = format!("varied-{attempt}");
            assert_eq!(log_in(&gateway, media_type, "alice", "wrong", &header).status, 401, "{media_type} {attempt}");
        }
        let seen = server.count();
        assert_eq!(log_in(&gateway, media_type, "alice", "wrong", "another").status, 429, "{media_type}");
        assert_eq!(log_in(&gateway, media_type, "alice", "right", "another").status, 429, "{media_type}");
        assert_eq!(server.count(), seen, "the server does not see a denied login");
        assert_eq!(log_in(&gateway, media_type, "bob", "wrong", "a").status, 401, "another account has another quota");
        assert_eq!(
            server.last().body,
            body(media_type, "bob", "wrong").into_bytes(),
            "the body is forwarded unchanged"
        );
    }
}

#[test]
fn failed_logins_over_http2_share_the_quota() {
    let server = login_server();
    let gateway = Gateway::start(&recipe(&server, "form:username"));
    let request = |body: &'static str| {
        let uri = format!("http://{}/login", gateway.addresses()[0]);
        Request::post(uri).header("content-type", URL_ENCODED).body(body.as_bytes()).unwrap()
    };
    for _ in 0..4 {
        assert_eq!(log_in(&gateway, URL_ENCODED, "alice", "wrong", "a").status, 401);
    }
    let failed = "password=wrong&username=alice";
    let answers = http2::ask(gateway.addresses()[0], [failed, failed, "username=bob&password=right"].map(request));
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status()).collect();
    assert_eq!(statuses, [Some(401), Some(429), Some(200)]);
}

#[test]
fn form_that_hides_its_field_is_rejected() {
    let server = login_server();
    let gateway = Gateway::start(&recipe(&server, "form:username"));
    let large = format!("username=a&x={}", "x".repeat(1 << 20));
    let many = format!("username=a{}", "&x=".repeat(1000));
    for (path, media_type, body, status, expected) in [
        ("/login", URL_ENCODED, "username=a&username=b", 400, "form field `username` is ambiguous"),
        ("/login", URL_ENCODED, "username=a&Username=b", 400, "form field `username` is ambiguous"),
        ("/login", URL_ENCODED, "username=a&username[]=b", 400, "form field `username` is ambiguous"),
        ("/login", URL_ENCODED, "username=a;username=b", 400, "not percent-encoded"),
        ("/login", URL_ENCODED, "password=x", 400, "form field `username` is required"),
        ("/login?username=b", URL_ENCODED, "username=a", 400, "is also a query parameter"),
        ("/login", JSON, r#"{"username":"a"}"#, 400, "the request body is not a form"),
        ("/login", "application/x-www-form-urlencoded; charset=utf-16", "username=a", 400, "media type"),
        ("/login", MULTIPART, "username=a", 400, "does not begin with its boundary"),
        ("/login", URL_ENCODED, "", 400, "form field `username` is required"),
        ("/login", URL_ENCODED, &large, 413, "longer than 1048576 bytes"),
        ("/login", URL_ENCODED, &many, 413, "more than 1000 fields"),
    ] {
        let reply = gateway.client().request("POST", path, &[("content-type", media_type)], body.as_bytes());
        reply.assert_problem(status, body.get(..40).unwrap_or(body));
        let detail = reply.json()["detail"].as_str().unwrap_or_default().to_owned();
        assert!(detail.contains(expected), "{body:.80}: {detail}");
    }
    assert_eq!(server.count(), 0);
}

#[test]
fn limits_of_a_route_read_forms_and_json() {
    let either = "on_missing = \"skip\"\nquota = \"1/hour\"\n";
    let gateway = Gateway::start(&format!(
        "[limit.form]\nby = \"form:user\"\n{either}[limit.json]\nby = \"json:/user\"\n{either}\
         [[route]]\nname = \"both\"\npath = \"/\"\nlimits = [\"form\", \"json\"]\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"json\"\npath = \"/json\"\nlimits = [\"json\"]\nrespond = {{ status = 200 }}\n"
    ));
    let post = |path: &str, media_type: &str, body: &str| {
        gateway.client().request("POST", path, &[("content-type", media_type)], body.as_bytes()).status
    };
    for (media_type, body) in [(URL_ENCODED, "user=a"), (JSON, r#"{"user":"a"}"#)] {
        assert_eq!([post("/", media_type, body), post("/", media_type, body)], [200, 429], "{media_type}");
    }
    assert_eq!(post("/json", URL_ENCODED, "user=b"), 400, "a route whose limits read only JSON takes no form");
}

#[test]
fn claimed_user_of_basic_credentials_is_an_identity() {
    let server = Upstream::responding(|seen: &Seen| {
        let status = if seen.headers("authorization").is_empty() { "401 Unauthorized" } else { "403 Forbidden" };
        format!("HTTP/1.1 {status}\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n").into_bytes()
    });
    let gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{}\"]\n\
         [limit.login]\nby = [\"ip\", \"basic:user\"]\nquota = \"2/hour\"\non_missing = \"skip\"\n\
         [[route]]\nname = \"login\"\npath = \"/\"\nupstream = \"api\"\nlimits = [\"login\"]\n",
        server.url()
    ));
    let get = |headers: &[(&str, &str)]| gateway.client().get_with("/", headers).status;
    // alice:one, alice:two, alice:x, bob:one
    let [one, two, three, bob] = ["YWxpY2U6b25l", "YWxpY2U6dHdv", "YWxpY2U6eA==", "Ym9iOm9uZQ=="];
    for (credentials, status) in [(one, 403), (two, 403), (three, 429), (bob, 403)] {
        assert_eq!(get(&[("authorization", &format!("Basic {credentials}"))]), status, "{credentials}");
    }
    assert_eq!(get(&[]), 401, "the challenge of the upstream reaches the client");
    assert_eq!(get(&[("authorization", "Bearer x")]), 403, "another scheme has no user name");
    assert_eq!(get(&[("authorization", "Basic YWxpY2U6eA")]), 400, "malformed base64");
    let both = [("authorization", &*format!("Basic {one}")), ("authorization", &*format!("Basic {bob}"))];
    assert_eq!(get(&both), 400, "two headers");
}
