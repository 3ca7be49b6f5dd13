//! Compiles client addresses, the identities of limits, consumers, and the networks of `allow` and `deny`.

use std::collections::btree_map;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use toml::value::Datetime;

use crate::config;
use crate::config::environment::EnvLookup;
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file;
use crate::config::file::{ParsedFile, UnsetVariables, resolve_issues};
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::schema::IDENTITY_SOURCES;
use crate::config::shorthand::{ConsumerKey, KeyTable, datetime_us};
use crate::config::sources::{FileSnapshot, utf8_text};
use crate::config::spanned::{Spanned, Text};
use crate::config::unknown_keys::closest_name;
use crate::identity;
use crate::identity::access::{AccessRules, NetworkFile, NetworkList, NetworkSet, parse_network, parse_networks};
use crate::identity::auth::TierSource;
use crate::identity::consumer::{Consumer, ConsumerDirectory, Consumers, KeyTerms, parse_key_hash};
use crate::identity::spec::{
    ClientIpResolver, Descriptor, Exemptions, IdentitySpec, OnMissing, RpcSource, cookie_value,
};
use crate::limiter::key::IdentityHasher;
use crate::limiter::spec::LimitVariant;
use crate::payload::json::body::{JsonPointer, MAX_SEGMENTS};
use crate::snapshot::limits::{limit_variant, quota_hint};
use crate::snapshot::routes::Route;
use crate::snapshot::validator::Validator;
use crate::snapshot::{CompiledConfig, CompiledLimit};

/// Source in `by` that selects the client network.
const IP_LABEL: &str = "ip";

/// Compile `[client_ip]`.
pub(super) fn client_ip(client_ip: &gateway::ClientIp, reader: &mut Validator<'_>) -> ClientIpResolver {
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
    let on_missing = reader.one_of(limit.on_missing.as_ref(), OnMissing::Reject, &missing);
    // By default, a limit by tool or method does not apply to requests without a tool or method: some requests of an
    // MCP session call no tool, and responses that a client sends have no method.
    let skips_other_messages =
        limit.on_missing.is_none() && descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Rpc(_)));
    let exempt = exemptions(limit, &descriptors, on_missing, reader);
    let methods = reader.methods(limit.methods.as_deref(), span);
    IdentitySpec { descriptors, on_missing, skips_other_messages, methods, exemptions: exempt }
}

/// Return whether `by` contains an invalid source. Such a source is already reported, and has no entry in
/// `descriptors`.
pub(super) fn has_faulty_source(limit: &config::tables::Limit, descriptors: &[Descriptor]) -> bool {
    limit.by.as_ref().is_some_and(|by| by.get_ref().0.len() != descriptors.len())
}

/// Compile `exempt`. Each source must be in `by`. `ip` is also valid if the client network can replace another source.
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
            // Report nothing, because the item may refer to the invalid source in `by`, which is already reported.
            None if has_faulty_source(limit, descriptors) => {}
            None => {
                let examples: Vec<_> =
                    descriptors.iter().map(|descriptor| format!("\"{}={written}\"", descriptor.label())).collect();
                let issue =
                    Issue::new(text.span(), format!("`{written}` does not begin with a source that `by` lists"));
                let hint = match &*examples {
                    [] => "write SOURCE=VALUE, with a source in `by`".to_owned(),
                    words => format!("write SOURCE=VALUE, with one of the sources in `by`: {}", words.join(" or ")),
                };
                reader.push_missing(issue.with_hint(hint));
            }
            Some(_) if value.is_empty() => {
                reader.push_issue(Issue::new(text.span(), format!("`{written}` has no value after `=`")));
            }
            Some(Descriptor::Ip) => match parse_network(value) {
                Some(net) => exemptions.networks.push(net),
                None => network_issue(value, text.span(), reader),
            },
            // Convert hosts to lower case, as routing does for requests.
            Some(Descriptor::Host) => exemptions.values.push((Descriptor::Host, value.to_ascii_lowercase().into())),
            // Decode cookie values, as for cookies of requests.
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
    match text.split_once(':') {
        None => match text {
            "api-key" => return Some(Descriptor::ApiKey),
            "client-cert" => return Some(Descriptor::ClientCert),
            "basic" => return Some(Descriptor::Basic),
            "ip" => return Some(Descriptor::Ip),
            "host" => return Some(Descriptor::Host),
            "method" => return Some(Descriptor::Method),
            "global" => return Some(Descriptor::Global),
            "route" => return Some(Descriptor::Route),
            _ => reader.unknown_name(span, "identity", text, IDENTITY_SOURCES.into_iter()),
        },
        Some(("group", level)) if !level.is_empty() => return Some(Descriptor::Group(level.into())),
        Some(("user", name)) => return reader.header_name(span, name).map(Descriptor::User),
        Some(("auth", name)) => return reader.header_name(span, name).map(Descriptor::Forward),
        Some(("header", name)) => {
            return reader.routed_header_name(span, name, "by = \"host\"").map(Descriptor::Header);
        }
        Some(("cookie", name)) if !name.is_empty() => return Some(Descriptor::Cookie(name.into())),
        Some(("query", name)) if !name.is_empty() => return Some(Descriptor::Query(name.into())),
        Some(("jwt", name)) if !name.is_empty() => return Some(Descriptor::Jwt(name.into())),
        Some(("path", name)) if !name.is_empty() => return Some(Descriptor::Path(name.into())),
        Some(("form", name)) if !name.is_empty() => return Some(Descriptor::Form(name.into())),
        Some(("basic", "user")) => return Some(Descriptor::ClaimedUser),
        Some(("json", pointer)) => return json_pointer(pointer, span, reader).map(Descriptor::Json),
        Some(("mcp", "tool")) => return Some(Descriptor::Rpc(RpcSource::McpTool)),
        Some(("mcp", "method")) => return Some(Descriptor::Rpc(RpcSource::McpMethod)),
        Some(("jsonrpc", "method")) => return Some(Descriptor::Rpc(RpcSource::Method)),
        Some(_) => reader.unknown_name(span, "identity", text, IDENTITY_SOURCES.into_iter()),
    }
    None
}

/// Compile a JSON pointer.
pub(super) fn json_pointer(text: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<JsonPointer> {
    let pointer = JsonPointer::parse(text);
    if pointer.is_none() {
        let issue = Issue::new(span, format!("`{text}` is not a JSON pointer to a member"));
        let hint = format!("such as \"/model\" or \"/metadata/user_id\", with up to {MAX_SEGMENTS} members");
        reader.push_issue(issue.with_hint(hint));
    }
    pointer
}

/// Report text that is not an address or network.
pub(super) fn network_issue(text: &str, span: Range<usize>, reader: &mut Validator<'_>) {
    let issue = Issue::new(span, format!("`{text}` is not an address or a network"));
    reader.push_issue(issue.with_hint(match network_suggestion(text) {
        Some(network) => format!("did you mean {network}?"),
        None => "such as \"10.0.0.0/8\" or \"2001:db8::/32\"".to_owned(),
    }));
}

/// Return the network that text in the notation of another program means: a wildcard such as `10.*`, a netmask, a port
/// after the address, or a word.
fn network_suggestion(text: &str) -> Option<String> {
    match text.to_ascii_lowercase().as_str() {
        "*" | "all" | "any" | "true" => return Some("\"0.0.0.0/0\", \"::/0\"".to_owned()),
        "localhost" | "loopback" | "local" => return Some("\"127.0.0.0/8\", \"::1\"".to_owned()),
        "private" | "private_ranges" | "uniquelocal" | "linklocal" | "internal" => {
            return Some("\"10.0.0.0/8\", \"172.16.0.0/12\", \"192.168.0.0/16\", \"fc00::/7\"".to_owned());
        }
        _ => {}
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some(format!("\"{}\"", address.ip()));
    }
    if let Some((address, mask)) = text.split_once('/')
        && let (Ok(address), Ok(mask)) = (address.parse::<Ipv4Addr>(), mask.parse::<Ipv4Addr>())
    {
        return IpNet::with_netmask(address.into(), mask.into()).ok().map(|network| format!("\"{}\"", network.trunc()));
    }
    let numbers: Vec<_> = text.split('.').take_while(|part| part.parse::<u8>().is_ok()).collect();
    let mut rest = text.split('.').skip(numbers.len());
    let is_wildcard = rest.all(|part| matches!(part, "*" | "x" | "X" | "0/24" | ""));
    let prefix = numbers.join(".");
    let zeros = ".0".repeat(4_usize.checked_sub(numbers.len())?);
    ((1..4).contains(&numbers.len()) && is_wildcard).then(|| format!("\"{prefix}{zeros}/{}\"", 8 * numbers.len()))
}

pub(super) type LimitsByName = BTreeMap<String, CompiledLimit>;

/// The names that a consumers file may refer to, and the consumer names that it must not repeat.
pub(super) struct KnownNames<'c> {
    compiled: &'c LimitsByName,
    /// The limits as written in the configuration. Limits with errors are reported elsewhere, so consumers may refer to
    /// them and to their tiers.
    written: Option<&'c BTreeMap<String, Spanned<config::tables::Limit>>>,
    /// The names of the routes.
    routes: Vec<&'c str>,
    /// The consumers of all other consumers files.
    others: ConsumerDirectory,
    tier_source: &'c TierSource,
}

/// Return the tiers that the limits define. A tier of several limits occurs several times.
pub(super) fn tiers(limits: &LimitsByName) -> impl Iterator<Item = &str> {
    limits.values().flat_map(|compiled| compiled.limit.tiers.keys()).map(|tier| &**tier)
}

impl<'c> KnownNames<'c> {
    /// Collect the names of a configuration without errors.
    pub(super) fn new(
        compiled: &'c LimitsByName,
        routes: &'c [Arc<Route>],
        tier_source: &'c TierSource,
        others: ConsumerDirectory,
    ) -> Self {
        let routes = routes.iter().map(|route| &*route.name).collect();
        KnownNames { compiled, written: None, routes, others, tier_source }
    }

    /// Collect the names of a configuration that may have errors.
    pub(super) fn written(
        compiled: &'c LimitsByName,
        config: &'c Config,
        tier_source: &'c TierSource,
        others: ConsumerDirectory,
    ) -> Self {
        let routes = config.route.iter().filter_map(|route| route.get_ref().name.as_ref());
        let routes = routes.map(|name| name.get_ref().as_str()).collect();
        KnownNames { compiled, written: Some(&config.limit), routes, others, tier_source }
    }

    fn tiers(&self) -> impl Iterator<Item = &'c str> {
        let written = self.written.into_iter().flat_map(BTreeMap::values);
        tiers(self.compiled).chain(written.flat_map(|limit| limit.get_ref().tiers.keys()).map(String::as_str))
    }

    fn has_errors(&self, name: &str) -> bool {
        !self.compiled.contains_key(name) && self.written.is_some_and(|written| written.contains_key(name))
    }
}

/// Read and compile a consumers file.
pub(super) fn load(
    text: &Text,
    names: &KnownNames<'_>,
    hasher: &IdentityHasher,
    reader: &mut Validator<'_>,
) -> (Consumers, Option<FileSnapshot>) {
    if reader.is_unresolved(text) {
        reader.push_issue(Issue::new(
            text.span(),
            "cannot find the consumers file, because an environment variable is not set",
        ));
        return (Consumers::default(), None);
    }
    let path = reader.resolve_path(text);
    let file = match FileSnapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            let hint = file::missing_consumers_hint(reader.main_path());
            reader.add_file_issues(file::unreadable_file(&path, &error, &hint));
            return (Consumers::default(), None);
        }
    };
    let loaded = read(&file.path, &file.content, names, hasher, reader.environment);
    (loaded.map_err(|faulty| reader.add_file_issues(faulty)).unwrap_or_default().consumers, Some(file))
}

/// The consumers of one consumers file.
#[derive(Default)]
pub(super) struct LoadedConsumers {
    pub(super) consumers: Consumers,
    /// Whether the file has no API keys, and this is not explicit: the file lists no consumers, or a consumer has no
    /// `keys = []`. Another program may still be writing such a file.
    pub(super) is_incomplete: bool,
}

/// Parse and compile the content of a consumers file.
pub(super) fn read(
    path: &Path,
    content: &[u8],
    limits: &KnownNames<'_>,
    hasher: &IdentityHasher,
    environment: EnvLookup<'_>,
) -> Result<LoadedConsumers, FileIssues> {
    let file = file::parse_consumers(path, content, environment)?;
    let mut compiler_issues = Vec::new();
    let consumers = compile_consumers(&file, limits, hasher, &mut compiler_issues);
    let mut issues = file.issues;
    issues.extend(compiler_issues.into_iter().filter(|issue| !file.unknown_keys.hide(issue)));
    let (issues, _) = resolve_issues(&file.sources, issues, file.unresolved, file.warnings, UnsetVariables::Error);
    let is_intentional =
        !file.value.consumer.is_empty() && file.value.consumer.iter().all(|one| one.get_ref().keys.is_some());
    let loaded = LoadedConsumers { is_incomplete: consumers.is_empty() && !is_intentional, consumers };
    file.sources.by_file(issues).into_iter().next().map_or(Ok(loaded), Err)
}

fn uses_api_key(compiled: &CompiledLimit) -> bool {
    compiled.identity_spec.descriptors.contains(&Descriptor::ApiKey)
}

fn compile_consumers(
    file: &ParsedFile<gateway::Consumers>,
    limits: &KnownNames<'_>,
    hasher: &IdentityHasher,
    issues: &mut Vec<Issue>,
) -> Consumers {
    let mut consumers = Consumers::default();
    let groups = Groups::compile(&file.value.group, issues);
    let mut names: HashMap<&String, Range<usize>> = HashMap::new();
    let ParsedFile { value, sources, unknown_keys, .. } = file;
    for written in &value.consumer {
        let (span, written_span) = (written.span(), written.span());
        let written = written.get_ref();
        let name = match &written.name {
            Some(name) if !name.get_ref().is_empty() => name.get_ref(),
            _ => {
                if !unknown_keys.are_in(&span) {
                    issues.push(Issue::new(span, "a consumer needs a `name`"));
                }
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
        if limits.others.find_by_name(name).is_some() {
            let issue = Issue::new(written_span, format!("another file already has a consumer `{name}`"));
            issues.push(issue.with_hint("consumer names must be unique in all files: choose another name"));
        }
        let consumer = Arc::new(Consumer {
            name: name.as_str().into(),
            tier: tier(written.tier.as_ref(), limits, issues),
            groups: written.group.as_ref().map_or_else(BTreeMap::new, |group| groups.levels_of(group, issues)),
            variants: limit_variants(&written.limit, limits, hasher, issues),
        });
        for key in written.keys.iter().flatten() {
            let (hash, span, terms) = match key.get_ref() {
                ConsumerKey::Hash(hash) => (hash, key.span(), None),
                ConsumerKey::Table(table) => match &table.hash {
                    Some(hash) => (hash.get_ref(), hash.span(), key_terms(table, limits, issues)),
                    None => {
                        if !unknown_keys.are_in(&key.span()) {
                            issues.push(Issue::new(key.span(), "`hash` is missing").with_hint(KEY_HASH_HINT));
                        }
                        continue;
                    }
                },
            };
            let Some(hash) = parse_key_hash(hash) else {
                // Do not quote the text, because the operator may have pasted an API key.
                issues.push(Issue::new(span, "this is not the hash of a key").with_hint(KEY_HASH_HINT));
                continue;
            };
            let key = identity::consumer::ConsumerKey { hash, consumer: consumer.clone(), terms };
            if let Err(other) = consumers.insert(key) {
                issues.push(Issue::new(span, format!("the consumer `{}` has this key already", other.name)));
            }
        }
    }
    consumers
}

/// The groups of a consumers file by name.
struct Groups<'f>(BTreeMap<&'f str, WrittenGroup<'f>>);

struct WrittenGroup<'f> {
    level: &'f str,
    parent: Option<&'f Text>,
}

impl<'f> Groups<'f> {
    /// Read the groups. Report groups without a name or level, duplicate groups, and parents that do not exist or that
    /// lead to a level twice.
    fn compile(written: &'f [Spanned<gateway::ConsumerGroup>], issues: &mut Vec<Issue>) -> Self {
        let mut groups = Groups(BTreeMap::new());
        for group in written {
            let (span, group) = (group.span(), group.get_ref());
            let (Some(name), Some(level)) = (&group.name, &group.level) else {
                let issue = Issue::new(span, "a group needs a `name` and a `level`");
                issues.push(issue.with_hint("[[group]] name = \"search\", level = \"team\", parent = \"acme\""));
                continue;
            };
            let entry = WrittenGroup { level: level.get_ref(), parent: group.parent.as_ref() };
            if groups.0.insert(name.get_ref(), entry).is_some() {
                issues.push(Issue::new(name.span(), format!("duplicate group `{}`", name.get_ref())));
            }
        }
        for group in groups.0.values() {
            if let Some(parent) = group.parent {
                let levels = groups.levels_of(parent, issues);
                if levels.contains_key(group.level) {
                    let message = format!("the parents of this group have the level `{}` of the group", group.level);
                    issues.push(Issue::new(parent.span(), message).with_hint("each level must have its own name"));
                }
            }
        }
        groups
    }

    /// Return the names of a group and of its parents, by level. Stop at a level that has occurred, so that a cycle
    /// ends.
    fn levels_of(&self, name: &Text, issues: &mut Vec<Issue>) -> BTreeMap<Box<str>, Box<str>> {
        let mut levels = BTreeMap::new();
        let mut next = Some(name);
        while let Some(name) = next {
            let Some(group) = self.0.get(name.get_ref().as_str()) else {
                let issue = Issue::new(name.span(), format!("unknown group `{}`", name.get_ref()));
                issues.push(match closest_name(name.get_ref(), self.0.keys().copied()) {
                    Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
                    None => issue.with_hint("add a [[group]] with this name"),
                });
                break;
            };
            match levels.entry(group.level.into()) {
                btree_map::Entry::Vacant(entry) => entry.insert(name.get_ref().as_str().into()),
                btree_map::Entry::Occupied(_) => break,
            };
            next = group.parent;
        }
        levels
    }
}

const KEY_HASH_HINT: &str = "write \"sha256:\" and 64 lower-case hex digits: printf %s KEY | sha256sum";

/// Compile the restrictions of an API key.
fn key_terms(table: &KeyTable, names: &KnownNames<'_>, issues: &mut Vec<Issue>) -> Option<Box<KeyTerms>> {
    let mut instant =
        |written: &Option<Spanned<Datetime>>| {
            let written = written.as_ref()?;
            let instant = datetime_us(written.get_ref());
            if instant.is_none() {
                let issue = Issue::new(written.span(), format!("`{}` is not a valid time", written.get_ref()));
                issues.push(issue.with_hint(
                    "write a time with an offset, such as 2026-12-31T23:00:00Z, or a day, such as 2026-12-31",
                ));
            }
            instant
        };
    instant(&table.created);
    let expires_us = instant(&table.expires);
    let routes = table.routes.as_ref().map(|routes| {
        for route in routes.iter().filter(|route| !names.routes.contains(&route.get_ref().as_str())) {
            let issue = Issue::new(route.span(), format!("unknown route `{}`", route.get_ref()));
            issues.push(match closest_name(route.get_ref(), names.routes.iter().copied()) {
                Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
                None => issue.with_hint(format!("known: {}", names.routes.join(", "))),
            });
        }
        routes.iter().map(|route| route.get_ref().as_str().into()).collect()
    });
    let name = table.name.as_ref().map(|name| name.get_ref().as_str().into());
    let terms = KeyTerms { name, expires_us, disabled: table.disabled, routes };
    (terms != KeyTerms::default()).then(|| Box::new(terms))
}

/// Compile the tier of a consumer. Report an error if no limit has this tier.
fn tier(text: Option<&Text>, limits: &KnownNames<'_>, issues: &mut Vec<Issue>) -> Option<Box<str>> {
    let text = text?;
    let known = || limits.tiers();
    if *limits.tier_source != TierSource::ApiKey {
        let issue =
            Issue::new(text.span(), "the `tier` of a consumer has no effect, because [tiers] selects another source");
        issues.push(issue.with_hint("remove `tier`, or set [tiers] from = \"api-key\""));
    } else if !known().any(|tier| tier == text.get_ref()) {
        let issue = Issue::new(text.span(), format!("no limit has a tier `{}`", text.get_ref()));
        issues.push(match closest_name(text.get_ref(), known()) {
            Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
            None => issue.with_hint(format!(
                "set tiers = {{ {} = {{ quota = \"…\" }} }} on a limit that counts by api-key",
                text.get_ref()
            )),
        });
    }
    Some(text.get_ref().as_str().into())
}

/// Compile the quotas of a consumer.
fn limit_variants(
    written: &BTreeMap<String, Spanned<config::tables::LimitVariant>>,
    known_limits: &KnownNames<'_>,
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
            let issue = Issue::new(own.span(), format!("no limit `{name}` counts by api-key"));
            let known = limits.iter().filter(|(_, compiled)| uses_api_key(compiled)).map(|(name, _)| name.as_str());
            issues.push(match closest_name(name, known) {
                Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
                None => issue.with_hint("consumers can have quotas only for limits that count by api-key"),
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

// === `allow` and `deny`, and the network files that they refer to ===

/// Prefix of an item in `allow` or `deny` that refers to a network file.
const FILE_PREFIX: &str = "file:";

/// The network files, in the order in which access rules first refer to them. Each file is read once.
#[derive(Default)]
pub(super) struct NetworkFiles(pub(super) Vec<Arc<NetworkFile>>);

/// Compile `allow` and `deny` of the table at `span`. Return `None` if neither list is set.
pub(super) fn access_rules(
    allow: Option<&[Text]>,
    deny: Option<&[Text]>,
    span: &Range<usize>,
    files: &mut NetworkFiles,
    reader: &mut Validator<'_>,
) -> Option<AccessRules> {
    if allow.is_none() && deny.is_none() {
        return None;
    }
    if let Some([]) = allow {
        let issue = Issue::new(span.clone(), "`allow` is empty: every client would be rejected");
        reader.push_issue(issue.with_hint("remove `allow` to allow all clients"));
    }
    let allow = allow.map(|items| files.list(items, reader));
    let deny = files.list(deny.unwrap_or_default(), reader);
    Some(AccessRules { allow, deny })
}

impl NetworkFiles {
    fn list(&mut self, items: &[Text], reader: &mut Validator<'_>) -> NetworkList {
        let (mut networks, mut files) = (Vec::new(), Vec::new());
        for text in items {
            let item = text.get_ref();
            match (item.strip_prefix(FILE_PREFIX), parse_network(item)) {
                (Some(name), _) => files.extend(self.file(name, text, reader)),
                (None, Some(network)) => networks.push(network),
                (None, None) if item.ends_with(".txt") => {
                    let issue = Issue::new(text.span(), format!("`{item}` is not an address or a network"));
                    reader.push_issue(
                        issue.with_hint(format!("if this is the path of a file, write \"{FILE_PREFIX}{item}\"")),
                    );
                }
                (None, None) => network_issue(item, text.span(), reader),
            }
        }
        NetworkList { inline: NetworkSet::new(networks), files }
    }

    /// Return a network file. Read it only if no earlier rule refers to it.
    fn file(&mut self, name: &str, text: &Text, reader: &mut Validator<'_>) -> Option<Arc<NetworkFile>> {
        if reader.is_unresolved(text) {
            reader.push_issue(Issue::new(
                text.span(),
                "cannot find the network file, because an environment variable is not set",
            ));
            return None;
        }
        let path = reader.resolve_relative(name, text.span());
        if let Some(known) = self.0.iter().find(|known| known.file.path == path) {
            return Some(known.clone());
        }
        let file = match FileSnapshot::read(&path) {
            Ok(file) => file,
            Err(error) => {
                let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
                reader.push_issue(issue.with_hint("give the path of a text file with one network or address per line"));
                return None;
            }
        };
        let networks = parse(&path, &file.content).map_err(|faulty| reader.add_file_issues(faulty)).unwrap_or_default();
        let file = Arc::new(NetworkFile { name: name.into(), file, networks: ArcSwap::from_pointee(networks) });
        self.0.push(file.clone());
        Some(file)
    }
}

/// Parse the content of a network file.
fn parse(path: &Path, content: &[u8]) -> Result<NetworkSet, FileIssues> {
    let text = utf8_text(path, content.to_vec())?;
    parse_networks(&text).map_err(|(lines, further)| {
        let issue = |span: Range<usize>| {
            let line = &text[span.clone()];
            // Give a hint for the syntax of other programs, such as `deny 10.0.0.1;` or `10.0.0.1, 10.0.0.2`.
            let mut words = line.split(|c: char| c.is_whitespace() || "\"',;".contains(c));
            let hint = match words.find(|word| parse_network(word).is_some()) {
                Some(network) => format!("write only the network in the line: {network}"),
                None => "write one network or address per line, such as 10.0.0.0/8; comments begin with `#`".to_owned(),
            };
            Issue::new(span, format!("`{line}` is not an address or a network")).with_hint(hint)
        };
        let mut issues: Vec<_> = lines.into_iter().map(|line| issue(line.span)).collect();
        if further > 0 {
            issues.push(Issue { span: None, message: format!("{further} further lines are not networks"), hint: None });
        }
        FileIssues { path: path.to_owned(), text: text.clone(), issues }
    })
}

impl CompiledConfig {
    /// Replace the networks of a network file with those in `content`. `index` is the index of the file.
    ///
    /// # Errors
    /// The file has errors, or is empty. An empty file may be one that a program is still writing. After an error, the
    /// active networks do not change.
    pub fn reload_networks(&self, index: usize, content: &[u8]) -> Result<(), ConfigError> {
        let NetworkFile { file, networks, .. } = &*self.network_files[index];
        let parsed = match content.trim_ascii().is_empty() {
            true => Err(FileIssues::from_message(
                &file.path,
                "the file is empty: if it lists no networks intentionally, write a comment into it",
            )),
            false => parse(&file.path, content),
        };
        networks.store(Arc::new(parsed.map_err(|faulty| ConfigError { files: vec![faulty] })?));
        Ok(())
    }
}
