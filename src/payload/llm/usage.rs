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

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Maximum plausible number of tokens. The gateway ignores a report with a larger count, because this count would use
/// up a quota for years.
pub const MAX_TOKENS: u64 = 1_000_000_000;

/// The numbers of tokens that a request used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Number of input tokens, including tokens that the provider read from its cache.
    pub input: u64,
    /// Number of input tokens that the provider read from its cache.
    pub cached_input: u64,
    /// Number of output tokens, including reasoning tokens.
    pub output: u64,
}

impl TokenUsage {
    /// Return the larger value of each count. Providers report totals, so the counts of two reports are not added.
    #[must_use]
    pub fn max(self, other: TokenUsage) -> TokenUsage {
        TokenUsage {
            input: self.input.max(other.input),
            cached_input: self.cached_input.max(other.cached_input),
            output: self.output.max(other.output),
        }
    }
}

/// Parse a usage object of any provider. Return `None` if the object has no count, or if a count is invalid: negative,
/// with a fraction, larger than [`MAX_TOKENS`], or of another type.
pub fn parse_usage(json: &[u8]) -> Option<TokenUsage> {
    serde_json::from_slice::<UsageObject>(json).ok()?.tokens()
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
struct UsageObject {
    // Fields of OpenAI Chat Completions.
    prompt_tokens: Count,
    completion_tokens: Count,
    total_tokens: Count,
    prompt_tokens_details: Option<Details>,
    // Field of DeepSeek.
    prompt_cache_hit_tokens: Count,
    // Fields of OpenAI Responses and Anthropic.
    input_tokens: Count,
    output_tokens: Count,
    input_tokens_details: Option<Details>,
    // Anthropic reports these tokens in addition to `input_tokens`.
    cache_creation_input_tokens: Count,
    cache_read_input_tokens: Count,
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

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Count,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Units {
    input_tokens: Count,
    output_tokens: Count,
}

impl UsageObject {
    fn tokens(self) -> Option<TokenUsage> {
        let cached_tokens = |details: Option<Details>| details.unwrap_or_default().cached_tokens;
        let mut total = self.total_tokens;
        let mut usage = if self.prompt_token_count.is_present() || self.candidates_token_count.is_present() {
            total = self.total_token_count;
            TokenUsage {
                input: self.prompt_token_count.get()? + self.tool_use_prompt_token_count.get()?,
                cached_input: self.cached_content_token_count.get()?,
                output: self.candidates_token_count.get()? + self.thoughts_token_count.get()?,
            }
        } else if self.prompt_tokens.is_present() || self.completion_tokens.is_present() {
            let cached = cached_tokens(self.prompt_tokens_details).get()?.max(self.prompt_cache_hit_tokens.get()?);
            TokenUsage { input: self.prompt_tokens.get()?, cached_input: cached, output: self.completion_tokens.get()? }
        } else if self.input_tokens.is_present() || self.output_tokens.is_present() {
            let cache_read = self.cache_read_input_tokens.get()?;
            TokenUsage {
                input: self.input_tokens.get()? + self.cache_creation_input_tokens.get()? + cache_read,
                cached_input: cache_read + cached_tokens(self.input_tokens_details).get()?,
                output: self.output_tokens.get()?,
            }
        } else if self.bedrock_input.is_present() || self.bedrock_output.is_present() {
            total = self.bedrock_total;
            let cache_read = self.bedrock_cache_read.get()?;
            TokenUsage {
                input: self.bedrock_input.get()? + self.bedrock_cache_write.get()? + cache_read,
                cached_input: cache_read,
                output: self.bedrock_output.get()?,
            }
        } else if let Some(units) = self.billed_units.or(self.tokens) {
            if !units.input_tokens.is_present() && !units.output_tokens.is_present() {
                return None;
            }
            TokenUsage { input: units.input_tokens.get()?, cached_input: 0, output: units.output_tokens.get()? }
        } else if self.total_tokens.is_present() {
            TokenUsage { input: self.total_tokens.get()?, cached_input: 0, output: 0 }
        } else {
            return None;
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

/// Maximum cost. Lua 5.1, which runs the scripts in Redis, represents integers exactly only up to this value.
const MAX_COST: u64 = (1 << 53) - 1;

/// Cost of one token of each kind, in thousandths of the limit's unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// An input token that was not read from the provider's cache.
    pub input: u64,
    /// An input token that was read from the provider's cache.
    pub cached_input: u64,
    /// An output token.
    pub output: u64,
}

/// By default, each token costs 1.
impl Default for Weights {
    fn default() -> Self {
        Weights { input: 1000, cached_input: 1000, output: 1000 }
    }
}

impl Weights {
    /// Return the cost of the used tokens: the weighted sum, rounded up.
    pub fn cost(&self, usage: TokenUsage) -> u64 {
        let cached = usage.cached_input.min(usage.input);
        let parts = [(usage.input - cached, self.input), (cached, self.cached_input), (usage.output, self.output)];
        // The sum cannot overflow. Each product is less than 2^94, because a count has 64 bits and a weight has 30
        // bits.
        let thousandths: u128 = parts.into_iter().map(|(tokens, weight)| u128::from(tokens) * u128::from(weight)).sum();
        u64::try_from(thousandths.div_ceil(1000)).map_or(MAX_COST, |cost| cost.min(MAX_COST))
    }

    /// Return the cost to reserve before the response, for these numbers of input and output tokens. Every input token
    /// is assumed to have the more expensive of the two input weights.
    pub fn reservation(&self, input: u64, output: u64) -> u64 {
        let input_weight = self.input.max(self.cached_input);
        Weights { input: input_weight, ..*self }.cost(TokenUsage { input, cached_input: 0, output })
    }
}

/// The weights of a limit: default weights, and weights for specific models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelWeights {
    /// Weights of models that match no pattern in `models`.
    pub default: Weights,
    /// Weights by model.
    pub models: Vec<(NamePattern, Weights)>,
}

impl ModelWeights {
    /// Return the weights for a model. If several patterns match, the pattern with the most literal characters takes
    /// precedence. If two patterns have the same number of literal characters, a pattern without `*` takes precedence.
    /// The case of the model name is ignored, because some servers ignore it too.
    pub fn for_model(&self, model: Option<&str>) -> Weights {
        let model = model.map(str::to_ascii_lowercase);
        model.and_then(|model| NamePattern::best_match(&self.models, &model)).copied().unwrap_or(self.default)
    }
}

/// The name of a model or a tool, in which `*` stands for any number of characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern(Box<str>);

impl NamePattern {
    /// Create a pattern for names of models or tools.
    pub fn new(text: &str) -> Self {
        NamePattern(text.into())
    }

    /// Return the value of the matching pattern with the most literal characters.
    pub fn best_match<'p, T>(patterns: &'p [(NamePattern, T)], name: &str) -> Option<&'p T> {
        let matching = patterns.iter().filter(|(pattern, _)| pattern.matches(name));
        matching.max_by_key(|(pattern, _)| pattern.specificity()).map(|(_, value)| value)
    }

    /// Return the number of literal characters, and whether the pattern has no `*`.
    fn specificity(&self) -> (usize, bool) {
        let literals = self.0.bytes().filter(|byte| *byte != b'*').count();
        (literals, literals == self.0.len())
    }

    /// Return whether the pattern matches the whole name.
    pub fn matches(&self, model: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| model.strip_prefix(first)) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            // Use the leftmost occurrence of the part, because it leaves the most text for the following parts.
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usage(input: u64, cached_input: u64, output: u64) -> Option<TokenUsage> {
        Some(TokenUsage { input, cached_input, output })
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
            assert_eq!(parse_usage(json.as_bytes()), expected, "{name}");
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
        let weights = Weights { input: 1000, cached_input: 100, output: 4000 };
        for ((input, cached_input, output), expected) in [
            ((0, 0, 0), 0),
            ((10, 0, 5), 30),
            ((10, 10, 0), 1),
            ((11, 11, 0), 2),
            ((11, 1, 0), 11),
            ((5, 9, 0), 1),
            ((u64::MAX, 0, u64::MAX), MAX_COST),
        ] {
            assert_eq!(weights.cost(TokenUsage { input, cached_input, output }), expected, "{input} {cached_input}");
        }
        // The sum is rounded up once, not each summand: three tokens that cost about one third each cost 1, not 3.
        let thirds = Weights { input: 333, cached_input: 333, output: 334 };
        assert_eq!(thirds.cost(TokenUsage { input: 2, cached_input: 1, output: 1 }), 1);
    }

    #[test]
    fn pattern_with_most_literal_characters_wins() {
        let weights = |input| Weights { input, ..Weights::default() };
        let patterns = [("gpt-5*", 1), ("gpt-5-mini*", 2), ("*", 3), ("*-haiku-*", 4), ("gpt-5-mini", 5)];
        let models = patterns.map(|(pattern, input)| (NamePattern::new(pattern), weights(input))).to_vec();
        let all = ModelWeights { default: weights(9), models };
        for (model, expected) in [
            (Some("gpt-5"), 1),
            (Some("gpt-5-mini-2026"), 2),
            (Some("gpt-5-mini"), 5),
            (Some("claude-haiku-4"), 4),
            (Some("other"), 3),
            (None, 9),
        ] {
            assert_eq!(all.for_model(model).input, expected, "{model:?}");
        }
    }

    #[test]
    fn star_matches_any_characters() {
        for (pattern, model, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "a", true),
            ("*a", "ba", true),
            ("a*a", "a", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("*", "", true),
            ("**", "x", true),
            ("", "", true),
        ] {
            assert_eq!(NamePattern::new(pattern).matches(model), expected, "{pattern} {model}");
        }
    }

    proptest! {
        /// The reserved cost is at least the cost of any response that stays within the bounds of the reservation.
        #[test]
        fn reservation_covers_every_response_within_its_bounds(
            weights in (0..5000u64, 0..5000u64, 0..5000u64),
            (input, cached, output) in (0..1u64 << 40, 0..1u64 << 40, 0..1u64 << 40),
            (less_input, less_output) in (0..1u64 << 40, 0..1u64 << 40),
        ) {
            let weights = Weights { input: weights.0, cached_input: weights.1, output: weights.2 };
            let used = TokenUsage {
                input: input.saturating_sub(less_input),
                cached_input: cached,
                output: output.saturating_sub(less_output),
            };
            prop_assert!(weights.cost(used) <= weights.reservation(input, output));
        }
    }
}
