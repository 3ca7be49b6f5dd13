//! The JSON Schema agrees with the gateway in enumerated values, bounds and defaults, and with the tables in the
//! documentation.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::support::gateway::binary;
use crate::support::google_key;
use crate::support::reference;
use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Value, json};
use sluicegate::config::file::parse_gateway;
use sluicegate::config::{file_schema, schema};
use sluicegate::snapshot::CompiledConfig;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

struct Validator(Schemas, SchemaIndex);

impl Validator {
    fn new(schema: Value) -> Self {
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.add_resource("schema.json", schema).unwrap();
        let index = compiler.compile("schema.json", &mut schemas).unwrap();
        Validator(schemas, index)
    }

    fn validate_toml(&self, toml: &str) -> Result<(), String> {
        let value: Value = toml::from_str(toml).unwrap();
        self.0.validate(&value, self.1).map_err(|error| format!("{error:#}"))
    }
}

fn gateway() -> Validator {
    Validator::new(file_schema::gateway().to_value())
}

#[test]
fn documents_match_the_code() {
    for (name, text) in reference::schemas() {
        let committed = std::fs::read_to_string(root().join("docs").join(name)).unwrap_or_default();
        assert!(committed == text, "docs/{name} differs from the types; `make reference` writes it again");
    }
    let page = std::fs::read_to_string(root().join("docs/reference/configuration.md")).unwrap();
    assert!(
        page == reference::filled(&page),
        "docs/reference/configuration.md differs from the types: `make reference`"
    );
    let endpoints = std::fs::read_to_string(root().join("docs/reference/admin-api.md")).unwrap();
    assert!(
        endpoints == reference::with_endpoints(&endpoints),
        "docs/reference/admin-api.md differs from the endpoints: `make reference`"
    );
    let known = file_schema::gateway().to_value();
    let tables = known["properties"].as_object().unwrap().keys().filter(|key| *key != "include");
    let mut known: BTreeSet<_> = tables.cloned().collect();
    known.extend(["consumer".to_owned(), "group".to_owned()]);
    let shown: BTreeSet<_> = reference::sections(&page).into_iter().map(str::to_owned).collect();
    assert_eq!(shown, known, "docs/reference/configuration.md must describe each table of the file");
}

#[test]
fn schema_command_prints_the_committed_schema() {
    for (arguments, name) in
        [(&["schema"][..], "gateway.schema.json"), (&["schema", "consumers"], "consumers.schema.json")]
    {
        let output = binary().args(arguments).output().unwrap();
        let committed = std::fs::read_to_string(root().join("docs").join(name)).unwrap();
        assert_eq!(output.status.code(), Some(0));
        let is_same = String::from_utf8(output.stdout).unwrap() == committed;
        assert!(is_same, "`sluicegate schema` differs from docs/{name}; `make reference` writes the file again");
    }
}

#[test]
fn valid_files_match_the_schema() {
    let schema = gateway();
    let valid = std::fs::read_dir(root().join("tests/config/valid")).unwrap().map(|entry| entry.unwrap().path());
    let warned = std::fs::read_dir(root().join("tests/config/warned")).unwrap().map(|entry| entry.unwrap().path());
    let warned = warned.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let files: Vec<_> = valid.chain(warned).chain([root().join("gateway.toml")]).collect();
    assert!(files.len() >= 40, "{files:?}");
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(schema.validate_toml(&text), Ok(()), "{}", path.display());
    }
    let consumers = std::fs::read_to_string(root().join("consumers.toml")).unwrap();
    assert_eq!(Validator::new(file_schema::consumers().to_value()).validate_toml(&consumers), Ok(()));
}

/// A configuration with a minimal route, to which each case adds a table or a key.
const BASE: &str =
    "[[listener]]\naddress = \"127.0.0.1:0\"\n[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n";

#[test]
fn gateway_and_schema_know_every_source_of_an_identity() {
    let (schema, directory) = (gateway(), tempfile::tempdir().unwrap());
    let path = directory.path().join("gateway.toml");
    for source in schema::IDENTITY_SOURCES {
        let written = match source.split_once(':') {
            Some(("json", _)) => "json:/model".to_owned(),
            Some((kind, name)) if name == name.to_uppercase() => format!("{kind}:name"),
            _ => source.to_owned(),
        };
        let text = format!("{BASE}[limit.l]\nby = \"{written}\"\nquota = \"1/s\"\n");
        assert_eq!(schema.validate_toml(&text), Ok(()), "the schema accepts {written}");
        // Some sources need other tables, such as trusted proxies.
        std::fs::write(&path, text).unwrap();
        let error = CompiledConfig::load(&path, &|_| None).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(!error.contains("unknown identity"), "the gateway knows {written}: {error}");
    }
}

#[test]
fn invalid_values_fail_the_schema() {
    let schema = gateway();
    assert_eq!(schema.validate_toml(BASE), Ok(()));
    for wrong in [
        "[serve]\nworkers = 1",
        "[server]\nworker = 1",
        "[server]\nworkers = -1",
        "[server]\nworkers = \"four\"",
        "[server]\nthreading = \"green\"",
        "[server]\ndrain_timeout = 30",
        "[server]\naccept_grace = \"soon\"",
        "[server]\ndrain_timeout = \"30 seconds\"",
        "[server]\nmax_uri = \"8kb\"",
        "[limit.l]\nby = \"ip\"",
        "[limit.l]\nby = \"adress\"\nquota = \"1/s\"",
        "[limit.l]\nby = \"ip\"\nquota = \"1/fortnight\"",
        "[limit.l]\nby = \"ip\"\nquota = \"1/s\"\ntiers.free.qouta = \"1/s\"",
        "[limit.l]\nby = \"ip\"\nquota = \"1/s\"\ncost.header = \"x\"",
        "[limit.l]\nby = \"ip\"\nquota = \"1/s\"\nrefund_on = [\"6xx\"]",
        "[upstream.u]\nservers = [{ uri = \"http://a\" }]",
        "[upstream.u]\nservers = [\"http://a\"]\nbalance = \"fair\"",
        "[upstream.u]\nservers = [\"http://a\"]\noutlier_detection = { consecutive_error = 1 }",
        "[[route]]\npath = \"/\"",
        "[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certs = []",
    ] {
        assert!(schema.validate_toml(&format!("{BASE}{wrong}\n")).is_err(), "{wrong}");
    }
    // The schema accepts an environment variable as a value, because the content of the variable is unknown.
    for right in ["[server]\nthreading = \"${LAYOUT}\"\ndrain_timeout = \"${DRAIN:-30s}\"", "[server.x]\n"] {
        assert_eq!(schema.validate_toml(&format!("{BASE}{right}\n")).is_ok(), right.contains("${"), "{right}");
    }
}

/// A configuration in which every key of the schema can be set.
fn every_key() -> Value {
    json!({
        "server": {}, "metrics": {}, "ratelimit": {}, "log": { "access": { "to": "syslog" } }, "client_ip": {}, "tiers": {}, "auth": { "keys": { "kind": "api-key", "on_unknown": "accept" } },
        "store": { "url": "redis://127.0.0.1:1", "secret": "s" },
        "listener": [{
            "address": "127.0.0.1:0",
            "tls": { "certificates": [{ "cert": "one.pem", "key": "one.key" }], "client_ca": "one.pem", "per_host": [{ "hosts": ["h.test"], "client_ca": "one.pem" }] },
        }],
        "acme": { "accept_terms": true },
        "notify": {
            "n": {
                "webhook": "http://127.0.0.1:1/",
                "secret": "whsec_a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=",
            },
        },
        "admin": { "address": "127.0.0.1:1" },
        "prices": { "p": { "m": { "input": 1, "long_context": { "above": 1 } } } },
        "limit": {
            "l": { "by": "ip", "quota": "1/s" },
            "of_entry": { "by": "entry:k", "quota": "1/s" },
        },
        "descriptor": [{ "domain": "d", "entries": ["k"], "limits": ["of_entry"] }],
        "upstream": {
            "u": { "servers": [{ "url": "http://127.0.0.1:1" }, "http://127.0.0.1:2"], "health_check": { "path": "/" }, "outlier_detection": {} },
        },
        "route": [
            { "name": "r", "hosts": ["h"], "path": "/", "respond": { "status": 200 }, "limits": ["l"], "cors": { "origins": ["https://a.test"] } },
            { "name": "m", "path": "/m", "redirect": { "to": "/" } },
        ],
    })
}

/// Load a configuration. Return the compiled configuration as text, or the errors.
fn load(file: &Value) -> Result<String, String> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("consumers.toml"), "").unwrap();
    static ACCOUNT: LazyLock<String> = LazyLock::new(|| google_key::generate("http://127.0.0.1:1/token").1);
    std::fs::write(directory.path().join("account.json"), &*ACCOUNT).unwrap();
    for name in ["one.pem", "one.key"] {
        std::fs::copy(root().join("tests/certs").join(name), directory.path().join(name)).unwrap();
    }
    let path = directory.path().join("gateway.toml");
    std::fs::write(&path, toml::to_string(file).unwrap()).unwrap();
    let config = CompiledConfig::load(&path, &|_| None).map_err(|error| error.to_string())?;
    let CompiledConfig {
        server,
        store,
        log,
        client_ip,
        auth,
        upstreams,
        limits,
        event_destinations,
        routes,
        admin,
        listeners,
        acme,
        descriptors,
        statsd,
        ..
    } = &config;
    let acme = acme.as_ref().map(|acme| (&acme.settings.directory, &acme.settings.challenges));
    let listeners: Vec<_> = listeners
        .iter()
        .map(|listener| {
            let clients = listener.tls.iter().flat_map(|tls| &tls.clients);
            let clients: Vec<_> =
                clients.map(|clients| (&clients.hosts, clients.ca.as_ref().map(|(_, auth)| auth))).collect();
            let decisions = listener.decisions.as_ref().map(|settings| settings.denied_status);
            (listener.address.clone(), listener.proxy_protocol, clients, decisions)
        })
        .collect();
    let limits: Vec<_> = limits
        .values()
        .map(|terms| {
            let limit = &terms.limit;
            let sizes: Vec<_> = limit.variants().map(|(tier, plan)| (tier, plan.quota, plan.rule.clone())).collect();
            (
                sizes,
                limit.on_store_error,
                limit.shadow,
                limit.announce,
                limit.unit.clone(),
                limit.queue_policy,
                limit.prefetch,
                (limit.usage.as_ref().map(|days| days.zone_name().to_owned()), limit.notify.clone()),
                terms.clone().identity_spec,
                terms.cost.clone(),
            )
        })
        .collect();
    let routes: Vec<_> = routes
        .iter()
        .map(|route| {
            let costs: Vec<_> = route.rate_limits.limits.iter().map(|metered| metered.cost.clone()).collect();
            (
                &route.action,
                route.websocket,
                route.timeout,
                &route.rate_limits.header_styles,
                (&route.rate_limits.expose_header, &route.cors),
                (&route.mirror, &route.response_headers),
                costs,
            )
        })
        .collect();
    let quotas: Vec<_> = descriptors.rules.iter().map(|rule| (rule.is_quota, &rule.metadata)).collect();
    let acme = (acme, descriptors.options, quotas, statsd);
    let (clients, targets) = ((client_ip, &auth.providers, limits), (upstreams, routes, event_destinations));
    let text = format!("{:?}", (server, store, log, listeners, acme, admin, clients, targets));
    Ok(text.replace(&directory.path().display().to_string(), ""))
}

/// Return the value at a path. In the path, `*` stands for any name or for the first element of a list.
fn at<'v>(file: &'v mut Value, path: &[String]) -> Option<&'v mut Value> {
    path.iter().try_fold(file, |value, key| match value {
        Value::Array(items) => items.first_mut(),
        Value::Object(map) => {
            let key = if key == "*" { map.keys().next()?.clone() } else { key.clone() };
            Some(map.entry(key).or_insert(Value::Null))
        }
        _ => None,
    })
}

/// Collect all parts of a schema with their paths.
fn leaves(schema: &Value, path: &[String], found: &mut Vec<(Vec<String>, Value)>) {
    let deeper = |key: &str| path.iter().cloned().chain([key.to_owned()]).collect::<Vec<_>>();
    let forms = schema["anyOf"].as_array().into_iter().flatten();
    for (key, value) in schema["properties"].as_object().into_iter().flatten() {
        leaves(value, &deeper(key), found);
    }
    for key in ["items", "additionalProperties"] {
        if schema[key].is_object() {
            leaves(&schema[key], &deeper("*"), found);
        }
    }
    for form in forms.filter(|form| form["properties"].is_object()) {
        leaves(form, path, found);
    }
    found.push((path.to_vec(), schema.clone()));
}

/// Return a configuration in which the key at this path is valid. Some keys require other keys.
fn file_with(path: &str) -> Value {
    let mut file = every_key();
    let mut set = |path: &str, value: Value| {
        let path: Vec<_> = path.split('.').map(str::to_owned).collect();
        *at(&mut file, &path).unwrap() = value;
    };
    match path {
        "listener.*.protocol" => set("client_ip", json!({ "trusted_proxies": ["127.0.0.1"] })),
        "listener.*.settle_timeout" => {
            let listener = json!([{ "address": "127.0.0.1:0", "protocol": "decisions", "api_token": "sesame" }]);
            set("listener", listener);
        }
        "listener.*.denied_status" | "listener.*.api_token" => {
            set("client_ip", json!({ "trusted_proxies": ["127.0.0.1"] }));
            set("listener", json!([{ "address": "127.0.0.1:0", "protocol": "decisions" }]));
        }
        path if path.starts_with("ratelimit.xds.tls.") => {
            set("ratelimit.xds", json!({ "url": "https://h", "tls": { "cert": "one.pem", "key": "one.key" } }))
        }
        path if path.starts_with("ratelimit.xds.") => set("ratelimit.xds", json!({ "url": "http://127.0.0.1:1" })),
        path if path.starts_with("ratelimit.statsd.") => set("ratelimit.statsd", json!({ "address": "127.0.0.1:1" })),
        path if path.starts_with("ratelimit.headers.") => {
            set("ratelimit.headers", json!({ "limit": "x-l", "remaining": "x-r", "reset": "x-t" }))
        }
        "limit.*.start" | "limit.*.time_zone" => {
            set("limit.l", json!({ "by": "ip", "algorithm": "fixed-window", "quota": "1/day" }))
        }
        "limit.*.buckets" => set("limit.l", json!({ "by": "ip", "algorithm": "sliding-buckets", "quota": "1/day" })),
        "limit.*.algorithm" => set("limit.l", json!({ "by": "ip", "quota": "1/day" })),
        "limit.*.max_queue" => set("limit.l.max_wait", json!("1s")),
        "limit.*.cost.default" | "limit.*.cost.tools.*" => set("limit.l.cost", json!({ "tools": { "m": 1 } })),
        path if path.starts_with("limit.*.cost.") && path != "limit.*.cost.max" => {
            let weights = json!({ "long_context": { "above": 1 } });
            let cost = json!({ "llm": "auto", "weights": weights, "models": { "m": weights } });
            set("limit.l", json!({ "by": "ip", "quota": "1/s", "unit": "tokens", "cost": cost }));
        }
        "limit.*.notify.at.*" => set("limit.l.notify", json!({ "to": "n", "at": [null] })),
        path if path.starts_with("limit.*.notify.") => set("limit.l.notify", json!({ "to": "n" })),
        "notify.*.max_length" => set("notify.n", json!({ "stream": "s" })),
        "upstream.*.max_queue" => set("upstream.u.max_requests", json!(1)),
        path if path.starts_with("upstream.*.sticky_cookie.") => {
            set("store.secret", json!("0123456789abcdef0123456789abcdef"));
            set("upstream.u.balance", json!("sticky"));
            set("upstream.u.sticky_cookie", json!({ "secure": path.ends_with(".same_site") }));
        }
        path if path.starts_with("upstream.*.aws.") => {
            let aws = json!({ "region": "us-east-1", "access_key": "a", "secret_key": "b" });
            set("upstream.u", json!({ "servers": ["http://127.0.0.1:1"], "host": "server", "aws": aws }));
        }
        path if path.starts_with("upstream.*.google.") => {
            let google = json!({ "service_account": "account.json" });
            set("upstream.u", json!({ "servers": ["http://127.0.0.1:1"], "google": google }));
        }
        "upstream.*.tls.verify" => set("upstream.u", json!({ "servers": ["https://127.0.0.1:1"], "tls": {} })),
        "route.*.retries" | "route.*.retry_methods" => {
            set("route", json!([{ "name": "m", "path": "/m", "upstream": "u", "retry_on": [503] }]));
        }
        path if path.starts_with("route.*.mirror") => {
            set("route", json!([{ "name": "m", "path": "/m", "upstream": "u", "mirror": { "upstream": "u" } }]));
        }
        "route.*.response_headers.on_errors" => set("route.r.response_headers", json!({})),
        "log.access" => set("log", json!({})),
        "log.trace_sample" => set("log", json!({ "trace_endpoint": "http://127.0.0.1:1" })),
        "store.tls.verify_name" => set("store", json!({ "url": "rediss://127.0.0.1:1", "secret": "s", "tls": {} })),
        "store.url" => set("store", json!({})),
        "auth.*.on_unknown" => set("auth.keys", json!({ "kind": "api-key", "consumers": "consumers.toml" })),
        "auth.*.scheme" => set("auth.keys.header", json!("authorization")),
        "auth.*.refresh_interval" => set("auth.keys", json!({ "kind": "jwt", "jwks_url": "http://127.0.0.1:1/" })),
        "auth.*.request_headers" | "auth.*.timeout" | "auth.*.on_error" => {
            set("auth.keys", json!({ "kind": "forward", "url": "http://127.0.0.1:1/" }));
        }
        "auth.*.cache.max_entries" => {
            set("auth.keys", json!({ "kind": "forward", "url": "http://127.0.0.1:1/", "cache": { "ttl": "1s" } }));
        }
        "admin.open.*" => set("admin.open", json!([null])),
        "acme.challenges.*" => set("acme.challenges", json!([null])),
        "route.*.redirect.status" => set("route", json!([{ "name": "m", "path": "/m", "redirect": { "to": "/" } }])),
        "route.*.redirect.scheme" | "route.*.redirect.port" => {
            set("route", json!([{ "name": "m", "path": "/m", "redirect": { "scheme": "https" } }]))
        }
        "route.*.compress.algorithms.*" => {
            set("route", json!([{ "name": "m", "path": "/m", "upstream": "u", "compress": { "algorithms": [null] } }]));
        }
        _ if path.starts_with("route.*.compress") => {
            set("route", json!([{ "name": "m", "path": "/m", "upstream": "u", "compress": {} }]));
        }
        "route.*.ratelimit_headers.*" => set("route.r.ratelimit_headers", json!([null])),
        "route.*.upstream.*" => set("route", json!([{ "name": "m", "path": "/m", "upstream": { "u": 1 } }])),
        _ => {}
    }
    match path {
        "limit.*.tiers.*.burst" => {
            set("limit.l", json!({ "by": "api-key", "quota": "1/s", "tiers": { "t": {} } }));
        }
        "limit.*.cost.max" => {
            set("limit.l.cost", json!({ "request_header": "x-cost", "max": 1 }));
            set("client_ip.trusted_proxies", json!(["10.0.0.0/8"]));
        }
        _ => {}
    }
    file
}

/// A default that is written explicitly changes nothing. Enumerated values and the ends of ranges are accepted, and
/// values beyond them are rejected.
#[test]
fn schema_defaults_words_and_bounds_match_the_gateway() {
    let mut found = Vec::new();
    leaves(&file_schema::gateway().to_value(), &[], &mut found);
    let (mut seen, mut wrong) = ((0, 0, 0), Vec::new());
    for (path, schema) in found {
        let name = path.join(".");
        let with = |value: &Value| {
            let mut file = file_with(&name);
            *at(&mut file, &path).unwrap_or_else(|| panic!("the configuration has no place for {name}")) =
                value.clone();
            load(&file)
        };
        if !schema["default"].is_null() {
            let (with, without) = (with(&schema["default"]), load(&file_with(&name)));
            if with.is_err() || with != without {
                wrong.push(format!("{name}: the default is another one\n{with:?}\n{without:?}"));
            }
            seen.0 += 1;
        }
        let words = schema["anyOf"][0]["enum"].as_array().or(schema["enum"].as_array());
        if let Some(words) = words.filter(|words| words[0].is_string()) {
            let error = with(&json!("zzzzzzzzzzzzzzzzzzzzzzzz")).unwrap_err();
            let words: Vec<_> = words.iter().map(|word| word.as_str().unwrap()).collect();
            let known = format!("known: {}", words.join(", "));
            if !error.lines().any(|line| line.ends_with(&known)) {
                wrong.push(format!("{name}: {known}\n{error}"));
            }
            seen.1 += 1;
        }
        for (bound, step) in [("minimum", -1), ("maximum", 1)] {
            let Some(last) = schema[bound].as_i64() else { continue };
            let refused = |value: i64| {
                let message = format!("{value} is out of range");
                with(&json!(value)).is_err_and(|error| error.contains(&message))
            };
            if refused(last) || !refused(last + step) {
                wrong.push(format!("{name}: {last} is not the {bound}"));
            }
            seen.2 += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(seen.0 >= 50 && seen.1 >= 10 && seen.2 >= 50, "{seen:?}");
}

/// Call `visit` with the path of each table in a schema, and the schema of the table. `NAME` stands for any name.
fn tables(schema: &Value, path: &[String], visit: &mut dyn FnMut(&[String], &Value)) {
    if schema["properties"].is_object() {
        visit(path, schema);
    }
    let below = |last: &str| [path, &[last.to_owned()]].concat();
    for (key, value) in schema["properties"].as_object().into_iter().flatten() {
        tables(value, &below(key), visit);
    }
    if schema["items"].is_object() {
        tables(&schema["items"], &below("[]"), visit);
    }
    if schema["additionalProperties"].is_object() {
        tables(&schema["additionalProperties"], &below("NAME"), visit);
    }
    schema["anyOf"].as_array().into_iter().flatten().for_each(|form| tables(form, path, visit));
}

#[test]
fn misspelling_of_any_key_gets_a_suggestion() {
    let nested = |path: &[String], key: &str| {
        let table = format!("{{ {key} = {{ foo = 1 }} }}");
        path.iter().rev().fold(table, |inner, segment| match segment.as_str() {
            "[]" => format!("[{inner}]"),
            name => format!("{{ {name} = {inner} }}"),
        })
    };
    let mut count = 0;
    tables(&file_schema::gateway().to_value(), &[], &mut |path, schema| {
        for key in schema["properties"].as_object().unwrap().keys() {
            let misspelled = format!("{key}x");
            let inline = nested(path, &misspelled);
            // The document is a table: remove the outermost braces.
            let text = inline.strip_prefix("{ ").and_then(|text| text.strip_suffix(" }")).unwrap().to_owned();
            let parsed = parse_gateway(Path::new("gateway.toml"), text.clone(), &|_| None).unwrap();
            let issue = parsed.issues.iter().find(|issue| issue.message == format!("unknown key `{misspelled}`"));
            let hint = issue.and_then(|issue| issue.hint.clone());
            assert_eq!(hint, Some(format!("did you mean `{key}`?")), "{text}: {:?}", parsed.issues);
            count += 1;
        }
    });
    assert!(count > 250, "{count}");
}
