//! Cost of a request for a limit. It is a constant, the value of a request header from a trusted proxy, the value of a
//! response header, the number of LLM tokens, or the sum of the costs of the called MCP tools.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode};

use crate::config::error::Issue;
use crate::config::gateway::Config;
use crate::config::shorthand;
use crate::config::shorthand::{CostTable, TokenWeights, UsagePointers};
use crate::config::spanned::{Spanned, Text};
use crate::config::tables::McpTools;
use crate::limiter::quota::EXACT_INTEGER_LIMIT;
use crate::payload::json::body::JsonBody;
use crate::payload::json::rpc::{CountedMessages, Message};
use crate::payload::llm::json_scanner::{JsonPath, MAX_SEGMENTS};
use crate::payload::llm::provider::Billing;
use crate::payload::llm::request::InputEstimate;
use crate::payload::llm::response::{CountKind, UsageFormat};
use crate::payload::llm::usage::{
    INPUT_KINDS, KINDS, KindWeights, LongContext, MAX_TOKENS, MAX_WEIGHT, ModelWeights, PARTS, TokenKind, Weights,
};
use crate::payload::mcp_tools::ToolRules;
use crate::payload::wildcard::Wildcard;
use crate::snapshot::validator::Validator;

/// Cost of a request for one limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cost {
    /// A constant cost.
    Fixed(u64),
    /// The value of a request header. It counts only if a trusted proxy sent it.
    Request {
        /// The request header.
        header: HeaderName,
        /// Maximum cost. Larger values are reduced to this maximum.
        max: u64,
        /// Cost if the header is missing or the peer is not a trusted proxy.
        default: u64,
    },
    /// The value of a response header. The cost is charged when the response arrives.
    Response {
        /// The response header.
        header: HeaderName,
        /// Cost if the header is missing or invalid.
        default: u64,
    },
    /// The LLM tokens of a request. The gateway reserves an estimate before it forwards the request, and corrects the
    /// charge after the response.
    Llm(Arc<LlmCost>),
    /// The sum of the costs of the messages in an MCP request. The tool that a message calls determines its cost.
    Tools(Arc<ToolCosts>),
}

/// Costs of MCP messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCosts {
    /// Cost of a tool call, by tool name.
    pub tools: Vec<(Wildcard, u64)>,
    /// Cost of every other message, and of a request without messages.
    pub default: u64,
}

impl ToolCosts {
    fn of(&self, message: &Message) -> u64 {
        let tool = message.tool().and_then(|tool| Wildcard::best_match(&self.tools, tool));
        tool.copied().unwrap_or(self.default)
    }

    /// Return the highest cost of a single message.
    pub fn max(&self) -> u64 {
        self.tools.iter().map(|(_, cost)| *cost).chain([self.default]).max().unwrap_or(0)
    }
}

/// Compile `mcp_tools`.
pub(super) fn tool_rules(written: &McpTools) -> Arc<ToolRules> {
    let patterns = |names: &Vec<Text>| names.iter().map(|name| Wildcard::new(name.get_ref())).collect();
    let deny = written.deny.as_ref().map(patterns).unwrap_or_default();
    Arc::new(ToolRules { allow: written.allow.as_ref().map(patterns), deny })
}

/// How to count the tokens of requests to LLM APIs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LlmCost {
    /// Cost of a token, by kind (input, cached input, output) and model.
    pub weights: ModelWeights,
    /// Parameters for estimating the cost that is reserved before the response arrives.
    pub estimate: InputEstimate,
    /// Maximum size in bytes of a request body to read.
    pub max_body: usize,
    /// Cost of a request whose body cannot be read. If `None`, such requests are rejected.
    pub unread_cost: Option<u64>,
    /// Whether the gateway learns how much output to reserve.
    pub learns_output: bool,
    /// Where to find the token usage in responses.
    pub usage: UsageFormat,
    /// Whether to end a stream when its output exceeds the reservation.
    pub cuts: bool,
    /// What to charge for an aborted response.
    pub on_abort: OnAbort,
    /// How to treat operations that the gateway does not know.
    pub unknown: UnknownOperation,
    /// Longest time that clients may wait before they retry a denied request.
    pub max_retry_wait: Duration,
    /// Whether clients get the rate limit headers of the provider.
    pub provider_headers: bool,
    /// Whether to request the usage of streams from OpenAI's API.
    pub includes_usage: bool,
}

/// What to charge for a response that the client or the provider aborts before it has reported its usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnAbort {
    /// The reservation, or the usage so far if it is larger.
    Reservation,
    /// The usage so far, as reported or estimated.
    Estimate,
}

/// How to treat a request with a body whose path is no known operation of an LLM API. The variants are in order of
/// strictness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnknownOperation {
    /// Count nothing.
    Free,
    /// Reserve and count tokens.
    Reserve,
    /// Reject the request.
    Reject,
}

impl UnknownOperation {
    /// Return how unknown operations are billed.
    pub fn billing(self) -> Billing {
        match self {
            UnknownOperation::Free => Billing::Free,
            UnknownOperation::Reserve | UnknownOperation::Reject => Billing::Generation,
        }
    }
}

/// Maximum cost. Lua 5.1 stores numbers as doubles, which represent all integers up to this value exactly.
const MAX_COST: u64 = EXACT_INTEGER_LIMIT - 1;

/// Cost of a request to an LLM API that is rejected before its body is read.
const UNREAD_LLM_COST: u64 = 1;

/// The error for an invalid cost from a trusted proxy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the header `{0}` is not a single integer")]
pub struct CostError(pub HeaderName);

impl Cost {
    /// Return the cost that is known from the request headers, before the response arrives.
    ///
    /// # Errors
    /// A trusted proxy sent an invalid cost.
    pub fn request_cost(&self, headers: &HeaderMap, trusted: bool) -> Result<u64, CostError> {
        match self {
            Cost::Fixed(cost) => Ok(*cost),
            Cost::Response { default, .. } => Ok(*default),
            Cost::Llm(_) => Ok(UNREAD_LLM_COST),
            Cost::Tools(tools) => Ok(tools.default),
            Cost::Request { default, .. } if !trusted => Ok(*default),
            Cost::Request { header, max, default } => match parse_single(headers, header) {
                None => Ok(*default),
                Some(value) => value.map(|cost| cost.min(*max)).ok_or_else(|| CostError(header.clone())),
            },
        }
    }

    /// Return the total cost of the JSON-RPC messages that `counted` selects. Each message costs `cost`, unless this is
    /// [`Cost::Tools`], which determines the cost of each message. If the body has no JSON-RPC messages, return `cost`.
    pub fn of_messages(&self, cost: u64, body: Option<&JsonBody>, counted: CountedMessages) -> u64 {
        let Some(Ok(messages)) = body.and_then(|body| body.messages.as_ref()) else { return cost };
        let counted = messages.counted(counted).map(|message| match self {
            Cost::Tools(tools) => tools.of(message),
            Cost::Fixed(_) | Cost::Request { .. } | Cost::Response { .. } | Cost::Llm(_) => cost,
        });
        counted.fold(0, u64::saturating_add).min(MAX_COST)
    }

    /// Return the cost that the response headers contain, or `None` if the cost does not depend on them.
    pub fn response_cost(&self, headers: &HeaderMap) -> Option<u64> {
        match self {
            Cost::Response { header, default } => Some(parse_single(headers, header).flatten().unwrap_or(*default)),
            Cost::Fixed(_) | Cost::Request { .. } | Cost::Llm(_) | Cost::Tools(_) => None,
        }
    }

    /// Replace the cost that applies if the header is missing.
    pub fn with_default(self, default: u64) -> Self {
        match self {
            Cost::Fixed(cost) => Cost::Fixed(cost),
            Cost::Request { header, max, .. } => Cost::Request { header, max, default },
            Cost::Response { header, .. } => Cost::Response { header, default },
            Cost::Llm(llm) => Cost::Llm(llm),
            Cost::Tools(tools) => Cost::Tools(tools),
        }
    }

    /// Return the token counting settings if this is the cost of an LLM API.
    pub fn llm(&self) -> Option<&Arc<LlmCost>> {
        match self {
            Cost::Llm(llm) => Some(llm),
            Cost::Fixed(_) | Cost::Request { .. } | Cost::Response { .. } | Cost::Tools(_) => None,
        }
    }

    /// Return whether the cost is charged only when the response arrives.
    pub fn is_deferred(&self) -> bool {
        matches!(self, Cost::Response { .. })
    }
}

/// Parse the value of a header as a decimal integer. Return `None` if the header is missing, and `Some(None)` if its
/// value is invalid or it occurs several times.
fn parse_single(headers: &HeaderMap, header: &HeaderName) -> Option<Option<u64>> {
    let mut values = headers.get_all(header).iter();
    let first = values.next()?;
    let digits = first.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    Some(digits.filter(|_| values.next().is_none()).and_then(|text| text.parse().ok()))
}

/// Ranges of response statuses for which the charge is refunded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RefundOn(pub Vec<RangeInclusive<u16>>);

impl RefundOn {
    /// Return whether no response status causes a refund.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Return whether a response with this status causes a refund.
    pub fn contains(&self, status: StatusCode) -> bool {
        self.0.iter().any(|range| range.contains(&status.as_u16()))
    }

    /// Parse a status code such as `503`, or a class such as `5xx`.
    pub fn parse(text: &str) -> Option<RangeInclusive<u16>> {
        if let Some(class) = text.strip_suffix("xx") {
            let class: u16 = class.parse().ok().filter(|class| (1..=5).contains(class))?;
            return Some(class * 100..=class * 100 + 99);
        }
        let status = text.parse().ok().filter(|status| (100..=599).contains(status))?;
        Some(status..=status)
    }
}

// === `cost = { llm = … }` of a limit ===

/// Default of `default_output`, in tokens.
const DEFAULT_OUTPUT: i64 = 1024;

/// Default of `audio_tokens`.
const MEDIA_TOKENS: i64 = 1000;

/// Default of `document_tokens`. Providers count 1,500 to 3,000 tokens for the text of a page, and often an image of it.
const DOCUMENT_TOKENS: i64 = 3000;

/// Default of `max_retry_wait`. The SDKs of OpenAI and Anthropic wait for any time in `Retry-After`.
const MAX_RETRY_WAIT: Duration = Duration::from_mins(2);

/// Default of `cost.inspect_body` in bytes, which fits requests with several images. The images of a request to the APIs
/// of OpenAI, Anthropic and Google have at most 5 to 20 MB each.
pub(super) const LLM_INSPECT_BODY: usize = 16 << 20;

/// The default and the maximum of `inspect_body`, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct InspectBounds {
    /// The default of `cost.inspect_body`.
    pub default: usize,
    /// The memory for all bodies, which a single body must not exceed.
    pub max: usize,
}

impl InspectBounds {
    /// Report a written `inspect_body` that exceeds the memory for all bodies.
    pub(super) fn check(self, written: Option<&Text>, size: usize, reader: &mut Validator<'_>) {
        let Some(written) = written.filter(|_| size > self.max) else { return };
        let message = format!(
            "the gateway would read bodies of up to {size} bytes, but buffers at most {} bytes for all bodies together \
             (`server.max_buffered`)",
            self.max
        );
        let hint = format!("set `inspect_body` to at most \"{}B\", or raise `max_buffered`", self.max);
        reader.push_issue(Issue::new(written.span(), message).with_hint(hint));
    }
}

/// What the costs of all limits have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct CostContext<'a> {
    /// The default and the maximum of `inspect_body`.
    pub inspect: InspectBounds,
    /// The compiled price lists.
    pub prices: &'a PriceLists,
}

/// Compile an LLM cost.
pub(super) fn llm_cost(table: &CostTable, context: CostContext<'_>, reader: &mut Validator<'_>) -> LlmCost {
    reader.one_of(table.llm.as_ref(), (), &[("auto", ())]);
    let tokens = |reader: &mut Validator<'_>, value: &Option<Spanned<i64>>, default| {
        reader.number(value.as_ref(), 0..MAX_TOKENS as i64 + 1, default) as u64
    };
    let estimate = InputEstimate {
        bytes_per_token: table.bytes_per_token.as_ref().map(|bytes| reader.number(Some(bytes), 1..1001, 1) as u64),
        image: table.image_tokens.as_ref().map(|_| tokens(reader, &table.image_tokens, MEDIA_TOKENS)),
        audio: tokens(reader, &table.audio_tokens, MEDIA_TOKENS),
        document: tokens(reader, &table.document_tokens, DOCUMENT_TOKENS),
        max_output: table
            .max_reserved_output
            .as_ref()
            .map(|max| reader.number(Some(max), 1..MAX_TOKENS as i64 + 1, 1) as u64),
        default_output: tokens(reader, &table.default_output, DEFAULT_OUTPUT),
    };
    let weights = model_weights(table, context.prices, reader);
    let max_body = reader.size(table.inspect_body.as_ref(), context.inspect.default);
    context.inspect.check(table.inspect_body.as_ref(), max_body, reader);
    let learns_output = reader.one_of(table.reserve_output.as_ref(), false, &[("max", false), ("p95", true)]);
    let cuts = reader.one_of(table.on_exhausted.as_ref(), false, &[("finish", false), ("cut", true)]);
    if let (true, true, Some(written)) = (learns_output, cuts, &table.reserve_output) {
        let issue = Issue::new(written.span(), "with `on_exhausted = \"cut\"`, one response in 20 would be cut");
        reader.push_issue(issue.with_hint("remove `on_exhausted`, or set reserve_output = \"max\""));
    }
    LlmCost {
        weights,
        estimate,
        max_body,
        unread_cost: table
            .reserve
            .as_ref()
            .map(|reserve| reader.number(Some(reserve), 0..EXACT_INTEGER_LIMIT as i64, 0) as u64),
        learns_output,
        cuts,
        on_abort: reader.one_of(
            table.on_abort.as_ref(),
            OnAbort::Reservation,
            &[("reservation", OnAbort::Reservation), ("estimate", OnAbort::Estimate)],
        ),
        unknown: reader.one_of(
            table.unknown.as_ref(),
            UnknownOperation::Reserve,
            &[
                ("reserve", UnknownOperation::Reserve),
                ("free", UnknownOperation::Free),
                ("reject", UnknownOperation::Reject),
            ],
        ),
        max_retry_wait: reader.duration(table.max_retry_wait.as_ref(), MAX_RETRY_WAIT),
        provider_headers: table.provider_headers.as_ref().is_some_and(|keeps| *keeps.get_ref()),
        includes_usage: table.include_usage.as_ref().is_none_or(|includes| *includes.get_ref()),
        usage: table.usage.as_ref().map_or(UsageFormat::Auto, |usage| usage_format(usage, reader)),
    }
}

/// Report keys that require `llm`, in a table without `llm`.
pub(super) fn check_without_llm(table: &CostTable, reader: &mut Validator<'_>) {
    let keys = [
        ("default_output", table.default_output.as_ref().map(|key| key.span())),
        ("max_reserved_output", table.max_reserved_output.as_ref().map(|key| key.span())),
        ("reserve_output", table.reserve_output.as_ref().map(|key| key.span())),
        ("bytes_per_token", table.bytes_per_token.as_ref().map(|key| key.span())),
        ("image_tokens", table.image_tokens.as_ref().map(|key| key.span())),
        ("document_tokens", table.document_tokens.as_ref().map(|key| key.span())),
        ("audio_tokens", table.audio_tokens.as_ref().map(|key| key.span())),
        ("weights", table.weights.as_ref().map(|key| key.span())),
        ("prices", table.prices.as_ref().map(|key| key.span())),
        ("models", table.models.values().next().map(|key| key.span())),
        ("inspect_body", table.inspect_body.as_ref().map(|key| key.span())),
        ("reserve", table.reserve.as_ref().map(|key| key.span())),
        ("on_exhausted", table.on_exhausted.as_ref().map(|key| key.span())),
        ("on_abort", table.on_abort.as_ref().map(|key| key.span())),
        ("unknown", table.unknown.as_ref().map(|key| key.span())),
        ("max_retry_wait", table.max_retry_wait.as_ref().map(|key| key.span())),
        ("provider_headers", table.provider_headers.as_ref().map(|key| key.span())),
        ("include_usage", table.include_usage.as_ref().map(|key| key.span())),
        ("usage", table.usage.as_ref().map(|key| key.span())),
    ];
    for (key, span) in keys {
        if let Some(span) = span {
            let issue = Issue::new(span, format!("`{key}` requires `llm`"));
            reader.push_missing(issue.with_hint("cost = { llm = \"auto\", … }"));
        }
    }
}

/// What the cost of a cache write is by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CacheWrites {
    /// The cost of an input token.
    AsInput,
    /// The prices of Anthropic, which are the same multiples of the input price for all models.
    AsPriced,
}

/// Compile weights. Missing weights have the values in `standard`. If `input` or `output` is set, it is also the default
/// of the other kinds of input or output.
fn weights(written: &TokenWeights, standard: &Weights, writes: CacheWrites, reader: &mut Validator<'_>) -> Weights {
    use TokenKind::{
        AudioInput, AudioOutput, CacheWrite1h, CacheWrite5m, CachedInput, ImageInput, ImageOutput, Input, Output,
        Reasoning,
    };
    let mut tokens = standard.tokens;
    tokens[Input as usize] = weight(written.input.as_ref(), tokens[Input as usize], reader);
    tokens[Output as usize] = weight(written.output.as_ref(), tokens[Output as usize], reader);
    let hundredths = |five_minutes, one_hour| match writes {
        CacheWrites::AsInput => (100, 100),
        CacheWrites::AsPriced => (five_minutes, one_hour),
    };
    let (five_minutes, one_hour) = hundredths(125, 200);
    for (kind, key, base, percent) in [
        (CachedInput, &written.cached_input, Input, 100),
        (CacheWrite5m, &written.cache_write_5m, Input, five_minutes),
        (CacheWrite1h, &written.cache_write_1h, Input, one_hour),
        (AudioInput, &written.audio_input, Input, 100),
        (ImageInput, &written.image_input, Input, 100),
        (Reasoning, &written.reasoning, Output, 100),
        (AudioOutput, &written.audio_output, Output, 100),
        (ImageOutput, &written.image_output, Output, 100),
    ] {
        let is_base_set = if base == Input { written.input.is_some() } else { written.output.is_some() };
        let default = if is_base_set { tokens[base as usize] * percent / 100 } else { tokens[kind as usize] };
        tokens[kind as usize] = weight(key.as_ref(), default, reader);
    }
    let request = written.request.as_ref().map(|request| weight(Some(request), 0, reader).saturating_mul(PARTS));
    let batch = written.batch.as_ref().map(|batch| (reader.fraction(Some(batch), 0..=1, 1.0) * PARTS as f64) as u64);
    let multiple = |written: &Option<Spanned<f64>>, default, reader: &mut Validator<'_>| match written {
        Some(multiple) => (reader.fraction(Some(multiple), 1..=100, 1.0) * PARTS as f64).round() as u64,
        None => default,
    };
    Weights {
        tokens,
        request: request.unwrap_or(standard.request),
        batch: batch.unwrap_or(standard.batch),
        priority: multiple(&written.priority, standard.priority, reader),
        fast: multiple(&written.fast, standard.fast, reader),
        long_context: written
            .long_context
            .as_ref()
            .map_or(standard.long_context, |long| long_context(long, &tokens, reader)),
    }
}

/// Compile the weights of requests with a long input. Kinds of tokens without an own weight cost proportionally more.
fn long_context(
    written: &Spanned<shorthand::LongContext>,
    tokens: &KindWeights,
    reader: &mut Validator<'_>,
) -> Option<LongContext> {
    let span = written.span();
    let long = written.get_ref();
    reader.required(long.above.as_ref(), &span, "above", "200000")?;
    let above = reader.number(long.above.as_ref(), 1..MAX_TOKENS as i64 + 1, 1) as u64;
    let input = (tokens[TokenKind::Input as usize], long.input.as_ref());
    let output = (tokens[TokenKind::Output as usize], long.output.as_ref());
    let [input, output] = [input, output].map(|(base, written)| (base, weight(written, base, reader)));
    let scaled = |kind: usize| {
        let (base, long) = if kind < INPUT_KINDS { input } else { output };
        // Weights have at most 40 bits, so the product does not overflow.
        let scaled = u128::from(tokens[kind]) * u128::from(long) / u128::from(base.max(1));
        u64::try_from(scaled).unwrap_or(u64::MAX)
    };
    Some(LongContext { above, tokens: std::array::from_fn(scaled) })
}

/// Return a weight as an integer, in [`PARTS`].
fn weight(written: Option<&Spanned<f64>>, default: u64, reader: &mut Validator<'_>) -> u64 {
    let Some(written) = written else { return default };
    let parts = reader.fraction(Some(written), 0..=MAX_WEIGHT, 0.0) * PARTS as f64;
    // The product may differ slightly from an integer, because binary floating point cannot represent all decimal
    // fractions.
    if (parts - parts.round()).abs() > 1e-3 {
        let issue = Issue::new(written.span(), format!("{} has more than six decimal places", written.get_ref()));
        reader.push_issue(issue.with_hint("choose a larger unit, because weights have a resolution of 0.000001"));
    }
    parts.round() as u64
}

// === `[prices.NAME]` ===

/// The compiled price lists, by name.
pub(super) type PriceLists = BTreeMap<String, Vec<(Wildcard, Weights)>>;

/// Compile the price lists.
pub(super) fn price_lists(config: &Config, reader: &mut Validator<'_>) -> PriceLists {
    let mut lists = PriceLists::new();
    for (name, list) in &config.prices {
        reader.check_name(list.span(), name);
        let mut models = Vec::new();
        for (model, written) in list.get_ref() {
            let span = written.span();
            let prices = written.get_ref();
            reader.required(prices.input.as_ref(), &span, "input", "1.25");
            let free = Weights { tokens: [0; KINDS], ..Weights::default() };
            let compiled = weights(prices, &free, CacheWrites::AsPriced, reader);
            models.push((Wildcard::new(&model.to_ascii_lowercase()), compiled));
        }
        if models.is_empty() {
            let issue = Issue::new(list.span(), format!("price list `{name}` has no models"));
            reader.push_issue(issue.with_hint("\"*\" = { input = 5, output = 25 }"));
        }
        lists.insert(name.clone(), models);
    }
    lists
}

/// Return the largest weight of each kind of token among all models of a list.
fn dearest(models: &[(Wildcard, Weights)]) -> Weights {
    let mut dearest = Weights { tokens: [0; KINDS], ..Weights::default() };
    for (_, weights) in models {
        let long = weights.long_context.map_or([0; KINDS], |long| long.tokens);
        dearest.tokens = std::array::from_fn(|kind| dearest.tokens[kind].max(weights.tokens[kind]).max(long[kind]));
        dearest.request = dearest.request.max(weights.request);
        dearest.priority = dearest.priority.max(weights.priority);
        dearest.fast = dearest.fast.max(weights.fast);
    }
    dearest
}

/// Compile the weights of a limit: those of its price list, or `weights` and `models`.
fn model_weights(table: &CostTable, lists: &PriceLists, reader: &mut Validator<'_>) -> ModelWeights {
    let listed = table.prices.as_ref().and_then(|name| {
        let found = lists.get(name.get_ref());
        if found.is_none() {
            let issue = Issue::new(name.span(), format!("there is no price list `{}`", name.get_ref()));
            reader.push_issue(issue.with_hint(format!("add [prices.{}], or correct the name", name.get_ref())));
        }
        if let Some(model) = table.models.values().next() {
            let issue = Issue::new(model.span(), "`models` cannot be combined with `prices`");
            reader.push_issue(issue.with_hint("add the model to the price list"));
        }
        found
    });
    let standard = listed.map_or_else(Weights::default, |models| dearest(models));
    let default = table
        .weights
        .as_ref()
        .map_or(standard, |written| weights(written.get_ref(), &standard, CacheWrites::AsInput, reader));
    let models = table.models.iter().map(|(model, written)| {
        let weights = weights(written.get_ref(), &default, CacheWrites::AsInput, reader);
        (Wildcard::new(&model.to_ascii_lowercase()), weights)
    });
    let models: Vec<_> = models.collect();
    ModelWeights { default, models: listed.cloned().unwrap_or(models) }
}

fn usage_format(written: &Spanned<UsagePointers>, reader: &mut Validator<'_>) -> UsageFormat {
    let span = written.span();
    let UsagePointers { input, cached_input, output } = written.get_ref();
    reader.required(input.as_ref(), &span, "input", "\"/usage/input_tokens\"");
    reader.required(output.as_ref(), &span, "output", "\"/usage/output_tokens\"");
    let mut paths = Vec::new();
    let mut counts = Vec::new();
    let written = [(input, CountKind::Input), (cached_input, CountKind::CachedInput), (output, CountKind::Output)];
    for (pointer, count) in written {
        if let Some(path) = pointer.as_ref().and_then(|text| json_path(text, reader)) {
            paths.push(path);
            counts.push(count);
        }
    }
    UsageFormat::Paths { paths: paths.into(), counts: counts.into() }
}

/// Parse a JSON pointer (RFC 6901).
fn json_path(text: &Text, reader: &mut Validator<'_>) -> Option<JsonPath> {
    let segments = text.get_ref().strip_prefix('/').map(|rest| rest.split('/'));
    let path: Option<JsonPath> =
        segments.map(|segments| segments.map(|segment| segment.replace("~1", "/").replace("~0", "~").into()).collect());
    let path = path.filter(|path| path.len() <= MAX_SEGMENTS);
    if path.is_none() {
        let issue = Issue::new(text.span(), format!("`{}` is not a JSON pointer to a count", text.get_ref()));
        reader.push_issue(issue.with_hint(format!("such as \"/usage/input_tokens\", with up to {MAX_SEGMENTS} keys")));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST_HEADER: HeaderName = HeaderName::from_static("x-cost");

    fn headers(values: &[&'static str]) -> HeaderMap {
        values.iter().map(|value| (COST_HEADER, http::HeaderValue::from_static(value))).fold(
            HeaderMap::new(),
            |mut map, (name, value)| {
                map.append(name, value);
                map
            },
        )
    }

    #[test]
    fn request_cost_header_is_used_only_from_trusted_proxies() {
        let cost = Cost::Request { header: COST_HEADER, max: 100, default: 7 };
        let broken = Err(CostError(COST_HEADER));
        for (values, trusted, expected) in [
            (&["5"][..], true, Ok(5)),
            (&["0"], true, Ok(0)),
            (&["1000"], true, Ok(100)),
            (&[], true, Ok(7)),
            (&["5"], false, Ok(7)),
            (&["-5"], true, broken.clone()),
            (&["+5"], true, broken.clone()),
            (&["5.0"], true, broken.clone()),
            (&[""], true, broken.clone()),
            (&["99999999999999999999"], true, broken.clone()),
            (&["5", "6"], true, broken),
        ] {
            assert_eq!(cost.request_cost(&headers(values), trusted), expected, "{values:?} {trusted}");
        }
    }

    #[test]
    fn invalid_response_cost_falls_back_to_default() {
        let cost = Cost::Response { header: COST_HEADER, default: 3 };
        for (values, expected) in [(&["5"][..], 5), (&["0"], 0), (&[], 3), (&["many"], 3), (&["1", "2"], 3)] {
            assert_eq!(cost.response_cost(&headers(values)), Some(expected), "{values:?}");
        }
        assert_eq!(Cost::Fixed(1).response_cost(&headers(&["5"])), None);
    }

    #[test]
    fn refund_statuses_are_numbers_or_classes() {
        for (text, expected) in [
            ("5xx", Some(500..=599)),
            ("404", Some(404..=404)),
            ("6xx", None),
            ("xx", None),
            ("99", None),
            ("5XX", None),
            ("", None),
        ] {
            assert_eq!(RefundOn::parse(text), expected, "{text}");
        }
    }
}
