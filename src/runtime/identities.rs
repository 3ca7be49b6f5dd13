//! Who asks: client addresses, API keys, consumers.

use ipnet::IpNet;

use super::reader::Reader;
use crate::config;
use crate::config::error::{FaultyFile, Issue};
use crate::config::file;
use crate::identity::api_key::{ApiKeys, Consumers, OnUnknown, key_hash};
use crate::identity::client_ip::ClientIp;

pub(super) fn client_ip(client_ip: &config::ClientIp, reader: &mut Reader<'_>) -> ClientIp {
    let mut trusted = Vec::new();
    for text in &client_ip.trusted_proxies {
        let address = || text.get_ref().parse::<std::net::IpAddr>().ok().map(IpNet::from);
        match text.get_ref().parse::<IpNet>().ok().or_else(address) {
            Some(net) => trusted.push(net),
            None => {
                let issue = Issue::at(text.span(), format!("`{}` is not an address or a network", text.get_ref()));
                reader.issue(issue.hint("such as \"10.0.0.0/8\" or \"2001:db8::/32\""));
            }
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

pub(super) fn api_keys(api_key: &config::ApiKey, reader: &mut Reader<'_>) -> ApiKeys {
    let mut keys = ApiKeys::default();
    if let Some(header) = api_key.header.as_ref().and_then(|text| reader.header_name(text.span(), text.get_ref())) {
        keys.header = header;
    }
    keys.anonymous_if_missing =
        reader.choice(api_key.on_missing.as_ref(), false, &[("reject", false), ("anonymous", true)]);
    let unknown = [("reject", OnUnknown::Reject), ("anonymous", OnUnknown::Anonymous), ("accept", OnUnknown::Accept)];
    keys.on_unknown = reader.choice(api_key.on_unknown.as_ref(), OnUnknown::Reject, &unknown);
    if let Some(text) = &api_key.consumers {
        let path = reader.path(text.get_ref());
        match file::consumers(&path, reader.environment) {
            Ok(file) => {
                let mut issues = file.issues;
                keys.consumers = consumers(&file.value, &mut issues);
                if !issues.is_empty() {
                    reader.other_file(FaultyFile { path, text: file.text, issues });
                }
            }
            Err(faulty) => reader.other_file(faulty),
        }
    }
    keys
}

fn consumers(file: &config::Consumers, issues: &mut Vec<Issue>) -> Consumers {
    let mut consumers = Consumers::default();
    let mut names: Vec<&str> = Vec::new();
    for consumer in &file.consumer {
        let place = consumer.span();
        let consumer = consumer.get_ref();
        let name = match &consumer.name {
            Some(name) if !name.get_ref().is_empty() => name.get_ref(),
            _ => {
                issues.push(Issue::at(place, "a consumer needs a `name`"));
                continue;
            }
        };
        if names.contains(&name.as_str()) {
            issues.push(Issue::at(place, format!("a second consumer `{name}`")).hint("give it its keys in one place"));
        }
        names.push(name);
        for key in &consumer.keys {
            let Some(hash) = key_hash(key.get_ref()) else {
                // The text itself may be a key that somebody pasted: it is shown in the line, not repeated.
                let hint = "\"sha256:\" and 64 lower-case hex digits: printf %s KEY | sha256sum";
                issues.push(Issue::at(key.span(), "this is not the hash of a key").hint(hint));
                continue;
            };
            if let Err(other) = consumers.insert(hash, name) {
                issues.push(Issue::at(key.span(), format!("the key belongs to `{other}` already")));
            }
        }
    }
    consumers
}
