//! Compiles `[[listener]]` and `[acme]`: addresses, certificates, and the verification of client certificates.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use instant_acme::LetsEncrypt;
use rustls::pki_types::{DnsName, ServerName};
use socket2::{Domain, Socket, Type};

use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::sources::FileSnapshot;
use crate::config::spanned::{Spanned, Text};
use crate::http::target::canonical_host;
use crate::http::url::HttpUrl;
use crate::identity::access::AccessRules;
use crate::snapshot::decisions;
use crate::snapshot::decisions::DecisionSettings;
use crate::snapshot::identities;
use crate::snapshot::identities::NetworkFiles;
use crate::snapshot::upstreams;
use crate::snapshot::validator::Validator;
use crate::tls::{
    Certificate, CertificateSource, ChallengeKind, ClientAuth, ClientVerifier, DownstreamTls, ManagedCertificates,
    TlsError, TrustRoots,
};

const ACME_EXAMPLE: &str = "tls = { acme = true, names = [\"api.example.com\"] }";

const EXAMPLE: &str = "tls.certificates = [{ cert = \"certs/dev.pem\", key = \"certs/dev.key\" }]";

/// `[[listener]]`
#[derive(Debug)]
pub struct Listener {
    /// Name of the listener. `None` if it has no name.
    pub name: Option<Box<str>>,
    /// Where the listener accepts connections.
    pub address: ListenAddress,
    /// What the listener serves.
    pub protocol: ListenerProtocol,
    /// Whether connections must start with a PROXY protocol header from a trusted proxy.
    pub proxy_protocol: bool,
    /// TLS settings. `None` for plaintext.
    pub tls: Option<ListenerTls>,
    /// Client networks that may use the listener. `None` = all.
    pub access: Option<AccessRules>,
    /// Settings of a listener with `protocol = "decisions"`.
    pub decisions: Option<Box<DecisionSettings>>,
    /// Whether a route of the listener allows WebSockets. HTTP/2 clients then learn that they may open WebSockets.
    pub has_websockets: bool,
}

/// `address` of a listener
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// Address and port.
    Tcp(SocketAddr),
    /// Path of a Unix socket.
    Unix(PathBuf),
}

impl ListenAddress {
    /// Return address and port. Return `None` for a Unix socket.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            ListenAddress::Tcp(address) => Some(*address),
            ListenAddress::Unix(_) => None,
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp(address) => address.fmt(out),
            ListenAddress::Unix(path) => write!(out, "{UNIX_SCHEME}{}", path.display()),
        }
    }
}

/// Begin of `address` of a Unix socket.
const UNIX_SCHEME: &str = "unix:";

/// Maximum length in bytes of the path of a Unix socket: that of Linux (unix(7)), minus the temporary extension with the
/// process id that the socket has until the gateway serves requests.
pub(super) const MAX_SOCKET_PATH: usize = 107 - ".4194304.new".len();

/// `protocol` of a listener
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenerProtocol {
    /// Requests, by the routes.
    Http,
    /// Calls of Envoy's rate limit service, by the descriptors.
    RateLimit,
    /// The same calls as JSON over HTTP/1.1 and HTTP/2, and health checks.
    RateLimitHttp,
    /// Decisions about requests that other proxies describe, by the routes.
    Decisions,
}

/// `tls` of a listener
#[derive(Debug)]
pub struct ListenerTls {
    /// TLS configuration for new connections.
    pub tls: Arc<DownstreamTls>,
    /// The files of each certificate and its private key, as they were when the configuration was loaded.
    pub certificates: Vec<[FileSnapshot; 2]>,
    /// Verification of client certificates: first for all hosts, then for each entry of `per_host`. `tls` has the policies
    /// with the same indices.
    pub clients: Vec<ClientCertificates>,
}

/// Verification of the client certificates of some hosts.
#[derive(Debug)]
pub struct ClientCertificates {
    /// The hosts of an entry of `per_host`. Empty for the first, which applies to all other hosts.
    pub hosts: Vec<String>,
    /// The file with the CA certificates that verify client certificates, as it was when the configuration was loaded.
    /// [`ClientAuth`] tells whether clients must send a certificate. `None`: the gateway requests no certificate.
    pub ca: Option<(FileSnapshot, ClientAuth)>,
    /// Names of which a client certificate must have one. Empty: it may have any name.
    pub names: Vec<ServerName<'static>>,
}

/// Compile all listeners.
pub(super) fn listeners(
    listeners: &[Spanned<gateway::Listener>],
    trusted_proxies: usize,
    acme: &mut AcmeListeners,
    network_files: &mut NetworkFiles,
    reader: &mut Validator<'_>,
) -> Vec<Listener> {
    if listeners.is_empty() {
        reader.missing_table("there is no [[listener]]", "add one: [[listener]] with address = \"127.0.0.1:8080\"");
    }
    let mut compiled: Vec<Listener> = Vec::new();
    let mut spans: Vec<(ListenAddress, Range<usize>)> = Vec::new();
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
        let tls = listener.tls.as_ref().and_then(|tls| self::tls(tls, listener.protocol.as_ref(), acme, reader));
        let access =
            identities::access_rules(listener.allow.as_deref(), listener.deny.as_deref(), &span, network_files, reader);
        let proxy_protocol = listener.proxy_protocol.as_ref().is_some_and(|value| *value.get_ref());
        if let Some(value) = listener.proxy_protocol.as_ref().filter(|_| proxy_protocol && trusted_proxies == 0) {
            let message =
                "`proxy_protocol` requires trusted proxies, but there are none: every connection would be closed";
            let hint = "set trusted_proxies = [\"10.0.0.0/8\"] in [client_ip] to the addresses of the proxies in front \
                        of the gateway";
            reader.push_missing_elsewhere(Issue::new(value.span(), message).with_hint(hint));
        }
        let protocols = [
            ("http", ListenerProtocol::Http),
            ("ratelimit", ListenerProtocol::RateLimit),
            ("ratelimit-http", ListenerProtocol::RateLimitHttp),
            ("decisions", ListenerProtocol::Decisions),
        ];
        let protocol = reader.one_of(listener.protocol.as_ref(), ListenerProtocol::Http, &protocols);
        let decisions = match protocol {
            ListenerProtocol::Decisions => Some(Box::new(decisions::settings(listener, trusted_proxies, reader))),
            ListenerProtocol::Http | ListenerProtocol::RateLimit | ListenerProtocol::RateLimitHttp => {
                let status = listener.denied_status.as_ref().map(|value| (value.span(), "denied_status"));
                let token = listener.api_token.as_ref().map(|token| (token.span(), "api_token"));
                let timeout = listener.settle_timeout.as_ref().map(|text| (text.span(), "settle_timeout"));
                for (span, key) in status.into_iter().chain(token).chain(timeout) {
                    reader.push_missing(Issue::new(span, format!("`{key}` requires protocol = \"decisions\"")));
                }
                None
            }
        };
        let address = reader.required(listener.address.as_ref(), &span, "address", "\"127.0.0.1:8080\"");
        let Some(text) = address else { continue };
        let Some(address) = listen_address(text, reader) else { continue };
        let has_any_port = address.tcp().is_some_and(|address| address.port() == 0);
        match spans.iter().find(|(other, _)| !has_any_port && *other == address) {
            Some((_, first)) => {
                let issue = Issue::new(text.span(), format!("duplicate listener address {address}"));
                reader.push_issue(issue.with_hint(reader.first_line_hint(first)));
            }
            None => {
                spans.push((address.clone(), text.span()));
                let name = listener.name.as_ref().map(|name| name.get_ref().as_str().into());
                let has_websockets = false;
                compiled.push(Listener {
                    name,
                    address,
                    protocol,
                    proxy_protocol,
                    tls,
                    access,
                    decisions,
                    has_websockets,
                });
            }
        }
    }
    compiled
}

/// Parse `address` of a listener.
fn listen_address(text: &Text, reader: &mut Validator<'_>) -> Option<ListenAddress> {
    let Some(path) = text.get_ref().strip_prefix(UNIX_SCHEME) else {
        return reader.address(text).map(ListenAddress::Tcp);
    };
    if path.starts_with('/') && path.len() <= MAX_SOCKET_PATH {
        return Some(ListenAddress::Unix(path.into()));
    }
    let message = format!("`{path}` is not the path of a Unix socket");
    let hint =
        format!("write an absolute path of at most {MAX_SOCKET_PATH} bytes, such as \"unix:/run/ratelimit.sock\"");
    reader.push_issue(Issue::new(text.span(), message).with_hint(hint));
    None
}

/// Return whether two sockets cannot listen on these addresses at the same time. The kernel rejects the second socket
/// if both have the same port and one address includes the other, as `0.0.0.0` includes `127.0.0.1`.
pub(super) fn addresses_conflict(one: SocketAddr, other: SocketAddr) -> bool {
    if one.port() == 0 || one.port() != other.port() {
        return false;
    }
    // Treat IPv4-mapped IPv6 addresses such as `::ffff:192.0.2.1` as IPv4 addresses.
    let one = one.ip().to_canonical();
    let other = other.ip().to_canonical();
    let same_family = one.is_ipv4() == other.is_ipv4();
    let covers = |all: IpAddr| all.is_unspecified() && (same_family || all.is_ipv6() && accepts_ipv4());
    one == other || covers(one) || covers(other)
}

/// Return whether sockets on `[::]` also accept IPv4 connections. A system setting determines this
/// (`net.ipv6.bindv6only` on Linux).
fn accepts_ipv4() -> bool {
    Socket::new(Domain::IPV6, Type::STREAM, None).and_then(|socket| socket.only_v6()).is_ok_and(|only| !only)
}

/// Return the listeners whose address conflicts with that of an earlier listener, as pairs of indices (earlier, later).
pub(super) fn address_conflicts(listeners: &[Listener]) -> impl Iterator<Item = (usize, usize)> {
    (0..listeners.len()).filter_map(|later| {
        let address = listeners[later].address.tcp()?;
        let taken =
            |earlier: &usize| listeners[*earlier].address.tcp().is_some_and(|it| addresses_conflict(it, address));
        (0..later).find(taken).map(|earlier| (earlier, later))
    })
}

fn tls(
    tls: &Spanned<gateway::ListenerTls>,
    protocol: Option<&Text>,
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
        let gateway::Certificate { cert, key } = written.get_ref();
        let (Some(cert), Some(key)) = (cert, key) else {
            reader.push_missing(
                Issue::new(written.span(), "a certificate requires both `cert` and `key`").with_hint(EXAMPLE),
            );
            continue;
        };
        let (Some(cert), Some(key)) = (reader.read_pem(cert), reader.read_pem(key)) else { continue };
        match upstreams::certificate(&cert, &key, written.span()) {
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
    let keys = ClientKeys { ca: &tls.client_ca, auth: &tls.client_auth, names: &tls.client_names };
    let (verifier, first) = client_verifier(&keys, Vec::new(), reader);
    let mut clients = vec![first];
    let mut verifiers_by_host = Vec::new();
    for written in tls.per_host.iter().flatten() {
        if let Some(protocol) = protocol.filter(|protocol| protocol.get_ref() != "http") {
            let message = format!("`per_host` has no effect with protocol = \"{}\"", protocol.get_ref());
            reader.push_issue(Issue::new(written.span(), message).with_hint("set client_ca of the listener"));
        }
        let gateway::HostClients { hosts, client_ca, client_auth, client_names } = written.get_ref();
        let example = "[\"admin.example.com\"]";
        let Some(hosts) = reader.required(hosts.as_ref(), &written.span(), "hosts", example) else { continue };
        let span = hosts.first().map_or(written.span(), |first| first.span());
        let is_any = hosts.iter().any(|host| host.get_ref() == "*");
        let hosts = reader.hosts(hosts, &written.span());
        if is_any {
            let issue =
                Issue::new(span.clone(), "`*` matches any host, which `client_ca` of the listener does as well");
            reader.push_issue(issue.with_hint("list the hosts: hosts = [\"admin.example.com\"]"));
        }
        let is_known = |host: &&String| clients.iter().any(|other| other.hosts.contains(host));
        if let Some(host) = hosts.iter().find(is_known) {
            let issue = Issue::new(span, format!("two entries of `per_host` have the host `{host}`"));
            reader.push_issue(issue.with_hint("remove one of them"));
        }
        let keys = ClientKeys { ca: client_ca, auth: client_auth, names: client_names };
        let (verifier, of_hosts) = client_verifier(&keys, hosts.clone(), reader);
        verifiers_by_host.push((hosts, verifier));
        clients.push(of_hosts);
    }
    let source = match uses_acme {
        None => CertificateSource::Files(certificates),
        Some(written) => {
            let (names, managed) = acme.names(written, tls.names.as_deref(), reader)?;
            CertificateSource::Managed(names, managed)
        }
    };
    match DownstreamTls::new(source, verifier, verifiers_by_host) {
        Ok(tls) => Some(ListenerTls { tls: Arc::new(tls), certificates: files, clients }),
        Err(error) => {
            reader.push_issue(Issue::new(span, error.to_string()));
            None
        }
    }
}

/// The keys that verify client certificates.
struct ClientKeys<'a> {
    ca: &'a Option<Text>,
    auth: &'a Option<Text>,
    names: &'a Option<Vec<Text>>,
}

/// Compile the settings that verify the client certificates of these hosts.
fn client_verifier(
    keys: &ClientKeys<'_>,
    hosts: Vec<String>,
    reader: &mut Validator<'_>,
) -> (Option<ClientVerifier>, ClientCertificates) {
    let variants = [("optional", ClientAuth::Optional), ("required", ClientAuth::Required)];
    let auth = reader.one_of(keys.auth.as_ref(), ClientAuth::Optional, &variants);
    let mut clients = ClientCertificates { hosts, ca: None, names: client_names(keys.names.as_deref(), reader) };
    let Some(text) = keys.ca else {
        let names = keys.names.iter().flatten().map(|name| ("client_names", name.span())).next();
        let auth = keys.auth.as_ref().map(|auth| ("client_auth", auth.span()));
        for (key, span) in auth.into_iter().chain(names) {
            let issue = Issue::new(span, format!("`{key}` requires `client_ca`"));
            reader.push_missing(
                issue.with_hint("set the CA certificates for clients: tls.client_ca = \"certs/clients-ca.pem\""),
            );
        }
        return (None, clients);
    };
    let Some(file) = reader.read_pem(text) else { return (None, clients) };
    match ClientVerifier::from_pem(&file.content, auth, &clients.names) {
        Ok(verifier) => {
            clients.ca = Some((file, auth));
            (Some(verifier), clients)
        }
        Err(error) => {
            let hint = "give the path of a PEM file with the CA certificates that verify clients";
            let issue = Issue::new(text.span(), error.to_string());
            reader.push_issue(issue.with_hint(upstreams::certificate_hint(&file, hint)));
            (None, clients)
        }
    }
}

/// Compile `client_names`: DNS names and IP addresses.
fn client_names(names: Option<&[Text]>, reader: &mut Validator<'_>) -> Vec<ServerName<'static>> {
    let mut compiled = Vec::new();
    for text in names.into_iter().flatten() {
        match ServerName::try_from(text.get_ref().clone()) {
            Ok(name) => compiled.push(name),
            Err(_) => {
                let issue = Issue::new(text.span(), format!("`{}` is no DNS name or IP address", text.get_ref()));
                reader.push_issue(issue.with_hint("write a name of the certificate, such as \"envoy.example.com\""));
            }
        }
    }
    compiled
}

impl ListenerTls {
    /// Return whether the gateway requests a client certificate for at least one host.
    pub fn requests_client_certificates(&self) -> bool {
        self.clients.iter().any(|clients| clients.ca.is_some())
    }

    /// Accept the TLS session tickets that `other` has issued, for the hosts whose clients both verify with the same
    /// settings and CA certificates. If the CA certificates of `other` were replaced after `other` was loaded, accept no
    /// tickets.
    pub(crate) fn use_sessions_of(&self, other: &ListenerTls) {
        for (index, (clients, others)) in self.clients.iter().zip(&other.clients).enumerate() {
            let trust = |of: &ClientCertificates| of.ca.as_ref().map(|(file, auth)| (file.content.clone(), *auth));
            let is_same =
                clients.hosts == others.hosts && clients.names == others.names && trust(clients) == trust(others);
            if is_same && !other.tls.has_client_trust_changed(index) {
                self.tls.use_ticketer_of(&other.tls, index);
            }
        }
    }

    /// Use a new certificate for new connections.
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

    /// Use new CA certificates to verify client certificates of new connections. `index` is the index in `clients`.
    ///
    /// # Errors
    /// The file contains no valid CA certificates. After an error, the active CA certificates do not change.
    pub fn reload_client_ca(&self, index: usize, trust_roots: &[u8], auth: ClientAuth) -> Result<(), TlsError> {
        self.tls.set_client_verifier(index, ClientVerifier::from_pem(trust_roots, auth, &self.clients[index].names)?)
    }
}

/// The part of the configuration that a warning concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WarningSubject {
    /// An upstream, by name.
    Upstream(Box<str>),
    /// A listener, by index.
    Listener(usize),
    /// A certificate of a listener: the index of the listener, and the index of the certificate.
    Certificate(usize, usize),
    /// The consumers of an authentication provider, by the name of the provider.
    Consumers(Box<str>),
    /// `[acme]`.
    Acme,
}

/// Return the certificates that the gateway does not serve for some of their names, because an earlier certificate of
/// the listener is valid for the same name and has the same type of key.
pub(super) fn shadowed_certificates(tls: &ListenerTls) -> Vec<(usize, String)> {
    let certificates: Vec<_> = tls.tls.certificates().zip(&tls.certificates).collect();
    let mut shadowed = Vec::new();
    for (index, (certificate, [file, _])) in certificates.iter().enumerate() {
        let earlier = &certificates[..index];
        let shadow = |name: &str| {
            earlier.iter().find(|(earlier, _)| earlier.has_key_type_of(certificate) && earlier.covers(name))
        };
        let names = certificate.names();
        let hidden: Vec<_> = names.iter().filter_map(|name| Some((name, shadow(name)?))).collect();
        let Some((_, (_, [first_file, _]))) = hidden.first() else { continue };
        let hidden_names: Vec<_> = hidden.iter().map(|(name, _)| format!("`{name}`")).collect();
        let path = file.path.display();
        let first_path = first_file.path.display();
        let text = format!(
            "{path} is never served for {}: {first_path} is listed before it, is valid for the same name and has the \
             same type of key",
            hidden_names.join(", ")
        );
        shadowed.push((index, text));
    }
    shadowed
}

// === `[acme]`, and the certificate names of the listeners that use it ===

/// The supported challenge types, in the default order.
const CHALLENGES: [(&str, ChallengeKind); 2] =
    [("http-01", ChallengeKind::Http01), ("tls-alpn-01", ChallengeKind::TlsAlpn01)];

/// The certificates that the gateway obtains by ACME, and the ACME settings.
#[derive(Debug)]
pub struct Acme {
    /// The settings in `[acme]`.
    pub settings: Arc<AcmeSettings>,
    /// The active certificates. A reload keeps them.
    pub certificates: Arc<ManagedCertificates>,
    /// The DNS names for which the gateway obtains certificates. Contains the names of all listeners, sorted.
    pub names: Vec<Box<str>>,
    /// Wildcard hosts of all routes if a listener with `tls.acme` has no `names`, otherwise empty. No certificates are
    /// obtained for these hosts.
    pub skipped_wildcards: Vec<Box<str>>,
}

impl Acme {
    /// Return a warning if `[acme]` has no effect, and a warning for each wildcard host that gets no certificate.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let unused = self.names.is_empty().then(|| "[acme] has no effect: no listener has `tls.acme`".to_owned());
        let wildcards = self.skipped_wildcards.iter().map(|host| {
            format!(
                "no certificate is obtained for `{host}`: wildcards require DNS-01 challenges; list its names in `tls.names`"
            )
        });
        unused.into_iter().chain(wildcards)
    }
}

/// `[acme]`
#[derive(Debug)]
pub struct AcmeSettings {
    /// URL of the CA's ACME directory.
    pub directory: HttpUrl,
    /// Email address of the ACME account.
    pub email: Option<Box<str>>,
    /// Trust roots that verify the CA's server.
    pub trust_roots: TrustRoots,
    /// Directory for the ACME account, the certificates and their private keys.
    pub storage: PathBuf,
    /// Challenge types in order of preference.
    pub challenges: Vec<ChallengeKind>,
    /// External account to which the ACME account is bound (EAB).
    pub external_account: Option<ExternalAccount>,
    /// Secret from which the gateway derives the key that encrypts the private keys in Redis.
    pub secret: StoreSecret,
}

/// `store.secret`. The `Debug` implementation does not print it.
pub struct StoreSecret(Box<str>);

impl StoreSecret {
    /// Return the secret as written in the configuration.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreSecret")
    }
}

/// Existing account at the CA, to which the ACME account is bound (RFC 8555 §7.3.4). The `Debug` implementation does
/// not print the MAC key.
pub struct ExternalAccount {
    /// Key identifier that the CA issued.
    pub key_id: String,
    /// MAC key that the CA issued.
    pub mac_key: Vec<u8>,
}

impl fmt::Debug for ExternalAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalAccount").field("key_id", &self.key_id).finish_non_exhaustive()
    }
}

/// The settings and the hosts of routes that listeners with `tls.acme` need.
pub(super) struct AcmeListeners {
    /// The certificates. `None` without `[acme]`.
    certificates: Option<Arc<ManagedCertificates>>,
    /// Default names for listeners without `names`: the hosts of all routes.
    default_names: Vec<Box<str>>,
    /// Wildcard hosts of all routes.
    wildcards: Vec<Box<str>>,
    /// Whether at least one listener uses the default names.
    uses_defaults: bool,
}

impl AcmeListeners {
    pub(super) fn new(config: &Config, reader: &mut Validator<'_>) -> Self {
        let certificates = config.acme.as_ref().and_then(|acme| match ManagedCertificates::new() {
            Ok(certificates) => Some(Arc::new(certificates)),
            Err(error) => {
                reader.push_issue(Issue::new(acme.span(), error.to_string()));
                None
            }
        });
        let (mut default_names, mut wildcards) = (Vec::new(), Vec::new());
        for host in config.route.iter().flat_map(|route| route.get_ref().hosts.iter().flatten()) {
            let host: Box<str> = canonical_host(host.get_ref()).into();
            match host.strip_prefix("*.") {
                Some(_) => wildcards.push(host),
                None if is_dns_name(&host) => default_names.push(host),
                // Skip hosts that are IP addresses. Also skip invalid hosts, which are reported for the route.
                None => {}
            }
        }
        for names in [&mut default_names, &mut wildcards] {
            names.sort();
            names.dedup();
        }
        AcmeListeners { certificates, default_names, wildcards, uses_defaults: false }
    }

    /// Compile the names of a listener with `tls.acme`.
    pub(super) fn names(
        &mut self,
        acme: &Spanned<bool>,
        names: Option<&[Text]>,
        reader: &mut Validator<'_>,
    ) -> Option<(Vec<Box<str>>, Arc<ManagedCertificates>)> {
        let Some(certificates) = self.certificates.clone() else {
            let issue = Issue::new(acme.span(), "`acme` requires the table [acme]");
            reader.push_missing_elsewhere(
                issue.with_hint("add [acme] with accept_terms = true and email = \"you@example.com\""),
            );
            return None;
        };
        let compiled = match names {
            Some(names) => compile_names(names, reader),
            None => {
                self.uses_defaults = true;
                self.default_names.clone()
            }
        };
        if compiled.is_empty() && names.is_none_or(<[_]>::is_empty) {
            let issue =
                Issue::new(acme.span(), "`names` is missing, and no route has a host to obtain a certificate for");
            reader.push_missing_elsewhere(issue.with_hint("tls = { acme = true, names = [\"api.example.com\"] }"));
            return None;
        }
        Some((compiled, certificates))
    }
}

/// Compile `names`. A wildcard is an error, because CAs issue wildcard certificates only by DNS-01 challenges.
fn compile_names(names: &[Text], reader: &mut Validator<'_>) -> Vec<Box<str>> {
    let mut compiled: Vec<Box<str>> = Vec::new();
    for text in names {
        let name = canonical_host(text.get_ref());
        let issue = if name.starts_with("*.") {
            let issue = Issue::new(text.span(), format!("a certificate for `{name}` requires DNS-01 challenges"));
            Some(issue.with_hint("list the names, or use a certificate from files: tls.certificates"))
        } else if !is_dns_name(&name) {
            let issue = Issue::new(text.span(), format!("`{name}` is not a DNS name"));
            Some(issue.with_hint("write a name such as \"api.example.com\", and international names with xn--"))
        } else if compiled.iter().any(|other| **other == *name) {
            Some(Issue::new(text.span(), format!("`{name}` is in `names` twice")))
        } else {
            compiled.push(name.into());
            None
        };
        issue.into_iter().for_each(|issue| reader.push_issue(issue));
    }
    compiled
}

fn is_dns_name(name: &str) -> bool {
    let is_address = name.parse::<std::net::Ipv4Addr>().is_ok();
    !is_address && !name.contains('_') && !name.ends_with('.') && DnsName::try_from(name).is_ok()
}

/// Compile `[acme]`.
pub(super) fn acme(
    config: &Config,
    context: AcmeListeners,
    listeners: &[Listener],
    reader: &mut Validator<'_>,
) -> Option<Acme> {
    let acme = config.acme.as_ref()?;
    let settings = settings(acme, config, reader);
    let managed = listeners.iter().filter_map(|listener| listener.tls.as_ref()?.tls.managed());
    let mut names: Vec<_> = managed.flat_map(|(names, _)| names.to_vec()).collect();
    names.sort();
    names.dedup();
    let skipped_wildcards = if context.uses_defaults { context.wildcards } else { Vec::new() };
    Some(Acme { settings: Arc::new(settings?), certificates: context.certificates?, names, skipped_wildcards })
}

fn settings(acme: &Spanned<gateway::Acme>, config: &Config, reader: &mut Validator<'_>) -> Option<AcmeSettings> {
    let span = acme.span();
    let acme = acme.get_ref();
    if !acme.accept_terms.as_ref().is_some_and(|accept| *accept.get_ref()) {
        let span = acme.accept_terms.as_ref().map_or(span.clone(), |accept| accept.span());
        let issue = Issue::new(span, "CAs issue certificates only if you accept their terms of service");
        reader.push_missing(issue.with_hint(
            "read the terms of service, for example https://letsencrypt.org/repository/, and write accept_terms = true",
        ));
    }
    let email = acme.email.as_ref().filter(|email| {
        let is_valid = email.get_ref().split_once('@').is_some_and(|(user, host)| !user.is_empty() && !host.is_empty())
            && !email.get_ref().contains(|c: char| c.is_whitespace() || c == ':');
        if !is_valid {
            let issue = Issue::new(email.span(), format!("`{}` is not an email address", email.get_ref()));
            reader.push_issue(issue.with_hint("such as \"operations@example.com\""));
        }
        is_valid
    });
    let is_staging = acme.staging.as_ref().is_some_and(|staging| *staging.get_ref());
    let directory = match (&acme.directory, is_staging) {
        (Some(directory), true) => {
            let issue = Issue::new(directory.span(), "`directory` and `staging` cannot be combined");
            reader.push_issue(issue.with_hint("`staging` always selects the staging directory of Let's Encrypt"));
            None
        }
        (Some(directory), false) => directory_url(directory, reader),
        (None, true) => LetsEncrypt::Staging.url().parse().ok(),
        (None, false) => LetsEncrypt::Production.url().parse().ok(),
    };
    let challenges = challenges(acme.challenges.as_deref(), config, &span, reader);
    let secret = config.store.secret.as_ref();
    let is_missing = secret.is_none_or(|secret| secret.get_ref().is_empty() && !reader.is_unresolved(secret));
    if let Some(url) = config.store.url.as_ref().filter(|url| is_missing && url.get_ref() != "memory:") {
        let message = "ACME over a shared store requires `store.secret`: it encrypts the private keys in Redis";
        reader.push_missing_elsewhere(Issue::new(url.span(), message).with_hint(
            "set secret = \"${SLUICEGATE_STORE_SECRET}\", the same on all gateways; generate it with openssl rand -hex \
             32",
        ));
    }
    let secret = StoreSecret(secret.map_or("", |secret| secret.get_ref()).into());
    let external_account = acme.external_account.as_ref().and_then(|account| external_account(account, reader));
    let trust_roots = trust_roots(acme.ca.as_ref(), span, reader);
    Some(AcmeSettings {
        directory: directory?,
        email: email.map(|email| email.get_ref().as_str().into()),
        trust_roots: trust_roots?,
        storage: storage(acme.storage.as_ref(), reader),
        challenges,
        external_account,
        secret,
    })
}

fn directory_url(text: &Text, reader: &mut Validator<'_>) -> Option<HttpUrl> {
    if reader.is_unresolved(text) {
        return None;
    }
    let example = format!("\"{}\"", LetsEncrypt::Production.url());
    let url = reader.url(text, &example, "`external_account` identifies the account")?;
    if !url.is_https() {
        let issue = Issue::new(text.span(), format!("`{url}` is not an https:// URL"));
        reader.push_issue(issue.with_hint(format!("such as {example}")));
        return None;
    }
    Some(url)
}

fn trust_roots(ca: Option<&Text>, span: std::ops::Range<usize>, reader: &mut Validator<'_>) -> Option<TrustRoots> {
    let (roots, span, hint) = match ca {
        Some(ca) => {
            let file = reader.read_pem(ca)?;
            (
                TrustRoots::from_pem(&file.content),
                ca.span(),
                upstreams::certificate_hint(
                    &file,
                    "give the path of a PEM file with the CA certificates that verify the ACME server",
                ),
            )
        }
        None => (TrustRoots::from_system(), span, "install the package ca-certificates, or set `ca`".to_owned()),
    };
    match roots {
        Ok(roots) => Some(roots),
        Err(error) => {
            reader.push_issue(Issue::new(span, error.to_string()).with_hint(hint));
            None
        }
    }
}

/// Return the storage directory: `storage` if it is set, otherwise `acme` in the first directory in `$STATE_DIRECTORY`
/// (systemd.exec(5)), otherwise `certs/acme`.
fn storage(text: Option<&Text>, reader: &Validator<'_>) -> PathBuf {
    if let Some(text) = text {
        return reader.resolve_path(text);
    }
    let state = (reader.environment)("STATE_DIRECTORY").unwrap_or_default();
    match state.to_string_lossy().split(':').next().filter(|state| !state.is_empty()) {
        Some(state) => PathBuf::from(state).join("acme"),
        None => reader.resolve_relative("certs/acme", 0..0),
    }
}

fn challenges(
    written: Option<&[Text]>,
    config: &Config,
    span: &std::ops::Range<usize>,
    reader: &mut Validator<'_>,
) -> Vec<ChallengeKind> {
    let Some(written) = written else {
        let has_plaintext = config.listener.iter().any(|listener| listener.get_ref().tls.is_none());
        let all = CHALLENGES.iter().map(|(_, kind)| *kind);
        return all.filter(|kind| has_plaintext || *kind != ChallengeKind::Http01).collect();
    };
    if written.is_empty() {
        let issue = Issue::new(span.clone(), "`challenges` is empty: the CA could not validate any name");
        reader.push_issue(issue.with_hint("remove `challenges` to use http-01 and tls-alpn-01"));
    }
    let mut kinds = Vec::new();
    for text in written {
        let kind = reader.one_of(Some(text), ChallengeKind::Http01, &CHALLENGES);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

fn external_account(
    account: &Spanned<gateway::ExternalAccount>,
    reader: &mut Validator<'_>,
) -> Option<ExternalAccount> {
    let span = account.span();
    let account = account.get_ref();
    let key_id = reader.required(account.key_id.as_ref(), &span, "key_id", "\"kid-1\"");
    let mac_key = reader.required(account.mac_key.as_ref(), &span, "mac_key", "\"${ACME_MAC_KEY}\"");
    let key_id = key_id?;
    let mac_key = mac_key?;
    let bytes = URL_SAFE_NO_PAD.decode(mac_key.get_ref().trim_end_matches('=')).ok().filter(|bytes| !bytes.is_empty());
    if bytes.is_none() && !reader.is_unresolved(mac_key) {
        let issue = Issue::new(mac_key.span(), "`mac_key` is not base64url");
        reader.push_issue(issue.with_hint("copy the key as the CA shows it: letters, digits, `-` and `_`"));
    }
    Some(ExternalAccount { key_id: key_id.get_ref().clone(), mac_key: bytes? })
}
