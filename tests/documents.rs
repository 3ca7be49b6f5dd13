//! Checks of README.md and docs/: `sluicegate check` accepts all configurations, pictures and tables match the code,
//! and all link targets and all named tests exist.

mod support;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use sluicegate::payload::llm::usage::TokenUsage;
use sluicegate::telemetry::access_log::format::{AccessFormat, FieldSet};
use sluicegate::telemetry::access_log::{
    AccessLog, AccessRecord, DecisionInfo, EffectiveLimit, LimitInfo, LogDestination, UpstreamInfo,
};
use sluicegate::telemetry::outcome::RequestOutcome;
use support::gateway::{Gateway, binary};
use support::{admin_listener, google_key, pages, pictures};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Return all Markdown files in the repository root, in docs/ and in ops/.
fn documents() -> Vec<PathBuf> {
    let inside = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let below = ["docs", "ops"].into_iter().flat_map(|directory| pages::markdown(Path::new(directory)));
    let mut files: Vec<_> = inside.chain(below.map(|page| root().join(page))).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    files.sort();
    files
}

/// Complete an example configuration. Add a listener, the upstream `api`, and routes if the example has only limits or
/// an upstream.
fn complete(block: &str) -> String {
    let mut file = block.to_owned();
    if !block.contains("[[listener]]") {
        file.push_str("\n[[listener]]\naddress = \"127.0.0.1:0\"\n");
    }
    if block.contains("upstream = \"api\"") && !block.contains("[upstream.api]") {
        file.push_str("\n[upstream.api]\nservers = [\"http://127.0.0.1:9000\"]\n");
    }
    if !block.contains("[[route]]") && !block.contains("[[descriptor]]") {
        let limits = block.lines().filter_map(|line| line.strip_prefix("[limit.")?.strip_suffix(']'));
        let limits: Vec<_> = limits.collect();
        let to = if block.contains("[upstream.api]") { "upstream = \"api\"" } else { "respond = { status = 200 }" };
        file.push_str(&format!("\n[[route]]\nname = \"r\"\npath = \"/\"\n{to}\n"));
        file.push_str(&format!("limits = {limits:?}\n"));
        let providers = block.lines().filter_map(|line| line.strip_prefix("[auth.")?.strip_suffix(']'));
        let mut providers: Vec<_> = providers.collect();
        for (by, name) in [("\"api-key\"", "keys"), ("\"jwt:", "tokens")] {
            let is_used = block.lines().any(|line| line.starts_with("by = ") && line.contains(by));
            if is_used && !block.contains("[auth.") {
                providers.push(name);
            }
        }
        file.push_str(&format!("identify = {providers:?}\n"));
        if providers.contains(&"keys") && !block.contains("[auth.keys]") {
            file.push_str("[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n");
        }
    }
    file
}

/// Return a minimal configuration for a consumers file. The configuration has the limits and tiers that the file names.
fn minimal_config(consumers: &str, name: &str) -> String {
    let file: toml::Table = toml::from_str(consumers).unwrap();
    let (mut limits, mut tiers) = (BTreeSet::from(["calls"]), BTreeSet::new());
    for consumer in file["consumer"].as_array().unwrap() {
        tiers.extend(consumer.get("tier").and_then(toml::Value::as_str));
        limits.extend(
            consumer.get("limit").and_then(toml::Value::as_table).into_iter().flatten().map(|(name, _)| &**name),
        );
    }
    let tiers: Vec<_> = tiers.iter().map(|tier| format!("{tier} = {{}}")).collect();
    let mut text = format!("[auth.keys]\nkind = \"api-key\"\nconsumers = {name:?}\n");
    for limit in limits {
        text.push_str(&format!(
            "[limit.{limit}]\nby = \"api-key\"\nquota = \"1000/min\"\ntiers = {{ {} }}\n",
            tiers.join(", ")
        ));
    }
    text
}

/// Run `sluicegate check` on each TOML block. A block that begins with `# NAME.toml` or `# NAME.yaml` is also written to
/// this file, so that other blocks of the document can refer to it. If a document does not show `consumers.toml`, the test creates
/// this file with one consumer. It also creates the PEM files (the development certificate and its key), a key of a
/// service account, and files that list one network.
#[test]
fn configurations_of_the_documents_are_accepted() {
    let (mut failures, mut checked) = (String::new(), 0);
    for document in pages::manual() {
        let directory = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("consumers.toml", "[[consumer]]\nname = \"acme\"\nkeys = []\n");
        put("htpasswd", "alice:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/\n");
        let blocks = pages::blocks(&document);
        let is_file = |block: &&pages::Block| matches!(&*block.language, "toml" | "yaml");
        for block in blocks.iter().filter(is_file) {
            if let Some(name) = block.file_name() {
                put(name, &block.text);
            }
        }
        for block in blocks.iter().filter(|block| block.language == "toml") {
            let whole = match block.file_name() {
                Some(name) if block.text.contains("[[consumer]]") => complete(&minimal_config(&block.text, name)),
                _ => complete(&block.text),
            };
            for name in whole.split('"').filter(|text| text.ends_with(".pem") || text.ends_with(".key")) {
                let source = if name.ends_with(".key") { "certs/dev.key" } else { "certs/dev.pem" };
                put(name, &pages::read(source));
            }
            for name in whole.split('"').filter(|text| *text == "vertex.json") {
                put(name, &google_key::generate("https://oauth2.googleapis.com/token").1);
            }
            for name in whole.split('"').filter_map(|text| text.strip_prefix("file:")) {
                put(name, "192.0.2.0/24\n");
            }
            put("checked.toml", &whole);
            let path = directory.path().join("checked.toml");
            let output = binary().arg("check").arg("--offline").arg("--config").arg(&path).output().unwrap();
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            if !output.status.success() || said.contains("no route uses") {
                failures.push_str(&format!("{document}:{}:\n{whole}\n{said}\n", block.line));
            }
            checked += 1;
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(checked >= 20, "{checked} configurations");
}

#[test]
fn committed_pictures_match_the_model() {
    let text = std::fs::read_to_string(root().join("docs/reference/limits.md")).unwrap();
    for (name, svg) in pictures::all() {
        assert!(text.contains(&format!("](../pictures/{name})")), "docs/reference/limits.md does not show {name}");
        let committed = std::fs::read_to_string(root().join("docs/pictures").join(&name)).unwrap_or_default();
        assert!(committed == svg, "docs/pictures/{name} differs from the model; `make pictures` regenerates it");
    }
}

/// Generate the tables and charts of `docs/explanation/performance.md` from `benches/field/results.csv` into a copy of
/// docs/. They must equal the committed tables and charts.
#[test]
fn benchmark_tables_and_charts_match_their_data() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["explanation", "pictures"] {
        std::fs::create_dir(directory.path().join(name)).unwrap();
    }
    let page = pages::read("docs/explanation/performance.md");
    let copy = directory.path().join("explanation/performance.md");
    std::fs::write(&copy, &page).unwrap();
    let script = root().join("benches/field/field.py");
    let output = Command::new("python3").arg("-B").arg(script).arg("--write").arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let remedy = "`python3 -B benches/field/field.py --write docs` regenerates it";
    assert!(std::fs::read_to_string(&copy).unwrap() == page, "performance.md differs from results.csv; {remedy}");
    let charts: Vec<_> = std::fs::read_dir(directory.path().join("pictures")).unwrap().map(Result::unwrap).collect();
    assert!(charts.len() == 3, "{charts:?}");
    for chart in charts {
        let name = chart.file_name().into_string().unwrap();
        let committed = std::fs::read_to_string(root().join("docs/pictures").join(&name)).unwrap_or_default();
        assert!(
            committed == std::fs::read_to_string(chart.path()).unwrap(),
            "{name} differs from results.csv; {remedy}"
        );
        assert!(page.contains(&format!("](../pictures/{name})")), "performance.md does not show {name}");
    }
}

/// Return the cells of all table rows of a page that have `columns` cells and start with a name in backticks.
fn reference_rows(page: &str, columns: usize) -> Vec<Vec<&str>> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|line| line.trim_matches(['|', ' ']).split(" | ").collect::<Vec<_>>());
    rows.filter(|cells| cells.len() == columns).collect()
}

/// Return the texts in backticks in a table cell.
fn code(cell: &str) -> BTreeSet<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Labels whose values the documentation cannot list, such as names from the configuration, server addresses and
/// versions. For all other labels, the documentation must list the values.
const NAME_LABELS: [&str; 15] = [
    "route",
    "limit",
    "upstream",
    "server",
    "provider",
    "version",
    "le",
    "name",
    "commit",
    "rustc",
    "worker",
    "revision",
    "domain",
    "descriptor",
    "outcome",
];

/// Return the label names and values of a sample.
fn labels(sample: &str) -> Vec<(&str, &str)> {
    let Some((_, rest)) = sample.split_once('{') else { return Vec::new() };
    let labels = rest.rsplit_once("\"}").unwrap().0.split("\",");
    labels.map(|label| label.split_once("=\"").unwrap()).collect()
}

/// Each row of the table in `docs/reference/metrics.md` has the name, the type, the labels, the unit and the meaning of
/// a metric.
#[test]
fn manual_lists_exactly_the_exported_metrics() {
    let limited = "[limit.ip]\nby = \"ip\"\nquota = \"9/s\"\n\
                   [limit.tokens]\nby = \"ip\"\nquota = \"9000/min\"\nunit = \"tokens\"\ncost = { llm = \"auto\" }\n[upstream.api]\nservers = [\"http://127.0.0.1:1\"]\n\
                   [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"api\"\nlimits = [\"ip\", \"tokens\"]\nmirror = { upstream = \"api\" }\n";
    let providers = "[auth.sso]\nkind = \"forward\"\nurl = \"http://127.0.0.1:1/\"\n\
                     [auth.tokens]\nkind = \"jwt\"\njwks_url = \"http://127.0.0.1:1/\"\n";
    // Metrics of certificates exist only if a certificate is configured.
    let certificate = format!("{}/tests/certs/one", env!("CARGO_MANIFEST_DIR"));
    let listeners = format!(
        "[[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.2:0\"\n\
         tls.certificates = [{{ cert = \"{certificate}.pem\", key = \"{certificate}.key\" }}]\n"
    );
    let xds = "[ratelimit]\nxds = { url = \"http://127.0.0.1:1\", ready_after = \"start\" }\n";
    let gateway = Gateway::start(&admin_listener::with_admin(&format!("{limited}{providers}{listeners}{xds}")));
    // A worker creates its metrics when it serves a request.
    assert_eq!(gateway.get("/unknown").status, 404);
    let exposition = admin_listener::ask(&gateway, "/metrics");
    let exposition = exposition.text();
    let page = pages::read("docs/reference/metrics.md");
    let documented = reference_rows(&page, 5);
    let mut exported = BTreeSet::new();
    for (name, kind) in exposition.lines().filter_map(|line| line.strip_prefix("# TYPE sluicegate_")?.split_once(' ')) {
        exported.insert(name);
        let row = documented.iter().find(|row| row[0] == format!("`{name}`"));
        let row = row.unwrap_or_else(|| panic!("docs/reference/metrics.md does not list {name}"));
        assert_eq!(row[1], kind, "type of {name}");
        let is_sample = |line: &&str| {
            let rest = line.strip_prefix("sluicegate_").and_then(|line| line.strip_prefix(name));
            let suffixes = ["{", " ", "_bucket{", "_sum{", "_sum ", "_count{", "_count "];
            rest.is_some_and(|rest| suffixes.iter().any(|suffix| rest.starts_with(suffix)))
        };
        let samples: Vec<_> = exposition.lines().filter(is_sample).flat_map(labels).collect();
        let names: BTreeSet<_> = samples.iter().map(|(label, _)| *label).filter(|label| *label != "le").collect();
        // A metric without samples has no labels to compare. In this test, these are the metrics of ACME.
        assert!(samples.is_empty() || code(row[2]) == names, "labels of {name}: {names:?}");
        for (label, value) in samples.iter().filter(|(label, _)| !NAME_LABELS.contains(label)) {
            let is_documented = page.contains(&format!("| `{value}` |")) || code(row[4]).contains(value);
            assert!(is_documented, "{name}: {label} = {value} is not documented");
        }
    }
    assert!(exported.len() > 20, "{exported:?}");
    let listed: BTreeSet<_> = documented.iter().map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(listed, exported);
}

#[test]
fn manual_lists_exactly_the_outcomes() {
    let page = pages::read("docs/reference/access-log.md");
    let (_, section) = page.split_once("### Values of `outcome`").unwrap();
    let rows = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let first_cells = rows.skip(2).map(|row| row.split('|').nth(1).unwrap());
    let listed: BTreeSet<_> =
        first_cells.flat_map(|cell| cell.split(',')).map(|word| word.trim().trim_matches('`')).collect();
    assert_eq!(listed, RequestOutcome::ALL.map(RequestOutcome::label).into());
}

/// Write an access log record in a format and return the line.
fn access_log_line(format: AccessFormat, record: &AccessRecord<'_>) -> String {
    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);
    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let buffer = Buffer::default();
    let log = AccessLog::start(format, 1.0, LogDestination::Stream(Box::new(buffer.clone()))).unwrap();
    log.write(record);
    log.flush();
    let bytes = buffer.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap().trim_end().to_owned()
}

fn keys(object: &Value) -> BTreeSet<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

/// Check that a table lists all fields, and that a field is always present if and only if its `absent` column says
/// `never`.
fn assert_fields(rows: &[Vec<&str>], absent_column: usize, all: &Value, minimal: &Value) {
    let names: BTreeSet<_> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(names, keys(all));
    let always: BTreeSet<_> =
        rows.iter().filter(|row| row[absent_column] == "never").map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(always, keys(minimal));
    for row in rows {
        let value = &all[row[0].trim_matches('`')];
        let kind = match row[absent_column - 2] {
            "integer" => value.is_u64(),
            "number" => value.is_f64(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "object" => value.is_object(),
            "list of strings" => value.as_array().is_some_and(|items| items.iter().all(Value::is_string)),
            "list of objects" => value.as_array().is_some_and(|items| items.iter().all(Value::is_object)),
            other => panic!("unknown type {other}"),
        };
        assert!(kind, "{}: {value} is not of the documented type", row[0]);
    }
}

#[test]
fn manual_lists_exactly_the_access_log_fields() {
    let check = |decision, remaining: Option<u64>| LimitInfo {
        limit: "hour".into(),
        identity: 1,
        cost: 2,
        decision,
        remaining,
        reserved: remaining,
        settled: remaining,
        estimated: remaining.is_some(),
        limit_index: 0,
    };
    let decision = DecisionInfo {
        decision: "allowed",
        decided_by: Some("store"),
        effective_limit: Some(EffectiveLimit { limit: "hour".into(), remaining: 7, identity: 1 }),
        duration: Duration::from_micros(1_250),
        decided_at: Some(1_764_000_000_123_500),
        shadow_denied: vec!["trial".into()],
        limits: vec![check(Some("allowed"), Some(7)), check(None, None)],
        start_offset: Duration::ZERO,
    };
    let upstream = UpstreamInfo {
        upstream: "api".into(),
        server: Some("10.0.0.1:80".into()),
        upstream_status: Some(200),
        duration: Duration::from_millis(7),
        retries: 1,
        start_offset: Duration::ZERO,
    };
    let minimal = AccessRecord {
        time: 1_764_000_000_123_456,
        client: [127, 0, 0, 1].into(),
        method: "GET",
        scheme: "https",
        host: None,
        path: "/a",
        protocol: "HTTP/2.0",
        status: 200,
        bytes: 3,
        bytes_received: None,
        complete: false,
        duration_ms: Duration::from_micros(12_345),
        route: None,
        outcome: "ok",
        reason: None,
        consumer: None,
        decision: None,
        model: None,
        tokens: None,
        upstream: None,
        referer: None,
        user_agent: None,
        request_id: "id",
        trace_id: None,
        sample_rate: None,
    };
    let tokens =
        TokenUsage { input: 5, cached_input: 1, cache_write_5m: 1, output: 2, reasoning: 1, ..TokenUsage::default() };
    let all = AccessRecord {
        host: Some("a.test"),
        bytes_received: Some(5),
        route: Some("a"),
        reason: Some("r"),
        consumer: Some("alice"),
        referer: Some("/b"),
        user_agent: Some("curl"),
        decision: Some(&decision),
        model: Some("m"),
        tokens: Some(&tokens),
        upstream: Some(&upstream),
        trace_id: Some(1),
        sample_rate: Some(0.25),
        ..minimal
    };
    let page = pages::read("docs/reference/access-log.md");
    let json =
        |record| serde_json::from_str::<Value>(&access_log_line(AccessFormat::Json(FieldSet::ALL), record)).unwrap();
    let (all_fields, minimal_fields) = (json(&all), json(&minimal));
    let rows = reference_rows(&page, 6);
    assert_fields(&rows, 4, &all_fields, &minimal_fields);
    let limits = &all_fields["limits"];
    let limit_rows: Vec<_> = reference_rows(&page, 5);
    assert_fields(&limit_rows, 3, &limits[0], &limits[1]);

    let text = access_log_line(AccessFormat::Text, &all);
    let words: Vec<_> = text.split(' ').collect();
    let mut named = BTreeSet::new();
    for row in &rows {
        if let Some(position) = row[1].strip_prefix("position ") {
            // Optional fields stand before the field at the last position.
            let position: usize = position.split(',').next().unwrap().parse().unwrap();
            let name = row[0].trim_matches('`');
            let expected = match name {
                "time" => "2025-11-24T16:00:00.123456Z".to_owned(),
                "duration_ms" => "12.345ms".to_owned(),
                _ => all_fields[name].as_str().map_or_else(|| all_fields[name].to_string(), str::to_owned),
            };
            assert_eq!(words.get(position - 1), Some(&&*expected), "{name}: {text}");
        } else if row[1] != "–" {
            named.extend(code(row[1]));
        }
    }
    // Skip the fields of single limits. Their names begin with the name of the limit, here `hour`.
    let words = words.iter().filter(|word| !word.starts_with("hour."));
    let shown = words.filter_map(|word| word.find('=').map(|at| &word[..=at]));
    assert_eq!(named.into_iter().filter(|name| name.ends_with('=')).collect::<BTreeSet<_>>(), shown.collect());
}

/// Return the text of a heading without its markup: `code` and **bold** keep their text, [links](target) their name.
fn plain_text(heading: &str) -> String {
    let mut plain = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        let (start, name) = before.rsplit_once('[').unwrap_or((before, ""));
        plain.push_str(start);
        plain.push_str(name);
        rest = after.split_once(')').map_or("", |(_, behind)| behind);
    }
    plain.push_str(rest);
    plain.replace(['`', '*'], "")
}

/// Return the anchors of the headings, as GitHub and mdBook generate them. An anchor consists of letters in lower case,
/// digits, `-` and `_`, with `-` for each space. A repeated anchor gets a number.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut anchors, mut is_code) = (BTreeSet::new(), false);
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        let level = line.len() - heading.len();
        let Some(heading) = heading.strip_prefix(' ').filter(|_| !is_code && (1..=6).contains(&level)) else {
            continue;
        };
        let lower = plain_text(heading.trim()).to_lowercase();
        let allowed = lower.chars().filter(|c| c.is_alphanumeric() || ['-', '_', ' '].contains(c));
        let anchor = allowed.collect::<String>().replace(' ', "-");
        let numbered = (1..).map(|number| format!("{anchor}-{number}"));
        let mut candidates = std::iter::once(anchor.clone()).chain(numbered);
        anchors.extend(candidates.find(|candidate| !anchors.contains(candidate)));
    }
    anchors
}

#[test]
fn anchors_are_generated_as_on_github() {
    let page = "# A page\n## `[limit.NAME]`\n```toml\n# no heading\n```\n## nginx: `limit_req`\n## A page\n### See [this, *too*](x.md#y)!\n";
    let expected = ["a-page", "a-page-1", "limitname", "nginx-limit_req", "see-this-too"];
    assert_eq!(anchors(page), expected.map(str::to_owned).into());
}

#[test]
fn links_between_documents_have_targets() {
    let (mut links, mut failures) = ([0, 0], String::new());
    for document in documents() {
        let text = std::fs::read_to_string(&document).unwrap();
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap();
            if link.contains("://") {
                continue;
            }
            let (target, anchor) = link.split_once('#').map_or((link, None), |(target, anchor)| (target, Some(anchor)));
            let file = match target {
                "" => document.clone(),
                _ => document.parent().unwrap_or(Path::new(".")).join(target),
            };
            let found = match anchor {
                None => file.exists(),
                Some(anchor) => std::fs::read_to_string(&file).is_ok_and(|text| anchors(&text).contains(anchor)),
            };
            if !found {
                failures.push_str(&format!("{} links to {link}\n", document.display()));
            }
            links[usize::from(anchor.is_some())] += 1;
        }
    }
    assert!(failures.is_empty(), "targets that do not exist:\n{failures}");
    assert!(links.iter().all(|count| *count >= 20), "{links:?} links without and with an anchor found");
}

#[test]
fn kubernetes_page_shows_the_probes_and_the_termination_of_the_manifest() {
    let manifest = pages::read("ops/kubernetes.yaml");
    let lines: BTreeSet<_> = manifest.lines().map(str::trim).collect();
    let blocks = pages::blocks("docs/how-to/kubernetes.md");
    // The first block has values of the chart, which `make test-ops` renders.
    let mut shown: Vec<_> = blocks.iter().filter(|block| block.language == "yaml").skip(1).take(2).collect();
    shown.extend(blocks.iter().find(|block| block.language == "toml"));
    for (block, key) in shown.iter().zip(["readinessProbe", "terminationGracePeriodSeconds", "accept_grace"]) {
        assert!(block.text.contains(key), "{}", block.text);
    }
    for line in shown.iter().flat_map(|block| block.text.lines()) {
        assert!(lines.contains(line.trim()), "ops/kubernetes.yaml does not have: {line}");
    }
}

/// Return the targets of the links in a text, except URLs.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).map(|rest| rest.split([')', '#']).next().unwrap());
    targets.filter(|target| !target.contains("://")).collect()
}

#[test]
fn summary_lists_every_page_once() {
    let summary = pages::read("docs/SUMMARY.md");
    let mut listed: Vec<_> = links(&summary).into_iter().map(|page| format!("docs/{page}")).collect();
    listed.sort();
    let mut pages = pages::markdown(Path::new("docs"));
    pages.retain(|page| page != "docs/SUMMARY.md");
    pages.sort();
    assert_eq!(listed, pages);
}

#[test]
fn readme_lists_every_command() {
    let help = String::from_utf8(binary().arg("--help").output().unwrap().stdout).unwrap();
    let commands = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let commands = commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let commands: Vec<_> = commands.filter(|name| !name.is_empty() && *name != "help" && *name != "run").collect();
    assert!(commands.len() > 10, "{commands:?}");
    let page = pages::read("README.md");
    let table = page.split("\n## Commands and documentation\n").nth(1).unwrap().split("\n## ").next().unwrap();
    for command in commands {
        assert!(table.contains(&format!("`{command}`")), "README.md does not name `{command}`");
    }
}

/// Return the help of a command.
fn help(command: &[String]) -> String {
    let output = binary().args(command).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn manual_lists_every_command_and_option() {
    let page = pages::read("docs/reference/commands.md");
    let mut commands = vec![Vec::new()];
    let (mut index, mut options) = (0, BTreeSet::new());
    while let Some(command) = commands.get(index).cloned() {
        let help = help(&command);
        assert!(
            page.contains(&format!("`{}", command.join(" "))),
            "docs/reference/commands.md does not list {command:?}"
        );
        let listed = help.split("Commands:\n").nth(1).map_or("", |rest| rest.split("\n\n").next().unwrap());
        let listed = listed.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        for name in listed.filter(|name| !name.is_empty() && *name != "help") {
            commands.push([&command[..], &[name.to_owned()]].concat());
        }
        let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
        let words = lines.flat_map(str::split_whitespace).filter(|word| word.starts_with("--"));
        options.extend(words.map(|word| word.trim_end_matches(',').to_owned()));
        index += 1;
    }
    assert!(commands.len() > 18 && options.len() > 20, "{commands:?} {options:?}");
    for option in options {
        assert!(page.contains(&format!("`{option}")), "docs/reference/commands.md does not list {option}");
    }
}

/// Check that `FILE::TEST`, in backquotes, is a test function in `tests/`.
fn assert_test_exists(test: &str, row: &str) {
    let name = test.strip_prefix('`').and_then(|test| test.strip_suffix('`')?.split_once("::"));
    let (file, function) = name.unwrap_or_else(|| panic!("{test} is not `FILE::TEST`: {row}"));
    let paths = [format!("tests/it/{file}.rs"), format!("tests/{file}.rs"), format!("tests/{file}/main.rs")];
    let text = paths.iter().find_map(|path| std::fs::read_to_string(root().join(path)).ok());
    let text = text.unwrap_or_else(|| panic!("tests/ has no file of {test}: {row}"));
    let first_line = format!("fn {function}() {{");
    // A test function has `#[test]` or `#[tokio::test(…)]` among its attributes.
    let has_test_attribute = |above: &str| {
        let attributes = above.lines().rev().take_while(|line| line.starts_with("#["));
        attributes.into_iter().any(|line| line == "#[test]" || line.starts_with("#[tokio::test"))
    };
    let mut above = text.match_indices(&first_line).map(|(start, _)| {
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        &text[..line_start]
    });
    assert!(above.any(has_test_attribute), "there is no test {test}: {row}");
}

/// Return the rows of the first table after `heading`, without its header.
fn rows<'p>(page: &'p str, heading: &str) -> Vec<&'p str> {
    let section = page.split(&format!("\n{heading}\n")).nth(1).unwrap_or_else(|| panic!("no {heading}"));
    let table = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    table.skip(2).collect()
}

/// Return all Rust files below a directory.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Return the content of the string literal at the start of a text.
fn literal(text: &str) -> Option<&str> {
    text.strip_prefix('"')?.split('"').next()
}

#[test]
fn manual_lists_every_environment_variable() {
    let page = pages::read("docs/reference/process.md");
    let rows = rows(&page, "## Environment variables");
    let documented: BTreeSet<_> =
        rows.iter().flat_map(|row| code(row.trim_start_matches("| ").split(" | ").next().unwrap())).collect();
    let texts: Vec<_> =
        sources(&root().join("src")).iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let source = texts.join("\n");
    let constant = |rest: &str| {
        let name = rest.split(|char: char| !char.is_ascii_uppercase() && char != '_').next().unwrap();
        let (_, value) = source.split_once(&format!("const {name}: &str = "))?;
        literal(value)
    };
    let accesses = ["env::var(", "env::var_os(", ".env(", ".env_remove("];
    let accesses = accesses.iter().flat_map(|access| source.split(access).skip(1));
    // `name` is a variable of the configuration, which the administrator chooses.
    let accesses = accesses.filter(|rest| !rest.starts_with("name)"));
    let variable = |rest: &'_ str| {
        let line = rest.lines().next().unwrap().to_owned();
        literal(rest)
            .or_else(|| constant(rest))
            .unwrap_or_else(|| panic!("variable with an unknown name: {line}"))
            .to_owned()
    };
    let mut named: BTreeSet<_> = accesses.map(variable).collect();
    // Environment variables of command-line options.
    named.extend(source.split(", env = ").skip(1).map(|rest| literal(rest).unwrap().to_owned()));
    assert!(named.len() >= 6, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !documented.contains(&***name)).collect();
    assert!(missing.is_empty(), "docs/reference/process.md does not list {missing:?}");
    let unused: Vec<_> =
        documented.iter().filter(|name| name.starts_with("SLUICEGATE_") && !named.contains(**name)).collect();
    assert!(unused.is_empty(), "src/ does not use {unused:?}");
}

#[test]
fn manual_lists_every_variable_of_envoyproxy_ratelimit() {
    let page = pages::read("docs/how-to/migrate/ratelimit.md");
    let is_variable = |name: &&str| {
        let is_upper = name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        is_upper && (name.contains('_') || ["HOST", "PORT"].contains(name)) && *name != "GRPC_XDS_SOTW"
    };
    let section = page.split("\n## Variables\n").nth(1).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let documented: BTreeSet<_> = rows.flat_map(code).filter(is_variable).collect();
    let source = std::fs::read_to_string(root().join("src/config/ratelimit_env.rs")).unwrap();
    let source = source.split("#[cfg(test)]").next().unwrap();
    let read: BTreeSet<_> = source.split('"').skip(1).step_by(2).filter(is_variable).collect();
    assert!(read.len() > 60, "{read:?}");
    assert_eq!(documented, read);
}

#[test]
fn runbook_has_a_section_for_every_alert() {
    let alerts = pages::read("ops/alerts.yml");
    let page = pages::read("docs/reference/runbook.md");
    let mut named = BTreeSet::new();
    for rule in alerts.split("- alert: ").skip(1) {
        let name = rule.lines().next().unwrap();
        assert_eq!(page.matches(&format!("\n## {name}\n")).count(), 1, "docs/reference/runbook.md: section {name}");
        let runbook = format!("runbook: docs/reference/runbook.md#{}\n", name.to_lowercase());
        assert!(rule.contains(&runbook), "ops/alerts.yml: {name} needs `{}`", runbook.trim_end());
        named.insert(name);
    }
    assert!(named.len() >= 14, "{named:?}");
    let sections =
        page.lines().filter_map(|line| line.strip_prefix("## ")).filter(|name| name.starts_with("Sluicegate"));
    assert_eq!(sections.collect::<BTreeSet<_>>(), named);
    // The page quotes messages of the process log. They must exist in the source code.
    let text = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let texts = sources(&root().join("src")).into_iter().map(|file| std::fs::read_to_string(file).unwrap());
    let source = texts.collect::<String>();
    let messages: Vec<_> = text.split('"').skip(1).step_by(2).filter(|quoted| quoted.contains(' ')).collect();
    assert!(messages.len() >= 4, "{messages:?}");
    for message in messages {
        assert!(
            source.contains(&format!("\"{message}")),
            "docs/reference/runbook.md quotes `{message}`, which src/ does not have"
        );
    }
    for section in page.split("\n## Sluicegate").skip(1) {
        for part in ["**Meaning.**", "**First look.**", "**What to do.**"] {
            assert!(section.contains(part), "{part} is missing in Sluicegate{}", section.lines().next().unwrap());
        }
    }
}

#[test]
fn every_alert_has_unit_tests_in_which_it_fires_and_in_which_it_does_not() {
    let alerts = pages::read("ops/alerts.yml");
    let alerts: BTreeSet<_> = alerts.split("- alert: ").skip(1).map(|rule| rule.lines().next().unwrap()).collect();
    let tests = pages::read("ops/alerts.test.yml");
    let healthy = tests.split("\n  - name: ").nth(1).unwrap();
    assert!(healthy.starts_with("healthy gateways raise no alert\n"), "{healthy}");
    for alert in &alerts {
        let test = format!("- alertname: {alert}\n");
        let mut fires = tests
            .split(&test)
            .skip(1)
            .filter(|rest| rest.lines().nth(1).is_some_and(|line| line.trim() == "exp_alerts:"));
        assert!(fires.next().is_some(), "ops/alerts.test.yml: no test expects {alert}");
        let silent = format!("- {{ alertname: {alert}, eval_time: ");
        assert!(healthy.contains(&silent), "ops/alerts.test.yml: {alert} is missing in the test of healthy gateways");
    }
    let tested = tests.split("alertname: ").skip(1).map(|rest| rest.split([',', '\n']).next().unwrap());
    assert_eq!(tested.collect::<BTreeSet<_>>(), alerts);
}

/// Check that all tests which the last cell of a row names exist.
fn assert_tests_exist(row: &str) {
    let tests = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap();
    tests.split(", ").for_each(|test| assert_test_exists(test, row));
}

#[test]
fn every_situation_of_the_manual_names_tests_that_exist() {
    let page = pages::read("docs/explanation/failures.md");
    let rows = rows(&page, "## Situations");
    assert!(rows.len() >= 12, "{rows:?}");
    rows.into_iter().for_each(assert_tests_exist);
}

#[test]
fn every_guarantee_of_exactness_names_tests_that_exist() {
    let page = pages::read("docs/explanation/exactness.md");
    let rows = rows(&page, "## Tests");
    assert!(rows.len() >= 8, "{rows:?}");
    rows.into_iter().for_each(assert_tests_exist);
}

#[test]
fn fault_table_is_complete_and_names_tests_that_exist() {
    let page = pages::read("docs/testing.md");
    let rows = rows(&page, "## Fault table");
    let numbers: Vec<usize> = rows.iter().map(|row| row.split(' ').nth(1).unwrap().parse().unwrap()).collect();
    assert!(numbers.len() >= 73, "{} rows", numbers.len());
    assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>());
    for row in rows {
        let run = row.rsplit(" | ").nth(1).unwrap();
        assert!(["Q", "L", "Q, L"].contains(&run), "Q, L or both: {row}");
        // `make test` skips these files, because Cargo.toml excludes them. So their tests count as long runs.
        let is_long = ["`long_edges::", "`long_streams::", "`soak::"].iter().any(|file| row.contains(file));
        assert_eq!(run == "L", is_long, "{row}");
        assert_tests_exist(row);
    }
}

#[test]
fn planted_faults_name_tests_that_exist() {
    let page = pages::read("docs/testing.md");
    let rows = rows(&page, "## Planted faults");
    assert!(rows.len() >= 40, "{rows:?}");
    rows.into_iter().for_each(assert_tests_exist);
}
