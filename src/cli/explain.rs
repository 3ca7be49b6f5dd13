//! `sluicegate explain`: explains how the gateway would handle a request, without sending or charging it.

mod admin_client;
mod output;

use std::fs;
use std::io::{Write, stdout};
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use http::header::HOST;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, Request, Uri};

use crate::cli::EXIT_INVALID_CONFIG;
use crate::cli::doctor;
use crate::cli::explain::admin_client::AdminCounters;
use crate::limiter::clock;
use crate::proxy::context::Peer;
use crate::snapshot::{CompiledConfig, Listener};
use crate::tools::explain::Explainer;
use crate::tools::explain::limits::{Counters, CountersUnavailable, RedisCounters};
use crate::tools::explain::report::Explanation;

/// Maximum number of other routes that are explained without `--all`.
const MAX_OTHER_ROUTES: usize = 10;

pub(super) fn run(arguments: &Arguments, config: &CompiledConfig, config_path: &Path) -> anyhow::Result<ExitCode> {
    let client_request = match arguments.to_request(config) {
        Ok(client_request) => client_request,
        Err(error) => {
            anstream::eprintln!("sluicegate explain: {error}");
            return Ok(ExitCode::from(EXIT_INVALID_CONFIG));
        }
    };
    if !arguments.offline {
        for (source, fetched) in doctor::fetch_key_sets(config)? {
            // Ignore a key set that cannot be fetched, because the gateway may not have its keys either.
            if let Ok(fetched) = fetched {
                source.keys.store(fetched.keys, clock::unix_us());
            }
        }
    }
    let explain_with = |counters: &dyn Counters| {
        let routes = if arguments.all { usize::MAX } else { MAX_OTHER_ROUTES };
        Explainer { config, counters, body: &client_request.body, max_other_routes: routes }
            .explain(&client_request.request, &client_request.peer)
    };
    let explanation: Explanation = if arguments.offline {
        explain_with(&CountersUnavailable("--offline".to_owned()))
    } else {
        match RedisCounters::open(config)? {
            Some(redis) => explain_with(&redis),
            None => explain_with(&AdminCounters::open(config_path, config)),
        }
    };
    if arguments.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&explanation)?)?;
    } else {
        // The anstream crate writes colors only to a terminal, and never if NO_COLOR is set.
        output::write(&explanation, &mut anstream::stdout().lock())?;
    }
    Ok(ExitCode::SUCCESS)
}

// The command-line arguments, and the request that they describe.

/// The arguments of `sluicegate explain`.
#[derive(Debug, Args)]
pub(in crate::cli) struct Arguments {
    /// Method of the request, such as GET
    #[arg(value_name = "METHOD")]
    method: String,

    /// URL that the client requests: https://api.example.com/v1/users/7
    #[arg(value_name = "URL")]
    url: String,

    /// Add a request header, as with curl; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,

    /// Send this body, as with curl; `@FILE` reads the body from a file. Default: no body
    #[arg(short = 'd', long, value_name = "TEXT")]
    body: Option<String>,

    /// Assume that the request comes from this address: the client, or a proxy that reports the client in a header
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    ip: String,

    /// Assume a TLS connection, regardless of the scheme of the URL
    #[arg(long)]
    tls: bool,

    /// Assume a connection to the listener with this name or address [default: the first listener with the scheme and
    /// port of the URL, or if there is none, the first with its scheme]
    #[arg(long, value_name = "NAME")]
    listener: Option<String>,

    /// Explain all other routes, not only the closest 10
    #[arg(long)]
    pub(crate) all: bool,

    /// Do not read the counters of the limits
    #[arg(long)]
    pub(crate) offline: bool,

    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The request to explain, and the peer address that it comes from.
#[derive(Debug)]
pub(crate) struct ClientRequest {
    pub(crate) request: Request<()>,
    pub(crate) body: Vec<u8>,
    pub(crate) peer: Peer,
}

/// The reason why the arguments are invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArgumentError {
    #[error("methods are in upper case: {}", .0.to_ascii_uppercase())]
    LowercaseMethod(String),
    #[error("`{0}` is not a method; write the method before the URL: explain GET {EXAMPLE_URL}")]
    InvalidMethod(String),
    #[error("`{0}` has no host: give the whole URL, such as http://localhost{0}")]
    MissingHost(String),
    #[error("`{0}` has no scheme: http://{0} or https://{0}")]
    MissingScheme(String),
    #[error("write http:// or https:// as the scheme of the URL, not `{0}`")]
    UnsupportedScheme(String),
    #[error("an IPv6 address needs brackets in a URL: http://[2001:db8::1]/")]
    MissingBrackets,
    #[error("remove user and password from the URL, and pass them as clients send them: -H 'Authorization: Basic …'")]
    UserInfo,
    #[error("`{0}` is not a URL: percent-encode spaces and non-ASCII characters (%20)")]
    InvalidUrl(String),
    #[error("-H '{0}' is not a header: write -H 'name: value'")]
    InvalidHeader(String),
    #[error("--body: read {0}: {1}")]
    UnreadableBody(String, String),
    #[error(
        "--ip {0} is not an address: write an address such as 192.0.2.7 or 2001:db8::7, without port and prefix length"
    )]
    InvalidAddress(String),
    #[error("--listener {0} is not a listener of the configuration, which has {1}")]
    UnknownListener(String, String),
}

/// The URL in the examples of error messages.
const EXAMPLE_URL: &str = "http://localhost/";

impl Arguments {
    /// Build the request that the arguments describe.
    pub(crate) fn to_request(&self, config: &CompiledConfig) -> Result<ClientRequest, ArgumentError> {
        let method = parse_method(&self.method)?;
        let uri = parse_url(&self.url)?;
        let scheme = if self.tls || uri.scheme() == Some(&Scheme::HTTPS) { "https" } else { "http" };
        // Use the origin form of the request target, as HTTP/1.1 clients do (RFC 9112 §3.2.1). The host is in the Host
        // header.
        let target = uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        let mut request = Request::new(());
        *request.method_mut() = method;
        *request.uri_mut() = Uri::from(target);
        for header_line in &self.headers {
            let (name, value) =
                parse_header(header_line).ok_or_else(|| ArgumentError::InvalidHeader(header_line.clone()))?;
            request.headers_mut().append(name, value);
        }
        let host = uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
        if let (Some(host), false) = (host, request.headers().contains_key(HOST)) {
            request.headers_mut().insert(HOST, host);
        }
        let mut peer = Peer::new(parse_address(&self.ip)?, scheme, config);
        peer.listener = self.listener_index(config, scheme == "https", uri.port_u16())?;
        Ok(ClientRequest { request, body: self.body()?, peer })
    }
}

impl Arguments {
    /// Return the request body that the arguments give.
    fn body(&self) -> Result<Vec<u8>, ArgumentError> {
        let Some(text) = &self.body else { return Ok(Vec::new()) };
        match text.strip_prefix('@') {
            Some(path) => {
                fs::read(path).map_err(|error| ArgumentError::UnreadableBody(path.to_owned(), error.to_string()))
            }
            None => Ok(text.clone().into_bytes()),
        }
    }

    /// Return the index of the listener that the client connects to.
    fn listener_index(&self, config: &CompiledConfig, tls: bool, port: Option<u16>) -> Result<usize, ArgumentError> {
        let listeners = &config.listeners;
        let Some(given) = &self.listener else {
            let default_port = if tls { 443 } else { 80 };
            let has_scheme = |listener: &Listener| listener.tls.is_some() == tls;
            let has_port = |listener: &Listener| listener.address.port() == port.unwrap_or(default_port);
            let exact = listeners.iter().position(|listener| has_scheme(listener) && has_port(listener));
            return Ok(exact.or_else(|| listeners.iter().position(has_scheme)).unwrap_or(0));
        };
        let is_given =
            |listener: &Listener| listener.name.as_deref() == Some(given) || listener.address.to_string() == *given;
        listeners.iter().position(is_given).ok_or_else(|| {
            let names = listeners.iter().map(|listener| {
                listener.name.as_ref().map_or_else(|| listener.address.to_string(), ToString::to_string)
            });
            ArgumentError::UnknownListener(given.clone(), names.collect::<Vec<_>>().join(", "))
        })
    }
}

fn parse_method(text: &str) -> Result<Method, ArgumentError> {
    let is_uppercase = text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
    match Method::from_bytes(text.as_bytes()).ok() {
        Some(method) if is_uppercase => Ok(method),
        Some(_) if text.bytes().all(|byte| byte.is_ascii_alphabetic()) => {
            Err(ArgumentError::LowercaseMethod(text.to_owned()))
        }
        Some(_) | None => Err(ArgumentError::InvalidMethod(text.to_owned())),
    }
}

fn parse_url(text: &str) -> Result<Uri, ArgumentError> {
    if text.starts_with('/') && !text.starts_with("//") {
        return Err(ArgumentError::MissingHost(text.to_owned()));
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err(ArgumentError::MissingScheme(text.trim_start_matches('/').to_owned()));
    };
    if !["http", "https"].iter().any(|supported| scheme.eq_ignore_ascii_case(supported)) {
        return Err(ArgumentError::UnsupportedScheme(scheme.to_owned()));
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err(ArgumentError::UserInfo);
    }
    if !authority.starts_with('[') && authority.matches(':').count() > 1 {
        return Err(ArgumentError::MissingBrackets);
    }
    text.parse().map_err(|_| ArgumentError::InvalidUrl(text.to_owned()))
}

/// Parse `name: value`, or `name;` for an empty value, as curl does.
fn parse_header(line: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = line.split_once(':').or_else(|| Some((line.strip_suffix(';')?, "")))?;
    Some((name.trim().parse().ok()?, HeaderValue::from_str(value.trim()).ok()?))
}

fn parse_address(text: &str) -> Result<IpAddr, ArgumentError> {
    let inner = text.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(text);
    inner.parse().map_err(|_| ArgumentError::InvalidAddress(text.to_owned()))
}

#[cfg(test)]
mod arguments_tests {
    use super::*;

    #[test]
    fn invalid_arguments_name_the_mistake() {
        for (text, expected) in [
            ("/v1/users", ArgumentError::MissingHost("/v1/users".into())),
            ("api.test/v1", ArgumentError::MissingScheme("api.test/v1".into())),
            ("localhost:8080/v1", ArgumentError::MissingScheme("localhost:8080/v1".into())),
            ("//api.test/v1", ArgumentError::MissingScheme("api.test/v1".into())),
            ("ftp://api.test/", ArgumentError::UnsupportedScheme("ftp".into())),
            ("http://2001:db8::1/", ArgumentError::MissingBrackets),
            ("http://me:secret@api.test/", ArgumentError::UserInfo),
            ("http://api.test/a b", ArgumentError::InvalidUrl("http://api.test/a b".into())),
            ("http:///v1", ArgumentError::InvalidUrl("http:///v1".into())),
        ] {
            assert_eq!(parse_url(text), Err(expected), "{text}");
        }
        for text in ["http://[2001:db8::1]:80/v1?q=a:b:c@d", "HTTPS://api.test", "http://api.test:8080/"] {
            assert!(parse_url(text).is_ok(), "{text}");
        }
        assert_eq!(parse_method("get"), Err(ArgumentError::LowercaseMethod("get".into())));
        assert_eq!(parse_method("http://a/"), Err(ArgumentError::InvalidMethod("http://a/".into())));
        assert_eq!(parse_method("M-SEARCH").map(|method| method.to_string()), Ok("M-SEARCH".to_owned()));
    }

    #[test]
    fn headers_and_addresses_accept_curl_forms() {
        for (line, expected) in [
            ("X-Api-Key: a:b", Some(("x-api-key", "a:b"))),
            ("x:1", Some(("x", "1"))),
            ("x:", Some(("x", ""))),
            ("x;", Some(("x", ""))),
            ("x", None),
            ("x=1", None),
            (": 1", None),
            ("a b: 1", None),
        ] {
            let expected = expected.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            assert_eq!(parse_header(line), expected, "{line}");
        }
        for (text, is_valid) in
            [("192.0.2.7", true), ("2001:db8::7", true), ("[2001:db8::7]", true), ("192.0.2.7:80", false)]
        {
            assert_eq!(parse_address(text).is_ok(), is_valid, "{text}");
        }
    }
}
