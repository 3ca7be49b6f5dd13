//! The environment variables of envoyproxy/ratelimit, as a configuration of this gateway.

use std::fmt::Write;
use std::path::Path;

use crate::config::environment::EnvLookup;
use crate::config::error::{FileIssues, Issue};

/// Path that stands for the environment variables of envoyproxy/ratelimit.
pub const ENVIRONMENT: &str = "env:ratelimit";

/// A configuration, with warnings about variables without effect.
#[derive(Debug)]
pub struct Generated {
    /// The text of the configuration.
    pub text: String,
    /// The warnings. Each of them is about a comment in the text.
    pub warnings: Vec<Issue>,
}

/// Variables without effect on the gateway, each with the reason. They are reported if they are set, unless the value
/// is `false` or `0`.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("DEBUG_HOST", NO_DEBUG_PORT),
    ("DEBUG_PORT", NO_DEBUG_PORT),
    ("GRPC_MAX_CONNECTION_AGE", "connections end only when the process drains"),
    ("GRPC_MAX_CONNECTION_AGE_GRACE", "connections end only when the process drains"),
    ("RUNTIME_IGNOREDOTFILES", "files whose name starts with a dot are always ignored"),
    ("RUNTIME_WATCH_ROOT", "replaced symlinks and changed files are both detected"),
    ("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", RECONNECTS),
    ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", RECONNECTS),
    ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", RECONNECTS),
    ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", RECONNECTS),
    ("XDS_CLIENT_BACKOFF_JITTER", RECONNECTS),
    ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "messages may have up to 64 MiB"),
    ("USE_DOG_STATSD", NO_STATSD),
    ("USE_DOG_STATSD_MOGRIFIERS", NO_STATSD),
    ("USE_STATSD", NO_STATSD),
    ("STATSD_HOST", NO_STATSD),
    ("STATSD_PORT", NO_STATSD),
    ("STATS_FLUSH_INTERVAL", NO_STATSD),
    ("EXTRA_TAGS", "Prometheus adds labels when it scrapes"),
    ("DISABLE_STATS", "metrics are served only with USE_PROMETHEUS=true"),
    ("PROMETHEUS_MAPPER_YAML", "metrics have the names of the default mapper, and of this gateway"),
    ("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", "durations are in seconds"),
    ("EXPIRATION_JITTER_MAX_SECONDS", "counters expire at the end of their window"),
    ("LOCAL_CACHE_SIZE_IN_BYTES", "denials are always cached, for at most 1s"),
    ("NEAR_LIMIT_RATIO", "`near_limit` counts beyond 80 % of the quota"),
    ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "a denied call never charges the limits that admit it"),
    ("REDIS_POOL_SIZE", ONE_CONNECTION),
    ("REDIS_PIPELINE_WINDOW", ONE_CONNECTION),
    ("REDIS_PIPELINE_LIMIT", ONE_CONNECTION),
    ("REDIS_CLUSTER_PIPELINE_PARALLELISM", ONE_CONNECTION),
    ("REDIS_POOL_ON_EMPTY_BEHAVIOR", ONE_CONNECTION),
    ("REDIS_TIMEOUT", "a call is answered before its own deadline, with or without Redis"),
    ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", NO_REDIS_NEEDED),
    ("REDIS_STARTUP_INITIAL_INTERVAL", NO_REDIS_NEEDED),
    ("REDIS_STARTUP_MAX_INTERVAL", NO_REDIS_NEEDED),
    ("REDIS_STARTUP_MAX_ELAPSED_TIME", NO_REDIS_NEEDED),
    ("REDIS_PERSECOND", "limits per second are counted at REDIS_URL"),
    ("TRACING_ENABLED", "calls have no spans"),
];

const NO_DEBUG_PORT: &str = "there is no debug port: with USE_PROMETHEUS=true, PROMETHEUS_ADDR serves metrics";
const NO_STATSD: &str = "metrics are not sent: set USE_PROMETHEUS=true, and scrape PROMETHEUS_ADDR";
const RECONNECTS: &str = "the connection is retried after 0.5s to 30s";
const ONE_CONNECTION: &str = "each worker pipelines its calls on one connection";
const NO_REDIS_NEEDED: &str = "without Redis, the gateway starts and enforces limits in its memory";

/// Variables that must not be set, unless the value is `false` or `0`, each with what to do instead.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("GRPC_UDS", "use GRPC_HOST and GRPC_PORT: a Unix socket cannot be served"),
    ("GRPC_CLIENT_TLS_SAN", "use a CA of its own for the clients, with GRPC_CLIENT_TLS_CACERT"),
    ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "name Redis in REDIS_URL by a name of its certificate"),
];

/// Variable that lets health checks succeed before the management server has sent descriptors.
const FORCE_START: &str = "FORCE_START_WITHOUT_INITIAL_CONFIG";

/// Headers with the state of a limit: the variable that names the header, its default, and the key in the configuration.
const HEADERS: [(&str, &str, &str); 3] = [
    ("LIMIT_LIMIT_HEADER", "RateLimit-Limit", "limit"),
    ("LIMIT_REMAINING_HEADER", "RateLimit-Remaining", "remaining"),
    ("LIMIT_RESET_HEADER", "RateLimit-Reset", "reset"),
];

/// Variable of this gateway with `secret` of the store, for which envoyproxy/ratelimit has no variable.
const SECRET: &str = "SLUICEGATE_STORE_SECRET";

/// Generate the configuration that the environment variables of envoyproxy/ratelimit describe.
///
/// # Errors
/// A variable has an invalid value, or is not supported. The error contains all of these variables.
pub fn generate(environment: EnvLookup<'_>) -> Result<Generated, FileIssues> {
    let mut variables = Variables { environment, issues: Vec::new() };
    let mut text = "# The environment variables of envoyproxy/ratelimit.\n".to_owned();
    for table in [
        variables.log(),
        variables.grpc_listener(),
        variables.http_listener(),
        variables.admin(),
        variables.store(),
        variables.ratelimit(),
    ] {
        text.push('\n');
        text.push_str(&table.0);
    }
    for (name, instead) in UNSUPPORTED {
        if variables.is_set(name) {
            variables.issue(format!("{name} is not supported"), instead);
        }
    }
    let mut warnings = Vec::new();
    for (name, reason) in WITHOUT_EFFECT.iter().filter(|(name, _)| variables.is_set(name)) {
        text.push_str("\n# ");
        let span = text.len()..text.len() + name.len();
        text.push_str(name);
        warnings.push(Issue::new(span, format!("{name} has no effect: {reason}")));
    }
    if !warnings.is_empty() {
        text.push('\n');
    }
    let Variables { issues, .. } = variables;
    match issues.is_empty() {
        true => Ok(Generated { text, warnings }),
        false => Err(FileIssues { path: Path::new(ENVIRONMENT).to_owned(), text: String::new(), issues }),
    }
}

/// A table of the configuration.
struct Table(String);

impl Table {
    fn new(header: &str) -> Self {
        Table(format!("{header}\n"))
    }

    /// Add a key with a text.
    fn text(&mut self, key: &str, value: &str) {
        self.raw(key, &quoted(value));
    }

    /// Add a key with a value in the syntax of TOML.
    fn raw(&mut self, key: &str, value: &str) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.0, "{key} = {value}");
    }
}

/// Return a string in the syntax of TOML. Parts such as `${NAME}` are escaped, so that they are not replaced.
fn quoted(value: &str) -> String {
    toml::Value::String(value.replace("${", "$${")).to_string()
}

/// Return an inline table with the keys that have a value.
fn inline(pairs: &[(&str, String)]) -> String {
    let pairs = pairs.iter().filter(|(_, value)| !value.is_empty());
    let pairs: Vec<_> = pairs.map(|(key, value)| format!("{key} = {}", quoted(value))).collect();
    format!("{{ {} }}", pairs.join(", "))
}

/// The variables, and the errors in their values.
struct Variables<'e> {
    environment: EnvLookup<'e>,
    issues: Vec<Issue>,
}

impl Variables<'_> {
    fn issue(&mut self, message: String, hint: &str) {
        self.issues.push(Issue { span: None, message, hint: Some(hint.to_owned()) });
    }

    /// Return the value of a variable. It is empty if the variable is not set.
    fn get(&mut self, name: &str) -> String {
        let value = (self.environment)(name).unwrap_or_default();
        value.into_string().unwrap_or_else(|_| {
            self.issue(format!("{name} is not UTF-8"), "write its value in UTF-8");
            String::new()
        })
    }

    fn get_or(&mut self, name: &str, default: &str) -> String {
        let value = self.get(name);
        if value.is_empty() { default.to_owned() } else { value }
    }

    /// Return whether a variable is set to a value other than `false` and `0`.
    fn is_set(&mut self, name: &str) -> bool {
        let value = self.get(name);
        !value.is_empty() && parse_flag(&value) != Some(false)
    }

    fn flag(&mut self, name: &str) -> bool {
        let value = self.get_or(name, "false");
        parse_flag(&value).unwrap_or_else(|| {
            self.issue(format!("{name} is `{value}`, but must be true or false"), &format!("set {name}=true"));
            false
        })
    }

    /// Return the choice that a variable names, in any case.
    fn choice<T: Copy>(&mut self, name: &str, default: T, choices: &[(&str, T)]) -> T {
        let value = self.get(name);
        if value.is_empty() {
            return default;
        }
        if let Some((_, choice)) = choices.iter().find(|(known, _)| known.eq_ignore_ascii_case(&value)) {
            return *choice;
        }
        let known: Vec<_> = choices.iter().map(|(known, _)| *known).collect();
        self.issue(format!("{name} is `{value}`"), &format!("use one of: {}", known.join(", ")));
        default
    }

    /// Return the address of a host and a port.
    fn address(&mut self, host: &str, port: &str, default_port: &str) -> String {
        let host = self.get_or(host, "0.0.0.0");
        let written = self.get_or(port, default_port);
        if written.parse::<u16>().is_err() {
            self.issue(format!("{port} is `{written}`"), &format!("write a port, such as {port}={default_port}"));
        }
        with_port(&host, &written)
    }

    fn log(&mut self) -> Table {
        let mut table = Table::new("[log]");
        let levels = [
            ("trace", "trace"),
            ("debug", "debug"),
            ("info", "info"),
            ("warn", "warn"),
            ("warning", "warn"),
            ("error", "error"),
            ("fatal", "error"),
            ("panic", "error"),
        ];
        table.text("level", self.choice("LOG_LEVEL", "warn", &levels));
        table.text("format", self.choice("LOG_FORMAT", "text", &[("text", "text"), ("json", "json")]));
        table.text("access", "off");
        table
    }

    fn grpc_listener(&mut self) -> Table {
        let mut table = Table::new("[[listener]]");
        table.text("name", "grpc");
        table.text("address", &self.address("GRPC_HOST", "GRPC_PORT", "8081"));
        table.text("protocol", "ratelimit");
        if !self.flag("GRPC_SERVER_USE_TLS") {
            return table;
        }
        let files = ["GRPC_SERVER_TLS_CERT", "GRPC_SERVER_TLS_KEY"].map(|name| self.get(name));
        if files.iter().any(String::is_empty) {
            let hint = "set GRPC_SERVER_TLS_CERT and GRPC_SERVER_TLS_KEY to PEM files";
            self.issue("GRPC_SERVER_USE_TLS needs a certificate and a key".to_owned(), hint);
        }
        let [cert, key] = files;
        let certificate = inline(&[("cert", cert), ("key", key)]);
        let client_ca = self.get("GRPC_CLIENT_TLS_CACERT");
        let clients = match &*client_ca {
            "" => String::new(),
            file => format!(", client_ca = {}, client_auth = \"required\"", quoted(file)),
        };
        table.raw("tls", &format!("{{ certificates = [{certificate}]{clients} }}"));
        table
    }

    fn http_listener(&mut self) -> Table {
        let mut table = Table::new("[[listener]]");
        table.text("name", "http");
        table.text("address", &self.address("HOST", "PORT", "8080"));
        table.text("protocol", "ratelimit-http");
        table
    }

    fn admin(&mut self) -> Table {
        if !self.flag("USE_PROMETHEUS") {
            return Table(String::new());
        }
        let mut table = Table::new("[admin]");
        let address = self.get_or("PROMETHEUS_ADDR", ":9090");
        match address.rsplit_once(':') {
            Some((host, port)) if port.parse::<u16>().is_ok() => {
                let host = match host.trim_start_matches('[').trim_end_matches(']') {
                    "" => "0.0.0.0",
                    "localhost" => "127.0.0.1",
                    host => host,
                };
                table.text("address", &with_port(host, port));
            }
            _ => self.issue(format!("PROMETHEUS_ADDR is `{address}`"), "write an address, such as :9090"),
        }
        table.raw("open", "[\"/metrics\", \"/healthz\", \"/readyz\"]");
        let path = self.get_or("PROMETHEUS_PATH", "/metrics");
        if path != "/metrics" {
            self.issue(format!("PROMETHEUS_PATH is `{path}`"), "scrape /metrics, and remove PROMETHEUS_PATH");
        }
        table
    }

    fn store(&mut self) -> Table {
        let backends = [("redis", ""), ("memcache", "memcache")];
        if self.choice("BACKEND_TYPE", "", &backends) == "memcache" {
            let hint = "use Redis: set BACKEND_TYPE=redis, REDIS_SOCKET_TYPE=tcp and REDIS_URL=HOST:PORT";
            self.issue("BACKEND_TYPE is `memcache`, which cannot count exactly".to_owned(), hint);
        }
        let mut table = Table::new("[store]");
        let is_tls = self.flag("REDIS_TLS");
        table.text("url", &self.store_url(is_tls));
        for (name, user_key, password_key) in
            [("REDIS_AUTH", "username", "password"), ("REDIS_SENTINEL_AUTH", "sentinel.username", "sentinel.password")]
        {
            match self.get(name).split_once(':') {
                None if self.is_set(name) => table.raw(password_key, &format!("\"${{{name}}}\"")),
                None => {}
                Some((user, password)) => {
                    table.text(user_key, user);
                    table.text(password_key, password);
                }
            }
        }
        let files = [("ca", "REDIS_TLS_CACERT"), ("cert", "REDIS_TLS_CLIENT_CERT"), ("key", "REDIS_TLS_CLIENT_KEY")];
        let files = files.map(|(key, name)| (key, self.get(name)));
        if is_tls && files.iter().any(|(_, file)| !file.is_empty()) {
            table.raw("tls", &inline(&files));
        }
        if self.is_set(SECRET) {
            table.raw("secret", &format!("\"${{{SECRET}}}\""));
        }
        let prefix = self.get("CACHE_KEY_PREFIX");
        if !prefix.is_empty() {
            table.text("prefix", &prefix);
        }
        table
    }

    fn store_url(&mut self, is_tls: bool) -> String {
        let written = self.get_or("REDIS_URL", "/var/run/nutcracker/ratelimit.sock");
        let plain = ["redis://", "rediss://"].into_iter().find_map(|scheme| written.strip_prefix(scheme));
        let scheme = if is_tls || written.starts_with("rediss://") { "rediss" } else { "redis" };
        let servers = plain.unwrap_or(&written);
        let kinds = [("single", "single"), ("sentinel", "sentinel"), ("cluster", "cluster")];
        match self.choice("REDIS_TYPE", "single", &kinds) {
            "cluster" => return format!("{scheme}+cluster://{servers}"),
            "sentinel" => match servers.split_once(',') {
                Some((name, sentinels)) => return format!("{scheme}+sentinel://{sentinels}/{name}"),
                None => {
                    let hint = "write the name of the master and the Sentinels: REDIS_URL=NAME,HOST1:PORT,HOST2:PORT";
                    self.issue(format!("REDIS_URL is `{written}`, which names no Sentinel"), hint);
                }
            },
            _ => {}
        }
        let socket_types = [("unix", "unix"), ("tcp", "tcp"), ("tcp4", "tcp"), ("tcp6", "tcp")];
        match self.choice("REDIS_SOCKET_TYPE", "unix", &socket_types) {
            "unix" if plain.is_none() => format!("redis+unix://{written}"),
            _ => format!("{scheme}://{servers}"),
        }
    }

    fn xds(&mut self) -> String {
        let server = self.get_or("CONFIG_GRPC_XDS_SERVER_URL", "localhost:18000");
        let is_tls = self.flag("CONFIG_GRPC_XDS_SERVER_USE_TLS");
        let tls = inline(&[
            ("ca", self.get("CONFIG_GRPC_XDS_SERVER_TLS_CACERT")),
            ("cert", self.get("CONFIG_GRPC_XDS_CLIENT_TLS_CERT")),
            ("key", self.get("CONFIG_GRPC_XDS_CLIENT_TLS_KEY")),
            ("server_name", self.get("CONFIG_GRPC_XDS_SERVER_TLS_SAN")),
        ]);
        let ready_after = match (self.flag(FORCE_START), self.flag("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED")) {
            (_, true) => "domain",
            (true, false) => "start",
            (false, false) => "response",
        };
        let url = format!("{}://{server}", if is_tls { "https" } else { "http" });
        let values = [
            ("url", quoted(&url)),
            ("node_id", quoted(&self.get_or("CONFIG_GRPC_XDS_NODE_ID", "default"))),
            ("node_metadata", self.pairs("CONFIG_GRPC_XDS_NODE_METADATA", '=')),
            ("headers", self.pairs("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", ':')),
            ("tls", if is_tls { tls } else { String::new() }),
            ("ready_after", quoted(ready_after)),
        ];
        let values = values.iter().filter(|(_, value)| !value.is_empty());
        let values: Vec<_> = values.map(|(key, value)| format!("{key} = {value}")).collect();
        format!("{{ {} }}", values.join(", "))
    }

    /// Return the inline table for a list of keys and values, which is separated by commas. Return an empty text if the
    /// list is empty.
    fn pairs(&mut self, name: &str, separator: char) -> String {
        let mut pairs = Vec::new();
        for (pair, position) in self.get(name).split(',').zip(1..).filter(|(pair, _)| !pair.trim().is_empty()) {
            match pair.split_once(separator) {
                Some((key, value)) => pairs.push(format!("{} = {}", quoted(key.trim()), quoted(value.trim()))),
                // The text may be a part of a secret.
                None => self.issue(
                    format!("{name}: element {position} has no `{separator}`"),
                    &format!("write KEY{separator}VALUE, separated by commas"),
                ),
            }
        }
        if pairs.is_empty() { String::new() } else { format!("{{ {} }}", pairs.join(", ")) }
    }

    fn ratelimit(&mut self) -> Table {
        let mut table = Table::new("[ratelimit]");
        let root = self.get_or("RUNTIME_ROOT", "/srv/runtime_data/current");
        let directory = Path::new(&root).join(self.get("RUNTIME_SUBDIRECTORY"));
        let directory = directory.join(self.get_or("RUNTIME_APPDIRECTORY", "config"));
        match self.choice("CONFIG_TYPE", "file", &[("FILE", "file"), ("GRPC_XDS_SOTW", "xds")]) {
            "xds" => table.raw("xds", &self.xds()),
            _ => table.text("configuration", &directory.to_string_lossy()),
        }
        for (name, key) in [
            ("SHADOW_MODE", "shadow"),
            ("QUOTA_MODE", "quota_mode"),
            ("RESPONSE_DYNAMIC_METADATA", "dynamic_metadata"),
            ("MERGE_DOMAIN_CONFIG", "merge_domains"),
        ] {
            if self.flag(name) {
                table.raw(key, "true");
            }
        }
        if self.flag("LIMIT_RESPONSE_HEADERS_ENABLED") {
            let names = HEADERS.map(|(name, default, key)| (key, self.get_or(name, default)));
            table.raw("headers", &inline(&names));
        }
        table
    }
}

/// Parse a truth value as envoyproxy/ratelimit does.
fn parse_flag(value: &str) -> Option<bool> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

fn with_port(host: &str, port: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generated(variables: &[(&str, &str)]) -> Result<Generated, FileIssues> {
        generate(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()))
    }

    fn text(variables: &[(&str, &str)]) -> String {
        generated(variables).map(|generated| generated.text).unwrap()
    }

    #[test]
    fn defaults_are_those_of_envoyproxy_ratelimit() {
        let expected = r#"# The environment variables of envoyproxy/ratelimit.

[log]
level = "warn"
format = "text"
access = "off"

[[listener]]
name = "grpc"
address = "0.0.0.0:8081"
protocol = "ratelimit"

[[listener]]
name = "http"
address = "0.0.0.0:8080"
protocol = "ratelimit-http"


[store]
url = "redis+unix:///var/run/nutcracker/ratelimit.sock"

[ratelimit]
configuration = "/srv/runtime_data/current/config"
"#;
        assert_eq!(text(&[]), expected);
    }

    #[test]
    fn variables_select_the_store() {
        let tcp = ("REDIS_SOCKET_TYPE", "tcp");
        let cases: [(&[(&str, &str)], &str); 9] = [
            (&[("REDIS_URL", "/run/r.sock")], "url = \"redis+unix:///run/r.sock\""),
            (&[tcp, ("REDIS_URL", "redis:6379")], "url = \"redis://redis:6379\""),
            (
                &[("REDIS_SOCKET_TYPE", "TCP"), ("REDIS_URL", "redis:6379"), ("REDIS_TLS", "1")],
                "url = \"rediss://redis:6379\"",
            ),
            (&[("REDIS_URL", "rediss://u:p@redis/2")], "url = \"rediss://u:p@redis/2\""),
            (&[("REDIS_TYPE", "CLUSTER"), ("REDIS_URL", "a:1,b:2")], "url = \"redis+cluster://a:1,b:2\""),
            (&[("REDIS_TYPE", "sentinel"), ("REDIS_URL", "mine,a:1,b:2")], "url = \"redis+sentinel://a:1,b:2/mine\""),
            (&[tcp, ("REDIS_URL", "r"), ("REDIS_AUTH", "p$w")], "\nusername"),
            (&[tcp, ("REDIS_URL", "r"), ("REDIS_AUTH", "u:p:${w")], "username = \"u\"\npassword = \"p:$${w\"\n"),
            (
                &[tcp, ("REDIS_TLS", "true"), ("REDIS_TLS_CACERT", "/ca"), ("CACHE_KEY_PREFIX", "x")],
                "tls = { ca = \"/ca\" }\nprefix = \"x\"\n",
            ),
        ];
        for (variables, expected) in cases {
            let text = text(variables);
            let is_absent = expected == "\nusername";
            assert_eq!(text.contains(expected), !is_absent, "{variables:?}: {text}");
        }
        assert!(text(&[tcp, ("REDIS_AUTH", "p$w")]).contains("password = \"${REDIS_AUTH}\"\n"));
    }

    #[test]
    fn variables_without_effect_are_warnings_about_a_comment() {
        let Generated { text, warnings } = generated(&[
            ("REDIS_PERSECOND", "true"),
            ("USE_STATSD", "false"),
            ("TRACING_ENABLED", "0"),
            ("NEAR_LIMIT_RATIO", "0.9"),
        ])
        .unwrap();
        let spans: Vec<_> = warnings.iter().map(|issue| &text[issue.span.clone().unwrap()]).collect();
        assert_eq!(spans, ["NEAR_LIMIT_RATIO", "REDIS_PERSECOND"]);
    }

    #[test]
    fn faulty_variables_are_reported_together() {
        let faulty = generated(&[
            ("BACKEND_TYPE", "memcache"),
            ("LOG_LEVEL", "loud"),
            ("PORT", "tcp://10.0.0.1:80"),
            ("SHADOW_MODE", "yes"),
            ("REDIS_TYPE", "sentinel"),
            ("REDIS_URL", "one"),
            ("USE_PROMETHEUS", "true"),
            ("PROMETHEUS_ADDR", "9090"),
            ("PROMETHEUS_PATH", "/m"),
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_UDS", "/run/r.sock"),
            ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
            ("CONFIG_GRPC_XDS_NODE_METADATA", "a=b,c,"),
            ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "authorization=s3cret"),
        ])
        .unwrap_err();
        let messages: Vec<_> = faulty.issues.iter().map(|issue| &*issue.message).collect();
        let names = [
            "LOG_LEVEL is `loud`",
            "GRPC_SERVER_USE_TLS needs",
            "PORT is `tcp://",
            "PROMETHEUS_ADDR is `9090`",
            "PROMETHEUS_PATH is `/m`",
            "BACKEND_TYPE is `memcache`",
            "REDIS_URL is `one`",
            "CONFIG_GRPC_XDS_NODE_METADATA: element 2 has no `=`",
            "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: element 1 has no `:`",
            "SHADOW_MODE is `yes`",
            "GRPC_UDS is not supported",
        ];
        assert_eq!(messages.len(), names.len(), "{messages:?}");
        for (message, name) in messages.iter().zip(names) {
            assert!(message.starts_with(name), "{message}");
        }
        assert!(faulty.issues.iter().all(|issue| issue.hint.is_some()));
    }
}
