//! `sluicegate explain`: explains how the gateway would handle a request, without forwarding the request or charging a
//! limit.

use std::fs;
use std::io;
use std::io::{Write, stdout};
use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use clap::Args;
use http::header::HOST;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use serde_json::Value;

use crate::cli::admin::client::AdminClient;
use crate::cli::admin::{format_duration, unit_suffix};
use crate::cli::doctor;
use crate::cli::shared::{EXIT_INVALID_CONFIG, load};
use crate::clock;
use crate::clock::unix_us;
use crate::http::text::is_deceptive;
use crate::limiter::address::{AddressError, parse_port};
use crate::limiter::algorithm::{Outcome, Status};
use crate::limiter::decision::LimitCheck;
use crate::limiter::key::Identity;
use crate::limiter::overrides::{OverrideQuota, OverrideTable, Overrides};
use crate::limiter::verdict::Verdict;
use crate::payload::envoy::{Entry, RateLimitDescriptor, RateLimitRequest};
use crate::proxy::request::Peer;
use crate::snapshot::CompiledConfig;
use crate::snapshot::listeners::Listener;
use crate::tools::explain::Explainer;
use crate::tools::explain::descriptors;
use crate::tools::explain::descriptors::CallExplanation;
use crate::tools::explain::limits::{Counters, CountersUnavailable, RedisCounters, empty_overrides};
use crate::tools::explain::report::{
    AccessReport, AuthReport, ClientReport, CorsReport, EffectiveQuota, Explanation, HeaderReport, IdentityPartReport,
    LimitReport, LimitUsage, MatchedRoute, MirrorReport, OtherRoute, ResponseReport, UpstreamReport,
};

/// Maximum number of routes, apart from the matching one, that are explained without `--all`.
const MAX_OTHER_ROUTES: usize = 10;

pub(super) fn run(arguments: &Arguments, config_path: &Path) -> anyhow::Result<ExitCode> {
    let config = &load(config_path)?;
    if let Some(domain) = &arguments.domain {
        return explain_call(arguments, domain, config, config_path);
    }
    let client_request = match arguments.to_request(config) {
        Ok(client_request) => client_request,
        Err(error) => {
            anstream::eprintln!("sluicegate explain: {error}");
            return Ok(ExitCode::from(EXIT_INVALID_CONFIG));
        }
    };
    if !arguments.offline {
        for (source, fetched) in doctor::fetch_key_sets(config)? {
            // If a key set cannot be fetched, explain the request without the keys of this set, because the gateway may
            // not have them either.
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
        write_explanation(&explanation, &mut anstream::stdout().lock())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Explain how the rate limit service would decide about a call.
fn explain_call(
    arguments: &Arguments,
    domain: &str,
    config: &CompiledConfig,
    config_path: &Path,
) -> anyhow::Result<ExitCode> {
    let descriptors = arguments.descriptors.iter().map(|text| parse_descriptor(text)).collect();
    let hits_addend = arguments.hits.unwrap_or(0);
    let request = RateLimitRequest { domain: domain.to_owned().into(), descriptors, hits_addend };
    let explain_with = |counters: &dyn Counters| descriptors::explain_call(config, counters, &request);
    let explanation = if arguments.offline {
        explain_with(&CountersUnavailable("--offline".to_owned()))
    } else {
        match RedisCounters::open(config)? {
            Some(redis) => explain_with(&redis),
            None => explain_with(&AdminCounters::open(config_path, config)),
        }
    };
    let Some(explanation) = explanation else {
        anstream::eprintln!("sluicegate explain: the service denies this call, because it has too many limits");
        return Ok(ExitCode::from(EXIT_INVALID_CONFIG));
    };
    if arguments.json {
        writeln!(stdout(), "{}", serde_json::to_string_pretty(&explanation)?)?;
    } else {
        write_call(&explanation, &mut anstream::stdout().lock())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Parse `KEY=VALUE,KEY=VALUE`. `\,` stands for a comma in a value. An entry without `=` has an empty value.
fn parse_descriptor(text: &str) -> RateLimitDescriptor {
    let mut entries = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (character, entries.last_mut()) {
            (',', _) => entries.push(String::new()),
            ('\\', Some(entry)) => entry.push(characters.next_if_eq(&',').unwrap_or('\\')),
            (_, Some(entry)) => entry.push(character),
            (_, None) => {}
        }
    }
    let to_entry = |entry: &String| {
        let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
        Entry { key: key.to_owned().into(), value: value.to_owned().into() }
    };
    RateLimitDescriptor { entries: entries.iter().map(to_entry).collect(), ..RateLimitDescriptor::default() }
}

// The command-line arguments, and the request that they describe.

/// Explain how the gateway would handle a request: route, limits, response
///
/// The command sends no request to an upstream and charges no limit. It reads the limits' counters from Redis. With
/// a memory store, it reads them from the running gateway.
#[derive(Debug, Args)]
#[command(after_help = examples![
    "sluicegate explain GET https://api.example.com/v1/users/7",
    "sluicegate explain POST http://localhost:8080/v1/users -H 'x-api-key: KEY' --ip 192.0.2.7",
    "sluicegate explain GET http://localhost:8080/ping --offline --json",
    "sluicegate explain --domain edge --descriptor path=/login,remote_address=192.0.2.7",
])]
pub(super) struct Arguments {
    /// Method of the request, such as GET
    #[arg(value_name = "METHOD", required_unless_present = "domain", default_value = "", hide_default_value = true)]
    method: String,

    /// URL that the client requests, such as https://api.example.com/v1/users/7
    #[arg(value_name = "URL", required_unless_present = "domain", default_value = "", hide_default_value = true)]
    url: String,

    /// Explain a call of the rate limit service with this domain, instead of a request
    #[arg(long, value_name = "DOMAIN", requires = "descriptors", conflicts_with_all = ["method", "url"])]
    domain: Option<String>,

    /// Assume this descriptor in the call; may be repeated. Write a comma in a value as `\,`
    #[arg(long = "descriptor", value_name = "KEY=VALUE,KEY=VALUE", requires = "domain")]
    descriptors: Vec<String>,

    /// Assume this cost of the call (`hits_addend`) [default: 1]
    #[arg(long, value_name = "N", requires = "domain")]
    hits: Option<u32>,

    /// Add this request header, written as for curl's -H; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,

    /// Assume this request body; `@FILE` reads the body from a file, as with curl [default: no body]
    #[arg(short = 'd', long, value_name = "TEXT")]
    body: Option<String>,

    /// Assume that the connection comes from this address: the client's address, or the address of a proxy that sends
    /// the client's address in a header
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    ip: String,

    /// Assume a TLS connection, regardless of the scheme of the URL
    #[arg(long)]
    tls: bool,

    /// Assume a connection to the listener with this name or address [default: the first listener with the scheme and
    /// port of the URL; if there is none, the first listener with the scheme]
    #[arg(long, value_name = "NAME")]
    listener: Option<String>,

    /// Explain all routes that the request does not use, not only the 10 routes that come closest to a match
    #[arg(long)]
    pub(crate) all: bool,

    /// Do not read the limits' counters, and do not fetch the key sets of token issuers
    #[arg(long)]
    pub(crate) offline: bool,

    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The request to explain, and the peer that sends it.
#[derive(Debug)]
pub(crate) struct ClientRequest {
    pub(crate) request: Request<()>,
    pub(crate) body: Vec<u8>,
    pub(crate) peer: Peer,
}

/// The reason why the arguments are invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArgumentError {
    #[error("write the method in upper case: {}", .0.to_ascii_uppercase())]
    LowercaseMethod(String),
    #[error("`{0}` is not a method; write the method before the URL: explain GET {EXAMPLE_URL}")]
    InvalidMethod(String),
    #[error("`{0}` has no host: give the whole URL, such as http://localhost{0}")]
    MissingHost(String),
    #[error("`{0}` has no scheme: write http://{0} or https://{0}")]
    MissingScheme(String),
    #[error("write http:// or https:// as the scheme of the URL, not `{0}`")]
    UnsupportedScheme(String),
    #[error("an IPv6 address needs brackets in a URL: http://[2001:db8::1]/")]
    MissingBrackets,
    #[error("remove user and password from the URL, and pass them as clients send them: -H 'Authorization: Basic …'")]
    UserInfo,
    #[error("{0}: {hint}", hint = .0.hint())]
    InvalidPort(AddressError),
    #[error("`{0}` is not a URL: percent-encode spaces and non-ASCII characters (%20)")]
    InvalidUrl(String),
    #[error("-H '{0}' is not a header: write -H 'name: value'")]
    InvalidHeader(String),
    #[error("--body: cannot read {0}: {1}")]
    UnreadableBody(String, String),
    #[error(
        "--ip {0} is not an address: write an address such as 192.0.2.7 or 2001:db8::7, without port and prefix length"
    )]
    InvalidAddress(String),
    #[error("--listener {0}: the configuration has no such listener; its listeners are {1}")]
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
            let has_port = |listener: &Listener| {
                listener.address.tcp().is_some_and(|address| address.port() == port.unwrap_or(default_port))
            };
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
    if let Some((_, port)) = authority.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
        parse_port(port).map_err(ArgumentError::InvalidPort)?;
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

// === Counters in the memory of a running gateway, over its admin API ===

/// The counters of a running gateway.
struct AdminCounters {
    client: Result<AdminClient, CountersUnavailable>,
    overrides: Overrides,
}

impl AdminCounters {
    /// Connect to the gateway at `[admin]` of the configuration and read the gateway's overrides. If the connection
    /// fails, `peek` returns the error.
    fn open(config_path: &Path, config: &CompiledConfig) -> Self {
        let overrides = empty_overrides(config);
        let client = match &config.admin {
            None => Err(CountersUnavailable(
                "the counters are in the memory of the running gateway; add the table [admin] to the configuration, so \
                 that explain can read them"
                    .to_owned(),
            )),
            Some(_) => AdminClient::from_config(config_path, config)
                .and_then(|client| {
                    let response = client.request(Method::GET, "/api/overrides", None)?;
                    response["overrides"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .for_each(|entry| add_override(&overrides, config, entry));
                    Ok(client)
                })
                .map_err(|error| counters_unavailable(&error)),
        };
        AdminCounters { client, overrides }
    }
}

fn counters_unavailable(error: &anyhow::Error) -> CountersUnavailable {
    // Print only the outermost message of the error. The causes of the error are messages of the operating system,
    // which do not help users.
    CountersUnavailable(format!("cannot read the counters in the memory of the running gateway: {error}"))
}

fn add_override(overrides: &Overrides, config: &CompiledConfig, entry: &Value) {
    let parse = || {
        let limit = config.find_limit(entry["limit"].as_str()?)?;
        let identity = Identity::from_hex(entry["identity"].as_str()?)?;
        let quota: OverrideQuota = serde_json::from_value(entry.clone()).ok()?;
        let ttl = Duration::from_secs(entry["expires_in_seconds"].as_u64()?);
        overrides.compile(limit, identity, quota, ttl).ok()
    };
    // Ignore overrides of limits that this configuration does not have.
    if let Some(parsed) = parse() {
        overrides.put(parsed);
    }
}

impl Counters for AdminCounters {
    fn overrides(&self) -> Option<Arc<OverrideTable>> {
        self.overrides.current()
    }

    fn peek(&self, checks: &[LimitCheck<'_, '_>]) -> Result<Verdict, CountersUnavailable> {
        let client = self.client.as_ref().map_err(CountersUnavailable::clone)?;
        let mut outcomes = Vec::new();
        let mut granted = 1;
        for check in checks {
            // Limit names and identity hashes need no percent-encoding, because all their characters are valid in
            // queries.
            let cost = check.required().max(1);
            let target = format!("/api/identities?limit={}&identity={}&cost={cost}", check.limit.name, check.identity);
            let response = client.request(Method::GET, &target, None).map_err(|error| counters_unavailable(&error))?;
            let outcome = parse_outcome(&response["limits"][0]).ok_or_else(|| {
                CountersUnavailable("the running gateway and this command have different versions".to_owned())
            })?;
            if outcome.status != Status::Ok && !check.limit.shadow {
                granted = 0;
            }
            outcomes.push(outcome);
        }
        Ok(Verdict::new(granted, unix_us(), outcomes))
    }
}

/// Parse the usage of an identity in a response of `/api/identities`.
fn parse_outcome(usage: &Value) -> Option<Outcome> {
    let us = |value: &Value| value.as_f64().map(|seconds| (seconds * 1e6) as u64);
    let status = match usage["decision"].as_str()? {
        "allowed" | "exempt" => Status::Ok,
        "denied" => Status::Exceeded,
        "cost_too_large" => Status::CostTooLarge,
        _ => return None,
    };
    Some(Outcome {
        status,
        remaining: usage["remaining"].as_u64()?,
        reset_us: us(&usage["reset_seconds"])?,
        retry_us: us(&usage["retry_seconds"]).unwrap_or(0),
    })
}

// === Terminal output ===

/// Maximum width of a line, in characters. A word that is longer than a line is not split.
const LINE_WIDTH: usize = 80;

/// Maximum width of the left column, which contains names, in characters.
const MAX_NAME_WIDTH: usize = 18;

const HEADING_STYLE: Style = Style::new().bold();
const SUCCESS_STYLE: Style = AnsiColor::Green.on_default();
const ERROR_STYLE: Style = AnsiColor::Red.on_default();

/// Write an explanation.
fn write_explanation(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    write_request(explanation, out)?;
    write_routes(explanation, out)?;
    write_access(explanation, out)?;
    write_cors(explanation, out)?;
    write_authentication(explanation, out)?;
    write_limits(explanation, out)?;
    write_response(explanation, out)?;
    explanation.upstream.as_ref().map_or(Ok(()), |upstream_report| write_upstream(explanation, upstream_report, out))
}

/// Write the explanation of a call of the rate limit service.
fn write_call(explanation: &CallExplanation, out: &mut impl Write) -> io::Result<()> {
    let decision = explanation.decision.unwrap_or("unknown");
    write_heading(out, &format!("Call of {}: {decision}; store: {}", explanation.domain, explanation.store))?;
    if let Some(reason) = explanation.counters_unavailable.as_ref() {
        write_paragraph(out, "  ", 2, &format!("usage is unknown: {reason}"))?;
    }
    for descriptor in &explanation.descriptors {
        write_heading(out, &format!("\n{}", descriptor.entries.join(", ")))?;
        let width = max_width(descriptor.limits.iter().map(|limit| &*limit.limit)).max("matches".len());
        let mut lines: Vec<_> = descriptor.matched.iter().map(|matched| format!("the descriptor {matched}")).collect();
        lines.extend(descriptor.notes.iter().map(|note| (*note).to_owned()));
        write_item(out, width, "matches", &lines)?;
        for limit in &descriptor.limits {
            let mut lines = vec![format!("{}, costs {}", limit.quota, limit.cost)];
            if let (Some(decision), Some(remaining)) = (limit.decision, limit.remaining) {
                let retry = limit
                    .retry_seconds
                    .map_or(String::new(), |seconds| format!(", retry in {}", format_duration(seconds)));
                lines.insert(0, format!("{}: {remaining} remaining{retry}", decision.replace('_', " ")));
            }
            lines.push(format!("by {}, identity {}", limit.by.join(" "), limit.identity));
            write_item(out, width, &limit.limit, &lines)?;
        }
    }
    Ok(())
}

fn write_request(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    write_heading(
        out,
        &format!("{} {}{}", explanation.method, explanation.host.as_deref().unwrap_or(""), explanation.raw_path),
    )?;
    let items = [("listener", &explanation.listener), ("client certificate", &explanation.client_certificate)];
    let items: Vec<_> = items.into_iter().filter_map(|(label, text)| Some((label, text.as_ref()?))).collect();
    let width = max_width(items.iter().map(|(label, _)| *label).chain(["client"]));
    if let Some(path) = explanation.path.as_ref().filter(|path| **path != explanation.raw_path) {
        write_item(out, width, "path", &[format!("{path} (canonical form)")])?;
    }
    let ClientReport { address, peer, trusted, header } = &explanation.client;
    let text = match (header, trusted) {
        (Some(header), _) => format!("{address}, from {header} of the trusted proxy {peer}"),
        (None, true) => format!("{address}, a trusted proxy that sent no client address"),
        (None, false) => format!("{address}, the peer, which is not a trusted proxy"),
    };
    write_item(out, width, "client", &[text])?;
    items.into_iter().try_for_each(|(label, text)| write_item(out, width, label, std::slice::from_ref(text)))
}

fn write_routes(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    match &explanation.route {
        Some(route) => write_matched_route(route, out)?,
        None => write_heading(out, "\nNo route")?,
    }
    if !explanation.other_routes.is_empty() {
        write_heading(out, "\nOther routes")?;
    }
    let width = max_width(explanation.other_routes.iter().map(|other| &*other.route));
    for OtherRoute { route, reason, .. } in &explanation.other_routes {
        write_item(out, width, route, std::slice::from_ref(reason))?;
    }
    match explanation.other_routes_omitted {
        0 => Ok(()),
        more => writeln!(out, "  {more} more with --all"),
    }
}

fn write_matched_route(matched: &MatchedRoute, out: &mut impl Write) -> io::Result<()> {
    let MatchedRoute { route, path, host, listeners, methods, conditions } = matched;
    write_heading(out, &format!("\nRoute {route}: {path}"))?;
    let host: Vec<_> = host.iter().cloned().collect();
    for (name, values) in [("host", &host), ("listeners", listeners), ("methods", methods)] {
        if !values.is_empty() {
            write_item(out, 9, name, &[values.join(", ")])?;
        }
    }
    if conditions.is_empty() { Ok(()) } else { write_item(out, 9, "requires", conditions) }
}

fn write_access(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if explanation.access.is_empty() {
        return Ok(());
    }
    write_heading(out, "\nAccess")?;
    explanation.access.iter().try_for_each(|AccessReport { rule, allowed, reason }| {
        let decision = if *allowed { "allows" } else { "denies" };
        write_item(out, 8, rule, &[format!("{decision} the client: {reason}")])
    })
}

fn write_cors(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    let Some(CorsReport { origin, allowed, preflight }) = &explanation.cors else { return Ok(()) };
    write_heading(out, "\nCORS")?;
    let text = match (origin, allowed) {
        (None, false) => "the request has no Origin header".to_owned(),
        (None, true) => "all origins are allowed".to_owned(),
        (Some(origin), true) => format!("{origin} is allowed"),
        (Some(origin), false) => {
            format!("the origin {origin} is not allowed: scripts of this origin cannot read the response")
        }
    };
    write_item(out, 9, "origin", &[text])?;
    match preflight {
        true => {
            write_item(out, 9, "preflight", &["the gateway responds to the preflight, and charges no limit".to_owned()])
        }
        false => Ok(()),
    }
}

fn write_authentication(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if explanation.authentication.is_empty() {
        return Ok(());
    }
    write_heading(out, "\nAuthentication")?;
    let width = max_width(explanation.authentication.iter().map(|report| &*report.provider));
    explanation.authentication.iter().try_for_each(|AuthReport { provider, kind, result, reason }| {
        let text = match *result {
            "not_checked" => format!("{kind}: {reason}"),
            result => format!("{kind}: {result}: {reason}"),
        };
        write_item(out, width, provider, &[text])
    })
}

fn write_limits(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    if explanation.limits.is_empty() {
        return Ok(());
    }
    write_heading(out, &format!("\nLimits; store: {}", explanation.store))?;
    if let Some(reason) = explanation.counters_unavailable.as_ref() {
        write_paragraph(out, "  ", 2, &format!("usage is unknown: {reason}"))?;
    }
    let width = max_width(explanation.limits.iter().map(|limit| &*limit.limit));
    explanation.limits.iter().try_for_each(|limit| write_item(out, width, &limit.limit, &limit_lines(limit)))
}

/// Return the lines about a limit.
fn limit_lines(limit: &LimitReport) -> Vec<String> {
    let shadow = if limit.shadow { " (shadow: it never denies)" } else { "" };
    if let Some(reason) = &limit.skipped {
        return vec![format!("does not apply: {reason}{shadow}")];
    }
    if let Some(error) = &limit.error {
        return vec![format!("rejects the request: {error}")];
    }
    let mut lines = Vec::new();
    if let (Some(usage), Some(quota)) = (&limit.usage, &limit.effective_quota) {
        lines.push(usage_text(usage, quota) + shadow);
    }
    if let (Some(EffectiveQuota { source, quota, unit, capacity }), Some(cost)) = (&limit.effective_quota, limit.cost) {
        let unit_note = unit_suffix(unit);
        let source_note = if source == "standard" { String::new() } else { format!(" ({source})") };
        let cost_text = if limit.post_paid {
            "the cost is known only after the response".to_owned()
        } else {
            format!("costs {cost}")
        };
        let hidden_note = if limit.announce || limit.shadow { "" } else { "; not announced in response headers" };
        lines.push(format!("{quota}{unit_note}{source_note}, {capacity} at once; {cost_text}{hidden_note}"));
    }
    let part = |IdentityPartReport { part, value, source }: &IdentityPartReport| {
        format!("{part}={}, {source}", value.as_deref().unwrap_or("(hidden)"))
    };
    lines.extend(limit.parts.iter().map(part));
    lines.extend(limit.identity.as_ref().map(|identity| format!("identity {identity}")));
    lines
}

fn usage_text(usage: &LimitUsage, effective_quota: &EffectiveQuota) -> String {
    let LimitUsage { decision, remaining, remaining_after, reset_seconds, retry_seconds, max_wait_seconds } = usage;
    let label = match decision {
        Some(word) => word.replace('_', " "),
        None => "would allow".to_owned(),
    };
    let mut text = format!("{label}: {remaining} of {} remaining", effective_quota.capacity);
    if let Some(remaining_after) = remaining_after {
        text += &format!(", {remaining_after} after this request");
    }
    if *reset_seconds > 0.0 {
        text += &format!("; resets in {}", format_duration(*reset_seconds));
    }
    match (retry_seconds, decision) {
        (Some(retry), _) => text += &format!("; retry in {}", format_duration(*retry)),
        (None, Some("denied" | "shadow_denied")) => text += "; never allowed: the cost exceeds the capacity",
        (None, _) => {}
    }
    if let Some(max_wait) = max_wait_seconds {
        text += &format!("; may be queued for {}", format_duration(*max_wait));
    }
    text
}

fn write_response(explanation: &Explanation, out: &mut impl Write) -> io::Result<()> {
    let ResponseReport { source, status, outcome, headers, removed_headers, body } = &explanation.response;
    let style = if matches!(*outcome, "ok" | "preflight" | "undecided") { SUCCESS_STYLE } else { ERROR_STYLE };
    let status_text = match (status, *source) {
        (Some(status), _) => format!("{status} from the gateway ({outcome})"),
        (None, "authentication-server") => "from the authentication server, unless it admits the request".to_owned(),
        (None, _) => "from the upstream".to_owned(),
    };
    let condition = if explanation.counters_unavailable.is_some() && explanation.decision.is_none() {
        ", if the limits allow the request"
    } else {
        ""
    };
    writeln!(out, "\n{HEADING_STYLE}Response:{HEADING_STYLE:#} {style}{status_text}{style:#}{condition}")?;
    write_headers(out, "+", headers)?;
    removed_headers.iter().try_for_each(|name| writeln!(out, "  - {name}"))?;
    body.iter().flat_map(|body| body.lines()).try_for_each(|line| write_paragraph(out, "  ", 2, line))
}

fn write_upstream(explanation: &Explanation, report: &UpstreamReport, out: &mut impl Write) -> io::Result<()> {
    let UpstreamReport { upstreams, target, set_headers, removed_headers, mirror } = report;
    write_heading(out, &format!("\nUpstream {}: {} {target}", upstreams.join(" or "), explanation.method))?;
    write_headers(out, "+", set_headers)?;
    removed_headers.iter().try_for_each(|name| writeln!(out, "  - {name}"))?;
    mirror.as_ref().map_or(Ok(()), |mirror| write_mirror(mirror, out))
}

fn write_mirror(mirror: &MirrorReport, out: &mut impl Write) -> io::Result<()> {
    let MirrorReport { upstream, percent, max_body, skipped } = mirror;
    let text = match skipped {
        Some(reason) => format!("not mirrored: {reason}"),
        None => format!("{percent} % of the requests with bodies of at most {max_body} bytes are mirrored"),
    };
    write_heading(out, &format!("\nMirror {upstream}"))?;
    write_paragraph(out, "  ", 2, &text)
}

fn write_headers(out: &mut impl Write, sign: &str, headers: &[HeaderReport]) -> io::Result<()> {
    headers.iter().try_for_each(|HeaderReport { name, value }| {
        let value = value.as_deref().unwrap_or("(as configured)");
        write_paragraph(out, &format!("  {sign} {name}: "), 6, value)
    })
}

fn write_heading(out: &mut impl Write, text: &str) -> io::Result<()> {
    let (space, text) = text.strip_prefix('\n').map_or(("", text), |text| ("\n", text));
    writeln!(out, "{space}{HEADING_STYLE}{text}{HEADING_STYLE:#}")
}

fn max_width<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| name.chars().count()).max().unwrap_or(0).min(MAX_NAME_WIDTH)
}

/// Write one item of the explanation: `name` in the left column, and `lines` in the right column.
fn write_item(out: &mut impl Write, width: usize, name: &str, lines: &[String]) -> io::Result<()> {
    let mut first = format!("  {name:width$}  ");
    for line in lines {
        write_paragraph(out, &first, width + 4, line)?;
        first = " ".repeat(width + 4);
    }
    Ok(())
}

/// Write a text wrapped at [`LINE_WIDTH`]. The first line starts with `first`. The other lines are indented by `indent`
/// spaces.
fn write_paragraph(out: &mut impl Write, first: &str, indent: usize, text: &str) -> io::Result<()> {
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split(' ') {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > LINE_WIDTH {
            writeln!(out, "{}", line.trim_end())?;
            line = " ".repeat(indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.extend(word.chars().map(|c| if c.is_control() || is_deceptive(c) { '\u{fffd}' } else { c }));
        is_empty = false;
    }
    writeln!(out, "{}", line.trim_end())
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
