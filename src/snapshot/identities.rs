//! Compiles identities: client addresses, API keys, tokens and consumers.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;

use crate::config;
use crate::config::error::{FileIssues, Issue, Spanned};
use crate::config::file::FileSnapshot;
use crate::config::file::{EnvLookup, UnsetVariables, closest_name, resolve_issues};
use crate::config::include::Sources;
use crate::config::{Config, file};
use crate::identity::api_key::{ApiKeySettings, Consumer, Consumers, OnUnknownKey, parse_key_hash};
use crate::identity::client_ip::ClientIpResolver;
use crate::identity::jwt::{JwtVerifier, KeySet};
use crate::identity::{Descriptor, cookie_value};
use crate::identity::{Exemptions, IdentitySpec, OnMissing};
use crate::limiter::key::IdentityHasher;
use crate::limiter::spec::LimitVariant;
use crate::snapshot::CompiledLimit;
use crate::snapshot::limits::{limit_variant, quota_hint};
use crate::snapshot::validator::Validator;

/// Label of the client network in `by`.
const IP_LABEL: &str = "ip";

/// Compile `[client_ip]`.
pub(super) fn client_ip(client_ip: &config::ClientIp, reader: &mut Validator<'_>) -> ClientIpResolver {
    let mut trusted = Vec::new();
    for text in client_ip.trusted_proxies.iter().flatten() {
        match parse_network(text.get_ref()) {
            Some(net) => trusted.push(net),
            None => network_issue(text.get_ref(), text.span(), reader),
        }
    }
    let header = client_ip.header.as_ref().and_then(|text| reader.header_name(text.span(), text.get_ref()));
    ClientIpResolver {
        trusted_proxies: trusted,
        header: header.unwrap_or(http::HeaderName::from_static("x-forwarded-for")),
        ipv4_prefix: reader.number(client_ip.ipv4_prefix.as_ref(), 0..33, 32) as u8,
        ipv6_prefix: reader.number(client_ip.ipv6_prefix.as_ref(), 0..129, 64) as u8,
    }
}

/// Compile the identity of a limit.
pub(super) fn identity_spec(
    limit: &config::tables::Limit,
    span: &Range<usize>,
    reader: &mut Validator<'_>,
) -> IdentitySpec {
    let missing = [("reject", OnMissing::Reject), ("skip", OnMissing::Skip), ("ip", OnMissing::Ip)];
    let on_missing = reader.one_of(limit.on_missing.as_ref(), OnMissing::Reject, &missing);
    let mut descriptors = Vec::new();
    if let Some(list) = reader.required(limit.by.as_ref(), span, "by", "\"ip\"") {
        if list.get_ref().0.is_empty() {
            reader.push_issue(
                Issue::new(list.span(), "`by` is empty").with_hint("\"global\" counts all requests together"),
            );
        }
        for text in &list.get_ref().0 {
            descriptors.extend(descriptor(text, list.span(), reader));
        }
    }
    let exempt = exemptions(limit, &descriptors, on_missing, reader);
    let methods = reader.methods(limit.methods.as_deref(), span);
    IdentitySpec { descriptors, on_missing, methods, exemptions: exempt }
}

/// Compile `exempt`. Its sources are those of `by`, and `ip` if the client network can stand in for another source.
fn exemptions(
    limit: &config::tables::Limit,
    descriptors: &[Descriptor],
    on_missing: OnMissing,
    reader: &mut Validator<'_>,
) -> Exemptions {
    let mut exemptions = Exemptions::default();
    let by_address = descriptors.contains(&Descriptor::Ip)
        || descriptors.contains(&Descriptor::ApiKey)
        || on_missing == OnMissing::Ip;
    for text in &limit.exempt {
        let written = text.get_ref();
        let (label, value) = match written.split_once('=') {
            Some((word, value)) => (word, value),
            None if *descriptors == [Descriptor::Ip] => (IP_LABEL, written.as_str()),
            None => ("", written.as_str()),
        };
        let descriptor = match label {
            IP_LABEL => by_address.then_some(&Descriptor::Ip),
            _ => descriptors.iter().find(|descriptor| descriptor.matches_label(label)),
        };
        match descriptor {
            None => {
                let examples: Vec<_> =
                    descriptors.iter().map(|descriptor| format!("\"{}={written}\"", descriptor.label())).collect();
                let issue = Issue::new(text.span(), format!("`{written}` does not name a source of `by`"));
                let hint = match &*examples {
                    [] => "SOURCE=VALUE, the source as in `by`".to_owned(),
                    words => format!("SOURCE=VALUE, the source as in `by`: {}", words.join(" or ")),
                };
                reader.push_issue(issue.with_hint(hint));
            }
            Some(_) if value.is_empty() => {
                reader.push_issue(Issue::new(text.span(), format!("`{written}` has no value after `=`")));
            }
            Some(Descriptor::Ip) => match parse_network(value) {
                Some(net) => exemptions.networks.push(net),
                None => network_issue(value, text.span(), reader),
            },
            // Hosts are compared in lower case, as in routing.
            Some(Descriptor::Host) => exemptions.values.push((Descriptor::Host, value.to_ascii_lowercase().into())),
            // Cookies are compared decoded, as in requests.
            Some(descriptor @ Descriptor::Cookie(_)) => {
                let decoded = String::from_utf8_lossy(&cookie_value(value.as_bytes())).as_ref().into();
                exemptions.values.push((descriptor.clone(), decoded));
            }
            Some(descriptor) => exemptions.values.push((descriptor.clone(), value.into())),
        }
    }
    exemptions
}

fn descriptor(text: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<Descriptor> {
    const ALL: &str = "api-key ip user:HEADER header:NAME cookie:NAME query:NAME path:PARAM jwt:CLAIM client-cert host route method global";
    match text.split_once(':') {
        None => match text {
            "api-key" => return Some(Descriptor::ApiKey),
            "client-cert" => return Some(Descriptor::ClientCert),
            "ip" => return Some(Descriptor::Ip),
            "host" => return Some(Descriptor::Host),
            "method" => return Some(Descriptor::Method),
            "global" => return Some(Descriptor::Global),
            "route" => return Some(Descriptor::Route),
            _ => reader.unknown_name(span, "identity", text, ALL.split(' ')),
        },
        Some(("user", name)) => return reader.header_name(span, name).map(Descriptor::User),
        Some(("header", name)) => return reader.header_name(span, name).map(Descriptor::Header),
        Some(("cookie", name)) if !name.is_empty() => return Some(Descriptor::Cookie(name.into())),
        Some(("query", name)) if !name.is_empty() => return Some(Descriptor::Query(name.into())),
        Some(("jwt", name)) if !name.is_empty() => return Some(Descriptor::Jwt(name.into())),
        Some(("path", name)) if !name.is_empty() => return Some(Descriptor::Path(name.into())),
        Some(_) => reader.unknown_name(span, "identity", text, ALL.split(' ')),
    }
    None
}

fn parse_network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

fn network_issue(text: &str, span: Range<usize>, reader: &mut Validator<'_>) {
    let issue = Issue::new(span, format!("`{text}` is not an address or a network"));
    reader.push_issue(issue.with_hint("such as \"10.0.0.0/8\" or \"2001:db8::/32\""));
}

/// Compile `[api_key]`.
pub(super) fn api_key_settings(api_key: &config::ApiKey, reader: &mut Validator<'_>) -> ApiKeySettings {
    let mut settings = ApiKeySettings::default();
    if let Some(header) = api_key.header.as_ref().and_then(|text| reader.header_name(text.span(), text.get_ref())) {
        settings.header = header;
    }
    settings.anonymous_if_missing =
        reader.one_of(api_key.on_missing.as_ref(), false, &[("reject", false), ("anonymous", true)]);
    let unknown =
        [("reject", OnUnknownKey::Reject), ("anonymous", OnUnknownKey::Anonymous), ("accept", OnUnknownKey::Accept)];
    settings.on_unknown = reader.one_of(api_key.on_unknown.as_ref(), OnUnknownKey::Reject, &unknown);
    settings
}

/// Compile `[jwt]`. Return the verifier, and the JWK Set file as read.
pub(super) fn jwt_verifier(jwt: &config::Jwt, reader: &mut Validator<'_>) -> (JwtVerifier, Option<FileSnapshot>) {
    let text_of = |text: &Option<config::Text>| text.as_ref().map(|text| text.get_ref().as_str().into());
    let mut verifier =
        JwtVerifier { issuer: text_of(&jwt.issuer), audience: text_of(&jwt.audience), keys: ArcSwap::default() };
    let Some(text) = &jwt.jwks_file else { return (verifier, None) };
    let path = reader.resolve_path(text);
    let file = match FileSnapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
            reader.push_issue(issue.with_hint("the JSON Web Key Set of the issuer, such as \"certs/jwks.json\""));
            return (verifier, None);
        }
    };
    match KeySet::parse(&file.content) {
        Ok(keys) => verifier.keys = ArcSwap::new(Arc::new(keys)),
        Err(error) => reader.push_issue(Issue::new(text.span(), format!("{} cannot be used: {error}", path.display()))),
    }
    (verifier, Some(file))
}

type LimitsByName = BTreeMap<String, CompiledLimit>;

/// The limits that consumers may name.
pub(super) struct KnownLimits<'c> {
    compiled: &'c LimitsByName,
    /// The limits as written. Those that do not compile are reported, so consumers may name them and their tiers.
    written: Option<&'c BTreeMap<String, Spanned<config::tables::Limit>>>,
}

impl<'c> KnownLimits<'c> {
    /// Create it for limits without errors.
    pub(super) fn new(compiled: &'c LimitsByName) -> Self {
        KnownLimits { compiled, written: None }
    }

    fn tiers(&self) -> impl Iterator<Item = &'c str> {
        let compiled = self.compiled.values().flat_map(|compiled| compiled.limit.tiers.keys()).map(|tier| &**tier);
        let written = self.written.into_iter().flat_map(BTreeMap::values);
        compiled.chain(written.flat_map(|limit| limit.get_ref().tiers.keys()).map(String::as_str))
    }

    fn has_errors(&self, name: &str) -> bool {
        !self.compiled.contains_key(name) && self.written.is_some_and(|written| written.contains_key(name))
    }
}

/// Read and compile the file of consumers.
pub(super) fn load(
    text: &config::Text,
    config: &Config,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    reader: &mut Validator<'_>,
) -> (Consumers, Option<FileSnapshot>) {
    if reader.is_unresolved(text) {
        reader.push_issue(Issue::new(text.span(), "the file of consumers is unknown"));
        return (Consumers::default(), None);
    }
    let limits = KnownLimits { compiled: limits, written: Some(&config.limit) };
    let path = reader.resolve_path(text);
    let file = match FileSnapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            reader.add_file_issues(file::unreadable_file(&path, &error, file::MISSING_CONSUMERS_HINT));
            return (Consumers::default(), None);
        }
    };
    let loaded = read(&file.path, &file.content, &limits, hasher, reader.environment);
    (loaded.map_err(|faulty| reader.add_file_issues(faulty)).unwrap_or_default().consumers, Some(file))
}

/// The consumers of a file.
#[derive(Default)]
pub(super) struct LoadedConsumers {
    pub(super) consumers: Consumers,
    /// Whether the file has no keys and no explicit `keys = []`. The file is probably being written.
    pub(super) is_incomplete: bool,
}

/// Parse and compile the content of a file of consumers.
pub(super) fn read(
    path: &Path,
    content: &[u8],
    limits: &KnownLimits<'_>,
    hasher: &IdentityHasher,
    environment: EnvLookup<'_>,
) -> Result<LoadedConsumers, FileIssues> {
    let file = file::parse_consumers(path, content, environment)?;
    let mut issues = file.issues;
    let consumers = compile_consumers(&file.value, &file.sources, limits, hasher, &mut issues);
    let (issues, _) = resolve_issues(&file.sources, issues, file.unresolved, file.warnings, UnsetVariables::Error);
    let is_intentional =
        !file.value.consumer.is_empty() && file.value.consumer.iter().all(|one| one.get_ref().keys.is_some());
    let loaded = LoadedConsumers { is_incomplete: consumers.is_empty() && !is_intentional, consumers };
    file.sources.by_file(issues).into_iter().next().map_or(Ok(loaded), Err)
}

/// Report limits by API key that would reject every request because no key is known.
pub(super) fn check_keys_known(
    config: &Config,
    limits: &LimitsByName,
    keys: &ApiKeySettings,
    consumers: &Consumers,
    reader: &mut Validator<'_>,
) {
    // Errors of the file of consumers are reported elsewhere.
    if config.api_key.consumers.is_some() || !consumers.is_empty() || keys.on_unknown != OnUnknownKey::Reject {
        return;
    }
    for (name, compiled) in limits.iter().filter(|(_, compiled)| uses_api_key(compiled)) {
        let span = config.limit.get(name).map(|limit| limit.span());
        let message =
            format!("`{}` is by api-key, but no key is configured: every key would be rejected", compiled.limit.name);
        let issue = Issue { span, message, hint: None };
        reader.push_issue(issue.with_hint("[api_key] with consumers = \"consumers.toml\", or on_unknown = \"accept\""));
    }
}

fn uses_api_key(compiled: &CompiledLimit) -> bool {
    compiled.identity_spec.descriptors.contains(&Descriptor::ApiKey)
}

fn compile_consumers(
    file: &config::Consumers,
    sources: &Sources,
    limits: &KnownLimits<'_>,
    hasher: &IdentityHasher,
    issues: &mut Vec<Issue>,
) -> Consumers {
    let mut consumers = Consumers::default();
    let mut names: HashMap<&String, Range<usize>> = HashMap::new();
    for written in &file.consumer {
        let span = written.span();
        let written = written.get_ref();
        let name = match &written.name {
            Some(name) if !name.get_ref().is_empty() => name.get_ref(),
            _ => {
                issues.push(Issue::new(span, "a consumer needs a `name`"));
                continue;
            }
        };
        match names.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(span);
            }
            Entry::Occupied(first) => {
                let hint = sources.first_line_hint(first.get());
                issues.push(
                    Issue::new(span, format!("duplicate consumer `{name}`"))
                        .with_hint(format!("{hint}: list all keys of a consumer in one [[consumer]]")),
                );
            }
        }
        let consumer = Arc::new(Consumer {
            name: name.as_str().into(),
            tier: tier(written.tier.as_ref(), limits, issues),
            variants: limit_variants(&written.limit, limits, hasher, issues),
        });
        for key in written.keys.iter().flatten() {
            let Some(hash) = parse_key_hash(key.get_ref()) else {
                // The text may be an API key that was pasted by mistake, so the message does not repeat it.
                let hint = "\"sha256:\" and 64 lower-case hex digits: printf %s KEY | sha256sum";
                issues.push(Issue::new(key.span(), "this is not the hash of a key").with_hint(hint));
                continue;
            };
            if let Err(other) = consumers.insert(hash, consumer.clone()) {
                issues.push(Issue::new(key.span(), format!("the key belongs to `{}` already", other.name)));
            }
        }
    }
    consumers
}

/// Compile the tier of a consumer. At least one limit must have it.
fn tier(text: Option<&config::Text>, limits: &KnownLimits<'_>, issues: &mut Vec<Issue>) -> Option<Box<str>> {
    let text = text?;
    let known = || limits.tiers();
    if !known().any(|tier| tier == text.get_ref()) {
        let issue = Issue::new(text.span(), format!("no limit has a tier `{}`", text.get_ref()));
        issues.push(match closest_name(text.get_ref(), known()) {
            Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
            None => {
                issue.with_hint(format!("tiers = {{ {} = {{ quota = \"…\" }} }} on a limit by api-key", text.get_ref()))
            }
        });
    }
    Some(text.get_ref().as_str().into())
}

/// Compile the quotas of a consumer.
fn limit_variants(
    written: &BTreeMap<String, config::error::Spanned<config::tables::LimitVariant>>,
    known_limits: &KnownLimits<'_>,
    hasher: &IdentityHasher,
    issues: &mut Vec<Issue>,
) -> BTreeMap<Box<str>, Arc<LimitVariant>> {
    let limits = known_limits.compiled;
    let mut variants = BTreeMap::new();
    for (name, own) in written {
        if known_limits.has_errors(name) {
            continue;
        }
        let Some(compiled) = limits.get(name).filter(|compiled| uses_api_key(compiled)) else {
            let issue = Issue::new(own.span(), format!("there is no limit `{name}` by api-key"));
            let known = limits.iter().filter(|(_, compiled)| uses_api_key(compiled)).map(|(name, _)| name.as_str());
            issues.push(match closest_name(name, known) {
                Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
                None => issue.with_hint("consumers can have quotas only for limits by api-key"),
            });
            continue;
        };
        match limit_variant(own.get_ref(), &compiled.limit.default_variant.rule, compiled.limit.default_variant.quota) {
            Ok((quota, burst)) => match compiled.limit.variant(hasher, quota, burst) {
                Ok(variant) => {
                    variants.insert(name.as_str().into(), Arc::new(variant));
                }
                Err(error) => issues.push(Issue::new(own.span(), error.to_string()).with_hint(quota_hint(&error))),
            },
            Err(issue) => issues.push(issue),
        }
    }
    variants
}
