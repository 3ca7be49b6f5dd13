//! Who asks: client addresses, API keys, tokens, what limits are by.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;

use super::reader::Reader;
use crate::config;
use crate::config::error::Issue;
use crate::identity::api_key::{ApiKeys, OnUnknown};
use crate::identity::client_ip::ClientIp;
use crate::identity::jwks::KeySet;
use crate::identity::jwt::Verifier;
use crate::identity::{By, Exempt, OnMissing, Source, cookie_value};
use crate::watch::Snapshot;

/// The word of `by` for addresses.
const IP: &str = "ip";

pub(super) fn client_ip(client_ip: &config::ClientIp, reader: &mut Reader<'_>) -> ClientIp {
    let mut trusted = Vec::new();
    for text in client_ip.trusted_proxies.iter().flatten() {
        match network(text.get_ref()) {
            Some(net) => trusted.push(net),
            None => not_a_network(text.get_ref(), text.span(), reader),
        }
    }
    let header = client_ip.header.as_ref().and_then(|text| reader.header_name(text.span(), text.get_ref()));
    ClientIp {
        trusted,
        header: header.unwrap_or(http::HeaderName::from_static("x-forwarded-for")),
        ipv4_prefix: reader.number(client_ip.ipv4_prefix.as_ref(), 0..33, 32) as u8,
        ipv6_prefix: reader.number(client_ip.ipv6_prefix.as_ref(), 0..129, 64) as u8,
    }
}

pub(super) fn by(limit: &config::Limit, place: &Range<usize>, reader: &mut Reader<'_>) -> By {
    let missing = [("reject", OnMissing::Reject), ("skip", OnMissing::Skip), ("ip", OnMissing::Ip)];
    let on_missing = reader.choice(limit.on_missing.as_ref(), OnMissing::Reject, &missing);
    let mut sources = Vec::new();
    if let Some(list) = reader.required(limit.by.as_ref(), place, "by", "\"ip\"") {
        if list.get_ref().0.is_empty() {
            reader.issue(Issue::at(list.span(), "`by` is empty").hint("\"global\" counts all requests together"));
        }
        for text in &list.get_ref().0 {
            sources.extend(source(text, list.span(), reader));
        }
    }
    let exempt = exempt(limit, &sources, on_missing, reader);
    let methods = reader.methods(limit.methods.as_deref(), place);
    By { sources, on_missing, methods, exempt }
}

/// The sources of exempt values are those of `by`; `ip` as well where the address stands in for another source.
fn exempt(limit: &config::Limit, sources: &[Source], on_missing: OnMissing, reader: &mut Reader<'_>) -> Exempt {
    let mut exempt = Exempt::default();
    let by_address = sources.contains(&Source::Ip) || sources.contains(&Source::ApiKey) || on_missing == OnMissing::Ip;
    for text in &limit.exempt {
        let written = text.get_ref();
        let (word, value) = match written.split_once('=') {
            Some((word, value)) => (word, value),
            None if *sources == [Source::Ip] => (IP, written.as_str()),
            None => ("", written.as_str()),
        };
        let source = match word {
            IP => by_address.then_some(&Source::Ip),
            _ => sources.iter().find(|source| source.is_called(word)),
        };
        match source {
            None => {
                let words: Vec<_> = sources.iter().map(|source| format!("\"{}={written}\"", source.word())).collect();
                let issue = Issue::at(text.span(), format!("`{written}` does not name a source of `by`"));
                let hint = match &*words {
                    [] => "SOURCE=VALUE, the source as in `by`".to_owned(),
                    words => format!("SOURCE=VALUE, the source as in `by`: {}", words.join(" or ")),
                };
                reader.issue(issue.hint(hint));
            }
            Some(_) if value.is_empty() => {
                reader.issue(Issue::at(text.span(), format!("`{written}` has no value after `=`")));
            }
            Some(Source::Ip) => match network(value) {
                Some(net) => exempt.networks.push(net),
                None => not_a_network(value, text.span(), reader),
            },
            // Hosts are compared in lower case, as requests are routed.
            Some(Source::Host) => exempt.values.push((Source::Host, value.to_ascii_lowercase().into())),
            // Cookies are compared decoded, as in requests.
            Some(source @ Source::Cookie(_)) => {
                let decoded = String::from_utf8_lossy(&cookie_value(value.as_bytes())).as_ref().into();
                exempt.values.push((source.clone(), decoded));
            }
            Some(source) => exempt.values.push((source.clone(), value.into())),
        }
    }
    exempt
}

fn source(text: &str, span: Range<usize>, reader: &mut Reader<'_>) -> Option<Source> {
    const ALL: &str = "api-key ip user:HEADER header:NAME cookie:NAME query:NAME path:PARAM jwt:CLAIM client-cert host route method global";
    match text.split_once(':') {
        None => match text {
            "api-key" => return Some(Source::ApiKey),
            "client-cert" => return Some(Source::ClientCert),
            "ip" => return Some(Source::Ip),
            "host" => return Some(Source::Host),
            "method" => return Some(Source::Method),
            "global" => return Some(Source::Global),
            "route" => return Some(Source::Route),
            _ => reader.unknown_name(span, "identity", text, ALL.split(' ')),
        },
        Some(("user", name)) => return reader.header_name(span, name).map(Source::User),
        Some(("header", name)) => return reader.header_name(span, name).map(Source::Header),
        Some(("cookie", name)) if !name.is_empty() => return Some(Source::Cookie(name.into())),
        Some(("query", name)) if !name.is_empty() => return Some(Source::Query(name.into())),
        Some(("jwt", name)) if !name.is_empty() => return Some(Source::Jwt(name.into())),
        Some(("path", name)) if !name.is_empty() => return Some(Source::Path(name.into())),
        Some(_) => reader.unknown_name(span, "identity", text, ALL.split(' ')),
    }
    None
}

fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

fn not_a_network(text: &str, span: Range<usize>, reader: &mut Reader<'_>) {
    let issue = Issue::at(span, format!("`{text}` is not an address or a network"));
    reader.issue(issue.hint("such as \"10.0.0.0/8\" or \"2001:db8::/32\""));
}

pub(super) fn api_keys(api_key: &config::ApiKey, reader: &mut Reader<'_>) -> ApiKeys {
    let mut keys = ApiKeys::default();
    if let Some(header) = api_key.header.as_ref().and_then(|text| reader.header_name(text.span(), text.get_ref())) {
        keys.header = header;
    }
    keys.anonymous_if_missing =
        reader.choice(api_key.on_missing.as_ref(), false, &[("reject", false), ("anonymous", true)]);
    let unknown = [("reject", OnUnknown::Reject), ("anonymous", OnUnknown::Anonymous), ("accept", OnUnknown::Accept)];
    keys.on_unknown = reader.choice(api_key.on_unknown.as_ref(), OnUnknown::Reject, &unknown);
    keys
}

/// What tokens are checked against, and the file of its keys as it was read.
pub(super) fn jwt(jwt: &config::Jwt, reader: &mut Reader<'_>) -> (Verifier, Option<Snapshot>) {
    let words = |text: &Option<config::Text>| text.as_ref().map(|text| text.get_ref().as_str().into());
    let mut verifier =
        Verifier { issuer: words(&jwt.issuer), audience: words(&jwt.audience), keys: ArcSwap::default() };
    let Some(text) = &jwt.jwks_file else { return (verifier, None) };
    let path = reader.path(text.get_ref());
    let file = match Snapshot::read(&path) {
        Ok(file) => file,
        Err(error) => {
            let issue = Issue::at(text.span(), format!("{} cannot be read: {error}", path.display()));
            reader.issue(issue.hint("the JSON Web Key Set of the issuer, such as \"certs/jwks.json\""));
            return (verifier, None);
        }
    };
    match KeySet::parse(&file.content) {
        Ok(keys) => verifier.keys = ArcSwap::new(Arc::new(keys)),
        Err(error) => reader.issue(Issue::at(text.span(), format!("{} cannot be used: {error}", path.display()))),
    }
    (verifier, Some(file))
}
