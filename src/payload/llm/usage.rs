//! Token counts in the formats of LLM providers, and the weights of tokens.
//!
//! | provider | location of the token counts | cached input tokens |
//! |---|---|---|
//! | Bedrock Converse | `usage` with `inputTokens`, `cacheReadInputTokens` and `cacheWriteInputTokens` | added to the input |
//! | OpenAI Chat Completions, Mistral, DeepSeek, most compatible servers | `usage` with `prompt_tokens` | part of the input |
//! | OpenAI Responses | `usage` or `response.usage` with `input_tokens` and `input_tokens_details` | part of the input |
//! | Anthropic Messages | `usage` or `message.usage` with `cache_read_input_tokens` | added to the input |
//! | Gemini | `usageMetadata` | part of the input |
//! | Ollama | `prompt_eval_count`, `eval_count` | not reported |
//! | Cohere | `usage`, `meta` or `delta.usage` with `billed_units` | not reported |

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::payload::wildcard::Wildcard;

/// Maximum plausible number of tokens. The gateway ignores a report with a larger count, because this count would use
/// up a quota for years.
pub const MAX_TOKENS: u64 = 1_000_000_000;

/// The numbers of tokens that a request used. Some counts are parts of others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Number of input tokens, including all parts below.
    pub input: u64,
    /// Number of input tokens that the provider read from its cache.
    pub cached_input: u64,
    /// Number of input tokens that the provider wrote to its cache for 5 minutes.
    pub cache_write_5m: u64,
    /// Number of input tokens that the provider wrote to its cache for 1 hour.
    pub cache_write_1h: u64,
    /// Number of input tokens of audio.
    pub audio_input: u64,
    /// Number of input tokens of images.
    pub image_input: u64,
    /// Number of output tokens, including all parts below.
    pub output: u64,
    /// Number of output tokens of the reasoning.
    pub reasoning: u64,
    /// Number of output tokens of audio.
    pub audio_output: u64,
    /// Number of output tokens of images.
    pub image_output: u64,
    /// The service tier, if the provider reports one that may have another price.
    pub tier: Option<ServiceTier>,
}

/// A service tier whose tokens may have other prices than those of the standard tier. The order is that of the usual
/// prices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceTier {
    /// Part of a batch.
    Batch,
    /// The standard tier, although the client may have requested another one.
    Standard,
    /// Priority processing (OpenAI, Bedrock).
    Priority,
    /// Fast output (`speed` of Anthropic, latency-optimized inference of Bedrock).
    Fast,
}

impl ServiceTier {
    /// Return the tier that a client requests. Cheaper tiers count only if the provider reports them.
    pub fn requested(name: &str) -> Option<Self> {
        match name {
            "priority" => Some(ServiceTier::Priority),
            "fast" | "optimized" => Some(ServiceTier::Fast),
            _ => None,
        }
    }

    /// Return the tier that a provider reports.
    pub fn reported(name: &str) -> Option<Self> {
        match name {
            "batch" => Some(ServiceTier::Batch),
            "default" | "standard" => Some(ServiceTier::Standard),
            _ => ServiceTier::requested(name),
        }
    }
}

/// Kinds of tokens as metric labels.
pub const COUNTED_KINDS: [&str; 5] = ["input", "cached_input", "cache_write", "output", "reasoning"];

impl TokenUsage {
    /// Return the tokens of each of the [`COUNTED_KINDS`], which do not overlap.
    pub fn by_kind(self) -> [u64; COUNTED_KINDS.len()] {
        let cache_write = self.cache_write_5m.saturating_add(self.cache_write_1h);
        let input = self.input.saturating_sub(self.cached_input).saturating_sub(cache_write);
        [input, self.cached_input, cache_write, self.output.saturating_sub(self.reasoning), self.reasoning]
    }

    /// Return the larger value of each count. Providers report totals, so the counts of two reports are not added.
    #[must_use]
    pub fn max(self, other: TokenUsage) -> TokenUsage {
        TokenUsage {
            input: self.input.max(other.input),
            cached_input: self.cached_input.max(other.cached_input),
            cache_write_5m: self.cache_write_5m.max(other.cache_write_5m),
            cache_write_1h: self.cache_write_1h.max(other.cache_write_1h),
            audio_input: self.audio_input.max(other.audio_input),
            image_input: self.image_input.max(other.image_input),
            output: self.output.max(other.output),
            reasoning: self.reasoning.max(other.reasoning),
            audio_output: self.audio_output.max(other.audio_output),
            image_output: self.image_output.max(other.image_output),
            tier: other.tier.or(self.tier),
        }
    }
}

/// Parse a usage object of any provider. Return `None` if the object has no count, or if a count is invalid: negative,
/// with a fraction, larger than [`MAX_TOKENS`], or of another type.
pub fn parse_usage(json: &[u8]) -> Option<TokenUsage> {
    // serde would read an array as the fields in their order.
    if !json.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    serde_json::from_slice::<UsageObject<'_>>(json).ok()?.tokens()
}

/// Parse a single count. Return `None` if the count is absent or invalid.
pub fn parse_count(json: &[u8]) -> Option<u64> {
    match serde_json::from_slice(json).ok()? {
        Count::Valid(count) => Some(count),
        Count::Absent | Count::Invalid => None,
    }
}

/// The fields of the usage objects of all providers. A missing field and `null` have the same meaning.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct UsageObject<'a> {
    // Fields of OpenAI Chat Completions.
    prompt_tokens: Count,
    completion_tokens: Count,
    total_tokens: Count,
    prompt_tokens_details: Option<Details>,
    completion_tokens_details: Option<Details>,
    // Field of DeepSeek.
    prompt_cache_hit_tokens: Count,
    // Fields of OpenAI Responses and Anthropic.
    input_tokens: Count,
    output_tokens: Count,
    input_tokens_details: Option<Details>,
    output_tokens_details: Option<Details>,
    // Anthropic reports these tokens in addition to `input_tokens`.
    cache_creation_input_tokens: Count,
    cache_read_input_tokens: Count,
    cache_creation: Option<CacheCreation>,
    #[serde(borrow)]
    iterations: Option<Vec<Iteration<'a>>>,
    #[serde(borrow)]
    service_tier: Option<Cow<'a, str>>,
    #[serde(borrow)]
    speed: Option<Cow<'a, str>>,
    // Counts that Bedrock adds to the last event of a model's stream.
    #[serde(rename = "inputTokenCount")]
    invocation_input: Count,
    #[serde(rename = "outputTokenCount")]
    invocation_output: Count,
    #[serde(rename = "cacheReadInputTokenCount")]
    invocation_cache_read: Count,
    #[serde(rename = "cacheWriteInputTokenCount")]
    invocation_cache_write: Count,
    // Fields of Gemini.
    #[serde(rename = "promptTokenCount")]
    prompt_token_count: Count,
    #[serde(rename = "toolUsePromptTokenCount")]
    tool_use_prompt_token_count: Count,
    #[serde(rename = "cachedContentTokenCount")]
    cached_content_token_count: Count,
    #[serde(rename = "candidatesTokenCount")]
    candidates_token_count: Count,
    #[serde(rename = "thoughtsTokenCount")]
    thoughts_token_count: Count,
    #[serde(rename = "totalTokenCount")]
    total_token_count: Count,
    #[serde(rename = "promptTokensDetails", borrow)]
    prompt_modalities: Option<Vec<Modality<'a>>>,
    #[serde(rename = "candidatesTokensDetails", borrow)]
    candidates_modalities: Option<Vec<Modality<'a>>>,
    // Fields of Bedrock Converse, which reports cached tokens in addition to `inputTokens`.
    #[serde(rename = "inputTokens")]
    bedrock_input: Count,
    #[serde(rename = "outputTokens")]
    bedrock_output: Count,
    #[serde(rename = "totalTokens")]
    bedrock_total: Count,
    #[serde(rename = "cacheReadInputTokens")]
    bedrock_cache_read: Count,
    #[serde(rename = "cacheWriteInputTokens")]
    bedrock_cache_write: Count,
    // Fields of Cohere.
    billed_units: Option<Units>,
    tokens: Option<Units>,
}

/// The details of the input or the output in the format of OpenAI.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Count,
    // Field of OpenRouter.
    cache_write_tokens: Count,
    audio_tokens: Count,
    image_tokens: Count,
    reasoning_tokens: Count,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
struct CacheCreation {
    ephemeral_1h_input_tokens: Count,
}

/// A part of a response of Anthropic. The counts of the whole response do not include parts of the type `compaction`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Iteration<'a> {
    #[serde(borrow)]
    r#type: Option<Cow<'a, str>>,
    input_tokens: Count,
    output_tokens: Count,
    cache_creation_input_tokens: Count,
    cache_read_input_tokens: Count,
    cache_creation: Option<CacheCreation>,
}

impl Iteration<'_> {
    fn tokens(&self) -> Option<TokenUsage> {
        let cache_read = self.cache_read_input_tokens.get()?;
        let cache_write = self.cache_creation_input_tokens.get()?;
        let one_hour = self.cache_creation.unwrap_or_default().ephemeral_1h_input_tokens.get()?;
        Some(TokenUsage {
            input: self.input_tokens.get()? + cache_write + cache_read,
            cached_input: cache_read,
            cache_write_5m: cache_write.saturating_sub(one_hour),
            cache_write_1h: one_hour.min(cache_write),
            output: self.output_tokens.get()?,
            ..TokenUsage::default()
        })
    }
}

/// The tokens of one kind of content in the format of Gemini.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Modality<'a> {
    #[serde(borrow)]
    modality: Option<Cow<'a, str>>,
    token_count: Count,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Units {
    input_tokens: Count,
    output_tokens: Count,
}

impl TokenUsage {
    /// Add the tokens of another part of a response of Anthropic.
    fn plus(self, other: TokenUsage) -> TokenUsage {
        TokenUsage {
            input: self.input + other.input,
            cached_input: self.cached_input + other.cached_input,
            cache_write_5m: self.cache_write_5m + other.cache_write_5m,
            cache_write_1h: self.cache_write_1h + other.cache_write_1h,
            output: self.output + other.output,
            ..self
        }
    }

    /// Set the parts of the input and the output that OpenAI reports as details.
    fn with_details(self, input: Option<Details>, output: Option<Details>) -> Option<Self> {
        let input = input.unwrap_or_default();
        let output = output.unwrap_or_default();
        Some(TokenUsage {
            cached_input: self.cached_input.max(input.cached_tokens.get()?),
            cache_write_5m: self.cache_write_5m.max(input.cache_write_tokens.get()?),
            audio_input: input.audio_tokens.get()?,
            image_input: input.image_tokens.get()?,
            reasoning: output.reasoning_tokens.get()?,
            audio_output: output.audio_tokens.get()?,
            image_output: output.image_tokens.get()?,
            ..self
        })
    }
}

/// Return the number of tokens of one kind of content.
fn modality_tokens(modalities: Option<&Vec<Modality<'_>>>, name: &str) -> Option<u64> {
    let of_kind = modalities.into_iter().flatten().filter(|one| one.modality.as_deref() == Some(name));
    of_kind.map(|one| one.token_count.get()).sum()
}

impl UsageObject<'_> {
    fn tokens(self) -> Option<TokenUsage> {
        let mut total = self.total_tokens;
        let mut usage = if self.prompt_token_count.is_present() || self.candidates_token_count.is_present() {
            total = self.total_token_count;
            let reasoning = self.thoughts_token_count.get()?;
            TokenUsage {
                input: self.prompt_token_count.get()? + self.tool_use_prompt_token_count.get()?,
                cached_input: self.cached_content_token_count.get()?,
                audio_input: modality_tokens(self.prompt_modalities.as_ref(), "AUDIO")?,
                image_input: modality_tokens(self.prompt_modalities.as_ref(), "IMAGE")?,
                output: self.candidates_token_count.get()? + reasoning,
                reasoning,
                audio_output: modality_tokens(self.candidates_modalities.as_ref(), "AUDIO")?,
                image_output: modality_tokens(self.candidates_modalities.as_ref(), "IMAGE")?,
                ..TokenUsage::default()
            }
        } else if self.prompt_tokens.is_present() || self.completion_tokens.is_present() {
            let input = self.prompt_tokens.get()?;
            let output = self.completion_tokens.get()?;
            let cached_input = self.prompt_cache_hit_tokens.get()?;
            TokenUsage { input, cached_input, output, ..TokenUsage::default() }
                .with_details(self.prompt_tokens_details, self.completion_tokens_details)?
        } else if self.input_tokens.is_present() || self.output_tokens.is_present() {
            let response = Iteration {
                r#type: None,
                input_tokens: self.input_tokens,
                output_tokens: self.output_tokens,
                cache_creation_input_tokens: self.cache_creation_input_tokens,
                cache_read_input_tokens: self.cache_read_input_tokens,
                cache_creation: self.cache_creation,
            };
            let iterations = self.iterations.iter().flatten();
            let others = iterations.filter(|iteration| iteration.r#type.as_deref() == Some("compaction"));
            others
                .map(Iteration::tokens)
                .try_fold(response.tokens()?, |sum, other| Some(sum.plus(other?)))?
                .with_details(self.input_tokens_details, self.output_tokens_details)?
        } else if self.invocation_input.is_present() || self.invocation_output.is_present() {
            let (cache_read, cache_write) = (self.invocation_cache_read.get()?, self.invocation_cache_write.get()?);
            TokenUsage {
                input: self.invocation_input.get()? + cache_write + cache_read,
                cached_input: cache_read,
                cache_write_5m: cache_write,
                output: self.invocation_output.get()?,
                ..TokenUsage::default()
            }
        } else if self.bedrock_input.is_present() || self.bedrock_output.is_present() {
            total = self.bedrock_total;
            let cache_read = self.bedrock_cache_read.get()?;
            let cache_write = self.bedrock_cache_write.get()?;
            TokenUsage {
                input: self.bedrock_input.get()? + cache_write + cache_read,
                cached_input: cache_read,
                cache_write_5m: cache_write,
                output: self.bedrock_output.get()?,
                ..TokenUsage::default()
            }
        } else if let Some(units) = self.billed_units.or(self.tokens) {
            if !units.input_tokens.is_present() && !units.output_tokens.is_present() {
                return None;
            }
            let input = units.input_tokens.get()?;
            let output = units.output_tokens.get()?;
            TokenUsage { input, output, ..TokenUsage::default() }
        } else if self.total_tokens.is_present() {
            TokenUsage { input: self.total_tokens.get()?, ..TokenUsage::default() }
        } else {
            return None;
        };
        let tier = |name: &Option<Cow<'_, str>>| name.as_deref().and_then(ServiceTier::reported);
        usage.tier = match (tier(&self.service_tier), tier(&self.speed)) {
            (_, Some(ServiceTier::Fast)) => Some(ServiceTier::Fast),
            (tier, speed) => tier.or(speed),
        };
        // Some servers count reasoning tokens only in the total: xAI, and Gemini behind OpenAI-compatible servers.
        usage.output += total.get()?.saturating_sub(usage.input + usage.output);
        Some(usage)
    }
}

/// A count as the provider reports it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Count {
    #[default]
    Absent,
    Valid(u64),
    /// The value is not a valid number of tokens.
    Invalid,
}

impl Count {
    fn is_present(self) -> bool {
        self != Count::Absent
    }

    /// Return the count, 0 if the field is absent, or `None` if the value is invalid.
    fn get(self) -> Option<u64> {
        match self {
            Count::Absent => Some(0),
            Count::Valid(count) => Some(count),
            Count::Invalid => None,
        }
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CountVisitor;
        impl<'de> Visitor<'de> for CountVisitor {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_unit<E>(self) -> Result<Count, E> {
                Ok(Count::Absent)
            }
            fn visit_u64<E>(self, count: u64) -> Result<Count, E> {
                Ok(if count <= MAX_TOKENS { Count::Valid(count) } else { Count::Invalid })
            }
            fn visit_i64<E>(self, _: i64) -> Result<Count, E> {
                Ok(Count::Invalid)
            }
            fn visit_f64<E>(self, count: f64) -> Result<Count, E> {
                // Cohere writes counts as floating-point numbers such as `5.0`.
                let is_count = count.fract() == 0.0 && (0.0..=MAX_TOKENS as f64).contains(&count);
                Ok(if is_count { Count::Valid(count as u64) } else { Count::Invalid })
            }
            fn visit_bool<E>(self, _: bool) -> Result<Count, E> {
                Ok(Count::Invalid)
            }
            fn visit_str<E>(self, _: &str) -> Result<Count, E> {
                Ok(Count::Invalid)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Count, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Count::Invalid)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Count, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Count::Invalid)
            }
        }
        deserializer.deserialize_any(CountVisitor)
    }
}

// === Weights of tokens, which determine the cost of a request in the unit of the limit ===

/// Maximum weight of a token, in the unit of the limit.
pub const MAX_WEIGHT: i32 = 1_000_000;

/// Number of the parts of a unit in which weights are counted. Providers print prices such as 0.0375 dollars per
/// million tokens, which is 0.0375 micro-dollars per token.
pub const PARTS: u64 = 1_000_000;

/// Maximum cost. Lua 5.1, which runs the scripts in Redis, represents integers exactly only up to this value.
const MAX_COST: u64 = (1 << 53) - 1;

/// A kind of token, each with its own weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Input tokens of no other kind.
    Input,
    /// Input tokens that were read from the provider's cache.
    CachedInput,
    /// Input tokens that were written to the provider's cache for 5 minutes.
    CacheWrite5m,
    /// Input tokens that were written to the provider's cache for 1 hour.
    CacheWrite1h,
    /// Input tokens of audio.
    AudioInput,
    /// Input tokens of images.
    ImageInput,
    /// Output tokens of no other kind.
    Output,
    /// Output tokens of the reasoning.
    Reasoning,
    /// Output tokens of audio.
    AudioOutput,
    /// Output tokens of images.
    ImageOutput,
}

/// Number of kinds of tokens.
pub const KINDS: usize = 10;

/// Number of kinds of input tokens, which are the first kinds.
pub const INPUT_KINDS: usize = 6;

/// Cost of one token of each [`TokenKind`], in millionths of the limit's unit.
pub type KindWeights = [u64; KINDS];

/// The weights of a model, in [`PARTS`] of the limit's unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Cost of one token of each kind.
    pub tokens: KindWeights,
    /// Cost of each request, in addition to its tokens.
    pub request: u64,
    /// Share of the cost of the tokens in a batch, in [`PARTS`].
    pub batch: u64,
    /// Multiple of the cost of the tokens in the tier `priority`, in [`PARTS`].
    pub priority: u64,
    /// Multiple of the cost of the tokens with fast output, in [`PARTS`].
    pub fast: u64,
    /// Weights of requests with a long input.
    pub long_context: Option<LongContext>,
}

/// The weights of requests with a long input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongContext {
    /// The weights apply to requests with more input tokens than this number.
    pub above: u64,
    /// Cost of one token of each kind.
    pub tokens: KindWeights,
}

/// By default, each token costs 1.
impl Default for Weights {
    fn default() -> Self {
        Weights { tokens: [PARTS; KINDS], request: 0, batch: PARTS, priority: PARTS, fast: PARTS, long_context: None }
    }
}

impl Weights {
    /// Return the cost of the used tokens: the weighted sum, rounded up.
    pub fn cost(&self, usage: TokenUsage) -> u64 {
        let long = self.long_context.filter(|long| usage.input > long.above);
        let weights = long.map_or(self.tokens, |long| long.tokens);
        // A count that exceeds the rest of its total is reduced to this rest.
        let (mut input, mut output) = (usage.input, usage.output);
        let take = |rest: &mut u64, count: u64| {
            let taken = count.min(*rest);
            *rest -= taken;
            taken
        };
        let parts = [
            (TokenKind::CachedInput, take(&mut input, usage.cached_input)),
            (TokenKind::CacheWrite1h, take(&mut input, usage.cache_write_1h)),
            (TokenKind::CacheWrite5m, take(&mut input, usage.cache_write_5m)),
            (TokenKind::AudioInput, take(&mut input, usage.audio_input)),
            (TokenKind::ImageInput, take(&mut input, usage.image_input)),
            (TokenKind::Reasoning, take(&mut output, usage.reasoning)),
            (TokenKind::AudioOutput, take(&mut output, usage.audio_output)),
            (TokenKind::ImageOutput, take(&mut output, usage.image_output)),
            (TokenKind::Input, input),
            (TokenKind::Output, output),
        ];
        // The sum cannot overflow. Each product is less than 2^104, because a count has 64 bits and a weight has 40
        // bits.
        let tokens = parts.into_iter().map(|(kind, count)| u128::from(count) * u128::from(weights[kind as usize]));
        let mut sum: u128 = tokens.sum();
        let multiple = match usage.tier {
            None | Some(ServiceTier::Standard) => PARTS,
            Some(ServiceTier::Batch) => self.batch,
            Some(ServiceTier::Priority) => self.priority,
            Some(ServiceTier::Fast) => self.fast,
        };
        if multiple != PARTS {
            sum = sum.saturating_mul(multiple.into()).div_ceil(PARTS.into());
        }
        let cost = (sum + u128::from(self.request)).div_ceil(PARTS.into());
        u64::try_from(cost).map_or(MAX_COST, |cost| cost.min(MAX_COST))
    }

    /// Return the cost to reserve before the response, for these numbers of input and output tokens. Every token is
    /// assumed to be of the most expensive kind. `tier` is the service tier that the client requests.
    pub fn reservation(&self, input: u64, output: u64, tier: Option<ServiceTier>) -> u64 {
        let tokens = self.dearest(&self.tokens);
        let long = self.long_context.map(|long| LongContext {
            tokens: std::array::from_fn(|kind| self.dearest(&long.tokens)[kind].max(tokens[kind])),
            ..long
        });
        let usage = TokenUsage { input, output, tier, ..TokenUsage::default() };
        Weights { tokens, long_context: long, ..*self }.cost(usage)
    }

    /// Return weights in which all kinds of input, and all kinds of output, have the largest weight among them.
    fn dearest(&self, weights: &KindWeights) -> KindWeights {
        let (input, output) = weights.split_at(INPUT_KINDS);
        let largest = |weights: &[u64]| weights.iter().copied().max().unwrap_or(0);
        let input = largest(input);
        let output = largest(output);
        std::array::from_fn(|kind| if kind < INPUT_KINDS { input } else { output })
    }

    /// Return the largest weight of an input token.
    pub fn max_input(&self) -> u64 {
        let long = self.long_context.map_or(0, |long| self.dearest(&long.tokens)[0]);
        self.dearest(&self.tokens)[0].max(long)
    }
}

/// The weights of a limit: default weights, and weights for specific models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelWeights {
    /// Weights of models that match no pattern in `models`.
    pub default: Weights,
    /// Weights by model.
    pub models: Vec<(Wildcard, Weights)>,
}

impl ModelWeights {
    /// Return the weights for a model. If several patterns match, the pattern with the most literal characters takes
    /// precedence. If two patterns have the same number of literal characters, a pattern without `*` takes precedence.
    /// The case of the model name is ignored, because some servers ignore it too.
    pub fn for_model(&self, model: Option<&str>) -> Weights {
        model.and_then(|model| self.listed(model)).unwrap_or(self.default)
    }

    /// Return whether the model or the service tier in the response may change the cost.
    pub fn depends_on_response(&self) -> bool {
        let has_tiers = |weights: &Weights| [weights.batch, weights.priority, weights.fast] != [PARTS; 3];
        !self.models.is_empty() || has_tiers(&self.default)
    }

    /// Return whether the weights of a model are the default although those of other models are not.
    pub fn is_unlisted(&self, model: Option<&str>) -> bool {
        !self.models.is_empty() && model.and_then(|model| self.listed(model)).is_none()
    }

    /// Return the weights of a model that matches a pattern.
    pub fn listed(&self, model: &str) -> Option<Weights> {
        if self.models.is_empty() {
            return None;
        }
        Wildcard::best_match(&self.models, &model.to_ascii_lowercase()).copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usage(input: u64, cached_input: u64, output: u64) -> Option<TokenUsage> {
        Some(TokenUsage { input, cached_input, output, ..TokenUsage::default() })
    }

    /// Return weights in thousandths of the unit.
    fn weights(input: u64, cached_input: u64, output: u64) -> Weights {
        let of = |kind: usize| match kind {
            1 => cached_input,
            _ if kind < INPUT_KINDS => input,
            _ => output,
        };
        Weights { tokens: std::array::from_fn(|kind| of(kind) * 1000), ..Weights::default() }
    }

    #[test]
    fn usage_of_each_provider_is_parsed() {
        for (name, json, expected) in [
            ("openai chat", r#"{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21}"#, usage(9, 0, 12)),
            (
                "openai chat, cached",
                r#"{"prompt_tokens":9,"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":0},
                    "completion_tokens_details":{"reasoning_tokens":8}}"#,
                usage(9, 4, 12),
            ),
            (
                "anthropic, compaction",
                r#"{"input_tokens":23000,"output_tokens":1000,"iterations":[
                    {"type":"compaction","input_tokens":180000,"output_tokens":3500},
                    {"type":"message","input_tokens":23000,"output_tokens":1000}]}"#,
                usage(203_000, 0, 4500),
            ),
            (
                "xai, reasoning outside completion_tokens",
                r#"{"prompt_tokens":12,"completion_tokens":1,"total_tokens":399,
                    "completion_tokens_details":{"reasoning_tokens":386}}"#,
                usage(12, 0, 387),
            ),
            (
                "gemini behind an OpenAI-compatible server",
                r#"{"prompt_tokens":21,"completion_tokens":0,"total_tokens":81,
                    "completion_tokens_details":{"reasoning_tokens":60}}"#,
                usage(21, 0, 60),
            ),
            (
                "only the total is complete",
                r#"{"prompt_tokens":10,"completion_tokens":20,"total_tokens":1000}"#,
                usage(10, 0, 990),
            ),
            (
                "the total is too small",
                r#"{"prompt_tokens":10,"completion_tokens":20,"total_tokens":20}"#,
                usage(10, 0, 20),
            ),
            (
                "bedrock converse",
                r#"{"inputTokens":185,"outputTokens":1000,"totalTokens":1185,"cacheReadInputTokens":0,"cacheWriteInputTokens":0}"#,
                usage(185, 0, 1000),
            ),
            (
                "bedrock converse, cached",
                r#"{"inputTokens":5,"outputTokens":7,"totalTokens":42,"cacheReadInputTokens":10,"cacheWriteInputTokens":20}"#,
                usage(35, 10, 7),
            ),
            ("openai chat, null details", r#"{"prompt_tokens":1,"prompt_tokens_details":null}"#, usage(1, 0, 0)),
            ("embeddings", r#"{"prompt_tokens":8,"total_tokens":8}"#, usage(8, 0, 0)),
            (
                "openai responses",
                r#"{"input_tokens":36,"input_tokens_details":{"cached_tokens":30},"output_tokens":87,
                    "output_tokens_details":{"reasoning_tokens":0},"total_tokens":123}"#,
                usage(36, 30, 87),
            ),
            (
                "anthropic",
                r#"{"input_tokens":10,"cache_creation_input_tokens":100,"cache_read_input_tokens":1000,"output_tokens":5,
                    "service_tier":"standard","server_tool_use":{"web_search_requests":0}}"#,
                usage(1110, 1000, 5),
            ),
            ("anthropic, message_delta", r#"{"output_tokens":15}"#, usage(0, 0, 15)),
            (
                "gemini",
                r#"{"promptTokenCount":4,"candidatesTokenCount":10,"thoughtsTokenCount":20,"cachedContentTokenCount":2,
                    "toolUsePromptTokenCount":3,"totalTokenCount":37}"#,
                usage(7, 2, 30),
            ),
            ("gemini, first chunk", r#"{"promptTokenCount":4,"totalTokenCount":4}"#, usage(4, 0, 0)),
            ("deepseek", r#"{"prompt_tokens":9,"completion_tokens":1,"prompt_cache_hit_tokens":5}"#, usage(9, 5, 1)),
            (
                "cohere",
                r#"{"billed_units":{"input_tokens":5.0,"output_tokens":4},"tokens":{"input_tokens":71,"output_tokens":4}}"#,
                usage(5, 0, 4),
            ),
            ("cohere, tokens only", r#"{"tokens":{"input_tokens":71,"output_tokens":4}}"#, usage(71, 0, 4)),
            ("total only", r#"{"total_tokens":7}"#, usage(7, 0, 0)),
        ] {
            let found =
                parse_usage(json.as_bytes()).and_then(|found| usage(found.input, found.cached_input, found.output));
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn implausible_report_is_ignored() {
        for json in [
            "{}",
            "null",
            "[]",
            "7",
            r#"{"prompt_tokens":-5,"completion_tokens":1}"#,
            r#"{"prompt_tokens":5,"completion_tokens":-1}"#,
            r#"{"prompt_tokens":5,"completion_tokens":1.5}"#,
            r#"{"prompt_tokens":5,"completion_tokens":"7"}"#,
            r#"{"prompt_tokens":5,"completion_tokens":true}"#,
            r#"{"prompt_tokens":5,"completion_tokens":[1]}"#,
            r#"{"prompt_tokens":5,"completion_tokens":{"a":1}}"#,
            r#"{"prompt_tokens":5,"completion_tokens":1000000001}"#,
            r#"{"prompt_tokens":5,"completion_tokens":18446744073709551616}"#,
            r#"{"prompt_tokens":5,"completion_tokens":1e300}"#,
            r#"{"prompt_tokens":5,"prompt_tokens":6}"#,
            r#"{"prompt_tokens":5,"completion_tokens":1,"total_tokens":-1}"#,
            r#"{"prompt_tokens":null}"#,
            r#"{"units":7}"#,
            r#"{"billed_units":{}}"#,
        ] {
            assert_eq!(parse_usage(json.as_bytes()), None, "{json}");
        }
        assert_eq!((parse_count(b"7"), parse_count(b"-7"), parse_count(b"x")), (Some(7), None, None));
    }

    #[test]
    fn weighted_sum_is_rounded_up_once() {
        let weighted = weights(1000, 100, 4000);
        for ((input, cached_input, output), expected) in [
            ((0, 0, 0), 0),
            ((10, 0, 5), 30),
            ((10, 10, 0), 1),
            ((11, 11, 0), 2),
            ((11, 1, 0), 11),
            ((5, 9, 0), 1),
            ((u64::MAX, 0, u64::MAX), MAX_COST),
        ] {
            assert_eq!(weighted.cost(usage(input, cached_input, output).unwrap()), expected, "{input} {cached_input}");
        }
        // The sum is rounded up once, not each summand: three tokens that cost about one third each cost 1, not 3.
        assert_eq!(weights(333, 333, 334).cost(usage(2, 1, 1).unwrap()), 1);
    }

    #[test]
    fn parts_of_input_and_output_are_parsed() {
        let part = |json: &str| parse_usage(json.as_bytes()).unwrap();
        let zero = TokenUsage::default();
        for (json, expected) in [
            (
                r#"{"input_tokens":21,"cache_creation_input_tokens":188086,"cache_read_input_tokens":1000,"output_tokens":393,
                    "cache_creation":{"ephemeral_5m_input_tokens":188000,"ephemeral_1h_input_tokens":86},"service_tier":"batch"}"#,
                TokenUsage {
                    input: 189_107,
                    cached_input: 1000,
                    cache_write_5m: 188_000,
                    cache_write_1h: 86,
                    output: 393,
                    tier: Some(ServiceTier::Batch),
                    ..zero
                },
            ),
            (
                r#"{"prompt_tokens":50,"completion_tokens":40,"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":30,"image_tokens":5},
                    "completion_tokens_details":{"reasoning_tokens":9,"audio_tokens":20}}"#,
                TokenUsage {
                    input: 50,
                    cached_input: 4,
                    audio_input: 30,
                    image_input: 5,
                    output: 40,
                    reasoning: 9,
                    audio_output: 20,
                    ..zero
                },
            ),
            (
                r#"{"promptTokenCount":300,"candidatesTokenCount":1290,"thoughtsTokenCount":7,
                    "promptTokensDetails":[{"modality":"TEXT","tokenCount":10},{"modality":"IMAGE","tokenCount":258},{"modality":"AUDIO","tokenCount":32}],
                    "candidatesTokensDetails":[{"modality":"IMAGE","tokenCount":1290}]}"#,
                TokenUsage {
                    input: 300,
                    audio_input: 32,
                    image_input: 258,
                    output: 1297,
                    reasoning: 7,
                    image_output: 1290,
                    ..zero
                },
            ),
            (
                r#"{"inputTokens":5,"outputTokens":7,"totalTokens":42,"cacheReadInputTokens":10,"cacheWriteInputTokens":20}"#,
                TokenUsage { input: 35, cached_input: 10, cache_write_5m: 20, output: 7, ..zero },
            ),
        ] {
            assert_eq!(part(json), expected, "{json}");
        }
    }

    #[test]
    fn each_kind_of_token_has_its_price() {
        let mut prices =
            Weights { tokens: std::array::from_fn(|kind| (kind as u64 + 1) * PARTS), ..Weights::default() };
        let usage = TokenUsage {
            input: 1000,
            cached_input: 100,
            cache_write_5m: 50,
            cache_write_1h: 20,
            audio_input: 10,
            image_input: 5,
            output: 400,
            reasoning: 40,
            audio_output: 30,
            image_output: 20,
            tier: None,
        };
        let input = 815 + 2 * 100 + 3 * 50 + 4 * 20 + 5 * 10 + 6 * 5;
        let output = 7 * 310 + 8 * 40 + 9 * 30 + 10 * 20;
        assert_eq!(prices.cost(usage), input + output);
        prices.request = 3 * PARTS;
        prices.batch = PARTS / 2;
        (prices.priority, prices.fast) = (PARTS * 7 / 4, 6 * PARTS);
        assert_eq!(prices.cost(usage), input + output + 3);
        let batch = TokenUsage { tier: Some(ServiceTier::Batch), ..usage };
        assert_eq!(prices.cost(batch), (input + output).div_ceil(2) + 3);
        for (name, multiple) in [("priority", 7), ("fast", 24), ("default", 4)] {
            let tier = ServiceTier::reported(name);
            assert_eq!(
                prices.cost(TokenUsage { tier, ..usage }),
                ((input + output) * multiple).div_ceil(4) + 3,
                "{name}"
            );
        }
        assert!(prices.reservation(usage.input, usage.output, Some(ServiceTier::Fast)) > 6 * prices.cost(usage) - 20);
        prices.long_context = Some(LongContext { above: 999, tokens: [2 * PARTS; KINDS] });
        assert_eq!(prices.cost(usage), 2 * 1400 + 3);
        prices.long_context = Some(LongContext { above: 1000, tokens: [2 * PARTS; KINDS] });
        assert_eq!(prices.cost(usage), input + output + 3);
    }

    #[test]
    fn pattern_with_most_literal_characters_wins() {
        let weights = |request| Weights { request, ..Weights::default() };
        let patterns = [("gpt-5*", 1), ("gpt-5-mini*", 2), ("*", 3), ("*-haiku-*", 4), ("gpt-5-mini", 5)];
        let models = patterns.map(|(pattern, input)| (Wildcard::new(pattern), weights(input))).to_vec();
        let all = ModelWeights { default: weights(9), models };
        for (model, expected) in [
            (Some("gpt-5"), 1),
            (Some("gpt-5-mini-2026"), 2),
            (Some("gpt-5-mini"), 5),
            (Some("claude-haiku-4"), 4),
            (Some("other"), 3),
            (None, 9),
        ] {
            assert_eq!(all.for_model(model).request, expected, "{model:?}");
        }
    }

    proptest! {
        /// The reserved cost is at least the cost of any response that stays within the bounds of the reservation.
        #[test]
        fn reservation_covers_every_response_within_its_bounds(
            kinds in proptest::array::uniform10(0..5000u64),
            long in proptest::option::of((0..1u64 << 40, proptest::array::uniform10(0..5000u64))),
            (input, cached, output) in (0..1u64 << 40, 0..1u64 << 40, 0..1u64 << 40),
            (less_input, less_output) in (0..1u64 << 40, 0..1u64 << 40),
        ) {
            let long_context = long.map(|(above, tokens)| LongContext { above, tokens });
            let weights = Weights { tokens: kinds, long_context, ..Weights::default() };
            let used = TokenUsage {
                input: input.saturating_sub(less_input),
                cached_input: cached,
                cache_write_1h: cached / 2,
                output: output.saturating_sub(less_output),
                reasoning: cached / 3,
                ..TokenUsage::default()
            };
            prop_assert!(weights.cost(used) <= weights.reservation(input, output, None));
        }
    }
}
