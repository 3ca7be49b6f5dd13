//! A reverse proxy based on the quick start and the rate limiter guide of Pingora, with one upstream and without load
//! balancer. A denial keeps the connection open, and the upstream gets X-Forwarded-For, as with the other proxies of the
//! benchmark. A limit is Pingora's estimate of the number of requests in a fixed window. The argument is the
//! configuration file of Pingora, which also contains the addresses of this proxy. `--version` prints the version of
//! Pingora.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::listeners::tls::TlsSettings;
use pingora::prelude::{HttpPeer, Opt, ProxyHttp, Result, Server, Session, http_proxy_service};
use pingora_limits::rate::Rate;

struct Proxy {
    upstream: SocketAddr,
    wide: Limit,
    hundred: Limit,
}

/// Admits `max` requests of a client per interval.
struct Limit {
    rate: Rate,
    max: isize,
}

impl Limit {
    fn per(interval: Duration, max: isize) -> Self {
        Limit { rate: Rate::new(interval), max }
    }
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn request_filter(&self, session: &mut Session, (): &mut ()) -> Result<bool> {
        let request = session.req_header();
        let limit = match request.uri.path() {
            "/local" => &self.wide,
            "/local-100" => &self.hundred,
            _ => return Ok(false),
        };
        let Some(client) = request.headers.get("x-api-key") else { return Ok(false) };
        if limit.rate.observe(&client.as_bytes(), 1) <= limit.max {
            return Ok(false);
        }
        let mut response = ResponseHeader::build(429, None)?;
        response.insert_header("Content-Length", "0")?;
        session.write_response_header(Box::new(response), true).await?;
        Ok(true)
    }

    async fn upstream_peer(&self, _: &mut Session, (): &mut ()) -> Result<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(self.upstream, false, String::new())))
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestHeader,
        (): &mut (),
    ) -> Result<()> {
        if let Some(client) = session.client_addr().and_then(|address| address.as_inet()) {
            request.insert_header("X-Forwarded-For", client.ip().to_string())?;
        }
        Ok(())
    }
}

fn main() {
    let argument = std::env::args().nth(1).expect("the configuration file");
    if argument == "--version" {
        let lock = include_str!("../Cargo.lock");
        let entry = lock.split_once("name = \"pingora\"\nversion = \"").expect("pingora in Cargo.lock").1;
        return println!("Pingora {}", entry.split('"').next().unwrap_or_default());
    }
    let text = std::fs::read_to_string(&argument).expect("a readable configuration");
    let settings: HashMap<_, _> = text.lines().filter_map(|line| line.split_once(": ")).collect();
    let mut server = Server::new(Opt { conf: Some(argument), ..Opt::default() }).expect("a valid configuration");
    server.bootstrap();
    let proxy = Proxy {
        upstream: settings["upstream"].parse().expect("an address"),
        wide: Limit::per(Duration::from_secs(1), 1_000_000),
        hundred: Limit::per(Duration::from_secs(60), 100),
    };
    let mut service = http_proxy_service(&server.configuration, proxy);
    service.add_tcp(settings["clear"]);
    let mut tls = TlsSettings::intermediate(settings["certificate"], settings["key"]).expect("a certificate");
    tls.enable_h2();
    service.add_tls_with_settings(settings["tls"], None, tls);
    server.add_service(service);
    server.run_forever();
}
