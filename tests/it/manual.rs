//! The commands in README.md and the manual run as shown on the page and print the output shown there.

use std::io::Write;

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pages::{blocks, manual, read};
use crate::support::upstream::Upstream;
use crate::support::walk::{Output, Walk};

/// Commands that do not run unchanged: page, beginning of the command, replacement and reason.
const INSTEAD: &[(&str, &str, Option<&str>, &str)] = &[
    ("README.md", "cargo run --profile trial", Some("sluicegate &"), "the tests have built it"),
    ("docs/tutorials/start.md", "cargo install", None, "takes minutes, and the tests have built it"),
    ("docs/tutorials/your-app.md", "openssl req", None, "the test has a certificate"),
    (
        "docs/how-to/load-test.md",
        "oha ",
        None,
        "oha comes from crates.io only; its options are those of its own README",
    ),
    ("docs/how-to/operate.md", "kill -USR2", None, "tests/it/hot_restart.rs does it under load"),
    ("docs/how-to/operate.md", "sluicegate top", None, DENIED),
    ("docs/how-to/operate.md", "sluicegate inspect", None, DENIED),
    ("docs/how-to/operate.md", "sluicegate reset", None, DENIED),
    ("docs/how-to/operate.md", "sluicegate override", None, DENIED),
    ("docs/how-to/redis.md", "STORE_USER=doctor", None, "tests/it/doctor.rs makes that user and is him"),
    ("docs/how-to/redis.md", "sluicegate doctor", None, "shows a Redis with every fault: tests/it/doctor.rs"),
    (
        "docs/how-to/tune-limits.md",
        "sluicegate replay /var/log",
        Some("sluicegate replay access.log*"),
        "there is no nginx here",
    ),
];

const DENIED: &str = "needs a gateway that has denied requests: tests/it/admin_commands.rs";

/// Languages of code blocks that are neither configurations nor commands.
const SHOWN: &[(&str, &str)] = &[
    ("text", "what programs print, and drawings"),
    ("http", "answers"),
    ("json", "is parsed below"),
    ("nginx", "is given to nginx below"),
    ("lua", "tests/it/decision_proxies.rs gives it to HAProxy"),
    ("haproxy", "tests/it/decision_proxies.rs gives it to HAProxy"),
    ("caddyfile", "tests/clients/decisions.py gives it to Caddy"),
    ("redis", "for redis-cli: tests/it/store_connections.rs and tests/it/doctor.rs take them from the page"),
    ("yaml", "of other programs"),
    ("ini", "of systemd"),
    ("logrotate", "of logrotate"),
    ("js", "of Node"),
    ("python", "of docs/how-to/events.md and docs/tutorials/your-app.md, whose commands run it"),
    ("sh", "builds and runs the tests"),
    ("rust", "an example of a test, or a doctest: src/lib.rs"),
];

/// Create the files that the commands of the page need.
fn provide(walk: &Walk, document: &str) {
    match document {
        "README.md" => {
            for shipped in ["gateway.toml", "consumers.toml"] {
                walk.put(shipped, &read(shipped));
            }
            walk.put("access.log", &read("tests/logs/common.log"));
        }
        "docs/how-to/routing.md" => {
            walk.put("cert.pem", &read("certs/dev.pem"));
            walk.put("cert.key", &read("certs/dev.key"));
        }
        "docs/tutorials/your-app.md" => {
            let app = blocks(document).into_iter().find(|block| block.language == "python").unwrap();
            walk.put("app.py", &app.text);
            walk.put("cert.pem", &read("certs/dev.pem"));
            walk.put("cert.key", &read("certs/dev.key"));
        }
        "docs/how-to/migrate/nginx.md" => {
            let site = blocks(document).into_iter().find(|block| block.language == "nginx").unwrap();
            walk.put("nginx.conf", &site.text);
        }
        "docs/how-to/events.md" => {
            let hook = blocks(document).into_iter().find(|block| block.language == "python").unwrap();
            walk.put("hook.py", &hook.text);
        }
        "docs/how-to/tune-limits.md" => {
            let log = read("tests/logs/common.log");
            walk.put("access.log", &log);
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            packed.write_all(log.as_bytes()).unwrap();
            std::fs::write(walk.folder().join("huge.gz"), packed.finish().unwrap()).unwrap();
            walk.put("consumers.toml", "[[consumer]]\nname = \"acme\"\n");
            walk.put("my.toml", MY);
            walk.put("gateway.toml", MY);
        }
        _ => {}
    }
}

const MY: &str = r#"
[[listener]]
address = "127.0.0.1:8080"
[auth.keys]
kind = "api-key"
consumers = "consumers.toml"
on_missing = "anonymous"
[limit.per-ip]
by = "ip"
quota = "100/min"
[limit.per-key]
by = "api-key"
quota = "10/s"
[[route]]
name = "all"
path = "/{*rest}"
identify = ["keys"]
limits = ["per-ip", "per-key"]
respond = { status = 200 }
"#;

#[test]
fn every_command_of_the_manual_prints_what_its_page_shows() {
    run_all_commands(Output::Pipe);
}

#[test]
fn every_command_of_the_manual_prints_in_a_terminal_what_its_page_shows() {
    run_all_commands(Output::Terminal);
}

fn run_all_commands(output: Output) {
    let mut unused: Vec<_> = INSTEAD.iter().map(|(document, begin, ..)| (*document, *begin)).collect();
    let mut typed = 0;
    for document in manual() {
        let mut walk = Walk::new(output);
        provide(&walk, &document);
        typed += walk.through(&document, |command| {
            let found = INSTEAD.iter().find(|(page, begin, ..)| *page == document && command.starts_with(begin));
            let Some((page, begin, other, _)) = found else { return Some(command.to_owned()) };
            unused.retain(|row| row != &(*page, *begin));
            other.map(str::to_owned)
        });
    }
    assert!(typed >= 40, "{typed} commands");
    assert!(unused.is_empty(), "no page contains these commands: {unused:?}");
}

#[test]
fn every_block_of_the_manual_has_a_known_language() {
    for document in manual() {
        for block in blocks(&document) {
            let (line, language) = (block.line, block.language.as_str());
            if language == "toml" || language == "console" {
                continue;
            }
            assert!(SHOWN.iter().any(|(known, _)| *known == language), "{document}:{line}: a block of `{language}`");
            assert!(
                !block.text.lines().any(|line| line.starts_with("$ ")),
                "{document}:{line}: the language of a block with commands must be `console`"
            );
            if language == "json" {
                serde_json::from_str::<serde_json::Value>(&block.text)
                    .unwrap_or_else(|e| panic!("{document}:{line}: {e}"));
            }
        }
    }
}

/// nginx accepts the nginx configurations of the manual.
#[test]
fn nginx_accepts_the_nginx_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nginx.conf");
    let mut tried = 0;
    for block in blocks("docs/how-to/migrate/nginx.md").into_iter().filter(|block| block.language == "nginx") {
        let folder = directory.path().display();
        let around = format!(
            "pid {folder}/pid;\nerror_log {folder}/log;\nevents {{}}\nhttp {{\naccess_log off;\n{}}}\n",
            block.text
        );
        std::fs::write(&path, around).unwrap();
        let mut nginx = std::process::Command::new("nginx");
        let search = format!("{}:/usr/sbin", std::env::var("PATH").unwrap());
        let output =
            nginx.env("PATH", search).arg("-t").arg("-c").arg(&path).output().expect("`make tools` installs nginx");
        assert!(output.status.success(), "line {}: {}", block.line, String::from_utf8_lossy(&output.stderr));
        tried += 1;
    }
    assert_eq!(tried, 3);
}

/// Host, sessions, canaries, compression and error pages of the page for users of nginx.
#[test]
fn migrated_configuration_does_what_nginx_does() {
    let servers = ["one", "two", "canary"].map(|name| {
        Upstream::responding(move |seen| {
            let host = seen.headers("host")[0];
            let body = format!("{name} {host} {}", "x".repeat(2000));
            format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}", body.len())
                .into_bytes()
        })
    });
    let page = blocks("docs/how-to/migrate/nginx.md");
    let block = page.iter().find(|block| block.file_name() == Some("migrated.toml")).unwrap();
    let mut config = block.text.replace("127.0.0.1:8080", "127.0.0.1:0");
    for (named, server) in ["9000", "9001", "9002"].iter().zip(&servers) {
        config = config.replace(&format!("http://127.0.0.1:{named}"), &server.url());
    }
    let gateway = Gateway::start(&config);
    let text = |headers: &[(&str, &str)]| gateway.client().get_with("/a", headers).text().to_owned();
    let first = gateway.client().get("/a");
    let place = first.text().split(' ').next().unwrap().to_owned();
    assert!(first.text().contains(" app.internal "), "{}", first.text());
    let cookie = first.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    for _ in 0..4 {
        assert!(text(&[("cookie", &cookie)]).starts_with(&place), "the session stays on its server");
    }
    for headers in [[("x-canary", "always")], [("cookie", "a=b; canary=always")]] {
        assert!(text(&headers).starts_with("canary "), "{headers:?}");
    }
    assert!(!text(&[("cookie", "canary=never")]).starts_with("canary "));
    let coded = gateway.client().get_with("/a", &[("accept-encoding", "gzip")]);
    assert_eq!(coded.header("content-encoding"), Some("gzip"));
    drop(servers);
    let directory = gateway.directory();
    let log = || std::fs::read_to_string(directory.join("access.log")).unwrap_or_default();
    eventually("the log is written", || log().contains("\"GET /a HTTP/1.1\" 200 "));
    let mut client = gateway.client();
    client.send(b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\nAccept: text/html\r\n\r\n");
    assert_eq!(client.reply().unwrap().text(), "<h1>400 Bad Request</h1>");
}
