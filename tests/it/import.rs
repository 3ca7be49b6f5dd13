//! `sluicegate import`: the printed configuration, the messages, and the decisions beside those of the original program.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::pages::{read, root};
use crate::support::redis::free_port;
use crate::support::upstream::Upstream;

const HTPASSWD: &str = "alice:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/\n";

/// Run `import` in a directory. Return the exit code, the configuration and the messages.
struct Imported {
    code: Option<i32>,
    toml: String,
    notes: String,
}

fn import(directory: &Path, arguments: &[&str]) -> Imported {
    let output = binary().current_dir(directory).arg("import").args(arguments).output().unwrap();
    let Output { status, stdout, stderr } = output;
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Imported { code: status.code(), toml: text(stdout), notes: text(stderr) }
}

/// Create the files that the cases name.
fn provide(directory: &Path) {
    std::fs::create_dir(directory.join("tls")).unwrap();
    let files = [
        ("cert.pem", "pem"),
        ("cert.key", "key"),
        ("staff.pem", "pem"),
        ("partners.pem", "pem"),
        ("tls/data-statistics-tls.crt", "pem"),
        ("tls/data-statistics-tls.key", "key"),
        ("tls/data-open-tls.crt", "pem"),
        ("tls/data-open-tls.key", "key"),
    ];
    for (name, text) in files.map(|(name, kind)| (name, read(&format!("certs/dev.{kind}")))) {
        std::fs::write(directory.join(name), text).unwrap();
    }
    std::fs::write(directory.join("htpasswd"), HTPASSWD).unwrap();
}

/// Return the cases of a program: the files in `tests/import/PROGRAM` that are not expected output.
fn cases(program: &str) -> Vec<PathBuf> {
    let directory = root().join("tests/import").join(program);
    let mut files: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        path.is_file()
            && ![".gateway.toml", ".consumers.toml", ".users", ".notes"].iter().any(|end| name.ends_with(end))
    });
    files.sort();
    files
}

/// The configuration, the consumers, the users and the messages of each case equal its expected files, and `check`
/// accepts the configuration. `UPDATE_GENERATED=1` rewrites the expected files.
fn compare_cases(program: &str) {
    let cases = cases(program);
    assert!(!cases.is_empty(), "{program} has no cases");
    for case in cases {
        let directory = tempfile::tempdir().unwrap();
        provide(directory.path());
        let name = case.file_name().unwrap().to_str().unwrap();
        for file in std::fs::read_dir(case.parent().unwrap()).unwrap() {
            let file = file.unwrap().path();
            if file.is_dir() {
                let target = directory.path().join(file.file_name().unwrap());
                std::fs::create_dir(&target).unwrap();
                for inner in std::fs::read_dir(&file).unwrap() {
                    let inner = inner.unwrap().path();
                    std::fs::copy(&inner, target.join(inner.file_name().unwrap())).unwrap();
                }
            }
        }
        std::fs::copy(&case, directory.path().join(name)).unwrap();
        let text = std::fs::read_to_string(&case).unwrap();
        let options = text.lines().next().and_then(|line| line.strip_prefix("#! ")).unwrap_or_default();
        let mut arguments = vec![program, name];
        arguments.extend(options.split_whitespace());
        let said = import(directory.path(), &arguments);
        assert_eq!(said.code, Some(0), "{name}: {}", said.notes);
        let written = |file: &str| std::fs::read_to_string(directory.path().join(file)).unwrap_or_default();
        let base = case.with_extension("");
        for (kind, text) in [
            ("gateway.toml", said.toml.clone()),
            ("notes", said.notes.clone()),
            ("consumers.toml", written("consumers.toml")),
            ("users", without_salts(&written("htpasswd.new"))),
        ] {
            let expected = PathBuf::from(format!("{}.{kind}", base.display()));
            if std::env::var_os("UPDATE_GENERATED").is_some() && (!text.is_empty() || expected.exists()) {
                std::fs::write(&expected, &text).unwrap();
            }
            assert_eq!(text, std::fs::read_to_string(&expected).unwrap_or_default(), "{name}: {kind}");
        }
        std::fs::write(directory.path().join("gateway.toml"), &said.toml).unwrap();
        let check = binary().current_dir(directory.path()).args(["check", "--offline"]).output().unwrap();
        assert!(check.status.success(), "{name}: {}", String::from_utf8_lossy(&check.stderr));
    }
}

/// Return users without their hashes, whose salts are random.
fn without_salts(users: &str) -> String {
    users.lines().map(|line| format!("{}\n", line.split(':').next().unwrap())).collect()
}

#[test]
fn imports_of_nginx_match_their_files() {
    compare_cases("nginx");
}

#[test]
fn imports_of_kubernetes_match_their_files() {
    compare_cases("kubernetes");
    compare_cases("ingress-nginx");
}

#[test]
fn imports_of_kong_match_their_files() {
    compare_cases("kong");
}

#[test]
fn imports_of_traefik_match_their_files() {
    compare_cases("traefik");
}

#[test]
fn imports_of_envoyproxy_ratelimit_match_their_files() {
    compare_cases("ratelimit");
}

#[test]
fn strict_import_fails_if_a_part_has_no_equal() {
    let directory = tempfile::tempdir().unwrap();
    let put = |text: &str| std::fs::write(directory.path().join("a.conf"), text).unwrap();
    let whole = "server { listen 127.0.0.1:8080; location = /a { client_max_body_size 0; \
                 proxy_set_header Host $http_host; proxy_pass http://127.0.0.1:9000/b; } location / { return 404; } }";
    put(whole);
    let said = import(directory.path(), &["nginx", "--strict", "a.conf"]);
    assert_eq!(said.code, Some(0), "{}", said.notes);
    put(&whole.replace("client_max_body_size 0;", "perl_handler;"));
    let said = import(directory.path(), &["nginx", "--strict", "a.conf"]);
    assert_eq!(said.code, Some(1));
    assert!(said.notes.contains("a.conf:1: no equal: `perl_handler`"), "{}", said.notes);
    assert_eq!(import(directory.path(), &["nginx", "a.conf"]).code, Some(0));
}

#[test]
fn import_rejects_templates_large_files_and_deep_nesting() {
    let directory = tempfile::tempdir().unwrap();
    let cases = [
        ("server {\n  listen {{ port }};\n}\n".to_owned(), "a.conf:2: this is a template (`{{`)"),
        ("listen <%= ENV['PORT'] %>;\n".to_owned(), "a.conf:1: this is a template (`<%`)"),
        ("{% if a %}\n".to_owned(), "this is a template (`{%`)"),
        ("# padding\n".repeat(1_100_000), "a.conf: the files are larger than 4 MiB"),
        ("a;".repeat(60_000), "the files have more than 50000 directives"),
        ("a {".repeat(40), "blocks are nested deeper than 32 levels"),
        ("server {\n listen 80\n}\n".to_owned(), "a.conf:3: unexpected `}`: `;` is missing"),
        ("server {\n".to_owned(), "a.conf:2: unexpected end of the file"),
        ("a \"b".to_owned(), "the closing \" is missing"),
        ("include a.conf;".to_owned(), "files include each other deeper than 16 levels"),
    ];
    for (text, message) in cases {
        std::fs::write(directory.path().join("a.conf"), text).unwrap();
        let said = import(directory.path(), &["nginx", "a.conf"]);
        assert_eq!((said.code, said.toml.as_str()), (Some(2), ""), "{message}");
        assert!(said.notes.contains(message), "{message}: {}", said.notes);
    }
}

#[test]
fn import_of_hostile_yaml_fails_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    for program in ["kubernetes", "ingress-nginx", "kong", "traefik", "ratelimit"] {
        for (text, message) in [
            ("# padding\n".repeat(1_100_000), "a.yaml: the files are larger than 4 MiB"),
            ("[".repeat(100), "a.yaml:1: values are nested deeper than 64 levels"),
            ("- a\n".repeat(300_000), "the file has more than 200000 values"),
            ("a: 1\nb: [\n".to_owned(), "a.yaml:3: "),
            ("a: {{ .Values.name }}\n".to_owned(), "a.yaml:1: this is a template (`{{`)"),
            ("server { listen 80; }\n".to_owned(), "a.yaml:1: the document has no keys"),
            ("- a: 1\n".to_owned(), "a.yaml:1: the document has no keys"),
        ] {
            std::fs::write(directory.path().join("a.yaml"), text).unwrap();
            let said = import(directory.path(), &[program, "a.yaml"]);
            assert_eq!((said.code, said.toml.as_str()), (Some(2), ""), "{program}: {message}");
            assert!(said.notes.contains(message), "{program}: {message}: {}", said.notes);
        }
    }
}

// === Beside nginx ===

/// nginx with a configuration. It ends with the test.
struct Nginx(Child);

impl Drop for Nginx {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Nginx {
    /// Start nginx with the content of `http`. Return it when it listens on the port.
    fn start(directory: &Path, http: &str, port: u16) -> Nginx {
        let at = |name: &str| directory.join(name).display().to_string();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|kind| format!("{kind}_temp_path {};", at(kind)))
            .collect();
        let text = format!(
            "daemon off; master_process off; pid {}; error_log {};\nevents {{}}\nhttp {{ access_log off; {temporary}\n\
             include {}; }}\n",
            at("pid"),
            at("log"),
            at("site.conf"),
        );
        std::fs::write(directory.join("nginx.conf"), text).unwrap();
        std::fs::write(directory.join("site.conf"), http).unwrap();
        let mut command = Command::new("nginx");
        command.env("PATH", format!("{}:/usr/sbin", std::env::var("PATH").unwrap())).arg("-c").arg(at("nginx.conf"));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("`make tools` installs nginx");
        let nginx = Nginx(child);
        eventually("nginx listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        nginx
    }
}

/// nginx, and a gateway with the imported configuration.
struct Pair {
    _nginx: Nginx,
    gateway: Gateway,
    port: u16,
    _directory: tempfile::TempDir,
}

/// Start nginx and the gateway. `PORT` in the configuration is the port of nginx, and `UPSTREAM` the address of the
/// upstream.
fn pair(http: &str, upstream: &Upstream) -> Pair {
    let directory = tempfile::tempdir().unwrap();
    provide(directory.path());
    let port = free_port();
    let users = directory.path().join("htpasswd").display().to_string();
    let http = http.replace("PORT", &port.to_string()).replace("UPSTREAM", &upstream.address.to_string());
    let nginx = Nginx::start(directory.path(), &http.replace("USERS", &users), port);
    let said = import(directory.path(), &["nginx", "site.conf"]);
    assert_eq!(said.code, Some(0), "{}", said.notes);
    let gateway = Gateway::start(&said.toml.replace(&format!("0.0.0.0:{port}"), "127.0.0.1:0"));
    Pair { _nginx: nginx, gateway, port, _directory: directory }
}

impl Pair {
    fn clients(&self) -> [Client; 2] {
        [Client::connect(SocketAddr::from(([127, 0, 0, 1], self.port))), self.gateway.client()]
    }
}

/// Return an upstream that responds with what it got: method, target, host and some headers.
fn echo() -> Upstream {
    Upstream::responding(|seen| {
        let header = |name: &str| seen.headers(name).join(",");
        let method = seen.head.split(' ').next().unwrap();
        let body = format!(
            "{method} {} host={} real-ip={} fixed={} gone={}",
            seen.target(),
            header("host"),
            header("x-real-ip"),
            header("x-fixed"),
            header("x-gone")
        );
        let content = if method == "HEAD" { "" } else { &body };
        format!("HTTP/1.1 200 OK\r\nX-Hidden: 1\r\nContent-Length: {}\r\n\r\n{content}", body.len()).into_bytes()
    })
}

/// Locations of all kinds, with limits by a header, so that each client of the test has its own states. In a minute,
/// one request drains.
const SITE: &str = r#"
map $http_x_client $plan_key { default $http_x_client; client-3 ""; client-5 ""; }
map $request_method $write_key { default ""; POST $http_x_client; PUT $http_x_client; }
limit_req_zone $http_x_client zone=all0:1m rate=1r/m;
limit_req_zone $http_x_client zone=all1:1m rate=1r/m;
limit_req_zone $plan_key zone=plan2:1m rate=2r/m;
limit_req_zone $write_key zone=writes3:1m rate=1r/m;
limit_req_zone $http_x_client zone=all4:1m rate=1r/m;
limit_req_zone $plan_key zone=plan5:1m rate=2r/m;
limit_req_zone $http_x_client zone=all6:1m rate=1r/m;
limit_req_zone $http_x_client zone=all7:1m rate=1r/m;
limit_req_zone $http_x_client zone=all8:1m rate=1r/m;
limit_req_zone $plan_key zone=plan9:1m rate=2r/m;
limit_req_zone $http_x_none zone=none:1m rate=1r/s;
upstream group { server UPSTREAM; server UPSTREAM weight=3; }
server {
    listen PORT default_server;
    server_name _;
    return 404;
}
server {
    listen PORT;
    server_name a.test *.b.test;
    limit_req_status 429;
    limit_req zone=all0 burst=9 nodelay;
    proxy_set_header Host $http_host;
    proxy_set_header X-Real-IP $remote_addr;
    proxy_set_header X-Fixed "a{b}";
    proxy_set_header X-Gone "";
    proxy_hide_header X-Hidden;
    add_header X-Added yes always;

    location / { proxy_pass http://group; }
    location = / { limit_req zone=all1 burst=2 nodelay; proxy_pass http://UPSTREAM; }
    location /api/ { limit_req zone=plan2 burst=4 nodelay; proxy_pass http://group/v2/; }
    location /api/inner/ { proxy_pass http://UPSTREAM/; }
    location = /api/exact { proxy_pass http://UPSTREAM/other; }
    location ^~ /static/ { limit_req zone=writes3 burst=1 nodelay; proxy_pass http://UPSTREAM; }
    location ~ ^/user/[0-9]+$ { limit_req zone=all4; proxy_pass http://UPSTREAM; }
    location ~* \.(png|jpg)$ { limit_req zone=plan5 burst=2 nodelay; limit_req zone=all6 burst=5 nodelay; proxy_pass http://group; }
    location ~ ^/alt|/end$ { limit_req_status 503; limit_req zone=all7 burst=3 nodelay; proxy_pass http://UPSTREAM; }
    location = /deny { limit_req zone=none; deny all; proxy_pass http://UPSTREAM; }
    location = /home { limit_req zone=none; allow 127.0.0.0/8; deny all; proxy_pass http://UPSTREAM; }
    location = /old { return 301 http://a.test/new; }
    location = /secure { return 302 https://$host$request_uri; }
    location = /text { return 200 hello; }
    location = /gone { return 410; }
    location = /private { limit_req zone=none; auth_basic area; auth_basic_user_file USERS; proxy_pass http://UPSTREAM; }
    location /shop/ { rewrite ^/shop/(.*)$ /store/$1 break; proxy_pass http://UPSTREAM/ignored; }
    location /bare { rewrite ^/bare/?(.*)$ /$1 break; proxy_pass http://UPSTREAM; }
    location /moved { rewrite ^/moved(/|$)(.*)$ /to/$2 break; proxy_pass http://UPSTREAM; }
    location /sub { rewrite ^/sub/(.*)$ /$1 break; proxy_pass http://UPSTREAM; }
    location ~ ^/v([0-9])/(.*)$ { rewrite ^/v([0-9])/(.*)$ /$2/$1 break; proxy_pass http://UPSTREAM; }
    location /forms/ {
        if ($request_method = PUT) { return 405; }
        if ($request_method ~ ^(POST|HEAD)$) { add_header X-Added yes always; return 204; }
        if ($http_x_tier = gold) { proxy_pass http://UPSTREAM; }
        proxy_pass http://group;
    }
    location /flag/ { if ($http_x_tier != gold) { return 410; } proxy_pass http://UPSTREAM; }
    location /set/ { if ($http_x_tier) { return 200 set; } proxy_pass http://UPSTREAM; }
    location /unset/ { if ($http_x_tier = "") { return 200 unset; } proxy_pass http://UPSTREAM; }
    location /query/ { if ($arg_debug = on) { return 200 debug; } proxy_pass http://UPSTREAM; }
    location /nested/ {
        proxy_pass http://UPSTREAM;
        location /nested/deep/ { limit_req zone=all8 burst=1 nodelay; proxy_pass http://UPSTREAM/deep/; }
        location ~ \.txt$ { limit_req zone=plan9 nodelay; proxy_pass http://UPSTREAM; }
    }
}
server {
    listen PORT;
    server_name d.test www.d.test;
    if ($host = www.d.test) { return 301 http://d.test$request_uri; }
    if ($http_x_bot ~* (crawler|scraper)) { return 403; }
    if ($http_x_bot ~ "^old/[12]") { return 403; }
    location / { proxy_pass http://group; }
    location /api/ { proxy_pass http://UPSTREAM/v3/; }
}
server {
    listen PORT;
    server_name c.test;
    client_max_body_size 10;
    proxy_pass_request_headers on;
    location / { proxy_pass http://group; }
}
"#;

const PATHS: &[&str] = &[
    "/",
    "/x",
    "/x/y?q=1",
    "/api/",
    "/api/a?b=c",
    "/api/inner/z",
    "/api/exact",
    "/api/picture.png",
    "/static/a",
    "/static/a.png",
    "/user/7",
    "/user/seven",
    "/a.PNG",
    "/b/c.jpg",
    "/alt/1",
    "/any/end",
    "/deny",
    "/home",
    "/text",
    "/gone",
    "/private",
    "/nested/a",
    "/nested/deep/b",
    "/nested/c.txt",
    "/old",
    "/secure",
    "/shop/a?b=1",
    "/bare",
    "/bare/a",
    "/moved",
    "/moved/b/c",
    "/sub",
    "/sub/d",
    "/v2/e/f",
    "/forms/a",
    "/flag/a",
    "/set/a",
    "/unset/a",
    "/query/a?x=1&debug=on",
    "/query/a?debug=off",
];

/// Paths whose form the gateway changes, so that the upstream does not see what nginx would send.
const OTHER_FORMS: &[&str] = &["/%41pi/x", "//x", "/api/../x", "/static//a", "/user/%37"];

const HOSTS: &[&str] = &[
    "a.test",
    "A.test",
    "x.b.test",
    "y.x.b.test",
    "b.test",
    "c.test",
    "other.test",
    "a.test:80",
    "d.test",
    "www.d.test",
];

/// What a client sees of a response. Responses of nginx itself have a body of HTML.
fn seen(reply: &Reply, is_proxied: bool) -> String {
    let location = reply.header("location").unwrap_or_default();
    let added = reply.header("x-added").is_some() && reply.status == 200;
    let body = if is_proxied { reply.text() } else { "" };
    format!("{} {location} {added} {} {body}", reply.status, reply.header("x-hidden").is_some())
}

#[test]
fn import_of_nginx_makes_the_decisions_of_nginx_for_10000_requests() {
    let upstream = echo();
    let pair = pair(SITE, &upstream);
    let [mut nginx, mut gateway] = pair.clients();
    let mut state = 0x5eed_u64;
    let mut pick = |count: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % count
    };
    let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
    for number in 0..10_000 {
        let is_other_form = pick(10) == 0;
        let paths = if is_other_form { OTHER_FORMS } else { PATHS };
        let path = paths[pick(paths.len())];
        let method = ["GET", "GET", "POST", "PUT", "HEAD"][pick(5)];
        let host = HOSTS[if pick(3) == 0 { pick(HOSTS.len()) } else { 0 }];
        // A redirect of nginx contains the path as the client wrote it.
        let host = if is_other_form && host == "www.d.test" { "d.test" } else { host };
        let client = format!("client-{}", number / 250);
        let mut headers = vec![("Host", host)];
        if pick(8) > 0 {
            headers.push(("X-Client", &client));
        }
        if pick(2) == 0 {
            headers.push(("Authorization", "Basic YWxpY2U6c2VjcmV0"));
        }
        headers.push(("X-Gone", "1"));
        let tier = ["gold", "silver", "0", ""][pick(4)];
        if pick(2) == 0 {
            headers.push(("X-Tier", tier));
        }
        if pick(8) == 0 {
            headers.push(("X-Bot", ["A Scraper/1", "old/2", "old/3", "x old/1"][pick(4)]));
        }
        let replies = [&mut nginx, &mut gateway].map(|to| to.request(method, path, &headers, b""));
        let is_proxied = !is_other_form && replies.iter().all(|reply| reply.status == 200);
        let [expected, found] = replies.each_ref().map(|reply| seen(reply, is_proxied));
        assert_eq!(found, expected, "request {number}: {method} {path} {headers:?}");
        *statuses.entry(replies[0].status).or_default() += 1;
        for (client, reply) in [(&mut nginx, &replies[0]), (&mut gateway, &replies[1])] {
            if reply.header("connection") == Some("close") {
                *client = if std::ptr::eq(reply, &raw const replies[0]) {
                    Client::connect(SocketAddr::from(([127, 0, 0, 1], pair.port)))
                } else {
                    pair.gateway.client()
                };
            }
        }
    }
    for status in [200, 301, 302, 401, 403, 404, 410, 429, 503] {
        assert!(statuses.get(&status).is_some_and(|count| *count >= 20), "too few {status}: {statuses:?}");
    }
}

#[test]
fn import_of_nginx_delays_the_requests_that_nginx_delays() {
    let upstream = echo();
    let pair = pair(
        "limit_req_zone $http_x_client zone=slow:1m rate=10r/s;\n\
         server { listen PORT; location / { limit_req zone=slow burst=2; proxy_pass http://UPSTREAM; }\n\
         location /two/ { limit_req zone=slow burst=3 delay=1; proxy_pass http://UPSTREAM; } }",
        &upstream,
    );
    for (path, admitted) in [("/", 3), ("/two/", 4)] {
        for index in 0..2 {
            let started = sluicegate::clock::monotonic();
            let waits = std::thread::scope(|scope| {
                let requests: Vec<_> = (0..6)
                    .map(|_| {
                        let mut client = pair.clients().into_iter().nth(index).unwrap();
                        scope.spawn(move || {
                            let reply = client.get_with(path, &[("X-Client", path)]);
                            (reply.status, started.elapsed().as_millis())
                        })
                    })
                    .collect();
                requests.into_iter().map(|request| request.join().unwrap()).collect::<Vec<_>>()
            });
            let mut times: Vec<_> = waits.iter().filter(|(status, _)| *status == 200).map(|(_, time)| *time).collect();
            times.sort_unstable();
            assert_eq!(times.len(), admitted, "{path} {index}: {waits:?}");
            assert!(*times.last().unwrap() >= 150, "{path} {index}: the last request waits for two others: {times:?}");
            assert!(waits.iter().all(|(status, _)| matches!(status, 200 | 503)), "{path} {index}: {waits:?}");
        }
    }
}
