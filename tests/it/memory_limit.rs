//! `server.memory`: the defaults that fit into the memory, and refused work before the kernel would end the process.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::admin_listener::{ask, metric, with_admin};
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::upstream::{read_head, serve};
use crate::support::{MAX_WAIT, eventually, signal};
use http::Request;
use socket2::SockRef;

fn config(server: &str) -> String {
    with_admin(&format!(
        "[server]\n{server}\n[[route]]\nname = \"r\"\npath = \"/r\"\nrespond = {{ status = 200, body = \"ok\" }}\n"
    ))
}

#[test]
fn defaults_fit_into_the_configured_memory() {
    let gateway = Gateway::start(&config("memory = \"64MiB\""));
    assert_eq!(metric(&gateway, "sluicegate_memory_limit_bytes"), f64::from(64 << 20));
    assert_eq!(metric(&gateway, "sluicegate_connections_max"), 1536.0);
    eventually("the memory is measured", || metric(&gateway, "sluicegate_memory_used_bytes") > f64::from(1 << 20));
    assert_eq!((gateway.get("/r").status, gateway.warnings()), (200, String::new()));
    let written = Gateway::start(&config("memory = \"64MiB\"\nmax_connections = 2000"));
    assert_eq!(metric(&written, "sluicegate_connections_max"), 2000.0);
    assert!(written.log().contains("too little memory for max_connections"), "{}", written.log());
}

#[test]
fn gateway_refuses_work_while_its_memory_is_used_up() {
    // The process itself needs more than this.
    let gateway = Gateway::start(&config("memory = \"1MiB\""));
    eventually("the memory is nearly used up", || ask(&gateway, "/readyz").status == 503);
    assert_eq!(ask(&gateway, "/readyz").json()["status"], "full");
    assert_eq!(ask(&gateway, "/healthz").status, 200, "a restart would not help");
    let reply = gateway.get("/r");
    reply.assert_problem(503, "the memory of the gateway is nearly used up");
    assert_eq!((reply.header("retry-after"), reply.header("connection")), (Some("1"), Some("close")));
    let request = Request::get(format!("http://{}/r", gateway.address)).body(&b""[..]).unwrap();
    let answers = http2::ask(gateway.address, [request]);
    assert!(matches!(answers[..], [Answer::Reset(h2::Reason::REFUSED_STREAM)]), "{answers:?}");
    assert!(gateway.log().contains("the memory is nearly used up"), "{}", gateway.log());
    gateway.put(&config("memory = \"0B\""));
    signal(&gateway.child, "HUP");
    eventually("there is no limit", || ask(&gateway, "/readyz").status == 200);
    assert_eq!(gateway.get("/r").status, 200);
    assert_eq!(metric(&gateway, "sluicegate_memory_limit_bytes"), 0.0);
}

/// Length of the responses of [`long_responses`] in bytes.
const LONG: usize = 64 << 20;

/// Start an upstream that sends long responses through a small buffer. Return the number of bytes that it has sent.
fn long_responses() -> (SocketAddr, Arc<AtomicUsize>) {
    let sent = Arc::new(AtomicUsize::new(0));
    let counter = sent.clone();
    let address = serve(move |mut stream| {
        SockRef::from(&stream).set_send_buffer_size(16 << 10).unwrap();
        let Some(_) = read_head(&mut stream) else { return };
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LONG}\r\n\r\n");
        if stream.write_all(head.as_bytes()).is_err() {
            return;
        }
        let part = [b'x'; 4096];
        for _ in 0..LONG / part.len() {
            if stream.write_all(&part).is_err() {
                return;
            }
            counter.fetch_add(part.len(), Ordering::Relaxed);
        }
    });
    (address, sent)
}

fn config_of_long(server: &str, upstream: SocketAddr) -> String {
    let route = "[[route]]\nname = \"long\"\npath = \"/long\"\nupstream = \"u\"\n";
    format!("{}[upstream.u]\nservers = [\"http://{upstream}\"]\n{route}", config(server))
}

fn ask_for_long(gateway: &Gateway) -> TcpStream {
    let mut client = TcpStream::connect(gateway.address).unwrap();
    client.set_read_timeout(Some(MAX_WAIT)).unwrap();
    client.write_all(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    client
}

/// Without the bounds of the buffers of the kernel, the upstream sends 4 to 6 MiB.
#[test]
fn response_that_a_client_does_not_read_occupies_little_memory_of_the_kernel() {
    let (upstream, sent) = long_responses();
    let gateway = Gateway::start(&config_of_long("memory = \"200MiB\"", upstream));
    eventually("the memory is measured", || metric(&gateway, "sluicegate_memory_used_bytes") > 0.0);
    let client = ask_for_long(&gateway);
    // The buffer of the client is not that of the gateway.
    SockRef::from(&client).set_recv_buffer_size(4096).unwrap();
    let [mut before, mut polls] = [0; 2];
    eventually("the upstream cannot send more", || {
        let now = sent.load(Ordering::Relaxed);
        polls = if now == before && now > 0 { polls + 1 } else { 0 };
        before = now;
        polls == 200
    });
    assert!(before < 1 << 20, "{before} bytes");
}

#[test]
fn responses_that_clients_do_not_read_end_while_the_memory_is_used_up() {
    let (upstream, sent) = long_responses();
    let gateway = Gateway::start(&config_of_long("memory = \"1GiB\"", upstream));
    eventually("the memory is measured", || metric(&gateway, "sluicegate_memory_used_bytes") > 0.0);
    let mut unread = ask_for_long(&gateway);
    let mut read = ask_for_long(&gateway);
    let mut buffer = vec![0; 256 << 10];
    let before = sent.load(Ordering::Relaxed);
    eventually("the response of the first client does not go on", || {
        assert!(read.read(&mut buffer).unwrap() > 0, "the response goes on");
        sent.load(Ordering::Relaxed) > before + (8 << 20)
    });
    gateway.put(&config_of_long("memory = \"1MiB\"", upstream));
    signal(&gateway.child, "HUP");
    eventually("a response has ended", || metric(&gateway, "sluicegate_memory_ended_responses_total") >= 1.0);
    let end = loop {
        match unread.read(&mut buffer) {
            Ok(1..) => {}
            end => break end,
        }
    };
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset, "the response is not complete");
    assert!(gateway.log().contains("ending responses that clients do not read"), "{}", gateway.log());
}
