//! Parses the host and the port of URLs in the configuration. A port is never replaced by a default, and a host that
//! only resembles an address is never sent to the DNS.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// The host and the port of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// DNS name or IP address, without brackets.
    pub host: Box<str>,
    /// TCP port from 1 to 65535. `None` if the URL contains no port.
    pub port: Option<u16>,
}

/// The reason why a text is not a host with an optional port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The text is empty or begins with the port.
    #[error("the host is missing")]
    MissingHost,
    /// No digit follows the colon.
    #[error("the port after `:` is missing")]
    MissingPort,
    /// Port 0 is valid only for listening.
    #[error("port 0 is not a port to connect to")]
    PortZero,
    /// The number is greater than 65535.
    #[error("port {0} is greater than 65535")]
    PortTooLarge(Box<str>),
    /// The text after the colon contains other characters than digits.
    #[error("`{0}` is not a port")]
    InvalidPort(Box<str>),
    /// An IPv6 address without brackets, or more than one colon.
    #[error("`{0}` contains several colons")]
    MissingBrackets(Box<str>),
    /// The text in brackets is not an IPv6 address.
    #[error("`{0}` is not an IPv6 address")]
    InvalidIpv6(Box<str>),
    /// The last label is a number, but the host is not an IPv4 address (WHATWG URL, "ends-in-a-number checker").
    #[error("`{0}` looks like an IPv4 address, but is none")]
    InvalidIpv4(Box<str>),
    /// The host contains an asterisk.
    #[error("`{0}` is a pattern, not a host")]
    Wildcard(Box<str>),
    /// The host has two dots in a row, or begins with a dot.
    #[error("`{0}` has an empty label")]
    EmptyLabel(Box<str>),
    /// The host is an internationalized name. The second value is its form in the DNS.
    #[error("`{0}` contains characters other than ASCII")]
    NotAscii(Box<str>, Option<String>),
    /// The host contains a character that no DNS name has.
    #[error("`{0}` is not a host: it contains `{1}`")]
    InvalidCharacter(Box<str>, char),
}

impl AddressError {
    /// Return a hint on how to correct the error.
    pub fn hint(&self) -> String {
        match self {
            AddressError::MissingHost => "write the host, such as 127.0.0.1 or api.internal".to_owned(),
            AddressError::MissingPort => "write the port, or remove the `:`".to_owned(),
            AddressError::PortZero | AddressError::PortTooLarge(_) | AddressError::InvalidPort(_) => {
                "write a port from 1 to 65535, in digits".to_owned()
            }
            AddressError::MissingBrackets(text) => match text.parse::<Ipv6Addr>() {
                Ok(address) => format!("write an IPv6 address in brackets: [{address}]"),
                Err(_) => "write HOST:PORT, and an IPv6 address in brackets: [2001:db8::1]:8080".to_owned(),
            },
            AddressError::InvalidIpv6(_) => "write an IPv6 address in brackets: [2001:db8::1]:8080".to_owned(),
            AddressError::InvalidIpv4(_) => {
                "write four numbers from 0 to 255 without leading zeros, such as 127.0.0.1".to_owned()
            }
            AddressError::Wildcard(_) => "name one server, without `*`".to_owned(),
            AddressError::EmptyLabel(_) => "remove the additional dot".to_owned(),
            AddressError::NotAscii(_, Some(ascii)) => format!("write the host as {ascii}"),
            AddressError::NotAscii(_, None) | AddressError::InvalidCharacter(..) => {
                "a host consists of letters, digits, `-`, `_` and dots".to_owned()
            }
        }
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    /// Parse `HOST` or `HOST:PORT`.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(rest) = text.strip_prefix('[') {
            let invalid = || AddressError::InvalidIpv6(text.into());
            let (host, rest) = rest.split_once(']').ok_or_else(invalid)?;
            host.parse::<Ipv6Addr>().map_err(|_| AddressError::InvalidIpv6(host.into()))?;
            let port = match rest.strip_prefix(':') {
                Some(port) => Some(parse_port(port)?),
                None if rest.is_empty() => None,
                None => return Err(invalid()),
            };
            return Ok(HostPort { host: host.into(), port });
        }
        let (host, port) = match text.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(AddressError::MissingBrackets(text.into())),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        };
        check_host(host)?;
        Ok(HostPort { host: host.into(), port: port.map(parse_port).transpose()? })
    }
}

/// Parse the port of a URL. Unlike `u16::from_str`, reject 0 and signs.
///
/// # Errors
/// The text is empty, is not a number, or is out of range.
pub fn parse_port(text: &str) -> Result<u16, AddressError> {
    if text.is_empty() {
        return Err(AddressError::MissingPort);
    }
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(AddressError::InvalidPort(text.into()));
    }
    match text.parse() {
        Ok(0) => Err(AddressError::PortZero),
        Ok(port) => Ok(port),
        Err(_) => Err(AddressError::PortTooLarge(text.into())),
    }
}

/// Check a DNS name or an IPv4 address.
fn check_host(host: &str) -> Result<(), AddressError> {
    if host.is_empty() {
        return Err(AddressError::MissingHost);
    }
    if host.contains('*') {
        return Err(AddressError::Wildcard(host.into()));
    }
    if !host.is_ascii() {
        return Err(AddressError::NotAscii(host.into(), idna::domain_to_ascii(host).ok()));
    }
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if let Some(invalid) = host.chars().find(|c| !is_allowed(c)) {
        return Err(AddressError::InvalidCharacter(host.into(), invalid));
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    if name.split('.').any(str::is_empty) {
        return Err(AddressError::EmptyLabel(host.into()));
    }
    let last = name.rsplit('.').next().unwrap_or(name);
    let hexadecimal = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit())
        || hexadecimal.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    if is_number && host.parse::<Ipv4Addr>().is_err() {
        return Err(AddressError::InvalidIpv4(host.into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports_are_parsed_exactly() {
        for (text, host, port) in [
            ("a", "a", None),
            ("a.", "a.", None),
            ("my_service:8080", "my_service", Some(8080)),
            ("127.0.0.1:1", "127.0.0.1", Some(1)),
            ("[::1]", "::1", None),
            ("[::ffff:127.0.0.1]:65535", "::ffff:127.0.0.1", Some(65_535)),
            ("1.example:080", "1.example", Some(80)),
            ("xn--bcher-kva.example", "xn--bcher-kva.example", None),
        ] {
            assert_eq!(text.parse(), Ok(HostPort { host: host.into(), port }), "{text}");
        }
        for port in ["", "0", "000", "65536", "80800", "18446744073709551617", "-1", "+80", "80a0", " 80", "8 0", "٣"]
        {
            assert!(parse_port(port).is_err(), "{port:?} is a port");
            assert!(format!("a:{port}").parse::<HostPort>().is_err(), "{port:?} is a port");
            assert!(format!("[::1]:{port}").parse::<HostPort>().is_err(), "{port:?} is a port");
        }
    }

    #[test]
    fn texts_that_only_resemble_a_host_are_rejected() {
        for text in [
            "",
            ":80",
            ".",
            "a..b",
            ".a",
            "*",
            "*.a",
            "256.1.1.1",
            "127.0.0.256",
            "127.0.0.01",
            "1.2.3",
            "1.2.3.4.5",
            "1.2.3.4.",
            "2130706433",
            "0x7f000001",
            "a.0x1",
            "[::1",
            "[]",
            "[::1]80",
            "[::1].evil",
            "[127.0.0.1]",
            "[::1%25eth0]",
            "::1",
            "::1:80",
            "a b",
            "a%20b",
            "a@b",
            "a/b",
            "bücher.example",
            "a\u{a0}b",
        ] {
            let error = text.parse::<HostPort>().expect_err(text);
            assert!(!error.hint().is_empty() && !error.to_string().ends_with('.'), "{error}");
        }
        let hint = "bücher.example:80".parse::<HostPort>().unwrap_err().hint();
        assert_eq!(hint, "write the host as xn--bcher-kva.example");
    }
}
