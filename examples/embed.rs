//! An HTTP service that limits its clients with the `sluicegate` library, without the gateway.
//!
//!     cargo run --example embed
//!     curl -i http://127.0.0.1:3000/
//!
//! Each client address has a token bucket of 5 requests per 10 seconds: bursts of 5, then one request every 2 seconds.
//! By default, the process counts requests in its own memory. With `--redis URL`, all processes that use this Redis
//! share their counters:
//!
//!     cargo run --example embed -- --redis redis://127.0.0.1:6379 --listen 127.0.0.1:3001

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use http::{Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use sluicegate::http::ratelimit_headers::{HeaderStyle, append_decision_headers};
use sluicegate::limiter::Limiter;
use sluicegate::limiter::decision::LimitCheck;
use sluicegate::limiter::key::{Identity, IdentityHasher};
use sluicegate::limiter::quota::Quota;
use sluicegate::limiter::redis::{RedisDeployment, RedisSettings};
use sluicegate::limiter::spec::{LimitSpec, OnStoreError};
use tokio::net::TcpListener;

#[derive(Parser)]
struct Options {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,
    /// Quota of each client address, such as 5/10s.
    #[arg(long, default_value = "5/10s")]
    quota: Quota,
    /// Redis server that stores the counters of all processes. Default: the memory of this process.
    #[arg(long, env = "REDIS_URL", value_name = "URL")]
    redis: Option<RedisDeployment>,
    /// Maximum time for a rate limit check in Redis, in milliseconds.
    #[arg(long, default_value = "50", value_name = "MS")]
    redis_timeout: u64,
}

/// Maximum number of clients whose counters are kept in the memory of this process.
const MAX_STATES: usize = 100_000;

struct Service {
    limiter: Limiter,
    limit: LimitSpec,
    hasher: IdentityHasher,
}

impl Service {
    async fn respond(&self, client: IpAddr) -> Response<Full<Bytes>> {
        // A check consists of a limit and the identity that is charged. A call of `check` charges either all of its
        // checks or none.
        let checks = [LimitCheck::new(&self.limit, self.identity(client))];
        let decision = match self.limiter.check(&checks).await {
            Ok(decision) => decision,
            // The limit fails closed (`OnStoreError::Deny`), so a request that cannot be checked is rejected.
            Err(error) => {
                eprintln!("{error}");
                return text_response(StatusCode::SERVICE_UNAVAILABLE, "rate limits cannot be checked\n");
            }
        };
        let mut response = match decision.admitted {
            true => text_response(StatusCode::OK, "hello\n"),
            false => text_response(StatusCode::TOO_MANY_REQUESTS, "too many requests\n"),
        };
        // Add the headers `RateLimit` and `RateLimit-Policy`, and `Retry-After` if the request is denied.
        append_decision_headers(response.headers_mut(), &[HeaderStyle::Draft11], None, &decision);
        response
    }

    /// Return the identity of a client: a keyed hash of its address, so that the store does not contain the address. An
    /// IPv6 client usually has a whole /64 network, so the hash is that of the network.
    fn identity(&self, client: IpAddr) -> Identity {
        match client.to_canonical() {
            IpAddr::V4(address) => self.hasher.hash(&address.octets()),
            IpAddr::V6(address) => self.hasher.hash(&address.octets()[..8]),
        }
    }
}

fn text_response(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    // Processes that share their counters need the same secret.
    let hasher = IdentityHasher::new("example-secret");
    // `on_store_error` applies while Redis is unavailable: `Deny` fails closed, `Allow` fails open, and `Local` (the
    // default) counts in this process.
    let limit = LimitSpec::token_bucket(&hasher, "per-client", options.quota)?;
    let limit = LimitSpec { on_store_error: OnStoreError::Deny, ..limit };
    let timeout = Duration::from_millis(options.redis_timeout);
    let limiter = match options.redis {
        Some(redis) => Limiter::redis(redis, RedisSettings { timeout, ..RedisSettings::default() }, MAX_STATES).await,
        None => Limiter::in_memory(MAX_STATES),
    };
    let service = Arc::new(Service { limiter, limit, hasher });
    let listener = TcpListener::bind(options.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        let service = service.clone();
        tokio::spawn(async move {
            let respond = service_fn(|_| async { Ok::<_, Infallible>(service.respond(peer.ip()).await) });
            let http = http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), respond);
            if let Err(error) = http.await {
                eprintln!("connection from {peer}: {error}");
            }
        });
    }
}
