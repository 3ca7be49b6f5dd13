//! Compiles consumers files: consumers, their API keys, groups, tiers and quotas.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, btree_map};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use toml::value::Datetime;

use crate::config;
use crate::config::environment::EnvLookup;
use crate::config::error::{FileIssues, Issue};
use crate::config::file;
use crate::config::file::{ParsedFile, UnsetVariables, resolve_issues};
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::shorthand::{ConsumerKey, KeyTable, datetime_us};
use crate::config::sources::FileSnapshot;
use crate::config::spanned::{Spanned, Text};
use crate::config::unknown_keys::closest_name;
use crate::identity;
use crate::identity::auth::TierSource;
use crate::identity::consumer::{Consumer, ConsumerDirectory, Consumers, KeyTerms, parse_key_hash};
use crate::identity::spec::Descriptor;
use crate::limiter::key::IdentityHasher;
use crate::limiter::spec::LimitVariant;
use crate::snapshot::cost::tool_rules;
use crate::snapshot::limits::{CompiledLimit, LimitsByName, limit_variant, quota_hint};
use crate::snapshot::validator::Validator;

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
        routes: Vec<&'c str>,
        tier_source: &'c TierSource,
        others: ConsumerDirectory,
    ) -> Self {
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
    // The values of a long file need much more memory than its consumers. A file with errors is parsed as a whole, because
    // a message may be about two places in the file.
    if let Some(loaded) = read_pieces(path, content, limits, hasher, environment) {
        return Ok(loaded);
    }
    let file = file::parse_consumers(path, content, environment)?;
    let mut compiler_issues = Vec::new();
    let mut consumers = Consumers::default();
    let groups = Groups::compile(&file.value.group, &mut compiler_issues);
    compile_consumers(&file, &groups, limits, hasher, &mut consumers, &mut compiler_issues);
    let mut issues = file.issues;
    issues.extend(compiler_issues.into_iter().filter(|issue| !file.unknown_keys.hide(issue)));
    let (issues, _) = resolve_issues(&file.sources, issues, file.unresolved, file.warnings, UnsetVariables::Error);
    let is_intentional =
        !file.value.consumer.is_empty() && file.value.consumer.iter().all(|one| one.get_ref().keys.is_some());
    let loaded = LoadedConsumers { is_incomplete: consumers.is_empty() && !is_intentional, consumers };
    file.sources.by_file(issues).into_iter().next().map_or(Ok(loaded), Err)
}

/// Minimum length of the pieces of a long file in bytes, except for the last piece.
const PIECE_LENGTH: usize = 64 << 10;

/// First line of a consumer. Pieces begin with it.
const CONSUMER_HEADER: &str = "\n[[consumer]]\n";

fn divide(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > PIECE_LENGTH {
        let length = rest.floor_char_boundary(PIECE_LENGTH);
        let Some(header) = rest[length..].find(CONSUMER_HEADER) else { break };
        let (piece, later) = rest.split_at(length + header + 1);
        pieces.push(piece);
        rest = later;
    }
    pieces.push(rest);
    pieces
}

/// Read a long file in pieces. Return `None` if the file is short, or has errors, warnings, or groups after the first
/// piece. A multi-line string that contains the first line of a consumer is an error of its piece.
fn read_pieces(
    path: &Path,
    content: &[u8],
    limits: &KnownNames<'_>,
    hasher: &IdentityHasher,
    environment: EnvLookup<'_>,
) -> Option<LoadedConsumers> {
    let pieces = divide(std::str::from_utf8(content).ok()?);
    let [first, later @ ..] = &*pieces else { return None };
    // An array `consumer = […]` and [[consumer]] exclude each other, which the parser cannot see in pieces.
    let (before, _) = first.split_once(&CONSUMER_HEADER[1..])?;
    if later.is_empty() || before.contains("consumer") {
        return None;
    }
    let parse = |piece: &str| file::parse_consumers(path, piece.as_bytes(), environment).ok();
    let first = parse(first)?;
    let mut issues = Vec::new();
    let groups = Groups::compile(&first.value.group, &mut issues);
    let mut consumers = Consumers::default();
    let mut names = HashSet::<Box<str>>::new();
    let mut has_keys = true;
    let mut add = |file: &ParsedFile<gateway::Consumers>| {
        compile_consumers(file, &groups, limits, hasher, &mut consumers, &mut issues);
        for consumer in file.value.consumer.iter().map(|consumer| consumer.get_ref()) {
            let is_new = names.insert(consumer.name.as_ref()?.get_ref().as_str().into());
            has_keys &= consumer.keys.is_some();
            is_new.then_some(())?;
        }
        let ParsedFile { issues: syntax, warnings, unresolved, .. } = file;
        (issues.is_empty() && syntax.is_empty() && warnings.is_empty() && unresolved.is_empty()).then_some(())
    };
    add(&first)?;
    for piece in later {
        let file = parse(piece)?;
        file.value.group.is_empty().then_some(())?;
        add(&file)?;
    }
    Some(LoadedConsumers { is_incomplete: consumers.is_empty() && !has_keys, consumers })
}

fn uses_api_key(compiled: &CompiledLimit) -> bool {
    compiled.identity_spec.descriptors.contains(&Descriptor::ApiKey)
}

fn compile_consumers(
    file: &ParsedFile<gateway::Consumers>,
    groups: &Groups<'_>,
    limits: &KnownNames<'_>,
    hasher: &IdentityHasher,
    consumers: &mut Consumers,
    issues: &mut Vec<Issue>,
) {
    let mut names: HashMap<&String, Range<usize>> = HashMap::new();
    let ParsedFile { value, sources, unknown_keys, .. } = file;
    for written in &value.consumer {
        let span = written.span();
        let written_span = written.span();
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
            mcp_tools: written.mcp_tools.as_ref().map(|tools| tool_rules(tools.get_ref())),
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
            let span = group.span();
            let group = group.get_ref();
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
