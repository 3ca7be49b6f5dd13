//! Which limits a log can be held against, and in which sizes.

use std::collections::HashMap;
use std::sync::Arc;

use http::{HeaderName, StatusCode};

use super::format::own::hash_of;
use super::format::{Mapped, Provides};
use super::known::{consumers, lacking, notes};
use super::size::{Proposal, SizeError, proposed, unhurried};
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
pub struct Stand {
    /// The limit.
    pub limit: String,
    /// The field, as the log calls it.
    pub field: String,
}

/// Why the arguments do not fit the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ViewError {
    #[error("there is no limit `{name}`; there are {}", all.join(", "))]
    NoLimit { name: String, all: Vec<String> },
    #[error(transparent)]
    Size(#[from] SizeError),
}

/// A limit as it is replayed.
#[derive(Debug)]
pub struct Subject {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Its standard size, proposed or as configured.
    pub plan: Arc<LimitVariant>,
    /// The quota that the configuration has, where another one is proposed.
    pub instead_of: Option<Quota>,
    /// Why the log does not say whose requests they are.
    pub unknown: Option<String>,
    /// What has to be said about it.
    pub notes: Vec<String>,
    /// What remains to be done when a response is known.
    pub later: Deferred,
    /// The sizes of consumers who have others, by what stands for them in the log: their name, or the hash of their identity.
    pub consumers: HashMap<Box<[u8]>, Arc<LimitVariant>>,
    /// Whether what stands for its identities may be a key.
    pub secret: bool,
    refund_on: RefundOn,
}

impl Subject {
    /// Whether a response of this status gives the charge back.
    pub fn refunds(&self, status: u16) -> bool {
        StatusCode::from_u16(status).is_ok_and(|status| self.refund_on.contains(status))
    }
}

/// A limit of a route that the log says enough about.
#[derive(Debug)]
pub struct OfRoute {
    /// The identities of its limits.
    pub identities: Vec<IdentitySpec>,
    /// Its limits.
    pub limits: Vec<RouteLimit>,
    /// Which subject each of them is.
    pub subjects: Vec<usize>,
    /// Whether one is by API key.
    pub by_key: bool,
}

/// A configuration as a log can be held against it.
#[derive(Debug)]
pub struct View {
    /// The configuration.
    pub runtime: CompiledConfig,
    /// The limits that routes use, in the order of their names.
    pub subjects: Vec<Subject>,
    /// For each route, by index, the limits that are replayed.
    pub routes: Vec<OfRoute>,
}

/// Fields of the log that stand for identities, as headers that no client can send a request with: they are not in the log.
pub fn stands(runtime: &CompiledConfig, stands: &[Stand], provides: &Provides) -> Result<Vec<Mapped>, ViewError> {
    for stand in stands {
        if !runtime.limits.contains_key(&stand.limit) {
            return Err(no_limit(runtime, &stand.limit));
        }
    }
    let field = |name: &str, terms: &CompiledLimit| {
        let given = stands.iter().find(|stand| stand.limit == name).map(|stand| stand.field.clone());
        given.or_else(|| (provides.hashed && lacking(terms, runtime, provides).is_some()).then(|| hash_of(name)))
    };
    let mapped = runtime
        .limits
        .iter()
        .enumerate()
        .filter_map(|(index, (name, terms))| Some(Mapped { field: field(name, terms)?, header: header(index) }));
    Ok(mapped.collect())
}

/// What stands for the identities of a subject.
pub(super) fn header(index: usize) -> HeaderName {
    // Letters and digits are a name.
    HeaderName::try_from(format!("x-sluicegate-replay-{index}")).unwrap_or(http::header::FROM)
}

fn no_limit(runtime: &CompiledConfig, name: &str) -> ViewError {
    ViewError::NoLimit { name: name.to_owned(), all: runtime.limits.keys().cloned().collect() }
}

impl View {
    /// Changes the configuration to what is proposed, and to what the log says.
    ///
    /// # Errors
    /// The proposals do not fit.
    pub fn new(
        runtime: CompiledConfig,
        proposals: &[Proposal],
        mapped: &[Mapped],
        provides: &Provides,
    ) -> Result<View, ViewError> {
        if let Some(unknown) = proposals.iter().find(|proposal| !runtime.limits.contains_key(&proposal.limit)) {
            return Err(no_limit(&runtime, &unknown.limit));
        }
        let (mut subjects, mut bys) = (Vec::new(), Vec::new());
        for (index, (name, terms)) in runtime.limits.iter().enumerate() {
            let proposal = proposals.iter().rfind(|proposal| proposal.limit == *name);
            let plan = proposal
                .map_or(Ok(terms.limit.default_variant.clone()), |proposal| proposed(&runtime, terms, proposal));
            let plan = unhurried(&runtime, &terms.limit, plan?);
            let stands = mapped.iter().any(|mapped| mapped.header == header(index));
            let by = match stands {
                true => IdentitySpec {
                    descriptors: vec![Descriptor::Header(header(index))],
                    on_missing: OnMissing::Skip,
                    ..terms.identity_spec.clone()
                },
                false => terms.identity_spec.clone(),
            };
            let lacks = lacking(terms, &runtime, provides).filter(|_| !stands);
            let in_flight = matches!(plan.rule, Rule::Concurrency(_)) && !provides.took;
            let unknown = lacks.or_else(|| in_flight.then(|| "how long requests took".to_owned()));
            let instead_of = proposal.map(|_| terms.limit.default_variant.quota).filter(|quota| *quota != plan.quota);
            let notes = notes(terms, stands, provides);
            // A log may hold the key or the token itself.
            let has_secret =
                |source: &Descriptor| matches!(source, Descriptor::ApiKey | Descriptor::Jwt(_)) || !source.is_public();
            let secret = stands && !provides.hashed && terms.identity_spec.descriptors.iter().any(has_secret);
            let (limit, refund_on) = (terms.limit.clone(), terms.refund_on.clone());
            let later = deferred_action(terms.cost.as_ref().is_some_and(Cost::is_deferred), &refund_on);
            let consumers = if stands { consumers(&runtime, terms) } else { HashMap::new() };
            subjects.push(Subject { limit, plan, instead_of, unknown, notes, later, consumers, secret, refund_on });
            bys.push(by);
        }
        let routes = runtime.routes.iter().map(|route| {
            let mut of_route =
                OfRoute { identities: Vec::new(), limits: Vec::new(), subjects: Vec::new(), by_key: false };
            for metered in &route.rate_limits.limits {
                let Some(subject) = subjects.iter().position(|subject| Arc::ptr_eq(&subject.limit, &metered.limit))
                else {
                    continue;
                };
                if subjects[subject].unknown.is_some() {
                    continue;
                }
                let by = &bys[subject];
                of_route.by_key |= by.descriptors.contains(&Descriptor::ApiKey);
                let identity = of_route.identities.iter().position(|other| other == by).unwrap_or_else(|| {
                    of_route.identities.push(by.clone());
                    of_route.identities.len() - 1
                });
                of_route.limits.push(RouteLimit { identity_index: identity, ..metered.clone() });
                of_route.subjects.push(subject);
            }
            of_route
        });
        let routes = routes.collect();
        Ok(View { runtime, subjects, routes })
    }
}
