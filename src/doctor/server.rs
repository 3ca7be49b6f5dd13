//! The server itself: whether it answers, which one it is, how fast and at what time.

use redis::{Client, Value};
use tokio::time::Duration;

use super::line::{Failure, Line, PATIENCE};
use super::{Check, Status};
use crate::limit::clock::{monotonic, unix_us};
use crate::limit::redis::advice::diagnose_connect;
use crate::limit::redis::hello::{HelloReply, ServerRole};
use crate::words::pluralize;

/// Nothing older has all that the scripts use.
const OLDEST: (u32, u32) = (6, 2);
/// The one that the tests run.
const TESTED: (u32, u32) = (7, 0);
const PINGS: usize = 50;
const CLOCK_READINGS: usize = 5;
/// `store.timeout` must be this many times the round trip: a call may wait for another one, and for the script itself.
const HEADROOM: u32 = 4;
/// The default of `store.timeout`.
const LEAST_TIMEOUT: Duration = Duration::from_millis(50);
/// Connecting takes several round trips. Half of the default of `store.connect_timeout`.
const SLOW_CONNECT: Duration = Duration::from_millis(500);

/// Connects and asks for a sign of life.
///
/// # Errors
/// In words, why the server cannot be used at all.
pub(super) async fn reach(client: &Client) -> Result<(Line, Option<HelloReply>, Check), String> {
    let started = monotonic();
    let mut line = Line::open(client).await?;
    let took = started.elapsed();
    // Without a password to check, connecting alone proves little: what listens may be anything.
    let hello: Result<Value, _> = line.ask(&redis::cmd("HELLO")).await;
    let hello = match hello {
        Ok(reply) => HelloReply::read(&reply),
        Err(Failure::Lost(why)) => return Err(why),
        Err(Failure::Refused(error)) if error.code() == Some("NOAUTH") => {
            return Err(diagnose_connect(&error, &line.address));
        }
        Err(Failure::Refused(_)) => None,
    };
    let check = Check::ok("reachable", format!("connected in {}", ms(took)));
    let check = if took > SLOW_CONNECT {
        let advice = format!("set store.connect_timeout to at least {}", whole_ms(took * 2));
        check.or(Status::Warning).advise(advice)
    } else {
        check
    };
    Ok((line, hello, check))
}

pub(super) async fn version(line: &mut Line, hello: Option<&HelloReply>) -> Result<Check, Failure> {
    let (server, version) = match hello {
        Some(hello) => (hello.server.clone(), hello.version.clone()),
        None => ("redis".to_owned(), line.info("server").await?.text("redis_version").unwrap_or("?").to_owned()),
    };
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    let number: (u32, u32) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let check = Check::ok("version", format!("{server} {version}"));
    Ok(if number < OLDEST {
        check.or(Status::Failed).advise("6.2 or newer is needed")
    } else if server != "redis" || number != TESTED {
        check.advise("the gateway is tested with Redis 7.0; this one should do")
    } else {
        check
    })
}

pub(super) async fn role(line: &mut Line, hello: Option<&HelloReply>) -> Result<Check, Failure> {
    let reply: Result<Value, _> = line.ask(&redis::cmd("ROLE")).await;
    let said = match (reply, hello) {
        (Ok(Value::Array(fields)), _) => fields,
        (Err(Failure::Lost(why)), _) => return Err(Failure::Lost(why)),
        // What it said at first is enough; only the replicas are not counted.
        (_, Some(hello)) => {
            let role = if hello.role == Some(ServerRole::Master) { "master" } else { "no master" };
            return Ok(Check::ok("role", role));
        }
        (Err(refused), None) => return Err(refused),
        (Ok(_), None) => Vec::new(),
    };
    let role = said.first().and_then(|role| redis::from_redis_value_ref::<String>(role).ok()).unwrap_or_default();
    Ok(match (role.as_str(), said.get(2)) {
        ("master", Some(Value::Array(replicas))) => {
            Check::ok("role", format!("master with {}", pluralize(replicas.len() as u64, "replica")))
        }
        (role, _) => Check::ok("role", if role.is_empty() { "unknown" } else { role })
            .or(Status::Failed)
            .advise("give the address of a master"),
    })
}

pub(super) async fn round_trip(line: &mut Line, bound: Duration) -> Result<Check, Failure> {
    let started = monotonic();
    let mut times = Vec::with_capacity(PINGS);
    while times.len() < PINGS && started.elapsed() < PATIENCE {
        let asked = monotonic();
        line.ask::<Value>(&redis::cmd("PING")).await?;
        times.push(asked.elapsed());
    }
    times.sort_unstable();
    let (median, worst) = (times[times.len() / 2], times[times.len() - 1]);
    let found =
        format!("median {}, worst {} of {} calls; store.timeout is {}", ms(median), ms(worst), times.len(), ms(bound));
    let check = Check::ok("round trip", found);
    let needed = format!("set store.timeout to at least {}, or run Redis nearer", whole_ms(needed(median)));
    Ok(if median >= bound {
        check
            .or(Status::Failed)
            .advise(format!("Redis answers, but later than store.timeout: most checks follow on_store_error; {needed}"))
    } else if bound < median * HEADROOM {
        check.or(Status::Warning).advise(format!("store.timeout leaves too little headroom: {needed}"))
    } else if worst * 2 > bound {
        let advice = "some decisions will be made without Redis: raise store.timeout, or see what keeps Redis or the network busy";
        check.or(Status::Warning).advise(advice)
    } else {
        check
    })
}

/// `store.timeout` for a round trip: [`HEADROOM`] times as long, and at least [`LEAST_TIMEOUT`].
fn needed(round_trip: Duration) -> Duration {
    (round_trip * HEADROOM).max(LEAST_TIMEOUT)
}

/// A duration as the configuration has it, rounded up.
fn whole_ms(duration: Duration) -> String {
    format!("{}ms", duration.as_micros().div_ceil(1000))
}

/// How far its clock is from ours. A note: limits go by Redis' time alone.
pub(super) async fn clock(line: &mut Line) -> Result<Check, Failure> {
    let mut best: Option<(Duration, i64)> = None;
    for _ in 0..CLOCK_READINGS {
        let (asked, before_us) = (monotonic(), unix_us());
        let (seconds, micros): (u64, u64) = line.ask(&redis::cmd("TIME")).await?;
        let round_trip = asked.elapsed();
        let middle_us = before_us + round_trip.as_micros() as u64 / 2;
        let offset = (seconds * 1_000_000 + micros) as i64 - middle_us as i64;
        if best.is_none_or(|(shortest, _)| round_trip < shortest) {
            best = Some((round_trip, offset));
        }
    }
    let (round_trip, offset) = best.unwrap_or_default();
    let direction = if offset < 0 { "behind" } else { "ahead of" };
    let offset = Duration::from_micros(offset.unsigned_abs());
    let check = Check::ok(
        "clock",
        format!(
            "{} {direction} this machine's, give or take {}; no decision depends on it",
            ms(offset),
            ms(round_trip / 2)
        ),
    );
    Ok(if offset > Duration::from_secs(1) {
        check.advise("calendar windows and the dialect `github` tell the time of Redis: set both clocks by NTP")
    } else {
        check
    })
}

/// A duration with a unit that suits it.
pub(super) fn ms(duration: Duration) -> String {
    match duration.as_micros() {
        us if us < 10_000 => format!("{:.2} ms", us as f64 / 1000.0),
        us if us < 10_000_000 => format!("{} ms", us / 1000),
        us => format!("{} s", us / 1_000_000),
    }
}
