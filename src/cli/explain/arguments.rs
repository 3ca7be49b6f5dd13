//! The arguments of `sluicegate explain`, and the request that they describe.

use std::net::IpAddr;

use clap::Args;
use http::header::HOST;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, Request, Uri};

use crate::gateway::Peer;
use crate::runtime::CompiledConfig;

/// The arguments.
#[derive(Debug, Args)]
pub(in crate::cli) struct Arguments {
    /// GET, POST, …
    #[arg(value_name = "METHOD")]
    method: String,

    /// As clients call it: https://api.example.com/v1/users/7
    #[arg(value_name = "URL")]
    url: String,

    /// A header field of the request, as for curl; again for each further one
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,

    /// The address that connects: the client, or a proxy that says in a header for whom
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    ip: String,

    /// The client speaks TLS, whatever the URL says
    #[arg(long)]
    tls: bool,

    /// Explain all other routes, not only the nearest 10
    #[arg(long)]
    pub(super) all: bool,

    /// Do not look where identities stand
    #[arg(long)]
    pub(super) offline: bool,

    /// As a JSON object, for programs
    #[arg(long)]
    pub(super) json: bool,
}

/// A request, and who sends it.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) request: Request<()>,
    pub(super) peer: Peer,
}

/// What is wrong with the arguments, in words that say what to do.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ArgumentError {
    #[error("methods are in upper case: {}", .0.to_ascii_uppercase())]
    LowerCase(String),
    #[error("`{0}` is not a method; first the method, then the URL: explain GET {DEFAULT}")]
    Method(String),
    #[error("`{0}` says no host: write the URL as clients call it, such as http://localhost{0}")]
    NoHost(String),
    #[error("`{0}` has no scheme: http://{0} or https://{0}")]
    NoScheme(String),
    #[error("the scheme of a URL is http or https, not `{0}`")]
    Scheme(String),
    #[error("an IPv6 address stands in brackets in a URL: http://[2001:db8::1]/")]
    Brackets,
    #[error("leave user and password out of the URL; clients send them as -H 'Authorization: Basic …'")]
    Login,
    #[error("`{0}` is not a URL: spaces and letters beyond ASCII are percent-encoded there (%20)")]
    Url(String),
    #[error("-H '{0}' is not a header field: -H 'name: value'")]
    Header(String),
    #[error("--ip {0} is not an address: 192.0.2.7 or 2001:db8::7, without port and prefix")]
    Address(String),
}

/// For examples.
const DEFAULT: &str = "http://localhost/";

impl Arguments {
    /// The request that they describe.
    pub(super) fn asked(&self, runtime: &CompiledConfig) -> Result<Asked, ArgumentError> {
        let method = method(&self.method)?;
        let uri = url(&self.url)?;
        let scheme = if self.tls || uri.scheme() == Some(&Scheme::HTTPS) { "https" } else { "http" };
        // As clients send it to a server: path and query in the first line, the host in a field.
        let target = uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
        let mut request = Request::new(());
        *request.method_mut() = method;
        *request.uri_mut() = Uri::from(target);
        for line in &self.headers {
            let (name, value) = header(line).ok_or_else(|| ArgumentError::Header(line.clone()))?;
            request.headers_mut().append(name, value);
        }
        let host = uri.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
        if let (Some(host), false) = (host, request.headers().contains_key(HOST)) {
            request.headers_mut().insert(HOST, host);
        }
        let peer = Peer::new(address(&self.ip)?, scheme, runtime);
        Ok(Asked { request, peer })
    }
}

fn method(text: &str) -> Result<Method, ArgumentError> {
    let is_usual = text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
    match Method::from_bytes(text.as_bytes()).ok() {
        Some(method) if is_usual => Ok(method),
        Some(_) if text.bytes().all(|byte| byte.is_ascii_alphabetic()) => {
            Err(ArgumentError::LowerCase(text.to_owned()))
        }
        Some(_) | None => Err(ArgumentError::Method(text.to_owned())),
    }
}

fn url(text: &str) -> Result<Uri, ArgumentError> {
    if text.starts_with('/') && !text.starts_with("//") {
        return Err(ArgumentError::NoHost(text.to_owned()));
    }
    let Some((scheme, rest)) = text.split_once("://") else {
        return Err(ArgumentError::NoScheme(text.trim_start_matches('/').to_owned()));
    };
    if !["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
        return Err(ArgumentError::Scheme(scheme.to_owned()));
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if authority.contains('@') {
        return Err(ArgumentError::Login);
    }
    if !authority.starts_with('[') && authority.matches(':').count() > 1 {
        return Err(ArgumentError::Brackets);
    }
    text.parse().map_err(|_| ArgumentError::Url(text.to_owned()))
}

/// `name: value`, or `name;` for an empty one, as curl has them.
fn header(line: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = line.split_once(':').or_else(|| Some((line.strip_suffix(';')?, "")))?;
    Some((name.trim().parse().ok()?, HeaderValue::from_str(value.trim()).ok()?))
}

fn address(text: &str) -> Result<IpAddr, ArgumentError> {
    let inner = text.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(text);
    inner.parse().map_err(|_| ArgumentError::Address(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_told_apart() {
        for (text, expected) in [
            ("/v1/users", ArgumentError::NoHost("/v1/users".into())),
            ("api.test/v1", ArgumentError::NoScheme("api.test/v1".into())),
            ("localhost:8080/v1", ArgumentError::NoScheme("localhost:8080/v1".into())),
            ("//api.test/v1", ArgumentError::NoScheme("api.test/v1".into())),
            ("ftp://api.test/", ArgumentError::Scheme("ftp".into())),
            ("http://2001:db8::1/", ArgumentError::Brackets),
            ("http://me:secret@api.test/", ArgumentError::Login),
            ("http://api.test/a b", ArgumentError::Url("http://api.test/a b".into())),
            ("http:///v1", ArgumentError::Url("http:///v1".into())),
        ] {
            assert_eq!(url(text), Err(expected), "{text}");
        }
        for text in ["http://[2001:db8::1]:80/v1?q=a:b:c@d", "HTTPS://api.test", "http://api.test:8080/"] {
            assert!(url(text).is_ok(), "{text}");
        }
        assert_eq!(method("get"), Err(ArgumentError::LowerCase("get".into())));
        assert_eq!(method("http://a/"), Err(ArgumentError::Method("http://a/".into())));
        assert_eq!(method("M-SEARCH").map(|method| method.to_string()), Ok("M-SEARCH".to_owned()));
    }

    #[test]
    fn header_lines_and_addresses_have_the_forms_that_people_know() {
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
            assert_eq!(header(line), expected, "{line}");
        }
        for (text, fine) in
            [("192.0.2.7", true), ("2001:db8::7", true), ("[2001:db8::7]", true), ("192.0.2.7:80", false)]
        {
            assert_eq!(address(text).is_ok(), fine, "{text}");
        }
    }
}
