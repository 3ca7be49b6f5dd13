//! Limits over the wire: statuses, headers, and the rule that a request is charged either to all of its limits or to
//! none.

use crate::support::admin_listener::metric;
use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use sfv::{BareItem, List, ListEntry, Parser};

fn routes(limits: &str, extra: &str) -> String {
    format!(
        "{limits}\n[[route]]\nname = \"all\"\npath = \"/all\"\nrespond = {{ status = 200 }}\n{extra}\n\
         [[route]]\nname = \"free\"\npath = \"/free\"\nrespond = {{ status = 200 }}\n"
    )
}

/// Return the names and the parameters of all items of a structured-field list.
fn items(reply: &Reply, field: &str) -> Vec<(String, Vec<(String, i64)>)> {
    let value = reply.header(field).unwrap_or_else(|| panic!("no {field} in {reply:?}"));
    let list: List =
        Parser::new(value).parse().unwrap_or_else(|error| panic!("{field} is not a list: {error}: {value}"));
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else { panic!("{field} has an inner list: {value}") };
            let BareItem::String(name) = item.bare_item else { panic!("{field} names are strings: {value}") };
            let parameters = item.params.into_iter().map(|(key, value)| {
                let BareItem::Integer(number) = value else { panic!("{field} parameters are integers") };
                (key.as_str().to_owned(), number.into())
            });
            (name.as_str().to_owned(), parameters.collect())
        })
        .collect()
}

fn item(name: &str, parameters: &[(&str, i64)]) -> (String, Vec<(String, i64)>) {
    (name.to_owned(), parameters.iter().map(|(key, value)| (key.to_string(), *value)).collect())
}

const TWO: &str = "[limit.narrow]\nby = \"ip\"\nquota = \"2/hour\"\nalgorithm = \"sliding-log\"\n\
                   [limit.broad]\nby = \"ip\"\nquota = \"100/hour\"\nburst = 100\n";

#[test]
fn headers_of_success_and_denial_state_remaining_and_reset() {
    let gateway = Gateway::start(&routes(TWO, "limits = [\"narrow\", \"broad\"]"));
    let mut client = gateway.client();
    let policy = vec![item("narrow", &[("q", 2), ("w", 3600)]), item("broad", &[("q", 100), ("w", 3600)])];
    for left in [1, 0] {
        let reply = client.get("/all");
        assert_eq!(reply.status, 200);
        assert_eq!(items(&reply, "ratelimit-policy"), policy);
        let standing = items(&reply, "ratelimit");
        assert_eq!(standing[0], item("narrow", &[("r", left), ("t", 3600)]));
        assert_eq!((standing[1].0.as_str(), standing[1].1[0].1), ("broad", 98 + left));
    }
    let denied = client.get("/all");
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("content-type"), Some("application/problem+json"));
    assert_eq!(denied.header("cache-control"), Some("no-store"));
    assert_eq!(items(&denied, "ratelimit-policy"), policy);
    let retry: i64 = denied.header("retry-after").unwrap().parse().unwrap();
    assert!((3590..=3600).contains(&retry), "{retry}");
    assert_eq!(denied.json()["detail"], "try again in 60 minutes", "{}", denied.text());
    assert_eq!(
        items(&denied, "ratelimit"),
        [item("narrow", &[("r", 0), ("t", retry)])],
        "only the violated limit, with its waiting time"
    );
    let problem = denied.json();
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["violated-policies"], serde_json::json!(["narrow"]));
    let free = client.get("/free");
    assert_eq!((free.status, free.header("ratelimit"), free.header("ratelimit-policy")), (200, None, None));
}

#[test]
fn denied_request_is_charged_to_no_limit() {
    let both = "limits = [\"narrow\", \"broad\"]\n[[route]]\nname = \"broad\"\npath = \"/broad\"\n\
                respond = { status = 200 }\nlimits = [\"broad\"]";
    let gateway = Gateway::start(&routes(TWO, both));
    let mut client = gateway.client();
    let statuses: Vec<_> = (0..20).map(|_| client.get("/all").status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 2);
    let standing = items(&client.get("/broad"), "ratelimit");
    assert_eq!(
        standing[0].1[0],
        ("r".to_owned(), 97),
        "two requests were charged to both limits, this one to `broad` only"
    );
}

#[test]
fn older_header_dialects_report_the_binding_limit() {
    let extra = "limits = [\"narrow\", \"broad\"]\nratelimit_headers = [\"draft-07\", \"draft-03\", \"github\"]\nexpose_headers = true\n\
                 [[route]]\nname = \"silent\"\npath = \"/silent\"\nrespond = { status = 200 }\nlimits = [\"narrow\"]\nratelimit_headers = []";
    let gateway = Gateway::start(&routes(TWO, extra));
    let mut client = gateway.client();
    let silent = client.get("/silent");
    assert!(silent.headers.iter().all(|(name, _)| !name.contains("ratelimit")), "{silent:?}");
    for (status, remaining) in [(200, "0"), (429, "0")] {
        let reply = client.get("/all");
        assert_eq!(reply.status, status);
        let reset = reply.header("ratelimit-reset").unwrap();
        assert!((3590..=3600).contains(&reset.parse::<u32>().unwrap()), "{reset}");
        for (name, expected) in [
            ("ratelimit-policy", "2;w=3600"),
            ("ratelimit", &format!("limit=2, remaining={remaining}, reset={reset}")),
            ("ratelimit-limit", "2"),
            ("ratelimit-remaining", remaining),
            ("x-ratelimit-limit", "2"),
            ("x-ratelimit-remaining", remaining),
        ] {
            assert_eq!(reply.header(name), Some(expected), "{name} of a {status}");
        }
        let epoch: u64 = reply.header("x-ratelimit-reset").unwrap().parse().unwrap();
        assert!(epoch > 1_700_000_000, "seconds since the epoch: {epoch}");
        let exposed = reply.header("access-control-expose-headers").unwrap();
        assert!(exposed.contains("X-RateLimit-Limit") && exposed.ends_with("Retry-After"), "{exposed}");
    }
}

/// Four limits; one of them counts tokens, and one is not announced to clients.
const UNITS: &str = "[limit.narrow]\nby = \"ip\"\nquota = \"2/hour\"\nalgorithm = \"sliding-log\"\n\
                     [limit.broad]\nby = \"ip\"\nquota = \"100/hour\"\nalgorithm = \"sliding-log\"\n\
                     [limit.words]\nby = \"ip\"\nquota = \"1000/6m\"\nalgorithm = \"sliding-log\"\ncost = 100\nunit = \"tokens\"\n\
                     [limit.guard]\nby = \"ip\"\nquota = \"2/24h\"\nalgorithm = \"sliding-log\"\nannounce = false\n";

#[test]
fn hidden_limit_denies_with_retry_after_and_is_in_no_other_header() {
    let styles = [
        ("draft-11", &["ratelimit-policy"][..]),
        ("draft-07", &[]),
        ("draft-03", &[]),
        ("github", &[]),
        ("openai", &["retry-after-ms"]),
        ("anthropic", &["retry-after-ms"]),
    ];
    for (style, on_denial) in styles {
        let extra = format!("limits = [\"broad\", \"guard\", \"words\"]\nratelimit_headers = [\"{style}\"]");
        let gateway = Gateway::start(&routes(UNITS, &extra));
        let mut client = gateway.client();
        for _ in 0..2 {
            let admitted = client.get("/all");
            assert_eq!(admitted.status, 200, "{style}");
            let told: Vec<_> = admitted.headers.iter().filter(|(name, _)| name.contains("ratelimit")).collect();
            assert!(!told.is_empty() && told.iter().all(|(_, value)| !value.contains("guard")), "{style}: {told:?}");
        }
        let denied = client.get("/all");
        assert_eq!(denied.status, 429, "{style}");
        let told = |(name, _): &&(String, String)| name.contains("ratelimit") || name == "retry-after-ms";
        let told: Vec<_> = denied.headers.iter().filter(told).map(|(name, _)| name.as_str()).collect();
        assert_eq!(told, on_denial, "{style}: {denied:?}");
        let retry: u32 = denied.header("retry-after").unwrap().parse().unwrap();
        assert!((86_390..=86_400).contains(&retry), "{style}: {retry}");
        let problem = denied.json();
        assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
        assert!(problem.get("violated-policies").is_none() && !denied.text().contains("guard"), "{}", denied.text());
    }
}

#[test]
fn retry_after_covers_hidden_limits_beside_announced_ones() {
    let gateway = Gateway::start(&routes(UNITS, "limits = [\"narrow\", \"guard\"]"));
    let mut client = gateway.client();
    let statuses = [0, 1].map(|_| client.get("/all").status);
    let denied = client.get("/all");
    assert_eq!((statuses, denied.status), ([200, 200], 429));
    let retry: i64 = denied.header("retry-after").unwrap().parse().unwrap();
    let told = items(&denied, "ratelimit");
    let [(name, parameters)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((name.as_str(), parameters[0].1), ("narrow", 0));
    assert!((3590..=3600).contains(&parameters[1].1) && (86_390..=86_400).contains(&retry), "{told:?} and {retry}");
    assert_eq!(items(&denied, "ratelimit-policy"), [item("narrow", &[("q", 2), ("w", 3600)])]);
    assert_eq!(denied.json()["violated-policies"], serde_json::json!(["narrow"]));
}

#[test]
fn route_with_hidden_limits_only_sends_no_ratelimit_headers() {
    let gateway = Gateway::start(&routes(UNITS, "limits = [\"guard\"]\nexpose_headers = true"));
    let mut client = gateway.client();
    for status in [200, 200, 429] {
        let reply = client.get("/all");
        assert_eq!(reply.status, status);
        assert!(reply.headers.iter().all(|(name, _)| !name.starts_with("ratelimit")), "{reply:?}");
        assert_eq!(reply.header("retry-after").is_some(), status == 429);
    }
}

#[test]
fn access_log_has_hidden_limits() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    let log = format!("[log]\nformat = \"json\"\naccess = \"{}\"\n", path.display());
    let mut gateway = Gateway::start(&routes(&(log + UNITS), "limits = [\"broad\", \"guard\"]"));
    let mut client = gateway.client();
    assert_eq!([0, 1, 2].map(|_| client.get("/all").status), [200, 200, 429]);
    gateway.terminate();
    gateway.wait();
    let text = std::fs::read_to_string(path).unwrap();
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((&last["limit"], &last["remaining"]), (&"guard".into(), &0.into()), "{text}");
}

#[test]
fn policy_names_units_other_than_requests() {
    let limits = format!("{UNITS}[limit.busy]\nby = \"ip\"\nalgorithm = \"concurrency\"\nquota = \"7\"\n");
    let gateway = Gateway::start(&routes(&limits, "limits = [\"broad\", \"words\", \"busy\", \"guard\"]"));
    let reply = gateway.get("/all");
    let expected =
        "\"broad\";q=100;w=3600, \"words\";q=1000;qu=\"tokens\";w=360, \"busy\";q=7;qu=\"concurrent-requests\"";
    assert_eq!(reply.header("ratelimit-policy"), Some(expected));
    assert_eq!(reply.header("ratelimit"), Some("\"broad\";r=99;t=3600, \"words\";r=900;t=360, \"busy\";r=6"));
    let list: List = Parser::new(expected).parse().unwrap();
    let units = list.iter().map(|entry| match entry {
        ListEntry::Item(item) => item.params.get("qu").and_then(BareItem::as_string).map(|unit| unit.as_str()),
        ListEntry::InnerList(_) => panic!("an inner list in {expected}"),
    });
    assert_eq!(units.collect::<Vec<_>>(), [None, Some("tokens"), Some("concurrent-requests")]);
}

#[test]
fn openai_and_anthropic_headers_report_the_effective_limit_of_each_unit() {
    let limits = format!("{UNITS}[limit.busy]\nby = \"ip\"\nalgorithm = \"concurrency\"\nquota = \"7\"\n");
    let extra = "limits = [\"broad\", \"narrow\", \"words\", \"busy\"]\nratelimit_headers = [\"openai\", \"anthropic\"]\n\
                 expose_headers = true";
    let gateway = Gateway::start(&routes(&limits, extra));
    let mut client = gateway.client();
    let started = jiff::Timestamp::now().as_second();
    let seconds_until = |time: &str| {
        assert!(time.len() == 20 && time.ends_with('Z'), "RFC 3339 without a fraction: {time}");
        time.parse::<jiff::Timestamp>().unwrap().as_second() - started
    };
    let told = |reply: &Reply| -> Vec<String> {
        let by_unit = |name: &str| name.contains("ratelimit") && !name.ends_with("-reset");
        let told =
            reply.headers.iter().filter(|(name, _)| by_unit(name)).map(|(name, value)| format!("{name}: {value}"));
        let mut told: Vec<_> = told.collect();
        told.sort();
        told
    };
    // Of the limits that count requests, `narrow` has the smallest remaining share of its quota.
    let first = client.get("/all");
    assert_eq!(
        told(&first),
        [
            "anthropic-ratelimit-concurrent-requests-limit: 7",
            "anthropic-ratelimit-concurrent-requests-remaining: 6",
            "anthropic-ratelimit-requests-limit: 2",
            "anthropic-ratelimit-requests-remaining: 1",
            "anthropic-ratelimit-tokens-limit: 1000",
            "anthropic-ratelimit-tokens-remaining: 900",
            "x-ratelimit-limit-concurrent-requests: 7",
            "x-ratelimit-limit-requests: 2",
            "x-ratelimit-limit-tokens: 1000",
            "x-ratelimit-remaining-concurrent-requests: 6",
            "x-ratelimit-remaining-requests: 1",
            "x-ratelimit-remaining-tokens: 900",
            "x-ratelimit-reset-requests: 1h0m0s",
            "x-ratelimit-reset-tokens: 6m0s",
        ]
    );
    for (name, expected) in
        [("anthropic-ratelimit-requests-reset", 3600..=3610), ("anthropic-ratelimit-tokens-reset", 360..=370)]
    {
        let seconds = seconds_until(first.header(name).unwrap());
        assert!(expected.contains(&seconds), "{name}: {seconds}");
    }
    assert_eq!((first.header("retry-after"), first.header("retry-after-ms")), (None, None));
    let exposed = first.header("access-control-expose-headers").unwrap();
    for name in ["x-ratelimit-reset-tokens", "anthropic-ratelimit-requests-limit", "retry-after-ms", "Retry-After"] {
        assert!(exposed.split(", ").any(|exposed| exposed == name), "{name} in {exposed}");
    }

    assert_eq!(client.get("/all").status, 200);
    let denied = client.get("/all");
    assert_eq!(denied.status, 429);
    let retry: u64 = denied.header("retry-after").unwrap().parse().unwrap();
    let retry_ms: u64 = denied.header("retry-after-ms").unwrap().parse().unwrap();
    assert!(
        retry_ms.div_ceil(1000) == retry && (3590..=3600).contains(&retry),
        "retry-after-ms is {retry_ms}, retry-after is {retry}"
    );
    let (minutes, seconds) = (retry / 60 % 60, retry % 60);
    let duration = if retry == 3600 { "1h0m0s".to_owned() } else { format!("{minutes}m{seconds}s") };
    // A denial does not report the remaining quota of limits that it does not violate.
    assert_eq!(
        told(&denied),
        [
            "anthropic-ratelimit-requests-limit: 2".to_owned(),
            "anthropic-ratelimit-requests-remaining: 0".to_owned(),
            "x-ratelimit-limit-requests: 2".to_owned(),
            "x-ratelimit-remaining-requests: 0".to_owned(),
            format!("x-ratelimit-reset-requests: {duration}"),
        ]
    );
    let seconds = seconds_until(denied.header("anthropic-ratelimit-requests-reset").unwrap());
    assert!((3590..=3610).contains(&seconds), "{seconds}");
}

#[test]
fn shadow_limits_never_deny_and_are_not_advertised() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    let log = format!("[log]\nformat = \"json\"\naccess = \"{}\"\n", path.display());
    let limits = TWO.replace("[limit.broad]", "shadow = true\n[limit.broad]");
    let mut gateway = Gateway::start(&routes(&(log + &limits), "limits = [\"narrow\", \"broad\"]"));
    let mut client = gateway.client();
    for _ in 0..4 {
        let reply = client.get("/all");
        assert_eq!(
            (reply.status, items(&reply, "ratelimit").len(), items(&reply, "ratelimit-policy").len()),
            (200, 1, 1)
        );
    }
    gateway.terminate();
    gateway.wait();
    let text = std::fs::read_to_string(path).unwrap();
    let denied = text.lines().filter(|line| line.contains("\"shadow_denied\":[\"narrow\"]")).count();
    assert_eq!(denied, 2, "{text}");
}

#[test]
fn limits_apply_to_their_methods_and_skip_exempt_identities() {
    let limits = "[limit.writes]\nby = \"ip\"\nquota = \"1/hour\"\nmethods = [\"POST\"]\n\
                  [limit.tenant]\nby = \"header:x-tenant\"\nquota = \"1/hour\"\nexempt = [\"header:x-tenant=ours\"]\non_missing = \"skip\"\n";
    let gateway = Gateway::start(&routes(limits, "limits = [\"writes\", \"tenant\"]"));
    let mut client = gateway.client();
    for (method, tenant, expected) in [
        ("GET", None, [200, 200, 200]),
        ("GET", Some("ours"), [200, 200, 200]),
        ("GET", Some("theirs"), [200, 429, 429]),
        ("POST", None, [200, 429, 429]),
    ] {
        let headers: Vec<_> = tenant.map(|tenant| ("x-tenant", tenant)).into_iter().collect();
        let statuses = [0, 1, 2].map(|_| client.request(method, "/all", &headers, b"").status);
        assert_eq!(statuses, expected, "{method} of {tenant:?}");
    }
}

#[test]
fn identities_are_read_from_every_part_of_a_request() {
    for (by, same, other) in [
        ("path:id", "/u/1?x=1", "/u/2?x=1"),
        ("query:k", "/u/1?k=a&x=1", "/u/1?k=b&x=1"),
        ("query:k", "/u/1?k=a%20b", "/u/1?k=a"),
        ("host", "/u/1", ""),
        ("cookie:sid", "/u/1", ""),
        ("method", "/u/1", ""),
    ] {
        let gateway = Gateway::start(&format!(
            "[limit.l]\nby = \"{by}\"\nquota = \"1/hour\"\n\
             [[route]]\nname = \"u\"\npath = \"/u/{{id}}\"\nrespond = {{ status = 200 }}\nlimits = [\"l\"]\n"
        ));
        let mut client = gateway.client();
        let mut ask = |path: &str, method: &str, second: bool| {
            let headers = [
                ("Host", if second && by == "host" { "b.test" } else { "a.test" }),
                ("Cookie", if second { "sid=2" } else { "sid=1" }),
            ];
            client.request(method, path, &headers, b"").status
        };
        let second_path = if other.is_empty() { same } else { other };
        let second_method = if by == "method" { "POST" } else { "GET" };
        assert_eq!(
            (ask(same, "GET", false), ask(same, "GET", false)),
            (200, 429),
            "both requests share one bucket: {by}"
        );
        assert_eq!(ask(second_path, second_method, true), 200, "the request has another bucket: {by}");
    }
}

#[test]
fn route_cost_is_charged() {
    let gateway = Gateway::start(&routes(
        "[limit.l]\nby = \"ip\"\nquota = \"10/hour\"\nalgorithm = \"fixed-window\"\n",
        "limits = [\"l\"]\ncost = 4",
    ));
    let mut client = gateway.client();
    let statuses: Vec<_> = (0..3).map(|_| client.get("/all").status).collect();
    assert_eq!(statuses, [200, 200, 429]);
}

#[test]
fn client_that_waits_for_retry_after_is_admitted() {
    for limit in [
        "quota = \"1/s\"",
        "quota = \"3/2s\"\nalgorithm = \"sliding-log\"",
        "quota = \"2/s\"\nalgorithm = \"fixed-window\"",
        "quota = \"2/s\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"",
    ] {
        let gateway = Gateway::start(&routes(&format!("[limit.l]\nby = \"ip\"\n{limit}\n"), "limits = [\"l\"]"));
        let mut client = gateway.client();
        for round in 0..2 {
            let denied = loop {
                let reply = client.get("/all");
                if reply.status == 429 {
                    break reply;
                }
            };
            let seconds = denied.header("retry-after").unwrap().parse().unwrap();
            // Wait for the time that `Retry-After` states.
            std::thread::sleep(std::time::Duration::from_secs(seconds));
            assert_eq!(client.get("/all").status, 200, "{limit}, round {round}");
        }
    }
}

#[test]
fn decisions_on_one_process_are_exact_under_concurrency() {
    for (layout, algorithm) in
        [("per-core", "fixed-window"), ("work-stealing", "sliding-log"), ("per-core", "token-bucket")]
    {
        let limit =
            format!("[server]\nthreading = \"{layout}\"\nworkers = 4\n[limit.l]\nby = \"ip\"\nquota = \"100/day\"\n");
        // Windows of `24h` are aligned to the Unix epoch. Windows of a `day` would follow the calendar.
        let limit = limit.replace("/day", "/24h") + &format!("algorithm = \"{algorithm}\"\n");
        let gateway = Gateway::start(&routes(&limit, "limits = [\"l\"]"));
        let statuses = crate::support::client::load(&[gateway.address], 32, 3200, "/all", &[]);
        let admitted = statuses.iter().filter(|status| **status == 200).count();
        let denied = statuses.iter().filter(|status| **status == 429).count();
        assert_eq!((admitted, denied), (100, 3100), "{layout} {algorithm}");
    }
}

#[test]
fn sixteen_limits_of_all_algorithms_are_one_decision() {
    let redis = Redis::start();
    let algorithms = [
        "token-bucket\"\nburst = 100",
        "fixed-window\"\nstart = \"first-request",
        "fixed-window",
        "sliding-window",
        "sliding-buckets",
        "sliding-log",
    ];
    let name = |number: usize| format!("l{number}");
    let limit = |number: usize| {
        let (quota, algorithm) = if number == 11 { (3, "sliding-log") } else { (100, algorithms[number % 6]) };
        // The window is so long that no window begins and no token is refilled while the test runs.
        let algorithm = if algorithm.ends_with('0') { algorithm.to_owned() } else { format!("{algorithm}\"") };
        format!("[limit.l{number}]\nby = \"ip\"\nquota = \"{quota}/3650d\"\nalgorithm = \"{algorithm}\n")
    };
    let limits: String = (0..16).map(limit).collect();
    let list = |numbers: &mut dyn Iterator<Item = usize>| {
        numbers.map(|number| format!("\"{}\"", name(number))).collect::<Vec<_>>().join(", ")
    };
    let gateway = Gateway::start(&routes(
        &format!("{}denial_cache = 0\n{limits}", redis.store()),
        &format!(
            "limits = [{}]\n[[route]]\nname = \"others\"\npath = \"/others\"\nrespond = {{ status = 200 }}\nlimits = [{}]",
            list(&mut (0..16)),
            list(&mut (0..16).filter(|number| *number != 11)),
        ),
    ));
    let mut client = gateway.client();
    for left in [2, 1, 0] {
        let reply = client.get("/all");
        assert_eq!((reply.status, items(&reply, "ratelimit").len()), (200, 16));
        for number in 0..16 {
            assert_eq!(reply.remaining(&name(number)), if number == 11 { left } else { 97 + left }, "l{number}");
        }
    }
    for _ in 0..10 {
        let denied = client.get("/all");
        denied.assert_problem(429, "the narrow limit is exhausted");
        assert_eq!(denied.json()["violated-policies"], serde_json::json!(["l11"]));
        assert_eq!(items(&denied, "ratelimit")[0].1[0], ("r".to_owned(), 0));
        assert_eq!(items(&denied, "ratelimit").len(), 1, "only the violated limit is reported");
    }
    let others = client.get("/others");
    for number in (0..16).filter(|number| *number != 11) {
        assert_eq!(
            others.remaining(&name(number)),
            96,
            "l{number}: three requests to `/all` and this one were charged"
        );
    }
    // The gateway loads the scripts when it opens a connection. Each call is therefore an EVALSHA.
    assert_eq!(redis.calls("evalsha"), 14, "one call for each request");
    redis.assert_every_key_expires();
}

#[test]
fn binding_limit_is_the_one_with_the_smallest_share_left() {
    let limits = "[limit.few]\nby = \"ip\"\nquota = \"2/hour\"\nalgorithm = \"sliding-log\"\n\
                  [limit.many]\nby = \"ip\"\nquota = \"10/hour\"\nalgorithm = \"sliding-log\"\n";
    let extra = "limits = [\"few\", \"many\"]\nratelimit_headers = [\"draft-03\"]\n\
                 [[route]]\nname = \"many\"\npath = \"/many\"\nlimits = [\"many\"]\nrespond = { status = 200 }\n";
    let gateway = Gateway::start(&routes(limits, extra));
    let mut client = gateway.client();
    (0..7).for_each(|_| assert_eq!(client.get("/many").status, 200));
    let reply = client.get("/all");
    // 2 remaining of 10 is a smaller share than 1 remaining of 2.
    assert_eq!((reply.header("ratelimit-limit"), reply.header("ratelimit-remaining")), (Some("10"), Some("2")));
}

#[test]
fn policy_header_lists_the_applied_limits_only() {
    let limits = "[limit.all]\nby = \"ip\"\nquota = \"9/hour\"\n\
                  [limit.writes]\nby = \"ip\"\nquota = \"9/hour\"\nmethods = [\"POST\"]\n";
    let gateway = Gateway::start(&routes(limits, "limits = [\"all\", \"writes\"]"));
    let mut client = gateway.client();
    for (method, expected) in [("GET", &["all"][..]), ("POST", &["all", "writes"])] {
        let reply = client.request(method, "/all", &[], b"");
        for field in ["ratelimit-policy", "ratelimit"] {
            let names: Vec<_> = items(&reply, field).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, expected, "{field} of {method}");
        }
    }
}

/// Start a gateway with a route `/login`, limited by IP address, and a route `/q`, limited by a query parameter that
/// the client chooses.
fn small_memory_store(wide: &str) -> Gateway {
    Gateway::start(&format!(
        "[admin]\naddress = \"127.0.0.1:0\"\n[store]\nmax_memory_states = 640\n\
         [limit.login]\nby = \"ip\"\nalgorithm = \"sliding-log\"\nquota = \"5/15m\"\n\
         [limit.wide]\nby = \"query:q\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\n{wide}\n\
         [[route]]\nname = \"login\"\npath = \"/login\"\nrespond = {{ status = 200 }}\nlimits = [\"login\"]\n\
         [[route]]\nname = \"q\"\npath = \"/q\"\nrespond = {{ status = 200 }}\nlimits = [\"wide\"]\n"
    ))
}

#[test]
fn memory_of_one_limit_does_not_evict_states_of_another() {
    // In the first case, the quota of `wide` is hardly used. In the other cases, each charged identity uses its whole
    // quota of `wide`, and the states of `wide` expire after those of `login`.
    for wide in ["quota = \"1000/day\"", "quota = \"1/day\"", "quota = \"1/day\"\non_store_error = \"allow\""] {
        let gateway = small_memory_store(wide);
        let mut client = gateway.client();
        let login = [(); 6].map(|()| client.get("/login").status);
        assert_eq!(login, [200, 200, 200, 200, 200, 429], "{wide}");
        for number in 0..5000 {
            client.get(&format!("/q?q={number}"));
        }
        assert_eq!(client.get("/login").status, 429, "{wide}");
    }
}

#[test]
fn full_memory_store_follows_on_store_error() {
    for (terms, admitted) in [("local", false), ("deny", false), ("allow", true)] {
        let gateway = small_memory_store(&format!("quota = \"1/day\"\non_store_error = \"{terms}\""));
        let mut client = gateway.client();
        let mut statuses = [0; 3];
        for number in 0..3000 {
            let reply = client.get(&format!("/q?q={number}"));
            match reply.status {
                200 => statuses[0] += 1,
                503 => {
                    assert!(reply.header("retry-after").is_some());
                    statuses[1] += 1;
                }
                _ => statuses[2] += 1,
            }
        }
        assert_eq!(
            (statuses[0] == 3000, statuses[1] > 0, statuses[2]),
            (admitted, !admitted, 0),
            "{terms}: {statuses:?}"
        );
        // The store does not evict states with charges: `q=0` was charged above, so it is denied.
        assert_eq!(client.get("/q?q=0").status, 429, "{terms}");
        let log = gateway.log();
        assert!(log.contains("max_memory_states") && log.contains("\"limit\":\"wide\""), "{terms}: {log}");
        assert!(metric(&gateway, "sluicegate_memory_states_rejected_total") > 0.0, "{terms}");
        assert!(metric(&gateway, "sluicegate_memory_states") <= 640.0, "{terms}");
    }
}

#[test]
fn full_memory_store_forgets_less_than_half_of_a_quota() {
    let gateway = small_memory_store("quota = \"4/day\"");
    let mut client = gateway.client();
    let mut number = 0;
    let mut flood = |client: &mut Client| {
        for _ in 0..3000 {
            number += 1;
            assert_eq!(client.get(&format!("/q?q={number}")).status, 200, "{number}");
        }
    };
    // The store may forget the only request of an identity each time: 6 requests are admitted instead of 4.
    for round in 0..6 {
        assert_eq!(client.get("/q?q=below").status, 200, "round {round}");
        flood(&mut client);
    }
    // The store never forgets half of a quota.
    assert_eq!([(); 2].map(|()| client.get("/q?q=half").status), [200, 200]);
    for round in 0..2 {
        flood(&mut client);
        assert_eq!(client.get("/q?q=half").status, 200, "round {round}");
    }
    flood(&mut client);
    assert_eq!(client.get("/q?q=half").status, 429);
    assert!(metric(&gateway, "sluicegate_memory_states_evicted_total") > 6.0);
}
