//! What a log says of the limits of a configuration, and what it does not.

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderName;

use super::format::FormatCapabilities;
use crate::cost::Cost;
use crate::identity::Descriptor;
use crate::identity::api_key::Caller;
use crate::limit::plan::LimitVariant;
use crate::runtime::{CompiledConfig, CompiledLimit};

/// What the log would have to say to tell the identities of a limit, and does not.
pub(super) fn missing_identity_input(
    compiled: &CompiledLimit,
    config: &CompiledConfig,
    capabilities: &FormatCapabilities,
) -> Option<String> {
    let header = |name: &HeaderName| (!capabilities.headers.contains(name)).then(|| format!("the header `{name}`"));
    let missing_input = |descriptor: &Descriptor| match descriptor {
        Descriptor::ApiKey => header(&config.api_key_settings.header),
        Descriptor::User(name) | Descriptor::Header(name) => header(name),
        Descriptor::Cookie(name) => header(&http::header::COOKIE).map(|_| format!("the cookie `{name}`")),
        Descriptor::Ip => (!capabilities.client).then(|| "the client's address".to_owned()),
        Descriptor::Query(name) => (!capabilities.query).then(|| format!("the query parameter `{name}`")),
        Descriptor::Host => (!capabilities.host).then(|| "the host".to_owned()),
        Descriptor::ClientCert => {
            (!capabilities.certificate_subject).then(|| "the subject of the client's certificate".to_owned())
        }
        // A token that was good then is expired now, and logs that have them should not.
        Descriptor::Jwt(name) => Some(format!("the claim `{name}` of the token")),
        Descriptor::Path(_) | Descriptor::Method | Descriptor::Global | Descriptor::Route => None,
    };
    compiled.identity_spec.descriptors.iter().find_map(missing_input)
}

/// What has to be said about a limit; `stands` if a field of the log stands for its identities.
pub(super) fn limit_notes(compiled: &CompiledLimit, is_mapped: bool, capabilities: &FormatCapabilities) -> Vec<String> {
    let mut notes = Vec::new();
    let is_logged = |name: &HeaderName| capabilities.headers.contains(name) || capabilities.identity_hashes;
    match &compiled.cost {
        Some(Cost::Response { default, .. }) if !capabilities.identity_hashes => {
            notes.push(format!("what responses cost is not in this log: each counts as {default}"));
        }
        Some(Cost::Request { header, default, .. }) if !is_logged(header) => {
            notes.push(format!("`{header}` is not in this log: each request counts as {default}"));
        }
        _ => {}
    }
    if is_mapped && !compiled.limit.tiers.is_empty() {
        notes.push("who is not known as a consumer has the standard size, whatever the tier".to_owned());
    }
    if compiled.limit.queue_policy.is_some() {
        notes.push("whoever would wait for a turn (`max_wait`) counts as denied".to_owned());
    }
    if !compiled.refund_on.is_empty() && !capabilities.status {
        notes.push("statuses are not in this log: nothing is refunded".to_owned());
    }
    notes
}

/// Consumers with sizes of their own.
pub(super) fn consumer_variants(
    config: &CompiledConfig,
    compiled: &CompiledLimit,
) -> HashMap<Box<[u8]>, Arc<LimitVariant>> {
    let mut variants = HashMap::new();
    for consumer in config.consumers.load().iter() {
        let variant = Caller::Consumer(consumer).variant(&compiled.limit);
        if Arc::ptr_eq(variant, &compiled.limit.default_variant)
            || !compiled.identity_spec.descriptors.contains(&Descriptor::ApiKey)
        {
            continue;
        }
        variants.insert(consumer.name.as_bytes().into(), variant.clone());
        if compiled.identity_spec.descriptors == [Descriptor::ApiKey] {
            variants.insert(consumer.identity(&config.hasher).to_hex().as_slice().into(), variant.clone());
        }
    }
    variants
}
