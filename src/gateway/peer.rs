//! The other end of a downstream connection, and whom it speaks for.

use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderMap;

use crate::http::headers::ForwardedInfo;
use crate::identity::client_ip::ClientIpResolver;
use crate::runtime::CompiledConfig;

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
