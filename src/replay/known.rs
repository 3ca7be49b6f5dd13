//! What a log says of the limits of a configuration, and what it does not.

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderName;

use super::format::Provides;
use crate::cost::Cost;
use crate::identity::Descriptor;
use crate::identity::api_key::Caller;
use crate::limit::plan::LimitVariant;
use crate::runtime::{CompiledConfig, CompiledLimit};

/// What the log would have to say to tell the identities of a limit, and does not.
pub(super) fn lacking(terms: &CompiledLimit, runtime: &CompiledConfig, provides: &Provides) -> Option<String> {
    let header = |name: &HeaderName| (!provides.headers.has(name)).then(|| format!("the header `{name}`"));
    let lacks = |source: &Descriptor| match source {
        Descriptor::ApiKey => header(&runtime.api_key_settings.header),
        Descriptor::User(name) | Descriptor::Header(name) => header(name),
        Descriptor::Cookie(name) => header(&http::header::COOKIE).map(|_| format!("the cookie `{name}`")),
        Descriptor::Ip => (!provides.client).then(|| "the client's address".to_owned()),
        Descriptor::Query(name) => (!provides.query).then(|| format!("the query parameter `{name}`")),
        Descriptor::Host => (!provides.host).then(|| "the host".to_owned()),
        Descriptor::ClientCert => (!provides.subject).then(|| "the subject of the client's certificate".to_owned()),
        // A token that was good then is expired now, and logs that have them should not.
        Descriptor::Jwt(name) => Some(format!("the claim `{name}` of the token")),
        Descriptor::Path(_) | Descriptor::Method | Descriptor::Global | Descriptor::Route => None,
    };
    terms.identity_spec.descriptors.iter().find_map(lacks)
}

/// What has to be said about a limit; `stands` if a field of the log stands for its identities.
pub(super) fn notes(terms: &CompiledLimit, stands: bool, provides: &Provides) -> Vec<String> {
    let mut notes = Vec::new();
    let said = |name: &HeaderName| provides.headers.has(name) || provides.hashed;
    match &terms.cost {
        Some(Cost::Response { default: otherwise, .. }) if !provides.hashed => {
            notes.push(format!("what responses cost is not in this log: each counts as {otherwise}"));
        }
        Some(Cost::Request { header: field, default: otherwise, .. }) if !said(field) => {
            notes.push(format!("`{field}` is not in this log: each request counts as {otherwise}"));
        }
        _ => {}
    }
    if stands && !terms.limit.tiers.is_empty() {
        notes.push("who is not known as a consumer has the standard size, whatever the tier".to_owned());
    }
    if terms.limit.queue_policy.is_some() {
        notes.push("whoever would wait for a turn (`max_wait`) counts as denied".to_owned());
    }
    if !terms.refund_on.is_empty() && !provides.status {
        notes.push("statuses are not in this log: nothing is refunded".to_owned());
    }
    notes
}

/// Consumers with sizes of their own.
pub(super) fn consumers(runtime: &CompiledConfig, terms: &CompiledLimit) -> HashMap<Box<[u8]>, Arc<LimitVariant>> {
    let mut sizes = HashMap::new();
    for consumer in runtime.consumers.load().iter() {
        let plan = Caller::Consumer(consumer).variant(&terms.limit);
        if Arc::ptr_eq(plan, &terms.limit.default_variant)
            || !terms.identity_spec.descriptors.contains(&Descriptor::ApiKey)
        {
            continue;
        }
        sizes.insert(consumer.name.as_bytes().into(), plan.clone());
        if terms.identity_spec.descriptors == [Descriptor::ApiKey] {
            sizes.insert(consumer.identity(&runtime.hasher).to_hex().as_slice().into(), plan.clone());
        }
    }
    sizes
}
