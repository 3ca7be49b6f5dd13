//! Compiles `[acme]`, and the names of the listeners that use it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Uri;
use instant_acme::LetsEncrypt;
use rustls::pki_types::DnsName;

use crate::config;
use crate::config::error::{Issue, Spanned};
use crate::config::{Config, Text};
use crate::http::target::canonical_host;
use crate::snapshot::Listener;
use crate::snapshot::validator::Validator;
use crate::tls::TrustRoots;
use crate::tls::managed::{ChallengeKind, ManagedCertificates};

/// Both kinds of challenges, in the default order.
const CHALLENGES: [(&str, ChallengeKind); 2] =
    [("http-01", ChallengeKind::Http01), ("tls-alpn-01", ChallengeKind::TlsAlpn01)];

/// The certificates that the gateway obtains with ACME, and their settings.
#[derive(Debug)]
pub struct Acme {
    /// The keys of `[acme]`.
    pub settings: Arc<AcmeSettings>,
    /// The certificates in use, which are kept across configurations.
    pub certificates: Arc<ManagedCertificates>,
    /// The names of all listeners, in sorted order.
    pub names: Vec<Box<str>>,
    /// Wildcard hosts of routes on listeners without `names`. No certificate is obtained for these hosts.
    pub skipped_wildcards: Vec<Box<str>>,
}

impl Acme {
    /// Return warnings about names for which the operator may expect a certificate, although none is obtained.
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
    /// URL of the directory of the CA.
    pub directory: Uri,
    /// Email address of the account.
    pub email: Option<Box<str>>,
    /// Trust roots for the connection to the CA.
    pub trust_roots: TrustRoots,
    /// Directory for the account, the certificates and their keys.
    pub storage: PathBuf,
    /// Kinds of challenges, in the order of preference.
    pub challenges: Vec<ChallengeKind>,
    /// External account to which the ACME account is bound.
    pub external_account: Option<ExternalAccount>,
    /// Secret of the store, with which private keys in Redis are encrypted.
    pub secret: StoreSecret,
}

/// `store.secret`. The `Debug` implementation does not print it.
pub struct StoreSecret(Box<str>);

impl StoreSecret {
    /// Return the secret as it is written.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreSecret")
    }
}

/// Account at the CA outside of ACME (RFC 8555 §7.3.4). The `Debug` implementation does not print the key.
pub struct ExternalAccount {
    /// Identifier of the external account key, from the CA.
    pub key_id: String,
    /// MAC key of the external account, from the CA.
    pub mac_key: Vec<u8>,
}

impl fmt::Debug for ExternalAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalAccount").field("key_id", &self.key_id).finish_non_exhaustive()
    }
}

/// The parts of `[acme]` that listeners need.
pub(super) struct AcmeListeners {
    /// The certificates. `None` if there is no `[acme]`.
    certificates: Option<Arc<ManagedCertificates>>,
    /// Default names, for listeners without `names`: the hosts of all routes.
    default_names: Vec<Box<str>>,
    /// Wildcard hosts of routes.
    wildcards: Vec<Box<str>>,
    /// Whether a listener uses the default names.
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
                // Skip a host that is an IP address, and an invalid host, which the route reports.
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
                issue.with_hint("[acme] with accept_terms = true and email = \"you@example.com\""),
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

/// Compile `names`. Wildcards are errors, because CAs issue certificates for them only with DNS-01 challenges.
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

fn settings(acme: &Spanned<config::Acme>, config: &Config, reader: &mut Validator<'_>) -> Option<AcmeSettings> {
    let (span, acme) = (acme.span(), acme.get_ref());
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
        (None, true) => Some(Uri::from_static(LetsEncrypt::Staging.url())),
        (None, false) => Some(Uri::from_static(LetsEncrypt::Production.url())),
    };
    let challenges = challenges(acme.challenges.as_deref(), config, &span, reader);
    let secret = config.store.secret.as_ref();
    let is_missing = secret.is_none_or(|secret| secret.get_ref().is_empty() && !reader.is_unresolved(secret));
    if let Some(url) = config.store.url.as_ref().filter(|url| is_missing && url.get_ref() != "memory:") {
        let message = "ACME over a shared store requires `store.secret`: it encrypts the private keys in Redis";
        reader.push_missing_elsewhere(Issue::new(url.span(), message).with_hint(
            "secret = \"${SLUICEGATE_STORE_SECRET}\", the same on all gateways; generate it with openssl rand -hex 32",
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

fn directory_url(text: &Text, reader: &mut Validator<'_>) -> Option<Uri> {
    let uri = text.get_ref().parse::<Uri>().ok();
    let uri = uri.filter(|uri| uri.scheme_str() == Some("https") && uri.host().is_some_and(|host| !host.is_empty()));
    if uri.is_none() && !reader.is_unresolved(text) {
        let issue = Issue::new(text.span(), format!("`{}` is not an https:// URL", text.get_ref()));
        reader.push_issue(issue.with_hint(format!("such as \"{}\"", LetsEncrypt::Production.url())));
    }
    uri
}

fn trust_roots(ca: Option<&Text>, span: std::ops::Range<usize>, reader: &mut Validator<'_>) -> Option<TrustRoots> {
    let (roots, span, hint) = match ca {
        Some(ca) => {
            let file = reader.read_pem(ca)?;
            (
                TrustRoots::from_pem(&file.content),
                ca.span(),
                "give the path of a PEM file with the CA certificates that verify the ACME server",
            )
        }
        None => (TrustRoots::from_system(), span, "install the package ca-certificates, or set `ca`"),
    };
    match roots {
        Ok(roots) => Some(roots),
        Err(error) => {
            reader.push_issue(Issue::new(span, error.to_string()).with_hint(hint));
            None
        }
    }
}

/// Return the storage directory: as it is written, otherwise below the first directory in `$STATE_DIRECTORY`
/// (systemd.exec(5)), otherwise `certs/acme`.
fn storage(text: Option<&Text>, reader: &Validator<'_>) -> PathBuf {
    if let Some(text) = text {
        return reader.resolve_path(text);
    }
    let state = (reader.environment)("STATE_DIRECTORY").unwrap_or_default();
    match state.split(':').next().filter(|state| !state.is_empty()) {
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

fn external_account(account: &Spanned<config::ExternalAccount>, reader: &mut Validator<'_>) -> Option<ExternalAccount> {
    let (span, account) = (account.span(), account.get_ref());
    let key_id = reader.required(account.key_id.as_ref(), &span, "key_id", "\"kid-1\"");
    let mac_key = reader.required(account.mac_key.as_ref(), &span, "mac_key", "\"${ACME_MAC_KEY}\"");
    let (key_id, mac_key) = (key_id?, mac_key?);
    let bytes = URL_SAFE_NO_PAD.decode(mac_key.get_ref().trim_end_matches('=')).ok().filter(|bytes| !bytes.is_empty());
    if bytes.is_none() && !reader.is_unresolved(mac_key) {
        let issue = Issue::new(mac_key.span(), "`mac_key` is not base64url");
        reader.push_issue(issue.with_hint("copy the key as the CA shows it: letters, digits, `-` and `_`"));
    }
    Some(ExternalAccount { key_id: key_id.get_ref().clone(), mac_key: bytes? })
}
