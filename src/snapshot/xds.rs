//! Compiles `xds` of `[ratelimit]`: the management server that sends descriptors.

use std::path::PathBuf;

use http::{HeaderMap, HeaderName, HeaderValue};
use rustls::pki_types::ServerName;

use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::gateway::Config;
use crate::config::spanned::{Spanned, Text};
use crate::http::url::HttpUrl;
use crate::payload::envoy::Struct;
use crate::payload::xds::Node;
use crate::snapshot::descriptor_files::FileOptions;
use crate::snapshot::upstreams;
use crate::snapshot::validator::Validator;

/// The management server that sends descriptors, and how to connect to it.
#[derive(Debug, Clone)]
pub struct XdsSettings {
    /// The server.
    pub url: HttpUrl,
    /// Name that the certificate of the server must have. `None` for the host of `url`.
    pub server_name: Option<ServerName<'static>>,
    /// CA certificates that verify the server. `None` for the trust roots of the system.
    pub ca: Option<PathBuf>,
    /// Certificate and private key of the gateway.
    pub certificate: Option<[PathBuf; 2]>,
    /// How the gateway introduces itself.
    pub node: Node,
    /// Headers of the call.
    pub headers: HeaderMap,
    /// How the descriptors are read.
    pub options: FileOptions,
    /// When the gateway is ready.
    pub ready_after: ReadyAfter,
}

/// What the gateway needs before its health checks succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadyAfter {
    /// Nothing.
    Start,
    /// The first valid response of the management server.
    Response,
    /// A valid response with a domain.
    Domain,
}

/// Example of a URL in error messages.
const EXAMPLE: &str = "\"http://envoy-gateway:18001\"";

/// Compile `xds`.
pub(super) fn settings(config: &Config, reader: &mut Validator<'_>) -> Option<XdsSettings> {
    let written = config.ratelimit.xds.as_ref()?;
    if let Some(text) = &config.ratelimit.configuration {
        let issue = Issue::new(text.span(), "`configuration` and `xds` cannot be combined");
        reader.push_issue(issue.with_hint("remove one of them"));
    }
    let span = written.span();
    let written = written.get_ref();
    let url = reader.required(written.url.as_ref(), &span, "url", EXAMPLE).and_then(|text| url(text, reader));
    let choices = [("start", ReadyAfter::Start), ("response", ReadyAfter::Response), ("domain", ReadyAfter::Domain)];
    let ready_after = reader.one_of(written.ready_after.as_ref(), ReadyAfter::Response, &choices);
    let headers = headers(written, reader);
    let node = Node {
        id: written.node_id.as_ref().map_or("default", |id| id.get_ref()).to_owned(),
        metadata: (!written.node_metadata.is_empty()).then(|| {
            let field = |(key, value): (&String, &Text)| (key.clone(), value.get_ref().as_str().into());
            Struct { fields: written.node_metadata.iter().map(field).collect() }
        }),
        user_agent_name: env!("CARGO_PKG_NAME").to_owned(),
        user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let options = FileOptions::new(&config.ratelimit);
    let mut settings =
        XdsSettings { url: url?, options, server_name: None, ca: None, certificate: None, node, headers, ready_after };
    if let Some(tls) = &written.tls {
        read_tls(tls, &mut settings, reader);
    }
    Some(settings)
}

fn url(text: &Text, reader: &mut Validator<'_>) -> Option<HttpUrl> {
    match HttpUrl::parse_origin(text.get_ref()) {
        Ok(url) => Some(url),
        Err(error) => {
            let hint = error.hint(EXAMPLE, "send credentials in `headers`");
            reader.push_issue(Issue::new(text.span(), error.to_string()).with_hint(hint));
            None
        }
    }
}

fn headers(written: &gateway::Xds, reader: &mut Validator<'_>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &written.headers {
        let parsed = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value.get_ref()));
        match parsed {
            (Ok(name), Ok(value)) => drop(headers.insert(name, value)),
            (Ok(_), Err(_)) | (Err(_), Ok(_) | Err(_)) => {
                let issue = Issue::new(value.span(), format!("the header `{name}` has an invalid name or value"));
                reader.push_issue(issue.with_hint("such as headers = { authorization = \"Bearer …\" }"));
            }
        }
    }
    headers
}

fn read_tls(tls: &Spanned<gateway::XdsTls>, settings: &mut XdsSettings, reader: &mut Validator<'_>) {
    if !settings.url.is_https() {
        let issue = Issue::new(tls.span(), "`tls` is valid only with a `url` at `https://`");
        reader.push_missing(issue.with_hint("write url = \"https://…\", or remove `tls`"));
    }
    let span = tls.span();
    let tls = tls.get_ref();
    let own = [tls.cert.as_ref(), tls.key.as_ref()];
    let files = upstreams::TlsFiles::read(tls.ca.as_ref(), own, span, reader);
    if let Some([cert, key]) = &files.gateway_certificate
        && let Err(issue) = upstreams::certificate(cert, key, tls.cert.as_ref().map_or(0..0, |text| text.span()))
    {
        reader.push_issue(issue);
    }
    settings.ca = files.ca.map(|file| file.path);
    settings.certificate = files.gateway_certificate.map(|files| files.map(|file| file.path));
    let name = tls.server_name.as_ref();
    settings.server_name = name.and_then(|name| upstreams::parse_server_name(name.get_ref(), name.span(), reader));
}

#[cfg(test)]
mod tests {
    use crate::config::yaml;
    use crate::payload::envoy::{Struct, Value};
    use crate::payload::xds::{Descriptor, RateLimitConfig};

    /// The reader of the YAML gets the text that the management server has sent.
    #[test]
    fn every_text_survives_the_yaml() {
        let odd =
            "\u{0}\u{1}\t\n\r\u{b}\u{1b}\u{7f}\u{80}\u{85}\u{a0}\u{2028}\u{2029}\u{feff}\u{fffe}\u{10ffff}\u{1f600}";
        let words = [
            "true", "null", "~", "1", "1e3", "- a", "a: b", "#", "'", "\"", "\\", "{", "*", "&a", "!t", "%", "@", " ",
            "",
        ];
        let single: Vec<String> = odd.chars().map(String::from).chain(words.map(str::to_owned)).collect();
        for text in single.iter().flat_map(|text| [text.clone(), format!("a{text}b"), text.repeat(2000)]) {
            let metadata = Struct { fields: [(text.clone(), Value::from(&*text))].into() };
            let descriptor = Descriptor {
                key: text.clone(),
                value: text.clone(),
                metadata: Some(metadata),
                ..Descriptor::default()
            };
            let domain = text.clone();
            let config = RateLimitConfig { name: "n".to_owned(), domain, descriptors: vec![descriptor] };
            let documents = yaml::parse(&config.to_yaml()).unwrap_or_else(|error| panic!("{text:?}: {error:?}"));
            let document = &documents[0];
            let read =
                |key: &str| document.get("descriptors").unwrap().items()[0].get(key).and_then(|node| node.text());
            assert_eq!(document.get("domain").unwrap().text(), Some(&*text), "{text:?}");
            assert_eq!(read("key"), Some(&*text), "{text:?}");
            assert_eq!(read("value").unwrap_or_default(), text, "{text:?}");
        }
    }
}
