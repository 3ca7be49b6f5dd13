//! What a log says of the limits of a configuration, and what it does not.

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderName;

use super::format::Provides;
use crate::cost::Cost;
use crate::identity::Source;
use crate::identity::api_key::Caller;
use crate::limit::plan::Plan;
use crate::runtime::{Runtime, Terms};

/// What the log would have to say to tell the identities of a limit, and does not.
pub(super) fn lacking(terms: &Terms, runtime: &Runtime, provides: &Provides) -> Option<String> {
    let header = |name: &HeaderName| (!provides.headers.has(name)).then(|| format!("the header `{name}`"));
    let lacks = |source: &Source| match source {
        Source::ApiKey => header(&runtime.api_keys.header),
        Source::User(name) | Source::Header(name) => header(name),
        Source::Cookie(name) => header(&http::header::COOKIE).map(|_| format!("the cookie `{name}`")),
        Source::Ip => (!provides.client).then(|| "the client's address".to_owned()),
        Source::Query(name) => (!provides.query).then(|| format!("the query parameter `{name}`")),
        Source::Host => (!provides.host).then(|| "the host".to_owned()),
        Source::ClientCert => (!provides.subject).then(|| "the subject of the client's certificate".to_owned()),
        // A token that was good then is expired now, and logs that have them should not.
        Source::Jwt(name) => Some(format!("the claim `{name}` of the token")),
        Source::Path(_) | Source::Method | Source::Global | Source::Route => None,
    };
    terms.by.sources.iter().find_map(lacks)
}

/// What has to be said about a limit; `stands` if a field of the log stands for its identities.
pub(super) fn notes(terms: &Terms, stands: bool, provides: &Provides) -> Vec<String> {
    let mut notes = Vec::new();
    let said = |name: &HeaderName| provides.headers.has(name) || provides.hashed;
    match &terms.cost {
        Some(Cost::Response { otherwise, .. }) if !provides.hashed => {
            notes.push(format!("what responses cost is not in this log: each counts as {otherwise}"));
        }
        Some(Cost::Request { field, otherwise, .. }) if !said(field) => {
            notes.push(format!("`{field}` is not in this log: each request counts as {otherwise}"));
        }
        _ => {}
    }
    if stands && !terms.limit.tiers.is_empty() {
        notes.push("who is not known as a consumer has the standard size, whatever the tier".to_owned());
    }
    if terms.limit.wait.is_some() {
        notes.push("whoever would wait for a turn (`max_wait`) counts as denied".to_owned());
    }
    if !terms.refund_on.is_empty() && !provides.status {
        notes.push("statuses are not in this log: nothing is refunded".to_owned());
    }
    notes
}

/// Consumers with sizes of their own.
pub(super) fn consumers(runtime: &Runtime, terms: &Terms) -> HashMap<Box<[u8]>, Arc<Plan>> {
    let mut sizes = HashMap::new();
    for consumer in runtime.consumers.load().iter() {
        let plan = Caller::Consumer(consumer).plan(&terms.limit);
        if Arc::ptr_eq(plan, &terms.limit.standard) || !terms.by.sources.contains(&Source::ApiKey) {
            continue;
        }
        sizes.insert(consumer.name.as_bytes().into(), plan.clone());
        if terms.by.sources == [Source::ApiKey] {
            sizes.insert(consumer.identity(&runtime.hasher).hex().as_slice().into(), plan.clone());
        }
    }
    sizes
}
