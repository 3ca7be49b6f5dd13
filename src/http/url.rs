//! URLs of servers in the configuration.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use http::Uri;
use http::uri::{PathAndQuery, Scheme};

use crate::limiter::address::{AddressError, HostPort};

/// An absolute URL with `http://` or `https://`, whose host and port are ready to connect to. It contains no user name,
/// password or fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpUrl {
    uri: Uri,
    host: Box<str>,
    port: u16,
}

/// The reason why a text is not the URL of a server. No message contains a part of a user name or a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// The URL does not begin with a scheme and `://`.
    #[error("the URL has no scheme")]
    MissingScheme {
        /// The URL with a scheme, if the text begins with a valid host and port.
        correct: Option<String>,
    },
    /// The scheme is not `http` or `https`.
    #[error("the scheme `{scheme}` is not supported")]
    UnsupportedScheme {
        /// The scheme of the URL.
        scheme: String,
        /// The text after `://`, without the path and the query.
        rest: String,
    },
    /// The URL contains `@` before the path.
    #[error("the URL contains a user name or a password (text before `@`)")]
    UserInfo,
    /// The URL contains `#`.
    #[error("the URL has a fragment (text after `#`), which clients never send to a server")]
    Fragment,
    /// The host or the port is invalid.
    #[error("{0}")]
    Address(#[from] AddressError),
    /// The path or the query contains a character that is invalid in a URL.
    #[error("the URL contains a space or another character that must be percent-encoded")]
    InvalidCharacter,
    /// The URL has a path or a query, but must consist of scheme, host and port.
    #[error("the URL of a server must consist of scheme, host and port, without a path or a query")]
    NotAnOrigin {
        /// The URL without its path and query.
        origin: String,
    },
}

impl UrlError {
    /// Return a hint on how to correct the error. `example` is a valid value in quotes, and `credentials` says where
    /// credentials belong.
    pub fn hint(&self, example: &str, credentials: &str) -> String {
        match self {
            UrlError::MissingScheme { correct: Some(correct) } => {
                format!("add the scheme: \"{correct}\", or https for TLS")
            }
            UrlError::UnsupportedScheme { scheme, rest } if scheme.eq_ignore_ascii_case("ws") => {
                format!("write \"http://{rest}\"; `websocket = true` on a route permits WebSockets")
            }
            UrlError::UnsupportedScheme { scheme, rest } if scheme.eq_ignore_ascii_case("wss") => {
                format!("write \"https://{rest}\"; `websocket = true` on a route permits WebSockets")
            }
            UrlError::UnsupportedScheme { rest, .. } => {
                format!("use the scheme http or https, such as \"https://{rest}\"")
            }
            UrlError::MissingScheme { correct: None } => format!("such as {example}"),
            UrlError::UserInfo => format!("remove the text before `@`; {credentials}"),
            UrlError::Fragment => "remove `#` and the text after it".to_owned(),
            UrlError::Address(error) => error.hint(),
            UrlError::InvalidCharacter => "write a space as %20".to_owned(),
            UrlError::NotAnOrigin { origin } => format!("write \"{origin}\""),
        }
    }
}

impl FromStr for HttpUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        parse(text).map_err(|error| match error {
            // If a password contains `/`, `?` or `#`, the parser takes a part of the password for another part of the
            // URL, and `error` may contain it.
            _ if text.contains('@') => UrlError::UserInfo,
            error => error,
        })
    }
}

fn parse(text: &str) -> Result<HttpUrl, UrlError> {
    let Some((scheme, rest)) = text.split_once("://") else {
        let is_address = authority(text).parse::<HostPort>().is_ok();
        return Err(UrlError::MissingScheme {
            correct: is_address.then(|| format!("http://{}", without_target(text))),
        });
    };
    let default_port = match scheme.to_ascii_lowercase().as_str() {
        "http" => 80,
        "https" => 443,
        _ => return Err(UrlError::UnsupportedScheme { scheme: scheme.to_owned(), rest: without_target(rest) }),
    };
    if authority(rest).contains('@') {
        return Err(UrlError::UserInfo);
    }
    let HostPort { host, port } = authority(rest).parse()?;
    if rest.contains('#') {
        return Err(UrlError::Fragment);
    }
    let uri = text.parse().map_err(|_| UrlError::InvalidCharacter)?;
    Ok(HttpUrl { uri, host, port: port.unwrap_or(default_port) })
}

/// Return the part of a URL without a scheme that contains the host and the port.
fn authority(rest: &str) -> &str {
    rest.split(['/', '?', '#']).next().unwrap_or_default()
}

/// Return a URL without a scheme for a hint. Omit the path and the query, because they may contain a secret.
fn without_target(rest: &str) -> String {
    let authority = authority(rest);
    if matches!(&rest[authority.len()..], "" | "/") { authority.to_owned() } else { format!("{authority}/…") }
}

impl HttpUrl {
    /// Parse a URL that must consist of scheme, host and port.
    ///
    /// # Errors
    /// See [`UrlError`].
    pub fn parse_origin(text: &str) -> Result<Self, UrlError> {
        let url: HttpUrl = text.parse()?;
        if matches!(url.uri.path(), "" | "/") && url.uri.query().is_none() {
            return Ok(url);
        }
        // The path may be the rest of an unescaped password.
        if text.contains('@') {
            return Err(UrlError::UserInfo);
        }
        Err(UrlError::NotAnOrigin { origin: url.origin() })
    }

    /// Return the DNS name or IP address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Return the port: the default port of the scheme if the URL contains no port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Return whether the URL contains a port.
    pub fn has_port(&self) -> bool {
        self.uri.port().is_some()
    }

    /// Return host and port as written, for the `Host` header and for messages.
    pub fn authority(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }

    /// Return whether connections to the server use TLS.
    pub fn is_https(&self) -> bool {
        self.uri.scheme() == Some(&Scheme::HTTPS)
    }

    /// Return whether the host is an address of this machine.
    pub fn is_loopback(&self) -> bool {
        self.host().parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// Return scheme, host and port, as written.
    pub fn origin(&self) -> String {
        format!("{}://{}", if self.is_https() { "https" } else { "http" }, self.authority())
    }

    /// Return the path with the query, for the request line.
    pub fn target(&self) -> PathAndQuery {
        self.uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"))
    }

    /// Return the URL as a URI.
    pub fn into_uri(self) -> Uri {
        self.uri
    }

    /// Return the URL with another path and query.
    pub fn with_target(self, target: PathAndQuery) -> Self {
        let mut parts = self.uri.into_parts();
        parts.path_and_query = Some(target);
        // A URI with scheme, authority and path is always valid, so the conversion cannot fail.
        HttpUrl { uri: Uri::from_parts(parts).unwrap_or_default(), ..self }
    }
}

impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.uri.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_their_host_port_and_target() {
        for (text, host, port, target) in [
            ("http://a", "a", 80, "/"),
            ("HTTPS://a", "a", 443, "/"),
            ("http://[::1]:9000/x?y=1", "::1", 9000, "/x?y=1"),
            ("https://a:80/@team/keys", "a", 80, "/@team/keys"),
        ] {
            let url: HttpUrl = text.parse().unwrap();
            assert_eq!((url.host(), url.port(), url.target().as_str()), (host, port, target), "{text}");
            assert_eq!(url.is_https(), text.to_lowercase().starts_with("https"));
        }
    }

    #[test]
    fn errors_contain_no_part_of_a_password() {
        for text in [
            "http://user:planted@host",
            "http://planted@planted@host:80",
            "http://user:planted/x@host",
            "http://user:1/planted@host",
            "http://user:planted?x@host",
            "http://user:1#planted@host",
            "http://user:1 planted@host",
            "ftp://user:planted@host",
            "user:planted@host",
        ] {
            for error in [text.parse::<HttpUrl>().err(), HttpUrl::parse_origin(text).err()] {
                let Some(error) = error else { continue };
                let shown = format!("{error} {}", error.hint("\"http://a\"", "use a header"));
                assert!(!shown.contains("planted"), "{text}: {shown}");
            }
            assert_eq!(HttpUrl::parse_origin(text), Err(UrlError::UserInfo), "{text}");
        }
    }
}
