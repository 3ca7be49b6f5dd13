//! The arguments of `sluicegate replay`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::replay::size::QuotaProposal;
use crate::replay::view::IdentityField;

/// The arguments.
#[derive(Debug, Args)]
pub(in crate::cli) struct Arguments {
    /// Access logs, compressed with gzip or not; `-` is standard input
    #[arg(required = true, value_name = "LOG")]
    pub(super) logs: Vec<PathBuf>,

    /// Another quota for a limit: per-ip=600/min, or per-ip=600/min,burst=50
    #[arg(long = "limit", value_name = "NAME=QUOTA")]
    pub(super) limits: Vec<NamedValue<QuotaProposal>>,

    /// Without a configuration: what the proposed limits are by, on all requests (ip, header:NAME, global, …)
    #[arg(long, value_name = "IDENTITY", requires = "limits")]
    pub(super) by: Vec<String>,

    /// Without a configuration: how the proposed limits count (token-bucket, fixed-window, …)
    #[arg(long, value_name = "NAME", requires = "by", default_value = "token-bucket")]
    pub(super) algorithm: String,

    /// The format: common, combined, caddy, alb, cloudfront, sluicegate, or a log_format of nginx in quotes
    #[arg(long, value_name = "FORMAT")]
    pub(super) format: Option<String>,

    /// The field of the log that tells the identities of a limit apart
    #[arg(long = "identity", value_name = "LIMIT=FIELD")]
    pub(super) identities: Vec<NamedValue<IdentityField>>,

    /// Suggest the smallest quota that denies fewer than this share of requests
    #[arg(long, value_name = "SHARE", default_value = "0.1%")]
    pub(super) target: Share,

    /// Suggest nothing, and keep no request in memory
    #[arg(long, conflicts_with = "target")]
    pub(super) no_suggest: bool,

    /// As a JSON object, for programs
    #[arg(long)]
    pub(super) json: bool,

    /// Write a page with charts
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
}

/// An argument of the form NAME=VALUE.
#[derive(Debug, Clone)]
pub(super) struct NamedValue<T>(pub(super) T);

/// A share: `0.1%` or `0.001`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share(pub(super) f64);

#[derive(Debug, thiserror::Error)]
pub(super) enum ArgumentError {
    #[error("it has the form {0}")]
    InvalidForm(&'static str),
    #[error("a share is a number from 0 % to 100 %, such as 0.1%")]
    InvalidShare,
}

impl FromStr for NamedValue<QuotaProposal> {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        let form_error =
            || ArgumentError::InvalidForm("NAME=QUOTA, such as per-ip=600/min, or per-ip=600/min,burst=50");
        let (name, quota_and_burst) =
            text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(form_error)?;
        let (quota, burst) = match quota_and_burst.split_once(',') {
            None => (quota_and_burst, None),
            Some((quota, burst)) => {
                let burst = burst.trim().strip_prefix("burst=").and_then(|burst| burst.parse().ok());
                (quota, Some(burst.ok_or_else(form_error)?))
            }
        };
        Ok(NamedValue(QuotaProposal { limit: name.to_owned(), quota: quota.trim().to_owned(), burst }))
    }
}

impl FromStr for NamedValue<IdentityField> {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        match text.split_once('=') {
            Some((limit, field)) if !limit.is_empty() && !field.is_empty() => {
                Ok(NamedValue(IdentityField { limit: limit.to_owned(), field: field.to_owned() }))
            }
            _ => Err(ArgumentError::InvalidForm("LIMIT=FIELD, such as per-key=remote_user")),
        }
    }
}

impl FromStr for Share {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        let (number, unit) = match text.trim().strip_suffix('%') {
            Some(percent) => (percent.trim(), 100.0),
            None => (text.trim(), 1.0),
        };
        let share = number.parse::<f64>().map(|number| number / unit).ok();
        share.filter(|share| (0.0..=1.0).contains(share)).map(Share).ok_or(ArgumentError::InvalidShare)
    }
}
