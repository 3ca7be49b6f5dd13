//! `sluicegate prices`: converts public price lists of LLM models into a `[prices.NAME]` table.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::Value;
use toml_edit::Key;

/// Number of the parts of a dollar per million tokens in which prices are counted. The gateway has the same resolution.
const PARTS: f64 = 1e6;

/// Dollars per token are converted to dollars per million tokens.
const TOKENS: f64 = 1e6;

/// Convert public price lists of LLM models for the configuration
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate prices update --from prices.json",
    "sluicegate prices update --from prices.json --provider anthropic",
])]
pub(super) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Read a price list in the JSON format of LiteLLM (`model_prices_and_context_window.json`), and print a table
    /// `[prices.NAME]` for a file that the configuration includes
    ///
    /// Providers in the names of models (`azure/gpt-5`) are removed. If several providers have a model, the highest of
    /// each of its prices applies.
    #[command(after_help = examples![
        "sluicegate prices update --from prices.json > prices.toml",
        "sluicegate prices update --from prices.json --name anthropic --provider anthropic > prices.toml",
    ])]
    Update {
        /// Read this file
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        /// Name of the price list
        #[arg(long, value_name = "NAME", default_value = "public")]
        name: String,
        /// Read only the models of this provider, as the field `litellm_provider` names it; may be repeated
        #[arg(long, value_name = "PROVIDER")]
        provider: Vec<String>,
    },
}

/// Run the command.
///
/// # Errors
/// The file cannot be read, is not a price list, or has no usable price.
pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Action::Update { from, name, provider } = &arguments.action;
    let text = fs::read(from).map_err(|error| anyhow!("{}: cannot be read: {error}", from.display()))?;
    let models = convert(&text, provider)
        .map_err(|error| anyhow!("{}: not a price list in the JSON format of LiteLLM: {error}", from.display()))?;
    if models.is_empty() {
        bail!("{} has no prices per token of the selected providers", from.display());
    }
    stdout().write_all(to_toml(&models, name, from).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// The prices of a model in the format of LiteLLM, in dollars per token.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ListedModel {
    litellm_provider: Option<String>,
    input_cost_per_token: Option<f64>,
    cache_read_input_token_cost: Option<f64>,
    cache_creation_input_token_cost: Option<f64>,
    cache_creation_input_token_cost_above_1hr: Option<f64>,
    input_cost_per_audio_token: Option<f64>,
    input_cost_per_image_token: Option<f64>,
    output_cost_per_token: Option<f64>,
    output_cost_per_reasoning_token: Option<f64>,
    output_cost_per_audio_token: Option<f64>,
    output_cost_per_image_token: Option<f64>,
    input_cost_per_request: Option<f64>,
    input_cost_per_token_batches: Option<f64>,
    input_cost_per_token_priority: Option<f64>,
    output_cost_per_token_priority: Option<f64>,
    provider_specific_entry: Option<SpecificPrices>,
    input_cost_per_token_above_272k_tokens: Option<f64>,
    output_cost_per_token_above_272k_tokens: Option<f64>,
    input_cost_per_token_above_128k_tokens: Option<f64>,
    output_cost_per_token_above_128k_tokens: Option<f64>,
    input_cost_per_token_above_200k_tokens: Option<f64>,
    output_cost_per_token_above_200k_tokens: Option<f64>,
}

/// Multiples of the prices of a model.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SpecificPrices {
    fast: Option<f64>,
}

/// The prices of a model by key of the configuration, in [`PARTS`]. The entries of `long_context` have this key as a
/// prefix.
type ModelPrices = BTreeMap<&'static str, u64>;

/// Return the models of a price list by name.
fn convert(json: &[u8], providers: &[String]) -> Result<BTreeMap<String, ModelPrices>, serde_json::Error> {
    let listed: BTreeMap<String, Value> = serde_json::from_slice(json)?;
    let mut models: BTreeMap<String, ModelPrices> = BTreeMap::new();
    for (name, value) in listed {
        // Some entries describe the format, or have prices of another type.
        let Ok(listed) = serde_json::from_value::<ListedModel>(value) else { continue };
        let provider = listed.litellm_provider.as_deref().unwrap_or_default();
        if name == "sample_spec" || !(providers.is_empty() || providers.iter().any(|wanted| wanted == provider)) {
            continue;
        }
        let short = name.rsplit('/').next().unwrap_or(&name).to_ascii_lowercase();
        let Some(prices) = prices(&listed).filter(|_| !short.is_empty()) else { continue };
        let model = models.entry(short).or_default();
        for (key, price) in prices {
            let known = model.entry(key).or_insert(price);
            *known = (*known).max(price);
        }
    }
    Ok(models)
}

/// Return the prices of a model, or `None` if it has no price per input token.
fn prices(model: &ListedModel) -> Option<ModelPrices> {
    let input = model.input_cost_per_token?;
    let mut prices = ModelPrices::new();
    let mut insert = |key, price: Option<f64>, scale: f64| {
        if let Some(price) = price.filter(|price| (0.0..1.0).contains(price)) {
            // Providers print prices with at most a few decimal places, so rounding only removes errors of binary
            // floating point.
            prices.insert(key, (price * scale).round() as u64);
        }
    };
    let per_token = TOKENS * PARTS;
    insert("input", Some(input), per_token);
    insert("cached_input", model.cache_read_input_token_cost, per_token);
    insert("cache_write_5m", model.cache_creation_input_token_cost, per_token);
    insert("cache_write_1h", model.cache_creation_input_token_cost_above_1hr, per_token);
    insert("audio_input", model.input_cost_per_audio_token, per_token);
    insert("image_input", model.input_cost_per_image_token, per_token);
    insert("output", Some(model.output_cost_per_token.unwrap_or(0.0)), per_token);
    insert("reasoning", model.output_cost_per_reasoning_token, per_token);
    insert("audio_output", model.output_cost_per_audio_token, per_token);
    insert("image_output", model.output_cost_per_image_token, per_token);
    insert("request", model.input_cost_per_request, PARTS);
    insert("batch", model.input_cost_per_token_batches.filter(|_| input > 0.0).map(|batch| batch / input), PARTS);
    let multiple = |priority: Option<f64>, price: Option<f64>| Some(priority? / price.filter(|price| *price > 0.0)?);
    let priority = multiple(model.input_cost_per_token_priority, Some(input))
        .into_iter()
        .chain(multiple(model.output_cost_per_token_priority, model.output_cost_per_token))
        .fold(0.0, f64::max);
    let fast = model.provider_specific_entry.as_ref().and_then(|specific| specific.fast).unwrap_or(0.0);
    let long = [
        (128_000, model.input_cost_per_token_above_128k_tokens, model.output_cost_per_token_above_128k_tokens),
        (200_000, model.input_cost_per_token_above_200k_tokens, model.output_cost_per_token_above_200k_tokens),
        (272_000, model.input_cost_per_token_above_272k_tokens, model.output_cost_per_token_above_272k_tokens),
    ];
    if let Some((above, input, output)) =
        long.into_iter().find(|(_, input, output)| input.is_some() || output.is_some())
    {
        insert("long_context.input", input, per_token);
        insert("long_context.output", output, per_token);
        prices.insert("long_context.above", above);
    }
    for (key, multiple) in [("priority", priority), ("fast", fast)] {
        if (1.0..=100.0).contains(&multiple) {
            prices.insert(key, (multiple * PARTS).round() as u64);
        }
    }
    Some(prices)
}

/// Write the models as a TOML table.
fn to_toml(models: &BTreeMap<String, ModelPrices>, name: &str, source: &Path) -> String {
    let mut text = format!("# Prices from {}, in dollars per million tokens.\n", source.display());
    text += "# Written by `sluicegate prices update`.\n";
    text += &format!("[prices.{}]\n", Key::new(name).display_repr());
    for (model, prices) in models {
        let entry = |(key, price): (&&str, &u64)| match *key {
            "long_context.above" => format!("{key} = {price}"),
            _ => format!("{key} = {}", decimal(*price)),
        };
        let entries: Vec<_> = prices.iter().map(entry).collect();
        text += &format!("{} = {{ {} }}\n", Key::new(model).display_repr(), entries.join(", "));
    }
    text
}

/// Write a price as a decimal number.
fn decimal(parts: u64) -> String {
    let text = format!("{}.{:06}", parts / 1_000_000, parts % 1_000_000);
    let text = text.trim_end_matches('0');
    if text.ends_with('.') { format!("{text}0") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn price_is_written_as_providers_print_it() {
        for (parts, text) in
            [(37_500, "0.0375"), (1_250_000, "1.25"), (15_000_000, "15.0"), (0, "0.0"), (1, "0.000001")]
        {
            assert_eq!(decimal(parts), text);
        }
    }
}
