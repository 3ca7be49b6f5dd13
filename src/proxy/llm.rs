//! Token limits for LLM APIs: the gateway reserves tokens for a request, and settles the reservation at the end of the
//! response.

use std::iter;
use std::mem;
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName};
use http::uri::{InvalidUri, PathAndQuery, Uri};
use http::{HeaderMap, Response};
use tokio::runtime::Handle;

use crate::http::body::{Body, BodyEnd};
use crate::http::body_limits::{RestBounds, RestPermit};
use crate::http::headers::has_content_coding;
use crate::identity::display::IdentityDisplay;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::Identity;
use crate::limiter::settlement::{Deferred, DeferredCharges, SettleAction};
use crate::payload::llm::learned_output::{LearnedOutput, Uncovered};
use crate::payload::llm::provider::{Billing, Operation, Provider, last_segment};
use crate::payload::llm::request;
use crate::payload::llm::request::{RequestError, RequestInfo};
use crate::payload::llm::response::{MeasuredUsage, PriceFacts, ResponseMeter, UsageFormat, is_usage_event};
use crate::payload::llm::usage::{COUNTED_KINDS, ServiceTier, TokenUsage, Weights, parse_count};
use crate::proxy::body::BodyContent;
use crate::proxy::metrics::{SETTLED_ESTIMATED, SETTLED_REPORTED, SETTLED_RESERVED, TokenMetrics, WorkerMetrics};
use crate::proxy::rejection::{LlmError, Rejection, UnreadBody};
use crate::snapshot::cost::{LlmCost, OnAbort, UnknownOperation};
use crate::snapshot::route_action::ModelAliases;
use crate::snapshot::route_retry::Fallback;
use crate::snapshot::routes::{LlmInspection, Route, RouteLimit};
use crate::telemetry::access_log::LimitInfo;
use crate::upstream::retry::ReplacedResponse;

/// Prefixes of the headers in which a provider reports the limits of the account that all clients share.
const ACCOUNT_HEADERS: [&str; 2] = ["x-ratelimit-", "anthropic-ratelimit-"];

/// Remove the headers that describe the provider's account.
pub(super) fn remove_account_headers(headers: &mut HeaderMap) {
    let is_of_account = |name: &&HeaderName| ACCOUNT_HEADERS.iter().any(|prefix| name.as_str().starts_with(prefix));
    let names: Vec<_> = headers.keys().filter(is_of_account).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// A request whose tokens are counted by a limit.
#[derive(Debug)]
pub struct LlmRequest {
    content: Content,
    /// The models at the upstream of the route.
    models: NamedModels,
    /// The models at each fallback of the route. `None` if they are the same as at the upstream of the route.
    fallback_models: Vec<Option<NamedModels>>,
    /// The model that replaces an alias in the path.
    path_model: Option<Box<str>>,
    /// Whether the names of models in the body are aliases (`model_aliases`), which the gateway replaces.
    pub(super) has_aliases: bool,
    tier: Option<ServiceTier>,
    /// The LLM API, which determines the format of error responses.
    pub provider: Provider,
    billing: Billing,
    /// `None` if the path is no known operation.
    pub(super) operation: Option<&'static Operation>,
    /// Whether a span records the model of the response.
    pub(super) is_traced: bool,
    path: Box<str>,
    /// Whether the gateway itself requests the event that reports the token usage in the stream, if the upstream accepts
    /// that. The gateway then removes this event from the response.
    pub(super) hides_usage: bool,
    /// The output tokens of earlier responses. `None` if the gateway reserves the maximum.
    pub(super) learned: Option<Arc<LearnedOutput>>,
    /// The reservations of limits that learn the output.
    learned_reservations: Mutex<Vec<LearnedReservation>>,
    /// The index of each limit that counts tokens, with the identity that the limit charges.
    clients: Vec<(usize, (Identity, IdentityDisplay))>,
}

/// A reservation for a limit that learns the output.
#[derive(Debug)]
struct LearnedReservation {
    limit_index: usize,
    /// The key under which the output is learned.
    key: u64,
    cost: u64,
    /// The cost of the requested maximum.
    maximum: u64,
    /// The difference to `maximum`. `None` if there is none.
    uncovered: Option<Uncovered>,
}

/// The part of the quota of a limit that reservations of one identity and gateway may leave uncovered: a tenth.
const UNCOVERED_PART: u64 = 10;

/// The targets of an upstream request, with an alias of a model replaced.
pub(super) struct Renamed {
    /// `None` if the path contains no model, because the rewrite of the route adds it.
    pub(super) forwarded_path: Option<String>,
    pub(super) rewritten: Option<PathAndQuery>,
}

/// Return a target with another model in its path. The target does not change if its path contains no model.
fn with_model(target: &PathAndQuery, model: &str) -> Result<PathAndQuery, InvalidUri> {
    let Some(path) = request::with_model_in_path(target.path(), model) else { return Ok(target.clone()) };
    PathAndQuery::try_from(match target.query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    })
}

/// Return the target of a request with an alias of a model in its path replaced.
fn renamed_target(target: PathAndQuery, aliases: &ModelAliases) -> Result<PathAndQuery, InvalidUri> {
    match request::model_in_path(target.path()).and_then(|name| aliases.get(&*name)) {
        Some(model) => with_model(&target, model),
        None => Ok(target),
    }
}

/// Return the target of a request to a fallback, or `None` if it is equal to the received target. `first` is the target of
/// the request to the upstream of the route, and `path` is the received path in its forwarded form.
///
/// # Errors
/// The target would be invalid or too long.
pub(super) fn fallback_target(
    fallback: &Fallback,
    route: &Route,
    first: Option<PathAndQuery>,
    path: &str,
    received: &Uri,
) -> Result<Option<PathAndQuery>, Rejection<'static>> {
    let target = match &fallback.rewrite {
        None if fallback.model_aliases.is_empty() => return Ok(first),
        None => first.or_else(|| received.path_and_query().cloned()),
        Some(rewrite) => {
            let target = rewrite.apply(&route.path_pattern, path, received.query()).map_err(Rejection::InvalidPath)?;
            Some(target.try_into().and_then(|target| renamed_target(target, &route.model_aliases)))
                .transpose()
                .map_err(|_| Rejection::UriTooLong)?
        }
    };
    let renamed = target.map(|target| renamed_target(target, &fallback.model_aliases));
    renamed.transpose().map_err(|_| Rejection::UriTooLong)
}

/// The models that a server may use for a request.
#[derive(Debug, Clone, Default)]
struct NamedModels {
    /// The model that determines the weights of the tokens. A name with commas is a list, whose entries are in `others`.
    model: Option<Box<str>>,
    /// Other models that the server may use, and that the body names.
    others: Vec<Box<str>>,
    /// Whether a name in the body is an alias that is replaced for this upstream only.
    has_aliases: bool,
}

impl NamedModels {
    fn of_path(model: Box<str>) -> Self {
        NamedModels { model: Some(model), ..NamedModels::default() }
    }

    /// Return the models that the server may use.
    fn names(&self) -> impl Iterator<Item = &str> + Clone {
        let model = self.model.as_deref().filter(|model| !model.contains(','));
        model.into_iter().chain(self.others.iter().map(|model| &**model))
    }

    /// Replace aliases. Return whether there was one.
    fn replace(&mut self, aliases: &ModelAliases) -> bool {
        let mut has_aliases = false;
        for name in self.model.iter_mut().chain(&mut self.others) {
            if let Some(renamed) = request::renamed(name, |name| aliases.get(name).map(|model| &**model)) {
                *name = renamed.into();
                has_aliases = true;
            }
        }
        has_aliases
    }

    /// Return the models that a server uses. `in_path` is the model in its path: such a server ignores the models in the
    /// body.
    fn at(self, in_path: Option<&str>, provider: Provider, aliases: &[&ModelAliases]) -> Self {
        let has_aliases = self.has_aliases;
        let models = match in_path {
            Some(name) => {
                let replace = |name, aliases: &&ModelAliases| aliases.get(&name).cloned().unwrap_or(name);
                NamedModels::of_path(aliases.iter().fold(name.into(), replace))
            }
            None if provider.reads_model() => self,
            None => NamedModels::default(),
        };
        NamedModels { has_aliases, ..models }
    }
}

#[derive(Debug)]
enum Content {
    /// The request has no body or its operation is free, so its response contains no tokens that are billed.
    Empty,
    /// The body cannot be read.
    Unread,
    Read(Box<RequestInfo>),
}

/// The canonical paths of the requests to the upstreams of a route.
pub struct UpstreamPaths<'p> {
    /// The path of the request to the upstream of the route.
    pub first: &'p str,
    /// The path of the request to each fallback. `None` if it is the first path.
    pub fallbacks: Vec<Option<String>>,
}

/// Return the maximum token usage of a request, which is computed from the values of its body. `operation` is the
/// operation with the first path.
///
/// # Errors
/// The body cannot be read, and a limit of the route needs the token usage, or a limit rejects unknown operations.
pub fn request(
    content: &mut BodyContent,
    inspection: LlmInspection,
    route: &Route,
    paths: &UpstreamPaths<'_>,
    operation: Option<&'static Operation>,
) -> Result<LlmRequest, Rejection<'static>> {
    let path = paths.first;
    let (provider, billing) = operation
        .map_or((Provider::OpenAi, inspection.unknown.billing()), |operation| (operation.provider, operation.billing));
    if billing == Billing::File
        && inspection.unknown != UnknownOperation::Free
        && !matches!(content, BodyContent::Empty)
    {
        return Err(Rejection::Llm(LlmError::BatchFile));
    }
    if operation.is_none() && inspection.unknown == UnknownOperation::Reject && !matches!(content, BodyContent::Empty) {
        return Err(Rejection::Llm(LlmError::UnknownOperation));
    }
    let content = match billing {
        Billing::Free | Billing::File => Ok(Content::Empty),
        Billing::Generation | Billing::Embedding | Billing::Batch => Content::from_body(content, inspection.max_body),
    };
    let hides_usage = inspection.includes_usage
        && provider == Provider::OpenAi
        && last_segment(path) == "completions"
        && matches!(&content, Ok(Content::Read(info)) if info.is_stream && !info.includes_usage);
    let mut content = match content {
        Err(error) if inspection.is_required || (inspection.is_enforced && error == LlmError::NoCapacity) => {
            return Err(Rejection::Llm(error));
        }
        Err(_) => Content::Unread,
        Ok(content) => content,
    };
    let (mut named, tier) = match &mut content {
        Content::Read(info) => {
            let others = mem::take(&mut info.other_models);
            (NamedModels { model: info.model.take(), others, has_aliases: false }, info.tier)
        }
        Content::Empty | Content::Unread => (NamedModels::default(), None),
    };
    let has_aliases = named.replace(&route.model_aliases);
    named.others.retain(|other| Some(other) != named.model.as_ref());
    let in_path = request::model_in_path(path);
    let fallbacks = route.fallback.iter().zip(&paths.fallbacks);
    let fallback_models = fallbacks.map(|(Fallback { model_aliases, .. }, own_path)| {
        let mut named = named.clone();
        named.has_aliases = named.replace(model_aliases);
        let aliases = [&route.model_aliases, model_aliases];
        match own_path {
            None if model_aliases.is_empty() => None,
            None => Some(named.at(in_path.as_deref(), provider, &aliases)),
            Some(path) => Some(named.at(request::model_in_path(path).as_deref(), Provider::of(path), &aliases)),
        }
    });
    let fallback_models = fallback_models.collect();
    let path_model = in_path.as_deref().and_then(|name| route.model_aliases.get(name)).cloned();
    let models = named.at(in_path.as_deref(), provider, &[&route.model_aliases]);
    let (path, clients) = (path.into(), Vec::new());
    Ok(LlmRequest {
        content,
        models,
        fallback_models,
        path_model,
        has_aliases,
        tier,
        provider,
        billing,
        operation,
        is_traced: false,
        path,
        hides_usage,
        learned: None,
        learned_reservations: Mutex::default(),
        clients,
    })
}

impl Content {
    /// Take the maximum token usage from a body. A body longer than `max_body` bytes is an error.
    fn from_body(body: &mut BodyContent, max_body: usize) -> Result<Self, LlmError> {
        match body {
            BodyContent::Empty => Ok(Content::Empty),
            BodyContent::Read(read) if read.length > max_body => Err(LlmError::TooLong(max_body)),
            BodyContent::Read(read) if read.json.form.is_some() => Err(LlmError::MediaType),
            BodyContent::Read(read) => {
                let info = read.llm.take().unwrap_or(Err(RequestError::NoObject));
                info.map(|info| Content::Read(Box::new(info))).map_err(LlmError::Body)
            }
            BodyContent::Unread(UnreadBody::ContentCoding) => Err(LlmError::ContentCoding),
            BodyContent::Unread(UnreadBody::MediaType | UnreadBody::NoForm | UnreadBody::Form(_)) => {
                Err(LlmError::MediaType)
            }
            BodyContent::Unread(UnreadBody::TooLong(_)) => Err(LlmError::TooLong(max_body)),
            BodyContent::Unread(UnreadBody::NoCapacity) => Err(LlmError::NoCapacity),
            BodyContent::Unread(UnreadBody::Json(error)) => Err(LlmError::Body(error.clone().into())),
        }
    }
}

impl LlmRequest {
    /// Replace an alias of a model in the path and in the rewritten target of the upstream request. `path` is the path to
    /// forward. Return `None` if there is no alias.
    ///
    /// # Errors
    /// The target becomes too long.
    pub(super) fn rename(
        &self,
        path: &str,
        rewritten: Option<&PathAndQuery>,
    ) -> Result<Option<Renamed>, Rejection<'static>> {
        let Some(model) = &self.path_model else { return Ok(None) };
        let rewritten = rewritten.map(|target| with_model(target, model));
        let rewritten = rewritten.transpose().map_err(|_| Rejection::UriTooLong)?;
        Ok(Some(Renamed { forwarded_path: request::with_model_in_path(path, model), rewritten }))
    }

    /// Return whether the response may contain generated tokens.
    pub(super) fn is_counted(&self) -> bool {
        !matches!(self.content, Content::Empty)
    }

    /// Set the costs of the checks whose limits count tokens.
    ///
    /// # Errors
    /// The request reserves more than a limit can ever admit.
    pub fn reserve(&self, limits: &[RouteLimit], checks: &mut [LimitCheck<'_, '_>]) -> Result<(), Rejection<'static>> {
        for check in checks {
            let Some(llm) = limits[check.limit_index].cost.llm() else { continue };
            check.cost = match llm.learns_output {
                true => self.learned_reservation(llm, check),
                false => self.reservation(llm),
            };
            check.deferred = if self.is_counted_by(llm) { Deferred::Settle } else { Deferred::Nothing };
            let capacity = check.variant.rule.capacity();
            if check.cost > capacity && !check.limit.shadow {
                let limit = check.limit.name.clone();
                let unit = check.limit.unit.clone();
                let error = LlmError::TooLarge { limit, unit, cost: check.cost, capacity };
                return Err(Rejection::Llm(error));
            }
        }
        Ok(())
    }

    /// Store the identities that the checks charge, with their display names.
    pub(super) fn record_clients(
        &mut self,
        limits: &[RouteLimit],
        checks: &[LimitCheck<'_, '_>],
        name: impl Fn(&LimitCheck<'_, '_>) -> IdentityDisplay,
    ) {
        let counted = checks.iter().filter(|check| limits[check.limit_index].cost.llm().is_some());
        self.clients.extend(counted.map(|check| (check.limit_index, (check.identity, name(check)))));
    }

    /// Return whether a limit counts the tokens of this request.
    fn is_counted_by(&self, llm: &LlmCost) -> bool {
        self.is_counted() && !(self.operation.is_none() && llm.unknown == UnknownOperation::Free)
    }

    fn reservation(&self, llm: &LlmCost) -> u64 {
        match &self.content {
            _ if !self.is_counted_by(llm) => 0,
            Content::Empty => 0,
            Content::Unread => llm.unread_cost.unwrap_or(0),
            Content::Read(info) => {
                let output = match self.billing {
                    Billing::Generation => llm.estimate.output(info, self.operation),
                    Billing::Batch => llm.estimate.batch_output(info),
                    Billing::Embedding | Billing::Free | Billing::File => 0,
                };
                let input = llm.estimate.input(info, self.provider, &self.all_names());
                self.reservation_of(llm, input, output).saturating_mul(info.calls.max(1))
            }
        }
    }

    /// Return the reservation of a limit that learns the output. Later calls return the same value.
    fn learned_reservation(&self, llm: &LlmCost, check: &LimitCheck<'_, '_>) -> u64 {
        let limit_index = check.limit_index;
        let mut reservations = self.learned_reservations.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = reservations.iter().find(|known| known.limit_index == limit_index) {
            return known.cost;
        }
        let maximum = self.reservation(llm);
        let (Some(learned), Content::Read(info)) = (&self.learned, &self.content) else { return maximum };
        // A client that names several models or an unknown one could choose the model whose output was short.
        let NamedModels { model, others, .. } = &self.models;
        let is_single = self.billing == Billing::Generation && info.calls <= 1 && others.is_empty();
        if !is_single || llm.weights.is_unlisted(model.as_deref()) || !self.is_counted_by(llm) {
            return maximum;
        }
        let client = (&*check.limit.name, check.identity);
        let key = learned.key((client, model.as_deref()));
        let mut reservation = LearnedReservation { limit_index, key, cost: maximum, maximum, uncovered: None };
        if let Some(output) = learned.p95(key) {
            let output = llm.estimate.output(info, self.operation).min(output);
            let input = llm.estimate.input(info, self.provider, &self.all_names());
            let cost = self.reservation_of(llm, input, output);
            let max_uncovered = check.variant.quota.count / UNCOVERED_PART;
            let uncovered = learned.leave_uncovered(learned.key(client), maximum.saturating_sub(cost), max_uncovered);
            if let Some(uncovered) = uncovered {
                reservation = LearnedReservation { cost, uncovered: Some(uncovered), ..reservation };
            }
        }
        let cost = reservation.cost;
        reservations.push(reservation);
        cost
    }

    /// Return whether a limit has learned the output, so that it may reserve less than the requested maximum.
    pub(super) fn has_learned_reservations(&self) -> bool {
        self.learned.is_some()
    }

    /// Return the cost of the requested maximum for the limit with this index, if less is reserved.
    pub(super) fn uncovered_maximum(&self, limit_index: usize) -> Option<u64> {
        let reservations = self.learned_reservations.lock().unwrap_or_else(PoisonError::into_inner);
        let found = reservations.iter().find(|reservation| reservation.limit_index == limit_index);
        found.filter(|reservation| reservation.uncovered.is_some()).map(|reservation| reservation.maximum)
    }

    /// Return the largest reservation of the models that the upstreams of the route may use.
    fn reservation_of(&self, llm: &LlmCost, input: u64, output: u64) -> u64 {
        let value = |model: Option<&str>| llm.weights.for_model(model).reservation(input, output, self.tier);
        self.all_models().map(|models| largest_of(models.names(), value)).max().unwrap_or(0)
    }

    /// Return the models at each upstream of the route.
    fn all_models(&self) -> impl Iterator<Item = &NamedModels> + Clone {
        iter::once(&self.models).chain(self.fallback_models.iter().flatten())
    }

    fn all_names(&self) -> impl Iterator<Item = &str> + Clone {
        self.all_models().flat_map(NamedModels::names)
    }

    /// Return the models at the fallback with this index, or at the upstream of the route.
    fn models_at(&self, fallback: Option<usize>) -> &NamedModels {
        fallback.and_then(|index| self.fallback_models.get(index)?.as_ref()).unwrap_or(&self.models)
    }

    /// Return the model of the request at a fallback, or at the upstream of the route.
    pub(super) fn model(&self, fallback: Option<usize>) -> Option<&str> {
        self.models_at(fallback).model.as_deref()
    }

    /// Return whether the fallback with this index has other names for models in the body.
    pub(super) fn has_aliases_at(&self, fallback: usize) -> bool {
        self.fallback_models.get(fallback).and_then(Option::as_ref).is_some_and(|models| models.has_aliases)
    }

    /// Return the estimated number of input tokens, or `None` if the body was not read.
    fn estimated_input(&self, llm: &LlmCost, models: &NamedModels) -> Option<u64> {
        match &self.content {
            Content::Empty | Content::Unread => None,
            Content::Read(info) => Some(llm.estimate.input(info, self.provider, &models.names())),
        }
    }

    /// Return the cost of the replaced responses for a limit.
    pub(super) fn replaced_cost(&self, limit: &RouteLimit, responses: &UpstreamResponses) -> u64 {
        let Some(llm) = limit.cost.llm() else { return 0 };
        let costs = self.replaced_usages(llm, responses).map(|(_, cost)| cost);
        costs.fold(0, u64::saturating_add)
    }

    fn priced_models(&self, fallback: Option<usize>) -> PricedModels {
        PricedModels { models: self.models_at(fallback).clone(), tier: self.tier }
    }

    /// Return the usage that each replaced response reports, and its cost. The provider may bill these tokens.
    fn replaced_usages(&self, llm: &LlmCost, responses: &UpstreamResponses) -> impl Iterator<Item = (TokenUsage, u64)> {
        responses.replaced.iter().filter_map(|(fallback, response)| {
            let bytes_per_token = llm.estimate.output_bytes_per_token();
            let meter = ResponseMeter::new(&response.media_type, llm.usage.clone(), bytes_per_token, PriceFacts::Read);
            let mut meter = meter?;
            meter.feed(&response.body);
            let usage = meter.usage(0).filter(|measured| !measured.is_estimated)?.usage;
            Some((usage, self.priced_models(*fallback).cost(llm, meter.model(), usage)))
        })
    }

    /// Return the settlement of the reservations, which must be performed at the end of the response body. The replaced
    /// responses are charged as well. Return `None` if there is no reservation to settle, or if the response is an
    /// error. After an error, a reservation is refunded if `refund_on` contains the status, and otherwise stays charged.
    pub(super) fn settlement(
        mut self,
        decision: &mut Decision<'_>,
        route: &Route,
        metrics: &WorkerMetrics,
        response: &Response<Body>,
        rest: Option<RestBounds>,
        responses: &UpstreamResponses,
    ) -> Option<Box<LlmSettlement>> {
        let status = response.status();
        if !status.is_success() {
            return None;
        }
        let limits = &route.rate_limits.limits;
        let is_settled_by_body = |index: usize| !limits[index].refund_on.contains(status);
        let charges = decision.deferred_charges.as_mut()?.split_reservations(is_settled_by_body)?;
        let headers = response.headers();
        // Do not measure a compressed response. An upstream that sends a compressed response has ignored
        // `Accept-Encoding: identity`.
        let is_plain = !has_content_coding(headers);
        let media_type = headers.get(CONTENT_TYPE).filter(|_| is_plain).and_then(|value| value.to_str().ok());
        let is_priced = |index: usize| limits[index].cost.llm().is_some_and(|llm| llm.weights.depends_on_response());
        let is_priced = charges.costs().any(|(limit_index, _)| is_priced(limit_index));
        let facts = if is_priced || self.is_traced { PriceFacts::Read } else { PriceFacts::Ignored };
        let mut meters = Vec::new();
        let mut settled = Vec::new();
        let reservations = mem::take(&mut self.learned_reservations).into_inner();
        let mut reservations = reservations.unwrap_or_else(PoisonError::into_inner);
        let priced = self.priced_models(responses.fallback);
        for (limit_index, reserved) in charges.costs() {
            let Some(llm) = limits[limit_index].cost.llm() else { continue };
            let (format, bytes_per_token) = (&llm.usage, llm.estimate.output_bytes_per_token());
            let same = |meter: &Meter| meter.format == *format && meter.bytes_per_token == bytes_per_token;
            let meter_index = meters.iter().position(same).unwrap_or_else(|| {
                let mut meter =
                    media_type.and_then(|kind| ResponseMeter::new(kind, format.clone(), bytes_per_token, facts));
                if let (Some(meter), Some(usage)) = (&mut meter, bedrock_usage(headers)) {
                    meter.report(usage);
                }
                meters.push(Meter { format: format.clone(), bytes_per_token, meter });
                meters.len() - 1
            });
            let known = reservations.iter().position(|reservation| reservation.limit_index == limit_index);
            let learned = known.map(|index| reservations.swap_remove(index));
            settled.push(SettledLimit {
                limit_index,
                reserved,
                maximum: learned.as_ref().map_or(reserved, |learned| learned.maximum.max(reserved)),
                learned: self.learned.clone().zip(learned),
                replaced: self.replaced_usages(llm, responses).collect(),
                llm: llm.clone(),
                estimated_input: self.estimated_input(llm, &priced.models),
                is_background: self.is_background(),
                meter_index,
                tokens: metrics.tokens(route.index, limit_index).cloned(),
                client: self
                    .clients
                    .iter()
                    .position(|(index, _)| *index == limit_index)
                    .map(|at| self.clients.swap_remove(at).1),
            });
        }
        let cuts = settled.iter().any(|limit| limit.llm.cuts);
        // Do not change a body with a declared length, because the length must stay correct.
        let is_open_ended = http_body::Body::size_hint(response.body()).exact().is_none();
        let is_stream =
            meters.first().and_then(|meter| meter.meter.as_ref()).is_some_and(ResponseMeter::is_event_stream);
        let rewriter = (is_open_ended && is_stream && (cuts || self.hides_usage)).then(|| StreamRewriter {
            hides_usage: self.hides_usage,
            provider: self.provider,
            path: self.path.clone(),
            choices: self.choices(),
            event: Vec::new(),
            line_feed: LineFeed::Next,
        });
        Some(Box::new(LlmSettlement { charges, priced, meters, limits: settled, rewriter, rest }))
    }

    /// Return whether the provider continues to generate the response if the client disconnects.
    fn is_background(&self) -> bool {
        matches!(&self.content, Content::Read(info) if info.is_background)
    }

    fn choices(&self) -> u64 {
        match &self.content {
            Content::Read(info) => info.choices,
            Content::Empty | Content::Unread => 1,
        }
    }
}

/// Return the usage that Bedrock reports in headers for operations whose bodies have the format of the model.
fn bedrock_usage(headers: &HeaderMap) -> Option<TokenUsage> {
    let count = |name| headers.get(name).and_then(|value| parse_count(value.as_bytes()));
    let input = count("x-amzn-bedrock-input-token-count")?;
    let output = count("x-amzn-bedrock-output-token-count").unwrap_or(0);
    Some(TokenUsage { input, output, ..TokenUsage::default() })
}

/// Return the largest value of all models, or the value without a model if there is none.
fn largest_of<'m>(models: impl Iterator<Item = &'m str>, value: impl Fn(Option<&str>) -> u64) -> u64 {
    models.map(|model| value(Some(model))).max().unwrap_or_else(|| value(None))
}

/// What the request to the server that has responded says about the prices of its tokens.
struct PricedModels {
    models: NamedModels,
    tier: Option<ServiceTier>,
}

impl PricedModels {
    /// Return the largest value of the models that may have generated the response. If the request names several
    /// models, `reported` decides among them. If it names one, a more expensive reported model applies. A reported
    /// model without a price is ignored: its name may be a version or an alias of the requested model.
    fn largest(&self, llm: &LlmCost, reported: Option<&str>, value: impl Fn(&Weights) -> u64) -> u64 {
        let reported = reported.and_then(|model| llm.weights.listed(model)).map(|weights| value(&weights));
        match reported {
            Some(reported) if !self.models.others.is_empty() => reported,
            _ => {
                largest_of(self.models.names(), |model| value(&llm.weights.for_model(model))).max(reported.unwrap_or(0))
            }
        }
    }

    fn cost(&self, llm: &LlmCost, reported: Option<&str>, usage: TokenUsage) -> u64 {
        let usage = TokenUsage { tier: usage.tier.or(self.tier), ..usage };
        self.largest(llm, reported, |weights| weights.cost(usage))
    }
}

/// The responses of the upstreams of a route to a request.
#[derive(Default)]
pub(super) struct UpstreamResponses {
    /// The index of the fallback whose response the client gets. `None` for the upstream of the route.
    pub(super) fallback: Option<usize>,
    /// If the gateway counts tokens, the responses that the client does not get, each with the index of the fallback.
    pub(super) replaced: Vec<(Option<usize>, ReplacedResponse)>,
}

impl UpstreamResponses {
    /// Add responses of the upstream that got the request last, and that the client does not get.
    pub(super) fn add_replaced(&mut self, responses: impl IntoIterator<Item = ReplacedResponse>) {
        self.replaced.extend(responses.into_iter().map(|response| (self.fallback, response)));
    }
}

/// What a response has reported.
#[derive(Debug, Default)]
pub(super) struct LlmReport {
    /// The tokens of the response. `None` if only the reservation is known.
    pub(super) usage: Option<TokenUsage>,
    /// The model that has generated the response, if the gateway reads it.
    pub(super) model: Option<Box<str>>,
}

/// Settles reservations at the end of a response, even if the client or the upstream aborts the response.
pub(super) struct LlmSettlement {
    charges: DeferredCharges,
    priced: PricedModels,
    /// Meters of the response. All limits with the same usage format and the same number of bytes per token share one
    /// meter.
    meters: Vec<Meter>,
    limits: Vec<SettledLimit>,
    rewriter: Option<StreamRewriter>,
    /// Bounds of the rest of the response, which is read after the client has left.
    rest: Option<RestBounds>,
}

/// Changes a stream of server-sent events.
struct StreamRewriter {
    /// Whether the gateway removes the event that reports the token usage. The gateway then buffers each event until it
    /// is complete.
    hides_usage: bool,
    /// The format of the events that end the stream when its output exceeds a reservation.
    provider: Provider,
    path: Box<str>,
    choices: u64,
    /// The part of the current event that the gateway has received but not sent.
    event: Vec<u8>,
    /// What to do with an LF at the start of the next part.
    line_feed: LineFeed,
}

/// The event that an LF after the end of an event belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineFeed {
    /// The event did not end with CR, so the LF belongs to the next event.
    Next,
    /// The LF completes the line end of an event that was sent.
    Sent,
    /// The LF completes the line end of an event that was removed.
    Removed,
}

/// The part of a chunk that is sent to the client. Usually, this is the whole chunk, which is then not copied.
struct Passage<'d> {
    whole: &'d Bytes,
    /// Number of bytes at the start of the chunk that are sent unchanged.
    passed: usize,
    /// All bytes to send, if they are not a prefix of the chunk.
    changed: Option<Vec<u8>>,
}

impl Passage<'_> {
    /// Send a part of the chunk.
    fn pass(&mut self, part: Range<usize>) {
        if self.changed.is_none() && part.start == self.passed {
            self.passed = part.end;
        } else {
            self.push(&self.whole[part]);
        }
    }

    /// Send other bytes.
    fn push(&mut self, bytes: &[u8]) {
        let sent = || self.whole[..self.passed].to_vec();
        self.changed.get_or_insert_with(sent).extend_from_slice(bytes);
    }

    fn finish(self) -> Bytes {
        self.changed.map_or_else(|| self.whole.slice(..self.passed), Bytes::from)
    }
}

impl StreamRewriter {
    /// Send or remove an LF that completes the line end of the previous event.
    fn complete_line_end(&mut self, part: &mut Range<usize>, passage: &mut Passage<'_>) {
        let line_feed = mem::replace(&mut self.line_feed, LineFeed::Next);
        if line_feed == LineFeed::Next || passage.whole[part.start] != b'\n' {
            return;
        }
        if line_feed == LineFeed::Sent {
            passage.pass(part.start..part.start + 1);
        }
        part.start += 1;
    }

    /// Send a part of an event, hold it back until the event is complete, or remove the event.
    fn rewrite(&mut self, part: Range<usize>, is_complete: bool, passage: &mut Passage<'_>) {
        if !self.hides_usage {
            return passage.pass(part);
        }
        let is_held = !self.event.is_empty();
        if is_held || !is_complete {
            self.event.extend_from_slice(&passage.whole[part.clone()]);
        }
        if !is_complete {
            if self.event.len() > MAX_HELD_EVENT {
                passage.push(&mem::take(&mut self.event));
            }
            return;
        }
        let event = if is_held { &self.event[..] } else { &passage.whole[part.clone()] };
        let is_removed = is_usage_event(event);
        if event.ends_with(b"\r") {
            self.line_feed = if is_removed { LineFeed::Removed } else { LineFeed::Sent };
        }
        match is_held {
            true if is_removed => self.event.clear(),
            true => passage.push(&mem::take(&mut self.event)),
            false if is_removed => {}
            false => passage.pass(part),
        }
    }
}

/// Maximum length in bytes of an event that the gateway buffers until it is complete. Usage events are smaller than 1
/// KiB.
const MAX_HELD_EVENT: usize = 64 << 10;

struct Meter {
    format: UsageFormat,
    bytes_per_token: u64,
    /// `None` if the token usage of the response cannot be measured.
    meter: Option<ResponseMeter>,
}

struct SettledLimit {
    limit_index: usize,
    reserved: u64,
    /// The cost of the requested maximum. It exceeds `reserved` if the output is learned.
    maximum: u64,
    /// Where the output is learned, and the reservation.
    learned: Option<(Arc<LearnedOutput>, LearnedReservation)>,
    /// Usage and cost of each replaced response.
    replaced: Vec<(TokenUsage, u64)>,
    llm: Arc<LlmCost>,
    estimated_input: Option<u64>,
    is_background: bool,
    meter_index: usize,
    tokens: Option<TokenMetrics>,
    /// The identity that is charged, with its display name.
    client: Option<(Identity, IdentityDisplay)>,
}

/// The cost of a response for one limit.
#[derive(Debug, Clone, Copy)]
struct SettledCost {
    limit_index: usize,
    cost: u64,
    is_estimated: bool,
    /// The tokens of the response. `None` if the reservation stays charged.
    usage: Option<TokenUsage>,
}

impl LlmSettlement {
    /// Measure a part of the response, and change this part if necessary. Return `Break` if the gateway ends the
    /// response with this part.
    pub(super) fn feed(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        let LlmSettlement { meters, limits, rewriter, priced, .. } = self;
        let Some(rewriter) = rewriter else {
            meters.iter_mut().filter_map(|meter| meter.meter.as_mut()).for_each(|meter| meter.feed(data));
            return ControlFlow::Continue(());
        };
        let whole = data.clone();
        let mut passage = Passage { whole: &whole, passed: 0, changed: None };
        let mut start = 0;
        while start < whole.len() {
            let Some((first, others)) = meters.split_first_mut() else { break };
            let Some(meter) = &mut first.meter else { break };
            let mut part = start..start + meter.feed_event(&whole[start..]);
            others
                .iter_mut()
                .filter_map(|meter| meter.meter.as_mut())
                .for_each(|meter| meter.feed(&whole[part.clone()]));
            start = part.end;
            let is_complete = meter.is_between_events();
            rewriter.complete_line_end(&mut part, &mut passage);
            rewriter.rewrite(part, is_complete, &mut passage);
            if is_complete && limits.iter().any(|limit| limit.is_exhausted(meters, priced)) {
                let tokens =
                    meters.iter().filter_map(|meter| meter.meter.as_ref()).map(ResponseMeter::min_output).max();
                let StreamRewriter { provider, path, choices, .. } = rewriter;
                passage.push(provider.final_events(path, *choices, tokens.unwrap_or(0)).as_bytes());
                *data = passage.finish();
                return ControlFlow::Break(());
            }
        }
        *data = passage.finish();
        ControlFlow::Continue(())
    }

    /// Return a permit to read the response after the client has left.
    pub(super) fn start_rest(&self) -> Option<RestPermit> {
        self.rest.as_ref()?.start()
    }

    /// Return whether the rewriter holds back a part of an event.
    pub(super) fn holds_data(&self) -> bool {
        self.rewriter.as_ref().is_some_and(|rewriter| !rewriter.event.is_empty())
    }

    /// Return the unfinished last event of the stream, unless it reports the usage that the gateway has requested.
    pub(super) fn take_held_data(&mut self) -> Bytes {
        let event = self.rewriter.as_mut().map_or_else(Vec::new, |rewriter| mem::take(&mut rewriter.event));
        if is_usage_event(&event) { Bytes::new() } else { event.into() }
    }

    /// Settle the reservations in the background, and record the costs. `limits` are the entries of the access log
    /// record, in which the costs are set. Return what the response has reported.
    pub(super) fn settle(self, limits: Option<&mut [LimitInfo]>, end: BodyEnd) -> LlmReport {
        let costs: Vec<_> =
            self.limits.iter().map(|limit| limit.settled_cost(&self.meters, &self.priced, end)).collect();
        for info in limits.into_iter().flatten() {
            if let Some(settled) = costs.iter().find(|settled| settled.limit_index == info.limit_index) {
                info.cost = settled.cost;
                info.settled = Some(settled.cost);
                info.estimated = settled.is_estimated;
            }
        }
        let cost_of = |limit_index| costs.iter().find(|settled| settled.limit_index == limit_index).map(|one| one.cost);
        if self.charges.have_totals() {
            if let Some(model) = &self.priced.models.model {
                self.charges.count_model(model, cost_of);
            }
            for (limit, settled) in self.limits.iter().zip(&costs) {
                for usage in limit.replaced.iter().map(|(usage, _)| *usage).chain(settled.usage) {
                    let kinds = COUNTED_KINDS.into_iter().zip(usage.by_kind());
                    let tokens: Vec<_> = kinds.filter(|(_, tokens)| *tokens > 0).collect();
                    self.charges.count_kinds(&tokens, |limit_index| limit_index == settled.limit_index);
                }
            }
        }
        if let Some(limit) = self.limits.first() {
            for (usage, _) in &limit.replaced {
                limit.tokens.iter().for_each(|tokens| tokens.record_usage(*usage));
            }
        }
        let mut measured = self.limits.iter().zip(&costs).filter_map(|(limit, settled)| Some((limit, settled.usage?)));
        let usage = measured.next().map(|(limit, usage)| {
            limit.tokens.iter().for_each(|tokens| tokens.record_usage(usage));
            usage
        });
        let model = self.meters.iter().find_map(|meter| meter.meter.as_ref()?.model()).map(Box::from);
        let action = |limit_index, _| cost_of(limit_index).map_or(SettleAction::Nothing, SettleAction::Settle);
        let learned = self.limits.into_iter().filter_map(|limit| limit.learned);
        let uncovered: Vec<_> = learned.filter_map(|(_, reservation)| reservation.uncovered).collect();
        let runtime = if uncovered.is_empty() { None } else { Handle::try_current().ok() };
        match runtime {
            // The cost counts as uncovered until it is charged.
            Some(runtime) => {
                let settled = self.charges.settle(action);
                runtime.spawn(async move {
                    if let Some(settled) = settled {
                        // The settlement itself reports errors and repeats its calls.
                        let _ = settled.await;
                    }
                    drop(uncovered);
                });
            }
            None => self.charges.settle_in_background(action),
        }
        LlmReport { usage, model }
    }
}

impl SettledLimit {
    /// Return whether the gateway must end the stream because its output certainly exceeds the reservation.
    fn is_exhausted(&self, meters: &[Meter], priced: &PricedModels) -> bool {
        if !self.llm.cuts {
            return false;
        }
        let output = meters[self.meter_index].meter.as_ref().map_or(0, ResponseMeter::min_output);
        let input = self.estimated_input.unwrap_or(0);
        priced.largest(&self.llm, None, |weights| weights.reservation(input, output, priced.tier)) > self.reserved
    }

    fn settled_cost(&self, meters: &[Meter], priced: &PricedModels, end: BodyEnd) -> SettledCost {
        let meter = meters[self.meter_index].meter.as_ref();
        let reported_model = meter.and_then(ResponseMeter::model);
        let cost_of = |usage| priced.cost(&self.llm, reported_model, usage);
        let measured = meter.and_then(|meter| meter.usage(self.estimated_input.unwrap_or(0)));
        // Ignore estimated usage in two cases, because it may be too low: the number of input tokens was not estimated,
        // or the provider generates the response in the background and may add output later.
        let is_estimable = self.estimated_input.is_some() && !self.is_background;
        let measured = measured.filter(|measured| is_estimable || !measured.is_estimated);
        // The provider may have generated more than the gateway has seen of an aborted response.
        let keeps_reservation = end == BodyEnd::Aborted && self.llm.on_abort == OnAbort::Reservation;
        // A document without a usage object may contain only a part of what was generated.
        let has_no_usage = end != BodyEnd::Aborted && meter.is_some_and(ResponseMeter::is_document_without_usage);
        let measured =
            measured.filter(|measured| !keeps_reservation && !has_no_usage || cost_of(measured.usage) > self.maximum);
        if measured.is_none() && end != BodyEnd::Aborted {
            self.warn_of_unknown_usage(meter);
        }
        let (cost, is_estimated, kind) = match measured {
            Some(MeasuredUsage { usage, is_estimated: false }) => (cost_of(usage), false, SETTLED_REPORTED),
            Some(MeasuredUsage { usage, is_estimated: true }) => (cost_of(usage), true, SETTLED_ESTIMATED),
            // Keep the reservation charged, because nothing is known about the usage.
            None => (self.maximum, true, SETTLED_RESERVED),
        };
        if let (Some((learned, reservation)), Some(measured)) = (&self.learned, measured)
            && end != BodyEnd::Aborted
        {
            learned.record(reservation.key, measured.usage.output);
        }
        let cost = self.replaced.iter().fold(cost, |sum, (_, cost)| sum.saturating_add(*cost));
        if let Some(tokens) = &self.tokens {
            tokens.record(self.reserved, kind, cost, self.client.as_ref());
        }
        let usage = measured.map(|measured| measured.usage);
        SettledCost { limit_index: self.limit_index, cost, is_estimated, usage }
    }

    /// Warn that the reservation stays charged, because the operator may have to set `usage`.
    fn warn_of_unknown_usage(&self, meter: Option<&ResponseMeter>) {
        let reason = match meter {
            None => "the response is compressed or has an unknown media type",
            Some(meter) if meter.has_unknown_usage() => "the usage object has no known counts: set `usage` in `cost`",
            Some(meter) if meter.is_document_without_usage() => {
                "the response has no usage object: set `usage` in `cost`"
            }
            Some(_) => return,
        };
        if let Some(tokens) = &self.tokens {
            tokens.warn_of_unknown_usage(reason);
        }
    }
}
