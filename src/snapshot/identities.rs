//! Compiles client addresses, the identities of limits, and the networks of `allow` and `deny`.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use ipnet::IpNet;

use crate::config;
use crate::config::error::{FileIssues, Issue};
use crate::config::gateway;
use crate::config::schema::IDENTITY_SOURCES;
use crate::config::sources::{FileSnapshot, utf8_text};
use crate::config::spanned::Text;
use crate::identity::access::{AccessRules, NetworkFile, NetworkList, NetworkSet, parse_network, parse_networks};
use crate::identity::spec::{
    ClientIpResolver, Descriptor, Exemptions, IdentitySpec, OnMissing, RpcSource, cookie_value,
};
use crate::payload::json::body::{JsonPointer, MAX_SEGMENTS};
use crate::snapshot::validator::Validator;

/// Source in `by` that selects the client network.
const IP_LABEL: &str = "ip";

/// Compile `[client_ip]`.
pub(super) fn client_ip(client_ip: &gateway::ClientIp, reader: &mut Validator<'_>) -> ClientIpResolver {
    let mut trusted = Vec::new();
    for text in client_ip.trusted_proxies.iter().flatten() {
        match parse_network(text.get_ref()) {
            Some(net) => trusted.push(net),
            None => network_issue(text.get_ref(), text.span(), reader),
        }
    }
    let header = client_ip.header.as_ref().and_then(|text| reader.header_name(text.span(), text.get_ref()));
    ClientIpResolver {
        trusted_proxies: trusted,
        header: header.unwrap_or(http::HeaderName::from_static("x-forwarded-for")),
        ipv4_prefix: reader.number(client_ip.ipv4_prefix.as_ref(), 0..33, 32) as u8,
        ipv6_prefix: reader.number(client_ip.ipv6_prefix.as_ref(), 0..129, 64) as u8,
    }
}

/// Compile the identity of a limit.
pub(super) fn identity_spec(
    limit: &config::tables::Limit,
    span: &Range<usize>,
    reader: &mut Validator<'_>,
) -> IdentitySpec {
    let missing = [("reject", OnMissing::Reject), ("skip", OnMissing::Skip), ("ip", OnMissing::Ip)];
    let mut descriptors = Vec::new();
    if let Some(list) = reader.required(limit.by.as_ref(), span, "by", "\"ip\"") {
        if list.get_ref().0.is_empty() {
            reader.push_issue(
                Issue::new(list.span(), "`by` is empty").with_hint("\"global\" counts all requests together"),
            );
        }
        for text in &list.get_ref().0 {
            descriptors.extend(descriptor(text, list.span(), reader));
        }
    }
    let on_missing = reader.one_of(limit.on_missing.as_ref(), OnMissing::Reject, &missing);
    // By default, a limit by tool or method does not apply to requests without a tool or method: some requests of an
    // MCP session call no tool, and responses that a client sends have no method.
    let skips_other_messages =
        limit.on_missing.is_none() && descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Rpc(_)));
    let exempt = exemptions(limit, &descriptors, on_missing, reader);
    let methods = reader.methods(limit.methods.as_deref(), span);
    IdentitySpec { descriptors, on_missing, skips_other_messages, methods, exemptions: exempt }
}

/// Return whether `by` contains an invalid source. Such a source is already reported, and has no entry in
/// `descriptors`.
pub(super) fn has_faulty_source(limit: &config::tables::Limit, descriptors: &[Descriptor]) -> bool {
    limit.by.as_ref().is_some_and(|by| by.get_ref().0.len() != descriptors.len())
}

/// Compile `exempt`. Each source must be in `by`. `ip` is also valid if the client network can replace another source.
fn exemptions(
    limit: &config::tables::Limit,
    descriptors: &[Descriptor],
    on_missing: OnMissing,
    reader: &mut Validator<'_>,
) -> Exemptions {
    let mut exemptions = Exemptions::default();
    let by_address = descriptors.contains(&Descriptor::Ip)
        || descriptors.contains(&Descriptor::ApiKey)
        || on_missing == OnMissing::Ip;
    for text in &limit.exempt {
        let written = text.get_ref();
        let (label, value) = match written.split_once('=') {
            Some((word, value)) => (word, value),
            None if *descriptors == [Descriptor::Ip] => (IP_LABEL, written.as_str()),
            None => ("", written.as_str()),
        };
        let descriptor = match label {
            IP_LABEL => by_address.then_some(&Descriptor::Ip),
            _ => descriptors.iter().find(|descriptor| descriptor.matches_label(label)),
        };
        match descriptor {
            // Report nothing, because the item may refer to the invalid source in `by`, which is already reported.
            None if has_faulty_source(limit, descriptors) => {}
            None => {
                let examples: Vec<_> =
                    descriptors.iter().map(|descriptor| format!("\"{}={written}\"", descriptor.label())).collect();
                let issue =
                    Issue::new(text.span(), format!("`{written}` does not begin with a source that `by` lists"));
                let hint = match &*examples {
                    [] => "write SOURCE=VALUE, with a source in `by`".to_owned(),
                    words => format!("write SOURCE=VALUE, with one of the sources in `by`: {}", words.join(" or ")),
                };
                reader.push_missing(issue.with_hint(hint));
            }
            Some(_) if value.is_empty() => {
                reader.push_issue(Issue::new(text.span(), format!("`{written}` has no value after `=`")));
            }
            Some(Descriptor::Ip) => match parse_network(value) {
                Some(net) => exemptions.networks.push(net),
                None => network_issue(value, text.span(), reader),
            },
            // Convert hosts to lower case, as routing does for requests.
            Some(Descriptor::Host) => exemptions.values.push((Descriptor::Host, value.to_ascii_lowercase().into())),
            // Decode cookie values, as for cookies of requests.
            Some(descriptor @ Descriptor::Cookie(_)) => {
                let decoded = String::from_utf8_lossy(&cookie_value(value.as_bytes())).as_ref().into();
                exemptions.values.push((descriptor.clone(), decoded));
            }
            Some(descriptor) => exemptions.values.push((descriptor.clone(), value.into())),
        }
    }
    exemptions
}

fn descriptor(text: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<Descriptor> {
    match text.split_once(':') {
        None => match text {
            "api-key" => return Some(Descriptor::ApiKey),
            "client-cert" => return Some(Descriptor::ClientCert),
            "basic" => return Some(Descriptor::Basic),
            "ip" => return Some(Descriptor::Ip),
            "host" => return Some(Descriptor::Host),
            "method" => return Some(Descriptor::Method),
            "global" => return Some(Descriptor::Global),
            "route" => return Some(Descriptor::Route),
            _ => reader.unknown_name(span, "identity", text, IDENTITY_SOURCES.into_iter()),
        },
        Some(("group", level)) if !level.is_empty() => return Some(Descriptor::Group(level.into())),
        Some(("user", name)) => return reader.header_name(span, name).map(Descriptor::User),
        Some(("auth", name)) => return reader.header_name(span, name).map(Descriptor::Forward),
        Some(("header", name)) => {
            return reader.routed_header_name(span, name, "by = \"host\"").map(Descriptor::Header);
        }
        Some(("cookie", name)) if !name.is_empty() => return Some(Descriptor::Cookie(name.into())),
        Some(("query", name)) if !name.is_empty() => return Some(Descriptor::Query(name.into())),
        Some(("jwt", name)) if !name.is_empty() => return Some(Descriptor::Jwt(name.into())),
        Some(("path", name)) if !name.is_empty() => return Some(Descriptor::Path(name.into())),
        Some(("form", name)) if !name.is_empty() => return Some(Descriptor::Form(name.into())),
        Some(("entry", key)) if !key.is_empty() => return Some(Descriptor::Entry(key.into())),
        Some(("basic", "user")) => return Some(Descriptor::ClaimedUser),
        Some(("json", pointer)) => return json_pointer(pointer, span, reader).map(Descriptor::Json),
        Some(("mcp", "tool")) => return Some(Descriptor::Rpc(RpcSource::McpTool)),
        Some(("mcp", "method")) => return Some(Descriptor::Rpc(RpcSource::McpMethod)),
        Some(("jsonrpc", "method")) => return Some(Descriptor::Rpc(RpcSource::Method)),
        Some(_) => reader.unknown_name(span, "identity", text, IDENTITY_SOURCES.into_iter()),
    }
    None
}

/// Compile a JSON pointer.
pub(super) fn json_pointer(text: &str, span: Range<usize>, reader: &mut Validator<'_>) -> Option<JsonPointer> {
    let pointer = JsonPointer::parse(text);
    if pointer.is_none() {
        let issue = Issue::new(span, format!("`{text}` is not a JSON pointer to a member"));
        let hint = format!("such as \"/model\" or \"/metadata/user_id\", with up to {MAX_SEGMENTS} members");
        reader.push_issue(issue.with_hint(hint));
    }
    pointer
}

/// Report text that is not an address or network.
pub(super) fn network_issue(text: &str, span: Range<usize>, reader: &mut Validator<'_>) {
    let issue = Issue::new(span, format!("`{text}` is not an address or a network"));
    reader.push_issue(issue.with_hint(match network_suggestion(text) {
        Some(network) => format!("did you mean {network}?"),
        None => "such as \"10.0.0.0/8\" or \"2001:db8::/32\"".to_owned(),
    }));
}

/// Return the network that text in the notation of another program means: a wildcard such as `10.*`, a netmask, a port
/// after the address, or a word.
fn network_suggestion(text: &str) -> Option<String> {
    match text.to_ascii_lowercase().as_str() {
        "*" | "all" | "any" | "true" => return Some("\"0.0.0.0/0\", \"::/0\"".to_owned()),
        "localhost" | "loopback" | "local" => return Some("\"127.0.0.0/8\", \"::1\"".to_owned()),
        "private" | "private_ranges" | "uniquelocal" | "linklocal" | "internal" => {
            return Some("\"10.0.0.0/8\", \"172.16.0.0/12\", \"192.168.0.0/16\", \"fc00::/7\"".to_owned());
        }
        _ => {}
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some(format!("\"{}\"", address.ip()));
    }
    if let Some((address, mask)) = text.split_once('/')
        && let (Ok(address), Ok(mask)) = (address.parse::<Ipv4Addr>(), mask.parse::<Ipv4Addr>())
    {
        return IpNet::with_netmask(address.into(), mask.into()).ok().map(|network| format!("\"{}\"", network.trunc()));
    }
    let numbers: Vec<_> = text.split('.').take_while(|part| part.parse::<u8>().is_ok()).collect();
    let mut rest = text.split('.').skip(numbers.len());
    let is_wildcard = rest.all(|part| matches!(part, "*" | "x" | "X" | "0/24" | ""));
    let prefix = numbers.join(".");
    let zeros = ".0".repeat(4_usize.checked_sub(numbers.len())?);
    ((1..4).contains(&numbers.len()) && is_wildcard).then(|| format!("\"{prefix}{zeros}/{}\"", 8 * numbers.len()))
}

// === `allow` and `deny`, and the network files that they refer to ===

/// Prefix of an item in `allow` or `deny` that refers to a network file.
const FILE_PREFIX: &str = "file:";

/// The network files, in the order in which access rules first refer to them. Each file is read once.
#[derive(Default)]
pub(super) struct NetworkFiles(pub(super) Vec<Arc<NetworkFile>>);

/// Compile `allow` and `deny` of the table at `span`. Return `None` if neither list is set.
pub(super) fn access_rules(
    allow: Option<&[Text]>,
    deny: Option<&[Text]>,
    span: &Range<usize>,
    files: &mut NetworkFiles,
    reader: &mut Validator<'_>,
) -> Option<AccessRules> {
    if allow.is_none() && deny.is_none() {
        return None;
    }
    if let Some([]) = allow {
        let issue = Issue::new(span.clone(), "`allow` is empty: every client would be rejected");
        reader.push_issue(issue.with_hint("remove `allow` to allow all clients"));
    }
    let allow = allow.map(|items| files.list(items, reader));
    let deny = files.list(deny.unwrap_or_default(), reader);
    Some(AccessRules { allow, deny })
}

impl NetworkFiles {
    fn list(&mut self, items: &[Text], reader: &mut Validator<'_>) -> NetworkList {
        let (mut networks, mut files) = (Vec::new(), Vec::new());
        for text in items {
            let item = text.get_ref();
            match (item.strip_prefix(FILE_PREFIX), parse_network(item)) {
                (Some(name), _) => files.extend(self.file(name, text, reader)),
                (None, Some(network)) => networks.push(network),
                (None, None) if item.ends_with(".txt") => {
                    let issue = Issue::new(text.span(), format!("`{item}` is not an address or a network"));
                    reader.push_issue(
                        issue.with_hint(format!("if this is the path of a file, write \"{FILE_PREFIX}{item}\"")),
                    );
                }
                (None, None) => network_issue(item, text.span(), reader),
            }
        }
        NetworkList { inline: NetworkSet::new(networks), files }
    }

    /// Return a network file. Read it only if no earlier rule refers to it.
    fn file(&mut self, name: &str, text: &Text, reader: &mut Validator<'_>) -> Option<Arc<NetworkFile>> {
        if reader.is_unresolved(text) {
            reader.push_issue(Issue::new(
                text.span(),
                "cannot find the network file, because an environment variable is not set",
            ));
            return None;
        }
        let path = reader.resolve_relative(name, text.span());
        if let Some(known) = self.0.iter().find(|known| known.file.path == path) {
            return Some(known.clone());
        }
        let file = match FileSnapshot::read(&path) {
            Ok(file) => file,
            Err(error) => {
                let issue = Issue::new(text.span(), format!("{} cannot be read: {error}", path.display()));
                reader.push_issue(issue.with_hint("give the path of a text file with one network or address per line"));
                return None;
            }
        };
        let networks = parse_network_file(&path, &file.content)
            .map_err(|faulty| reader.add_file_issues(faulty))
            .unwrap_or_default();
        let file = Arc::new(NetworkFile { name: name.into(), file, networks: ArcSwap::from_pointee(networks) });
        self.0.push(file.clone());
        Some(file)
    }
}

/// Parse the content of a network file.
pub(super) fn parse_network_file(path: &Path, content: &[u8]) -> Result<NetworkSet, FileIssues> {
    let text = utf8_text(path, content.to_vec())?;
    parse_networks(&text).map_err(|(lines, further)| {
        let issue = |span: Range<usize>| {
            let line = &text[span.clone()];
            // Give a hint for the syntax of other programs, such as `deny 10.0.0.1;` or `10.0.0.1, 10.0.0.2`.
            let mut words = line.split(|c: char| c.is_whitespace() || "\"',;".contains(c));
            let hint = match words.find(|word| parse_network(word).is_some()) {
                Some(network) => format!("write only the network in the line: {network}"),
                None => "write one network or address per line, such as 10.0.0.0/8; comments begin with `#`".to_owned(),
            };
            Issue::new(span, format!("`{line}` is not an address or a network")).with_hint(hint)
        };
        let mut issues: Vec<_> = lines.into_iter().map(|line| issue(line.span)).collect();
        if further > 0 {
            issues.push(Issue { span: None, message: format!("{further} further lines are not networks"), hint: None });
        }
        FileIssues { path: path.to_owned(), text: text.clone(), issues }
    })
}
