//! TLS of connections to the store and to upstreams.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustls::pki_types::ServerName;

use crate::config;
use crate::config::Text;
use crate::config::error::Issue;
use crate::config::file::FileSnapshot;
use crate::snapshot::validator::Validator;
use crate::tls::{Certificate, TlsError, TrustRoots};
use crate::upstream::connector::{EndpointTls, UpstreamTlsConfig};
use crate::upstream::{Protocol, UpstreamSettings};

/// The files of a client TLS table.
#[derive(Debug, Default)]
pub(super) struct TlsFiles {
    /// File of the CA certificates that verify servers.
    pub(super) ca: Option<FileSnapshot>,
    /// The client certificate and its key.
    pub(super) gateway_certificate: Option<[FileSnapshot; 2]>,
}

/// TLS of one upstream.
#[derive(Debug)]
pub struct UpstreamTls {
    /// Name of the upstream.
    pub name: Box<str>,
    /// TLS configuration for new connections.
    tls: Arc<UpstreamTlsConfig>,
    /// Name for which the server certificates must be valid. `None` selects the host in the URL of each server.
    server_name: Option<ServerName<'static>>,
    /// The files as the loader has read them.
    files: TlsFiles,
    /// The client certificate as the loader has read it.
    gateway_certificate: Option<Certificate>,
    /// Whether [`UpstreamTls::reload`] has replaced the TLS configuration.
    is_reloaded: AtomicBool,
}

impl TlsFiles {
    /// Read the files that a client TLS table names. `cert` and `key` require each other.
    pub(super) fn read(
        ca: Option<&Text>,
        gateway_certificate: [Option<&Text>; 2],
        span: Range<usize>,
        reader: &mut Validator<'_>,
    ) -> Self {
        let ca = ca.and_then(|text| reader.read_pem(text));
        let own = match gateway_certificate {
            [Some(cert), Some(key)] => Some([reader.read_pem(cert), reader.read_pem(key)]),
            [None, None] => None,
            [Some(_), None] | [None, Some(_)] => {
                reader.push_missing(Issue::new(span, "a client certificate requires both `cert` and `key`"));
                None
            }
        };
        let own = own.and_then(|[cert, key]| Some([cert?, key?]));
        TlsFiles { ca, gateway_certificate: own }
    }
}

/// Read a certificate chain and its key. The issue contains the paths of both files.
pub(super) fn certificate(cert: &FileSnapshot, key: &FileSnapshot, span: Range<usize>) -> Result<Certificate, Issue> {
    Certificate::from_pem(&cert.content, &key.content).map_err(|error| {
        let cert_path = cert.path.display();
        let key_path = key.path.display();
        let is_swapped = pem_kinds(&cert.content).any(is_private_key) && pem_kinds(&key.content).any(is_certificate);
        let (message, hint) = match error {
            _ if is_swapped && !pem_kinds(&cert.content).any(is_certificate) => (
                format!("`cert` and `key` are swapped: {cert_path} is the key and {key_path} the certificate"),
                "exchange the two files".to_owned(),
            ),
            TlsError::KeyMismatch(_) => (
                format!("certificate and key do not match: {cert_path}, {key_path}"),
                format!(
                    "these commands print the same public key for a matching pair: openssl x509 -noout -pubkey -in {cert_path}; \
                     openssl pkey -pubout -in {key_path}"
                ),
            ),
            TlsError::UnreadableKey(_) | TlsError::UnusableKey(_) => (format!("{key_path}: {error}"), key_hint(key)),
            error => (
                format!("{cert_path}: {error}"),
                "a PEM file with the certificate, followed by its intermediate certificates; `make certs` creates one \
                 for development"
                    .to_owned(),
            ),
        };
        Issue::new(span, message).with_hint(hint)
    })
}

/// Return the kinds of the sections in a PEM file, such as `RSA PRIVATE KEY`.
fn pem_kinds(content: &[u8]) -> impl Iterator<Item = &str> {
    let lines = content.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    lines.filter_map(|line| line.trim().strip_prefix("-----BEGIN ")?.strip_suffix("-----"))
}

fn is_private_key(kind: &str) -> bool {
    kind.ends_with("PRIVATE KEY")
}

fn is_certificate(kind: &str) -> bool {
    kind == "CERTIFICATE"
}

/// Return how to convert a key that cannot be used.
fn key_hint(key: &FileSnapshot) -> String {
    let path = key.path.display();
    let has_kind = |wanted: &str| pem_kinds(&key.content).any(|kind| kind == wanted);
    let is_encrypted = has_kind("ENCRYPTED PRIVATE KEY")
        || key.content.windows(b"Proc-Type: 4,ENCRYPTED".len()).any(|line| line == b"Proc-Type: 4,ENCRYPTED");
    if is_encrypted {
        return format!("the key has a password; remove it: openssl pkey -in {path} -out key.pem");
    }
    if has_kind("OPENSSH PRIVATE KEY") {
        return format!("convert a copy of the OpenSSH key: ssh-keygen -p -m PEM -f {path}");
    }
    // Detect a DER file by its first byte, SEQUENCE (0x30). In PEM files, this byte occurs only in base64.
    if key.content.starts_with(&[0x30]) {
        return format!("convert DER to PEM: openssl pkey -inform DER -in {path} -out key.pem");
    }
    format!(
        "RSA, ECDSA (P-256, P-384, P-521) or Ed25519 as PEM: BEGIN PRIVATE KEY (PKCS #8), BEGIN RSA PRIVATE KEY \
         (PKCS #1) or BEGIN EC PRIVATE KEY (SEC 1); convert with openssl pkey -in {path} -out key.pem"
    )
}

/// Compile the TLS settings of an upstream. Return `None` if all servers of the upstream use plaintext.
pub(super) fn upstream_tls(
    name: &str,
    upstream: &config::tables::Upstream,
    protocol: Protocol,
    reader: &mut Validator<'_>,
) -> Option<UpstreamTls> {
    let span = upstream.servers.iter().find(|server| server.get_ref().url.starts_with("https:"));
    let Some(span) = span.map(|server| server.span()) else {
        if let Some(tls) =
            upstream.tls.as_ref().filter(|_| !upstream.servers.iter().any(|one| reader.is_unresolved(one)))
        {
            let issue = Issue::new(tls.span(), "`tls` is valid only with servers at `https://`");
            reader.push_missing(issue.with_hint("servers = [\"https://…\"]"));
        }
        return None;
    };
    let files = match &upstream.tls {
        Some(tls) => {
            let config::tables::UpstreamTls { ca, cert, key, .. } = tls.get_ref();
            TlsFiles::read(ca.as_ref(), [cert.as_ref(), key.as_ref()], tls.span(), reader)
        }
        None => TlsFiles::default(),
    };
    let written = upstream.tls.as_ref().map(|tls| tls.get_ref());
    let ca = written.and_then(|tls| tls.ca.as_ref());
    let cert = written.and_then(|tls| tls.cert.as_ref());
    let mut fail = |text: Option<&Text>, error: TlsError, hint: &str| {
        reader.push_issue(Issue::new(text.map_or(span.clone(), |text| text.span()), error.to_string()).with_hint(hint));
    };
    let trust_roots = match (&files.ca, ca) {
        (Some(file), _) => TrustRoots::from_pem(&file.content).map_err(|error| {
            fail(ca, error, "a PEM file with the CA certificates for the servers");
        }),
        (None, None) => TrustRoots::from_system().map_err(|error| {
            fail(
                None,
                error,
                "install the package ca-certificates, or name the CA certificates: tls.ca = \"upstream-ca.pem\"",
            );
        }),
        // Return `None` without an error, because `read_pem` has reported the error.
        (None, Some(_)) => Err(()),
    };
    let server_name = written.and_then(|tls| tls.server_name.as_ref());
    let span_of_tls = cert.map_or(span.clone(), |text| text.span());
    let gateway_certificate = files.gateway_certificate.as_ref().map(|[cert, key]| certificate(cert, key, span_of_tls));
    let own = gateway_certificate.transpose().map_err(|issue| reader.push_issue(issue));
    let server_name = server_name.and_then(|text| self::parse_server_name(text.get_ref(), text.span(), reader));
    let trust_roots = trust_roots.ok()?;
    let own = own.ok()?;
    match UpstreamTlsConfig::new(trust_roots, own.as_ref(), protocol) {
        Ok(tls) => Some(UpstreamTls {
            name: name.into(),
            tls: Arc::new(tls),
            server_name,
            files,
            gateway_certificate: own,
            is_reloaded: AtomicBool::new(false),
        }),
        Err(error) => {
            reader.push_issue(Issue::new(span, error.to_string()));
            None
        }
    }
}

fn parse_server_name(text: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<ServerName<'static>> {
    let name = ServerName::try_from(text.to_owned()).ok();
    if name.is_none() {
        let issue = Issue::new(span, format!("`{text}` is not a valid server name"));
        reader
            .push_issue(issue.with_hint("write a host name or an address, such as tls.server_name = \"api.internal\""));
    }
    name
}

impl UpstreamTls {
    /// Return the TLS settings for one server.
    pub(super) fn for_server(&self, host: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<EndpointTls> {
        let name = self.server_name.clone().or_else(|| parse_server_name(host, span, reader))?;
        Some(EndpointTls { tls: self.tls.clone(), server_name: name })
    }

    /// Return the files to watch for changes.
    pub fn files(&self) -> Vec<FileSnapshot> {
        self.files.ca.iter().chain(self.files.gateway_certificate.iter().flatten()).cloned().collect()
    }

    /// Use the new content of the files, starting with the next connection.
    ///
    /// # Errors
    /// A file cannot be used, or its certificate has expired or is not valid yet. After an error, the active TLS
    /// configuration does not change.
    pub fn reload<'f>(&self, files: &'f [FileSnapshot], now: Duration) -> Result<(), (&'f FileSnapshot, TlsError)> {
        let (ca, gateway_certificate) = files.split_at(usize::from(self.files.ca.is_some()));
        let trust_roots = match ca {
            [file, ..] => TrustRoots::from_pem(&file.content).map_err(|error| (file, error))?,
            [] => TrustRoots::from_system().map_err(|error| (&files[0], error))?,
        };
        let own = match gateway_certificate {
            [cert, key] => {
                let own = Certificate::from_pem(&cert.content, &key.content).map_err(|error| (cert, error))?;
                own.check_validity(now.as_secs() as i64).map_err(|error| (cert, error))?;
                Some(own)
            }
            _ => None,
        };
        self.tls.replace(trust_roots, own.as_ref()).map_err(|error| (&files[0], error))?;
        self.is_reloaded.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Return whether `other` has the same settings and file contents and has not been reloaded since.
    pub(crate) fn is_same_as(&self, other: &UpstreamTls) -> bool {
        let file_contents =
            |tls: &UpstreamTls| tls.files().into_iter().map(|file| (file.path, file.content)).collect::<Vec<_>>();
        let identity = |tls: &UpstreamTls| (tls.name.clone(), tls.server_name.clone(), tls.files.ca.is_some());
        identity(self) == identity(other)
            && self.tls.protocol() == other.tls.protocol()
            && file_contents(self) == file_contents(other)
            && !other.is_reloaded.load(Ordering::Relaxed)
    }

    /// Make connections to the servers of `settings` use this TLS configuration.
    pub(crate) fn attach_tls(&self, settings: &mut UpstreamSettings) {
        for tls in settings.servers.iter_mut().filter_map(|server| server.tls.as_mut()) {
            tls.tls = self.tls.clone();
        }
    }

    /// Make connections to an endpoint use this TLS configuration.
    pub(crate) fn attach_to(&self, endpoint: &mut EndpointTls) {
        endpoint.tls = self.tls.clone();
    }

    /// Return a warning if the client certificate has expired or is not valid yet.
    pub(super) fn certificate_warning(&self, now: Duration) -> Option<String> {
        let error = self.gateway_certificate.as_ref()?.check_validity(now.as_secs() as i64).err()?;
        let [file, _] = self.files.gateway_certificate.as_ref()?;
        Some(format!("{}: {error}; servers of `{}` will reject the certificate", file.path.display(), self.name))
    }
}
