//! The access log over sockets (syslog and journald), with log daemons that restart, disappear or stop reading, and
//! sampled logs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::gateway::{Gateway, binary};
use crate::support::upstream::{Upstream, read_request, serve};
use crate::support::{MAX_WAIT, eventually};
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;

const DROPPED: &str = "sluicegate_access_log_dropped_total";
const ROUTE: &str = "[[route]]\nname = \"r\"\npath = \"/r/{*rest}\"\nrespond = { status = 200 }\n";

fn listen(path: &Path) -> UnixDatagram {
    let listener = UnixDatagram::bind(path).unwrap();
    listener.set_read_timeout(Some(MAX_WAIT)).unwrap();
    listener
}

fn receive(listener: &UnixDatagram) -> Vec<u8> {
    let mut buffer = vec![0; 1 << 20];
    let length = listener.recv(&mut buffer).unwrap();
    buffer.truncate(length);
    buffer
}

/// Return the configuration of an access log that is written to this socket, with further settings.
fn to_socket(kind: &str, socket: &Path, settings: &str) -> String {
    let socket = socket.display();
    with_admin(&format!("[log]\naccess = {{ to = \"{kind}\", socket = \"{socket}\"{settings} }}\n{ROUTE}"))
}

/// A syslog message, parsed by the grammar of RFC 5424 §6.
#[derive(Debug)]
struct Message {
    priority: u8,
    timestamp: String,
    host: String,
    app: String,
    process: String,
    id: String,
    text: String,
}

fn parse_rfc5424(datagram: &[u8]) -> Message {
    let text = std::str::from_utf8(datagram).expect("UTF-8");
    let (priority, rest) = text.strip_prefix('<').expect("PRI").split_once('>').expect("PRI");
    assert!((1..=3).contains(&priority.len()) && (priority == "0" || !priority.starts_with('0')), "PRIVAL: {text}");
    let rest = rest.strip_prefix("1 ").expect("VERSION 1");
    let mut fields = rest.splitn(7, ' ');
    let mut next = |max: usize| {
        let field = fields.next().expect("a field");
        assert!((1..=max).contains(&field.len()) && field.bytes().all(|byte| (33..=126).contains(&byte)), "{field:?}");
        field.to_owned()
    };
    let (timestamp, host, app, process, id) = (next(32), next(255), next(48), next(128), next(32));
    assert_eq!(next(1), "-", "no structured data");
    // The form of a timestamp in RFC 5424: FULL-DATE "T" TIME-HOUR ":" TIME-MINUTE ":" TIME-SECOND "." 1*6DIGIT "Z"
    let form: String = timestamp.chars().map(|sign| if sign.is_ascii_digit() { '0' } else { sign }).collect();
    assert_eq!(form, "0000-00-00T00:00:00.000000Z", "{timestamp}");
    let text = fields.next().expect("MSG").to_owned();
    assert!(!text.chars().any(char::is_control), "one line without control characters: {text:?}");
    Message { priority: priority.parse().unwrap(), timestamp, host, app, process, id, text }
}

#[test]
fn syslog_messages_are_rfc_5424_with_the_record_as_the_message() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("log");
    let listener = listen(&socket);
    let gone = "[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n[[route]]\nname = \"gone\"\npath = \"/gone\"\nupstream = \"gone\"\n";
    for (settings, facility, tag) in
        [("", 16, "sluicegate"), (", facility = \"daemon\", tag = \"edge.gw-1\"", 3, "edge.gw-1")]
    {
        let gateway = Gateway::start(&(to_socket("syslog", &socket, settings) + gone));
        let statuses = ["/r/%C3%A4?secret=1", "/gone", "/no"].map(|path| gateway.get(path).status);
        assert_eq!(statuses, [200, 502, 404]);
        let messages: Vec<_> = (0..3).map(|_| parse_rfc5424(&receive(&listener))).collect();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        for (message, (path, status, severity)) in
            messages.iter().zip([("/r/%C3%A4", 200, 6), ("/gone", 502, 4), ("/no", 404, 6)])
        {
            assert_eq!(message.priority, facility * 8 + severity, "{message:?}");
            let header = [&message.host, &message.app, &message.process, &message.id];
            assert_eq!(header, [host.trim(), tag, &gateway.child.id().to_string(), "access"]);
            let record: Value = serde_json::from_str(&message.text).unwrap();
            assert_eq!((&record["path"], &record["status"]), (&path.into(), &status.into()), "{record}");
            let written = message.timestamp.parse::<jiff::Timestamp>().unwrap().as_microsecond() as f64 / 1e6;
            let ended = record["time"].as_f64().unwrap() + record["duration_ms"].as_f64().unwrap() / 1e3;
            assert!((written - ended).abs() < 1e-5, "{written} {ended}");
        }
    }
}

#[test]
fn syslog_format_and_protocol_can_be_chosen() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("log");
    let listener = listen(&socket);
    let text = |protocol: &str| {
        let config = to_socket("syslog", &socket, protocol).replace("[log]\n", "[log]\nformat = \"text\"\n");
        let gateway = Gateway::start(&config);
        assert_eq!(gateway.get("/r/a").status, 200);
        (receive(&listener), gateway.child.id())
    };
    let (message, _) = text("");
    let line = parse_rfc5424(&message).text;
    assert!(line.contains(" 127.0.0.1 GET /r/a 200 ") && line.contains(" route=r ok "), "{line}");
    let (message, process) = text(", protocol = \"rfc3164\", facility = \"local7\"");
    let message = String::from_utf8(message).unwrap();
    // The expected form is `<190>Mmm dd hh:mm:ss TAG[PID]: MSG`, which is RFC 3164 without a host name.
    let (header, line) = message.split_once("]: ").unwrap();
    let form: String = header.chars().map(|sign| if sign.is_ascii_digit() { '0' } else { sign }).collect();
    let (month, rest) = form.strip_prefix("<000>").unwrap().split_at(3);
    assert!("JanFebMarAprMayJunJulAugSepOctNovDec".contains(month), "{message}");
    let day = rest.strip_prefix(' ').unwrap();
    let day = day.strip_prefix("00").or_else(|| day.strip_prefix(" 0")).expect("a day of two characters");
    assert!(day.starts_with(" 00:00:00 sluicegate[") && header.starts_with("<190>"), "{message}");
    assert!(header.ends_with(&format!("sluicegate[{process}")) && line.contains(" GET /r/a 200 "), "{message}");
}

#[test]
fn restarted_daemon_loses_no_record_and_records_without_a_daemon_are_counted() {
    for kind in ["syslog", "journald"] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("log");
        let first = listen(&socket);
        let gateway = Gateway::start(&to_socket(kind, &socket, ""));
        assert_eq!(gateway.get("/r/1").status, 200);
        receive(&first);
        // The log daemon restarts between two requests.
        drop(first);
        fs::remove_file(&socket).unwrap();
        let second = listen(&socket);
        assert_eq!(gateway.get("/r/2").status, 200);
        assert!(String::from_utf8(receive(&second)).unwrap().contains("/r/2"));
        assert_eq!(metric(&gateway, DROPPED), 0.0);
        // The log daemon stops. Its socket file exists for two more requests and is then removed.
        drop(second);
        for number in 1..=4 {
            if number == 3 {
                fs::remove_file(&socket).unwrap();
            }
            assert_eq!(gateway.get("/r/lost").status, 200);
            eventually("the record is counted", || metric(&gateway, DROPPED) == f64::from(number));
        }
        assert!(gateway.log().contains("cannot write the access log: records are lost"), "{}", gateway.log());
        let third = listen(&socket);
        assert_eq!(gateway.get("/r/3").status, 200);
        assert!(String::from_utf8(receive(&third)).unwrap().contains("/r/3"));
        eventually("the new connection is logged", || gateway.log().contains("reconnected to the log socket"));
        assert_eq!(metric(&gateway, DROPPED), 4.0);
    }
}

#[test]
fn missing_daemon_is_a_warning_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("log");
    let gateway = Gateway::start(&to_socket("syslog", &socket, ""));
    assert!(
        gateway.log().contains("no daemon listens on the log socket: access log records are lost"),
        "{}",
        gateway.log()
    );
    assert_eq!(gateway.get("/r/1").status, 200);
    eventually("the lost record is counted", || metric(&gateway, DROPPED) == 1.0);
    let listener = listen(&socket);
    assert_eq!(gateway.get("/r/2").status, 200);
    assert!(parse_rfc5424(&receive(&listener)).text.contains("/r/2"));
    let output = binary().arg("check").arg("--config").arg(gateway.directory().join("gateway.toml")).output().unwrap();
    assert!(output.status.success() && !String::from_utf8(output.stdout).unwrap().contains("no socket"));
    fs::remove_file(&socket).unwrap();
    let output = binary().arg("check").arg("--config").arg(gateway.directory().join("gateway.toml")).output().unwrap();
    let out = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success() && out.contains("there is no socket at"), "{out}");
}

/// A stream socket, or a socket without write permission, is a permanent error: the gateway does not start.
#[test]
fn unusable_socket_is_an_error_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("log");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let config = directory.path().join("gateway.toml");
    let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\n";
    fs::write(&config, to_socket("syslog", &socket, "") + listener).unwrap();
    let output = binary().arg("--config").arg(&config).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    let expected = format!("cannot write the access log to {}: Protocol wrong type", socket.display());
    assert!(!output.status.success() && error.contains(&expected), "{error}");
}

#[test]
fn daemon_that_does_not_read_slows_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("log");
    let listener = listen(&socket);
    let gateway = Gateway::start(&to_socket("syslog", &socket, ""));
    // These requests produce more log records than fit into the queue of 8 MiB, the batch in delivery and the socket
    // buffer together.
    let (path, requests) = (format!("/r/{}", "x".repeat(8_000)), 3_000_u64);
    let mut client = gateway.client();
    for _ in 0..requests {
        assert_eq!(client.get(&path).status, 200);
    }
    eventually("records are dropped", || metric(&gateway, DROPPED) > 0.0);
    assert!(gateway.log().contains("the queue is full: records are lost"), "{}", gateway.log());
    let reading = std::thread::spawn(move || {
        let mut received = 0_u64;
        loop {
            let message = parse_rfc5424(&receive(&listener));
            if message.text.contains("/r/last") {
                return received;
            }
            assert!(serde_json::from_str::<Value>(&message.text).is_ok(), "{}", message.text);
            received += 1;
        }
    });
    // The records of `/r/last` come after all records of the loop above. While the queue is full, records of `/r/last`
    // are dropped as well.
    let mut last = 0;
    while !reading.is_finished() {
        assert_eq!(gateway.get("/r/last").status, 200);
        last += 1;
        std::thread::yield_now();
    }
    let received = reading.join().unwrap();
    let dropped = metric(&gateway, DROPPED) as u64;
    assert!(received < requests && received + dropped >= requests, "{received} received, {dropped} dropped");
    assert!(received + dropped <= requests + last, "{received} received, {dropped} dropped, {last} last");
}

/// A journal entry, parsed by the rules of the native protocol.
fn parse_journal_entry(mut entry: &[u8]) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    while !entry.is_empty() {
        let end =
            entry.iter().position(|byte| matches!(byte, b'=' | b'\n')).expect("a name ends with `=` or a line break");
        let (name, rest) = entry.split_at(end);
        let name = std::str::from_utf8(name).unwrap();
        let is_valid = name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.len() <= 64
            && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
        assert!(is_valid, "journald ignores {name:?}");
        let (value, rest) = if rest[0] == b'=' {
            let end = rest.iter().position(|byte| *byte == b'\n').expect("the value ends with a line break");
            (&rest[1..end], &rest[end..])
        } else {
            let (length, rest) = rest[1..].split_first_chunk::<8>().unwrap();
            rest.split_at(u64::from_le_bytes(*length) as usize)
        };
        entry = rest.strip_prefix(b"\n").expect("a line break after the value");
        let previous = fields.insert(name.to_owned(), String::from_utf8(value.to_vec()).unwrap());
        assert_eq!(previous, None, "{name}");
    }
    fields
}

#[test]
fn journal_entries_have_the_fields_of_the_record() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("journal");
    let listener = listen(&socket);
    let limited = "[limit.hour]\nby = \"ip\"\nquota = \"1/hour\"\n[limit.trial]\nby = \"ip\"\nquota = \"1/day\"\nshadow = true\n\
                   [[route]]\nname = \"l\"\npath = \"/l\"\nrespond = { status = 503 }\nlimits = [\"hour\", \"trial\"]\n";
    let gateway = Gateway::start(&(to_socket("journald", &socket, ", tag = \"edge\"") + limited));
    assert_eq!(gateway.get("/l?secret=1").status, 503);
    assert_eq!(gateway.get("/l").status, 429);
    let entry = parse_journal_entry(&receive(&listener));
    for (name, value) in [
        ("MESSAGE", "127.0.0.1 GET /l 503 ok"),
        ("PRIORITY", "4"),
        ("SYSLOG_IDENTIFIER", "edge"),
        ("CLIENT", "127.0.0.1"),
        ("METHOD", "GET"),
        ("PATH", "/l"),
        ("STATUS", "503"),
        ("COMPLETE", "true"),
        ("ROUTE", "l"),
        ("OUTCOME", "ok"),
        ("DECISION", "allowed"),
        ("LIMIT", "hour"),
        ("REMAINING", "0"),
    ] {
        assert_eq!(entry.get(name).map(String::as_str), Some(value), "{name} of {entry:#?}");
    }
    let limits: Value = serde_json::from_str(&entry["LIMITS"]).unwrap();
    assert_eq!((&limits[0]["limit"], &limits[1]["limit"]), (&"hour".into(), &"trial".into()));
    assert!(entry["TIME"].parse::<f64>().unwrap() > 1.7e9 && entry["REQUEST_ID"].len() == 36, "{entry:#?}");
    let entry = parse_journal_entry(&receive(&listener));
    assert_eq!((&*entry["MESSAGE"], &*entry["PRIORITY"]), ("127.0.0.1 GET /l 429 rate-limited", "6"));
}

/// A trusted proxy may send a long request id, which makes a log record larger than a datagram.
const LARGE: &str = "[server]\nmax_header_size = \"400KiB\"\n[client_ip]\ntrusted_proxies = [\"127.0.0.1/32\"]\n";

/// An entry that is larger than a datagram is sent as a sealed memory file.
#[test]
fn large_journal_entry_is_a_memory_file() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("journal");
    let listener = listen(&socket);
    let gateway = Gateway::start(&(to_socket("journald", &socket, "") + LARGE));
    let id = "x".repeat(250_000);
    assert_eq!(gateway.client().get_with("/r/large", &[("x-request-id", &id)]).status, 200);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut payload = [0; 16];
    let received = recvmsg(&listener, &mut [IoSliceMut::new(&mut payload)], &mut control, RecvFlags::empty()).unwrap();
    assert_eq!(received.bytes, 0, "the payload is empty");
    let files = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => files.collect(),
        _ => Vec::new(),
    });
    let [file]: [_; 1] = files.collect::<Vec<_>>().try_into().unwrap();
    let required = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    assert!(fcntl_get_seals(&file).unwrap().contains(required), "journald maps the file");
    let mut entry = Vec::new();
    let mut file = File::from(file);
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut entry).unwrap();
    assert_eq!(parse_journal_entry(&entry)["REQUEST_ID"], id);
    // The next entry is a datagram again.
    assert_eq!(gateway.get("/r/small").status, 200);
    assert_eq!(parse_journal_entry(&receive(&listener))["PATH"], "/r/small");
}

/// A syslog record cannot be sent as a memory file. The gateway loses a record that is larger than a datagram, but no
/// other record.
#[test]
fn record_beyond_a_datagram_is_lost_alone() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("log");
    let listener = listen(&socket);
    let gateway = Gateway::start(&(to_socket("syslog", &socket, "") + LARGE));
    let (mut client, id) = (gateway.client(), "x".repeat(250_000));
    for (path, id) in [("/r/one", "1"), ("/r/large", &id), ("/r/two", "2")] {
        assert_eq!(client.get_with(path, &[("x-request-id", id)]).status, 200);
    }
    for path in ["/r/one", "/r/two"] {
        assert!(parse_rfc5424(&receive(&listener)).text.contains(path));
    }
    eventually("the lost record is counted", || metric(&gateway, DROPPED) == 1.0);
}

/// Errors, denials, shadow denials and aborted requests are always logged. Of all other requests, the log has a sample.
#[test]
fn sample_keeps_all_errors_and_a_share_of_the_successes() {
    let stalled = serve(|mut stream| {
        use std::io::Write;
        read_request(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc");
        // Do not send the rest of the body: the response ends early.
    });
    let ok = Upstream::start();
    let mut gateway = Gateway::start(&format!(
        "[log]\naccess = {{ to = \"access.log\", sample = 0.1 }}\n\
         [limit.five]\nby = \"global\"\nquota = \"5/hour\"\nalgorithm = \"fixed-window\"\n\
         [limit.trial]\nby = \"global\"\nquota = \"5/hour\"\nalgorithm = \"fixed-window\"\nshadow = true\n\
         [upstream.ok]\nservers = [\"{}\"]\n[upstream.stalled]\nservers = [\"http://{stalled}\"]\n\
         [[route]]\nname = \"ok\"\npath = \"/ok\"\nupstream = \"ok\"\n\
         [[route]]\nname = \"stalled\"\npath = \"/stalled\"\nupstream = \"stalled\"\n\
         [[route]]\nname = \"five\"\npath = \"/five\"\nrespond = {{ status = 200 }}\nlimits = [\"five\"]\n\
         [[route]]\nname = \"trial\"\npath = \"/trial\"\nrespond = {{ status = 200 }}\nlimits = [\"trial\"]\n",
        ok.url()
    ));
    let mut client = gateway.client();
    for _ in 0..400 {
        assert_eq!(client.get("/ok").status, 200);
    }
    let mut statuses = Vec::new();
    for path in ["/none", "/five", "/trial"] {
        statuses.extend((0..10).map(|_| (path, client.get(path).status)));
    }
    let denied = statuses.iter().filter(|(_, status)| *status == 429).count();
    assert_eq!((denied, statuses.iter().filter(|(_, status)| *status == 404).count()), (5, 10));
    for _ in 0..10 {
        let mut cut = gateway.client();
        cut.send(b"GET /stalled HTTP/1.1\r\nhost: a\r\n\r\n");
        let mut text = Vec::new();
        let _ = cut.stream.get_mut().read_to_end(&mut text);
        assert!(text.ends_with(b"abc"));
    }
    drop(client);
    gateway.terminate();
    assert!(gateway.wait().success());
    let log = gateway.directory().join("access.log");
    let text = fs::read_to_string(&log).unwrap();
    let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |is: &dyn Fn(&Value) -> bool| records.iter().filter(|record| is(record)).count();
    let whole = |record: &Value| record["sample_rate"].is_null();
    assert_eq!(count(&|record| record["status"] == 404 && whole(record)), 10);
    assert_eq!(count(&|record| record["status"] == 429 && whole(record)), 5);
    assert_eq!(count(&|record| record["shadow_denied"][0] == "trial" && whole(record)), 5);
    assert_eq!(count(&|record| record["complete"] == false && record["status"] == 200 && whole(record)), 10);
    // The sample is drawn from the 400 requests to `/ok` and the 5 + 5 requests within the quotas of `five` and
    // `trial`.
    let sampled = count(&|record| record["sample_rate"] == 0.1 && record["outcome"] == "ok");
    assert!((37..=45).contains(&sampled), "{sampled} of 410");
    assert_eq!(records.len(), 30 + sampled, "{text}");
    // `replay` reports that the log is a sample.
    let replay = binary().current_dir(gateway.directory()).args(["replay", "access.log"]).output().unwrap();
    let report = String::from_utf8(replay.stdout).unwrap();
    let words: Vec<_> = report.split_whitespace().collect();
    let note = format!("the log is a sample: {sampled} requests stand for about {}0 requests", sampled);
    assert!(words.join(" ").contains(&note), "{note}\n{report}");
}

/// With `sample = 1`, all records are written, without a sample rate.
#[test]
fn sample_of_all_has_no_rate() {
    let config = format!("[log]\nformat = \"text\"\naccess = {{ to = \"access.log\", sample = 1 }}\n{ROUTE}");
    let mut gateway = Gateway::start(&config);
    let mut client = gateway.client();
    (0..20).for_each(|_| assert_eq!(client.get("/r/a").status, 200));
    drop(client);
    gateway.terminate();
    assert!(gateway.wait().success());
    let text = fs::read_to_string(gateway.directory().join("access.log")).unwrap();
    assert_eq!((text.lines().count(), text.matches("sample_rate").count()), (20, 0), "{text}");
}
