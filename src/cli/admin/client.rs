//! Client of the admin API of a running gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::uri::{Authority, Scheme};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::snapshot::CompiledConfig;

/// Timeout of a request. The gateway may wait for its store.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a response, bytes. 1000 overrides take about 5 % of it.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// Port of a URL without a port.
const DEFAULT_HTTP_PORT: u16 = 80;

/// The admin listener of a gateway.
pub(crate) struct AdminClient {
    authority: Authority,
    token: Option<HeaderValue>,
}

impl AdminClient {
    /// Create a client for a URL. The token is `SLUICEGATE_ADMIN_TOKEN`.
    pub(crate) fn from_url(url: &str) -> anyhow::Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("--admin {url} is not a URL"))?;
        match (uri.scheme(), uri.authority(), uri.path()) {
            (Some(scheme), Some(authority), "/") if *scheme == Scheme::HTTP => {
                Ok(AdminClient { authority: authority.clone(), token: auth_header(None)? })
            }
            _ => bail!("--admin is a URL such as http://127.0.0.1:9180"),
        }
    }

    /// Create a client for the `[admin]` listener of a configuration.
    pub(crate) fn from_config(config_path: &Path, config: &CompiledConfig) -> anyhow::Result<Self> {
        let Some(admin) = &config.admin else {
            bail!(
                "{} has no [admin]: add [admin] with address = \"127.0.0.1:9180\" and a \
                 token, and restart the gateway; or name another gateway with --admin",
                config_path.display()
            );
        };
        let mut address = admin.address;
        // A listener on the unspecified address is reachable on loopback.
        match address.ip() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            IpAddr::V4(_) | IpAddr::V6(_) => {}
        }
        let configured = admin.token.as_ref().map(|token| token.as_bytes());
        Ok(AdminClient { authority: address.to_string().parse()?, token: auth_header(configured)? })
    }

    /// Send a request and parse the JSON response.
    ///
    /// # Errors
    /// The gateway is unreachable or returns an error. The message says what to do.
    pub(crate) fn request(&self, method: Method, target: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let (status, body) = self.send(REQUEST_TIMEOUT, method, target, body)?;
        self.parse_response(status, &body)
    }

    /// Send a request to a gateway that may not be running. None if none responds in time, or not as expected.
    ///
    /// # Errors
    /// The gateway rejects the token.
    pub(crate) fn try_request(
        &self,
        request_timeout: Duration,
        method: &Method,
        target: &str,
    ) -> anyhow::Result<Option<Value>> {
        match self.send(request_timeout, method.clone(), target, None) {
            Ok((status, body))
                if matches!(status, StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) =>
            {
                self.parse_response(status, &body).map(Some)
            }
            Ok(_) | Err(_) => Ok(None),
        }
    }

    fn send(
        &self,
        request_timeout: Duration,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let tokio_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let result =
            tokio_runtime.block_on(async { timeout(request_timeout, self.exchange(method, target, body)).await });
        tokio_runtime.shutdown_background();
        result.map_err(|_| anyhow!("the gateway at {} does not respond", self.authority))?
    }

    fn parse_response(&self, status: StatusCode, body: &[u8]) -> anyhow::Result<Value> {
        let json = serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
        match (status, json) {
            (StatusCode::UNAUTHORIZED, _) => bail!(
                "the gateway at {} rejects the token: SLUICEGATE_ADMIN_TOKEN, or admin.token of the configuration, must be that of \
                 the gateway",
                self.authority
            ),
            (status, Some(json)) if status.is_success() => Ok(json),
            (_, Some(json)) if json["detail"].is_string() => {
                bail!("{} (http://{})", json["detail"].as_str().unwrap_or_default(), self.authority)
            }
            (StatusCode::FORBIDDEN, _) => bail!("{}", String::from_utf8_lossy(body).trim()),
            _ => bail!("the server at {} is not a Sluicegate admin listener ({status})", self.authority),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let AdminClient { authority, token } = self;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let stream =
            TcpStream::connect((host, authority.port_u16().unwrap_or(DEFAULT_HTTP_PORT))).await.with_context(|| {
                format!("cannot connect to http://{authority}: is the gateway running with this configuration?")
            })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(target).header(HOST, authority.as_str());
        request = request.header(ACCEPT, "application/json");
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let body = match body {
            Some(body) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Bytes::from(serde_json::to_vec(body)?)
            }
            None => Bytes::new(),
        };
        let connection_error = || format!("the gateway at {authority} closed the connection: is it an HTTP port?");
        let response = sender.send_request(request.body(Full::new(body))?).await.with_context(connection_error)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
        Ok((status, body.map_err(|error| anyhow!("{}: {error}", connection_error()))?.to_bytes()))
    }
}

/// The token in the environment, if it is set.
pub(crate) fn token_from_env() -> Option<String> {
    std::env::var("SLUICEGATE_ADMIN_TOKEN").ok().filter(|text| !text.is_empty())
}

/// The Authorization header: with the token of the environment, else the configured one.
fn auth_header(configured: Option<&[u8]>) -> anyhow::Result<Option<HeaderValue>> {
    let Some(token) = token_from_env().map(String::into_bytes).or_else(|| configured.map(<[u8]>::to_vec)) else {
        return Ok(None);
    };
    let mut value = HeaderValue::from_bytes(&[b"Bearer ", &token[..]].concat())
        .map_err(|_| anyhow!("the admin token has characters that are invalid in a header"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}
