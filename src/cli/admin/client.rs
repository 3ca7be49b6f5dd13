//! Client of the admin API of a running gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use toml::de::DeTable;

use crate::app::listen::default_path;
use crate::cli::shared::{env_var, load_for};
use crate::config::environment::substituted;
use crate::http::url::{HttpUrl, UrlError};
use crate::snapshot::CompiledConfig;

/// Timeout of a request to the admin API. The timeout is long, because the gateway may wait for its store before it
/// responds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a response in bytes. A list of 1000 overrides takes about 5 % of this size.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// A client of a gateway's admin listener.
pub(crate) struct AdminClient {
    /// URL of the admin listener. For an admin socket, only its host is used, as the `Host` header.
    url: HttpUrl,
    token: Option<HeaderValue>,
    /// The admin socket to connect to. If it is `None`, the client connects to `url` over TCP.
    socket: Option<PathBuf>,
}

/// Timeout of a reload. Before the gateway responds, it resolves the names of new upstream servers and waits for other
/// reloads to finish.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(60);

impl AdminClient {
    /// Find the running gateway. `admin` is a URL or the path of an admin socket. If `admin` is `None`, try the admin
    /// socket of the configuration or of `RUNTIME_DIRECTORY` first, then the address of `[admin]`. This function loads
    /// and validates the configuration only if it finds neither a socket nor an address.
    ///
    /// # Errors
    /// `admin` is invalid, or the configuration has neither an admin socket nor an admin address.
    pub(crate) fn find(config_path: &Path, admin: Option<&str>) -> anyhow::Result<Self> {
        if let Some(admin) = admin {
            return AdminClient::from_url(admin);
        }
        if let Some(client) = AdminLocation::read(config_path).client()? {
            return Ok(client);
        }
        let config = load_for(config_path, &["admin"])?;
        if config.admin.is_none() {
            bail!(
                "no admin socket of a running gateway was found, and {} has no [admin]: add [admin] with address or \
                 socket, or name the socket with --admin /run/sluicegate/admin.sock",
                config_path.display()
            );
        }
        AdminClient::from_config(config_path, &config)
    }

    fn from_socket(path: PathBuf) -> anyhow::Result<Self> {
        Ok(AdminClient { url: "http://localhost".parse()?, token: None, socket: Some(path) })
    }

    /// Request a reload and return the response, even if the gateway rejected the configuration.
    ///
    /// # Errors
    /// The gateway is unreachable, or it rejects the admin token.
    pub(crate) fn reload(&self) -> anyhow::Result<Value> {
        let (status, body) = self.send(RELOAD_TIMEOUT, Method::POST, "/api/reload", None)?;
        match serde_json::from_slice::<Value>(&body) {
            Ok(response) if response["result"].is_string() => Ok(response),
            _ => self.parse_response(status, &body),
        }
    }

    /// Create a client for a URL, or for the path of an admin socket. The admin token is read from
    /// `SLUICEGATE_ADMIN_TOKEN`.
    pub(crate) fn from_url(url: &str) -> anyhow::Result<Self> {
        AdminClient::from_option("--admin", url)
    }

    /// Create a client for the value of any command-line option, as [`from_url`](Self::from_url) does for `--admin`.
    /// Errors name `option`.
    pub(crate) fn from_option(option: &str, url: &str) -> anyhow::Result<Self> {
        if url.starts_with(['/', '.']) {
            return AdminClient::from_socket(url.into());
        }
        let credentials = "the environment variable SLUICEGATE_ADMIN_TOKEN contains the token";
        match HttpUrl::parse_origin(url) {
            Ok(url) if !url.is_https() => Ok(AdminClient { url, token: auth_header(None)?, socket: None }),
            Ok(_) | Err(UrlError::MissingScheme { .. } | UrlError::UnsupportedScheme { .. }) => bail!(
                "{option} must be a URL such as http://127.0.0.1:9180, or a path such as /run/sluicegate/admin.sock"
            ),
            Err(error) => bail!("{option}: {error}; {}", error.hint("http://127.0.0.1:9180", credentials)),
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
        AdminClient::from_address(admin.address, admin.token.as_ref().map(|token| token.as_bytes()))
    }

    fn from_address(mut address: SocketAddr, configured_token: Option<&[u8]>) -> anyhow::Result<Self> {
        // Connect to a listener on the unspecified address (`0.0.0.0` or `::`) through the loopback address.
        match address.ip() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            IpAddr::V4(_) | IpAddr::V6(_) => {}
        }
        Ok(AdminClient {
            url: format!("http://{address}").parse()?,
            token: auth_header(configured_token)?,
            socket: None,
        })
    }

    /// Send a request and parse the JSON response.
    ///
    /// # Errors
    /// The gateway is unreachable or returns an error. The error message says what to do.
    pub(crate) fn request(&self, method: Method, target: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let (status, body) = self.send(REQUEST_TIMEOUT, method, target, body)?;
        self.parse_response(status, &body)
    }

    /// Send a request to a gateway that may not be running. Return `None` if no gateway responds in time, or if the
    /// response is invalid.
    ///
    /// # Errors
    /// The gateway rejects the admin token.
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

    /// Send a GET request and return the status and the body of the response. A rejected admin token is an error.
    ///
    /// # Errors
    /// The gateway is unreachable, does not respond in time, or rejects the admin token.
    pub(crate) fn get(&self, request_timeout: Duration, target: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let (status, body) = self.send(request_timeout, Method::GET, target, None)?;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            self.parse_response(status, &body)?;
        }
        Ok((status, body))
    }

    /// Return the readiness report of a gateway, whether it is ready or not.
    ///
    /// # Errors
    /// The request fails as in [`get`](Self::get), or the response is not a readiness report.
    pub(crate) fn readiness(&self) -> anyhow::Result<Value> {
        let (_, body) = self.get(REQUEST_TIMEOUT, "/readyz")?;
        serde_json::from_slice(&body)
            .with_context(|| format!("the server at {self} is not a Sluicegate admin listener"))
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
        result.map_err(|_| anyhow!("the gateway at {self} does not respond"))?
    }

    fn parse_response(&self, status: StatusCode, body: &[u8]) -> anyhow::Result<Value> {
        let json = serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
        match (status, json) {
            (StatusCode::UNAUTHORIZED, _) => bail!(
                "the gateway at {self} rejects the token: set SLUICEGATE_ADMIN_TOKEN, or admin.token in the \
                 configuration, to the token of the gateway"
            ),
            (status, Some(json)) if status.is_success() => Ok(json),
            (_, Some(json)) if json["detail"].is_string() => {
                bail!("{} ({self})", with_option_name(json["detail"].as_str().unwrap_or_default()))
            }
            (StatusCode::FORBIDDEN, _) => bail!("{}", String::from_utf8_lossy(body).trim()),
            _ => bail!("the server at {self} is not a Sluicegate admin listener ({status})"),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let AdminClient { url, socket, .. } = self;
        if let Some(path) = socket {
            let stream = UnixStream::connect(path).await.with_context(|| {
                format!(
                    "cannot connect to {}: check that the gateway is running, and that this user may open the socket",
                    path.display()
                )
            })?;
            return self.exchange_on(stream, method, target, body).await;
        }
        let stream = TcpStream::connect((url.host(), url.port())).await.with_context(|| {
            format!("cannot connect to {self}: check that the gateway is running with this configuration")
        })?;
        self.exchange_on(stream, method, target, body).await
    }

    async fn exchange_on<S>(
        &self,
        stream: S,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let AdminClient { url, token, .. } = self;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(target).header(HOST, url.authority());
        request = request.header(ACCEPT, "application/json");
        if let (Some(token), None) = (token, &self.socket) {
            request = request.header(AUTHORIZATION, token);
        }
        let body = match body {
            Some(body) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Bytes::from(serde_json::to_vec(body)?)
            }
            None => Bytes::new(),
        };
        let connection_error = || {
            format!("the gateway at {self} closed the connection: check that this is the port of its admin listener")
        };
        let response = sender.send_request(request.body(Full::new(body))?).await.with_context(connection_error)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
        Ok((status, body.map_err(|error| anyhow!("{}: {error}", connection_error()))?.to_bytes()))
    }
}

/// Parameters of the admin API for which commands have an option with the same name.
const OPTIONS: [&str; 10] = ["limit", "cost", "count", "quota", "burst", "ttl", "note", "by", "from", "to"];

/// Replace the parameter of the admin API at the start of an error message with the option of the command. Before
/// "is not", the text in backticks is a value that the user gave, as in "`limit` is not a quota".
fn with_option_name(detail: &str) -> String {
    let parameter = detail.strip_prefix('`').and_then(|rest| rest.split_once('`'));
    match parameter.filter(|(name, rest)| OPTIONS.contains(name) && !rest.starts_with(" is not ")) {
        Some((name, rest)) => format!("--{name}{rest}"),
        None => detail.to_owned(),
    }
}

/// Return the admin token of `SLUICEGATE_ADMIN_TOKEN`, if this environment variable is set and not empty.
pub(crate) fn token_from_env() -> Option<String> {
    std::env::var("SLUICEGATE_ADMIN_TOKEN").ok().filter(|text| !text.is_empty())
}

/// Return the value of the Authorization header. The admin token comes from `SLUICEGATE_ADMIN_TOKEN`, or from the
/// configuration if this variable is unset.
fn auth_header(configured: Option<&[u8]>) -> anyhow::Result<Option<HeaderValue>> {
    let Some(token) = token_from_env().map(String::into_bytes).or_else(|| configured.map(<[u8]>::to_vec)) else {
        return Ok(None);
    };
    let mut value = HeaderValue::from_bytes(&[b"Bearer ", &token[..]].concat())
        .map_err(|_| anyhow!("the admin token has characters that are not valid in a header value"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// The addresses at which the running gateway of a configuration listens for admin requests. Only `[admin]` is read, so
/// other tables may be invalid and may contain unset environment variables. `sluicegate reload` depends on this: it
/// must reach the gateway, which reports the errors of an invalid configuration.
#[derive(Debug, Default)]
pub(crate) struct AdminLocation {
    /// The admin sockets on which the gateway may listen.
    sockets: Vec<PathBuf>,
    address: Option<SocketAddr>,
    token: Option<String>,
    /// The reason why the configuration file cannot be read.
    read_error: Option<io::Error>,
}

impl AdminLocation {
    /// Read `[admin]` of a configuration, even if the file has syntax errors outside of this table.
    pub(crate) fn read(config_path: &Path) -> Self {
        let (content, read_error) = match std::fs::read(config_path) {
            Ok(content) => (content, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let text = String::from_utf8_lossy(&content);
        // A syntax error before `[admin]` can hide the table from the TOML parser. Therefore, also parse only the lines
        // of `[admin]`.
        let tables = [&*text, admin_section(&text)].map(|text| DeTable::parse_recoverable(text).0);
        let mut found = tables.iter().filter_map(|table| table.get_ref().get("admin")?.get_ref().as_table());
        let admin = found.next();
        let value = |key: &str| substituted(admin?.get(key)?.get_ref().as_str()?, &env_var);
        let sockets = match value("socket").as_deref() {
            Some("off") => Vec::new(),
            configured => {
                let directory = config_path.parent().unwrap_or(Path::new(""));
                configured.map(|socket| directory.join(socket)).into_iter().chain(default_path()).collect()
            }
        };
        let address = value("address").and_then(|address| address.parse().ok());
        AdminLocation { sockets, address, token: value("token").filter(|token| !token.is_empty()), read_error }
    }

    /// Return a client for the first admin socket that a gateway listens on. If no gateway listens on a socket, return
    /// a client for the admin address. Return `None` if the configuration also has no admin address.
    ///
    /// # Errors
    /// The admin token is not valid in a header.
    pub(crate) fn client(&self) -> anyhow::Result<Option<AdminClient>> {
        if let Some(path) = self.sockets.iter().find(|path| is_listening(path)) {
            return AdminClient::from_socket(path.clone()).map(Some);
        }
        let token = self.token.as_ref().map(String::as_bytes);
        self.address.map(|address| AdminClient::from_address(address, token)).transpose()
    }

    /// Return the reason why no client could be created.
    pub(crate) fn missing(&self, config_path: &Path) -> String {
        let path = config_path.display();
        match (&self.read_error, self.sockets.first()) {
            (_, Some(socket)) => format!("no gateway listens on the admin socket {}", socket.display()),
            (Some(error), None) => format!("{path} cannot be read: {error}"),
            (None, None) => format!("{path} has no address in [admin]"),
        }
    }
}

/// Return the lines from the header `[admin]` up to the next table. Return an empty string if there is no such header.
fn admin_section(text: &str) -> &str {
    let is_header = |line: &str| line.trim_start().starts_with("[admin]");
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        if is_header(line) {
            let section = &text[start..];
            return section.find("\n[").map_or(section, |end| &section[..=end]);
        }
        start += line.len();
    }
    ""
}

/// Return whether a process listens on a Unix socket. Connect without blocking, because a blocking `connect` would wait
/// while the accept queue of the listening process is full.
fn is_listening(path: &Path) -> bool {
    let connect = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    connect().map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |()| true)
}

impl fmt::Display for AdminClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(path) => path.display().fmt(f),
            None => f.write_str(&self.url.origin()),
        }
    }
}
