//! Responses that the gateway generates itself: error pages, statuses of denials, and headers that protect browsers.

use http::Request;

use crate::support::client::Reply;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::upstream::Upstream;

const BROWSER: (&str, &str) = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8");

fn kind(reply: &Reply) -> String {
    reply.header("content-type").unwrap_or_default().to_owned()
}

#[test]
fn errors_have_the_page_of_their_route_in_the_format_that_the_client_accepts() {
    let upstream = Upstream::responding(|_| b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nours".to_vec());
    let gateway = Gateway::start(&format!(
        "[server]\nerror_pages.html = \"<h1>{{status}} {{reason}}</h1>\"\n\
         [upstream.dead]\nservers = [\"http://127.0.0.1:1\"]\n[upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"both\"\npath = \"/both\"\nupstream = \"dead\"\nerror_pages.html = \"<p>{{detail}}</p>\"\n\
         error_pages.json = '{{\"code\":{{status}},\"error\":\"{{detail}}\",\"id\":\"{{request_id}}\"}}'\n\
         [[route]]\nname = \"server\"\npath = \"/server\"\nupstream = \"dead\"\n\
         [[route]]\nname = \"json\"\npath = \"/json\"\nupstream = \"dead\"\nerror_pages.json = '{{\"code\":1}}'\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nupstream = \"api\"\n",
        upstream.url()
    ));
    let get = |path: &str, headers: &[(&str, &str)]| gateway.client().get_with(path, headers);
    let page = get("/both", &[BROWSER]);
    assert_eq!((page.status, &*kind(&page)), (502, "text/html; charset=utf-8"));
    assert_eq!(page.text(), "<p>no connection to the upstream could be made</p>");
    let document = get("/both", &[("accept", "*/*")]);
    assert_eq!((document.status, &*kind(&document)), (502, "application/json"));
    let json = document.json();
    assert_eq!((json["code"].as_u64(), json["id"].as_str()), (Some(502), document.header("x-request-id")));
    assert_eq!(document.header("cache-control"), Some("no-store"));
    assert_eq!(get("/server", &[BROWSER]).text(), "<h1>502 Bad Gateway</h1>");
    assert_eq!(get("/json", &[BROWSER]).text(), "<h1>502 Bad Gateway</h1>", "a route without its own page");
    assert_eq!(get("/json", &[]).text(), "{\"code\":1}");
    assert_eq!(get("/nowhere", &[BROWSER]).text(), "<h1>404 Not Found</h1>", "a request without a route");
    assert_eq!(kind(&get("/nowhere", &[])), "application/problem+json");
    assert_eq!(get("/own", &[BROWSER]).text(), "ours", "the response of an upstream does not change");
    let request = |method: &str| {
        Request::builder().method(method).uri("http://a.test/both").header(BROWSER.0, BROWSER.1).body(&b""[..]).unwrap()
    };
    let answers = http2::ask(gateway.address, ["GET", "HEAD"].map(request));
    for (answer, length) in answers.iter().zip([50, 0]) {
        let Answer::Response(status, headers, body) = answer else { panic!("{answer:?}") };
        assert_eq!((status.as_u16(), body.len(), &headers["content-length"]), (502, length, &"50".parse().unwrap()));
    }
}

#[test]
fn reload_replaces_error_pages() {
    let page = |text: &str| {
        format!(
            "[server]\nerror_pages.html = \"{text}\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\n"
        )
    };
    let gateway = Gateway::start(&page("one"));
    let text = || gateway.client().get_with("/x", &[BROWSER]).text().to_owned();
    assert_eq!(text(), "one");
    gateway.put(&page("two"));
    crate::support::eventually("the new page", || text() == "two");
}

#[test]
fn denial_has_the_status_of_its_limit() {
    let limit = |name: &str, status: &str| format!("[limit.{name}]\nby = \"global\"\nquota = \"1/hour\"\n{status}\n");
    let route = |path: &str, limits: &str| {
        format!("[[route]]\nname = \"{path}\"\npath = \"/{path}\"\nlimits = [{limits}]\nrespond = {{ status = 200 }}\n")
    };
    let gateway = Gateway::start(&format!(
        "{}{}{}{}{}",
        limit("plain", ""),
        limit("busy", "status = 503"),
        limit("first", "status = 420"),
        route("one", "\"busy\""),
        route("several", "\"first\", \"plain\"")
    ));
    for (path, status) in [("/one", 503), ("/several", 420)] {
        assert_eq!(gateway.get(path).status, 200, "{path}");
        let denied = gateway.get(path);
        assert_eq!((denied.status, denied.json()["status"].as_u64()), (status, Some(status.into())), "{path}");
        assert!(denied.header("retry-after").is_some() && denied.header("ratelimit").is_some(), "{path}");
    }
}

#[test]
fn security_headers_are_set_unless_the_response_has_them() {
    let upstream = Upstream::responding(|seen| {
        let own = if seen.target() == "/own" { "X-Frame-Options: DENY\r\n" } else { "" };
        format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{own}\r\n").into_bytes()
    });
    let gateway = Gateway::start(&format!(
        "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n\
         [upstream.u]\nservers = [\"{}\"]\n[upstream.dead]\nservers = [\"http://127.0.0.1:1\"]\n\
         [[route]]\nname = \"safe\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nsecurity_headers = true\n\
         response_headers.remove = [\"referrer-policy\"]\n\
         [[route]]\nname = \"dead\"\npath = \"/dead\"\nupstream = \"dead\"\nsecurity_headers = true\n",
        upstream.url()
    ));
    let hsts = "strict-transport-security";
    for (path, scheme, name, expected) in [
        ("/", "http", "x-content-type-options", Some("nosniff")),
        ("/", "http", "x-frame-options", Some("SAMEORIGIN")),
        ("/own", "http", "x-frame-options", Some("DENY")),
        ("/", "http", "referrer-policy", None),
        ("/dead", "http", "referrer-policy", Some("strict-origin-when-cross-origin")),
        ("/dead", "http", "x-content-type-options", Some("nosniff")),
        ("/", "http", hsts, None),
        ("/", "https", hsts, Some("max-age=31536000")),
        ("/dead", "https", hsts, Some("max-age=31536000")),
    ] {
        let reply = gateway.client().get_with(path, &[("x-forwarded-proto", scheme)]);
        assert_eq!(reply.header(name), expected, "{name} of {path} by {scheme}");
    }
}
