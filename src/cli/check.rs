//! `sluicegate check`: reports errors and warnings of the configuration, changes that a reload would reject, and the
//! maximum cost that each limit admits.

use std::collections::BTreeMap;
use std::io;
use std::io::{Write, stdout};
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use annotate_snippets::{Level, Renderer};
use clap::Args;
use http::Method;
use serde::Serialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::app::maintenance;
use crate::cli::admin::client::AdminClient;
use crate::cli::admin::{printable_text, unit_suffix};
use crate::cli::against;
use crate::cli::against::{Comparison, restart_keys, restart_query};
use crate::cli::doctor;
use crate::cli::shared::{EXIT_INVALID_CONFIG, env_var};
use crate::clock;
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file::{ParsedFile, UnsetVariables};
use crate::config::gateway::Config;
use crate::limiter::redis::connection::try_connect;
use crate::limiter::redis::server::ConnectError;
use crate::limiter::redis::{RedisDeployment, RedisSettings};
use crate::limiter::spec::{LimitSpec, LimitVariant};
use crate::payload::llm::text_tokens::MAX_BYTES_PER_TOKEN;
use crate::payload::llm::usage::{PARTS, Weights};
use crate::snapshot::CompiledConfig;
use crate::snapshot::cost::{Cost, LlmCost};
use crate::snapshot::limits::CompiledLimit;
use crate::telemetry::pluralize;
use crate::tools::check;
use crate::tools::doctor::{Check, Requirements, check_basics};
use crate::upstream::dns::DnsResolver;

/// Timeout of each step of connecting to the store. The timeout is short, so that the command ends quickly if the store
/// is down.
const STORE_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of quotas of single consumers in the text output.
const MAX_CONSUMER_QUOTAS: usize = 20;

/// Exit code if `--strict` is given and there are warnings.
const EXIT_WARNINGS: u8 = 1;

/// Checks that have a warning or fail, each with the address of its Redis server.
type ServerWarnings = Vec<(String, Check)>;

/// Validate the configuration: print errors, warnings and the maximum cost that each limit admits
///
/// The exit code is 0 if the configuration is valid and 2 if it is not. With --strict, the exit code is 1 if there
/// are warnings.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate check --strict",
    "sluicegate check --offline --config gateway.toml",
    "sluicegate check --against /run/sluicegate/admin.sock",
    "sluicegate check --json > report.json",
])]
pub(super) struct Arguments {
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    /// Exit with code 1 if there are warnings
    #[arg(long)]
    strict: bool,
    /// Do not connect to the store, upstreams, authentication servers, token issuers, webhooks or a running gateway,
    /// and do not resolve the DNS names of ACME certificates; an unset environment variable in a secret is only a
    /// warning
    #[arg(long)]
    offline: bool,
    /// Compare with the running gateway at this admin socket (a path) or admin listener (a URL) [default: the admin
    /// socket, or the `[admin]` address if no gateway listens on the socket]
    ///
    /// The command prints the keys that a reload would change, keys that need a restart, and up to 20 known identities
    /// whose usage exceeds a new quota. It also prints new listener addresses that cannot be bound. If there are any,
    /// the exit code is 2.
    #[arg(long, value_name = "SOCKET|URL", num_args = 0..=1, default_missing_value = "", conflicts_with = "offline")]
    against: Option<String>,
}

/// The JSON object that `--json` prints.
#[derive(Debug, Serialize)]
struct CheckReport<'a> {
    /// Whether the exit code is 0.
    ok: bool,
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
    notes: Vec<Finding>,
    limits: Vec<Guarantee<'a>>,
    /// The comparison with the running gateway. `None` without `--against`.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<&'a Comparison>,
}

#[derive(Debug, Serialize)]
struct Finding {
    file: String,
    /// Line number, counted from 1. `None` if the message is about the whole file.
    line: Option<usize>,
    column: Option<usize>,
    message: String,
    hint: Option<String>,
}

pub(super) fn run(options: &Arguments, path: &Path) -> anyhow::Result<ExitCode> {
    // With `--offline`, the command opens no connections and needs no secrets, so unset variables are only warnings.
    let policy = if options.offline { UnsetVariables::WarnIfValid } else { UnsetVariables::Error };
    let loaded = CompiledConfig::load_with_source(path, &env_var, policy).and_then(|(config, file)| {
        let issues = check::errors(&file, &config);
        if issues.is_empty() {
            return Ok((config, file));
        }
        Err(ConfigError { files: file.sources.by_file(issues) })
    });
    match loaded {
        Ok((config, file)) => check_loaded(path, &config, file, options),
        Err(error) if options.json => {
            let errors = error.files.iter().flat_map(findings).collect();
            print_json(&CheckReport {
                ok: false,
                errors,
                warnings: Vec::new(),
                notes: Vec::new(),
                limits: Vec::new(),
                against: None,
            })?;
            Ok(ExitCode::from(EXIT_INVALID_CONFIG))
        }
        Err(error) => Err(error.into()),
    }
}

fn check_loaded(
    path: &Path,
    config: &CompiledConfig,
    file: ParsedFile<Config>,
    options: &Arguments,
) -> anyhow::Result<ExitCode> {
    let ParsedFile { value: parsed, sources, warnings: parser_warnings, .. } = file;
    let mut warnings = check::warnings(&parsed, config, Duration::from_micros(clock::unix_us()));
    // A warning about the placeholder of an unset variable would be wrong.
    warnings.retain(|warning| !parser_warnings.iter().any(|unset| unset.span == warning.span));
    warnings.extend(parser_warnings);
    if !options.offline {
        warnings.extend(check::servers::unreachable_servers(&parsed, config, &DnsResolver::System)?);
    }
    if let (Some((servers, redis)), false) = (&config.store.redis, options.offline) {
        let url = parsed.store.url.as_ref();
        let timeout = parsed.store.timeout.as_ref();
        let url = url.map(|url| url.span());
        match check_store(servers, redis, &Requirements::new(config, redis))? {
            Err(error) => warnings.push(Issue { span: url, message: format!("store: {error}"), hint: None }),
            Ok(server_warnings) => {
                warnings.extend(server_warnings.into_iter().map(|(server, Check { name, message, advice, .. })| {
                    let span = if name == "round trip" { timeout.map(|timeout| timeout.span()) } else { None };
                    Issue {
                        span: span.or(url.clone()),
                        message: format!("store: {server}: {name}: {message}"),
                        hint: advice,
                    }
                }))
            }
        }
    }
    if !options.offline {
        for (source, fetched) in doctor::fetch_key_sets(config)? {
            let url = parsed.auth.get(&*source.name).and_then(|auth| auth.get_ref().jwks_url.as_ref());
            let (reason, hint) = match fetched {
                Ok(fetched) if fetched.skipped.is_empty() => continue,
                Ok(fetched) => (maintenance::describe_key_set(&fetched), None),
                Err(error) => (error.to_string(), Some(error.hint().to_owned())),
            };
            let message = format!("[auth.{}]: {reason}", source.name);
            warnings.push(Issue { span: url.map(|url| url.span()), message, hint });
        }
    }
    if !options.offline {
        for (upstream, requested) in doctor::fetch_access_tokens(config)? {
            let google = parsed.upstream.get(&*upstream.name).and_then(|table| table.get_ref().google.as_ref());
            warnings.extend(requested.err().map(|error| Issue {
                span: google.map(|google| google.span()),
                message: format!("[upstream.{}]: no access token: {error}", upstream.name),
                hint: Some(error.hint().to_owned()),
            }));
        }
    }
    if !options.offline {
        for (name, _, connected) in doctor::connect_webhooks(config)? {
            let url = parsed.notify.get(name).and_then(|notify| notify.get_ref().webhook.as_ref());
            warnings.extend(connected.err().map(|error| Issue {
                span: url.map(|url| url.span()),
                message: format!("[notify.{name}]: {error}"),
                hint: Some(error.hint().to_owned()),
            }));
        }
    }
    let mut notes = check::notes(&parsed, config);
    let comparison = options.against.as_ref().map(|admin| against::compare(path, config, admin)).transpose()?;
    if !options.offline {
        let (name_warnings, name_notes) = check::resolve_names(&parsed, config, &DnsResolver::System)?;
        warnings.extend(name_warnings);
        notes.extend(name_notes);
    } else if config.acme.as_ref().is_some_and(|acme| !acme.names.is_empty()) {
        let message = "the DNS names of the ACME certificates were not resolved, because of `--offline`".to_owned();
        notes.push(Issue { span: None, message, hint: None });
    }
    if !options.offline && comparison.is_none() {
        let note = |message: String, hint: Option<String>| Issue {
            span: parsed.admin.as_ref().map(|admin| admin.span()),
            message,
            hint,
        };
        match compare_with_running(path, config) {
            Ok(RunningGateway::None) => {}
            Ok(RunningGateway::SameFile(keys)) => {
                warnings.extend(keys.iter().map(|key| restart_required_warning(key, &parsed, sources.main().1)))
            }
            Ok(RunningGateway::OtherFile { gateway, file }) => notes.push(note(
                format!("the gateway at {gateway} runs another file, {file}, and was not compared"),
                Some("to compare with this gateway, use --against".to_owned()),
            )),
            Err(error) => {
                notes.push(note(format!("the configuration was not compared with the running gateway: {error}"), None))
            }
        }
    }
    let warnings = sources.by_file(warnings);
    let notes = sources.by_file(notes);
    let is_strict_failure = options.strict && !warnings.is_empty();
    let cannot_start = comparison.as_ref().is_some_and(|comparison| !comparison.unavailable.is_empty());
    if options.json {
        let limits = config.limits.values().flat_map(guarantees).chain(consumer_guarantees(config)).collect();
        print_json(&CheckReport {
            ok: !is_strict_failure && !cannot_start,
            errors: Vec::new(),
            warnings: warnings.iter().flat_map(findings).collect(),
            notes: notes.iter().flat_map(findings).collect(),
            limits,
            against: comparison.as_ref(),
        })?;
    } else {
        print_text(path, config, &[(Level::NOTE, &notes), (Level::WARNING, &warnings)])?;
        if let Some(comparison) = &comparison {
            stdout().write_all(comparison.text().as_bytes())?;
        }
    }
    if cannot_start {
        return Ok(ExitCode::from(EXIT_INVALID_CONFIG));
    }
    Ok(if is_strict_failure { ExitCode::from(EXIT_WARNINGS) } else { ExitCode::SUCCESS })
}

fn print_json(report: &CheckReport<'_>) -> anyhow::Result<()> {
    writeln!(stdout(), "{}", serde_json::to_string_pretty(report)?)?;
    Ok(())
}

fn findings(file: &FileIssues) -> Vec<Finding> {
    let issues = file.redacted_issues().into_iter().map(|issue| {
        let (line, column) = issue.position(&file.text).unzip();
        let name = file.display_path();
        Finding { file: name, line, column, message: issue.message, hint: issue.hint }
    });
    issues.collect()
}

fn print_text(
    path: &Path,
    config: &CompiledConfig,
    issues_by_level: &[(Level<'_>, &[FileIssues])],
) -> std::io::Result<()> {
    // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
    let mut out = anstream::stdout().lock();
    writeln!(
        out,
        "{}: valid: {}, {}, {}, {}{}; store: {}",
        path.display(),
        pluralize(config.listeners.len() as u64, "listener"),
        pluralize(config.routes.len() as u64, "route"),
        pluralize(config.limits.len() as u64, "limit"),
        pluralize(config.upstreams.len() as u64, "upstream"),
        match config.descriptors.count() {
            0 => String::new(),
            count => format!(", {}", pluralize(count as u64, "descriptor")),
        },
        config.store.name,
    )?;
    let of_consumers = consumer_guarantees(config);
    let listed = of_consumers.iter().take(MAX_CONSUMER_QUOTAS).map(Guarantee::text);
    for text in config.limits.values().flat_map(guarantees).map(|guarantee| guarantee.text()).chain(listed) {
        writeln!(out, "  {text}")?;
    }
    if let Some(more @ 1..) = of_consumers.len().checked_sub(MAX_CONSUMER_QUOTAS) {
        writeln!(out, "  and {} of consumers", pluralize(more as u64, "more quota"))?;
    }
    for (level, file) in issues_by_level.iter().flat_map(|(level, files)| files.iter().map(move |file| (level, file))) {
        writeln!(out, "\n{}", file.report(level, &Renderer::styled()))?;
    }
    let files = issues_by_level.iter().filter(|(level, _)| *level == Level::WARNING).flat_map(|(_, files)| *files);
    let warnings: usize = files.map(|file| file.issues.len()).sum();
    if warnings > 0 {
        writeln!(out, "\n{}", pluralize(warnings as u64, "warning"))?;
    }
    Ok(())
}

/// Connect to the store as a gateway does, and run the basic checks of `sluicegate doctor`. Return the checks that have
/// a warning or fail, each with the address of the server. If a gateway could not use the store, return the reason as
/// an error.
fn check_store(
    servers: &RedisDeployment,
    redis: &RedisSettings,
    requirements: &Requirements,
) -> std::io::Result<Result<ServerWarnings, String>> {
    let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = tokio_runtime.block_on(async {
        let mut warnings = Vec::new();
        for (server, _) in servers.masters(STORE_CONNECT_TIMEOUT).await? {
            let survey_result = check_basics(&server, requirements).await;
            // A server that has replied to the basic checks is reachable but may be slow. Use a longer timeout, because
            // connecting takes several round trips.
            let timeout = if survey_result.is_ok() { 5 * STORE_CONNECT_TIMEOUT } else { STORE_CONNECT_TIMEOUT };
            try_connect(server.clone(), redis.algorithms, timeout).await?;
            let address = server.client(STORE_CONNECT_TIMEOUT).await?.get_connection_info().addr().to_string();
            warnings.extend(survey_result?.into_iter().map(|check| (address.clone(), check)));
        }
        Ok(warnings)
    });
    // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
    tokio_runtime.shutdown_background();
    Ok(result.map_err(|error: ConnectError| error.to_string()))
}

// The guarantees of limits: the maximum cost that each quota admits, regardless of what clients send.

/// The guarantee of one quota of a limit.
#[derive(Debug, Serialize)]
struct Guarantee<'a> {
    limit: &'a str,
    /// The tier of the quota. `None` for the default quota and the quota of a consumer.
    tier: Option<&'a str>,
    /// The consumer, if the quota is that of a single consumer.
    consumer: Option<String>,
    /// Maximum cost that the quota admits in any window. For a concurrency limit, the maximum number of requests in
    /// flight.
    max_admitted: u64,
    /// Quota unit, such as `requests`.
    unit: &'a str,
    /// Length of the window. `None` for a concurrency limit.
    window_seconds: Option<f64>,
    capacity: u64,
    /// Maximum cost that each gateway may admit in addition, from prefetched tokens.
    prefetch: u64,
    /// Whether the cost is charged after the response, so that it may exceed the remaining tokens.
    overdraft: bool,
    /// For a limit that counts LLM tokens: a sentence that says by how much requests can exceed the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    overrun: Option<String>,
    shadow: bool,
}

/// The guarantees of the quotas of a limit: the default quota and the quotas of tiers.
fn guarantees(compiled: &CompiledLimit) -> impl Iterator<Item = Guarantee<'_>> {
    compiled.limit.variants().map(|(tier, variant)| guarantee(compiled, tier, variant))
}

fn guarantee<'c>(compiled: &'c CompiledLimit, tier: Option<&'c str>, variant: &LimitVariant) -> Guarantee<'c> {
    let limit = &compiled.limit;
    Guarantee {
        limit: &limit.name,
        tier,
        consumer: None,
        max_admitted: variant.worst_case(),
        unit: &limit.unit,
        window_seconds: window_seconds(variant),
        capacity: variant.rule.capacity(),
        prefetch: prefetch_per_gateway(limit, variant),
        overdraft: compiled.cost.as_ref().is_some_and(Cost::is_deferred),
        overrun: compiled.cost.as_ref().and_then(Cost::llm).filter(|_| tier.is_none()).map(|llm| overrun(llm)),
        shadow: limit.shadow,
    }
}

/// The guarantees of the quotas of single consumers, in the order of the limits and of the consumers' names.
fn consumer_guarantees(config: &CompiledConfig) -> Vec<Guarantee<'_>> {
    let directory = config.auth.consumers();
    // Remove duplicates: a consumer is repeated for each of its keys.
    let consumers: BTreeMap<_, _> = directory.iter().map(|consumer| (&consumer.name, consumer)).collect();
    let mut guarantees = Vec::new();
    for compiled in config.limits.values() {
        guarantees.extend(consumers.values().filter_map(|consumer| {
            let variant = consumer.variants.get(&compiled.limit.name)?;
            let consumer = Some(consumer.name.to_string());
            Some(Guarantee { consumer, overrun: None, ..guarantee(compiled, None, variant) })
        }));
    }
    guarantees
}

/// Describe by how much requests can exceed a limit that counts LLM tokens, and under which conditions.
fn overrun(llm: &LlmCost) -> String {
    let LlmCost { estimate, max_body, weights, unread_cost, cuts, .. } = llm;
    let models = weights.models.iter().map(|(_, weights)| weights);
    let input_weight = models.chain([&weights.default]).map(Weights::max_input).max();
    // Maximum number of input tokens by which a request can exceed the estimate. An LLM token has at least one byte, so
    // a body has at most as many LLM tokens as bytes.
    let bytes_per_token = estimate.bytes_per_token.unwrap_or(MAX_BYTES_PER_TOKEN);
    let max_input = *max_body as u64 - (*max_body as u64).div_ceil(bytes_per_token);
    let max_excess = u128::from(max_input) * u128::from(input_weight.unwrap_or(0)) / u128::from(PARTS);
    let unread = unread_cost
        .map_or(String::new(), |cost| format!(", a cost above {cost} of a request whose body cannot be read"));
    let text = estimate
        .bytes_per_token
        .map_or("more tokens than the estimate".to_owned(), |bytes| format!("fewer than {bytes} bytes per token"));
    let requested = estimate.max_output.map_or("the requested maximum".to_owned(), |max| {
        format!("{max} tokens, although the request may ask for more")
    });
    let cut = if *cuts { " (the gateway cuts event streams at this maximum)" } else { "" };
    format!(
        "requests in flight can exceed this limit if they use more than they reserved: text with {text} \
         (an excess of at most {max_excess} per request), images and documents with more tokens than the \
         estimate, audio of more than {} tokens, input that is not in the body{unread}, and output beyond {requested} (without a \
         requested maximum: beyond {} tokens{cut})",
        estimate.audio, estimate.default_output
    )
}

fn window_seconds(variant: &LimitVariant) -> Option<f64> {
    let has_window = !variant.rule.is_concurrency();
    has_window.then(|| variant.quota.shortest_window_us() as f64 / 1e6)
}

/// Return the maximum cost that each gateway may admit in addition, from prefetched tokens. Return 0 for fixed windows,
/// whose prefetched tokens expire at the end of the window.
fn prefetch_per_gateway(limit: &LimitSpec, variant: &LimitVariant) -> u64 {
    if variant.rule.has_fixed_windows() { 0 } else { limit.prefetch }
}

impl Guarantee<'_> {
    /// Format the guarantee for the terminal.
    fn text(&self) -> String {
        let mut text = self.limit.to_owned();
        if let Some(tier) = self.tier {
            text += &format!(", tier {tier}");
        }
        if let Some(consumer) = &self.consumer {
            text += &format!(", consumer {}", printable_text(consumer));
        }
        text += &format!(": at most {}{} ", self.max_admitted, unit_suffix(self.unit));
        text += &match self.window_seconds {
            None => "at the same time".to_owned(),
            Some(seconds) => format!("in any {}, {} at once", format_window(seconds), self.capacity),
        };
        if self.overdraft {
            text += ", plus the costs of responses that exceed the remaining quota";
        }
        if self.prefetch > 0 {
            text += &format!(", plus up to {} prefetched by each gateway", self.prefetch);
        }
        if self.shadow {
            text += " (shadow: never denies)";
        }
        if let Some(overrun) = &self.overrun {
            text += &format!("\n  {}: {overrun}", self.limit);
        }
        text
    }
}

/// Format the length of a window exactly, in the largest unit in which the length is a whole number of at least two.
fn format_window(seconds: f64) -> String {
    if seconds.fract() != 0.0 {
        return format!("{} ms", seconds * 1e3);
    }
    let units = [("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)];
    match units.into_iter().find(|(_, unit)| seconds % unit == 0.0 && seconds >= 2.0 * unit) {
        Some((name, unit)) => format!("{} {name}", seconds / unit),
        None => format!("{seconds} s"),
    }
}

// Comparison with the running gateway: changed keys that need a restart.

/// Maximum time to wait for the running gateway. The timeout is short, so that the command ends quickly if no gateway
/// runs.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The gateway at `[admin]`.
enum RunningGateway {
    /// No gateway responds, or the configuration has no `[admin]`.
    None,
    /// The gateway may run this file. The list contains the keys that only a restart can change and whose values differ.
    SameFile(Vec<String>),
    /// The gateway runs another file of this machine.
    OtherFile { gateway: String, file: String },
}

/// Compare the configuration with that of the gateway at `[admin]`, unless the gateway runs another file of this
/// machine. The request contains salted digests instead of the values.
///
/// # Errors
/// The gateway rejects the admin token.
fn compare_with_running(path: &Path, config: &CompiledConfig) -> anyhow::Result<RunningGateway> {
    if config.admin.is_none() {
        return Ok(RunningGateway::None);
    }
    let client = AdminClient::from_config(path, config)?;
    let Some(response) = client.try_request(ADMIN_TIMEOUT, &Method::GET, &restart_query(config))? else {
        return Ok(RunningGateway::None);
    };
    Ok(match response["file"].as_str() {
        Some(file) if !may_be_same_file(path, Path::new(file)) => {
            RunningGateway::OtherFile { gateway: client.to_string(), file: printable_text(file) }
        }
        _ => RunningGateway::SameFile(restart_keys(&response)),
    })
}

/// Return whether the file of the gateway may be the file at `path`. A file that does not exist on this machine may be
/// the same file: in a container, the gateway sees the file at the path of another mount.
fn may_be_same_file(path: &Path, of_gateway: &Path) -> bool {
    match of_gateway.canonicalize() {
        Ok(of_gateway) => path.canonicalize().is_ok_and(|path| path == of_gateway),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Build the warning that a changed key needs a restart.
fn restart_required_warning(key: &str, parsed: &Config, text: &str) -> Issue {
    let message = format!("a reload will reject this file: `{key}` differs from the running gateway");
    let span = match key {
        "listener.address" => parsed.listener.first().map(|listener| listener.span()),
        key => key_span(key, text),
    };
    Issue { span, message, hint: Some("restart the gateway, or restore the value".to_owned()) }
}

/// Return the span of a key in the file. If the key is missing, return the span of its table.
fn key_span(key: &str, text: &str) -> Option<Range<usize>> {
    let file = DeTable::parse(text).ok()?;
    let (table, key) = key.split_once('.')?;
    let table: &Spanned<DeValue<'_>> = file.get_ref().get(table)?;
    let value = table.get_ref().as_table().and_then(|table| table.get(key));
    Some(value.unwrap_or(table).span())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_exact_in_the_largest_unit() {
        for (seconds, expected) in [
            (0.5, "500 ms"),
            (60.0, "60 s"),
            (119.0, "119 s"),
            (120.0, "2 minutes"),
            (150.0, "150 s"),
            (3600.0, "60 minutes"),
            (86_400.0, "24 hours"),
            (28.0 * 86_400.0, "28 days"),
            (365.0 * 86_400.0, "365 days"),
        ] {
            assert_eq!(format_window(seconds), expected);
        }
    }
}
