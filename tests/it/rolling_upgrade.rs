//! Gateways of the last release and of this build share one Redis. Both versions use the same states, and limits stay
//! exact.
//!
//! `tests/fixtures/` contains the scripts of the last release, its recorded calls with their replies, and the resulting
//! states. `make fixtures` rewrites these files for the next release.

use std::fs;

use crate::support::admin_listener::with_admin;
use crate::support::client::{Client, Reply};
use crate::support::fixtures::{
    Fixtures, RecordedCall, RecordedCase, RecordedCharge, RecordedLimit, RecordedOutcome, RecordedOverride,
    RecordedRule, decode, encode, operation_name, read_states, write_states,
};
use crate::support::gateway::Gateway;
use crate::support::random::{Case, Play, Time, steps};
use crate::support::redis::Redis;
use crate::support::stores::{
    ALIGNED, Limit, SECOND, START, Stores, assert_same_totals, bucket, buckets, calendar, call, concurrency, log,
    sliding, store_with_layout, usage_in_memory, usage_in_redis, window,
};
use serde_json::json;
use sluicegate::limiter::algorithm::Rule;
use sluicegate::limiter::algorithm::fixed_window::WindowStart;
use sluicegate::limiter::quota::CalendarUnit;
use sluicegate::limiter::redis::StateLayout;
use sluicegate::limiter::redis::batcher::ServerStore;
use sluicegate::limiter::redis::script;
use sluicegate::limiter::redis::script::{AlgorithmSet, LimitArgs, ScriptReply, ScriptVariant};
use sluicegate::limiter::usage;
use sluicegate::limiter::verdict::{Charge, Operation, Verdict};

const PREFIX: &str = "rl";

/// The algorithms whose keys differ from those of the fixtures, because the format of their states has changed.
/// CHANGELOG.md names each of them: their counters restart with the upgrade.
const RESTARTED: [&str; 0] = [];

const WHAT_TO_DO: &str = "gateways of both versions share one Redis while an upgrade rolls out. If the format of the \
     state has changed, change `Rule::shape` (src/limiter/algorithm.rs), so that no version reads the other format, add \
     the algorithm to `RESTARTED` (tests/it/rolling_upgrade.rs), and say in CHANGELOG.md that its counters restart: \
     docs/reference/compatibility.md";

/// The places where this build writes states.
const LAYOUTS: [fn() -> StateLayout; 2] = [StateLayout::separate_keys, StateLayout::default];

/// A Redis server, the stores of this build, and the scripts of the release.
struct Upgrade {
    release: Fixtures,
    server: Redis,
    stores: Stores,
    runtime: tokio::runtime::Runtime,
}

impl Upgrade {
    /// Start a server and the stores of this build, which write states where `layout` says.
    fn new(release: Fixtures, layout: StateLayout) -> Upgrade {
        let server = Redis::start();
        let stores = Stores::with_layout(&server, PREFIX, layout);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Upgrade { release, server, stores, runtime }
    }

    /// Perform a recorded call with the model only, and compare the verdicts.
    fn model(&self, recorded: &RecordedCall, limits: &[Limit]) {
        self.stores.clock.set(recorded.now);
        let verdict = self.stores.memory.decide(recorded.operation(), &charges(recorded, limits));
        assert!(recorded.has_verdict(&verdict), "the model decided {recorded:#?} otherwise: {verdict:#?}");
    }

    /// Send a recorded call to Redis as the release did.
    fn old(&self, recorded: &RecordedCall, limits: &[Limit]) {
        self.model(recorded, limits);
        let reply = eval(&self.server, &self.release.script(&recorded.script), recorded);
        assert_eq!(
            encode(&bytes_of(&reply)),
            recorded.reply,
            "Release {} does not read a state that this build has written: {recorded:#?}\n{WHAT_TO_DO}",
            self.release.version
        );
    }

    /// Perform a recorded call with this build, in Redis and with the model.
    fn new_build(&self, recorded: &RecordedCall, limits: &[Limit]) {
        self.perform(&self.stores.redis, recorded, limits);
    }

    /// Perform a recorded call with a store of this build and with the model.
    fn perform(&self, store: &ServerStore, recorded: &RecordedCall, limits: &[Limit]) {
        self.model(recorded, limits);
        let charges = charges(recorded, limits);
        let verdict = self.runtime.block_on(call(store, recorded.operation(), &charges));
        assert!(
            verdict.as_ref().is_ok_and(|verdict| recorded.has_verdict(verdict)),
            "this build does not read a state that release {} has written: {verdict:#?} for {recorded:#?}\n{WHAT_TO_DO}",
            self.release.version
        );
    }

    /// Remove the TTL of all keys. The calls use a virtual clock, but Redis expires keys in real time.
    fn keep_keys(&self) {
        let mut connection = self.server.connection();
        for key in self.server.keys() {
            redis::cmd("PERSIST").arg(key).exec(&mut connection).unwrap();
        }
    }

    /// Assert that the usage totals in Redis equal those of the model.
    fn totals_are_equal(&self, case: &RecordedCase) {
        let limits =
            case.limits.iter().map(|limit| limit.to_limit(&case.before[0].charges[0].rule)).collect::<Vec<_>>();
        let model = usage_in_memory(&self.stores.memory, &limits);
        assert_eq!(model.is_empty(), case.limits.iter().all(|limit| limit.usage.is_none()));
        assert_same_totals(usage_in_redis(&self.server, PREFIX), model, "usage totals of both versions");
    }
}

/// Run a script of a release. Return its reply.
fn eval(server: &Redis, script: &str, recorded: &RecordedCall) -> redis::Value {
    let arguments: Vec<_> = recorded.arguments.iter().map(|argument| decode(argument)).collect();
    let mut command = redis::cmd("EVAL");
    command.arg(script).arg(recorded.keys.len()).arg(&recorded.keys).arg(arguments);
    command.query(&mut server.connection()).unwrap_or_else(|error| panic!("{error}: {recorded:#?}\n{WHAT_TO_DO}"))
}

/// Return the strings and numbers of a reply, one after another.
fn bytes_of(reply: &redis::Value) -> Vec<u8> {
    match reply {
        redis::Value::Array(elements) => elements.iter().flat_map(bytes_of).collect(),
        redis::Value::BulkString(bytes) => bytes.clone(),
        redis::Value::Int(number) => number.to_string().into_bytes(),
        other => panic!("{other:?}"),
    }
}

/// Return the limits of a recorded call, with the rules that applied when the call was recorded.
fn limits(case: &RecordedCase, recorded: &RecordedCall) -> Vec<Limit> {
    let limits: Vec<_> =
        case.limits.iter().zip(&recorded.charges).map(|(limit, charge)| limit.to_limit(&charge.rule)).collect();
    for (limit, key) in limits.iter().zip(&recorded.keys) {
        assert_eq!(
            String::from_utf8(limit.key(PREFIX, recorded.identity)).unwrap(),
            *key,
            "the key of {:?} is not that of the release\n{WHAT_TO_DO}",
            limit.rule
        );
    }
    limits
}

fn charges<'a>(recorded: &RecordedCall, limits: &'a [Limit]) -> Vec<Charge<'a>> {
    let each = recorded.charges.iter().zip(limits);
    each.map(|(charge, limit)| charge.to_charge(limit, recorded.identity)).collect()
}

/// Return the cases of a release whose algorithms have kept their state format.
fn comparable(release: &Fixtures) -> Vec<RecordedCase> {
    let is_kept = |charge: &RecordedCharge| !RESTARTED.contains(&Rule::from(&charge.rule).algorithm_name());
    let cases: Vec<_> = release.cases().into_iter().filter(|case| case.before[0].charges.iter().all(is_kept)).collect();
    assert!(cases.len() >= 6, "the fixtures have {} cases with algorithms that both versions share", cases.len());
    cases
}

#[test]
fn states_of_the_last_release_are_read() {
    let mut calls = 0;
    for (case, layout) in comparable(&Fixtures::find()).iter().flat_map(|case| LAYOUTS.map(|layout| (case, layout))) {
        let upgrade = Upgrade::new(Fixtures::find(), layout());
        case.before.iter().for_each(|recorded| upgrade.model(recorded, &limits(case, recorded)));
        write_states(&mut upgrade.server.connection(), &case.states);
        for recorded in &case.after {
            upgrade.new_build(recorded, &limits(case, recorded));
            upgrade.keep_keys();
            calls += 1;
        }
        upgrade.totals_are_equal(case);
    }
    assert!(calls > 100, "{calls}");
}

/// After the last gateway of the release has stopped, each gateway of this build begins at another time to write the
/// states of an identity to one key.
#[test]
fn gateways_that_write_states_to_different_keys_alternate_exactly() {
    for case in comparable(&Fixtures::find()) {
        let upgrade = Upgrade::new(Fixtures::find(), StateLayout::separate_keys());
        let others = store_with_layout(&upgrade.server, PREFIX, upgrade.stores.clock.clone(), StateLayout::default());
        case.before.iter().for_each(|recorded| upgrade.model(recorded, &limits(&case, recorded)));
        write_states(&mut upgrade.server.connection(), &case.states);
        for (number, recorded) in case.after.iter().enumerate() {
            let limits = limits(&case, recorded);
            match number % 3 {
                0 => upgrade.new_build(recorded, &limits),
                _ => upgrade.perform(&others, recorded, &limits),
            }
            upgrade.keep_keys();
        }
        upgrade.totals_are_equal(&case);
    }
}

#[test]
fn gateways_of_two_versions_alternate_exactly() {
    for case in comparable(&Fixtures::find()) {
        // The release and this build make the calls in turn. The second round swaps them, so that each call is made by
        // both.
        for first_is_old in [true, false] {
            let upgrade = Upgrade::new(Fixtures::find(), StateLayout::separate_keys());
            let mut is_old = first_is_old;
            for recorded in case.before.iter().chain(&case.after) {
                let limits = limits(&case, recorded);
                if is_old {
                    upgrade.old(recorded, &limits)
                } else {
                    upgrade.new_build(recorded, &limits)
                }
                upgrade.keep_keys();
                is_old = !is_old;
            }
            upgrade.totals_are_equal(&case);
        }
    }
}

#[test]
fn last_release_reads_states_of_this_build() {
    for case in comparable(&Fixtures::find()) {
        let upgrade = Upgrade::new(Fixtures::find(), StateLayout::separate_keys());
        for recorded in &case.before {
            upgrade.new_build(recorded, &limits(&case, recorded));
            upgrade.keep_keys();
        }
        // Roll back: the release performs the remaining calls.
        for recorded in &case.after {
            upgrade.old(recorded, &limits(&case, recorded));
            upgrade.keep_keys();
        }
        upgrade.totals_are_equal(&case);
    }
}

// === Overrides ===

fn gateway(redis: &Redis) -> Gateway {
    Gateway::start(&with_admin(&format!(
        "token = \"open-sesame\"\n{}[limit.one]\nby = \"header:x-id\"\nquota = \"3/day\"\n\
         [[route]]\nname = \"r\"\npath = \"/r\"\nlimits = [\"one\"]\nrespond = {{ status = 200 }}\n",
        redis.store()
    )))
}

fn request(gateway: &Gateway, method: &str, body: &str) -> Reply {
    let headers = [("authorization", "Bearer open-sesame"), ("content-type", "application/json")];
    let reply = Client::connect(gateway.admin()).request(method, "/api/overrides", &headers, body.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

fn put(gateway: &Gateway, identity: u128, quota: &str, note: &str) {
    let burst = 7;
    let body = json!({
        "limit": "one", "identity": format!("{identity:032x}"), "quota": quota, "burst": burst, "ttl": "7d", "note": note
    });
    request(gateway, "POST", &body.to_string());
}

/// Return the fields of the overrides hash and the JSON of their records. In a record, the JSON follows three numbers.
fn records(redis: &Redis) -> Vec<(String, String)> {
    let hash: std::collections::BTreeMap<String, String> =
        redis::cmd("HGETALL").arg("rl:overrides").query(&mut redis.connection()).unwrap();
    let text = |value: String| value.splitn(4, ' ').nth(3).unwrap().to_owned();
    hash.into_iter().map(|(field, value)| (field, text(value))).collect()
}

#[test]
fn overrides_of_two_versions_are_the_same_records() {
    let release = Fixtures::find();
    let redis = Redis::start();
    let recorded = release.overrides();
    for each in &recorded {
        let mut command = redis::cmd("EVAL");
        command.arg(release.script("overrides.lua")).arg(1).arg("rl:overrides").arg(&each.arguments);
        let reply: Vec<i64> = command.query(&mut redis.connection()).unwrap();
        assert_eq!(reply[0], 1, "written: {each:?}");
    }
    let old = records(&redis);
    let gateway = gateway(&redis);
    let page = request(&gateway, "GET", "").json();
    let read: Vec<_> =
        page["overrides"].as_array().unwrap().iter().map(|one| (&one["identity"], &one["quota"])).collect();
    for each in &recorded {
        let expected = (&json!(format!("{:032x}", each.identity)), &json!(each.quota));
        assert!(
            read.contains(&expected),
            "this build does not read an override of release {}: {page}",
            release.version
        );
    }
    redis::cmd("FLUSHALL").exec(&mut redis.connection()).unwrap();
    let other = Redis::start();
    let newer = self::gateway(&other);
    recorded.iter().for_each(|each| put(&newer, each.identity, &each.quota, "note"));
    assert_eq!(records(&other), old, "release {} would not read the overrides of this build", release.version);
}

// === Writing the fixtures ===

/// The limits of each case: every algorithm alone, and combinations that use each script. Windows are long, because
/// keys expire in real time.
fn recorded_limits() -> Vec<(Vec<Rule>, Option<&'static str>)> {
    const MINUTE: u64 = 60 * SECOND;
    vec![
        (vec![bucket(5, MINUTE, 7)], Some("UTC")),
        (vec![window(5, MINUTE, ALIGNED)], Some("Europe/Berlin")),
        (vec![window(5, MINUTE, WindowStart::FirstRequest)], None),
        (vec![calendar(9, CalendarUnit::Day, "Europe/Berlin")], Some("Europe/Berlin")),
        (vec![sliding(6, MINUTE, 100)], None),
        (vec![buckets(6, MINUTE, 4)], Some("UTC")),
        (vec![log(6, MINUTE)], Some("UTC")),
        (vec![concurrency(3, MINUTE)], None),
        (vec![bucket(5, MINUTE, 7), window(9, 60 * MINUTE, ALIGNED)], None),
        (
            vec![bucket(8, MINUTE, 8), sliding(9, 2 * MINUTE, 100), window(7, MINUTE, WindowStart::FirstRequest)],
            Some("UTC"),
        ),
        (
            vec![bucket(8, MINUTE, 8), log(9, MINUTE), buckets(9, 2 * MINUTE, 10), concurrency(4, 2 * MINUTE)],
            Some("UTC"),
        ),
    ]
}

fn script_name(variant: ScriptVariant, counts_usage: bool) -> String {
    let name = match variant {
        ScriptVariant::Generic => "generic".to_owned(),
        ScriptVariant::Single | ScriptVariant::Small(..2) => "single".to_owned(),
        ScriptVariant::Small(limits) => format!("small_{limits}"),
    };
    format!("{name}{}.lua", if counts_usage { "_usage" } else { "" })
}

/// Make a call as a gateway of this build does, and record it.
fn record_call(
    server: &Redis,
    now: u64,
    identity: u128,
    operation: Operation,
    charges: &[Charge<'_>],
) -> (RecordedCall, Verdict) {
    let days: Vec<_> = charges.iter().map(|charge| charge.usage_day(operation, now)).collect();
    let layout = StateLayout::default();
    let of = |index: usize| LimitArgs::new(charges, index, now).with_usage(days[index]);
    let arguments: Vec<_> = (0..charges.len()).map(of).collect();
    let counts_usage = days.iter().any(Option::is_some);
    let variant = script::script_variant(&layout, operation, &arguments);
    let mut argument = script::start_argument(now, &layout, 1, charges.len());
    script::append_group(&mut argument, 1, operation, &arguments);
    let mut keys: Vec<Vec<u8>> = Vec::new();
    for (charge, limit) in charges.iter().zip(&arguments).filter(|(_, limit)| limit.has_key()) {
        let mut key = Vec::new();
        limit.write_key(&charge.key, PREFIX, &mut key);
        keys.push(key);
    }
    for (charge, day) in charges.iter().zip(&days) {
        if let Some(day) = day {
            let mut key = Vec::new();
            let limit = charge.key.state_name.limit_name();
            usage::write_key(PREFIX, limit, charge.key.identity, day.month(), &mut key);
            keys.push(key);
        }
    }
    let names = charges.iter().map(|charge| &**charge.key.state_name.name());
    let mut binary = vec![encode(&argument), encode(&script::state_names_argument(names))];
    if counts_usage {
        binary.push(encode(&script::usage_argument(std::iter::once(&arguments[..]))));
    }
    let (name, charged_at) = operation_name(operation);
    let mut recorded = RecordedCall {
        now,
        operation: name.to_owned(),
        charged_at,
        identity,
        charges: charges.iter().map(RecordedCharge::from).collect(),
        script: script_name(variant, counts_usage),
        keys: keys.into_iter().map(|key| String::from_utf8(key).unwrap()).collect(),
        arguments: binary,
        reply: String::new(),
        granted: 0,
        outcomes: Vec::new(),
    };
    let source = &script::script(variant, AlgorithmSet::ALL.with_usage(counts_usage)).source;
    let reply = eval(server, source, &recorded);
    recorded.reply = encode(&bytes_of(&reply));
    let mut parsed = ScriptReply::new(reply).unwrap();
    let verdict = parsed.next_verdict(operation, &arguments).unwrap().unwrap();
    recorded.granted = verdict.granted;
    recorded.outcomes = verdict.outcomes.iter().map(RecordedOutcome::from).collect();
    (recorded, verdict)
}

fn record_case(number: usize, rules: Vec<Rule>, usage: Option<&'static str>) -> RecordedCase {
    let steps = steps(44, number as u8 + 1);
    let start = START + 365 * 86_400 * SECOND;
    let case = Case { rules, usage, start, time: Time::Jumps, steps };
    let mut play = Play::new(&case);
    let server = Redis::start();
    let stores = Stores::new(&server, PREFIX);
    let named = |limit: &Limit| RecordedLimit {
        name: limit.bucket.limit_name().to_owned(),
        usage: limit.usage.as_ref().map(|days| days.zone_name().to_owned()),
    };
    let limits = play.limits.iter().map(named).collect();
    let mut recorded = RecordedCase { limits, before: Vec::new(), states: Vec::new(), after: Vec::new() };
    for (index, step) in case.steps.iter().enumerate() {
        play.advance_clock(step);
        stores.clock.set(play.now);
        let (operation, charges) = play.ask(step);
        let (made, verdict) = record_call(&server, play.now, step.identity, operation, &charges);
        assert_eq!(verdict, stores.memory.decide(operation, &charges), "the model decides {made:#?}");
        for key in server.keys() {
            redis::cmd("PERSIST").arg(key).exec(&mut server.connection()).unwrap();
        }
        play.record(operation, &verdict);
        if index < case.steps.len() / 2 {
            recorded.before.push(made)
        } else {
            recorded.after.push(made)
        }
        if index + 1 == case.steps.len() / 2 {
            recorded.states = read_states(&mut server.connection());
        }
    }
    recorded
}

/// Delete all fixtures and write those of this build.
fn write_fixtures() {
    let folder = Fixtures::parent().join(env!("CARGO_PKG_VERSION"));
    let _ = fs::remove_dir_all(Fixtures::parent());
    fs::create_dir_all(&folder).unwrap();
    for variant in ScriptVariant::ALL {
        for counts_usage in [false, true] {
            let source = &script::script(variant, AlgorithmSet::ALL.with_usage(counts_usage)).source;
            fs::write(folder.join(script_name(variant, counts_usage)), source).unwrap();
        }
    }
    fs::copy("lua/overrides.lua", folder.join("overrides.lua")).unwrap();
    let cases = recorded_limits().into_iter().enumerate();
    let cases: Vec<_> = cases.map(|(number, (rules, usage))| record_case(number, rules, usage)).collect();
    // One call per line of the file.
    let text = serde_json::to_string(&cases)
        .unwrap()
        .replace("{\"now\"", "\n{\"now\"")
        .replace("{\"limits\"", "\n{\"limits\"");
    fs::write(folder.join("calls.json"), text + "\n").unwrap();

    let redis = Redis::start();
    let gateway = gateway(&redis);
    let quotas = [(1, "10/day"), (2, "500/hour"), (u128::from(u64::MAX), "1/s")];
    quotas.iter().for_each(|(identity, quota)| put(&gateway, *identity, quota, "note"));
    let records = records(&redis);
    let overrides: Vec<_> = quotas
        .iter()
        .map(|(identity, quota)| {
            let (field, text) = records.iter().find(|(field, _)| field.ends_with(&format!("{identity:032x}"))).unwrap();
            let arguments = ["set", "10000", field, "604800000000", "0", "0", text].map(str::to_owned).to_vec();
            RecordedOverride { identity: *identity, quota: (*quota).to_owned(), arguments }
        })
        .collect();
    fs::write(folder.join("overrides.json"), serde_json::to_string_pretty(&overrides).unwrap() + "\n").unwrap();
}

#[test]
fn fixtures_cover_every_algorithm_operation_and_script() {
    if std::env::var_os("UPDATE_GENERATED").is_some() {
        write_fixtures();
    }
    let release = Fixtures::find();
    let cases = release.cases();
    let calls: Vec<_> = cases.iter().flat_map(|case| case.before.iter().chain(&case.after)).collect();
    let names = |list: &mut dyn Iterator<Item = String>| list.collect::<std::collections::BTreeSet<_>>();
    let kind =
        |rule: &RecordedRule| serde_json::to_value(rule).unwrap().as_object().unwrap().keys().next().unwrap().clone();
    let kinds = names(&mut calls.iter().flat_map(|call| &call.charges).map(|charge| kind(&charge.rule)));
    let every = every_kind();
    assert_eq!(kinds, names(&mut every.iter().map(|kind| (*kind).to_owned())));
    let operations = names(&mut calls.iter().map(|call| call.operation.clone()));
    assert_eq!(operations.len(), 6, "{operations:?}");
    let scripts = names(&mut calls.iter().map(|call| call.script.clone()));
    for script in ["generic", "generic_usage", "single", "single_usage", "small_2", "small_3_usage"] {
        assert!(scripts.contains(&format!("{script}.lua")), "no call of {script}.lua: {scripts:?}");
    }
    let denied = calls.iter().filter(|call| call.granted == 0).count();
    assert!((calls.len() / 8..calls.len() / 2).contains(&denied), "{denied} of {} calls are denied", calls.len());
    assert!(cases.iter().all(|case| !case.states.is_empty()));
}

fn every_kind() -> [&'static str; 8] {
    [
        "token-bucket",
        "fixed-window",
        "first-request",
        "calendar",
        "sliding-window",
        "sliding-buckets",
        "sliding-log",
        "concurrency",
    ]
}
