//! Compiles `[tiers]`, and these authentication providers (`[auth.NAME]`): `basic` with its password file, `forward`
//! with its authentication server, and `jwt` with keys from a URL.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};

use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::shorthand::UpstreamServer;
use crate::config::sources::FileSnapshot;
use crate::config::spanned::{Spanned, Text};
use crate::config::tables::{Upstream, UpstreamTls as WrittenTls};
use crate::http::headers::{Direction, reserved_reason};
use crate::http::url::HttpUrl;
use crate::identity::auth::TierSource;
use crate::identity::basic::{BasicProvider, BasicVerifier, Htpasswd};
use crate::identity::forward::{ForwardProvider, ForwardSettings, ToldParts};
use crate::identity::jwt::RemoteKeys;
use crate::identity::spec::Descriptor;
use crate::snapshot::upstreams;
use crate::snapshot::upstreams::UpstreamTls;
use crate::snapshot::validator::Validator;
use crate::upstream::connector::{EndpointTls, Protocol};
use crate::upstream::settings::UpstreamSettings;

/// Prefix of the names of internal upstreams. The authentication server of `[auth.NAME]` is the internal upstream
/// `auth.NAME`.
const UPSTREAM_PREFIX: &str = "auth.";

/// Maximum time to connect to an authentication server. It is equal to the default for other upstreams.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum lifetime of a cached admission. After a session is revoked, the gateway may use a cached admission for this
/// time.
const MAX_CACHE_TTL: Duration = Duration::from_secs(3600);

/// Bounds of `refresh_interval`.
const REFRESH_INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(86_400);

/// The internal upstreams and TLS settings that providers need. The indices of internal upstreams follow those of
/// `[upstream.NAME]`.
#[derive(Debug)]
pub(super) struct InternalUpstreams {
    /// Index of the first internal upstream: the number of `[upstream.NAME]` tables.
    pub(super) first: usize,
    pub(super) settings: Vec<UpstreamSettings>,
    pub(super) tls: Vec<UpstreamTls>,
}

/// A JWK Set that is fetched from a URL.
#[derive(Debug)]
pub struct KeyUrl {
    /// Index of the authentication provider.
    pub provider: usize,
    /// Name of the authentication provider.
    pub name: Box<str>,
    /// URL of the JWK Set.
    pub url: HttpUrl,
    /// File of the CA certificates that verify the server, as written. `None` selects the trust roots of the system.
    pub ca: Option<Box<str>>,
    /// TLS settings. `None` for plaintext.
    pub tls: Option<EndpointTls>,
    /// Time between two fetches.
    pub refresh_interval: Duration,
    /// The keys, which the token verifier also uses. A reload keeps the keys if `url` and `ca` do not change.
    pub keys: Arc<RemoteKeys>,
}

/// Compile a provider of kind `basic`. Also return its users file.
pub(super) fn basic(
    name: &str,
    auth: &gateway::Auth,
    span: &Range<usize>,
    reader: &mut Validator<'_>,
) -> Option<(BasicProvider, FileSnapshot)> {
    let realm = auth.realm.as_ref().map_or(name, |realm| realm.get_ref());
    if let Some(text) = auth.realm.as_ref().filter(|_| !realm.chars().all(|c| c == ' ' || c.is_ascii_graphic())) {
        let issue = Issue::new(text.span(), "a realm must be printable ASCII");
        reader.push_issue(issue.with_hint("such as realm = \"api\""));
    }
    let text = reader.required(auth.users.as_ref(), span, "users", "\"htpasswd\"")?;
    let path = reader.resolve_path(text);
    let file = match FileSnapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
            reader.push_issue(issue.with_hint(format!("create the file: htpasswd -cB {} USER", text.get_ref())));
            return None;
        }
    };
    match parse_users(&file) {
        Ok(users) => {
            let provider = BasicProvider { verifier: Arc::new(BasicVerifier::new(users)), realm: realm.into() };
            Some((provider, file))
        }
        Err((message, hint)) => {
            reader.push_issue(Issue::new(text.span(), format!("{}: {message}", path.display())).with_hint(hint));
            None
        }
    }
}

/// Parse a users file. An error consists of a message and a hint. An empty file is an error, because another program
/// may be writing it.
fn parse_users(file: &FileSnapshot) -> Result<Htpasswd, (String, String)> {
    let name = file.path.file_name().unwrap_or_default().to_string_lossy();
    match Htpasswd::parse(&file.content) {
        Ok(users) if users.is_empty() => Err(("no users".to_owned(), format!("add a user: htpasswd -B {name} USER"))),
        Ok(users) => Ok(users),
        Err(error) => Err((error.to_string(), error.hint(&name))),
    }
}

impl BasicProvider {
    /// Replace the users with those of a changed file.
    ///
    /// # Errors
    /// The file is invalid. The error contains a message and a hint. After an error, the active users do not change.
    pub fn reload_users(&self, file: &FileSnapshot) -> Result<(), String> {
        let users = parse_users(file).map_err(|(message, hint)| format!("{message}; {hint}"))?;
        self.verifier.replace_users(users);
        Ok(())
    }
}

/// Compile a provider of kind `forward`. Its server becomes an internal upstream.
pub(super) fn forward(
    name: &str,
    auth: &gateway::Auth,
    span: &Range<usize>,
    internal: &mut InternalUpstreams,
    reader: &mut Validator<'_>,
) -> Option<ForwardProvider> {
    let timeout = reader.duration(auth.timeout.as_ref(), Duration::from_secs(2));
    let fail_open = reader.one_of(auth.on_error.as_ref(), false, &[("deny", false), ("allow", true)]);
    let request_headers = match &auth.request_headers {
        Some(list) => headers(list, "the authentication server gets", reader),
        None => vec![http::header::AUTHORIZATION, http::header::COOKIE],
    };
    let response_headers = headers(auth.response_headers.as_deref().unwrap_or_default(), "the upstream gets", reader);
    let (told, cache) = match &auth.cache {
        Some(cache) => cache_settings(cache, &request_headers, reader),
        None => (ToldParts::ALL, None),
    };
    let denied_by = if told == ToldParts::ALL { ToldParts::CLIENT } else { told };
    let text = reader.required(auth.url.as_ref(), span, "url", "\"http://127.0.0.1:4181/verify\"")?;
    let (settings, target, authority) = {
        let url = server_url(text, reader)?;
        let target = url.target();
        let authority = HeaderValue::from_str(url.authority()).ok()?;
        let table = internal_table(&url, text.span(), auth.ca.as_ref(), reader);
        let (settings, tls) = upstreams::upstream(&internal_name(name), &table, &text.span(), None, reader);
        internal.tls.extend(tls);
        let connect_timeout = timeout.min(CONNECT_TIMEOUT);
        (UpstreamSettings { connect_timeout, response_timeout: timeout, ..settings }, target, authority)
    };
    let upstream = internal.first + internal.settings.len();
    internal.settings.push(settings);
    let settings = ForwardSettings {
        target,
        authority,
        request_headers,
        response_headers,
        timeout,
        fail_open,
        told,
        denied_by,
        cache,
    };
    Some(ForwardProvider::new(settings, upstream))
}

/// Return the name of a provider's internal upstream.
pub(crate) fn internal_name(provider: &str) -> String {
    format!("{UPSTREAM_PREFIX}{provider}")
}

/// Report upstreams whose name is the name of an internal upstream.
pub(super) fn check_upstream_names(config: &Config, reader: &mut Validator<'_>) {
    for (name, upstream) in &config.upstream {
        let provider = name.strip_prefix(UPSTREAM_PREFIX).filter(|provider| config.auth.contains_key(*provider));
        if let Some(provider) = provider {
            let message = format!("the gateway uses the upstream name `{name}` for the server of [auth.{provider}]");
            reader.push_issue(Issue::new(upstream.span(), message).with_hint("choose another name for this upstream"));
        }
    }
}

/// Compile a list of header names.
fn headers(list: &[Text], recipient: &str, reader: &mut Validator<'_>) -> Vec<HeaderName> {
    let mut names = Vec::new();
    for text in list {
        let Some(name) = reader.header_name(text.span(), text.get_ref()) else { continue };
        if let Some(reason) = reserved_reason(&name, Direction::Request) {
            let message = format!("`{name}` cannot be listed, because {recipient} it always or never: {reason}");
            reader.push_issue(Issue::new(text.span(), message).with_hint("remove this header from the list"));
        } else if names.contains(&name) {
            reader.push_issue(Issue::new(text.span(), format!("`{name}` is listed twice")));
        } else {
            names.push(name);
        }
    }
    names
}

/// Compile `cache`. Return the request values that the server receives, and the lifetime and maximum number of cached
/// admissions.
fn cache_settings(
    cache: &Spanned<gateway::AuthCache>,
    request_headers: &[HeaderName],
    reader: &mut Validator<'_>,
) -> (ToldParts, Option<(Duration, usize)>) {
    let written = cache.get_ref();
    let told = match &written.by {
        None => ToldParts::ALL,
        Some(by) => {
            let mut told = ToldParts { method: false, host: false, uri: false, ip: false };
            let mut keyed = Vec::new();
            for text in by.get_ref() {
                match text.get_ref().as_str() {
                    "method" => told.method = true,
                    "host" => told.host = true,
                    "uri" => told.uri = true,
                    "ip" => told.ip = true,
                    other => match request_headers.iter().find(|name| name.as_str().eq_ignore_ascii_case(other)) {
                        Some(name) => keyed.push(name),
                        None => {
                            let known = request_headers.iter().map(HeaderName::as_str);
                            let known = known.chain(["method", "host", "uri", "ip"]);
                            reader.unknown_name(text.span(), "part of a key", other, known);
                        }
                    },
                }
            }
            if let Some(missing) = request_headers.iter().find(|name| !keyed.contains(name)) {
                let message = format!(
                    "the authentication server reads `{missing}`, which is not in `by`: a cached admission would be \
                     valid for any `{missing}`"
                );
                let hint = format!("add \"{missing}\" to `by`, or remove it from `request_headers`");
                reader.push_issue(Issue::new(by.span(), message).with_hint(hint));
            }
            told
        }
    };
    let ttl = reader.required(written.ttl.as_ref(), &cache.span(), "ttl", "\"10s\"").map(|text| {
        let ttl = reader.duration(Some(text), Duration::from_secs(10));
        if ttl.is_zero() || ttl > MAX_CACHE_TTL {
            let issue = Issue::new(text.span(), format!("`{}` is out of range", text.get_ref()));
            reader.push_issue(
                issue.with_hint("write at most \"1h\", because the gateway admits a revoked session for this time"),
            );
        }
        ttl
    });
    let max_entries = reader.number(written.max_entries.as_ref(), 1..1_000_001, 10_000) as usize;
    (told, ttl.map(|ttl| (ttl, max_entries)))
}

/// Compile `jwks_url` and `refresh_interval`.
pub(super) fn key_url(
    name: &str,
    auth: &gateway::Auth,
    text: &Text,
    provider: usize,
    internal: &mut InternalUpstreams,
    reader: &mut Validator<'_>,
) -> Option<KeyUrl> {
    let refresh_interval = reader.duration(auth.refresh_interval.as_ref(), Duration::from_secs(600));
    if let Some(text) = auth.refresh_interval.as_ref().filter(|_| !REFRESH_INTERVALS.contains(&refresh_interval)) {
        let issue = Issue::new(text.span(), format!("`{}` is out of range", text.get_ref()));
        reader.push_issue(issue.with_hint("write a duration from \"1s\" to \"1d\""));
    }
    let url = server_url(text, reader)?;
    let table = internal_table(&url, text.span(), auth.ca.as_ref(), reader);
    let tls = upstreams::upstream_tls(&internal_name(name), &table, Protocol::Http1, reader);
    let endpoint_tls = match &tls {
        Some(tls) => Some(tls.for_server(url.host(), text.span(), reader)?),
        None => None,
    };
    internal.tls.extend(tls);
    let keys = Arc::<RemoteKeys>::default();
    let ca = auth.ca.as_ref().map(|ca| ca.get_ref().as_str().into());
    Some(KeyUrl { provider, name: name.into(), url, ca, tls: endpoint_tls, refresh_interval, keys })
}

/// Parse the URL of an authentication server or of a JWK Set.
fn server_url(text: &Text, reader: &mut Validator<'_>) -> Option<HttpUrl> {
    let credentials = "let the server authenticate the gateway by its address";
    reader.url(text, "\"https://auth.example.com/verify\"", credentials)
}

/// Return an `[upstream.NAME]` table for a server. Errors point to the server's URL.
pub(super) fn internal_table(
    url: &HttpUrl,
    span: Range<usize>,
    ca: Option<&Text>,
    reader: &mut Validator<'_>,
) -> Upstream {
    if let Some(ca) = ca.filter(|_| !url.is_https()) {
        reader.push_issue(Issue::new(ca.span(), "`ca` is valid only for a URL with `https://`"));
    }
    let ca = ca.filter(|_| url.is_https());
    let server = UpstreamServer { url: url.origin(), weight: None };
    let tls = ca.map(|ca| {
        let text = Spanned::new(ca.span(), ca.get_ref().clone());
        Spanned::new(ca.span(), WrittenTls { ca: Some(text), ..WrittenTls::default() })
    });
    Upstream { servers: vec![Spanned::new(span, server)], tls, ..Upstream::default() }
}

// `[tiers]`.

/// Compile `[tiers] from`.
pub(super) fn tier_source(config: &Config, reader: &mut Validator<'_>) -> TierSource {
    let Some(text) = &config.tiers.from else { return TierSource::ApiKey };
    match text.get_ref().split_once(':') {
        None if text.get_ref() == "api-key" => TierSource::ApiKey,
        Some(("jwt", claim)) if !claim.is_empty() => {
            if !config.auth.values().any(|auth| auth.get_ref().is_of_kind("jwt")) {
                let issue =
                    Issue::new(text.span(), "[tiers] reads the tier from a claim, but no provider verifies tokens");
                reader.push_issue(issue.with_hint("add [auth.tokens] with kind = \"jwt\""));
            }
            TierSource::Jwt(claim.into())
        }
        Some(("auth", name)) => match reader.header_name(text.span(), name) {
            Some(name) => {
                if !config.auth.values().any(|auth| returns_header(auth.get_ref(), &name)) {
                    let message = format!("no authentication server returns `{name}`");
                    let hint = format!("set response_headers = [\"{name}\"] in an [auth.NAME] with kind = \"forward\"");
                    reader.push_issue(Issue::new(text.span(), message).with_hint(hint));
                }
                TierSource::Forward(name)
            }
            None => TierSource::ApiKey,
        },
        _ => {
            let known = ["api-key", "jwt:CLAIM", "auth:HEADER"];
            reader.unknown_name(text.span(), "source of tiers", text.get_ref(), known.into_iter());
            TierSource::ApiKey
        }
    }
}

/// Return whether the provider is of kind `forward` and has this header in `response_headers`.
pub(super) fn returns_header(auth: &gateway::Auth, name: &HeaderName) -> bool {
    let mut names = auth.response_headers.iter().flatten();
    auth.is_of_kind("forward") && names.any(|text| text.get_ref().eq_ignore_ascii_case(name.as_str()))
}

/// Check that the identity of a limit includes the credential that determines the tier. Otherwise, clients with
/// different tiers could share a bucket. On failure, return the source that `by` lacks.
pub(super) fn check_tier_identity(source: &TierSource, descriptors: &[Descriptor]) -> Result<(), &'static str> {
    let has = |is_source: fn(&Descriptor) -> bool| descriptors.iter().any(is_source);
    let (is_met, lacks) = match source {
        TierSource::ApiKey => (has(|descriptor| *descriptor == Descriptor::ApiKey), "api-key"),
        TierSource::Jwt(_) => (has(|descriptor| matches!(descriptor, Descriptor::Jwt(_))), "jwt:sub"),
        TierSource::Forward(_) => (has(|descriptor| matches!(descriptor, Descriptor::Forward(_))), "auth:x-user"),
    };
    if is_met { Ok(()) } else { Err(lacks) }
}
