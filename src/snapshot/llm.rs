//! Compiles `cost = { llm = … }` of a limit.

use crate::config::Text;
use crate::config::error::{Issue, Spanned};
use crate::config::shorthand::{CostTable, TokenWeights, UsagePointers};
use crate::limiter::quota::EXACT_INTEGER_LIMIT;
use crate::payload::llm::json_scanner::{JsonPath, MAX_SEGMENTS};
use crate::payload::llm::request::InputEstimate;
use crate::payload::llm::response::{CountKind, UsageFormat};
use crate::payload::llm::usage::MAX_TOKENS;
use crate::payload::llm::weights::{MAX_WEIGHT, ModelWeights, NamePattern, Weights};
use crate::snapshot::cost::LlmCost;
use crate::snapshot::validator::Validator;

/// Default of `default_output`, in tokens.
const DEFAULT_OUTPUT: i64 = 1024;

/// Default of `bytes_per_token`, which is the value for English text.
const BYTES_PER_TOKEN: i64 = 4;

/// Default of `image_tokens` and `audio_tokens`, which is the value for an image of about a megapixel.
const MEDIA_TOKENS: i64 = 1000;

/// Compile the cost of a limit whose `cost` has `llm`. `inspect_body` is the default of the key with the same name.
pub(super) fn llm_cost(table: &CostTable, inspect_body: usize, reader: &mut Validator<'_>) -> LlmCost {
    reader.one_of(table.llm.as_ref(), (), &[("auto", ())]);
    let tokens = |reader: &mut Validator<'_>, value: &Option<Spanned<i64>>, default| {
        reader.number(value.as_ref(), 0..MAX_TOKENS as i64 + 1, default) as u64
    };
    let estimate = InputEstimate {
        bytes_per_token: reader.number(table.bytes_per_token.as_ref(), 1..1001, BYTES_PER_TOKEN) as u64,
        image: tokens(reader, &table.image_tokens, MEDIA_TOKENS),
        audio: tokens(reader, &table.audio_tokens, MEDIA_TOKENS),
        default_output: tokens(reader, &table.default_output, DEFAULT_OUTPUT),
    };
    let default = table
        .weights
        .as_ref()
        .map_or_else(Weights::default, |written| weights(written.get_ref(), Weights::default(), reader));
    let models = table.models.iter().map(|(model, written)| {
        (NamePattern::new(&model.to_ascii_lowercase()), weights(written.get_ref(), default, reader))
    });
    let weights = ModelWeights { default, models: models.collect() };
    LlmCost {
        weights,
        estimate,
        max_body: reader.size(table.inspect_body.as_ref(), inspect_body),
        unread_cost: table
            .reserve
            .as_ref()
            .map(|reserve| reader.number(Some(reserve), 0..EXACT_INTEGER_LIMIT as i64, 0) as u64),
        cuts: reader.one_of(table.on_exhausted.as_ref(), false, &[("finish", false), ("cut", true)]),
        includes_usage: table.include_usage.as_ref().is_some_and(|includes| *includes.get_ref()),
        usage: table.usage.as_ref().map_or(UsageFormat::Auto, |usage| usage_format(usage, reader)),
    }
}

/// Report keys that belong to an LLM cost in a table without `llm`.
pub(super) fn check_without_llm(table: &CostTable, reader: &mut Validator<'_>) {
    let keys = [
        ("default_output", table.default_output.as_ref().map(|key| key.span())),
        ("bytes_per_token", table.bytes_per_token.as_ref().map(|key| key.span())),
        ("image_tokens", table.image_tokens.as_ref().map(|key| key.span())),
        ("audio_tokens", table.audio_tokens.as_ref().map(|key| key.span())),
        ("weights", table.weights.as_ref().map(|key| key.span())),
        ("models", table.models.values().next().map(|key| key.span())),
        ("inspect_body", table.inspect_body.as_ref().map(|key| key.span())),
        ("reserve", table.reserve.as_ref().map(|key| key.span())),
        ("on_exhausted", table.on_exhausted.as_ref().map(|key| key.span())),
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

/// Compile weights. A missing weight has the value in `standard`; a cached input token costs as much as any other input
/// token.
fn weights(written: &TokenWeights, standard: Weights, reader: &mut Validator<'_>) -> Weights {
    let input = weight(written.input.as_ref(), standard.input, reader);
    let cached_default = if written.input.is_some() { input } else { standard.cached_input };
    Weights {
        input,
        cached_input: weight(written.cached_input.as_ref(), cached_default, reader),
        output: weight(written.output.as_ref(), standard.output, reader),
    }
}

/// Return a weight in thousandths.
fn weight(written: Option<&Spanned<f64>>, default: u64, reader: &mut Validator<'_>) -> u64 {
    let Some(written) = written else { return default };
    let thousandths = reader.fraction(Some(written), 0..=MAX_WEIGHT, 0.0) * 1000.0;
    // Round the product, because a decimal fraction is not exact in binary.
    if (thousandths - thousandths.round()).abs() > 1e-6 {
        let issue = Issue::new(written.span(), format!("{} has more than three decimal places", written.get_ref()));
        reader.push_issue(issue.with_hint("choose a larger unit, because weights have a resolution of 0.001"));
    }
    thousandths.round() as u64
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
