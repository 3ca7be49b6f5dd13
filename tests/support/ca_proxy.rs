//! A proxy in front of Pebble. It adds renewal information (RFC 9773), which Debian's version of Pebble lacks, and it
//! simulates faults.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::version::TLS13;
use serde_json::Value;
use sluicegate::clock::unix_us;
use x509_parser::prelude::ParsedExtension;

use super::certificates::{NOW, TlsClient, tls};
use super::pebble::Pebble;
use super::tls_upstream::{TlsUpstream, server};
use super::upstream::{Seen, read_request};

/// Paths of Pebble: the ACME directory, new orders, and the finalization of orders.
const DIRECTORY: &str = "/dir";
const NEW_ORDER: &str = "/order-plz";
const FINALIZE_ORDER: &str = "/finalize-order";

/// Path of the renewal information that the proxy adds.
const RENEWAL_INFO: &str = "/renewal-info";

/// The fault that the proxy simulates.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Close connections without a response, except those for renewal information.
    Unreachable,
    /// Place orders at once, but delay the responses until the fault ends.
    HeldOrders,
    /// Respond with the error `alreadyReplaced` to orders that replace a certificate.
    AlreadyReplaced,
    /// Respond with the error `serverInternal` to requests that finalize an order.
    FailedFinalization,
}

/// An order that a gateway has requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedOrder {
    /// Time of the request, in seconds since the Unix epoch.
    pub time_s: u64,
    /// Identifier of the certificate that the order replaces.
    pub replaces: Option<String>,
}

/// A running proxy. Its threads end with the test process.
pub struct CaProxy {
    /// URL of the ACME directory.
    pub directory: String,
    state: Arc<State>,
}

/// A function that returns the response to the n-th request for renewal information. `None` closes the connection.
type Inform = Box<dyn Fn(usize) -> Option<String> + Send>;

struct State {
    pebble: SocketAddr,
    client: Arc<ClientConfig>,
    inform: Mutex<Inform>,
    asked: Mutex<Vec<String>>,
    orders: Mutex<Vec<PlacedOrder>>,
    fault: Mutex<Fault>,
}

/// Return the current time in seconds since the Unix epoch.
pub fn now_s() -> u64 {
    unix_us() / 1_000_000
}

/// Return a response that suggests a renewal between two times, in seconds since the Unix epoch.
pub fn suggestion(from_s: u64, to_s: u64, retry_after: &str) -> String {
    let time = |time_s: u64| jiff::Timestamp::from_second(time_s as i64).unwrap();
    let window = serde_json::json!({ "start": time(from_s).to_string(), "end": time(to_s).to_string() });
    let body = serde_json::json!({ "suggestedWindow": window, "explanationURL": "https://ca.test/why" });
    ok(&body.to_string(), &format!("Retry-After: {retry_after}\r\n"))
}

/// Return a response with this body and these additional headers.
pub fn ok(body: &str, headers: &str) -> String {
    format!("HTTP/1.1 200 OK\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
}

/// Return the ARI certificate identifier of a certificate (RFC 9773 §4.1).
pub fn certificate_id(leaf: &CertificateDer<'_>) -> String {
    let (_, parsed) = x509_parser::parse_x509_certificate(leaf).unwrap();
    let authority = parsed.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(found) => found.key_identifier.as_ref().map(|key| key.0),
        _ => None,
    });
    let [authority, serial] = [authority.unwrap(), parsed.raw_serial()].map(|part| URL_SAFE_NO_PAD.encode(part));
    format!("{authority}.{serial}")
}

impl CaProxy {
    /// Start a proxy whose `inform` responds to requests for renewal information.
    pub fn start(pebble: &Pebble, inform: impl Fn(usize) -> Option<String> + Send + 'static) -> CaProxy {
        let own = pebble.authority.server(&["127.0.0.1"], NOW);
        let state = Arc::new(State {
            pebble: pebble.address,
            client: tls(&[&pebble.authority.certificate().der], None, &[&TLS13]),
            inform: Mutex::new(Box::new(inform)),
            asked: Mutex::default(),
            orders: Mutex::default(),
            fault: Mutex::default(),
        });
        let shared = state.clone();
        let proxy = TlsUpstream::serve(server(&own, None, &[], &[&TLS13]), move |mut stream| {
            while let Some(request) = read_request(&mut stream) {
                let Some(response) = shared.respond(&request) else { return };
                if stream.write_all(&response).is_err() {
                    return;
                }
            }
        });
        CaProxy { directory: format!("https://{}{DIRECTORY}", proxy.address), state }
    }

    /// Set the fault that the proxy simulates.
    pub fn set_fault(&self, fault: Fault) {
        *self.state.fault.lock().unwrap() = fault;
    }

    /// Return the certificate identifiers in all requests for renewal information so far.
    pub fn asked(&self) -> Vec<String> {
        self.state.asked.lock().unwrap().clone()
    }

    /// Return the orders that gateways have requested so far.
    pub fn orders(&self) -> Vec<PlacedOrder> {
        self.state.orders.lock().unwrap().clone()
    }
}

impl State {
    fn respond(&self, request: &Seen) -> Option<Vec<u8>> {
        if let Some(id) = request.target().strip_prefix(RENEWAL_INFO) {
            let number = {
                let mut asked = self.asked.lock().unwrap();
                asked.push(id.trim_start_matches('/').to_owned());
                asked.len() - 1
            };
            return self.inform.lock().unwrap()(number).map(String::into_bytes);
        }
        let fault = *self.fault.lock().unwrap();
        if fault == Fault::Unreachable {
            return None;
        }
        let is_order = request.target() == NEW_ORDER;
        let replaces = is_order.then(|| payload(request)["replaces"].as_str().map(str::to_owned)).flatten();
        if is_order {
            self.orders.lock().unwrap().push(PlacedOrder { time_s: now_s(), replaces: replaces.clone() });
        }
        if fault == Fault::AlreadyReplaced && replaces.is_some() {
            let body = r#"{"type": "urn:ietf:params:acme:error:alreadyReplaced"}"#;
            return Some(ok(body, "").replace("200 OK", "409 Conflict").into_bytes());
        }
        if fault == Fault::FailedFinalization && request.target().starts_with(FINALIZE_ORDER) {
            let body = r#"{"type": "urn:ietf:params:acme:error:serverInternal"}"#;
            return Some(ok(body, "").replace("200 OK", "500 Internal Server Error").into_bytes());
        }
        let response = self.forward(request, replaces)?;
        while is_order && *self.fault.lock().unwrap() == Fault::HeldOrders {
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(response)
    }

    /// Forward a request to Pebble, which derives its URLs from the Host header. Return the response. Add `renewalInfo`
    /// to the ACME directory, and `replaces` to a new order that replaces a certificate.
    fn forward(&self, request: &Seen, replaces: Option<String>) -> Option<Vec<u8>> {
        let is_kept = |name: &str| !["content-length", "connection"].contains(&name.to_ascii_lowercase().as_str());
        let lines = request.head.lines().skip(1).filter_map(|line| line.split_once(": "));
        let headers: Vec<_> = lines.filter(|(name, _)| is_kept(name)).collect();
        let method = request.head.split(' ').next()?;
        let mut pebble = TlsClient::handshake(&self.client, self.pebble, "127.0.0.1").ok()?;
        let mut reply = pebble.request(method, request.target(), &headers, &request.body);
        let added = match replaces {
            _ if request.target() == DIRECTORY => {
                Some(("renewalInfo", format!("https://{}{RENEWAL_INFO}", request.headers("host")[0])))
            }
            Some(id) if reply.status == 201 => Some(("replaces", id)),
            _ => None,
        };
        if let Some((key, value)) = added {
            let mut body = reply.json();
            body[key] = value.into();
            reply.body = body.to_string().into_bytes();
        }
        let mut head = format!("HTTP/1.1 {} -\r\n", reply.status);
        for (name, value) in &reply.headers {
            if is_kept(name) && name != "transfer-encoding" {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", reply.body.len()));
        Some([head.as_bytes(), &reply.body].concat())
    }
}

/// Return the payload of a signed ACME request (RFC 7515).
fn payload(request: &Seen) -> Value {
    let signed: Value = serde_json::from_slice(&request.body).unwrap();
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(signed["payload"].as_str().unwrap()).unwrap()).unwrap()
}
