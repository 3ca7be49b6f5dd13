//! The other end of a downstream connection, and whom it speaks for.

use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use uuid::{NoContext, Timestamp, Uuid};

use crate::http::headers::{ForwardedInfo, X_REQUEST_ID};
use crate::identity::client_ip::ClientIpResolver;
use crate::snapshot::CompiledConfig;

/// The other end of a downstream connection.
#[derive(Debug)]
pub struct Peer {
    /// Its address; IPv4-mapped ones as IPv4.
    pub address: IpAddr,
    /// What upstreams are told of it.
    pub forwarded: ForwardedInfo,
    /// The subject of its certificate, which was verified.
    pub certificate_subject: Option<Box<str>>,
    /// Who has said whether it is trusted.
    client_ip: Arc<ClientIpResolver>,
    /// Whether it speaks for somebody whom it does not tell.
    is_distrusted: bool,
}

impl Peer {
    /// The peer of a connection.
    pub fn new(address: IpAddr, scheme: &'static str, runtime: &CompiledConfig) -> Self {
        let address = address.to_canonical();
        let client_ip = runtime.client_ip.clone();
        let forwarded = ForwardedInfo::new(address, scheme, client_ip.is_trusted(address));
        Peer { address, forwarded, certificate_subject: None, client_ip, is_distrusted: false }
    }

    /// The address of the client that it speaks for in a request with this header section.
    pub fn client_address(&self, headers: &HeaderMap) -> IpAddr {
        // A trusted proxy may speak for somebody whose address it does not tell.
        if self.forwarded.trusted { self.client_ip.client_address(self.address, headers) } else { self.address }
    }

    /// Believes nothing that comes from it.
    pub fn distrust(&mut self) {
        (self.is_distrusted, self.forwarded.trusted) = (true, false);
    }

    /// The same under a configuration that is newer than the connection; none if it says the same of whom to trust.
    pub(super) fn revalidate(&self, runtime: &CompiledConfig) -> Option<Box<Peer>> {
        let client_ip = &runtime.client_ip;
        if Arc::ptr_eq(client_ip, &self.client_ip) {
            return None;
        }
        let trusted = !self.is_distrusted && client_ip.is_trusted(self.address);
        let (forwarded, client_ip) = (ForwardedInfo { trusted, ..self.forwarded.clone() }, client_ip.clone());
        Some(Box::new(Peer { forwarded, client_ip, certificate_subject: self.certificate_subject.clone(), ..*self }))
    }
}

// What tells a request from all others: given by a trusted proxy or made here, the same upstream, in the logs and in our own errors.

/// The id of a request.
#[derive(Debug, Clone)]
pub enum RequestId {
    /// Of our own; in the form of text when somebody asks for it.
    Generated(Uuid),
    /// Of a trusted proxy.
    Received(HeaderValue),
}

impl RequestId {
    /// That of a request with this header section.
    pub fn from_headers(headers: &HeaderMap, trusted: bool) -> Self {
        match trusted.then(|| headers.get(X_REQUEST_ID)).flatten() {
            Some(received) => RequestId::Received(received.clone()),
            // In order by the millisecond. A finer order, as of `now_v7`, is a lock that all workers share.
            None => RequestId::Generated(Uuid::new_v7(Timestamp::now(NoContext))),
        }
    }

    /// As the value of a field.
    pub fn to_header_value(&self) -> HeaderValue {
        match self {
            RequestId::Received(value) => value.clone(),
            RequestId::Generated(id) => {
                let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
                let text = id.hyphenated().encode_lower(&mut text);
                // Hex digits and hyphens are a valid value.
                HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("-"))
            }
        }
    }
}
