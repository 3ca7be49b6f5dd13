//! Rules that the compiler does not check: modules import only from lower layers, the limiter imports no modules outside
//! the limiter except the lowest layer, no catch-all arm handles a new algorithm, route action or provider kind, lists of them
//! are complete, and code reads every key of the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The layers from top to bottom. Modules in the same row must not import each other.
const ROWS: &[&[&str]] = &[
    &["main"],
    &["cli"],
    &["tools"],
    &["app"],
    &["admin"],
    &["listener"],
    &["proxy"],
    &["snapshot"],
    &["identity", "telemetry", "upstream"],
    &["config", "http", "routing", "tls"],
    &["limiter", "payload"],
    &["boxed", "clock"],
];

/// The layers inside top-level modules from top to bottom. The module itself, such as `src/limiter.rs`, is above them.
const ROOMS: &[(&str, &[&[&str]])] = &[
    (
        "admin",
        &[
            &["api"],
            &["configuration"],
            &["request"],
            &["events", "statsd"],
            &["metrics"],
            &["state"],
            &["connections", "current", "heartbeats", "response", "usage"],
        ],
    ),
    (
        "cli",
        &[
            &[
                "certificates",
                "check",
                "completions",
                "explain",
                "import",
                "init",
                "inspect",
                "key",
                "man",
                "overrides",
                "probe",
                "ratelimit",
                "reload",
                "renew",
                "replay",
                "reset",
                "schema",
                "status",
                "top",
                "usage",
            ],
            &["against", "doctor", "run"],
            &["admin"],
            &["shared"],
        ],
    ),
    (
        "config",
        &[
            &["file"],
            &["include", "route_defaults"],
            &["ratelimit_env", "unknown_keys"],
            &["environment", "foreign"],
            &["syntax"],
            &["value_types"],
            &["sources"],
            &["error", "value_path"],
            &["diff", "secrets"],
            &["file_schema"],
            &["gateway"],
            &["tables"],
            &["shorthand"],
            &["schema", "spanned", "yaml"],
        ],
    ),
    (
        "http",
        &[
            &["error_pages", "grpc"],
            &["compression", "cors", "problem", "request_body"],
            &["body"],
            &["flow", "google_account"],
            &["memory_guard"],
            &[
                "aws_signature",
                "body_limits",
                "headers",
                "ratelimit_headers",
                "slow_readers",
                "target",
                "text",
                "upgrade",
                "url",
            ],
        ],
    ),
    (
        "identity",
        &[
            &["display"],
            &["spec"],
            &["auth"],
            &["api_key"],
            &["basic", "forward", "jwt"],
            &["verification"],
            &["access", "client_cert", "consumer", "hash_queue"],
        ],
    ),
    (
        "limiter",
        &[
            &["admin"],
            &["fallback", "overrides"],
            &["decision", "singleflight", "wait_queue"],
            &["settlement"],
            &["shared_data"],
            &["denial_cache", "prefetch", "store"],
            &["memory", "redis"],
            &["spec", "verdict"],
            &["notify"],
            &["algorithm", "usage"],
            &["address", "gateway_count", "key", "metrics", "pacing", "quota"],
        ],
    ),
    (
        "proxy",
        &[
            &["decision_api", "ext_authz", "ratelimit_json"],
            &["named_limits", "ratelimit_service"],
            &["decisions", "held_decisions", "record"],
            &["descriptor_checks", "holdings"],
            &["local_reply"],
            &["admission", "forward", "forward_auth"],
            &["llm", "mirror", "rate_limit"],
            &["body"],
            &["request"],
            &["config_snapshot", "rejection"],
            &["metrics"],
            &["mirror_state"],
        ],
    ),
    (
        "snapshot",
        &[
            &["decision_routes", "settings"],
            &["descriptors", "routes", "xds"],
            &["descriptor_files"],
            &["auth"],
            &["consumers"],
            &["limits"],
            &["listeners", "notify", "route_match", "route_retry"],
            &["decisions", "header_rules", "identities", "remote_auth", "route_action", "statsd"],
            &["cost", "upstreams"],
            &["memory", "validator"],
        ],
    ),
    (
        "upstream",
        &[
            &["dns", "health_check"],
            &["cluster"],
            &["retry"],
            &["connection_pool"],
            &["endpoint"],
            &["fetch", "settings"],
            &["error"],
            &["connector", "health"],
            &["metrics"],
        ],
    ),
];

/// Modules of the limiter that all modules may import: the cells of metrics.
const ANYONE: &[&str] = &["limiter::metrics"];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Return the module path: `src/limiter/redis/script.rs` is `["limiter", "redis", "script"]`.
fn module(path: &Path) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let inner = path.strip_prefix(root).unwrap().with_extension("");
    inner.iter().map(|part| part.to_string_lossy().into_owned()).collect()
}

/// Return the paths that a file imports from this crate, as `a::b::…`. Imports of the file's tests do not count.
fn imports(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]").next().unwrap();
    let crate_name = if path.ends_with("main.rs") { "sluicegate::" } else { "crate::" };
    let mut found = Vec::new();
    // Paths with `super::` are imports, too: in `a::b::c`, `super::` is `crate::a::b::`.
    let own = module(path);
    for (at, _) in code.match_indices("super::").filter(|(at, _)| !code[..*at].ends_with("super::")) {
        let chain = code[at..].split("super::").take_while(|part| part.is_empty()).count();
        let rest = &code[at + chain * "super::".len()..];
        let base = own[..own.len() - chain].join("::");
        let names = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap().split(',').map(|item| item.trim().to_owned()).collect(),
            None => {
                vec![rest.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).next().unwrap().to_owned()]
            }
        };
        found.extend(names.into_iter().map(|name| format!("{base}::{name}")));
    }
    // `pub(in crate::a)` is no import.
    for (at, _) in code.match_indices(crate_name).filter(|(at, _)| !code[..*at].ends_with("(in ")) {
        let rest = &code[at + crate_name.len()..];
        match rest.strip_prefix('{') {
            // `crate::{a, b::c}`
            Some(list) => found.extend(list.split('}').next().unwrap().split(',').map(|item| item.trim().to_owned())),
            None => {
                let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(rest.len());
                found.push(rest[..end].trim_end_matches(':').to_owned());
            }
        }
    }
    found
}

fn row(rows: &[&[&str]], name: &str) -> Option<usize> {
    rows.iter().position(|row| row.contains(&name))
}

#[test]
fn imports_point_downward() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    assert!(files.len() > 30, "too few source files were found");
    let mut wrong = Vec::new();
    let mut arrows: BTreeMap<(String, String), usize> = BTreeMap::new();
    for file in &files {
        let own = module(file);
        if own == ["lib"] {
            continue;
        }
        let own_row = row(ROWS, &own[0]).unwrap_or_else(|| panic!("{} is in no row", own[0]));
        for import in imports(file) {
            let mut parts = import.split("::");
            let other = parts.next().unwrap();
            if ANYONE.iter().any(|allowed| import.starts_with(allowed)) {
                continue;
            }
            let Some(other_row) = row(ROWS, other) else {
                wrong.push(format!("{} imports `{import}` through the crate root", own.join("::")));
                continue;
            };
            if other != own[0] {
                *arrows.entry((own[0].clone(), other.to_owned())).or_default() += 1;
                if other_row <= own_row {
                    wrong.push(format!("{} imports {import}: upward or sideways", own.join("::")));
                }
            } else if let Some((room, rows)) = ROOMS.iter().find(|(room, _)| own[0] == *room && own.len() > 1) {
                let inner = parts.next().unwrap_or_default();
                let from = row(rows, &own[1]).unwrap_or_else(|| panic!("{} is in no row of `{room}`", own[1]));
                if inner != own[1] && row(rows, inner).is_none_or(|to| to <= from) {
                    wrong.push(format!("{} imports {import}: upward or sideways inside `{room}`", own.join("::")));
                }
            }
        }
    }
    assert!(arrows.len() > 10, "too few imports were found: {arrows:?}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn limiter_imports_no_http() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/limiter"), &mut files);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for word in ["http::", "hyper::", "crate::config"] {
            assert!(!text.contains(word), "{} names {word}", file.display());
        }
    }
}

/// Enums whose variants are features. A match on one of them lists all variants, so that the compiler reports each place
/// that a new variant must extend.
const FEATURES: [&str; 3] = ["Rule", "RouteAction", "ProviderKind"];

/// Return whether a pattern names a variant of a feature.
fn names_variant(pattern: &str) -> bool {
    FEATURES.iter().any(|name| {
        pattern.match_indices(&format!("{name}::")).any(|(at, _)| !pattern[..at].ends_with(char::is_alphanumeric))
    })
}

/// Return the patterns of the arms of each `match` in a code without comments.
fn matches(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("match ") {
        let Some(open) = code[at..].find('{').map(|open| at + open + 1) else { continue };
        let (mut depth, mut start, mut in_pattern, mut patterns) = (0, open, true, Vec::new());
        for (at, sign) in code[open..].char_indices().map(|(at, sign)| (open + at, sign)) {
            match sign {
                '(' | '[' | '{' => depth += 1,
                // The end of the match.
                '}' if depth == 0 => break,
                ')' | ']' | '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 && in_pattern && code[at..].starts_with("=>") {
                patterns.push(code[start..at].trim().trim_start_matches(',').trim().to_owned());
                in_pattern = false;
            } else if depth == 0 && !in_pattern && matches!(sign, ',' | '}') {
                (start, in_pattern) = (at + 1, true);
            }
        }
        found.push(patterns);
    }
    found
}

fn is_catch_all(pattern: &str) -> bool {
    let pattern = pattern.split(" if ").next().unwrap().trim();
    pattern == "_" || pattern.starts_with("(_,") || pattern.chars().all(|c| c.is_ascii_lowercase() || c == '_')
}

#[test]
fn features_have_no_catch_all_arms() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let (mut checked, mut wrong) = (0, Vec::new());
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let code: String = text
            .split("#[cfg(test)]")
            .next()
            .unwrap()
            .lines()
            .map(|line| line.split("//").next().unwrap().to_owned() + "\n")
            .collect();
        for patterns in matches(&code).iter().filter(|patterns| patterns.iter().any(|pattern| names_variant(pattern))) {
            checked += 1;
            if let Some(pattern) = patterns.iter().find(|pattern| is_catch_all(pattern)) {
                wrong.push(format!("{}: `{pattern}` beside {}", file.display(), patterns.join(", ")));
            }
        }
        // Facts of an algorithm are methods of `Rule`, which list all algorithms.
        if !file.ends_with("limiter/algorithm.rs") {
            for test in ["matches!(", "if let Rule::", "let Rule::"] {
                let tests = code.match_indices(test).map(|(at, _)| code[at..].split([';', '{']).next().unwrap());
                wrong.extend(
                    tests
                        .filter(|text| text.contains(" Rule::"))
                        .map(|text| format!("{}: {text} is a fact of an algorithm", file.display())),
                );
            }
        }
    }
    assert!(checked > 25, "too few matches were found: {checked}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Places that construct or list each variant of an enum. The compiler does not report a variant that they lack.
const LISTS: [(&str, &str, &[&str]); 4] = [
    (
        "Rule",
        "src/limiter/algorithm.rs",
        &[
            "src/snapshot/limits.rs",
            "tests/support/stores.rs",
            "tests/support/random.rs",
            "tests/support/pictures.rs",
            "tests/support/fixtures.rs",
            "tests/it/invariants.rs",
            "tests/simulation/schedule.rs",
            "tests/simulation/store.rs",
            "tests/simulation/invariants.rs",
            "benches/memory.rs",
        ],
    ),
    ("AlgorithmKind", "src/limiter/algorithm.rs", &["src/limiter/redis/script.rs"]),
    ("ProviderKind", "src/identity/auth.rs", &["src/snapshot/auth.rs"]),
    (
        "RouteAction",
        "src/snapshot/route_action.rs",
        &["src/snapshot/route_action.rs", "src/proxy.rs", "src/proxy/decisions.rs"],
    ),
];

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// Return the names that begin the lines of a type's definition: variants of an enum.
fn variants(code: &str, name: &str) -> Vec<String> {
    let definition = code.split(&format!("enum {name} {{")).nth(1).unwrap().split("\n}").next().unwrap();
    let names = definition.lines().filter_map(|line| line.strip_prefix("    "));
    let names = names.map(|line| line.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned());
    names.filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase())).collect()
}

#[test]
fn lists_name_every_variant() {
    let mut missing = Vec::new();
    for (name, declared_in, files) in LISTS {
        let variants = variants(&read(declared_in), name);
        assert!(variants.len() > 2, "too few variants of `{name}` were found: {variants:?}");
        for file in files {
            let code = read(file);
            let is_named = |variant: &&String| {
                let path = format!("{name}::{variant}");
                let uses = code.match_indices(&path);
                let mut ends = uses.map(|(at, text)| code[at + text.len()..].chars().next());
                ends.any(|next| next.is_none_or(|c| !c.is_alphanumeric()))
            };
            missing.extend(
                variants
                    .iter()
                    .filter(|variant| !is_named(variant))
                    .map(|variant| format!("{file} lacks `{name}::{variant}`")),
            );
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// The files that declare the keys of the configuration.
const KEY_FILES: [&str; 3] = ["src/config/gateway.rs", "src/config/tables.rs", "src/config/shorthand.rs"];

#[test]
fn every_configuration_key_is_read() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    files.retain(|file| !KEY_FILES.iter().any(|declaring| file.ends_with(declaring)));
    let code: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let code: String =
        code.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| line.to_owned() + "\n").collect();
    let words: BTreeSet<_> = code.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    let (mut checked, mut unread) = (0, Vec::new());
    for file in KEY_FILES {
        for line in read(file).lines() {
            let Some((key, _)) = line.strip_prefix("    pub ").and_then(|field| field.split_once(": ")) else {
                continue;
            };
            if key.contains(' ') {
                continue;
            }
            checked += 1;
            if !words.contains(key) {
                unread.push(format!("{file}: no code reads the key `{key}`"));
            }
        }
    }
    assert!(checked > 200, "too few keys were found: {checked}");
    assert!(unread.is_empty(), "{}", unread.join("\n"));
}
