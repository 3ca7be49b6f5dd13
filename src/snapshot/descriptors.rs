//! Compiles `[[descriptor]]`, and finds the descriptor that matches the entries of a call.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use http::HeaderName;

use crate::config;
use crate::config::error::{FileIssues, Issue};
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::sources::FileSnapshot;
use crate::config::spanned::{Spanned, Text};
use crate::identity::display::IdentityInput;
use crate::identity::spec::{Descriptor, IdentitySpec};
use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use crate::limiter::spec::LimitSpec;
use crate::payload::envoy::Struct;
use crate::payload::wildcard::Wildcard;
use crate::snapshot::descriptor_files;
use crate::snapshot::descriptor_files::{
    DescriptorFiles, FileContext, FileDomain, FileOptions, FileRule, ReadFiles, ReadRule,
};
use crate::snapshot::limits::{ChargePolicy, CompiledLimit, LimitContext};
use crate::snapshot::validator::Validator;

/// Maximum number of limits of a descriptor.
const MAX_LIMITS: usize = 16;

/// Maximum number of entries of a descriptor.
const MAX_ENTRIES: usize = 32;

/// Label of the domain in the identity of a limit of YAML files.
pub const DOMAIN_LABEL: &str = "domain";

/// The state of a limit of YAML files.
#[derive(Debug, Clone, Copy)]
pub struct FileState<'a> {
    /// The limit.
    pub limit: &'a Arc<LimitSpec>,
    /// The identity: the domain and the entries of a descriptor.
    pub identity: Identity,
}

/// What a call does with its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallOptions {
    /// Whether each descriptor is decided and charged on its own, instead of all descriptors together.
    pub is_independent: bool,
    /// Whether the metadata of a response repeats the descriptors of the call.
    pub has_dynamic_metadata: bool,
    /// Costs beyond this share of a quota count as near the limit.
    pub near_limit: NearLimit,
}

/// A share of a quota, in parts of [`NEAR_LIMIT_PARTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NearLimit(u32);

/// Parts of a quota in a [`NearLimit`].
const NEAR_LIMIT_PARTS: u32 = 1_000_000;

impl Default for NearLimit {
    /// 80 %, as in envoyproxy/ratelimit.
    fn default() -> Self {
        NearLimit(NEAR_LIMIT_PARTS / 5 * 4)
    }
}

/// Compile `near_limit`.
fn near_limit(written: Option<&Spanned<f64>>, reader: &mut Validator<'_>) -> NearLimit {
    let share = written.map(|_| reader.fraction(written, 0..=1, 0.0));
    share.map_or_else(NearLimit::default, |share| NearLimit((share * f64::from(NEAR_LIMIT_PARTS)).round() as u32))
}

impl NearLimit {
    /// Return this share of a quota, rounded down.
    pub fn of(self, quota: u64) -> u64 {
        let [share, parts] = [self.0, NEAR_LIMIT_PARTS].map(u64::from);
        // A quota above 2^44 loses less than a millionth.
        quota.checked_mul(share).map_or(quota / parts * share, |product| product / parts)
    }
}

/// The descriptors of the configuration.
#[derive(Debug, Default)]
pub struct DescriptorTable {
    /// What a call does with its descriptors.
    pub options: CallOptions,
    /// All descriptors, in the order of the configuration.
    pub rules: Vec<DescriptorRule>,
    /// The descriptors by domain and entries.
    domains: HashMap<Box<[u8]>, Node>,
    /// The descriptors of YAML files by domain.
    file_domains: HashMap<Box<[u8]>, FileDomain>,
    /// The limits of YAML files by name. `None` if limits with different windows have the name.
    named_limits: HashMap<Box<str>, Option<Arc<LimitSpec>>>,
}

/// A descriptor of the configuration.
#[derive(Debug)]
pub struct DescriptorRule {
    /// Domain of the descriptor.
    pub domain: Box<str>,
    /// Entries as written, separated by `/`: the name of the descriptor in metrics.
    pub name: Box<str>,
    /// The limits. Empty if requests with this descriptor are not limited.
    pub limits: Vec<DescriptorLimit>,
    /// Whether the descriptor denies a call only together with all other such descriptors of the call.
    pub is_quota: bool,
    /// Metadata of a response in which the descriptor is not over its limits.
    pub metadata: Option<Struct>,
    /// What a descriptor of a YAML file has besides its limit. `None` for a `[[descriptor]]`.
    pub of_file: Option<FileRule>,
}

/// Whether a call contains a limit for a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitInCall {
    /// The call contains a limit.
    Given,
    /// The call contains no limit, or one without a window.
    Absent,
}

/// A limit of a descriptor.
#[derive(Debug)]
pub struct DescriptorLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// The parts of the identity: entries of the descriptor.
    pub identity_spec: IdentitySpec,
    /// What the limit charges.
    pub charge: ChargePolicy,
}

/// An entry of a descriptor in the configuration.
#[derive(Debug, Clone, Copy)]
struct EntryPattern<'a> {
    key: &'a str,
    /// The value, which may have `*`. `None` matches every value.
    value: Option<&'a str>,
}

/// The descriptors whose first entries are the same.
#[derive(Debug, Default)]
struct Node {
    /// Index of the descriptor that ends here.
    rule: Option<usize>,
    /// The next entries, by key.
    keys: HashMap<Box<[u8]>, Branch>,
}

/// The descriptors whose next entries have the same key.
#[derive(Debug, Default)]
struct Branch {
    /// Entries that match one value.
    exact: HashMap<Box<[u8]>, Node>,
    /// Entries with `*` in their value. The most specific entry is the first.
    patterns: Vec<(Wildcard, Node)>,
    /// The entry that matches every value.
    any: Option<Box<Node>>,
}

impl DescriptorTable {
    /// Return all limits, once for each descriptor that uses them.
    pub(super) fn limits(&self) -> impl Iterator<Item = &Arc<LimitSpec>> + Clone {
        self.rules.iter().flat_map(|rule| &rule.limits).map(|limit| &limit.limit)
    }

    /// Return whether a descriptor has the limit with this name.
    pub fn uses(&self, limit: &str) -> bool {
        let rules = self.rules.iter().filter(|rule| rule.of_file.is_none());
        rules.flat_map(|rule| &rule.limits).any(|used| *used.limit.name == *limit)
    }

    /// Return the number of descriptors of the configuration.
    pub fn count(&self) -> usize {
        // Each domain of a YAML file also has a rule for limits in calls.
        self.rules.len() - self.file_domains.len()
    }

    /// Return the limit of YAML files with this name. Return `None` if limits with different windows have the name.
    pub fn file_limit(&self, name: &str) -> Option<&Arc<LimitSpec>> {
        self.named_limits.get(name)?.as_ref()
    }

    /// Return whether a limit of YAML files has this name.
    pub fn has_file_limit(&self, name: &str) -> bool {
        self.named_limits.contains_key(name)
    }

    /// Return the limits of the descriptors of YAML files.
    pub fn file_limits(&self) -> impl Iterator<Item = &DescriptorLimit> {
        let rules = self.rules.iter().filter(|rule| rule.of_file.is_some());
        rules.flat_map(|rule| &rule.limits).filter(|limit| !limit.identity_spec.descriptors.is_empty())
    }

    /// Return the states of YAML files for the values of entries, as `entry:KEY`, and perhaps the `domain`. `name` selects
    /// the limits with a name.
    pub fn file_states(
        &self,
        name: Option<&str>,
        input: &IdentityInput,
        hasher: &IdentityHasher,
    ) -> Vec<FileState<'_>> {
        let mut states = Vec::new();
        for (index, rule) in self.rules.iter().enumerate() {
            let Some(of_file) = &rule.of_file else { continue };
            let Some(DescriptorLimit { limit, identity_spec, .. }) = rule.limits.first() else { continue };
            let is_selected = name.is_none_or(|name| *limit.name == *name)
                && input.get(DOMAIN_LABEL).is_none_or(|domain| **domain == *rule.domain);
            let mut entries: Vec<(&[u8], &[u8])> = Vec::new();
            for descriptor in &identity_spec.descriptors {
                let Descriptor::Entry(key) = descriptor else { continue };
                let value = input.get(&*descriptor.label());
                entries.extend(value.map(|value| (key.as_bytes(), value.as_bytes())));
            }
            let is_complete = !entries.is_empty()
                && entries.len() == identity_spec.descriptors.len()
                && input.keys().all(|label| label == DOMAIN_LABEL || identity_spec.has_label(label));
            let entries = || entries.iter().copied();
            if is_selected
                && is_complete
                && self.find(rule.domain.as_bytes(), entries(), LimitInCall::Absent) == Some(index)
            {
                let mut encoder = IdentityEncoder::default();
                let identity = of_file.identify(rule.domain.as_bytes(), entries(), hasher, &mut encoder);
                states.push(FileState { limit, identity });
            }
        }
        states
    }

    /// Return the index of the most specific descriptor with this domain that matches the entries. Earlier entries
    /// count more than later ones. One value is more specific than a pattern, and a pattern more than every value.
    ///
    /// In the domain of a YAML file, a limit in the call applies instead of the descriptors.
    pub fn find<'e>(
        &self,
        domain: &[u8],
        entries: impl Iterator<Item = (&'e [u8], &'e [u8])> + Clone,
        limit_in_call: LimitInCall,
    ) -> Option<usize> {
        match (self.file_domains.get(domain), limit_in_call) {
            (Some(domain), LimitInCall::Given) => Some(domain.rule_of_call),
            (Some(domain), LimitInCall::Absent) => domain.find(entries),
            (None, _) => self.domains.get(domain)?.find(entries),
        }
    }
}

impl Node {
    fn find<'e>(&self, mut entries: impl Iterator<Item = (&'e [u8], &'e [u8])> + Clone) -> Option<usize> {
        let Some((key, value)) = entries.next() else { return self.rule };
        let branch = self.keys.get(key)?;
        let patterns = branch.patterns.iter().filter(|(pattern, _)| pattern.matches(value)).map(|(_, node)| node);
        let nodes = branch.exact.get(value).into_iter().chain(patterns).chain(branch.any.as_deref());
        // Each call visits different nodes, so the search takes at most as many steps as there are entries in the
        // configuration.
        nodes.into_iter().find_map(|node| node.find(entries.clone()))
    }

    /// Return the node of this entry. Create it if it does not exist.
    fn child(&mut self, entry: EntryPattern<'_>) -> &mut Node {
        let EntryPattern { key, value } = entry;
        let branch = self.keys.entry(key.as_bytes().into()).or_default();
        let Some(value) = value else { return branch.any.get_or_insert_default() };
        if !value.contains('*') {
            return branch.exact.entry(value.as_bytes().into()).or_default();
        }
        let pattern = Wildcard::new(value);
        let index = branch.patterns.iter().position(|(other, _)| *other == pattern).unwrap_or_else(|| {
            let is_less_specific = |(other, _): &(Wildcard, Node)| other.specificity() < pattern.specificity();
            let index = branch.patterns.iter().position(is_less_specific).unwrap_or(branch.patterns.len());
            branch.patterns.insert(index, (pattern, Node::default()));
            index
        });
        &mut branch.patterns[index].1
    }
}

/// Compile all descriptors.
pub(super) fn descriptors(
    config: &Config,
    limits: &BTreeMap<String, CompiledLimit>,
    reader: &mut Validator<'_>,
) -> DescriptorTable {
    let is_set = |key: &Option<Spanned<bool>>| key.as_ref().map(|value| *value.get_ref());
    let options = CallOptions {
        is_independent: is_set(&config.ratelimit.atomic) == Some(false),
        has_dynamic_metadata: is_set(&config.ratelimit.dynamic_metadata) == Some(true),
        near_limit: near_limit(config.ratelimit.near_limit.as_ref(), reader),
    };
    let mut table = DescriptorTable { options, ..DescriptorTable::default() };
    let mut spans: Vec<Range<usize>> = Vec::new();
    for spanned in &config.descriptor {
        let span = spanned.span();
        let written = spanned.get_ref();
        let domain = reader.required(written.domain.as_ref(), &span, "domain", "\"edge\"");
        let entries = reader.required(written.entries.as_ref(), &span, "entries", "[\"remote_address\"]");
        let Some((domain, entries)) = domain.zip(entries) else { continue };
        check_entries(domain, entries, reader);
        let parsed: Vec<_> = entries.get_ref().iter().map(|entry| parse_entry(entry.get_ref())).collect();
        let limits = rule_limits(spanned, &parsed, limits, config, reader);
        let name: Vec<_> = entries.get_ref().iter().map(|entry| entry.get_ref().as_str()).collect();
        let index = table.rules.len();
        let mut node = table.domains.entry(domain.get_ref().as_bytes().into()).or_default();
        for entry in parsed {
            node = node.child(entry);
        }
        if let Some(first) = node.rule.replace(index) {
            let issue = Issue::new(span.clone(), "duplicate descriptor: another one has the same domain and entries");
            reader.push_issue(issue.with_hint(reader.first_line_hint(&spans[first])));
        }
        table.rules.push(DescriptorRule {
            domain: domain.get_ref().as_str().into(),
            name: name.join("/").into(),
            limits,
            is_quota: is_set(&written.quota_mode) == Some(true),
            metadata: written.metadata.as_ref().and_then(|metadata| toml_metadata(metadata, reader)),
            of_file: None,
        });
        spans.push(span);
    }
    table
}

/// Add the descriptors of the YAML files that `[ratelimit]` names. Return the files.
pub(super) fn add_files(
    table: &mut DescriptorTable,
    config: &Config,
    context: LimitContext<'_>,
    reader: &mut Validator<'_>,
) -> DescriptorFiles {
    let Some(text) = &config.ratelimit.configuration else { return DescriptorFiles::default() };
    let path = reader.resolve_path(text);
    let files = match DescriptorFiles::read(&path) {
        Ok(files) => files,
        Err((path, error)) => {
            let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
            reader.push_issue(issue.with_hint("name a YAML file, or a directory of *.yaml files"));
            return DescriptorFiles::default();
        }
    };
    if files.is_empty() {
        let issue = Issue::new(text.span(), format!("{} has no *.yaml file", path.display()));
        reader.push_issue(issue.with_hint("name a YAML file, or a directory of *.yaml files"));
    }
    let options = FileOptions::new(&config.ratelimit);
    let context = FileContext { limits: context, options, first_rule: table.rules.len() };
    add_read_files(table, &files, text, context, reader);
    DescriptorFiles { path: Some(path), files }
}

fn add_read_files(
    table: &mut DescriptorTable,
    files: &[FileSnapshot],
    text: &Text,
    context: FileContext<'_>,
    reader: &mut Validator<'_>,
) {
    let read = descriptor_files::read_files(files, context);
    for domain in table.domains_of_both(&read) {
        let issue = Issue::new(text.span(), format!("the domain `{domain}` has a [[descriptor]] and a YAML file"));
        reader.push_issue(issue.with_hint("choose one of them for each domain"));
    }
    table.add(read).into_iter().for_each(|faulty| reader.add_file_issues(faulty));
}

impl DescriptorTable {
    /// Return whether YAML has a domain.
    pub(super) fn has_file_domains(&self) -> bool {
        !self.file_domains.is_empty()
    }

    /// Return the domains that both a `[[descriptor]]` and the YAML have.
    pub(super) fn domains_of_both(&self, read: &ReadFiles) -> Vec<String> {
        let both = read.domains.keys().filter(|domain| self.domains.contains_key(*domain));
        both.map(|domain| String::from_utf8_lossy(domain).into_owned()).collect()
    }

    /// Add the descriptors of the YAML. Return its errors.
    pub(super) fn add(&mut self, read: ReadFiles) -> Vec<FileIssues> {
        self.file_domains = read.domains;
        self.rules.extend(read.rules.into_iter().map(|read| {
            let ReadRule { domain, name, limit, identity_spec, is_quota, metadata, rule } = read;
            // Envoy Gateway and others charge tokens when a stream ends, perhaps more than what remains.
            let charge = ChargePolicy::Always;
            let limits = limit.map(|limit| DescriptorLimit { limit, identity_spec, charge }).into_iter().collect();
            DescriptorRule { domain, name, limits, is_quota, metadata, of_file: Some(rule) }
        }));
        let mut named: HashMap<Box<str>, Option<Arc<LimitSpec>>> = HashMap::new();
        for DescriptorLimit { limit, .. } in self.file_limits() {
            let state_name = |limit: &Arc<LimitSpec>| limit.default_variant.state_name.clone();
            let entry = named.entry(limit.name.clone()).or_insert_with(|| Some(limit.clone()));
            *entry = entry.take().filter(|first| state_name(first) == state_name(limit));
        }
        self.named_limits = named;
        read.faulty
    }
}

/// Names of the headers with the quota, the remaining count and the time until the reset of a limit.
#[derive(Debug)]
pub struct DescriptorHeaders(pub [Box<str>; 3]);

/// Compile `headers` of `[ratelimit]`.
pub(super) fn headers(config: &Config, reader: &mut Validator<'_>) -> Option<DescriptorHeaders> {
    let written = config.ratelimit.headers.as_ref()?;
    let gateway::DescriptorHeaders { limit, remaining, reset } = written.get_ref();
    let span = written.span();
    let mut name = |text: &Option<Text>, key: &str, example: &str| -> Option<Box<str>> {
        let text = reader.required(text.as_ref(), &span, key, example)?;
        if HeaderName::from_bytes(text.get_ref().as_bytes()).is_err() {
            let issue = Issue::new(text.span(), format!("`{}` is not the name of a header", text.get_ref()));
            reader.push_issue(issue.with_hint(format!("write {key} = {example}")));
            return None;
        }
        Some(text.get_ref().as_str().into())
    };
    let limit = name(limit, "limit", "\"RateLimit-Limit\"");
    let remaining = name(remaining, "remaining", "\"RateLimit-Remaining\"");
    let reset = name(reset, "reset", "\"RateLimit-Reset\"");
    Some(DescriptorHeaders([limit?, remaining?, reset?]))
}

/// Split an entry into its key and its value. An entry without `=` matches every value.
fn parse_entry(entry: &str) -> EntryPattern<'_> {
    match entry.split_once('=') {
        Some((key, value)) => EntryPattern { key, value: Some(value) },
        None => EntryPattern { key: entry, value: None },
    }
}

/// Compile the `metadata` of a `[[descriptor]]`.
fn toml_metadata(written: &Spanned<toml::Table>, reader: &mut Validator<'_>) -> Option<Struct> {
    let metadata = descriptor_files::table_to_struct(written.get_ref());
    if let Err(error) = descriptor_files::check_metadata(&metadata) {
        reader.push_issue(Issue::new(written.span(), error).with_hint(descriptor_files::METADATA_HINT));
    }
    Some(metadata).filter(|metadata| !metadata.fields.is_empty())
}

fn check_entries(domain: &Text, entries: &Spanned<Vec<Text>>, reader: &mut Validator<'_>) {
    if domain.get_ref().is_empty() {
        let issue = Issue::new(domain.span(), "`domain` is empty: a proxy cannot send such a descriptor");
        reader.push_issue(issue.with_hint("write the `domain` of the proxy's rate limit filter"));
    }
    let count = entries.get_ref().len();
    if !(1..=MAX_ENTRIES).contains(&count) {
        let issue = Issue::new(entries.span(), format!("a descriptor has 1 to {MAX_ENTRIES} entries, not {count}"));
        reader.push_issue(issue.with_hint("such as [\"generic_key=login\", \"remote_address\"]"));
    }
    for entry in entries.get_ref().iter().filter(|entry| parse_entry(entry.get_ref()).key.is_empty()) {
        let issue = Issue::new(entry.span(), format!("the entry `{}` has no key", entry.get_ref()));
        reader.push_issue(issue.with_hint("write KEY for every value, or KEY=VALUE for one value"));
    }
}

/// Compile the limits of a descriptor with these entries.
fn rule_limits(
    written: &Spanned<config::tables::Descriptor>,
    entries: &[EntryPattern<'_>],
    limits: &BTreeMap<String, CompiledLimit>,
    config: &Config,
    reader: &mut Validator<'_>,
) -> Vec<DescriptorLimit> {
    let span = written.span();
    let written = written.get_ref();
    let is_unlimited = written.unlimited.as_ref().is_some_and(|unlimited| *unlimited.get_ref());
    match written.limits.first() {
        Some(first) if is_unlimited => {
            let issue = Issue::new(first.span(), "`limits` and `unlimited` cannot be combined");
            reader.push_issue(issue.with_hint("remove one of them"));
        }
        None if !is_unlimited => {
            let issue = Issue::new(span, "`limits` is missing");
            reader.push_missing(issue.with_hint("write limits = [\"NAME\"], or unlimited = true"));
        }
        Some(_) | None => {}
    }
    if let Some(text) = written.limits.get(MAX_LIMITS) {
        reader.push_issue(Issue::new(text.span(), format!("a descriptor has at most {MAX_LIMITS} limits")));
    }
    let mut used: Vec<DescriptorLimit> = Vec::new();
    for text in &written.limits {
        let name = text.get_ref();
        let Some(compiled) = limits.get(name) else {
            // If the limit exists but has errors, skip it, because its errors are already reported.
            if !config.limit.contains_key(name) {
                reader.unknown_name(text.span(), "limit", name, config.limit.keys().map(String::as_str));
            }
            continue;
        };
        if used.iter().any(|other| Arc::ptr_eq(&other.limit, &compiled.limit)) {
            reader.push_issue(Issue::new(text.span(), format!("the descriptor has the limit `{name}` twice")));
            continue;
        }
        check_identity(text, entries, &compiled.identity_spec, reader);
        if let Some(written) = config.limit.get(name) {
            check_keys(text, written.get_ref(), compiled, reader);
        }
        let CompiledLimit { limit, identity_spec, charge, .. } = compiled.clone();
        used.push(DescriptorLimit { limit, identity_spec, charge });
    }
    used
}

/// Report parts of an identity that the entries do not have exactly once.
fn check_identity(text: &Text, entries: &[EntryPattern<'_>], identity_spec: &IdentitySpec, reader: &mut Validator<'_>) {
    let limit = text.get_ref();
    for descriptor in &identity_spec.descriptors {
        let (message, hint) = match descriptor {
            Descriptor::Global => continue,
            Descriptor::Entry(key) => match entries.iter().filter(|entry| entry.key == &**key).count() {
                1 => continue,
                0 => (
                    format!("`{limit}` counts by entry:{key}, but the descriptor has no entry `{key}`"),
                    format!("add \"{key}\" to `entries`, or choose another `by`"),
                ),
                count => (
                    format!("`{limit}` counts by entry:{key}, but the descriptor has {count} entries `{key}`"),
                    "give the entries different keys: `descriptor_key` of the action in Envoy".to_owned(),
                ),
            },
            other => (
                format!("`{limit}` counts by {}, which descriptors do not have", other.label()),
                "descriptors have only entries: by = \"entry:KEY\", or by = \"global\"".to_owned(),
            ),
        };
        reader.push_missing(Issue::new(text.span(), message).with_hint(hint));
    }
}

/// Report keys of a limit that have no effect on descriptors.
fn check_keys(text: &Text, written: &config::tables::Limit, compiled: &CompiledLimit, reader: &mut Validator<'_>) {
    let is_concurrency = compiled.limit.default_variant.rule.is_concurrency();
    for (is_set, key, reason) in [
        (is_concurrency, "algorithm = \"concurrency\"", "the proxy does not report the end of a request"),
        (written.cost.is_some(), "cost", "the proxy sends the cost in `hits_addend`"),
        (written.refund_on.is_some(), "refund_on", "the proxy sends refunds itself, with `is_negative_hits`"),
        (written.max_wait.is_some(), "max_wait", "the proxy waits only a few milliseconds"),
        (written.methods.is_some(), "methods", "a descriptor has no method"),
        (written.on_missing.is_some(), "on_missing", "a descriptor that matches has all its entries"),
        (written.status.is_some(), "status", "the proxy chooses the status, with `rate_limited_status`"),
        (!written.tiers.is_empty(), "tiers", "write a descriptor for each tier"),
    ] {
        if is_set {
            let message = format!("`{}` has {key}, which has no effect on a descriptor: {reason}", text.get_ref());
            let hint = "use another limit for the descriptor";
            reader.push_missing_elsewhere(Issue::new(text.span(), message).with_hint(hint));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rules: &[&[&str]]) -> DescriptorTable {
        let mut table = DescriptorTable::default();
        for (index, entries) in rules.iter().enumerate() {
            let mut node = table.domains.entry((*b"d").into()).or_default();
            for entry in *entries {
                node = node.child(parse_entry(entry));
            }
            node.rule = Some(index);
        }
        table
    }

    #[test]
    fn most_specific_descriptor_wins() {
        let table = table(&[
            &["path"],
            &["path=/a*"],
            &["path=/api/*"],
            &["path=/api/v1"],
            &["path=/api/v1", "user=root"],
            &["path", "user"],
            &["path=*.png"],
            &["path=/*/x/*"],
            &["path="],
        ]);
        for (entries, expected) in [
            (&[("path", "/")][..], Some(0)),
            (&[("path", "/ab")], Some(1)),
            (&[("path", "/api/v2")], Some(2)),
            (&[("path", "/api/v1")], Some(3)),
            (&[("path", "/api/v1"), ("user", "root")], Some(4)),
            // No descriptor with the exact path matches the user, so a less specific path is used.
            (&[("path", "/api/v1"), ("user", "me")], Some(5)),
            (&[("path", "i.png")], Some(6)),
            (&[("path", "/1/x/2")], Some(7)),
            (&[("path", "")], Some(8)),
            (&[("path", "/1/x")], Some(0)),
            (&[("user", "me")], None),
            (&[("user", "me"), ("path", "/")], None),
            (&[("path", "/"), ("user", "me"), ("user", "me")], None),
        ] {
            let bytes = entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes()));
            assert_eq!(table.find(b"d", bytes.clone(), LimitInCall::Absent), expected, "{entries:?}");
            assert_eq!(table.find(b"other", bytes, LimitInCall::Absent), None);
        }
    }
}
