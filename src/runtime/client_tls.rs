//! `tls` of what we connect to: the store and upstreams.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::pki_types::ServerName;
use tokio::time::Duration;

use super::reader::Reader;
use crate::config;
use crate::config::Text;
use crate::config::error::Issue;
use crate::tls::TlsError;
use crate::tls::authorities::TrustRoots;
use crate::tls::certificate::Certificate;
use crate::upstream::Protocol;
use crate::upstream::settings::UpstreamSettings;
use crate::upstream::tls::{ServerTls, Tls};
use crate::watch::Snapshot;

/// The files that such a table names.
#[derive(Debug, Default)]
pub(super) struct TlsFiles {
    /// Whom to believe.
    pub(super) ca: Option<Snapshot>,
    /// Who we are: a certificate and its key.
    pub(super) own: Option<[Snapshot; 2]>,
}

/// TLS of one upstream.
#[derive(Debug)]
pub struct UpstreamTls {
    /// The name of the upstream.
    pub name: Box<str>,
    /// What makes connections.
    tls: Arc<Tls>,
    /// What the certificates of its servers must be for; none = the host of each.
    server_name: Option<ServerName<'static>>,
    /// Where what it is made of came from.
    files: TlsFiles,
    /// Our certificate at the start.
    own: Option<Certificate>,
    /// Whether it has been made of other files since.
    renewed: AtomicBool,
}

impl TlsFiles {
    pub(super) fn read(
        ca: Option<&Text>,
        own: [Option<&Text>; 2],
        place: Range<usize>,
        reader: &mut Reader<'_>,
    ) -> Self {
        let ca = ca.and_then(|text| reader.pem(text));
        let own = match own {
            [Some(cert), Some(key)] => Some([reader.pem(cert), reader.pem(key)]),
            [None, None] => None,
            [Some(_), None] | [None, Some(_)] => {
                reader.issue(Issue::at(place, "a client certificate needs `cert` and `key`"));
                None
            }
        };
        let own = own.and_then(|[cert, key]| Some([cert?, key?]));
        TlsFiles { ca, own }
    }
}

/// TLS of an upstream; none if all its servers speak clear text.
pub(super) fn upstream(
    name: &str,
    upstream: &config::Upstream,
    protocol: Protocol,
    reader: &mut Reader<'_>,
) -> Option<UpstreamTls> {
    let place = upstream.servers.iter().find(|server| server.get_ref().url.starts_with("https:"));
    let Some(place) = place.map(|server| server.span()) else {
        if let Some(tls) = &upstream.tls {
            let issue = Issue::at(tls.span(), "`tls` goes with servers at `https://` only");
            reader.issue(issue.hint("servers = [\"https://…\"]"));
        }
        return None;
    };
    let files = match &upstream.tls {
        Some(tls) => {
            let config::UpstreamTls { ca, cert, key, .. } = tls.get_ref();
            TlsFiles::read(ca.as_ref(), [cert.as_ref(), key.as_ref()], tls.span(), reader)
        }
        None => TlsFiles::default(),
    };
    let written = upstream.tls.as_ref().map(|tls| tls.get_ref());
    let (ca, cert) = (written.and_then(|tls| tls.ca.as_ref()), written.and_then(|tls| tls.cert.as_ref()));
    let mut fail = |text: Option<&Text>, error: TlsError, hint: &str| {
        reader.issue(Issue::at(text.map_or(place.clone(), |text| text.span()), error.to_string()).hint(hint));
    };
    let authorities = match (&files.ca, ca) {
        (Some(file), _) => TrustRoots::from_pem(&file.content).map_err(|error| {
            fail(ca, error, "a PEM file with the certificates of the authorities that sign those of the servers");
        }),
        (None, None) => TrustRoots::from_system().map_err(|error| {
            fail(None, error, "install ca-certificates, or name those that count: tls.ca = \"upstream-ca.pem\"");
        }),
        // That it cannot be read is told.
        (None, Some(_)) => Err(()),
    };
    let server_name = written.and_then(|tls| tls.server_name.as_ref());
    let own = files.own.as_ref().map(|[cert, key]| Certificate::from_pem(&cert.content, &key.content));
    let own = own.transpose().map_err(|error| fail(cert, error, "PEM files, the key without a password"));
    let server_name = server_name.and_then(|text| self::server_name(text.get_ref(), text.span(), reader));
    let (authorities, own) = (authorities.ok()?, own.ok()?);
    match Tls::new(authorities, own.as_ref(), protocol) {
        Ok(tls) => Some(UpstreamTls {
            name: name.into(),
            tls: Arc::new(tls),
            server_name,
            files,
            own,
            renewed: AtomicBool::new(false),
        }),
        Err(error) => {
            reader.issue(Issue::at(place, error.to_string()));
            None
        }
    }
}

fn server_name(text: &str, place: Range<usize>, reader: &mut Reader<'_>) -> Option<ServerName<'static>> {
    let name = ServerName::try_from(text.to_owned()).ok();
    if name.is_none() {
        let issue = Issue::at(place, format!("`{text}` is no name that a certificate can be for"));
        reader.issue(issue.hint("a host name or an address, such as tls.server_name = \"api.internal\""));
    }
    name
}

impl UpstreamTls {
    /// How to reach one of its servers.
    pub(super) fn to(&self, host: &str, place: Range<usize>, reader: &mut Reader<'_>) -> Option<ServerTls> {
        let name = self.server_name.clone().or_else(|| server_name(host, place, reader))?;
        Some(ServerTls { tls: self.tls.clone(), name })
    }

    /// The files that may change.
    pub fn files(&self) -> Vec<Snapshot> {
        self.files.ca.iter().chain(self.files.own.iter().flatten()).cloned().collect()
    }

    /// Takes over what is now in its files, from the next connection on.
    ///
    /// # Errors
    /// The file that cannot be used, or for which it is too late or too early; what was there before stays.
    pub fn reload<'f>(&self, files: &'f [Snapshot], now: Duration) -> Result<(), (&'f Snapshot, TlsError)> {
        let (ca, own) = files.split_at(usize::from(self.files.ca.is_some()));
        let authorities = match ca {
            [file, ..] => TrustRoots::from_pem(&file.content).map_err(|error| (file, error))?,
            [] => TrustRoots::from_system().map_err(|error| (&files[0], error))?,
        };
        let own = match own {
            [cert, key] => {
                let own = Certificate::from_pem(&cert.content, &key.content).map_err(|error| (cert, error))?;
                own.check_validity(now.as_secs() as i64).map_err(|error| (cert, error))?;
                Some(own)
            }
            _ => None,
        };
        self.tls.replace(authorities, own.as_ref()).map_err(|error| (&files[0], error))?;
        self.renewed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether another one is made of the same.
    pub(super) fn is_same_as(&self, other: &UpstreamTls) -> bool {
        let contents =
            |tls: &UpstreamTls| tls.files().into_iter().map(|file| (file.path, file.content)).collect::<Vec<_>>();
        let named = |tls: &UpstreamTls| (tls.name.clone(), tls.server_name.clone(), tls.files.ca.is_some());
        named(self) == named(other)
            && self.tls.protocol() == other.tls.protocol()
            && contents(self) == contents(other)
            && !other.renewed.load(Ordering::Relaxed)
    }

    /// Has connections to these servers made by it.
    pub(super) fn dress(&self, settings: &mut UpstreamSettings) {
        for tls in settings.servers.iter_mut().filter_map(|server| server.tls.as_mut()) {
            tls.tls = self.tls.clone();
        }
    }

    /// What servers will not like of our certificate.
    pub(super) fn warning(&self, now: Duration) -> Option<String> {
        let error = self.own.as_ref()?.check_validity(now.as_secs() as i64).err()?;
        let [file, _] = self.files.own.as_ref()?;
        Some(format!("{}: {error}; servers of `{}` will refuse it", file.path.display(), self.name))
    }
}
