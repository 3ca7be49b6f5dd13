//! `sluicegate usage`: prints the usage totals of limits.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use http::Method;
use jiff::civil::Date;
use tokio::runtime::Builder;

use crate::admin::usage::{GroupBy, IdentityFilter, OTHER_MODELS, UsageFilter, UsageReport};
use crate::cli::admin::client::AdminClient;
use crate::cli::admin::{printable_text, request_target, unit_suffix, write_table};
use crate::cli::shared::load;
use crate::clock::unix_us;
use crate::identity::display::IdentityInput;
use crate::limiter::key::Identity;
use crate::limiter::redis::error::diagnose_reply;
use crate::limiter::redis::script::AlgorithmSet;
use crate::limiter::redis::{RedisDeployment, RedisSettings};
use crate::limiter::shared_data::{SharedData, UsageError};
use crate::limiter::store::RedisStore;
use crate::limiter::usage::{UsageQuery, UsageRow};

/// Timeout of a read from the store. An interactive command can wait longer than `store.timeout`, whose default is 50
/// ms.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Print usage totals: the cost that each limit charged to each identity per day
///
/// The command reads the totals from Redis. With a memory store, it reads them from the running gateway.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate usage --by month",
    "sluicegate usage --limit rate --identity acme --from 2026-11-01 --to 2026-11-30",
    "sluicegate usage --by month --from 2026-10-01 --to 2026-10-31 --csv > october.csv",
])]
pub(super) struct Arguments {
    /// Print only this limit [default: all limits with `usage`]
    #[arg(long, value_name = "NAME")]
    limit: Option<String>,

    /// Print only this identity: a consumer, a hash, or PART=VALUE for each part of the limit's `by`; may be repeated
    #[arg(long, value_name = "IDENTITY")]
    identity: Vec<String>,

    /// Group the cost of each identity by this period; `model` groups it by day and by LLM model, `kind` shows the tokens
    /// by day and kind
    #[arg(long, value_name = "PERIOD", default_value = "day", value_parser = GroupBy::NAMES)]
    by: String,

    /// Print the usage from this day on, such as 2026-11-01 [default: the first day of this month]
    #[arg(long, value_name = "DATE")]
    from: Option<Date>,

    /// Print the usage up to this day, inclusive [default: today]
    #[arg(long, value_name = "DATE")]
    to: Option<Date>,

    /// Print CSV with a header line
    #[arg(long, conflicts_with = "json")]
    csv: bool,

    /// Print a JSON object
    #[arg(long)]
    json: bool,

    /// Request the totals from the gateway at this admin listener (a URL) or admin socket (a path) [default: read
    /// Redis; with a memory store, request them from the gateway at `[admin]`]
    #[arg(long, value_name = "URL")]
    admin: Option<String>,
}

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let config = &load(config_path)?;
    let Some(by) = GroupBy::from_name(&arguments.by) else { bail!("unknown --by {}", arguments.by) };
    let report = match (&arguments.admin, &config.store.redis) {
        (None, Some((deployment, settings))) => {
            let filter = arguments.filter()?;
            let query = filter.query(config, by, unix_us(), usize::MAX)?;
            let rows = read_redis(deployment, settings, &query)?;
            UsageReport::new(config, &query, &filter, rows, by)
        }
        (None, None) => {
            let client = AdminClient::from_config(config_path, config).map_err(|error| {
                anyhow!("cannot read the usage totals in the memory of the running gateway: {error}")
            })?;
            arguments.request(&client)?
        }
        (Some(url), _) => arguments.request(&AdminClient::from_url(url)?)?,
    };
    if arguments.json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&report)?)?;
    } else if arguments.csv {
        write_csv(&report, &mut std::io::stdout().lock())?;
    } else {
        // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
        write_text(&report, &mut anstream::stdout().lock())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read_redis(
    deployment: &RedisDeployment,
    settings: &RedisSettings,
    query: &UsageQuery,
) -> anyhow::Result<Vec<UsageRow>> {
    // Configure no algorithms, so that the store loads no Lua scripts. A Redis user with read-only access has no
    // permission to load scripts.
    let algorithms = AlgorithmSet::default();
    let settings = RedisSettings { timeout: READ_TIMEOUT, algorithms, ..settings.clone() };
    let tokio_runtime = Builder::new_current_thread().enable_all().build()?;
    let rows = tokio_runtime.block_on(async {
        let store = RedisStore::new(deployment, &settings, Arc::default(), Arc::default(), Arc::default());
        SharedData(&store).read_usage(query).await
    });
    // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
    tokio_runtime.shutdown_background();
    rows.map_err(|error| {
        let reply = match &error {
            UsageError::Store(error) => error.error_reply(),
            UsageError::TooMany(_) => None,
        };
        let cause = reply.map_or_else(|| error.to_string(), diagnose_reply);
        anyhow!("cannot read the usage totals from the store: {cause}")
    })
}

impl Arguments {
    fn filter(&self) -> anyhow::Result<UsageFilter> {
        let Arguments { limit, from, to, .. } = self;
        Ok(UsageFilter { limit: limit.clone(), identity: self.identity()?, from: *from, to: *to })
    }

    fn identity(&self) -> anyhow::Result<Option<IdentityFilter>> {
        if let [name] = &self.identity[..]
            && !name.contains('=')
        {
            return Ok(Some(match Identity::from_hex(name) {
                Some(hash) => IdentityFilter::Hash(hash),
                None => IdentityFilter::Parts(IdentityInput::from([("api-key".to_owned(), name.clone())])),
            }));
        }
        let mut parts = IdentityInput::new();
        for part in &self.identity {
            let Some((label, value)) = part.split_once('=') else {
                bail!(
                    "--identity must be a consumer, a hash, or PART=VALUE for each part, such as --identity \
                     ip=192.0.2.7"
                );
            };
            parts.insert(label.to_owned(), value.to_owned());
        }
        Ok((!parts.is_empty()).then_some(IdentityFilter::Parts(parts)))
    }

    /// Read the totals from a running gateway.
    fn request(&self, client: &AdminClient) -> anyhow::Result<UsageReport> {
        let dates = [("from", self.from), ("to", self.to)];
        let mut query = vec![("by".to_owned(), self.by.clone())];
        query.extend(self.limit.iter().map(|limit| ("limit".to_owned(), limit.clone())));
        query.extend(dates.into_iter().filter_map(|(name, date)| Some((name.to_owned(), date?.to_string()))));
        match self.identity()? {
            None => {}
            Some(IdentityFilter::Hash(hash)) => query.push(("identity".to_owned(), hash.to_string())),
            Some(IdentityFilter::Parts(parts)) => query.extend(parts),
        }
        let query: Vec<_> = query.iter().map(|(name, value)| (&**name, &**value)).collect();
        let response = client.request(Method::GET, &request_target("/api/usage", &query), None)?;
        serde_json::from_value(response).context("the running gateway and this command have different versions")
    }
}

fn write_text(report: &UsageReport, out: &mut impl Write) -> std::io::Result<()> {
    let range = match &report.to {
        Some(to) => format!("from {} to {to}", report.from),
        None => format!("from {} on", report.from),
    };
    if report.usage.is_empty() {
        return writeln!(out, "no usage {range}");
    }
    let client = |consumer: &Option<String>, identity: &String| printable_text(consumer.as_ref().unwrap_or(identity));
    let cost = |cost: i64, unit: &str| format!("{cost}{}", unit_suffix(unit));
    match report.by {
        GroupBy::Identity => {
            let rows = report.usage.iter().map(|one| {
                [printable_text(&one.limit), client(&one.consumer, &one.identity), cost(one.cost, &one.unit)]
            });
            write_table(["limit", "client", "cost"], rows, &["cost"], |_| None, out)?;
        }
        GroupBy::Day | GroupBy::Month => {
            let rows = report.usage.iter().map(|one| {
                let period = one.period.clone().unwrap_or_default();
                let client = client(&one.consumer, &one.identity);
                [printable_text(&one.limit), client, printable_text(&period), cost(one.cost, &one.unit)]
            });
            let period = if report.by == GroupBy::Day { "day" } else { "month" };
            write_table(["limit", "client", period, "cost"], rows, &["cost"], |_| None, out)?;
        }
        GroupBy::Model => {
            let rows = report.usage.iter().map(|one| {
                let day = one.period.clone().unwrap_or_default();
                let client = client(&one.consumer, &one.identity);
                let model = printable_text(one.model.as_deref().unwrap_or(OTHER_MODELS));
                [printable_text(&one.limit), client, day, model, cost(one.cost, &one.unit)]
            });
            write_table(["limit", "client", "day", "model", "cost"], rows, &["cost"], |_| None, out)?;
        }
        GroupBy::Kind => {
            let rows = report.usage.iter().map(|one| {
                let day = one.period.clone().unwrap_or_default();
                let client = client(&one.consumer, &one.identity);
                let kind = one.kind.clone().unwrap_or_default();
                [printable_text(&one.limit), client, day, printable_text(&kind), one.cost.to_string()]
            });
            write_table(["limit", "client", "day", "kind", "tokens"], rows, &["tokens"], |_| None, out)?;
        }
    }
    for total in &report.totals {
        writeln!(out, "total of {} {range}: {}", printable_text(&total.limit), cost(total.cost, &total.unit))?;
    }
    Ok(())
}

/// Write CSV (RFC 4180): a header line, and one record for each entry. Only reports by model have the column `model`,
/// and only reports by kind the column `kind`.
fn write_csv(report: &UsageReport, out: &mut impl Write) -> std::io::Result<()> {
    let part = match report.by {
        GroupBy::Day | GroupBy::Month | GroupBy::Identity => "",
        GroupBy::Model => "model,",
        GroupBy::Kind => "kind,",
    };
    writeln!(out, "limit,unit,consumer,identity,period,{part}cost")?;
    for entry in &report.usage {
        let mut texts = vec![
            &*entry.limit,
            &*entry.unit,
            entry.consumer.as_deref().unwrap_or_default(),
            &*entry.identity,
            entry.period.as_deref().unwrap_or_default(),
        ];
        if !part.is_empty() {
            texts.push(entry.model.as_deref().or(entry.kind.as_deref()).unwrap_or_default());
        }
        let fields: Vec<_> = texts.into_iter().map(csv_field).collect();
        writeln!(out, "{},{}", fields.join(","), entry.cost)?;
    }
    Ok(())
}

/// Return a text as a CSV field. Begin the field with `'` if a spreadsheet would take the text for a formula, because
/// clients choose some texts, such as names of models (<https://owasp.org/www-community/attacks/CSV_Injection>).
fn csv_field(text: &str) -> String {
    let is_formula = text.starts_with(['=', '+', '-', '@', '\t', '\r', '\n', '＝', '＋', '－', '＠']);
    let text = if is_formula { &format!("'{text}") } else { text };
    match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_fields_are_quoted_if_needed() {
        for (text, expected) in [
            ("acme", "acme"),
            ("a,b", "\"a,b\""),
            ("a\"b", "\"a\"\"b\""),
            ("", ""),
            ("gpt-4+x@y=z", "gpt-4+x@y=z"),
            ("=1+1", "'=1+1"),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("@SUM(A1)", "'@SUM(A1)"),
            ("=HYPERLINK(\"http://a\",\"b\")", "\"'=HYPERLINK(\"\"http://a\"\",\"\"b\"\")\""),
            ("\t=1", "'\t=1"),
            ("\r=1", "\"'\r=1\""),
            ("＝1", "'＝1"),
        ] {
            assert_eq!(csv_field(text), expected);
        }
    }
}
