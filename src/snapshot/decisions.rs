//! Compiles the settings of listeners with `protocol = "decisions"`.

use std::fmt;
use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode};

use crate::config::error::Issue;
use crate::config::gateway;
use crate::http::headers::HeaderAliases;
use crate::snapshot::validator::Validator;

/// Settings of a listener with `protocol = "decisions"`.
#[derive(Debug, Default)]
pub struct DecisionSettings {
    /// Status of responses that deny a request with a status other than 401 and 403. `None` for the status of the
    /// decision.
    pub denied_status: Option<StatusCode>,
    /// Token for the JSON API. `None` if the API is off.
    pub api_token: Option<ApiToken>,
    /// Maximum time between a decision and its settlement by a program. `None` if the listener makes no decisions that
    /// have to be settled.
    pub settle_timeout: Option<Duration>,
    identity_headers: Vec<HeaderName>,
    aliases: HeaderAliases,
}

/// Token for the JSON API. The `Debug` implementation does not print it.
pub struct ApiToken(Box<str>);

impl ApiToken {
    /// Return the token as written in the configuration.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for ApiToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl DecisionSettings {
    /// Set the names of the headers that routes set in requests to upstreams.
    pub(super) fn set_identity_headers(&mut self, names: Vec<HeaderName>) {
        self.aliases = HeaderAliases::from_names(&names);
        self.identity_headers = names;
    }

    /// Return the names of the headers that routes of the listener set in requests to upstreams. Each response that
    /// admits a request has all of them, so that the proxy replaces the headers of its clients.
    pub fn identity_headers(&self) -> &[HeaderName] {
        &self.identity_headers
    }

    /// Return a header that servers may mistake for an identity header, such as `X_User` for `X-User`.
    pub fn forged_header<'h>(&self, headers: &'h HeaderMap) -> Option<&'h HeaderName> {
        if self.aliases.is_empty() {
            return None;
        }
        headers.keys().find(|name| self.aliases.contains(name) && !self.identity_headers.contains(name))
    }
}

/// Compile the settings of a listener for decisions.
pub(super) fn settings(
    listener: &gateway::Listener,
    trusted_proxies: usize,
    reader: &mut Validator<'_>,
) -> DecisionSettings {
    let api_token = listener.api_token.as_ref().filter(|token| !token.get_ref().is_empty());
    if let Some(text) = listener.protocol.as_ref().filter(|_| trusted_proxies == 0 && api_token.is_none()) {
        let message = "a listener for decisions requires trusted proxies, but there are none: every request would be \
                       rejected";
        let hint = "set trusted_proxies = [\"10.0.0.0/8\"] in [client_ip] to the addresses of the proxies that ask for \
                    decisions, or `api_token` for programs";
        reader.push_missing_elsewhere(Issue::new(text.span(), message).with_hint(hint));
    }
    let denied_status = listener.denied_status.as_ref().map(|value| reader.number(Some(value), 400..500, 403));
    let denied_status = denied_status.and_then(|status| StatusCode::from_u16(status as u16).ok());
    let api_token = api_token.map(|token| ApiToken(token.get_ref().as_str().into()));
    if let Some(text) = listener.settle_timeout.as_ref().filter(|_| api_token.is_none()) {
        reader.push_missing(Issue::new(text.span(), "`settle_timeout` requires `api_token`"));
    }
    let settle_timeout = listener.settle_timeout.as_ref();
    let settle_timeout = settle_timeout.map(|text| reader.duration(Some(text), Duration::from_secs(60)));
    DecisionSettings { denied_status, api_token, settle_timeout, ..DecisionSettings::default() }
}
