//! Weights of tokens, which determine the cost of a request in the unit of its limit.

use crate::payload::llm::usage::TokenUsage;

/// Maximum weight of a token.
pub const MAX_WEIGHT: i32 = 1_000_000;

/// Maximum cost that Lua 5.1 computes exactly.
const MAX_COST: u64 = (1 << 53) - 1;

/// Cost of one token of each kind, in thousandths of the limit's unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// An input token that was not read from the provider's cache.
    pub input: u64,
    /// An input token that was read from the provider's cache.
    pub cached_input: u64,
    /// Weight of an output token.
    pub output: u64,
}

/// Each token costs 1.
impl Default for Weights {
    fn default() -> Self {
        Weights { input: 1000, cached_input: 1000, output: 1000 }
    }
}

impl Weights {
    /// Return the cost of the used tokens. The weighted sum is rounded up once.
    pub fn cost(&self, usage: TokenUsage) -> u64 {
        let cached = usage.cached_input.min(usage.input);
        let parts = [(usage.input - cached, self.input), (cached, self.cached_input), (usage.output, self.output)];
        // The sum cannot overflow: each product is less than 2^94, because a count has 64 bits and a weight has 30
        // bits.
        let thousandths: u128 = parts.into_iter().map(|(tokens, weight)| u128::from(tokens) * u128::from(weight)).sum();
        u64::try_from(thousandths.div_ceil(1000)).map_or(MAX_COST, |cost| cost.min(MAX_COST))
    }

    /// Return the cost of a request before its response. The function assumes that no input token is cached.
    pub fn reservation(&self, input: u64, output: u64) -> u64 {
        let input_weight = self.input.max(self.cached_input);
        Weights { input: input_weight, ..*self }.cost(TokenUsage { input, cached_input: 0, output })
    }
}

/// The weights of a limit: default weights, and weights for single models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelWeights {
    /// Weights of models that have no weights of their own.
    pub default: Weights,
    /// Weights by model.
    pub models: Vec<(NamePattern, Weights)>,
}

impl ModelWeights {
    /// Return the weights for a model: those of the matching pattern with the most literal characters. Case is ignored,
    /// because some servers ignore it. A name without `*` precedes a pattern with the same number of literal
    /// characters.
    pub fn for_model(&self, model: Option<&str>) -> Weights {
        let model = model.map(str::to_ascii_lowercase);
        model.and_then(|model| NamePattern::best_match(&self.models, &model)).copied().unwrap_or(self.default)
    }
}

/// The name of a model or a tool, in which `*` stands for any number of characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamePattern(Box<str>);

impl NamePattern {
    /// Create a pattern for names of models.
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
            // Use the leftmost occurrence, which leaves the most text for the following parts.
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
        // The sum is rounded once: three costs of one third are 1, not 3.
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
        /// A reservation is never cheaper than a response that stays within its bounds.
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
