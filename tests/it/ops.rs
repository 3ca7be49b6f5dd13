//! The files in `ops/`: they use existing metrics and labels, their configurations are valid, and their health checks
//! work.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::reload::{ask, says, with_admin};
use serde_json::Value;

fn ops() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("ops")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(ops().join(name)).unwrap()
}

/// Collect all PromQL expressions of a Grafana dashboard, including those of variables and annotations.
fn expressions(board: &Value, found: &mut Vec<String>) {
    match board {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if ["expr", "query", "definition"].contains(&&**name) => {
                        found.push(text.clone())
                    }
                    value => expressions(value, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| expressions(item, found)),
        _ => {}
    }
}

/// Return the names of the metrics in a text, without the suffixes of histograms.
fn metrics(text: &str) -> BTreeSet<String> {
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
    let words = text.split(|char| !is_name(char)).filter(|word| word.starts_with("sluicegate_"));
    let base = |word: &str| {
        let cut = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
        cut.unwrap_or(word).to_owned()
    };
    words.map(base).collect()
}

/// Return all values that the text compares with the label, as in `label="value"`.
fn values(text: &str, label: &str) -> BTreeSet<String> {
    let rests = [format!("{label}=\""), format!("{label}=~\"")];
    let rests = rests.iter().flat_map(|begin| text.split(&**begin).skip(1));
    rests.flat_map(|rest| rest.split('"').next().unwrap().split('|')).map(str::to_owned).collect()
}

#[test]
fn dashboard_and_alerts_use_existing_metrics() {
    let limited = "limits = [\"ip\"]\n[limit.ip]\nby = \"ip\"\nquota = \"9/s\"\n";
    let upstream = "[[route]]\nname = \"up\"\npath = \"/up\"\nupstream = \"api\"\n\
                    [upstream.api]\nservers = [\"http://127.0.0.1:1\"]\n";
    let gateway = Gateway::start(&with_admin(&format!("{}{limited}{upstream}", says("x"))));
    assert_eq!((gateway.get("/says").status, gateway.get("/up").status), (200, 502));
    // Only a gateway with a management server has the metrics of xDS.
    let managed = Gateway::start(&with_admin(
        "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"ratelimit\"\n\
         [ratelimit]\nxds = { url = \"http://127.0.0.1:1\", node_id = \"n\" }\n",
    ));
    let page = [&gateway, &managed].map(|gateway| ask(gateway, "GET", "/metrics").text().to_owned()).concat();
    let there: BTreeSet<_> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).map(str::to_owned).collect();
    let mut board = Vec::new();
    expressions(&serde_json::from_str(&read("grafana.json")).expect("JSON"), &mut board);
    for (name, text, least) in [
        ("grafana.json", board.join("\n"), 25),
        ("alerts.yml", read("alerts.yml"), 12),
        ("alerts.test.yml", read("alerts.test.yml"), 12),
    ] {
        let named = metrics(&text);
        assert!(named.len() >= least, "{name}: {named:?}");
        let unknown: Vec<_> = named.difference(&there).collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
        for label in ["decision", "answered_by", "kind", "status"] {
            for value in values(&text, label) {
                let there = page.contains(&format!("{label}=\"{}", value.trim_end_matches(".*")));
                assert!(there, "{name}: {label} = {value}");
            }
        }
    }
}

/// Return the gateway configuration in a ConfigMap.
fn configured(manifest: &str) -> String {
    let (_, rest) = manifest.split_once("  gateway.toml: |\n").expect("a configuration");
    let lines = rest.lines().map_while(|line| if line.is_empty() { Some("") } else { line.strip_prefix("    ") });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn configurations_in_ops_are_accepted_without_warnings() {
    let folder = tempfile::tempdir().unwrap();
    let mapped = folder.path().join("gateway.toml");
    std::fs::write(&mapped, configured(&read("kubernetes.yaml"))).unwrap();
    for path in [&ops().join("compose.gateway.toml"), &mapped] {
        let mut check = binary();
        check.args(["check", "--strict", "--offline", "--config"]).arg(path);
        for name in ["SLUICEGATE_ADMIN_TOKEN", "SLUICEGATE_STORE_SECRET", "REDIS_PASSWORD"] {
            check.env(name, "5f0c2a7be1d94c3885f0c2a7be1d94c3");
        }
        let output = check.output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(output.status.success() && said.contains("1 listener, 1 route, 1 limit, 1 upstream"), "{said}");
    }
}

/// Return the health check commands in a file: JSON lists that start with `sluicegate`, `probe`.
fn probes(text: &str) -> Vec<Vec<String>> {
    let lists = text.match_indices("[\"sluicegate\", \"probe\"").map(|(start, _)| &text[start..]);
    let parse = |list: &str| {
        serde_json::Deserializer::from_str(list).into_iter().next().unwrap().expect("a JSON list of the command")
    };
    lists.map(parse).collect()
}

#[test]
fn health_checks_in_ops_succeed_on_a_healthy_gateway_only() {
    let mut gateway = Gateway::start(&format!("[server]\naccept_grace = \"1h\"\n{}", with_admin(&says("x"))));
    let here = format!("http://{}", gateway.admin());
    // The gateway's configuration has port 0, which a probe cannot use: write a file with the actual port.
    let config = gateway.directory().join("probed.toml");
    std::fs::write(&config, format!("[admin]\naddress = \"{}\"\n", gateway.admin())).unwrap();
    let (image, pods) = (probes(&read("Dockerfile")), probes(&read("kubernetes.yaml")));
    assert_eq!((image.len(), pods.len()), (1, 3));
    let succeeds = |arguments: &[String], token: &str| {
        let mut probe = binary();
        let arguments = arguments[1..].iter().map(|word| word.replace("http://127.0.0.1:9180", &here));
        probe.args(arguments).env("SLUICEGATE_CONFIG", &config).env("SLUICEGATE_ADMIN_TOKEN", token);
        probe.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    };
    for arguments in image.iter().chain(&pods) {
        assert!(succeeds(arguments, "sesame"), "{arguments:?}");
        assert!(!succeeds(arguments, "thistle"), "with a wrong token: {arguments:?}");
    }
    // A probe that reads the configuration file could fail after an edit, and Kubernetes would restart the gateway. The
    // probes of the manifest do not read this file.
    std::fs::remove_file(&config).unwrap();
    assert!(pods.iter().all(|arguments| succeeds(arguments, "sesame")));
    gateway.terminate();
    let is_live = |arguments: &&Vec<String>| arguments.iter().any(|word| word == "--live");
    eventually("the gateway is not ready", || {
        pods.iter().filter(|arguments| !is_live(arguments)).all(|arguments| !succeeds(arguments, "sesame"))
    });
    assert!(
        pods.iter().filter(is_live).all(|arguments| succeeds(arguments, "sesame")),
        "a stopping gateway is live and must not be restarted"
    );
    assert_eq!(pods.iter().filter(is_live).count(), 2);
    gateway.terminate();
    assert!(gateway.wait().success());
    assert!(
        !pods.iter().any(|arguments| succeeds(arguments, "sesame")),
        "a probe succeeds although the gateway has stopped"
    );
}
