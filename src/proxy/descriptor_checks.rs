//! Decides about the descriptors of a call of the rate limit service.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::timeout;

use crate::clock::monotonic;
use crate::limiter::Limiter;
use crate::limiter::algorithm::{MAX_REQUEST_WEIGHT, Outcome};
use crate::limiter::decision::{Decision, LimitCheck, LimitResult};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::key::IdentityEncoder;
use crate::limiter::overrides::OverrideTable;
use crate::limiter::quota::Quota;
use crate::limiter::settlement::Deferred;
use crate::limiter::spec::LimitVariant;
use crate::limiter::verdict::StoreError;
use crate::payload::envoy::{RateLimitDescriptor, RateLimitOverride, RateLimitRequest, Unit};
use crate::snapshot::CompiledConfig;
use crate::snapshot::descriptor_files::FileRule;
use crate::snapshot::descriptors::{DescriptorLimit, DescriptorRule, LimitInCall};
use crate::snapshot::limits::ChargePolicy;

/// Maximum number of descriptors of a call, and of checks for its descriptors.
pub const MAX_DESCRIPTORS: usize = 64;

/// When a call must be decided.
#[derive(Clone, Copy)]
pub struct Deadline {
    /// The limiter decides before this time.
    pub decide_by: Instant,
    /// Additional time for a gateway that is late itself.
    pub grace: Duration,
}

// === The rules that match ===

/// A descriptor of a call, and the descriptor of the configuration that matches it.
pub struct Resolved<'a> {
    /// The descriptor of the configuration whose limits apply.
    pub rule: Option<MatchedRule<'a>>,
    /// Whether a descriptor of the configuration matches, even if its limits do not apply.
    pub is_known: bool,
    /// The variants of the limits of the rule, with the quota that the call requests.
    overridden: Vec<Option<Arc<LimitVariant>>>,
    /// Unit of the quota of zero that denies the descriptor.
    denies_all: Option<Unit>,
}

/// A descriptor of the configuration, with its index.
#[derive(Clone, Copy)]
pub struct MatchedRule<'a> {
    /// Index of the descriptor.
    pub index: usize,
    /// The descriptor.
    pub rule: &'a DescriptorRule,
}

impl<'a> Resolved<'a> {
    fn of_file(&self) -> Option<&'a FileRule> {
        self.rule.and_then(|matched| matched.rule.of_file.as_ref())
    }
}

/// Return the keys and values of a descriptor.
pub fn entries(descriptor: &RateLimitDescriptor) -> impl Iterator<Item = (&[u8], &[u8])> + Clone {
    descriptor.entries.iter().map(|entry| (&*entry.key, &*entry.value))
}

/// Find the descriptors of the configuration that match the descriptors of a call.
pub fn resolve<'a>(config: &'a CompiledConfig, request: &RateLimitRequest) -> Vec<Resolved<'a>> {
    let table = &config.descriptors;
    let resolve = |descriptor: &RateLimitDescriptor| {
        let requested = descriptor.limit.filter(|limit| limit.unit().seconds().is_some());
        let limit_in_call = if requested.is_some() { LimitInCall::Given } else { LimitInCall::Absent };
        let index = table.find(&request.domain, entries(descriptor), limit_in_call);
        let rule = index.map(|index| MatchedRule { index, rule: &table.rules[index] });
        let limits = || rule.into_iter().flat_map(|matched| &matched.rule.limits);
        let overridden = match requested {
            None => Vec::new(),
            Some(quota) => limits().map(|limit| requested_variant(config, limit, quota)).collect(),
        };
        let is_enforced = limits().any(|limit| !limit.limit.shadow);
        let denies_all = match requested {
            Some(quota) => Some(quota.unit()).filter(|_| quota.requests_per_unit == 0 && is_enforced),
            None => rule.and_then(|matched| matched.rule.of_file.as_ref()?.denies_all),
        };
        let denies_all = denies_all.filter(|_| !descriptor.is_negative_hits);
        Resolved { rule, is_known: rule.is_some(), overridden, denies_all }
    };
    let mut resolved: Vec<_> = request.descriptors.iter().map(resolve).collect();
    drop_replaced(&mut resolved);
    resolved
}

/// Drop the rules whose limits another descriptor of the call replaces.
fn drop_replaced(resolved: &mut [Resolved<'_>]) {
    let replaced: Vec<_> = resolved.iter().filter_map(Resolved::of_file).flat_map(|rule| &rule.replaces).collect();
    if replaced.is_empty() {
        return;
    }
    for resolved in resolved {
        if resolved.of_file().is_some_and(|rule| replaced.contains(&&rule.limit_name)) {
            *resolved = Resolved { rule: None, is_known: true, overridden: Vec::new(), denies_all: None };
        }
    }
}

/// Return the variant of a limit with the quota that a call requests. Return `None` if the algorithm does not support
/// the quota: the configured quota then applies.
fn requested_variant(
    config: &CompiledConfig,
    limit: &DescriptorLimit,
    requested: RateLimitOverride,
) -> Option<Arc<LimitVariant>> {
    let window_us = requested.unit().seconds()? * 1_000_000;
    let quota = Quota { count: requested.requests_per_unit.into(), window_us: Some(window_us), calendar: None };
    if quota.count == 0 {
        return None;
    }
    limit.limit.override_variant(&config.hasher, quota, None).ok().map(Arc::new)
}

// === The checks of a call ===

/// The checks of all descriptors of a call.
#[derive(Default)]
pub struct CallChecks<'a, 'p> {
    /// The groups of checks that charge the request. Each group is one decision.
    pub groups: Vec<CheckGroup<'a, 'p>>,
    /// The checks whose cost is refunded.
    pub refunds: Vec<LimitCheck<'a, 'p>>,
    /// The descriptors, in the order of the call.
    pub descriptors: Vec<DescriptorChecks<'a>>,
    /// Whether each descriptor is charged on its own, also if another one denies the call.
    is_independent: bool,
}

/// Checks that are one decision: it charges all of them or none.
pub struct CheckGroup<'a, 'p> {
    /// How the group affects the decision about the call.
    pub kind: GroupKind,
    /// The checks.
    pub charges: Vec<LimitCheck<'a, 'p>>,
    /// For each of the checks: where its cost comes from, if the limit charges it always.
    always_charged: Vec<Option<CostSource>>,
    /// Whether a descriptor of the group has a quota of zero, so that the group is denied without a check.
    denies_all: bool,
}

/// How a group of checks affects the decision about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// If the group is denied, the call is denied.
    Enforced,
    /// If all groups of this kind are denied, the call is denied (`quota_mode`).
    Quota,
}

/// Where the cost of a check comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CostSource {
    /// `hits_addend` of the descriptor or the call.
    Proxy,
    /// The default of 1.
    Default,
}

/// The checks of one descriptor of a call.
pub struct DescriptorChecks<'a> {
    /// The descriptor of the configuration.
    pub rule: Option<MatchedRule<'a>>,
    /// Unit of the quota of zero that denies the descriptor.
    pub denies_all: Option<Unit>,
    /// Whether the cost is refunded.
    pub is_refund: bool,
    /// Cost of the request.
    pub cost: u64,
    /// Index of the group of the checks. `None` if the descriptor has no checks that charge the request.
    pub group: Option<usize>,
    /// The checks of the descriptor.
    pub checks: Vec<CheckIndex>,
}

/// Where a check of a descriptor is.
#[derive(Clone, Copy)]
pub struct CheckIndex {
    /// Index in the charges of the group, or in [`CallChecks::refunds`].
    pub check: usize,
    /// Index of the limit in the rule.
    pub limit: usize,
}

/// The decision about a group of checks.
pub enum GroupDecision<'a> {
    /// The limits were checked.
    Decided(Decision<'a>),
    /// The limits could not be checked, and deny the request.
    Failed,
    /// The group was not checked, because another group denies the call.
    Unchecked,
}

impl GroupDecision<'_> {
    /// Return whether the group denies the request.
    pub fn is_denial(&self) -> bool {
        match self {
            GroupDecision::Decided(decision) => !decision.admitted,
            GroupDecision::Failed => true,
            GroupDecision::Unchecked => false,
        }
    }

    /// Return the result of a check of the group, if the store returned it.
    pub fn result(&self, check: &LimitCheck<'_, '_>) -> Option<&LimitResult<'_>> {
        match self {
            GroupDecision::Decided(decision) => {
                decision.results.iter().find(|result| result.limit_index == check.limit_index)
            }
            GroupDecision::Failed | GroupDecision::Unchecked => None,
        }
    }
}

/// The decision about a call.
pub struct CallDecision<'a> {
    /// Whether the call is admitted.
    pub is_admitted: bool,
    /// The decision about each group of checks.
    pub groups: Vec<GroupDecision<'a>>,
    /// The outcome of each refund. Empty if the store did not answer.
    pub refunds: Vec<Outcome>,
}

impl<'a, 'p> CallChecks<'a, 'p>
where
    'a: 'p,
{
    /// Build the checks of a call. Return `None` if they would occupy the store for too long.
    pub fn new(
        config: &CompiledConfig,
        request: &RateLimitRequest,
        resolved: &'p [Resolved<'a>],
        overrides: Option<&'p OverrideTable>,
    ) -> Option<Self> {
        let is_independent = config.descriptors.options.is_independent;
        let mut call = CallChecks { is_independent, ..CallChecks::default() };
        let mut builder = CheckBuilder { config, request, overrides, encoder: IdentityEncoder::default(), weight: 0 };
        for (descriptor, resolved) in request.descriptors.iter().zip(resolved) {
            let checks = builder.descriptor(&mut call, descriptor, resolved);
            call.descriptors.push(checks);
        }
        if !is_independent && call.groups.iter().any(|group| group.kind == GroupKind::Quota) {
            let enforced = call.groups.iter_mut().filter(|group| group.kind == GroupKind::Enforced);
            let checks = enforced.flat_map(|group| &mut group.charges);
            // The quotas may deny the call.
            checks.filter(|check| check.cost > 0).for_each(|check| check.deferred = Deferred::Refund);
        }
        let charges: usize = call.groups.iter().map(|group| group.charges.len()).sum();
        let is_bounded = builder.weight <= MAX_REQUEST_WEIGHT && charges.max(call.refunds.len()) <= MAX_DESCRIPTORS;
        is_bounded.then_some(call)
    }

    /// Return whether these decisions about the groups deny the call.
    pub fn is_denied(&self, decisions: &[GroupDecision<'_>]) -> bool {
        self.denies(decisions, GroupKind::Enforced) || self.denies(decisions, GroupKind::Quota)
    }

    fn denies(&self, decisions: &[GroupDecision<'_>], kind: GroupKind) -> bool {
        let mut denials = self.groups.iter().zip(decisions).filter(|(group, _)| group.kind == kind);
        match kind {
            GroupKind::Enforced => denials.any(|(_, decision)| decision.is_denial()),
            GroupKind::Quota => denials.clone().count() > 0 && denials.all(|(_, decision)| decision.is_denial()),
        }
    }

    /// Return the index of the group for a descriptor of this kind.
    fn group_for(&mut self, kind: GroupKind) -> usize {
        let is_shared = !self.is_independent && kind == GroupKind::Enforced;
        let existing = self.groups.iter().position(|group| group.kind == kind).filter(|_| is_shared);
        existing.unwrap_or_else(|| {
            self.groups.push(CheckGroup { kind, charges: Vec::new(), always_charged: Vec::new(), denies_all: false });
            self.groups.len() - 1
        })
    }

    /// Decide about the call, and make its refunds.
    pub async fn decide(&self, limiter: &Limiter, deadline: Deadline) -> CallDecision<'a> {
        let mut groups: Vec<_> = self.groups.iter().map(|_| GroupDecision::Unchecked).collect();
        if self.is_independent {
            self.decide_groups(limiter, deadline, |_| true, &mut groups).await;
        } else {
            self.decide_groups(limiter, deadline, |kind| kind == GroupKind::Enforced, &mut groups).await;
            if !self.denies(&groups, GroupKind::Enforced) {
                self.decide_groups(limiter, deadline, |kind| kind == GroupKind::Quota, &mut groups).await;
                if self.denies(&groups, GroupKind::Quota) {
                    self.refund_enforced(limiter, deadline, &mut groups).await;
                }
            }
        }
        let is_admitted = !self.is_denied(&groups);
        let refunds = match self.refunds.is_empty() {
            true => Vec::new(),
            false => limiter.refund_before(&self.refunds, deadline.decide_by).await,
        };
        CallDecision { is_admitted, groups, refunds }
    }

    /// Decide about the groups of some kinds at the same time.
    async fn decide_groups(
        &self,
        limiter: &Limiter,
        deadline: Deadline,
        is_selected: impl Fn(GroupKind) -> bool,
        decisions: &mut [GroupDecision<'a>],
    ) {
        let selected = || self.groups.iter().zip(0..).filter(|(group, _)| is_selected(group.kind));
        if selected().nth(1).is_none() {
            for (group, index) in selected() {
                decisions[index] = group.decide(limiter, deadline).await;
            }
            return;
        }
        let decided = join_all(selected().map(|(group, _)| group.decide(limiter, deadline))).await;
        for ((_, index), decision) in selected().zip(decided) {
            decisions[index] = decision;
        }
    }

    /// Undo the charges of the enforced limits of a call that the quotas deny.
    async fn refund_enforced(&self, limiter: &Limiter, deadline: Deadline, decisions: &mut [GroupDecision<'a>]) {
        for (group, decision) in
            self.groups.iter().zip(decisions).filter(|(group, _)| group.kind == GroupKind::Enforced)
        {
            let GroupDecision::Decided(decision) = decision else { continue };
            limiter.undo_before(&group.charges, decision, deadline.decide_by).await;
        }
    }
}

impl<'a, 'p> CheckGroup<'a, 'p>
where
    'a: 'p,
{
    /// Return whether a descriptor of the group has a quota of zero.
    pub fn denies_all(&self) -> bool {
        self.denies_all
    }

    /// Decide about the group, and charge what a denied request charges.
    async fn decide(&self, limiter: &Limiter, deadline: Deadline) -> GroupDecision<'a> {
        if self.charges.is_empty() || self.denies_all {
            return GroupDecision::Decided(Decision { admitted: !self.denies_all, ..Decision::unlimited() });
        }
        let decide_by = deadline.decide_by;
        let time = (decide_by + deadline.grace).saturating_duration_since(monotonic());
        let decision = match timeout(time, limiter.check_before(&self.charges, decide_by)).await {
            Ok(decision) => decision,
            Err(_) => Err(StoreUnavailable(StoreError::Overloaded)),
        };
        match decision {
            Ok(decision) => {
                let debts = self.debts(&decision);
                if !debts.is_empty() {
                    limiter.charge_before(&debts, decision.decided_by, decide_by).await;
                }
                GroupDecision::Decided(decision)
            }
            Err(error) => {
                let debts = self.reported();
                if !debts.is_empty() {
                    limiter.charge_later(&debts, &error.0);
                }
                GroupDecision::Failed
            }
        }
    }

    /// Return the checks that a denied request nevertheless charges: those of limits with `charge = "always"` that deny
    /// it. Without this charge, a limit would never deny a request if the proxy first asks with a cost of 0, and charges
    /// more than what remains when the response ends.
    ///
    /// A denial from the cache charges only costs that the proxy has set. The cache repeats a denial whose request was
    /// charged.
    fn debts(&self, decision: &Decision<'_>) -> Vec<&LimitCheck<'a, 'p>> {
        if decision.admitted {
            return Vec::new();
        }
        let is_charged = |source: Option<CostSource>| match source {
            None => false,
            Some(CostSource::Proxy) => true,
            Some(CostSource::Default) => !decision.is_from_cache,
        };
        let denies = |check: &LimitCheck<'_, '_>| {
            decision.violated().any(|result| result.limit_index == check.limit_index) && check.cost > 0
        };
        let charges = self.charges.iter().zip(&self.always_charged);
        charges.filter(|(check, source)| is_charged(**source) && denies(check)).map(|(check, _)| check).collect()
    }

    /// Return the checks of limits with `charge = "always"` whose cost the proxy has set. It may report what a stream has
    /// used, so the cost counts even if the store did not answer.
    fn reported(&self) -> Vec<&LimitCheck<'a, 'p>> {
        let charges = self.charges.iter().zip(&self.always_charged);
        charges
            .filter(|(check, source)| **source == Some(CostSource::Proxy) && check.cost > 0)
            .map(|(check, _)| check)
            .collect()
    }
}

impl DescriptorChecks<'_> {
    /// Return the name of the limit of the descriptor. It may be empty.
    pub fn limit_name(&self) -> String {
        let of_rule = |MatchedRule { rule, .. }: MatchedRule<'_>| match &rule.of_file {
            Some(of_file) => of_file.limit_name.to_string(),
            None => rule.limits.first().map(|limit| limit.limit.name.to_string()).unwrap_or_default(),
        };
        self.rule.map(of_rule).unwrap_or_default()
    }
}

/// Builds the checks of a call.
struct CheckBuilder<'c, 'p> {
    config: &'c CompiledConfig,
    request: &'c RateLimitRequest,
    overrides: Option<&'p OverrideTable>,
    encoder: IdentityEncoder,
    /// Weight of all checks at the store.
    weight: usize,
}

impl<'p> CheckBuilder<'_, 'p> {
    /// Add the checks of a descriptor to `call`.
    fn descriptor<'a: 'p>(
        &mut self,
        call: &mut CallChecks<'a, 'p>,
        descriptor: &RateLimitDescriptor,
        resolved: &'p Resolved<'a>,
    ) -> DescriptorChecks<'a> {
        let Resolved { rule, overridden, denies_all, .. } = resolved;
        let is_given = descriptor.hits_addend.is_some() || self.request.hits_addend > 0;
        let source = if is_given { CostSource::Proxy } else { CostSource::Default };
        let is_refund = descriptor.is_negative_hits;
        let cost = descriptor.hits_addend.unwrap_or(u64::from(self.request.hits_addend.max(1)));
        let mut described =
            DescriptorChecks { rule: *rule, denies_all: *denies_all, is_refund, cost, group: None, checks: Vec::new() };
        let Some(MatchedRule { rule, .. }) = rule else { return described };
        let is_limited = denies_all.is_some() || !rule.limits.is_empty();
        if is_limited && !is_refund {
            let kind = if rule.is_quota { GroupKind::Quota } else { GroupKind::Enforced };
            described.group = Some(call.group_for(kind));
        }
        if denies_all.is_some() {
            // A quota of zero has no state.
            described.group.into_iter().for_each(|index| call.groups[index].denies_all = true);
            return described;
        }
        for (rule_index, DescriptorLimit { limit, identity_spec, charge }) in rule.limits.iter().enumerate() {
            let value = |key: &str| {
                let mut entries = descriptor.entries.iter();
                entries.find(|entry| entry.key == key.as_bytes()).map_or(&b""[..], |entry| &entry.value)
            };
            let hasher = &self.config.hasher;
            let identity = match &rule.of_file {
                Some(of_file) => {
                    Some(of_file.identify(&self.request.domain, entries(descriptor), hasher, &mut self.encoder))
                }
                None => identity_spec.identify_entries(value, hasher, &mut self.encoder),
            };
            let Some(identity) = identity else { continue };
            let requested = overridden.get(rule_index).and_then(Option::as_ref);
            let set = self.overrides.and_then(|table| table.find(limit, identity)).map(|found| &found.variant);
            let variant = set.or(requested).unwrap_or(&limit.default_variant);
            let limit_index = call.groups.iter().map(|group| group.charges.len()).sum::<usize>() + call.refunds.len();
            let check = LimitCheck { limit_index, limit, variant, identity, cost, deferred: Deferred::Nothing };
            // A decision needs different keys. Two descriptors with the same state have one check.
            let key = check.key().local_hash();
            let checks = match described.group {
                Some(index) => &mut call.groups[index].charges,
                None => &mut call.refunds,
            };
            let same = checks.iter().position(|other| other.key().local_hash() == key);
            let index = same.unwrap_or(checks.len());
            match checks.get_mut(index) {
                Some(other) => other.cost = other.cost.saturating_add(cost),
                None => {
                    self.weight += variant.rule.weight(variant.rule.capacity());
                    checks.push(check);
                    let source = (*charge == ChargePolicy::Always).then_some(source);
                    described.group.into_iter().for_each(|group| call.groups[group].always_charged.push(source));
                }
            }
            described.checks.push(CheckIndex { check: index, limit: rule_index });
        }
        described
    }
}
