//! Parses the URLs of stores: `redis://`, `rediss://`, `redis+unix://`, `redis+sentinel://` and `redis+cluster://`.
//!
//! No error contains a part of a user name or a password, even if the password contains characters that end the
//! credentials of a URL.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use redis::io::tcp::TcpSettings;
use redis::{Client, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, TlsCertificates};

use crate::limiter::address::{AddressError, HostPort};
use crate::limiter::redis::RedisDeployment;
use crate::limiter::redis::server::{Address, Login, RedisEndpoint, Sentinels};

const URL_FORMS: &str = "expected \"memory:\", \"redis://127.0.0.1:6379/0\", \"rediss://…\", \
     \"redis+unix:///run/redis.sock?db=0\", \"redis+sentinel://host1,host2/mymaster\" or \"redis+cluster://host1,host2\"";
const SINGLE_FORM: &str = "expected \"redis://host:6379/0\"";
const UNIX_FORM: &str = "expected \"redis+unix:///run/redis.sock?db=0\"";
const SENTINEL_FORM: &str = "expected \"redis+sentinel://host1:26379,host2:26379/mymaster?db=0\"";
const CLUSTER_FORM: &str = "expected \"redis+cluster://host1:6379,host2:6379\"; a cluster has only database 0";
const CREDENTIALS: &str = "remove the credentials from the URL, and set `username` and `password` in [store], which may \
     contain any character; in the URL, write @ : / ? # % inside a password as %40 %3A %2F %3F %23 %25";

/// Port of a Redis server, and port of a Sentinel.
const REDIS_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26_379;

/// An invalid store URL.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}; {hint}")]
pub struct UrlError {
    /// The reason why the URL is invalid.
    pub message: String,
    /// What to write instead.
    pub hint: String,
}

impl UrlError {
    fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        UrlError { message: message.into(), hint: hint.into() }
    }
}

impl From<AddressError> for UrlError {
    fn from(error: AddressError) -> Self {
        UrlError::new(error.to_string(), error.hint())
    }
}

/// A user name and a password. The `Debug` implementation prints neither.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// User name. `None` stands for the user `default`.
    pub username: Option<String>,
    /// Password. `None` if the server requires none.
    pub password: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// Return whether there is neither a user name nor a password.
    pub fn is_empty(&self) -> bool {
        *self == Credentials::default()
    }

    fn settings(&self, database: u32) -> RedisConnectionInfo {
        let settings = RedisConnectionInfo::default().set_db(database.into());
        let settings = self.username.iter().fold(settings, |settings, username| settings.set_username(username));
        self.password.iter().fold(settings, |settings, password| settings.set_password(password))
    }
}

/// How to authenticate the gateway and the store, apart from the URL.
#[derive(Debug, Default)]
pub struct StoreAccess {
    /// Trust roots and client certificate for TLS. `None` stands for the trust roots of the system.
    pub certificates: Option<TlsCertificates>,
    /// Whether a certificate is accepted that is not valid for the host.
    pub ignores_name: bool,
    /// Credentials for the Redis servers, unless the URL contains credentials.
    pub credentials: Credentials,
    /// Credentials for the Sentinels, unless the URL contains credentials for them.
    pub sentinel_credentials: Credentials,
}

impl FromStr for RedisDeployment {
    type Err = UrlError;

    /// Parse a Redis URL in the syntax of `store.url`. `rediss://` trusts the CA certificates of the system.
    fn from_str(url: &str) -> Result<Self, UrlError> {
        parse_redis_url(url, &StoreAccess::default()).map(|(_, deployment)| deployment)
    }
}

/// Parse a store URL. Return the name for logs, and the deployment to connect to.
///
/// # Errors
/// The scheme is unknown, or the rest of the URL is invalid.
pub fn parse_redis_url(url: &str, access: &StoreAccess) -> Result<(String, RedisDeployment), UrlError> {
    let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
    let (security, form) = match scheme {
        "redis" | "redis+unix" | "redis+sentinel" | "redis+cluster" => (Security::Plaintext, scheme),
        "rediss" => (Security::Tls, "redis"),
        "rediss+sentinel" => (Security::Tls, "redis+sentinel"),
        "rediss+cluster" => (Security::Tls, "redis+cluster"),
        _ => return Err(UrlError::new("this is not a store URL", URL_FORMS)),
    };
    let connector = Connector { security, access };
    match form {
        "redis+unix" => connector.unix_socket(rest),
        "redis+sentinel" => connector.sentinels(rest),
        "redis+cluster" => connector.cluster(rest),
        _ => connector.single(rest),
    }
}

/// Parts of `//user:password@host:port,host:port/path?query`. A URL with one host is a special case of this form.
struct UrlParts<'a> {
    /// User name and password, percent-encoded. Empty if the URL has none.
    credentials: &'a str,
    hosts: Vec<&'a str>,
    path: &'a str,
    query: &'a str,
}

fn split_url<'a>(rest: &'a str, form: &str) -> Result<UrlParts<'a>, UrlError> {
    let rest = rest.strip_prefix("//").ok_or_else(|| UrlError::new("`//` is missing after the scheme", form))?;
    if rest.contains('#') {
        return Err(UrlError::new("the URL contains `#`", CREDENTIALS));
    }
    let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = before_query.split_once('/').unwrap_or((before_query, ""));
    let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
    if credentials.contains('@') {
        return Err(UrlError::new("the URL contains more than one `@`", CREDENTIALS));
    }
    if path.contains('@') || query.contains('@') {
        return Err(UrlError::new("the URL contains `/` or `?` before `@`", CREDENTIALS));
    }
    Ok(UrlParts { credentials, hosts: hosts.split(',').collect(), path, query })
}

/// Return the names and the decoded values of query parameters.
fn parameters(query: &str) -> impl Iterator<Item = (&str, Cow<'_, str>)> {
    query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or(("", pair));
        (name, percent_decode_str(value).decode_utf8_lossy())
    })
}

fn unknown_parameter(name: &str, form: &str) -> UrlError {
    match name {
        // A text without `=` may be a secret.
        "" => UrlError::new("the query of the URL is invalid", form),
        name => UrlError::new(format!("unknown query parameter `{name}`"), form),
    }
}

fn parse_database(text: &str, form: &str) -> Result<u32, UrlError> {
    match text.trim_end_matches('/') {
        "" => Ok(0),
        digits => digits.parse().map_err(|_| UrlError::new("the database is not a number", form)),
    }
}

/// Parse hosts with optional ports.
fn parse_hosts(hosts: &[&str]) -> Result<Vec<HostPort>, UrlError> {
    let mut parsed = Vec::new();
    for host in hosts {
        let host: HostPort = host.parse()?;
        if host.host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()) {
            let message = "this address is valid only for listening";
            return Err(UrlError::new(message, "write the address at which Redis can be reached"));
        }
        parsed.push(host);
    }
    Ok(parsed)
}

/// Combine the credentials of a URL, percent-encoded, with those of separate keys.
fn combine_credentials(written: &str, keys: &Credentials) -> Result<Credentials, UrlError> {
    if written.is_empty() {
        return Ok(keys.clone());
    }
    if !keys.is_empty() {
        let message = "the URL contains credentials, although `username` or `password` is set";
        return Err(UrlError::new(message, "remove the text before `@` from the URL"));
    }
    let decode = |text: &str| match percent_decode_str(text).decode_utf8() {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => Ok(Some(text.into_owned())),
        Err(_) => Err(UrlError::new("the credentials in the URL are not valid UTF-8", CREDENTIALS)),
    };
    let (username, password) = written.split_once(':').unwrap_or((written, ""));
    let found = Credentials { username: decode(username)?, password: decode(password)? };
    if found.username.is_some() && found.password.is_none() {
        let message = "the URL contains a user name without a password";
        return Err(UrlError::new(message, "write redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST"));
    }
    Ok(found)
}

/// Whether connections use TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Security {
    Plaintext,
    Tls,
}

/// Creates the clients of a store.
struct Connector<'a> {
    security: Security,
    access: &'a StoreAccess,
}

impl Connector<'_> {
    fn client(&self, server: &HostPort, default_port: u16, settings: &RedisConnectionInfo) -> Result<Client, UrlError> {
        let host = server.host.to_string();
        let port = server.port.unwrap_or(default_port);
        self.client_at(
            match self.security {
                Security::Plaintext => ConnectionAddr::Tcp(host, port),
                Security::Tls => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            },
            settings,
        )
    }

    fn client_at(&self, address: ConnectionAddr, settings: &RedisConnectionInfo) -> Result<Client, UrlError> {
        let client = address.into_connection_info().and_then(|info| {
            // Disable the Nagle algorithm, because pipelined calls must not wait for earlier replies.
            let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
            let info = info.set_redis_settings(settings.clone());
            let client = match &self.access.certificates {
                Some(certificates) => Client::build_with_tls(info, certificates.clone()),
                None => Client::open(info),
            };
            if !self.access.ignores_name {
                return client;
            }
            let info = client?.get_connection_info().clone();
            let mut address = info.addr().clone();
            address.set_danger_accept_invalid_hostnames(true);
            Client::open(info.set_addr(address))
        });
        client.map_err(|error| UrlError::new(error.to_string(), "certificates and keys are PEM files"))
    }

    fn single(&self, rest: &str) -> Result<(String, RedisDeployment), UrlError> {
        let UrlParts { credentials, hosts, path, query } = split_url(rest, SINGLE_FORM)?;
        if let Some((name, _)) = parameters(query).next() {
            return Err(unknown_parameter(name, SINGLE_FORM));
        }
        let [server] = &parse_hosts(&hosts)?[..] else {
            return Err(UrlError::new("the URL contains several hosts", URL_FORMS));
        };
        let credentials = combine_credentials(credentials, &self.access.credentials)?;
        let database = parse_database(path, SINGLE_FORM)?;
        Ok(deployment_of(self.client(server, REDIS_PORT, &credentials.settings(database))?))
    }

    fn unix_socket(&self, rest: &str) -> Result<(String, RedisDeployment), UrlError> {
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        let path = path.strip_prefix("//").unwrap_or(path);
        if !path.starts_with('/') || rest.contains('#') {
            return Err(UrlError::new("the URL contains no path of a socket", UNIX_FORM));
        }
        let path = percent_decode_str(path).decode_utf8_lossy().into_owned();
        let mut database = 0;
        let mut credentials = Credentials::default();
        for (name, value) in parameters(query) {
            match name {
                "db" => database = parse_database(&value, UNIX_FORM)?,
                "user" => credentials.username = Some(value.into_owned()),
                "pass" => credentials.password = Some(value.into_owned()),
                _ => return Err(unknown_parameter(name, UNIX_FORM)),
            }
        }
        if credentials.is_empty() {
            credentials = self.access.credentials.clone();
        }
        Ok(deployment_of(self.client_at(ConnectionAddr::Unix(path.into()), &credentials.settings(database))?))
    }

    fn sentinels(&self, rest: &str) -> Result<(String, RedisDeployment), UrlError> {
        let UrlParts { credentials, hosts, path, query } = split_url(rest, SENTINEL_FORM)?;
        let servers = parse_hosts(&hosts)?;
        if path.is_empty() || path.contains('/') {
            return Err(UrlError::new("the name of the master is missing", SENTINEL_FORM));
        }
        let mut database = 0;
        let mut written = Credentials::default();
        for (name, value) in parameters(query) {
            match name {
                "db" => database = parse_database(&value, SENTINEL_FORM)?,
                "sentinel_user" => written.username = Some(value.into_owned()),
                "sentinel_password" => written.password = Some(value.into_owned()),
                _ => return Err(unknown_parameter(name, SENTINEL_FORM)),
            }
        }
        let keys = &self.access.sentinel_credentials;
        if !written.is_empty() && !keys.is_empty() {
            let message = "the URL contains credentials for the Sentinels, although `sentinel` is set";
            return Err(UrlError::new(message, "remove `sentinel_user` and `sentinel_password` from the URL"));
        }
        let sentinel_settings = if written.is_empty() { keys } else { &written }.settings(0);
        let credentials = combine_credentials(credentials, &self.access.credentials)?;
        let clients = servers.iter().map(|server| self.client(server, SENTINEL_PORT, &sentinel_settings));
        let clients: Vec<_> = clients.collect::<Result<_, _>>()?;
        // Use the first host as a placeholder: the Sentinels report the address of the master later.
        let template = self.client(&servers[0], REDIS_PORT, &credentials.settings(database))?;
        let name = percent_decode_str(path).decode_utf8_lossy().into_owned();
        let log_name = format!("redis master {name} by Sentinels at {}", hosts.join(", "));
        let sentinels = Sentinels::new(clients, name, Login::from_client(&template));
        Ok((log_name, RedisDeployment::Single(RedisEndpoint::Sentinel(Arc::new(sentinels)))))
    }

    fn cluster(&self, rest: &str) -> Result<(String, RedisDeployment), UrlError> {
        let UrlParts { credentials, hosts, path, query } = split_url(rest, CLUSTER_FORM)?;
        let servers = parse_hosts(&hosts)?;
        if !matches!(path, "" | "0") || !query.is_empty() {
            return Err(UrlError::new("a cluster URL has no path and no query", CLUSTER_FORM));
        }
        let settings = combine_credentials(credentials, &self.access.credentials)?.settings(0);
        let clients = servers.iter().map(|server| self.client(server, REDIS_PORT, &settings));
        let clients: Vec<_> = clients.collect::<Result<_, _>>()?;
        let seeds: Vec<_> = clients.iter().filter_map(address).collect();
        let name = format!("redis cluster at {}", hosts.join(", "));
        Ok((name, RedisDeployment::Cluster { seeds, login: Login::from_client(&clients[0]) }))
    }
}

fn deployment_of(client: Client) -> (String, RedisDeployment) {
    let name = format!("redis at {}", client.get_connection_info().addr());
    (name, RedisDeployment::Single(RedisEndpoint::Single(client)))
}

fn address(client: &Client) -> Option<Address> {
    match client.get_connection_info().addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some(Address { host: host.as_str().into(), port: *port })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<(String, RedisDeployment), UrlError> {
        parse_redis_url(url, &StoreAccess::default())
    }

    fn seeds(url: &str) -> Vec<String> {
        match parse(url).unwrap() {
            (_, RedisDeployment::Cluster { seeds, .. }) => seeds.iter().map(Address::to_string).collect(),
            (_, RedisDeployment::Single(_)) => panic!("{url} is no cluster"),
        }
    }

    /// Return the name, the user name, the password and the database of a single server.
    fn single(url: &str, access: &StoreAccess) -> (String, Option<String>, Option<String>, i64) {
        let (name, RedisDeployment::Single(RedisEndpoint::Single(client))) = parse_redis_url(url, access).unwrap()
        else {
            panic!("{url} is no single server")
        };
        let settings = client.get_connection_info().redis_settings();
        let owned = |text: Option<&str>| text.map(str::to_owned);
        (name, owned(settings.username()), owned(settings.password()), settings.db())
    }

    #[test]
    fn single_urls_have_credentials_and_a_database() {
        let some = |text: &str| Some(text.to_owned());
        for (url, name, username, password, database) in [
            ("redis://a", "redis at a:6379", None, None, 0),
            ("redis://[::1]:1/2", "redis at [::1]:1", None, None, 2),
            ("rediss://:p%40ss@a:1/0/", "redis at a:1", None, some("p@ss"), 0),
            ("redis://gw:p%23%3f:x@a", "redis at a:6379", some("gw"), some("p#?:x"), 0),
            ("redis+unix:///run/a%20b.sock?db=3", "redis at /run/a b.sock", None, None, 3),
            ("redis+unix:/run/a.sock?user=u&pass=p%26", "redis at /run/a.sock", some("u"), some("p&"), 0),
        ] {
            let expected = (name.replace("[::1]", "::1"), username, password, database);
            let found = single(url, &StoreAccess::default());
            assert_eq!((found.0.replace("[::1]", "::1"), found.1, found.2, found.3), expected, "{url}");
        }
    }

    #[test]
    fn passwords_outside_of_the_url_may_contain_any_character() {
        let password = "p@ss:w/o?r#d%40 \u{e9}";
        let credentials = Credentials { username: Some("gw".to_owned()), password: Some(password.to_owned()) };
        let access = StoreAccess { credentials: credentials.clone(), ..StoreAccess::default() };
        for url in ["redis://a/4", "redis+unix:///s?db=4"] {
            let (_, username, found, database) = single(url, &access);
            assert_eq!((username.as_deref(), found.as_deref(), database), (Some("gw"), Some(password), 4), "{url}");
        }
        let error = parse_redis_url("redis://:planted@a", &access).unwrap_err();
        assert!(error.message.contains("although `username` or `password` is set"), "{error}");
        let access = StoreAccess { sentinel_credentials: credentials, ..StoreAccess::default() };
        let (_, RedisDeployment::Single(RedisEndpoint::Sentinel(found))) =
            parse_redis_url("redis+sentinel://a/m", &access).unwrap()
        else {
            panic!()
        };
        let settings = found.sentinels[0].get_connection_info().redis_settings();
        assert_eq!((settings.username(), settings.password()), (Some("gw"), Some(password)));
        assert!(parse_redis_url("redis+sentinel://a/m?sentinel_password=p", &access).is_err());
        assert!(!format!("{access:?}").contains("p@ss"));
    }

    #[test]
    fn cluster_urls_have_several_hosts() {
        assert_eq!(
            seeds("redis+cluster://a,b:7001,[::1]:7002,[::2]"),
            ["a:6379", "b:7001", "[::1]:7002", "[::2]:6379"]
        );
        assert_eq!(seeds("rediss+cluster://user:p%40ss@a:1/"), ["a:1"]);
    }

    #[test]
    fn sentinel_urls_have_separate_credentials_for_sentinels() {
        let url = "redis+sentinel://user:p%40ss@a,b:1/my%20master?db=3&sentinel_user=s&sentinel_password=p%26";
        let (name, RedisDeployment::Single(RedisEndpoint::Sentinel(found))) = parse(url).unwrap() else { panic!() };
        assert_eq!((&*name, &*found.master_name), ("redis master my master by Sentinels at a, b:1", "my master"));
        let addresses: Vec<_> = found.sentinels.iter().map(|client| address(client).unwrap().to_string()).collect();
        assert_eq!(addresses, ["a:26379", "b:1"]);
        let own = found.sentinels[0].get_connection_info().redis_settings();
        assert_eq!((own.username(), own.password()), (Some("s"), Some("p&")));
        let master = found.login.client_for(&Address::parse("m:2").unwrap()).unwrap();
        let settings = master.get_connection_info().redis_settings();
        assert_eq!((settings.username(), settings.password(), settings.db()), (Some("user"), Some("p@ss"), 3));
        assert_eq!(address(&master).unwrap().to_string(), "m:2");
    }

    #[test]
    fn invalid_urls_are_rejected_with_the_reason() {
        for (url, what) in [
            ("http://a", "this is not a store URL"),
            ("redis", "this is not a store URL"),
            ("redis+cluster:a", "`//` is missing"),
            ("redis+cluster://a,,b", "the host is missing"),
            ("redis+cluster://", "the host is missing"),
            ("redis+cluster://a/3", "no path and no query"),
            ("redis+cluster://a?db=1", "no path and no query"),
            ("redis+cluster://a:b", "`b` is not a port"),
            ("redis+sentinel://a", "name of the master is missing"),
            ("redis+sentinel://a/m?typo=1", "unknown query parameter `typo`"),
            ("redis+sentinel://a/m?db=x", "the database is not a number"),
            ("redis://a:b", "`b` is not a port"),
            ("redis://a:70000", "port 70000 is greater than 65535"),
            ("redis://a,b", "several hosts"),
            ("redis://a/-1", "the database is not a number"),
            ("redis://a/0?db=1", "unknown query parameter `db`"),
            ("redis://a#x", "contains `#`"),
            ("redis://256.1.1.1", "looks like an IPv4 address"),
            ("redis://0.0.0.0", "valid only for listening"),
            ("redis://[::]:1", "valid only for listening"),
            ("redis://user@a", "user name without a password"),
            ("redis+unix://host/path", "no path of a socket"),
            ("redis+unix:///s?typo=1", "unknown query parameter `typo`"),
        ] {
            let wrong = parse(url).unwrap_err();
            assert!(wrong.message.contains(what), "{url}: {}", wrong.message);
        }
    }

    #[test]
    fn errors_contain_no_part_of_a_password() {
        for scheme in ["redis", "rediss", "redis+sentinel", "redis+cluster", "redis+unix"] {
            for password in
                ["planted@planted", "planted#", "planted/", "planted?", "1/planted", "1?planted=1", "%ffplanted"]
            {
                for user in ["", "planted"] {
                    let url = format!("{scheme}://{user}:{password}@a:1/m");
                    let error = parse(&url).expect_err(&url).to_string();
                    assert!(!error.contains("planted"), "{url}: {error}");
                }
            }
        }
    }
}
