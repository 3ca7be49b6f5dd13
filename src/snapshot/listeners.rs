//! Compiles `[[listener]]`: addresses, certificates and client certificate verification.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::config;
use crate::config::Text;
use crate::config::error::{Issue, Spanned};
use crate::config::file::FileSnapshot;
use crate::identity::Descriptor;
use crate::identity::OnMissing;
use crate::snapshot::access;
use crate::snapshot::access::NetworkFiles;
use crate::snapshot::acme::AcmeListeners;
use crate::snapshot::client_tls;
use crate::snapshot::client_tls::UpstreamTls;
use crate::snapshot::validator::Validator;
use crate::snapshot::{CompiledConfig, Listener, ListenerTls};
use crate::tls::{Certificate, CertificateSource, ClientAuth, ClientVerifier, DownstreamTls, TlsError};

const ACME_EXAMPLE: &str = "tls = { acme = true, names = [\"api.example.com\"] }";

const EXAMPLE: &str = "tls.certificates = [{ cert = \"certs/dev.pem\", key = \"certs/dev.key\" }]";

/// Compile all listeners.
pub(super) fn listeners(
    listeners: &[Spanned<config::Listener>],
    trusted_proxies: usize,
    acme: &mut AcmeListeners,
    network_files: &mut NetworkFiles,
    reader: &mut Validator<'_>,
) -> Vec<Listener> {
    if listeners.is_empty() {
        reader.missing_table("there is no [[listener]]", "add one: [[listener]] with address = \"127.0.0.1:8080\"");
    }
    let mut compiled: Vec<Listener> = Vec::new();
    let mut spans: Vec<(SocketAddr, Range<usize>)> = Vec::new();
    let mut names: Vec<&Text> = Vec::new();
    for listener in listeners {
        let span = listener.span();
        let listener = listener.get_ref();
        if let Some(name) = &listener.name {
            reader.check_name(name.span(), name.get_ref());
            if let Some(first) = names.iter().find(|first| first.get_ref() == name.get_ref()) {
                let issue = Issue::new(name.span(), format!("duplicate listener `{}`", name.get_ref()));
                reader.push_issue(issue.with_hint(reader.first_line_hint(&first.span())));
            }
            names.push(name);
        }
        let tls = listener.tls.as_ref().and_then(|tls| self::tls(tls, acme, reader));
        let access = access::rules(listener.allow.as_deref(), listener.deny.as_deref(), &span, network_files, reader);
        let proxy_protocol = listener.proxy_protocol.as_ref().is_some_and(|value| *value.get_ref());
        if let Some(value) = listener.proxy_protocol.as_ref().filter(|_| proxy_protocol && trusted_proxies == 0) {
            let message =
                "`proxy_protocol` requires trusted proxies, but there are none: every connection would be closed";
            let hint = "[client_ip] with trusted_proxies = [\"10.0.0.0/8\"]: the addresses of the proxies in front";
            reader.push_missing_elsewhere(Issue::new(value.span(), message).with_hint(hint));
        }
        let address = reader.required(listener.address.as_ref(), &span, "address", "\"127.0.0.1:8080\"");
        let Some(text) = address else { continue };
        let Some(address) = reader.address(text) else { continue };
        match spans.iter().find(|(other, _)| address.port() != 0 && *other == address) {
            Some((_, first)) => {
                let issue = Issue::new(text.span(), format!("duplicate listener address {address}"));
                reader.push_issue(issue.with_hint(reader.first_line_hint(first)));
            }
            None => {
                spans.push((address, text.span()));
                let name = listener.name.as_ref().map(|name| name.get_ref().as_str().into());
                compiled.push(Listener { name, address, proxy_protocol, tls, access });
            }
        }
    }
    compiled
}

/// Return whether two sockets cannot both listen, because they have the same port and one address includes the other by
/// the rules of the kernel.
pub(super) fn addresses_conflict(one: SocketAddr, other: SocketAddr) -> bool {
    if one.port() == 0 || one.port() != other.port() {
        return false;
    }
    // Treat IPv4-mapped addresses such as `::ffff:192.0.2.1` as IPv4 addresses.
    let one = one.ip().to_canonical();
    let other = other.ip().to_canonical();
    let same_family = one.is_ipv4() == other.is_ipv4();
    let covers = |all: IpAddr| all.is_unspecified() && (same_family || all.is_ipv6() && accepts_ipv4());
    one == other || covers(one) || covers(other)
}

/// Return whether sockets on `[::]` accept IPv4 connections as well. Whether an IPv6 socket also covers IPv4 depends on
/// a system setting (`net.ipv6.bindv6only` on Linux).
fn accepts_ipv4() -> bool {
    Socket::new(Domain::IPV6, Type::STREAM, None).and_then(|socket| socket.only_v6()).is_ok_and(|only| !only)
}

/// Return the listeners that conflict with an earlier one, as pairs of indices (earlier, later).
pub(super) fn address_conflicts(listeners: &[Listener]) -> impl Iterator<Item = (usize, usize)> {
    (0..listeners.len()).filter_map(|later| {
        let taken = |earlier: &usize| addresses_conflict(listeners[*earlier].address, listeners[later].address);
        (0..later).find(taken).map(|earlier| (earlier, later))
    })
}

fn tls(
    tls: &Spanned<config::ListenerTls>,
    acme: &mut AcmeListeners,
    reader: &mut Validator<'_>,
) -> Option<ListenerTls> {
    let span = tls.span();
    let tls = tls.get_ref();
    let uses_acme = tls.acme.as_ref().filter(|acme| *acme.get_ref());
    if let (None, Some(names)) = (uses_acme, &tls.names) {
        let span = names.first().map_or(span.clone(), |name| name.span());
        reader.push_missing(Issue::new(span, "`names` requires `acme = true`").with_hint(ACME_EXAMPLE));
    }
    let mut certificates = Vec::new();
    let mut files = Vec::new();
    for written in &tls.certificates {
        let config::Certificate { cert, key } = written.get_ref();
        let (Some(cert), Some(key)) = (cert, key) else {
            reader.push_missing(
                Issue::new(written.span(), "a certificate requires both `cert` and `key`").with_hint(EXAMPLE),
            );
            continue;
        };
        let (Some(cert), Some(key)) = (reader.read_pem(cert), reader.read_pem(key)) else { continue };
        match client_tls::certificate(&cert, &key, written.span()) {
            Ok(certificate) => {
                certificates.push(certificate);
                files.push([cert, key]);
            }
            Err(issue) => reader.push_issue(issue),
        }
    }
    if let (Some(_), Some(written)) = (uses_acme, tls.certificates.first()) {
        let issue = Issue::new(written.span(), "a listener has either `certificates` or `acme`");
        reader.push_issue(issue.with_hint("remove one of them"));
    }
    if tls.certificates.is_empty() && uses_acme.is_none() {
        reader.push_missing(Issue::new(span.clone(), "TLS needs a certificate").with_hint(EXAMPLE));
    }
    let (clients, client_ca) = client_verifier(tls, reader).unzip();
    let source = match uses_acme {
        None => CertificateSource::Files(certificates),
        Some(written) => {
            let (names, managed) = acme.names(written, tls.names.as_deref(), reader)?;
            CertificateSource::Managed(names, managed)
        }
    };
    match DownstreamTls::new(source, clients) {
        Ok(tls) => Some(ListenerTls { tls, certificates: files, client_ca }),
        Err(error) => {
            reader.push_issue(Issue::new(span, error.to_string()));
            None
        }
    }
}

/// Compile the verification of client certificates.
fn client_verifier(
    tls: &config::ListenerTls,
    reader: &mut Validator<'_>,
) -> Option<(ClientVerifier, (FileSnapshot, ClientAuth))> {
    let variants = [("optional", ClientAuth::Optional), ("required", ClientAuth::Required)];
    let auth = reader.one_of(tls.client_auth.as_ref(), ClientAuth::Optional, &variants);
    let Some(text) = &tls.client_ca else {
        if let Some(auth) = &tls.client_auth {
            let issue = Issue::new(auth.span(), "`client_auth` requires `client_ca`");
            reader.push_missing(
                issue.with_hint("set the CA certificates for clients: tls.client_ca = \"certs/clients-ca.pem\""),
            );
        }
        return None;
    };
    let file = reader.read_pem(text)?;
    match ClientVerifier::from_pem(&file.content, auth) {
        Ok(clients) => Some((clients, (file, auth))),
        Err(error) => {
            let issue = Issue::new(text.span(), error.to_string());
            reader.push_issue(
                issue.with_hint("give the path of a PEM file with the CA certificates that verify clients"),
            );
            None
        }
    }
}

impl ListenerTls {
    /// Return whether both accept the same client certificates, and the trust roots of `other` have not been replaced
    /// since.
    pub(crate) fn same_trust(&self, other: &ListenerTls) -> bool {
        let clients = |tls: &ListenerTls| tls.client_ca.as_ref().map(|(file, auth)| (file.content.clone(), *auth));
        clients(self) == clients(other) && !other.tls.has_client_trust_changed()
    }

    /// Serve a new certificate from the next connection on.
    ///
    /// # Errors
    /// The certificate is invalid, has expired or is not valid yet. After an error, the active certificate does not
    /// change.
    pub fn reload_certificate(&self, index: usize, chain: &[u8], key: &[u8], now: Duration) -> Result<(), TlsError> {
        let certificate = Certificate::from_pem(chain, key)?;
        certificate.check_validity(now.as_secs() as i64)?;
        self.tls.replace_certificate(index, certificate);
        Ok(())
    }

    /// Verify client certificates with new CA certificates, starting with the next connection.
    ///
    /// # Errors
    /// The file has no valid CA certificates. After an error, the active CA certificates do not change.
    pub fn reload_client_ca(&self, trust_roots: &[u8], auth: ClientAuth) -> Result<(), TlsError> {
        self.tls.set_client_verifier(ClientVerifier::from_pem(trust_roots, auth)?)
    }
}

/// The part of the configuration that a warning is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WarningSubject {
    /// An upstream, by name.
    Upstream(Box<str>),
    /// A listener, by index.
    Listener(usize),
    /// A certificate of a listener, by the indices of both.
    Certificate(usize, usize),
    /// The consumers of a provider, by the name of the provider.
    Consumers(Box<str>),
    /// `[acme]`.
    Acme,
}

impl CompiledConfig {
    /// Return warnings about a configuration that works, but may not have the intended effect.
    pub fn warnings(&self, now: Duration) -> Vec<(WarningSubject, String)> {
        let of_upstream =
            |tls: &Arc<UpstreamTls>| Some((WarningSubject::Upstream(tls.name.clone()), tls.certificate_warning(now)?));
        let mut warnings: Vec<_> = self.upstream_tls.iter().filter_map(of_upstream).collect();
        warnings.extend(self.auth.key_warnings(now));
        if let Some(acme) = &self.acme {
            warnings.extend(acme.warnings().map(|text| (WarningSubject::Acme, text)));
        }
        for (index, Listener { address, tls, .. }) in self.listeners.iter().enumerate() {
            let certificates = tls.iter().flat_map(|tls| tls.tls.certificates().zip(&tls.certificates)).enumerate();
            for (certificate_index, (certificate, [file, _])) in certificates {
                if let Err(error) = certificate.check_validity(now.as_secs() as i64) {
                    let text = format!("{}: {error}; clients will reject the certificate", file.path.display());
                    warnings.push((WarningSubject::Certificate(index, certificate_index), text));
                }
            }
            if tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()) {
                continue;
            }
            for compiled in self.limits.values() {
                let by_certificate = compiled.identity_spec.descriptors.contains(&Descriptor::ClientCert);
                if by_certificate && compiled.identity_spec.on_missing == OnMissing::Reject {
                    let text = format!(
                        "`{}` is by client-cert, but {address} has no tls.client_ca: the limit rejects every request \
                         on this listener",
                        compiled.limit.name
                    );
                    warnings.push((WarningSubject::Listener(index), text));
                }
            }
        }
        warnings
    }
}
