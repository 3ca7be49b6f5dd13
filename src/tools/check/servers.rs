//! Connects to the servers of upstreams and to authentication servers, as a gateway does, and sends nothing.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::config::error::Issue;
use crate::config::gateway::Config;
use crate::snapshot::CompiledConfig;
use crate::snapshot::remote_auth::internal_name;
use crate::upstream::dns::DnsResolver;
use crate::upstream::settings::AddressFamilies;

/// Maximum time to resolve the name of a server, and to connect to it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A server of the configuration.
struct Server<'c> {
    upstream: &'c str,
    host: &'c str,
    resolve: AddressFamilies,
    port: u16,
    is_srv: bool,
    span: Range<usize>,
}

/// Return a warning for each server that does not resolve or accepts no connection.
///
/// # Errors
/// The tokio runtime cannot be created.
pub fn unreachable_servers(parsed: &Config, config: &CompiledConfig, resolver: &DnsResolver) -> io::Result<Vec<Issue>> {
    let servers: Vec<_> = servers(parsed, config).collect();
    if servers.is_empty() {
        return Ok(Vec::new());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let results = runtime.block_on(join_all(servers.iter().map(|server| connect(server, resolver))));
    // Shut down without waiting for threads of the tokio runtime, because a DNS lookup may still block one of them.
    runtime.shutdown_background();
    let issue = |(server, result): (&Server<'_>, Result<(), String>)| {
        let Server { upstream, host, port, span, .. } = server;
        let address = match host.contains(':') {
            _ if server.is_srv => format!("srv:{host}"),
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        let message = format!("`{upstream}`: cannot connect to {address}: {}", result.err()?);
        Some(Issue::new(span.clone(), message).with_hint("start the server, or correct the URL"))
    };
    Ok(servers.iter().zip(results).filter_map(issue).collect())
}

/// Return the servers of all upstreams, and the authentication servers.
fn servers<'c>(parsed: &'c Config, config: &'c CompiledConfig) -> impl Iterator<Item = Server<'c>> {
    config.upstreams.iter().flat_map(move |settings| {
        let of_upstream = parsed
            .upstream
            .get(&*settings.name)
            .map(|upstream| upstream.get_ref().servers.iter().map(|server| server.span()).collect::<Vec<_>>());
        let of_auth = || {
            let mut auths = parsed.auth.iter().filter(|(name, _)| *internal_name(name) == *settings.name);
            auths.find_map(|(_, auth)| Some(vec![auth.get_ref().url.as_ref()?.span()]))
        };
        let spans = of_upstream.or_else(of_auth).unwrap_or_default();
        settings.servers.iter().zip(spans).map(move |(server, span)| Server {
            upstream: &settings.name,
            host: &server.host,
            resolve: settings.resolve,
            port: server.port,
            is_srv: server.is_srv,
            span,
        })
    })
}

async fn connect(server: &Server<'_>, resolver: &DnsResolver) -> Result<(), String> {
    let late = |_| format!("no response within {CONNECT_TIMEOUT:?}");
    let resolve = async || match server.is_srv {
        true => resolver.lookup_srv(server.host, server.resolve, &[]).await,
        false => resolver.lookup(server.host, None, server.resolve, &[]).await,
    };
    let addresses = match server.host.parse::<IpAddr>() {
        Ok(address) => vec![address.into()],
        Err(_) => {
            let resolved = timeout(CONNECT_TIMEOUT, resolve()).await.map_err(late)?;
            resolved.map_err(|error| error.to_string())?.addresses
        }
    };
    let mut last = "the name has no address".to_owned();
    for address in addresses {
        let port = address.target.as_ref().map_or(server.port, |target| target.port);
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(SocketAddr::new(address.ip, port))).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                last = "connection refused".to_owned()
            }
            Ok(Err(error)) => last = error.to_string(),
            Err(elapsed) => last = late(elapsed),
        }
    }
    Err(last)
}
