//! Which limits a log can be held against, and in which sizes.

use std::collections::HashMap;
use std::sync::Arc;

use http::{HeaderName, StatusCode};

use super::format::own::identity_hash_field;
use super::format::{FieldMapping, FormatCapabilities};
use super::known::{consumer_variants, limit_notes, missing_identity_input};
use super::size::{ProposalError, QuotaProposal, proposed_variant, with_unbounded_permit_ttl};
use crate::cost::{Cost, RefundOn};
use crate::gateway::ask::deferred_action;
use crate::identity::{Descriptor, IdentitySpec, OnMissing};
use crate::limit::admission::Deferred;
use crate::limit::algorithm::Rule;
use crate::limit::plan::{LimitSpec, LimitVariant};
use crate::limit::quota::Quota;
use crate::runtime::{CompiledConfig, CompiledLimit, RouteLimit};

/// What a field of the log is to be: the identity of a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentityField {
    /// The limit.
    pub limit: String,
    /// The field, as the log calls it.
    pub field: String,
}

/// Why the arguments do not fit the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReplayConfigError {
    #[error("there is no limit `{name}`; there are {}", all.join(", "))]
    UnknownLimit { name: String, all: Vec<String> },
    #[error(transparent)]
    Proposal(#[from] ProposalError),
}

/// A limit as it is replayed.
#[derive(Debug)]
pub struct ReplayLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Its standard size, proposed or as configured.
    pub variant: Arc<LimitVariant>,
    /// The quota that the configuration has, where another one is proposed.
    pub configured_quota: Option<Quota>,
    /// Why the log does not say whose requests they are.
    pub skip_reason: Option<String>,
    /// What has to be said about it.
    pub notes: Vec<String>,
    /// What remains to be done when a response is known.
    pub deferred: Deferred,
    /// The sizes of consumers who have others, by what stands for them in the log: their name, or the hash of their identity.
    pub consumer_variants: HashMap<Box<[u8]>, Arc<LimitVariant>>,
    /// Whether what stands for its identities may be a key.
    pub is_secret: bool,
    refund_on: RefundOn,
}

impl ReplayLimit {
    /// Whether a response of this status gives the charge back.
    pub fn is_refunded(&self, status: u16) -> bool {
        StatusCode::from_u16(status).is_ok_and(|status| self.refund_on.contains(status))
    }
}

/// A limit of a route that the log says enough about.
#[derive(Debug)]
pub struct ReplayRoute {
    /// The identities of its limits.
    pub identity_specs: Vec<IdentitySpec>,
    /// Its limits.
    pub limits: Vec<RouteLimit>,
    /// Which subject each of them is.
    pub limit_indices: Vec<usize>,
    /// Whether one is by API key.
    pub uses_api_key: bool,
}

/// A configuration as a log can be held against it.
#[derive(Debug)]
pub struct ReplayConfig {
    /// The configuration.
    pub compiled: CompiledConfig,
    /// The limits that routes use, in the order of their names.
    pub limits: Vec<ReplayLimit>,
    /// For each route, by index, the limits that are replayed.
    pub routes: Vec<ReplayRoute>,
}

/// Fields of the log that stand for identities, as headers that no client can send a request with: they are not in the log.
pub fn field_mappings(
    compiled: &CompiledConfig,
    identity_fields: &[IdentityField],
    capabilities: &FormatCapabilities,
) -> Result<Vec<FieldMapping>, ReplayConfigError> {
    for identity_field in identity_fields {
        if !compiled.limits.contains_key(&identity_field.limit) {
            return Err(unknown_limit(compiled, &identity_field.limit));
        }
    }
    let field = |name: &str, compiled_limit: &CompiledLimit| {
        let log_field = identity_fields
            .iter()
            .find(|identity_field| identity_field.limit == name)
            .map(|identity_field| identity_field.field.clone());
        log_field.or_else(|| {
            (capabilities.identity_hashes && missing_identity_input(compiled_limit, compiled, capabilities).is_some())
                .then(|| identity_hash_field(name))
        })
    };
    let mappings = compiled.limits.iter().enumerate().filter_map(|(index, (name, compiled_limit))| {
        Some(FieldMapping { field: field(name, compiled_limit)?, header: mapped_header(index) })
    });
    Ok(mappings.collect())
}

/// What stands for the identities of a subject.
pub(super) fn mapped_header(index: usize) -> HeaderName {
    // Letters and digits are a name.
    HeaderName::try_from(format!("x-sluicegate-replay-{index}")).unwrap_or(http::header::FROM)
}

fn unknown_limit(compiled: &CompiledConfig, name: &str) -> ReplayConfigError {
    ReplayConfigError::UnknownLimit { name: name.to_owned(), all: compiled.limits.keys().cloned().collect() }
}

impl ReplayConfig {
    /// Changes the configuration to what is proposed, and to what the log says.
    ///
    /// # Errors
    /// The proposals do not fit.
    pub fn new(
        compiled: CompiledConfig,
        proposals: &[QuotaProposal],
        mappings: &[FieldMapping],
        capabilities: &FormatCapabilities,
    ) -> Result<ReplayConfig, ReplayConfigError> {
        if let Some(skip_reason) = proposals.iter().find(|proposal| !compiled.limits.contains_key(&proposal.limit)) {
            return Err(unknown_limit(&compiled, &skip_reason.limit));
        }
        let (mut limits, mut identity_specs) = (Vec::new(), Vec::new());
        for (index, (name, compiled_limit)) in compiled.limits.iter().enumerate() {
            let proposal = proposals.iter().rfind(|proposal| proposal.limit == *name);
            let variant = proposal.map_or(Ok(compiled_limit.limit.default_variant.clone()), |proposal| {
                proposed_variant(&compiled, compiled_limit, proposal)
            });
            let variant = with_unbounded_permit_ttl(&compiled, &compiled_limit.limit, variant?);
            let is_mapped = mappings.iter().any(|mapping| mapping.header == mapped_header(index));
            let identity_spec = match is_mapped {
                true => IdentitySpec {
                    descriptors: vec![Descriptor::Header(mapped_header(index))],
                    on_missing: OnMissing::Skip,
                    ..compiled_limit.identity_spec.clone()
                },
                false => compiled_limit.identity_spec.clone(),
            };
            let missing_input = missing_identity_input(compiled_limit, &compiled, capabilities).filter(|_| !is_mapped);
            let in_flight = matches!(variant.rule, Rule::Concurrency(_)) && !capabilities.duration;
            let unknown = missing_input.or_else(|| in_flight.then(|| "how long requests took".to_owned()));
            let configured_quota =
                proposal.map(|_| compiled_limit.limit.default_variant.quota).filter(|quota| *quota != variant.quota);
            let notes = limit_notes(compiled_limit, is_mapped, capabilities);
            // A log may hold the key or the token itself.
            let has_secret = |descriptor: &Descriptor| {
                matches!(descriptor, Descriptor::ApiKey | Descriptor::Jwt(_)) || !descriptor.is_public()
            };
            let is_secret = is_mapped
                && !capabilities.identity_hashes
                && compiled_limit.identity_spec.descriptors.iter().any(has_secret);
            let (limit, refund_on) = (compiled_limit.limit.clone(), compiled_limit.refund_on.clone());
            let deferred = deferred_action(compiled_limit.cost.as_ref().is_some_and(Cost::is_deferred), &refund_on);
            let consumer_variants =
                if is_mapped { consumer_variants(&compiled, compiled_limit) } else { HashMap::new() };
            limits.push(ReplayLimit {
                limit,
                variant,
                configured_quota,
                skip_reason: unknown,
                notes,
                deferred,
                consumer_variants,
                is_secret,
                refund_on,
            });
            identity_specs.push(identity_spec);
        }
        let routes = compiled.routes.iter().map(|route| {
            let mut replay_route = ReplayRoute {
                identity_specs: Vec::new(),
                limits: Vec::new(),
                limit_indices: Vec::new(),
                uses_api_key: false,
            };
            for route_limit in &route.rate_limits.limits {
                let Some(limit_index) =
                    limits.iter().position(|limit_index| Arc::ptr_eq(&limit_index.limit, &route_limit.limit))
                else {
                    continue;
                };
                if limits[limit_index].skip_reason.is_some() {
                    continue;
                }
                let by = &identity_specs[limit_index];
                replay_route.uses_api_key |= by.descriptors.contains(&Descriptor::ApiKey);
                let identity_index =
                    replay_route.identity_specs.iter().position(|other| other == by).unwrap_or_else(|| {
                        replay_route.identity_specs.push(by.clone());
                        replay_route.identity_specs.len() - 1
                    });
                replay_route.limits.push(RouteLimit { identity_index, ..route_limit.clone() });
                replay_route.limit_indices.push(limit_index);
            }
            replay_route
        });
        let routes = routes.collect();
        Ok(ReplayConfig { compiled, limits, routes })
    }
}
