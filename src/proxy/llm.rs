//! Token limits for LLM APIs: the gateway reserves tokens for a request, and settles the reservation at the end of the
//! response.

use std::mem;
use std::ops::{ControlFlow, Range};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, Response};

use crate::http::body::{Body, BodyEnd};
use crate::http::body_limits::{RestBounds, RestPermit};
use crate::identity::display::IdentityDisplay;
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::key::Identity;
use crate::limiter::settlement::{Deferred, DeferredCharges, SettleAction};
use crate::payload::llm::provider::{Billing, Operation, Provider, last_segment};
use crate::payload::llm::request;
use crate::payload::llm::request::{RequestError, RequestInfo};
use crate::payload::llm::response::{MeasuredUsage, ResponseMeter, UsageFormat, is_usage_event};
use crate::payload::llm::usage::Weights;
use crate::proxy::body::BodyContent;
use crate::proxy::metrics::{SETTLED_ESTIMATED, SETTLED_REPORTED, SETTLED_RESERVED, TokenMetrics, WorkerMetrics};
use crate::proxy::rejection::{LlmError, Rejection, UnreadBody};
use crate::snapshot::cost::{LlmCost, OnAbort, UnknownOperation};
use crate::snapshot::routes::{LlmInspection, Route, RouteLimit};
use crate::telemetry::access_log::LimitInfo;

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
    /// The model that determines the weights of the tokens.
    pub(super) model: Option<Box<str>>,
    /// The LLM API, which determines the format of error responses.
    pub provider: Provider,
    billing: Billing,
    /// Whether the path is no known operation.
    is_unknown: bool,
    path: Box<str>,
    /// Whether the gateway itself has requested the event that reports the token usage in the stream. The gateway then
    /// removes this event from the response.
    pub(super) hides_usage: bool,
    /// The index of each limit that counts tokens, with the identity that the limit charges.
    clients: Vec<(usize, (Identity, IdentityDisplay))>,
}

#[derive(Debug)]
enum Content {
    /// The request has no body or its operation is free, so its response contains no tokens that are billed.
    Empty,
    /// The body cannot be read.
    Unread,
    Read(RequestInfo),
}

/// Return the maximum token usage of a request, which is computed from the values of its body. `path` is the canonical
/// path of the upstream request, and `operation` the operation with this path.
///
/// # Errors
/// The body cannot be read, and a limit of the route needs the token usage, or a limit rejects unknown operations.
pub fn request(
    content: &mut BodyContent,
    inspection: LlmInspection,
    path: &str,
    operation: Option<&Operation>,
) -> Result<LlmRequest, Rejection<'static>> {
    let (provider, billing) = operation
        .map_or((Provider::OpenAi, inspection.unknown.billing()), |operation| (operation.provider, operation.billing));
    if operation.is_none() && inspection.unknown == UnknownOperation::Reject && !matches!(content, BodyContent::Empty) {
        return Err(Rejection::Llm(LlmError::UnknownOperation));
    }
    let content = match billing {
        Billing::Free => Ok(Content::Empty),
        Billing::Generation | Billing::Embedding => Content::from_body(content, inspection.max_body),
    };
    let hides_usage = inspection.includes_usage
        && provider == Provider::OpenAi
        && last_segment(path) == "completions"
        && matches!(&content, Ok(Content::Read(info)) if info.is_stream && !info.includes_usage);
    let content = match content {
        Err(error) if inspection.is_required || (inspection.is_enforced && error == LlmError::NoCapacity) => {
            return Err(Rejection::Llm(error));
        }
        Err(_) => Content::Unread,
        Ok(content) => content,
    };
    let named = match &content {
        Content::Read(info) => info.model.clone(),
        Content::Empty | Content::Unread => None,
    };
    // Providers with the model in the path ignore the model in the body.
    let model = request::model_in_path(path).map(|model| model.into()).or(named.filter(|_| provider.reads_model()));
    let (path, clients) = (path.into(), Vec::new());
    let is_unknown = operation.is_none();
    Ok(LlmRequest { content, model, provider, billing, is_unknown, path, hides_usage, clients })
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
                info.map(Content::Read).map_err(LlmError::Body)
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
            check.cost = self.reservation(llm);
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
        self.is_counted() && !(self.is_unknown && llm.unknown == UnknownOperation::Free)
    }

    fn reservation(&self, llm: &LlmCost) -> u64 {
        match &self.content {
            _ if !self.is_counted_by(llm) => 0,
            Content::Empty => 0,
            Content::Unread => llm.unread_cost.unwrap_or(0),
            Content::Read(info) => {
                let output = match self.billing {
                    Billing::Generation => llm.estimate.output(info, self.provider),
                    Billing::Embedding | Billing::Free => 0,
                };
                self.weights(llm).reservation(llm.estimate.input(info, self.provider), output)
            }
        }
    }

    fn weights(&self, llm: &LlmCost) -> Weights {
        llm.weights.for_model(self.model.as_deref())
    }

    /// Return the estimated number of input tokens, or `None` if the body was not read.
    fn estimated_input(&self, llm: &LlmCost) -> Option<u64> {
        match &self.content {
            Content::Empty | Content::Unread => None,
            Content::Read(info) => Some(llm.estimate.input(info, self.provider)),
        }
    }

    /// Return the settlement of the reservations, which must be performed at the end of the response body. Return
    /// `None` if there is no reservation to settle, or if the response is an error. After an error, a reservation is
    /// refunded if `refund_on` contains the status, and otherwise stays charged.
    pub(super) fn settlement(
        mut self,
        decision: &mut Decision<'_>,
        route: &Route,
        metrics: &WorkerMetrics,
        response: &Response<Body>,
        rest: Option<RestBounds>,
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
        let is_plain = !headers.contains_key(CONTENT_ENCODING);
        let media_type = headers.get(CONTENT_TYPE).filter(|_| is_plain).and_then(|value| value.to_str().ok());
        let mut meters = Vec::new();
        let mut settled = Vec::new();
        for (limit_index, reserved) in charges.costs() {
            let Some(llm) = limits[limit_index].cost.llm() else { continue };
            let (format, bytes_per_token) = (&llm.usage, llm.estimate.bytes_per_token);
            let same = |meter: &Meter| meter.format == *format && meter.bytes_per_token == bytes_per_token;
            let meter_index = meters.iter().position(same).unwrap_or_else(|| {
                let meter = media_type.and_then(|kind| ResponseMeter::new(kind, format.clone(), bytes_per_token));
                meters.push(Meter { format: format.clone(), bytes_per_token, meter });
                meters.len() - 1
            });
            settled.push(SettledLimit {
                limit_index,
                reserved,
                weights: self.weights(llm),
                estimated_input: self.estimated_input(llm),
                is_background: self.is_background(),
                meter_index,
                cuts: llm.cuts,
                on_abort: llm.on_abort,
                tokens: metrics.tokens(route.index, limit_index).cloned(),
                client: self
                    .clients
                    .iter()
                    .position(|(index, _)| *index == limit_index)
                    .map(|at| self.clients.swap_remove(at).1),
            });
        }
        let cuts = settled.iter().any(|limit| limit.cuts);
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
        Some(Box::new(LlmSettlement { charges, model: self.model, meters, limits: settled, rewriter, rest }))
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

/// Settles reservations at the end of a response, even if the client or the upstream aborts the response.
pub(super) struct LlmSettlement {
    charges: DeferredCharges,
    model: Option<Box<str>>,
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
    weights: Weights,
    estimated_input: Option<u64>,
    is_background: bool,
    meter_index: usize,
    cuts: bool,
    on_abort: OnAbort,
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
}

impl LlmSettlement {
    /// Measure a part of the response, and change this part if necessary. Return `Break` if the gateway ends the
    /// response with this part.
    pub(super) fn feed(&mut self, data: &mut Bytes) -> ControlFlow<()> {
        let LlmSettlement { meters, limits, rewriter, .. } = self;
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
            if is_complete && limits.iter().any(|limit| limit.is_exhausted(meters)) {
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
    /// record, in which the costs are set.
    pub(super) fn settle(self, limits: Option<&mut [LimitInfo]>, end: BodyEnd) {
        let costs: Vec<_> = self.limits.iter().map(|limit| limit.settled_cost(&self.meters, end)).collect();
        for info in limits.into_iter().flatten() {
            if let Some(settled) = costs.iter().find(|settled| settled.limit_index == info.limit_index) {
                info.cost = settled.cost;
                info.settled = Some(settled.cost);
                info.estimated = settled.is_estimated;
            }
        }
        let cost_of = |limit_index| costs.iter().find(|settled| settled.limit_index == limit_index).map(|one| one.cost);
        if let Some(model) = &self.model {
            self.charges.count_model(model, cost_of);
        }
        self.charges.settle_in_background(|limit_index, _| {
            cost_of(limit_index).map_or(SettleAction::Nothing, SettleAction::Settle)
        });
    }
}

impl SettledLimit {
    /// Return whether the gateway must end the stream because its output certainly exceeds the reservation.
    fn is_exhausted(&self, meters: &[Meter]) -> bool {
        let output = meters[self.meter_index].meter.as_ref().map_or(0, ResponseMeter::min_output);
        self.cuts && self.weights.reservation(self.estimated_input.unwrap_or(0), output) > self.reserved
    }

    fn settled_cost(&self, meters: &[Meter], end: BodyEnd) -> SettledCost {
        let meter = meters[self.meter_index].meter.as_ref();
        let measured = meter.and_then(|meter| meter.usage(self.estimated_input.unwrap_or(0)));
        // Ignore estimated usage in two cases, because it may be too low: the number of input tokens was not estimated,
        // or the provider generates the response in the background and may add output later.
        let is_estimable = self.estimated_input.is_some() && !self.is_background;
        let measured = measured.filter(|measured| is_estimable || !measured.is_estimated);
        // The provider may have generated more than the gateway has seen of an aborted response.
        let keeps_reservation = end == BodyEnd::Aborted && self.on_abort == OnAbort::Reservation;
        // A document without a usage object may contain only a part of what was generated.
        let has_no_usage = end != BodyEnd::Aborted && meter.is_some_and(ResponseMeter::is_document_without_usage);
        let measured = measured.filter(|measured| {
            !keeps_reservation && !has_no_usage || self.weights.cost(measured.usage) > self.reserved
        });
        if measured.is_none() && end != BodyEnd::Aborted {
            self.warn_of_unknown_usage(meter);
        }
        let (cost, is_estimated, kind) = match measured {
            Some(MeasuredUsage { usage, is_estimated: false }) => (self.weights.cost(usage), false, SETTLED_REPORTED),
            Some(MeasuredUsage { usage, is_estimated: true }) => (self.weights.cost(usage), true, SETTLED_ESTIMATED),
            // Keep the reservation charged, because nothing is known about the usage.
            None => (self.reserved, true, SETTLED_RESERVED),
        };
        if let Some(tokens) = &self.tokens {
            tokens.record(self.reserved, kind, cost, self.client.as_ref());
        }
        SettledCost { limit_index: self.limit_index, cost, is_estimated }
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
