//! Compiles `statsd` of `[ratelimit]`: the server that receives the metrics of envoyproxy/ratelimit.

use std::time::Duration;

use crate::config::error::Issue;
use crate::config::gateway;
use crate::config::spanned::{Spanned, Text};
use crate::snapshot::validator::Validator;

/// The StatsD server that receives metrics, and how to write them.
#[derive(Debug, Clone)]
pub struct StatsdSettings {
    /// Host and port of the server.
    pub address: String,
    /// Transport of the lines.
    pub transport: Transport,
    /// Format of the tags.
    pub format: TagFormat,
    /// Time between two deliveries.
    pub interval: Duration,
    /// Keys and values of the tags, sorted by key.
    pub tags: Vec<(String, String)>,
}

/// Transport of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// One connection.
    Tcp,
    /// Datagrams.
    Udp,
}

/// Format of the tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagFormat {
    /// A part of the name, as the StatsD client of envoyproxy/ratelimit writes it.
    Name,
    /// A field of the line, as the agent of Datadog reads it.
    Dogstatsd,
}

/// Example of an address in error messages.
const EXAMPLE: &str = "\"127.0.0.1:8125\"";

/// Default of `interval`, as in envoyproxy/ratelimit.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);

/// Characters with a meaning in the lines of StatsD and DogStatsD.
const RESERVED: [char; 6] = [':', '|', '#', ',', '@', '='];

/// Compile `statsd`.
pub(super) fn settings(written: &Spanned<gateway::Statsd>, reader: &mut Validator<'_>) -> Option<StatsdSettings> {
    let span = written.span();
    let written = written.get_ref();
    let transport =
        reader.one_of(written.protocol.as_ref(), Transport::Udp, &[("tcp", Transport::Tcp), ("udp", Transport::Udp)]);
    let formats = [("statsd", TagFormat::Name), ("dogstatsd", TagFormat::Dogstatsd)];
    let format = reader.one_of(written.format.as_ref(), TagFormat::Name, &formats);
    let interval = reader.duration(written.interval.as_ref(), DEFAULT_INTERVAL);
    for (key, value) in &written.tags {
        let is_reserved = |c: char| RESERVED.contains(&c) || c.is_whitespace() || c.is_control();
        if key.contains(is_reserved) || value.get_ref().contains(is_reserved) {
            let issue = Issue::new(value.span(), format!("the tag `{key}` cannot be written in a line of StatsD"));
            reader.push_issue(issue.with_hint("use no white space, and none of : | # , @ ="));
        }
    }
    let address = reader.required(written.address.as_ref(), &span, "address", EXAMPLE)?;
    let tags = written.tags.iter().filter(|(key, value)| !key.is_empty() && !value.get_ref().is_empty());
    let tags = tags.map(|(key, value)| (key.clone(), value.get_ref().clone())).collect();
    Some(StatsdSettings { address: checked_address(address, reader)?, transport, format, interval, tags })
}

fn checked_address(text: &Text, reader: &mut Validator<'_>) -> Option<String> {
    let address = text.get_ref();
    let is_port = |port: &str| port.parse().is_ok_and(|port: u16| port > 0);
    match address.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && is_port(port) => Some(address.clone()),
        Some(_) | None => {
            let issue = Issue::new(text.span(), format!("`{address}` is no host with a port"));
            reader.push_issue(issue.with_hint(format!("write both, such as {EXAMPLE}")));
            None
        }
    }
}
