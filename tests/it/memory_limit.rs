//! `server.memory`: the defaults that fit into the memory, and refused work before the kernel would end the process.

use crate::support::admin_listener::{ask, metric, with_admin};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::signal;
use http::Request;

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
