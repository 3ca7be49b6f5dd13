//! Reads descriptors from the YAML files of envoyproxy/ratelimit, and finds them in the order of envoyproxy/ratelimit.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use prost::Message;

use crate::config::error::{FileIssues, Issue};
use crate::config::gateway::RateLimitFiles;
use crate::config::sources::{FileSnapshot, utf8_text};
use crate::config::spanned::Spanned;
use crate::config::unknown_keys::closest_name;
use crate::config::yaml;
use crate::config::yaml::{Node, Value};
use crate::identity::spec::{Descriptor, IdentitySpec, OnMissing};
use crate::limiter::algorithm::Rule;
use crate::limiter::algorithm::fixed_window::{FixedWindow, WindowStart};
use crate::limiter::key::{Identity, IdentityEncoder, IdentityHasher};
use crate::limiter::quota::{Quota, QuotaError};
use crate::limiter::spec::{LimitSpec, LocalShare};
use crate::payload::envoy::{Kind, List, Struct, Unit};
use crate::payload::wildcard::Wildcard;
use crate::snapshot::limits::LimitContext;

/// Maximum number of entries of a descriptor.
const MAX_ENTRIES: usize = 32;

/// Maximum length of the name of a limit.
const MAX_NAME_LENGTH: usize = 64;

/// Maximum length of the `metadata` of a descriptor in a response, in bytes.
const MAX_METADATA: usize = 4 << 10;

/// Maximum length of a value in the name of a metric, in bytes.
const MAX_METRIC_VALUE: usize = 128;

/// Tag of the domain, keys and values in an identity. No part of another identity has this tag.
const TAG: u8 = b'Y';

const DOMAIN_KEYS: &[&str] = &["name", "domain", "descriptors"];
const DESCRIPTOR_KEYS: &[&str] = &[
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "share_threshold",
    "detailed_metric",
    "value_to_metric",
    "metadata",
];
const LIMIT_KEYS: &[&str] = &["unit", "requests_per_unit", "unlimited", "name", "replaces"];

// === The files ===

/// The files of `[ratelimit] configuration`.
#[derive(Debug, Clone, Default)]
pub struct DescriptorFiles {
    /// The file, or the directory of the files. `None` without `configuration`.
    pub path: Option<PathBuf>,
    /// The files with their contents, sorted by name.
    pub files: Vec<FileSnapshot>,
}

impl DescriptorFiles {
    /// Read a file, or the `*.yaml` and `*.yml` files of a directory and of the directories in it, without those whose name
    /// starts with a dot.
    ///
    /// # Errors
    /// The directory or a file cannot be read. The error contains its path.
    pub fn read(path: &Path) -> Result<Vec<FileSnapshot>, (PathBuf, io::Error)> {
        let of_path = |path: &Path, error| (path.to_owned(), error);
        let read = |path: &Path| FileSnapshot::read(path).map_err(|error| of_path(path, error));
        if !path.is_dir() {
            return Ok(vec![read(path)?]);
        }
        let mut paths = BTreeSet::new();
        let mut directories = vec![path.to_owned()];
        while let Some(directory) = directories.pop() {
            let entries = fs::read_dir(&directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
            for entry in entries.map_err(|error| of_path(&directory, error))? {
                let path = entry.path();
                if entry.file_name().to_string_lossy().starts_with('.') {
                    continue;
                }
                match path.extension().and_then(|extension| extension.to_str()) {
                    // Do not follow symbolic links to directories, which may form a cycle.
                    _ if entry.file_type().is_ok_and(|kind| kind.is_dir()) => directories.push(path),
                    Some("yaml" | "yml") if path.is_file() => drop(paths.insert(path)),
                    _ => {}
                }
            }
        }
        paths.iter().map(|path| read(path)).collect()
    }
}

// === Domains, and how descriptors are found ===

/// The descriptors of a domain.
#[derive(Debug, Default)]
pub(super) struct FileDomain {
    root: Level,
    /// Index of the rule for descriptors with a limit in the call.
    pub(super) rule_of_call: usize,
}

/// The descriptors whose first entries are the same.
#[derive(Debug, Default)]
struct Level {
    /// Index of the rule of the descriptor that ends here.
    rule: Option<usize>,
    keys: HashMap<Box<[u8]>, Values>,
    /// Entries with `*`, in the order of the file.
    patterns: Vec<(Pattern, Level)>,
}

/// The next entries with the same key.
#[derive(Debug, Default)]
struct Values {
    exact: HashMap<Box<[u8]>, Level>,
    any: Option<Box<Level>>,
}

/// An entry with `*`.
#[derive(Debug, PartialEq, Eq)]
enum Pattern {
    /// The value has `*`.
    Value(Box<[u8]>, Wildcard),
    /// The key has `*`, which matches the text `KEY_VALUE`.
    Entry(Wildcard),
}

impl Pattern {
    fn matches(&self, key: &[u8], value: &[u8]) -> bool {
        match self {
            Pattern::Value(own, wildcard) => **own == *key && wildcard.matches(value),
            Pattern::Entry(wildcard) => wildcard.matches(&[key, b"_", value].concat()),
        }
    }
}

impl FileDomain {
    /// Return the index of the rule that matches the entries. For each entry, the value wins over the first wildcard in
    /// the file, which wins over the key. If the next entry has no match, no other descriptor is tried.
    pub(super) fn find<'e>(&self, entries: impl Iterator<Item = (&'e [u8], &'e [u8])>) -> Option<usize> {
        let mut level = &self.root;
        for (key, value) in entries {
            level = level.next(key, value)?;
        }
        level.rule
    }
}

impl Level {
    fn next(&self, key: &[u8], value: &[u8]) -> Option<&Level> {
        let values = self.keys.get(key);
        let pattern = || self.patterns.iter().find(|(pattern, _)| pattern.matches(key, value)).map(|(_, level)| level);
        let exact = values.and_then(|values| values.exact.get(value));
        exact.or_else(pattern).or_else(|| values.and_then(|values| values.any.as_deref()))
    }

    /// Add the level of an entry. Return `None` if it exists.
    fn add(&mut self, key: &str, value: &str) -> Option<&mut Level> {
        let [key_bytes, value_bytes]: [Box<[u8]>; 2] = [key.as_bytes().into(), value.as_bytes().into()];
        if key.contains('*') || value.contains('*') {
            let pattern = match (key.contains('*'), value) {
                (false, value) => Pattern::Value(key_bytes, Wildcard::new(value)),
                (true, "") => Pattern::Entry(Wildcard::new(key)),
                (true, value) => Pattern::Entry(Wildcard::new(&format!("{key}_{value}"))),
            };
            if self.patterns.iter().any(|(other, _)| *other == pattern) {
                return None;
            }
            self.patterns.push((pattern, Level::default()));
            return self.patterns.last_mut().map(|(_, level)| level);
        }
        let values = self.keys.entry(key_bytes).or_default();
        match value {
            "" if values.any.is_some() => None,
            "" => Some(values.any.get_or_insert_default()),
            _ if values.exact.contains_key(&value_bytes) => None,
            _ => Some(values.exact.entry(value_bytes).or_default()),
        }
    }
}

/// What a descriptor of a YAML file has besides its limit.
#[derive(Debug, Default)]
pub struct FileRule {
    /// Name of the limit. Empty if it has none.
    pub limit_name: Box<str>,
    /// Names of the limits of other descriptors of the call that do not apply if this descriptor matches.
    pub replaces: Vec<Box<str>>,
    /// Unit of a limit with `requests_per_unit: 0`, which denies every request.
    pub denies_all: Option<Unit>,
    /// For each entry: the wildcard that is part of the identity instead of the key and the value (`share_threshold`).
    shared: Vec<Option<Box<str>>>,
    /// The labels of the descriptor in the metrics of envoyproxy/ratelimit.
    pub metric: MetricEntries,
}

/// The labels of the entries of a descriptor in the metrics of envoyproxy/ratelimit: `KEY` or `KEY_VALUE`.
#[derive(Debug, Default, Clone)]
pub struct MetricEntries {
    entries: Vec<MetricEntry>,
    /// Whether the labels have the values of the call (`detailed_metric`).
    is_detailed: bool,
}

/// Separates the domain and the labels in the name of a descriptor in the metrics of envoyproxy/ratelimit. No label has
/// it.
pub const LABEL_SEPARATOR: char = '\n';

/// The label of an entry in the metrics of envoyproxy/ratelimit.
#[derive(Debug, Default, Clone)]
struct MetricEntry {
    /// The label without the value of the call.
    label: Box<str>,
    /// Whether the label has the value of the call (`value_to_metric`).
    has_value: bool,
    /// Whether the label always is the wildcard (`share_threshold`).
    is_shared: bool,
}

impl MetricEntries {
    /// Return the name of the descriptor without values of calls: the domain and the labels, with [`LABEL_SEPARATOR`]
    /// between them.
    pub fn fixed(&self, domain: &str) -> String {
        let mut name = domain.replace(LABEL_SEPARATOR, "_");
        for entry in &self.entries {
            name.push(LABEL_SEPARATOR);
            name.push_str(&entry.label);
        }
        name
    }

    /// Return the name of the descriptor with the values of a call. Return `None` if the labels have no values, or if a
    /// value is too long.
    pub fn of_call<'e>(
        &self,
        domain: &str,
        entries: impl Iterator<Item = (&'e [u8], &'e [u8])> + Clone,
    ) -> Option<String> {
        let has_value = |entry: &MetricEntry| entry.has_value || (self.is_detailed && !entry.is_shared);
        let is_fixed = !self.is_detailed && !self.entries.iter().any(has_value);
        if is_fixed || entries.clone().any(|(key, value)| key.len() + value.len() > MAX_METRIC_VALUE) {
            return None;
        }
        let mut name = domain.replace(LABEL_SEPARATOR, "_");
        for (index, (key, value)) in entries.enumerate() {
            name.push(LABEL_SEPARATOR);
            match self.entries.get(index) {
                Some(entry) if !has_value(entry) => name.push_str(&entry.label),
                Some(_) | None => {
                    let [key, value] = [key, value].map(String::from_utf8_lossy);
                    name.push_str(&metric_label(&key, &value));
                }
            }
        }
        Some(name)
    }
}

/// Return a label as envoyproxy/ratelimit and the Prometheus exporter for StatsD build it. They reserve `.`, `:` and `|`.
fn metric_label(key: &str, value: &str) -> String {
    let joined = if value.is_empty() { key.to_owned() } else { format!("{key}_{value}") };
    joined.replace(['.', ':', '|', LABEL_SEPARATOR], "_")
}

impl FileRule {
    /// Return the identity of a descriptor: its domain, keys and values.
    pub fn identify<'e>(
        &self,
        domain: &[u8],
        entries: impl Iterator<Item = (&'e [u8], &'e [u8])>,
        hasher: &IdentityHasher,
        encoder: &mut IdentityEncoder,
    ) -> Identity {
        encoder.clear();
        encoder.push(TAG, domain);
        for (index, (key, value)) in entries.enumerate() {
            let shared = self.shared.get(index).and_then(Option::as_ref);
            encoder.push(TAG, shared.map_or(key, |pattern| pattern.as_bytes()));
            encoder.push(TAG, shared.map_or(value, |_| b""));
        }
        hasher.hash(encoder.as_bytes())
    }
}

// === Reading ===

/// A descriptor with a limit.
pub(super) struct ReadRule {
    pub(super) domain: Box<str>,
    /// Entries, separated by `/`.
    pub(super) name: Box<str>,
    /// The limit. `None` if the descriptor is unlimited, or denies every request.
    pub(super) limit: Option<Arc<LimitSpec>>,
    pub(super) identity_spec: IdentitySpec,
    pub(super) is_quota: bool,
    pub(super) metadata: Option<Struct>,
    pub(super) rule: FileRule,
}

/// The domains and rules of all files.
#[derive(Default)]
pub(super) struct ReadFiles {
    pub(super) domains: HashMap<Box<[u8]>, FileDomain>,
    pub(super) rules: Vec<ReadRule>,
    pub(super) faulty: Vec<FileIssues>,
}

/// The keys of `[ratelimit]` that apply to all files.
#[derive(Debug, Clone, Copy, Default)]
pub struct FileOptions {
    /// Whether no limit denies requests.
    shadow: bool,
    /// Whether all limits are quotas, of which only all together deny a call.
    quota_mode: bool,
    /// Whether several documents may have the same domain.
    merges_domains: bool,
}

impl FileOptions {
    pub(super) fn new(config: &RateLimitFiles) -> Self {
        let is_set = |key: &Option<Spanned<bool>>| key.as_ref().is_some_and(|value| *value.get_ref());
        FileOptions {
            shadow: is_set(&config.shadow),
            quota_mode: is_set(&config.quota_mode),
            merges_domains: is_set(&config.merge_domains),
        }
    }
}

/// What the limits of all files have in common.
#[derive(Clone, Copy)]
pub(super) struct FileContext<'a> {
    pub(super) limits: LimitContext<'a>,
    pub(super) options: FileOptions,
    /// Index of the first rule.
    pub(super) first_rule: usize,
}

/// Compile the descriptors of files.
pub(super) fn read_files(files: &[FileSnapshot], context: FileContext<'_>) -> ReadFiles {
    let mut read = ReadFiles::default();
    for file in files {
        let text = match utf8_text(&file.path, file.content.to_vec()) {
            Ok(text) => text,
            Err(faulty) => {
                read.faulty.push(faulty);
                continue;
            }
        };
        let mut reader = FileReader { text: &text, issues: Vec::new(), read: &mut read, context };
        match yaml::parse(&text) {
            Ok(documents) => documents.iter().for_each(|document| reader.domain(document)),
            Err(error) => reader.issue(&error.span, error.message, "write the YAML of envoyproxy/ratelimit"),
        }
        let issues = reader.issues;
        if !issues.is_empty() {
            read.faulty.push(FileIssues { path: file.path.clone(), text, issues });
        }
    }
    read
}

struct FileReader<'f, 'r> {
    text: &'f str,
    issues: Vec<Issue>,
    read: &'r mut ReadFiles,
    context: FileContext<'r>,
}

/// The entries on the path to a descriptor.
#[derive(Default)]
struct Entries {
    domain: Box<str>,
    names: Vec<String>,
    keys: Vec<Box<str>>,
    shared: Vec<Option<Box<str>>>,
    metrics: Vec<MetricEntry>,
}

/// The keys of a descriptor that apply to its limit.
struct LimitOptions {
    is_shadow: bool,
    is_quota: bool,
    is_detailed: bool,
    metadata: Option<Struct>,
}

impl FileReader<'_, '_> {
    /// Report an error at a range in characters. An empty range stands for the rest of its line.
    fn issue(&mut self, span: &Range<usize>, message: impl Into<String>, hint: &str) {
        let byte = |at: usize| self.text.char_indices().nth(at).map_or(self.text.len(), |(index, _)| index);
        let start = byte(span.start);
        let rest = self.text.get(start..).and_then(|rest| rest.lines().next()).unwrap_or_default().trim_end();
        let end = if span.is_empty() { start + rest.len() } else { byte(span.end) };
        self.issues.push(Issue::new(start..end, message).with_hint(hint));
    }

    /// Report unknown keys of a mapping, and a value that is no mapping.
    fn check_keys(&mut self, node: &Node, known: &[&str], what: &str) {
        if !matches!(node.value, Value::Map(_)) {
            self.issue(&node.span, format!("{what} must be a mapping"), &format!("its keys: {}", known.join(", ")));
        }
        for pair in node.pairs().iter().filter(|pair| !known.contains(&&*pair.key)) {
            let hint = match closest_name(&pair.key, known.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known keys: {}", known.join(", ")),
            };
            self.issue(&pair.span, format!("unknown key `{}` of {what}", pair.key), &hint);
        }
    }

    /// Return the text of a key. An absent key has an empty text.
    fn text(&mut self, node: &Node, key: &str) -> String {
        match node.get(key).map(|value| (&value.value, &value.span)) {
            None | Some((Value::Null, _)) => String::new(),
            Some((Value::Text(text), _)) => text.clone(),
            Some((Value::List(_) | Value::Map(_), span)) => {
                self.issue(span, format!("`{key}` must be a text"), &format!("write {key}: TEXT"));
                String::new()
            }
        }
    }

    fn flag(&mut self, node: &Node, key: &str) -> bool {
        let Some(value) = node.get(key).filter(|value| !matches!(value.value, Value::Null)) else { return false };
        value.boolean().unwrap_or_else(|| {
            self.issue(&value.span, format!("`{key}` must be true or false"), &format!("write {key}: true"));
            false
        })
    }

    /// Return the items of a list in a key.
    fn items<'n>(&mut self, node: &'n Node, key: &str) -> &'n [Node] {
        match node.get(key) {
            Some(Node { value: Value::Text(_) | Value::Map(_), span, .. }) => {
                self.issue(span, format!("`{key}` must be a list"), "start each item with `- `");
                &[]
            }
            value => value.map_or(&[], Node::items),
        }
    }

    /// Return the range of a key of a mapping.
    fn key_span(node: &Node, key: &str) -> Range<usize> {
        node.pairs().iter().find(|pair| pair.key == key).map_or(node.span.clone(), |pair| pair.span.clone())
    }

    fn metadata(&mut self, node: &Node) -> Option<Struct> {
        let value = node.get("metadata").filter(|value| !matches!(value.value, Value::Null))?;
        let span = Self::key_span(node, "metadata");
        if !matches!(value.value, Value::Map(_)) {
            self.issue(&span, "`metadata` must be a mapping", "write NAME: VALUE below it");
            return None;
        }
        let metadata = to_struct(value);
        if let Err(error) = check_metadata(&metadata) {
            self.issue(&span, error, METADATA_HINT);
        }
        Some(metadata).filter(|metadata| !metadata.fields.is_empty())
    }

    fn domain(&mut self, node: &Node) {
        self.check_keys(node, DOMAIN_KEYS, "a domain");
        let domain: Box<str> = self.text(node, "domain").into();
        if domain.is_empty() {
            return self.issue(&node.span, "`domain` is missing", "write the `domain` of the proxy's filter");
        }
        if self.read.domains.contains_key(domain.as_bytes()) && !self.context.options.merges_domains {
            let span = node.get("domain").map_or(&node.span, |value| &value.span);
            let hint =
                "write all descriptors of a domain into one document, or set merge_domains = true in [ratelimit]";
            return self.issue(span, format!("the domain `{domain}` occurs twice"), hint);
        }
        let known = self.read.domains.remove(domain.as_bytes());
        let rule_of_call = known.as_ref().map(|known| known.rule_of_call);
        let mut root = known.map(|known| known.root).unwrap_or_default();
        let mut path = Entries { domain: domain.clone(), ..Entries::default() };
        for item in self.items(node, "descriptors") {
            self.descriptor(item, &mut root, &mut path);
        }
        let rule_of_call = rule_of_call.unwrap_or_else(|| self.add_limit_of_call(&domain));
        self.read.domains.insert(domain.as_bytes().into(), FileDomain { root, rule_of_call });
    }

    /// Add the rule for descriptors with a limit in the call, and return its index.
    fn add_limit_of_call(&mut self, domain: &str) -> usize {
        let index = self.context.first_rule + self.read.rules.len();
        // The limit of the call replaces this quota.
        let limit = self.limit("limit-of-the-call", 1, Unit::Second, self.context.options.shadow);
        self.read.rules.push(ReadRule {
            domain: domain.into(),
            name: "(limit of the call)".into(),
            limit: limit.ok().map(Arc::new),
            identity_spec: identity_spec(&[]),
            is_quota: false,
            metadata: None,
            rule: FileRule {
                metric: MetricEntries { is_detailed: true, ..MetricEntries::default() },
                ..FileRule::default()
            },
        });
        index
    }

    fn descriptor(&mut self, node: &Node, level: &mut Level, path: &mut Entries) {
        self.check_keys(node, DESCRIPTOR_KEYS, "a descriptor");
        let [key, value] = ["key", "value"].map(|name| self.text(node, name));
        if key.is_empty() {
            return self.issue(&node.span, "`key` is missing", "write the key of the entry, such as generic_key");
        }
        if path.keys.len() == MAX_ENTRIES {
            let message = format!("a descriptor has at most {MAX_ENTRIES} entries");
            return self.issue(&node.span, message, "remove levels of `descriptors`");
        }
        let name = if value.is_empty() { key.clone() } else { format!("{key}={value}") };
        let Some(child) = level.add(&key, &value) else {
            let message = format!("the descriptor `{name}` occurs twice");
            return self.issue(&node.span, message, "write the entry once, with all its `descriptors`");
        };
        let is_wildcard = name.contains('*');
        let is_shared = self.flag(node, "share_threshold");
        if is_shared && !is_wildcard {
            let hint = "write `*` in `value`, or remove the key";
            self.issue(&Self::key_span(node, "share_threshold"), "`share_threshold` needs a wildcard", hint);
        }
        let has_value = self.flag(node, "value_to_metric") && !is_shared && (value.is_empty() || is_wildcard);
        path.metrics.push(MetricEntry { label: metric_label(&key, &value).into(), has_value, is_shared });
        path.shared.push(is_shared.then(|| name.clone().into()));
        path.names.push(name);
        path.keys.push(key.into());
        let options = LimitOptions {
            is_shadow: self.flag(node, "shadow_mode") || self.context.options.shadow,
            is_quota: self.flag(node, "quota_mode") || self.context.options.quota_mode,
            is_detailed: self.flag(node, "detailed_metric"),
            metadata: self.metadata(node),
        };
        if let Some(rate_limit) = node.get("rate_limit").filter(|value| !matches!(value.value, Value::Null)) {
            child.rule = self.rule(rate_limit, path, options);
        }
        for item in self.items(node, "descriptors") {
            self.descriptor(item, child, path);
        }
        path.names.pop();
        path.keys.pop();
        path.shared.pop();
        path.metrics.pop();
    }

    /// Add the rule of a `rate_limit`, and return its index.
    fn rule(&mut self, node: &Node, path: &Entries, options: LimitOptions) -> Option<usize> {
        let LimitOptions { is_shadow, is_quota, is_detailed, metadata } = options;
        self.check_keys(node, LIMIT_KEYS, "`rate_limit`");
        let limit_name = self.text(node, "name");
        let mut replaces = Vec::new();
        for item in self.items(node, "replaces") {
            self.check_keys(item, &["name"], "`replaces`");
            let name = self.text(item, "name");
            if name.is_empty() || name == limit_name {
                self.issue(&item.span, "`replaces` needs the name of another limit", "write - name: NAME");
            }
            replaces.push(name.into());
        }
        let is_unlimited = self.flag(node, "unlimited");
        let unit = self.unit(node, is_unlimited);
        let count = self.count(node, is_unlimited);
        let metric = MetricEntries { entries: path.metrics.clone(), is_detailed };
        let mut rule = FileRule { replaces, shared: path.shared.clone(), metric, ..FileRule::default() };
        let limit = match (count, unit) {
            _ if is_unlimited => None,
            // A shadow limit denies nothing.
            (Some(0), Some(unit)) => {
                rule.denies_all = Some(unit).filter(|_| !is_shadow);
                None
            }
            (Some(count), Some(unit)) => {
                let joined = path.names.join(".");
                let name = if limit_name.is_empty() { &joined } else { &limit_name };
                match self.limit(name, count, unit, is_shadow) {
                    Ok(limit) => Some(Arc::new(limit)),
                    Err(error) => {
                        self.issue(&node.span, error.to_string(), "set a smaller quota");
                        return None;
                    }
                }
            }
            _ => return None,
        };
        rule.limit_name = limit_name.into();
        self.read.rules.push(ReadRule {
            domain: path.domain.clone(),
            name: path.names.join("/").into(),
            limit,
            identity_spec: identity_spec(&path.keys),
            is_quota,
            metadata,
            rule,
        });
        Some(self.context.first_rule + self.read.rules.len() - 1)
    }

    fn unit(&mut self, node: &Node, is_unlimited: bool) -> Option<Unit> {
        let text = self.text(node, "unit");
        let known = Unit::NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(&text)).map(|(_, unit)| *unit);
        let span = node.get("unit").map_or(&node.span, |value| &value.span);
        match known {
            Some(_) if is_unlimited => {
                let span = Self::key_span(node, "unit");
                self.issue(&span, "`unit` and `unlimited` cannot be combined", "remove one of them");
            }
            None if !is_unlimited => {
                let near = closest_name(&text.to_uppercase(), Unit::NAMES.iter().map(|(name, _)| *name));
                let hint = near.map_or("SECOND, MINUTE, HOUR, DAY, WEEK, MONTH or YEAR".to_owned(), |near| {
                    format!("did you mean `{near}`?")
                });
                self.issue(span, format!("unknown unit `{text}`"), &hint);
            }
            Some(_) | None => {}
        }
        known
    }

    fn count(&mut self, node: &Node, is_unlimited: bool) -> Option<u32> {
        let Some(value) = node.get("requests_per_unit").filter(|value| !matches!(value.value, Value::Null)) else {
            if !is_unlimited {
                let hint = "write requests_per_unit: 0 to deny every request, or unlimited: true";
                self.issue(&node.span, "`requests_per_unit` is missing", hint);
            }
            return None;
        };
        let is_count = |number: &f64| (0.0..=f64::from(u32::MAX)).contains(number) && number.fract() == 0.0;
        let count = value.number().filter(is_count).map(|number| number as u32);
        match count {
            None => {
                let message = format!("`{}` is not a number from 0 to {}", value.text().unwrap_or("…"), u32::MAX);
                self.issue(&value.span, message, "write the number of requests of a unit");
            }
            Some(1..) if is_unlimited => {
                let span = Self::key_span(node, "requests_per_unit");
                let message = "`requests_per_unit` and `unlimited` cannot be combined";
                self.issue(&span, message, "remove one of them");
            }
            Some(_) => {}
        }
        count
    }

    fn limit(&self, name: &str, count: u32, unit: Unit, shadow: bool) -> Result<LimitSpec, QuotaError> {
        let LimitContext { hasher, gateways } = self.context.limits;
        let window_us = unit.seconds().unwrap_or(1) * 1_000_000;
        let quota = Quota { count: count.into(), window_us: Some(window_us), calendar: None };
        let rule = Rule::FixedWindow(FixedWindow::new(quota, WindowStart::Aligned { phase: 0 })?);
        // The name is a part of response headers.
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let name: String = name.chars().map(|c| if is_plain(c) { c } else { '-' }).take(MAX_NAME_LENGTH).collect();
        let share = LocalShare { gateways: gateways.clone(), ..LocalShare::default() };
        Ok(LimitSpec { shadow, ..LimitSpec::new(hasher, &name, quota, rule, share) })
    }
}

/// Suggestion for metadata that is too long.
pub(super) const METADATA_HINT: &str = "a response contains it: remove what no filter of the proxy reads";

/// Check the length of the metadata of a descriptor.
pub(super) fn check_metadata(metadata: &Struct) -> Result<(), String> {
    let length = metadata.encoded_len();
    if length > MAX_METADATA {
        return Err(format!("`metadata` has {length} bytes, more than {MAX_METADATA}"));
    }
    Ok(())
}

/// Convert a table of the configuration.
pub(super) fn table_to_struct(table: &toml::Table) -> Struct {
    Struct { fields: table.iter().map(|(key, value)| (key.clone(), table_value(value).into())).collect() }
}

fn table_value(value: &toml::Value) -> Kind {
    match value {
        toml::Value::String(text) => Kind::Text(text.clone()),
        toml::Value::Integer(number) => Kind::Number(*number as f64),
        toml::Value::Float(number) => Kind::Number(*number),
        toml::Value::Boolean(value) => Kind::Bool(*value),
        toml::Value::Datetime(time) => Kind::Text(time.to_string()),
        toml::Value::Array(items) => {
            Kind::List(List { values: items.iter().map(|item| table_value(item).into()).collect() })
        }
        toml::Value::Table(table) => Kind::Object(table_to_struct(table)),
    }
}

/// Convert a mapping. Its values have the types of YAML 1.1.
fn to_struct(node: &Node) -> Struct {
    Struct { fields: node.pairs().iter().map(|pair| (pair.key.clone(), to_kind(&pair.value).into())).collect() }
}

fn to_kind(node: &Node) -> Kind {
    match &node.value {
        Value::Null => Kind::Null(0),
        Value::List(items) => Kind::List(List { values: items.iter().map(|item| to_kind(item).into()).collect() }),
        Value::Map(_) => Kind::Object(to_struct(node)),
        Value::Text(text) => {
            let boolean = node.boolean().map(Kind::Bool);
            boolean.or_else(|| node.number().map(Kind::Number)).unwrap_or_else(|| Kind::Text(text.clone()))
        }
    }
}

/// Return the parts of an identity as administrators see them.
fn identity_spec(keys: &[Box<str>]) -> IdentitySpec {
    IdentitySpec {
        descriptors: keys.iter().cloned().map(Descriptor::Entry).collect(),
        on_missing: OnMissing::Reject,
        skips_other_messages: false,
        methods: Vec::new(),
        exemptions: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
domain: d
descriptors:
  - key: a
    value: x*
    rate_limit: {unit: second, requests_per_unit: 1}
  - key: a
    value: xy*
    rate_limit: {unit: second, requests_per_unit: 2}
  - key: a
    value: xyz
    descriptors:
      - {key: b, rate_limit: {unit: MONTH, requests_per_unit: 3}}
  - key: a
    rate_limit: {unit: day, requests_per_unit: 0}
  - {key: p*_q, rate_limit: {unlimited: true}}
";

    fn read(text: &str) -> ReadFiles {
        let file = FileSnapshot { path: "edge.yaml".into(), content: text.as_bytes().into() };
        let hasher = IdentityHasher::new("");
        let limits = LimitContext { hasher: &hasher, gateways: &Arc::default() };
        read_files(&[file], FileContext { limits, options: FileOptions::default(), first_rule: 0 })
    }

    #[test]
    fn value_wins_over_first_wildcard_over_key_without_another_attempt() {
        let read = read(FILE);
        assert!(read.faulty.is_empty(), "{:?}", read.faulty);
        let name = |entries: &[(&str, &str)]| {
            let bytes = entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes()));
            read.domains[&b"d"[..]].find(bytes).map(|index| &*read.rules[index].name)
        };
        for (entries, expected) in [
            (&[("a", "xyzz")][..], Some("a=x*")),
            (&[("a", "b")], Some("a")),
            (&[("a", "")], Some("a")),
            // The exact value has no limit. The gateway does not try `x*` then.
            (&[("a", "xyz")], None),
            (&[("a", "xyz"), ("b", "1")], Some("a=xyz/b")),
            (&[("a", "xy"), ("b", "1")], None),
            (&[("pp", "1_q")], Some("p*_q")),
            (&[("b", "1")], None),
            (&[], None),
        ] {
            assert_eq!(name(entries), expected, "{entries:?}");
        }
        let rule = |name: &str| read.rules.iter().find(|rule| &*rule.name == name).unwrap();
        assert_eq!(rule("a").rule.denies_all, Some(Unit::Day));
        let month = rule("a=xyz/b").limit.as_ref().unwrap();
        assert_eq!(month.default_variant.quota.window_us, Some(30 * 86_400_000_000));
        assert!(rule("p*_q").limit.is_none() && rule("p*_q").rule.denies_all.is_none());
    }

    #[test]
    fn identity_separates_keys_and_values_and_shares_a_threshold() {
        let hasher = IdentityHasher::new("");
        let mut encoder = IdentityEncoder::default();
        let mut identity = |rule: &FileRule, entries: &[(&str, &str)]| {
            let bytes = entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes()));
            rule.identify(b"d", bytes, &hasher, &mut encoder)
        };
        let plain = FileRule::default();
        let joined = identity(&plain, &[("foo", "x_bar_y")]);
        assert_ne!(joined, identity(&plain, &[("foo", "x"), ("bar", "y")]));
        assert_ne!(joined, identity(&plain, &[("foo", "x_bar_z")]));
        let shared = FileRule { shared: vec![Some("a=x*".into())], ..FileRule::default() };
        assert_eq!(identity(&shared, &[("a", "x1")]), identity(&shared, &[("a", "x2")]));
    }

    #[test]
    fn metadata_has_the_types_of_yaml() {
        let text = "domain: d\ndescriptors:\n- key: a\n  quota_mode: on\n  rate_limit: {unit: day, requests_per_unit: 1_0}\n  \
                    metadata: {n: 1.5, b: yes, t: '1', z: ~, o: {l: [a]}}\n";
        let read = read(text);
        assert!(read.faulty.is_empty(), "{:?}", read.faulty);
        let rule = &read.rules[0];
        assert!(rule.is_quota);
        assert_eq!(rule.limit.as_ref().unwrap().default_variant.quota.count, 10);
        let list = Struct { fields: [("l".to_owned(), Kind::List(List { values: vec!["a".into()] }).into())].into() };
        let kinds = [
            ("n", Kind::Number(1.5)),
            ("b", Kind::Bool(true)),
            ("t", Kind::Text("1".to_owned())),
            ("z", Kind::Null(0)),
            ("o", Kind::Object(list)),
        ];
        let fields = kinds.map(|(name, kind)| (name.to_owned(), kind.into())).into();
        assert_eq!(rule.metadata, Some(Struct { fields }));
    }

    #[test]
    fn metrics_have_the_labels_of_envoyproxy_ratelimit() {
        let text = "
domain: d
descriptors:
  - {key: plain, value: a.b, rate_limit: &one {unit: day, requests_per_unit: 1}}
  - key: to
    value_to_metric: true
    descriptors:
      - {key: exact, value: x, value_to_metric: true, rate_limit: *one}
      - {key: wild, value: w*, value_to_metric: true, rate_limit: *one}
      - {key: kept, value: w*, rate_limit: *one}
      - {key: shared, value: s*, share_threshold: true, value_to_metric: true, rate_limit: *one}
      - {key: deep, descriptors: [{key: er, rate_limit: *one}]}
  - {key: all, detailed_metric: true, rate_limit: *one}
  - key: files
    value: f/*
    share_threshold: true
    descriptors: [{key: all, detailed_metric: true, rate_limit: *one}]
";
        let read = read(text);
        assert!(read.faulty.is_empty(), "{:?}", read.faulty);
        for (entries, fixed, of_call) in [
            (&[("plain", "a.b")][..], "d plain_a_b", None),
            (&[("to", "1:2"), ("exact", "x")], "d to exact_x", Some("d to_1_2 exact_x")),
            (&[("to", "1"), ("wild", "w1")], "d to wild_w*", Some("d to_1 wild_w1")),
            (&[("to", "1"), ("kept", "w1")], "d to kept_w*", Some("d to_1 kept_w*")),
            (&[("to", "1"), ("shared", "s1")], "d to shared_s*", Some("d to_1 shared_s*")),
            (&[("to", "1"), ("deep", "2"), ("er", "3")], "d to deep er", Some("d to_1 deep er")),
            (&[("all", "10.0.0.1")], "d all", Some("d all_10_0_0_1")),
            (&[("files", "f/1"), ("all", "")], "d files_f/* all", Some("d files_f/* all")),
        ] {
            let bytes = entries.iter().map(|(key, value)| (key.as_bytes(), value.as_bytes()));
            let index = read.domains[&b"d"[..]].find(bytes.clone()).unwrap();
            let metric = &read.rules[index].rule.metric;
            assert_eq!(metric.fixed("d"), fixed.replace(' ', "\n"), "{entries:?}");
            assert_eq!(metric.of_call("d", bytes), of_call.map(|name| name.replace(' ', "\n")), "{entries:?}");
        }
        let long = "x".repeat(MAX_METRIC_VALUE);
        let metric =
            &read.rules[read.domains[&b"d"[..]].find([(&b"all"[..], &b"1"[..])].into_iter()).unwrap()].rule.metric;
        assert_eq!(metric.of_call("d", [(&b"all"[..], long.as_bytes())].into_iter()), None);
    }

    #[test]
    fn errors_name_the_line_and_the_column() {
        for (text, line, column, message, hint) in [
            ("domain: d\ndescriptors:\n  - kye: a\n", 3, 5, "unknown key `kye`", "did you mean `key`?"),
            ("descriptors: []\n", 1, 1, "`domain` is missing", "filter"),
            ("domain: d\n---\ndomain: d\n", 3, 9, "occurs twice", "one document"),
            ("domain: d\ndescriptors: {}\n", 2, 14, "must be a list", "- "),
            ("domain: d\ndescriptors:\n- key: a\n- key: a\n", 4, 3, "`a` occurs twice", "once"),
            (
                "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: minutes, requests_per_unit: 1}\n",
                4,
                22,
                "unknown unit `minutes`",
                "did you mean `MINUTE`?",
            ),
            (
                "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: day}\n",
                4,
                15,
                "`requests_per_unit` is missing",
                "0",
            ),
            (
                "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: day, requests_per_unit: -1}\n",
                4,
                46,
                "`-1` is not a number",
                "number",
            ),
            (
                "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: day, unlimited: true}\n",
                4,
                16,
                "cannot be combined",
                "remove",
            ),
            ("domain: d\ndescriptors:\n- key: a\n  metadata: [x]\n", 4, 3, "must be a mapping", "NAME"),
            ("domain: d\ndescriptors:\n- key: a\n  shadow_mode: 'yes'\n", 4, 16, "true or false", "true"),
            // The value occurs in the line before the key, and after characters of several bytes.
            ("domain: d\ndescriptors:\n- {value: é-unit-x, kye: unit}\n", 3, 21, "unknown key `kye`", "`key`?"),
            ("domain: d\ndescriptors: [{key: dd, rate_limit: {unit: d}}]\n", 2, 44, "unknown unit `d`", "DAY"),
            ("domain: d\ndescriptors:\n- key: a\n  share_threshold: true\n", 4, 3, "needs a wildcard", "`*`"),
            ("domain: d\ndomain: e\n", 2, 1, "occurs twice", "YAML"),
        ] {
            let read = read(text);
            let [faulty] = &*read.faulty else { panic!("{text}: {} files", read.faulty.len()) };
            let issue = &faulty.issues[0];
            assert_eq!(issue.position(text), Some((line, column)), "{text}{issue:?}");
            assert!(issue.message.contains(message), "{issue:?}");
            assert!(issue.hint.as_ref().unwrap().contains(hint), "{issue:?}");
        }
    }
}
