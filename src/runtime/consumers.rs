//! `consumers.toml`: who has which keys, in which tier, with which sizes of its own.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::Terms;
use super::quotas::{hint, size};
use super::reader::Reader;
use crate::config::error::{FaultyFile, Issue};
use crate::config::file::{self, Environment, nearest};
use crate::config::{self, Config};
use crate::identity::Source;
use crate::identity::api_key::{ApiKeys, Consumer, Consumers, OnUnknown, key_hash};
use crate::limit::key::IdentityHasher;
use crate::limit::plan::Plan;
use crate::watch::Snapshot;

type Limits = BTreeMap<String, Terms>;

pub(super) fn load(
    text: &config::Text,
    limits: &Limits,
    hasher: &IdentityHasher,
    reader: &mut Reader<'_>,
) -> (Consumers, Option<Snapshot>) {
    let path = reader.path(text.get_ref());
    let file = match Snapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            reader.other_file(file::unreadable(&path, &error, file::WITHOUT_CONSUMERS));
            return (Consumers::default(), None);
        }
    };
    let found = read(&file.path, &file.content, limits, hasher, reader.environment);
    (found.map_err(|faulty| reader.other_file(faulty)).unwrap_or_default().consumers, Some(file))
}

/// What was found in a file of consumers.
#[derive(Default)]
pub(super) struct Found {
    pub(super) consumers: Consumers,
    /// Whether nobody has a key, and nothing says that it is meant so: most likely the file is being written.
    pub(super) unfinished: bool,
}

/// Reads what was found in a file of consumers.
pub(super) fn read(
    path: &Path,
    content: &[u8],
    limits: &Limits,
    hasher: &IdentityHasher,
    environment: Environment<'_>,
) -> Result<Found, FaultyFile> {
    let file = file::consumers(path, content, environment)?;
    let mut issues = file.issues;
    let consumers = consumers(&file.value, limits, hasher, &mut issues);
    let meant = !file.value.consumer.is_empty() && file.value.consumer.iter().all(|one| one.get_ref().keys.is_some());
    let found = Found { unfinished: consumers.is_empty() && !meant, consumers };
    if issues.is_empty() { Ok(found) } else { Err(FaultyFile { path: path.to_owned(), text: file.text, issues }) }
}

/// Sees that limits by API key have keys to know.
pub(super) fn needed(config: &Config, limits: &Limits, keys: &ApiKeys, consumers: &Consumers, reader: &mut Reader<'_>) {
    // A file that could not be read has been spoken of.
    if config.api_key.consumers.is_some() || !consumers.is_empty() || keys.on_unknown != OnUnknown::Reject {
        return;
    }
    for (name, terms) in limits.iter().filter(|(_, terms)| is_by_key(terms)) {
        let place = config.limit.get(name).map(|limit| limit.span());
        let message = format!("`{}` is by api-key, but no key is known: every one would be refused", terms.limit.name);
        let issue = Issue { span: place, message, hint: None };
        reader.issue(issue.hint("[api_key] with consumers = \"consumers.toml\", or on_unknown = \"accept\""));
    }
}

fn is_by_key(terms: &Terms) -> bool {
    terms.by.sources.contains(&Source::ApiKey)
}

fn consumers(file: &config::Consumers, limits: &Limits, hasher: &IdentityHasher, issues: &mut Vec<Issue>) -> Consumers {
    let mut consumers = Consumers::default();
    let mut names = HashSet::new();
    for written in &file.consumer {
        let place = written.span();
        let written = written.get_ref();
        let name = match &written.name {
            Some(name) if !name.get_ref().is_empty() => name.get_ref(),
            _ => {
                issues.push(Issue::at(place, "a consumer needs a `name`"));
                continue;
            }
        };
        if !names.insert(name) {
            issues.push(Issue::at(place, format!("a second consumer `{name}`")).hint("give it its keys in one place"));
        }
        let consumer = Arc::new(Consumer {
            name: name.as_str().into(),
            tier: tier(written.tier.as_ref(), limits, issues),
            plans: plans(&written.limit, limits, hasher, issues),
        });
        for key in written.keys.iter().flatten() {
            let Some(hash) = key_hash(key.get_ref()) else {
                // The text itself may be a key that somebody pasted: it is shown in the line, not repeated.
                let hint = "\"sha256:\" and 64 lower-case hex digits: printf %s KEY | sha256sum";
                issues.push(Issue::at(key.span(), "this is not the hash of a key").hint(hint));
                continue;
            };
            if let Err(other) = consumers.insert(hash, consumer.clone()) {
                issues.push(Issue::at(key.span(), format!("the key belongs to `{}` already", other.name)));
            }
        }
    }
    consumers
}

/// A tier that some limit has.
fn tier(text: Option<&config::Text>, limits: &Limits, issues: &mut Vec<Issue>) -> Option<Box<str>> {
    let text = text?;
    let known = || limits.values().flat_map(|terms| terms.limit.tiers.keys()).map(|tier| &**tier);
    if !known().any(|tier| tier == text.get_ref()) {
        let issue = Issue::at(text.span(), format!("no limit has a tier `{}`", text.get_ref()));
        issues.push(match nearest(text.get_ref(), known()) {
            Some(near) => issue.hint(format!("did you mean `{near}`?")),
            None => issue.hint(format!("tiers = {{ {} = {{ quota = \"…\" }} }} on a limit by api-key", text.get_ref())),
        });
    }
    Some(text.get_ref().as_str().into())
}

/// The sizes that a consumer has of its own.
fn plans(
    written: &BTreeMap<String, config::Spanned<config::Size>>,
    limits: &Limits,
    hasher: &IdentityHasher,
    issues: &mut Vec<Issue>,
) -> BTreeMap<Box<str>, Arc<Plan>> {
    let mut plans = BTreeMap::new();
    for (name, own) in written {
        let Some(terms) = limits.get(name).filter(|terms| is_by_key(terms)) else {
            let issue = Issue::at(own.span(), format!("there is no limit `{name}` by api-key"));
            let known = limits.iter().filter(|(_, terms)| is_by_key(terms)).map(|(name, _)| name.as_str());
            issues.push(match nearest(name, known) {
                Some(near) => issue.hint(format!("did you mean `{near}`?")),
                None => issue.hint("only what counts a consumer can have a size for it"),
            });
            continue;
        };
        match size(own.get_ref(), &terms.limit.standard.rule, terms.limit.standard.quota) {
            Ok((quota, burst)) => match terms.limit.resized(hasher, quota, burst) {
                Ok(plan) => {
                    plans.insert(name.as_str().into(), Arc::new(plan));
                }
                Err(error) => issues.push(Issue::at(own.span(), error.to_string()).hint(hint(&error))),
            },
            Err(issue) => issues.push(issue),
        }
    }
    plans
}
