//! Compiles `[auth.NAME]`, and `require` and `identify` of routes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use data_encoding::HEXLOWER;
use http::HeaderName;
use http::header::{AUTHORIZATION, PROXY_AUTHORIZATION};

use crate::config;
use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::shorthand::Requirement;
use crate::config::sources::FileSnapshot;
use crate::config::spanned::{Spanned, Text};
use crate::http::headers::{Direction, reserved_reason};
use crate::identity::api_key::{ApiKeyProvider, KeyPlace, MAX_PLACES, OnUnknownKey};
use crate::identity::auth::{AuthProvider, Challenge, ProviderKind, RouteAuth, TierSource};
use crate::identity::consumer::{ConsumerDirectory, ConsumerKey, Consumers};
use crate::identity::jwt::{JwtVerifier, KeySet, RequiredClaim};
use crate::identity::spec::Descriptor;
use crate::limiter::key::IdentityHasher;
use crate::snapshot::consumers;
use crate::snapshot::consumers::KnownNames;
use crate::snapshot::limits::{CompiledLimit, LimitsByName};
use crate::snapshot::listeners::WarningSubject;
use crate::snapshot::remote_auth;
use crate::snapshot::remote_auth::{InternalUpstreams, KeyUrl};
use crate::snapshot::validator::Validator;

/// The authentication providers of a configuration, and the files that they use.
#[derive(Debug, Default)]
pub struct Authentication {
    /// Providers. Routes refer to them by index.
    pub providers: Vec<AuthProvider>,
    /// Consumers files. A file that several providers use is listed once.
    pub consumers_files: Vec<ConsumersFile>,
    /// JWK Set files as they were when the configuration was loaded, each with the index of its provider.
    pub jwks_files: Vec<(usize, FileSnapshot)>,
    /// JWK Sets that are fetched from a URL.
    pub key_urls: Vec<KeyUrl>,
    /// Users files as they were when the configuration was loaded, each with the index of its provider.
    pub users_files: Vec<(usize, FileSnapshot)>,
    /// Source of a request's tier.
    pub tier_source: TierSource,
}

/// A consumers file.
#[derive(Debug)]
pub struct ConsumersFile {
    /// The file as it was when the configuration was loaded.
    pub file: FileSnapshot,
    /// The current consumers. They are replaced when the file changes.
    pub consumers: Arc<ArcSwap<Consumers>>,
}

impl Authentication {
    /// Return the current consumers of all files.
    pub fn consumers(&self) -> ConsumerDirectory {
        ConsumerDirectory(self.consumers_files.iter().map(|file| file.consumers.load_full()).collect())
    }

    /// Return warnings about API keys that expire within 14 days. Each warning names the provider that uses the key.
    pub fn key_warnings(&self, now: Duration) -> Vec<(WarningSubject, String)> {
        let mut warnings = Vec::new();
        for file in &self.consumers_files {
            let reads = |provider: &&AuthProvider| {
                provider.api_keys().is_some_and(|keys| Arc::ptr_eq(&keys.consumers, &file.consumers))
            };
            let Some(provider) = self.providers.iter().find(reads) else { continue };
            let consumers = file.consumers.load();
            let mut expiring: Vec<_> = consumers.keys().filter_map(|key| expiring_key(key, now)).collect();
            expiring.sort();
            let path = file.file.path.display();
            warnings.extend(
                expiring
                    .into_iter()
                    .map(|(_, text)| (WarningSubject::Consumers(provider.name.clone()), format!("{path}: {text}"))),
            );
        }
        warnings
    }

    fn index_of(&self, name: &str) -> Option<usize> {
        self.providers.iter().position(|provider| *provider.name == *name)
    }
}

/// `sluicegate check` and the log warn about API keys that expire within this time.
const EXPIRY_NOTICE: Duration = Duration::from_secs(14 * 86_400);

/// If an enabled key expires within [`EXPIRY_NOTICE`], return its expiry (µs since the Unix epoch) and a warning.
fn expiring_key(key: &ConsumerKey, now: Duration) -> Option<(u64, String)> {
    let terms = key.terms.as_ref().filter(|terms| !terms.disabled)?;
    let expires_us = terms.expires_us?;
    let left = Duration::from_micros(expires_us).checked_sub(now).filter(|left| *left <= EXPIRY_NOTICE)?;
    let name = match &terms.name {
        Some(name) => name.to_string(),
        None => HEXLOWER.encode(&key.hash[..6]),
    };
    let hours = left.as_secs().div_ceil(3600);
    let time = if hours < 48 { format!("{hours} hours") } else { format!("{} days", hours / 24) };
    Some((expires_us, format!("the key {name} of `{}` expires in {time}", key.consumer.name)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    ApiKey,
    Jwt,
    ClientCert,
    Basic,
    Forward,
}

const KINDS: [(&str, Kind); 5] = [
    ("api-key", Kind::ApiKey),
    ("jwt", Kind::Jwt),
    ("client-cert", Kind::ClientCert),
    ("basic", Kind::Basic),
    ("forward", Kind::Forward),
];

impl Kind {
    fn label(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(label, _)| label)
    }
}

/// Compile all providers. Add the settings for connections to their servers to `internal`.
pub(super) fn authentication(
    config: &Config,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    tier_source: TierSource,
    internal: &mut InternalUpstreams,
    reader: &mut Validator<'_>,
) -> Authentication {
    let mut compiled = Authentication { tier_source, ..Authentication::default() };
    remote_auth::check_upstream_names(config, reader);
    for (name, written) in &config.auth {
        let span = written.span();
        reader.check_name(span.clone(), name);
        let auth = written.get_ref();
        let Some(text) = reader.required(auth.kind.as_ref(), &span, "kind", "\"api-key\"") else { continue };
        let Some((_, kind)) = KINDS.iter().find(|(label, _)| label == text.get_ref()) else {
            reader.unknown_name(text.span(), "kind", text.get_ref(), KINDS.iter().map(|(label, _)| *label));
            continue;
        };
        report_foreign_keys(name, auth, *kind, reader);
        let kind = match kind {
            Kind::ApiKey => {
                ProviderKind::ApiKey(api_key(name, auth, &span, config, limits, hasher, &mut compiled, reader))
            }
            Kind::Jwt => ProviderKind::Jwt(jwt(name, auth, &span, &mut compiled, internal, reader)),
            Kind::ClientCert => {
                client_cert(name, &span, config, reader);
                ProviderKind::ClientCert
            }
            Kind::Basic => match remote_auth::basic(name, auth, &span, reader) {
                Some((provider, file)) => {
                    compiled.users_files.push((compiled.providers.len(), file));
                    ProviderKind::Basic(provider)
                }
                None => continue,
            },
            Kind::Forward => match remote_auth::forward(name, auth, &span, internal, reader) {
                Some(provider) => ProviderKind::Forward(provider),
                None => continue,
            },
        };
        let forwards_by_default = !matches!(kind, ProviderKind::ApiKey(_) | ProviderKind::Basic(_));
        let forward_credential =
            auth.forward_credential.as_ref().map_or(forwards_by_default, |forward| *forward.get_ref());
        compiled.providers.push(AuthProvider { name: name.as_str().into(), kind, forward_credential });
    }
    compiled
}

/// Report keys that are not valid for this kind of provider.
fn report_foreign_keys(name: &str, auth: &gateway::Auth, own: Kind, reader: &mut Validator<'_>) {
    let span = |text: &Option<Text>| text.as_ref().map(|text| text.span());
    let list = |list: &Option<Vec<Text>>| list.as_ref().map(|list| list.first().map(|text| text.span()));
    // An empty list has no item with a span. Use the start of the file as its span.
    let list = |list_of: &Option<Vec<Text>>| list(list_of).map(|span| span.unwrap_or_default());
    for (key, span, owners) in [
        ("header", auth.header.as_ref().map(|header| header.span()), &[Kind::ApiKey][..]),
        ("scheme", span(&auth.scheme), &[Kind::ApiKey]),
        ("consumers", span(&auth.consumers), &[Kind::ApiKey]),
        ("on_missing", span(&auth.on_missing), &[Kind::ApiKey]),
        ("on_unknown", span(&auth.on_unknown), &[Kind::ApiKey]),
        ("jwks_file", span(&auth.jwks_file), &[Kind::Jwt]),
        ("jwks_url", span(&auth.jwks_url), &[Kind::Jwt]),
        ("refresh_interval", span(&auth.refresh_interval), &[Kind::Jwt]),
        ("issuer", span(&auth.issuer), &[Kind::Jwt]),
        ("audience", span(&auth.audience), &[Kind::Jwt]),
        ("claims", auth.claims.as_ref().map(|claims| claims.span()), &[Kind::Jwt]),
        ("users", span(&auth.users), &[Kind::Basic]),
        ("realm", span(&auth.realm), &[Kind::Basic]),
        ("url", span(&auth.url), &[Kind::Forward]),
        ("request_headers", list(&auth.request_headers), &[Kind::Forward]),
        ("response_headers", list(&auth.response_headers), &[Kind::Forward]),
        ("timeout", span(&auth.timeout), &[Kind::Forward]),
        ("on_error", span(&auth.on_error), &[Kind::Forward]),
        ("cache", auth.cache.as_ref().map(|cache| cache.span()), &[Kind::Forward]),
        ("ca", span(&auth.ca), &[Kind::Forward, Kind::Jwt]),
    ] {
        if let Some(span) = span.filter(|_| !owners.contains(&own)) {
            let owners: Vec<_> = owners.iter().map(|owner| format!("kind = \"{}\"", owner.label())).collect();
            let issue = Issue::new(span, format!("`{key}` is valid only for {}", owners.join(" and ")));
            reader.push_missing(
                issue.with_hint(format!("remove `{key}`, because [auth.{name}] has kind = \"{}\"", own.label())),
            );
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn api_key(
    name: &str,
    auth: &gateway::Auth,
    span: &Range<usize>,
    config: &Config,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    compiled: &mut Authentication,
    reader: &mut Validator<'_>,
) -> ApiKeyProvider {
    let places = key_places(auth, reader);
    let anonymous_if_missing =
        reader.one_of(auth.on_missing.as_ref(), false, &[("reject", false), ("anonymous", true)]);
    let unknown =
        [("reject", OnUnknownKey::Reject), ("anonymous", OnUnknownKey::Anonymous), ("accept", OnUnknownKey::Accept)];
    let on_unknown = reader.one_of(auth.on_unknown.as_ref(), OnUnknownKey::Reject, &unknown);
    let consumers = match &auth.consumers {
        Some(text) => consumers(text, config, limits, hasher, compiled, reader),
        None => {
            if on_unknown == OnUnknownKey::Reject {
                let message = format!("`{name}` has no `consumers`: every key would be rejected");
                let hint = "set consumers = \"consumers.toml\", or on_unknown = \"accept\"";
                reader.push_missing(Issue::new(span.clone(), message).with_hint(hint));
            }
            Arc::default()
        }
    };
    let missing = format!("an API key is required in the {}", describe_places(&places)).into();
    ApiKeyProvider { places, consumers, anonymous_if_missing, on_unknown, missing }
}

/// Compile `header` and `scheme`.
fn key_places(auth: &gateway::Auth, reader: &mut Validator<'_>) -> Vec<KeyPlace> {
    let has_scheme = |name: &HeaderName| *name == AUTHORIZATION || *name == PROXY_AUTHORIZATION;
    let is_token = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    };
    let scheme = auth.scheme.as_ref().map_or("Bearer", |scheme| scheme.get_ref());
    if let Some(text) = auth.scheme.as_ref().filter(|text| !is_token(text.get_ref())) {
        let issue = Issue::new(text.span(), format!("`{}` is not an authentication scheme", text.get_ref()));
        reader.push_issue(issue.with_hint("write one word, such as \"Bearer\" (RFC 9110 §11.1)"));
    }
    let mut places: Vec<KeyPlace> = Vec::new();
    if let Some(list) = &auth.header {
        for text in &list.get_ref().0 {
            let Some(header) = reader.header_name(list.span(), text) else { continue };
            if let Some(reason) = reserved_reason(&header, Direction::Request) {
                let issue = Issue::new(list.span(), format!("`{header}` cannot contain an API key: {reason}"));
                reader.push_issue(issue.with_hint("use a header such as \"x-api-key\" or \"authorization\""));
            } else if places.iter().any(|place| place.header == header) {
                reader.push_issue(Issue::new(list.span(), format!("duplicate header `{header}`")));
            } else {
                let scheme = has_scheme(&header).then(|| scheme.into());
                places.push(KeyPlace { header, scheme });
            }
        }
        if list.get_ref().0.is_empty() {
            let issue = Issue::new(list.span(), "`header` is empty: no request would have a key");
            reader.push_issue(issue.with_hint("remove `header` to use the default \"x-api-key\""));
        }
        if places.len() > MAX_PLACES {
            let issue = Issue::new(list.span(), format!("an API key is read from at most {MAX_PLACES} headers"));
            reader.push_issue(issue);
        }
    }
    if let Some(text) = auth.scheme.as_ref().filter(|_| !places.iter().any(|place| place.scheme.is_some())) {
        let issue = Issue::new(text.span(), "`scheme` is valid only for `authorization` and `proxy-authorization`");
        reader.push_missing(issue.with_hint("set header = \"authorization\", or remove `scheme`"));
    }
    if places.is_empty() {
        places.push(KeyPlace { header: HeaderName::from_static("x-api-key"), scheme: None });
    }
    places
}

/// Return a description such as "header `authorization` (Bearer) or `x-api-key`".
fn describe_places(places: &[KeyPlace]) -> String {
    let place = |KeyPlace { header, scheme }: &KeyPlace| match scheme {
        Some(scheme) => format!("`{header}` ({scheme})"),
        None => format!("`{header}`"),
    };
    format!("header {}", places.iter().map(place).collect::<Vec<_>>().join(" or "))
}

/// Return the consumers of a file. If several providers use the file, it is read only once.
fn consumers(
    text: &Text,
    config: &Config,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    compiled: &mut Authentication,
    reader: &mut Validator<'_>,
) -> Arc<ArcSwap<Consumers>> {
    let path = reader.resolve_path(text);
    if let Some(known) = compiled.consumers_files.iter().find(|known| known.file.path == path) {
        return known.consumers.clone();
    }
    let names = KnownNames::written(limits, config, &compiled.tier_source, compiled.consumers());
    let (consumers, file) = consumers::load(text, &names, hasher, reader);
    let consumers = Arc::new(ArcSwap::from_pointee(consumers));
    if let Some(file) = file {
        compiled.consumers_files.push(ConsumersFile { file, consumers: consumers.clone() });
    }
    consumers
}

fn jwt(
    name: &str,
    auth: &gateway::Auth,
    span: &Range<usize>,
    compiled: &mut Authentication,
    internal: &mut InternalUpstreams,
    reader: &mut Validator<'_>,
) -> JwtVerifier {
    let text_of = |text: &Option<Text>| text.as_ref().map(|text| text.get_ref().as_str().into());
    let mut verifier = JwtVerifier {
        issuer: text_of(&auth.issuer),
        audience: text_of(&auth.audience),
        keys: Arc::default(),
        remote: None,
        claims: required_claims(auth, reader),
    };
    if let Some(url) = &auth.jwks_url {
        if let Some(file) = &auth.jwks_file {
            let issue = Issue::new(file.span(), "`jwks_file` and `jwks_url` cannot be combined");
            reader.push_issue(issue.with_hint("remove one of the two keys"));
        }
        if let Some(remote) = remote_auth::key_url(name, auth, url, compiled.providers.len(), internal, reader) {
            verifier.keys = remote.keys.keys().clone();
            verifier.remote = Some(remote.keys.clone());
            compiled.key_urls.push(remote);
        }
        return verifier;
    }
    for (key, text) in [("refresh_interval", &auth.refresh_interval), ("ca", &auth.ca)] {
        if let Some(text) = text {
            reader.push_missing(
                Issue::new(text.span(), format!("`{key}` requires `jwks_url`"))
                    .with_hint("remove this key, or set `jwks_url`"),
            );
        }
    }
    let Some(text) = &auth.jwks_file else {
        let issue = Issue::new(span.clone(), "`jwks_file` is missing");
        let hint = "set jwks_file = \"certs/jwks.json\", or a URL: jwks_url = \
                    \"https://issuer.example/.well-known/jwks.json\"";
        reader.push_missing(issue.with_hint(hint));
        return verifier;
    };
    let path = reader.resolve_path(text);
    let file = match FileSnapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
            reader.push_issue(
                issue.with_hint("give the path of the JSON Web Key Set of the issuer, such as \"certs/jwks.json\""),
            );
            return verifier;
        }
    };
    match KeySet::parse(&file.content) {
        Ok(keys) => verifier.keys.store(Some(Arc::new(keys))),
        Err(error) => reader
            .push_issue(Issue::new(text.span(), format!("the key set {} cannot be used: {error}", path.display()))),
    }
    compiled.jwks_files.push((compiled.providers.len(), file));
    verifier
}

fn client_cert(name: &str, span: &Range<usize>, config: &Config, reader: &mut Validator<'_>) {
    let asks = |listener: &Spanned<gateway::Listener>| {
        listener.get_ref().tls.as_ref().is_some_and(|tls| tls.get_ref().requests_client_certificates())
    };
    if !config.listener.iter().any(asks) {
        let message = format!("`{name}` verifies client certificates, but no listener requests them");
        let hint = "set tls.client_ca = \"certs/clients-ca.pem\" on a [[listener]]";
        reader.push_missing_elsewhere(Issue::new(span.clone(), message).with_hint(hint));
    }
}

/// Compile `claims`, the required claims.
fn required_claims(auth: &gateway::Auth, reader: &mut Validator<'_>) -> Vec<RequiredClaim> {
    let mut required = Vec::new();
    for (name, values) in auth.claims.iter().flat_map(|claims| claims.get_ref()) {
        let alternatives: Vec<_> = values.get_ref().0.iter().map(|Requirement(all)| all.clone()).collect();
        if alternatives.is_empty() || alternatives.iter().any(Vec::is_empty) {
            let message = match alternatives.is_empty() {
                true => format!("the claim `{name}` has no value: no token would be admitted"),
                false => format!("a list of values of the claim `{name}` is empty, so it requires nothing"),
            };
            reader.push_issue(
                Issue::new(values.span(), message)
                    .with_hint(format!("write the values: {name} = [\"read\", \"write\"]")),
            );
        }
        required.push(RequiredClaim { name: name.as_str().into(), alternatives });
    }
    required
}

// `require` and `identify` of routes.

/// Compile `require` and `identify` of a route. Return `None` if the route has neither key.
pub(super) fn route_auth(
    route: &config::tables::Route,
    compiled: &Authentication,
    config: &Config,
    reader: &mut Validator<'_>,
) -> Option<RouteAuth> {
    // Skip providers with errors, because the errors are already reported.
    let find = |name: &str, span: Range<usize>, reader: &mut Validator<'_>| {
        if !config.auth.contains_key(name) {
            reader.unknown_name(span, "provider", name, config.auth.keys().map(String::as_str));
        }
        compiled.index_of(name)
    };
    let mut required: Vec<Vec<usize>> = Vec::new();
    if let Some(list) = &route.require {
        if list.get_ref().is_empty() {
            let issue = Issue::new(list.span(), "`require` is empty: no request would be admitted");
            reader.push_issue(issue.with_hint("remove `require`, or name a provider: require = [\"keys\"]"));
        }
        for item in list.get_ref() {
            let names = &item.get_ref().0;
            if names.is_empty() {
                reader.push_issue(
                    Issue::new(item.span(), "an empty list in `require` requires nothing")
                        .with_hint("name the providers that are required together: [\"mtls\", \"tokens\"]"),
                );
            }
            let mut alternative = Vec::new();
            for name in names {
                let Some(index) = find(name, item.span(), reader) else { continue };
                if alternative.contains(&index) {
                    reader.push_issue(Issue::new(item.span(), format!("`{name}` is listed twice")));
                }
                let ProviderKind::ApiKey(_) = &compiled.providers[index].kind else {
                    alternative.push(index);
                    continue;
                };
                if config.auth.get(name).is_some_and(|auth| auth.get_ref().consumers.is_none()) {
                    let message = format!("`{name}` has no `consumers`: every key would be rejected");
                    reader.push_missing_elsewhere(Issue::new(item.span(), message).with_hint(format!(
                        "set consumers = \"consumers.toml\" in [auth.{name}], or use `identify` instead of `require`"
                    )));
                }
                alternative.push(index);
            }
            if required.contains(&alternative) && !alternative.is_empty() {
                reader.push_issue(Issue::new(item.span(), "`require` lists this alternative twice"));
            }
            required.push(alternative);
        }
    }
    let mut identify = Vec::new();
    for text in route.identify.iter().flatten() {
        let name = text.get_ref();
        let Some(index) = find(name, text.span(), reader) else { continue };
        if identify.contains(&index) {
            reader.push_issue(Issue::new(text.span(), format!("`{name}` is listed twice")));
            continue;
        }
        if !required.is_empty() && required.iter().all(|alternative| alternative.contains(&index)) {
            let message = format!("`{name}` is already in `require`: `identify` has no effect");
            reader.push_issue(Issue::new(text.span(), message).with_hint("remove the provider from `identify`"));
        }
        identify.push(index);
    }
    if required.is_empty() && identify.is_empty() {
        return None;
    }
    let mut providers: Vec<usize> = Vec::new();
    for index in required.iter().flatten().chain(&identify) {
        if !providers.contains(index) {
            providers.push(*index);
        }
    }
    report_shared_places(route, &providers, compiled, reader);
    let challenges = challenges(&providers, compiled);
    let missing = missing_detail(&required, compiled).into();
    Some(RouteAuth { required, identify, providers, challenges, missing })
}

/// Report providers that read API keys from the same header. The first provider would reject the keys of the second
/// provider as unknown.
fn report_shared_places(
    route: &config::tables::Route,
    providers: &[usize],
    compiled: &Authentication,
    reader: &mut Validator<'_>,
) {
    let places = |index: usize| compiled.providers[index].api_keys().map_or(&[][..], |keys| &keys.places);
    for (position, later) in providers.iter().enumerate() {
        for earlier in &providers[..position] {
            let Some(place) = places(*earlier).iter().find(|place| places(*later).contains(place)) else { continue };
            let [one, other] = [earlier, later].map(|index| &compiled.providers[*index].name);
            let message = format!("`{one}` and `{other}` both read API keys from `{}`", place.header);
            let span = route.require.as_ref().map(|list| list.span());
            let span = span.or_else(|| Some(route.identify.as_ref()?.first()?.span()));
            let issue = Issue { span, message, hint: None };
            reader.push_issue(issue.with_hint(
                "configure one provider with the consumers of both, or give one of the providers another `header`",
            ));
        }
    }
}

fn challenges(providers: &[usize], compiled: &Authentication) -> Vec<Challenge> {
    let mut challenges: Vec<Challenge> = Vec::new();
    let mut add = |text: &str| {
        let challenge = Challenge::new(text).filter(|challenge| !challenges.contains(challenge));
        challenges.extend(challenge);
    };
    for index in providers {
        match &compiled.providers[*index].kind {
            ProviderKind::ApiKey(keys) => {
                keys.places.iter().for_each(|place| add(place.scheme.as_deref().unwrap_or("ApiKey")));
            }
            ProviderKind::Jwt(_) => add("Bearer"),
            ProviderKind::ClientCert => add("ClientCertificate"),
            ProviderKind::Basic(basic) => {
                let realm = basic.realm.replace('\\', "\\\\").replace('"', "\\\"");
                add(&format!("Basic realm=\"{realm}\", charset=\"UTF-8\""));
            }
            // An authentication server sends its own challenges in its response.
            ProviderKind::Forward(_) => {}
        }
    }
    challenges
}

/// Return the problem detail of a 401 for a request without a credential. The detail lists all alternatives.
fn missing_detail(required: &[Vec<usize>], compiled: &Authentication) -> String {
    let describe = |index: &usize| match &compiled.providers[*index].kind {
        ProviderKind::ApiKey(keys) => format!("an API key in the {}", describe_places(&keys.places)),
        ProviderKind::Jwt(_) => "a bearer token".to_owned(),
        ProviderKind::ClientCert => "a client certificate".to_owned(),
        ProviderKind::Basic(_) => "a user name and a password".to_owned(),
        ProviderKind::Forward(_) => "a request that the authentication server admits".to_owned(),
    };
    let mut alternatives: Vec<String> = Vec::new();
    for alternative in required {
        let text = alternative.iter().map(describe).collect::<Vec<_>>().join(" and ");
        if !alternatives.contains(&text) {
            alternatives.push(text);
        }
    }
    let verb = if let [only] = &alternatives[..]
        && !only.contains(" and ")
    {
        "is"
    } else {
        "are"
    };
    match &alternatives[..] {
        [only] => format!("{only} {verb} required"),
        several => format!("one of these is required: {}", several.join("; ")),
    }
}

/// Report limits whose identity is a credential that no provider of the route verifies. Limits by client certificate
/// need no provider.
pub(super) fn check_limit(
    text: &Text,
    compiled: &CompiledLimit,
    auth: Option<&RouteAuth>,
    all: &Authentication,
    config: &Config,
    reader: &mut Validator<'_>,
) {
    for descriptor in &compiled.identity_spec.descriptors {
        let kind = match descriptor {
            Descriptor::ApiKey | Descriptor::Group(_) => Kind::ApiKey,
            Descriptor::Jwt(_) => Kind::Jwt,
            Descriptor::Basic => Kind::Basic,
            Descriptor::Forward(_) => Kind::Forward,
            _ => continue,
        };
        let is_of_kind = |provider: &AuthProvider| match descriptor {
            Descriptor::Forward(name) => provider.identity_headers().any(|header| header == name),
            _ => provider.kind.label() == kind.label(),
        };
        if auth.is_some_and(|auth| auth.providers.iter().any(|index| is_of_kind(&all.providers[*index]))) {
            continue;
        }
        let provider = match descriptor {
            Descriptor::Forward(name) => format!("no authentication server of this route returns `{name}`"),
            _ => format!("no provider of kind \"{}\" verifies the requests of this route", kind.label()),
        };
        let message = format!("`{}` counts by {}, but {provider}", compiled.limit.name, descriptor.label());
        let known = all.providers.iter().find(|provider| is_of_kind(provider));
        let hint = match (known, kind) {
            (Some(provider), _) => {
                format!(
                    "set identify = [\"{0}\"] on this route, or require = [\"{0}\"] to reject requests without this \
                     credential",
                    provider.name
                )
            }
            // If a provider of this kind has errors, report nothing, because those errors are already reported.
            (None, Kind::Forward) if !config.auth.values().any(|auth| auth.get_ref().is_of_kind("forward")) => {
                "add [auth.sso] with kind = \"forward\", `url` and `response_headers`, and set require = [\"sso\"] on \
                 this route"
                    .to_owned()
            }
            (None, Kind::Forward) => {
                format!("list {} in `response_headers` of [auth.NAME]", &descriptor.label()["auth:".len()..])
            }
            (None, _) if config.auth.values().any(|auth| auth.get_ref().is_of_kind(kind.label())) => continue,
            (None, Kind::Jwt) => "add [auth.tokens] with kind = \"jwt\" and jwks_file = \"certs/jwks.json\", and set \
                                  identify = [\"tokens\"] on this route"
                .to_owned(),
            (None, Kind::Basic) => "add [auth.users] with kind = \"basic\" and users = \"htpasswd\", and set identify \
                                    = [\"users\"] on this route"
                .to_owned(),
            (None, _) => {
                "add [auth.keys] with kind = \"api-key\" and consumers = \"consumers.toml\", and set identify = \
                 [\"keys\"] on this route"
                    .to_owned()
            }
        };
        reader.push_missing_elsewhere(Issue::new(text.span(), message).with_hint(hint));
    }
}

/// Report `on_missing` and `on_unknown` of providers that are only in `require` of routes. These keys affect only
/// `identify`.
pub(super) fn check_identify_keys(config: &Config, reader: &mut Validator<'_>) {
    for (name, auth) in &config.auth {
        let routes = || config.route.iter().map(|route| route.get_ref());
        let identifies = routes().any(|route| route.identify.iter().flatten().any(|text| text.get_ref() == name));
        let requires = routes().any(|route| {
            let items = route.require.iter().flat_map(|list| list.get_ref());
            items.flat_map(|item| &item.get_ref().0).any(|required| required == name)
        });
        if identifies || !requires {
            continue;
        }
        let auth = auth.get_ref();
        for (key, text) in [("on_missing", &auth.on_missing), ("on_unknown", &auth.on_unknown)] {
            if let Some(text) = text {
                let message =
                    format!("`{key}` has an effect only with `identify`, but routes use `{name}` only in `require`");
                let hint = format!("remove `{key}`, or use identify = [\"{name}\"] instead of `require`");
                reader.push_issue(Issue::new(text.span(), message).with_hint(hint));
            }
        }
    }
}
