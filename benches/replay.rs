//! Measures the speed of `sluicegate replay` with one limit, on one core, for a million lines of each of three log
//! formats. The environment variable LINES sets another number of lines.

use std::fmt::Write;
use std::io::Cursor;
use std::path::Path;

use sluicegate::clock::monotonic;
use sluicegate::snapshot::CompiledConfig;
use sluicegate::tools::replay::{LogInput, ReadProgress, Replay, ReplayOptions};

/// Number of clients in the logs, such as those of a busy service within an hour.
const CLIENTS: u64 = 10_000;

const CONFIG: &str = "[[listener]]\naddress = \"127.0.0.1:0\"\n\
    [limit.per-ip]\nby = \"ip\"\nquota = \"100/min\"\nburst = 20\n\
    [[route]]\nname = \"api\"\npath = \"/v1/{*rest}\"\nlimits = [\"per-ip\"]\nrespond = { status = 200 }\n";

fn main() {
    let lines: u64 = std::env::var("LINES").map_or(1_000_000, |text| text.parse().expect("LINES is a number"));
    for (format, line) in [
        ("combined", combined as fn(&mut String, u64)),
        ("caddy", caddy as fn(&mut String, u64)),
        ("sluicegate", own as fn(&mut String, u64)),
    ] {
        let mut log = String::new();
        (0..lines).for_each(|number| line(&mut log, number));
        for (what, target) in [("replayed", None), ("replayed, with a suggestion", Some(0.001))] {
            let input = Box::new(Cursor::new(log.clone().into_bytes()));
            let source = vec![LogInput::from_reader(format, input, &ReadProgress::default()).expect("it is in memory")];
            let config =
                CompiledConfig::from_text(Path::new("gateway.toml"), CONFIG.to_owned(), &|_| None).expect("it is fine");
            let replay = Replay::new(config, &source, &ReplayOptions::default()).expect("the format is known");
            let began = monotonic();
            let outcome = replay.run(source, target, &mut ());
            let took = began.elapsed().as_secs_f64();
            assert_eq!((outcome.statistics.requests, outcome.statistics.unreadable), (lines, 0), "{format}");
            let denied = outcome.limit_stats[0].denied;
            println!(
                "{format:<11} {lines} lines {what}: {took:.2} s, {:.0} lines/s, {denied} denied",
                lines as f64 / took
            );
        }
    }
}

/// Return the client of a request. A quarter of the requests comes from 17 clients.
fn client(number: u64) -> u64 {
    let drawn = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    if drawn.is_multiple_of(4) { drawn % 17 } else { drawn % CLIENTS }
}

fn combined(log: &mut String, number: u64) {
    let (client, second) = (client(number), number / 300);
    let (hour, minute, second) = (second / 3600 % 24, second / 60 % 60, second % 60);
    let _ = writeln!(
        log,
        "10.0.{}.{} - - [10/Oct/2000:{hour:02}:{minute:02}:{second:02} -0700] \"GET /v1/items/{}?page={} HTTP/1.1\" 200 2326 \
         \"https://www.example.com/start\" \"Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0\"",
        client / 256,
        client % 256,
        number % 1000,
        number % 7
    );
}

fn caddy(log: &mut String, number: u64) {
    let client = client(number);
    let _ = writeln!(
        log,
        "{{\"level\":\"info\",\"ts\":{:.6},\"logger\":\"http.log.access\",\"msg\":\"handled request\",\"request\":{{\"remote_ip\":\
         \"10.0.{}.{}\",\"remote_port\":\"41342\",\"proto\":\"HTTP/2.0\",\"method\":\"GET\",\"host\":\"example.com\",\"uri\":\
         \"/v1/items/{}\",\"headers\":{{\"User-Agent\":[\"curl/7.82.0\"],\"Accept\":[\"*/*\"]}}}},\"bytes_read\":0,\"user_id\":\"\",\
         \"duration\":0.000929675,\"size\":10900,\"status\":200,\"resp_headers\":{{\"Server\":[\"Caddy\"]}}}}",
        1.7e9 + number as f64 / 300.0,
        client / 256,
        client % 256,
        number % 1000
    );
}

fn own(log: &mut String, number: u64) {
    let client = client(number);
    let _ = writeln!(
        log,
        "{{\"time\":{:.6},\"client\":\"10.0.{}.{}\",\"method\":\"GET\",\"path\":\"/v1/items/{}\",\"status\":200,\"bytes\":12,\
         \"complete\":true,\"duration_ms\":1.5,\"route\":\"api\",\"outcome\":\"ok\",\"decided_by\":\"store\",\"request_id\":\"0198a\"}}",
        1.7e9 + number as f64 / 300.0,
        client / 256,
        client % 256,
        number % 1000
    );
}
