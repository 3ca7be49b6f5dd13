//! `consumers.toml`: who has which keys, in which tier, with which sizes of its own.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::CompiledLimit;
use super::quotas::{limit_variant, quota_hint};
use super::reader::Validator;
use crate::config::error::{FileIssues, Issue};
use crate::config::file::{self, EnvLookup, closest_name};
use crate::config::{self, Config};
use crate::identity::Descriptor;
use crate::identity::api_key::{ApiKeySettings, Consumer, Consumers, OnUnknownKey, parse_key_hash};
use crate::limit::key::IdentityHasher;
use crate::limit::plan::LimitVariant;
use crate::watch::FileSnapshot;

type LimitsByName = BTreeMap<String, CompiledLimit>;

pub(super) fn load(
    text: &config::Text,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    reader: &mut Validator<'_>,
) -> (Consumers, Option<FileSnapshot>) {
    let path = reader.resolve_path(text.get_ref());
    let file = match FileSnapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            reader.add_file_issues(file::unreadable_file(&path, &error, file::MISSING_CONSUMERS_HINT));
            return (Consumers::default(), None);
        }
    };
    let loaded = read(&file.path, &file.content, limits, hasher, reader.environment);
    (loaded.map_err(|faulty| reader.add_file_issues(faulty)).unwrap_or_default().consumers, Some(file))
}

/// What was found in a file of consumers.
#[derive(Default)]
pub(super) struct LoadedConsumers {
    pub(super) consumers: Consumers,
    /// Whether nobody has a key, and nothing says that it is meant so: most likely the file is being written.
    pub(super) is_incomplete: bool,
}

/// Reads what was found in a file of consumers.
pub(super) fn read(
    path: &Path,
    content: &[u8],
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    environment: EnvLookup<'_>,
) -> Result<LoadedConsumers, FileIssues> {
    let file = file::parse_consumers(path, content, environment)?;
    let mut issues = file.issues;
    let consumers = compile_consumers(&file.value, limits, hasher, &mut issues);
    let is_intentional =
        !file.value.consumer.is_empty() && file.value.consumer.iter().all(|one| one.get_ref().keys.is_some());
    let loaded = LoadedConsumers { is_incomplete: consumers.is_empty() && !is_intentional, consumers };
    if issues.is_empty() { Ok(loaded) } else { Err(FileIssues { path: path.to_owned(), text: file.text, issues }) }
}

/// Sees that limits by API key have keys to know.
pub(super) fn check_keys_known(
    config: &Config,
    limits: &LimitsByName,
    keys: &ApiKeySettings,
    consumers: &Consumers,
    reader: &mut Validator<'_>,
) {
    // A file that could not be read has been spoken of.
    if config.api_key.consumers.is_some() || !consumers.is_empty() || keys.on_unknown != OnUnknownKey::Reject {
        return;
    }
    for (name, compiled) in limits.iter().filter(|(_, compiled)| uses_api_key(compiled)) {
        let span = config.limit.get(name).map(|limit| limit.span());
        let message =
            format!("`{}` is by api-key, but no key is known: every one would be refused", compiled.limit.name);
        let issue = Issue { span, message, hint: None };
        reader.push_issue(issue.with_hint("[api_key] with consumers = \"consumers.toml\", or on_unknown = \"accept\""));
    }
}

fn uses_api_key(compiled: &CompiledLimit) -> bool {
    compiled.identity_spec.descriptors.contains(&Descriptor::ApiKey)
}

fn compile_consumers(
    file: &config::Consumers,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    issues: &mut Vec<Issue>,
) -> Consumers {
    let mut consumers = Consumers::default();
    let mut names = HashSet::new();
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
        if !names.insert(name) {
            issues.push(
                Issue::new(span, format!("a second consumer `{name}`")).with_hint("give it its keys in one place"),
            );
        }
        let consumer = Arc::new(Consumer {
            name: name.as_str().into(),
            tier: tier(written.tier.as_ref(), limits, issues),
            variants: limit_variants(&written.limit, limits, hasher, issues),
        });
        for key in written.keys.iter().flatten() {
            let Some(hash) = parse_key_hash(key.get_ref()) else {
                // The text itself may be a key that somebody pasted: it is shown in the line, not repeated.
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

/// A tier that some limit has.
fn tier(text: Option<&config::Text>, limits: &LimitsByName, issues: &mut Vec<Issue>) -> Option<Box<str>> {
    let text = text?;
    let known = || limits.values().flat_map(|compiled| compiled.limit.tiers.keys()).map(|tier| &**tier);
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

/// The sizes that a consumer has of its own.
fn limit_variants(
    written: &BTreeMap<String, config::Spanned<config::LimitVariant>>,
    limits: &LimitsByName,
    hasher: &IdentityHasher,
    issues: &mut Vec<Issue>,
) -> BTreeMap<Box<str>, Arc<LimitVariant>> {
    let mut variants = BTreeMap::new();
    for (name, own) in written {
        let Some(compiled) = limits.get(name).filter(|compiled| uses_api_key(compiled)) else {
            let issue = Issue::new(own.span(), format!("there is no limit `{name}` by api-key"));
            let known = limits.iter().filter(|(_, compiled)| uses_api_key(compiled)).map(|(name, _)| name.as_str());
            issues.push(match closest_name(name, known) {
                Some(near) => issue.with_hint(format!("did you mean `{near}`?")),
                None => issue.with_hint("only what counts a consumer can have a size for it"),
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
