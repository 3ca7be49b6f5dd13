//! Token counts in the formats of the providers.
//!
//! | provider | where | cached input |
//! |---|---|---|
//! | OpenAI Chat Completions, Mistral, DeepSeek, most compatible servers | `usage` with `prompt_tokens` | part of the input |
//! | OpenAI Responses | `usage` or `response.usage` with `input_tokens` and `input_tokens_details` | part of the input |
//! | Anthropic Messages | `usage` or `message.usage` with `cache_read_input_tokens` | added to the input |
//! | Gemini | `usageMetadata` | part of the input |
//! | Ollama | `prompt_eval_count`, `eval_count` | not reported |
//! | Cohere | `usage`, `meta` or `delta.usage` with `billed_units` | not reported |

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Maximum plausible count. A report with a larger count is ignored, because it would use up a quota for years.
pub const MAX_TOKENS: u64 = 1_000_000_000;

/// The number of tokens that a request used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenUsage {
    /// Number of input tokens, including cached ones.
    pub input: u64,
    /// Number of input tokens that the provider read from its cache.
    pub cached_input: u64,
    /// Number of output tokens, including reasoning.
    pub output: u64,
}

impl TokenUsage {
    /// Return the larger value of each count. Providers report totals, so a repeated report adds nothing.
    #[must_use]
    pub fn max(self, other: TokenUsage) -> TokenUsage {
        TokenUsage {
            input: self.input.max(other.input),
            cached_input: self.cached_input.max(other.cached_input),
            output: self.output.max(other.output),
        }
    }
}

/// Parse a usage object of any provider. Return `None` if the object has no count, or has an invalid count: negative,
/// with a fraction, larger than [`MAX_TOKENS`], or of another type.
pub fn parse_usage(json: &[u8]) -> Option<TokenUsage> {
    serde_json::from_slice::<UsageObject>(json).ok()?.tokens()
}

/// Parse a single count.
pub fn parse_count(json: &[u8]) -> Option<u64> {
    match serde_json::from_slice(json).ok()? {
        Count::Valid(count) => Some(count),
        Count::Absent | Count::Invalid => None,
    }
}

/// The fields of all providers. A missing field has the same meaning as `null`.
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
        let usage = if self.prompt_token_count.is_present() || self.candidates_token_count.is_present() {
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
        Some(usage)
    }
}

/// A count as the provider reports it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Count {
    #[default]
    Absent,
    Valid(u64),
    /// The value is not a number of tokens.
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

#[cfg(test)]
mod tests {
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
            r#"{"prompt_tokens":null}"#,
            r#"{"billed_units":{}}"#,
        ] {
            assert_eq!(parse_usage(json.as_bytes()), None, "{json}");
        }
        assert_eq!((parse_count(b"7"), parse_count(b"-7"), parse_count(b"x")), (Some(7), None, None));
    }
}
