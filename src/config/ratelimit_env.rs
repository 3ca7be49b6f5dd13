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
    ("USE_DOG_STATSD_MOGRIFIERS", "names are mapped by the agent: set dogstatsd_mapper_profiles in its configuration"),
    ("PROMETHEUS_MAPPER_YAML", "metrics have the names of the default mapper, and of this gateway"),
    ("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", "durations are in seconds"),
    ("EXPIRATION_JITTER_MAX_SECONDS", "counters expire at the end of their window"),
    ("LOCAL_CACHE_SIZE_IN_BYTES", "denials are always cached, for at most 1s"),
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
    ("REDIS_PERSECOND", ONE_REDIS),
    ("REDIS_PERSECOND_SOCKET_TYPE", ONE_REDIS),
    ("REDIS_PERSECOND_TYPE", ONE_REDIS),
    ("REDIS_PERSECOND_URL", ONE_REDIS),
    ("REDIS_PERSECOND_POOL_SIZE", ONE_REDIS),
    ("REDIS_PERSECOND_AUTH", ONE_REDIS),
    ("REDIS_PERSECOND_TLS", ONE_REDIS),
    ("REDIS_PERSECOND_SENTINEL_AUTH", ONE_REDIS),
    ("REDIS_PERSECOND_PIPELINE_WINDOW", ONE_REDIS),
    ("REDIS_PERSECOND_PIPELINE_LIMIT", ONE_REDIS),
    ("REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM", ONE_REDIS),
    ("REDIS_PERSECOND_TIMEOUT", ONE_REDIS),
    ("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", ONE_REDIS),
    ("MEMCACHE_HOST_PORT", NO_MEMCACHE),
    ("MEMCACHE_MAX_IDLE_CONNS", NO_MEMCACHE),
    ("MEMCACHE_SRV", NO_MEMCACHE),
    ("MEMCACHE_SRV_REFRESH", NO_MEMCACHE),
    ("MEMCACHE_TLS", NO_MEMCACHE),
    ("MEMCACHE_TLS_CLIENT_CERT", NO_MEMCACHE),
    ("MEMCACHE_TLS_CLIENT_KEY", NO_MEMCACHE),
    ("MEMCACHE_TLS_CACERT", NO_MEMCACHE),
    ("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", NO_MEMCACHE),
    (
        "OTEL_EXPORTER_OTLP_CERTIFICATE",
        "the certificate of the collector is verified with the trust roots of the system",
    ),
    (
        "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE",
        "the certificate of the collector is verified with the trust roots of the system",
    ),
];

const NO_DEBUG_PORT: &str = "there is no debug port: with USE_PROMETHEUS=true, PROMETHEUS_ADDR serves metrics";
const RECONNECTS: &str = "the connection is retried after 0.5s to 30s";
const ONE_CONNECTION: &str = "each worker pipelines its calls on one connection";
const ONE_REDIS: &str = "limits per second are counted at REDIS_URL";
const NO_MEMCACHE: &str = "only Redis counts";
const NO_REDIS_NEEDED: &str = "without Redis, the gateway starts and enforces limits in its memory";

/// Variable that accepts a certificate of Redis that is not valid for its host.
const SKIP_NAME: &str = "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION";

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
    let mut warnings = Vec::new();
    let conditional = variables.conditional();
    let without_effect = WITHOUT_EFFECT.iter().chain(&conditional).filter(|(name, _)| variables.is_set(name));
    for (name, reason) in without_effect {
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
        if self.flag("TRACING_ENABLED") {
            self.traces(&mut table);
        }
        table
    }

    /// Add where spans go. The collector is named by the variables of OpenTelemetry, as in envoyproxy/ratelimit.
    fn traces(&mut self, table: &mut Table) {
        let protocols = [("http", "http"), ("grpc", "grpc")];
        if self.choice("TRACING_EXPORTER_PROTOCOL", "http", &protocols) == "grpc" {
            let hint = "set TRACING_EXPORTER_PROTOCOL=http, and the endpoint to the HTTP port of the collector (4318)";
            self.issue("TRACING_EXPORTER_PROTOCOL is `grpc`, but spans are sent over HTTP".to_owned(), hint);
        }
        let endpoint = match (self.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), self.get("OTEL_EXPORTER_OTLP_ENDPOINT")) {
            (of_traces, base) if of_traces.is_empty() => {
                let base = if base.is_empty() { "http://localhost:4318" } else { &base };
                format!("{}/v1/traces", base.trim_end_matches('/'))
            }
            (of_traces, _) => of_traces,
        };
        table.text("trace_endpoint", &endpoint);
        let sample = self.get_or("TRACING_SAMPLING_RATE", "1");
        match sample.parse::<f64>() {
            // envoyproxy/ratelimit records all traces with a rate above 1, and none with a rate below 0.
            Ok(rate) if rate.is_finite() => table.raw("trace_sample", &format!("{:?}", rate.clamp(0.0, 1.0))),
            Ok(_) | Err(_) => {
                let hint = "write a number from 0 to 1, such as TRACING_SAMPLING_RATE=0.1";
                self.issue(format!("TRACING_SAMPLING_RATE is `{sample}`"), hint);
            }
        }
        let resource = [
            ("\"service.name\"", self.get_or("TRACING_SERVICE_NAME", "RateLimit")),
            ("\"service.namespace\"", self.get("TRACING_SERVICE_NAMESPACE")),
            ("\"service.instance.id\"", self.get("TRACING_SERVICE_INSTANCE_ID")),
        ];
        table.raw("trace_resource", &inline(&resource));
    }

    fn grpc_listener(&mut self) -> Table {
        let mut table = Table::new("[[listener]]");
        table.text("name", "grpc");
        match &*self.get("GRPC_UDS") {
            "" => table.text("address", &self.address("GRPC_HOST", "GRPC_PORT", "8081")),
            path => {
                // A relative path belongs to the current directory. `absolute` fails only without such a directory.
                let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
                table.text("address", &format!("unix:{}", path.display()));
            }
        }
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
        let client_name = self.get("GRPC_CLIENT_TLS_SAN");
        let clients = match (&*client_ca, &*client_name) {
            ("", "") => String::new(),
            // envoyproxy/ratelimit would serve clients without a certificate.
            ("", _) => {
                let hint = "set GRPC_CLIENT_TLS_CACERT to the CA certificates of the clients";
                self.issue("GRPC_CLIENT_TLS_SAN needs GRPC_CLIENT_TLS_CACERT".to_owned(), hint);
                String::new()
            }
            (file, name) => {
                let names =
                    if name.is_empty() { String::new() } else { format!(", client_names = [{}]", quoted(name)) };
                format!(", client_ca = {}, client_auth = \"required\"{names}", quoted(file))
            }
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
        if !self.flag("USE_PROMETHEUS") || self.flag("DISABLE_STATS") {
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
        let written: Vec<_> = files.iter().filter(|(_, file)| !file.is_empty()).collect();
        let mut keys: Vec<_> = written.iter().map(|(key, file)| format!("{key} = {}", quoted(file))).collect();
        if self.flag(SKIP_NAME) {
            keys.push("verify_name = false".to_owned());
        }
        if self.has_tls_store() && !keys.is_empty() {
            table.raw("tls", &format!("{{ {} }}", keys.join(", ")));
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
        let near_limit = self.get("NEAR_LIMIT_RATIO");
        match near_limit.parse::<f64>() {
            _ if near_limit.is_empty() => {}
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => table.raw("near_limit", &format!("{ratio:?}")),
            Ok(_) | Err(_) => {
                let hint = "write a number from 0 to 1, such as NEAR_LIMIT_RATIO=0.8";
                self.issue(format!("NEAR_LIMIT_RATIO is `{near_limit}`"), hint);
            }
        }
        if let Some(statsd) = self.statsd() {
            table.raw("statsd", &statsd);
        }
        table
    }

    /// Return where metrics are sent to.
    fn sends(&mut self) -> Sink {
        // envoyproxy/ratelimit sends to StatsD by default, and does not start with several destinations.
        let by_default = if self.flag("USE_PROMETHEUS") || self.flag("USE_DOG_STATSD") { "false" } else { "true" };
        let statsd = self.get_or("USE_STATSD", by_default);
        match (self.flag("DISABLE_STATS"), self.flag("USE_DOG_STATSD")) {
            (true, _) => Sink::Nowhere,
            (false, true) => Sink::Dogstatsd,
            (false, false) if parse_flag(&statsd) == Some(false) => Sink::Nowhere,
            (false, false) => {
                if parse_flag(&statsd).is_none() {
                    self.issue(format!("USE_STATSD is `{statsd}`, but must be true or false"), "set USE_STATSD=true");
                }
                Sink::Statsd
            }
        }
    }

    fn statsd(&mut self) -> Option<String> {
        let (protocol, format) = match self.sends() {
            Sink::Nowhere => return None,
            Sink::Statsd => (self.choice("STATSD_PROTOCOL", "tcp", &[("tcp", "tcp"), ("udp", "udp")]), "statsd"),
            Sink::Dogstatsd => ("udp", "dogstatsd"),
        };
        let host = self.get_or("STATSD_HOST", "localhost");
        let port = self.get_or("STATSD_PORT", "8125");
        if port.parse::<u16>().is_err() {
            self.issue(format!("STATSD_PORT is `{port}`"), "write a port, such as STATSD_PORT=8125");
        }
        let written = self.get_or("STATS_FLUSH_INTERVAL", "10s");
        let Some(interval_us) = parse_go_duration_us(&written).filter(|us| *us > 0) else {
            let hint = "write a duration, such as STATS_FLUSH_INTERVAL=10s";
            self.issue(format!("STATS_FLUSH_INTERVAL is `{written}`"), hint);
            return None;
        };
        let address = with_port(&host, &port);
        let mut keys = vec![
            format!("address = {}", quoted(&address)),
            format!("protocol = {}", quoted(protocol)),
            format!("format = {}", quoted(format)),
            format!("interval = \"{}ms\"", interval_us.div_ceil(1000)),
        ];
        let tags = self.pairs("EXTRA_TAGS", ':');
        if !tags.is_empty() {
            keys.push(format!("tags = {tags}"));
        }
        Some(format!("{{ {} }}", keys.join(", ")))
    }

    /// Return whether connections to Redis use TLS.
    fn has_tls_store(&mut self) -> bool {
        let is_tls = self.flag("REDIS_TLS") || self.get("REDIS_URL").starts_with("rediss://");
        let kind = self.get("REDIS_TYPE");
        let is_unix = self.get_or("REDIS_SOCKET_TYPE", "unix").eq_ignore_ascii_case("unix")
            && !self.get("REDIS_URL").contains("://")
            && !["sentinel", "cluster"].iter().any(|known| known.eq_ignore_ascii_case(&kind));
        is_tls && !is_unix
    }

    /// Return the variables that have no effect because of other variables, each with the reason.
    fn conditional(&mut self) -> Vec<(&'static str, &'static str)> {
        let mut without_effect = Vec::new();
        if self.sends() == Sink::Nowhere {
            let reason = "no metrics are sent to StatsD: set USE_STATSD=true, and DISABLE_STATS=false";
            let names = ["STATSD_HOST", "STATSD_PORT", "STATSD_PROTOCOL", "STATS_FLUSH_INTERVAL"];
            without_effect.extend(names.map(|name| (name, reason)));
            without_effect
                .push(("EXTRA_TAGS", "no metrics are sent to StatsD, and Prometheus adds labels when it scrapes"));
        }
        if !self.has_tls_store() {
            let reason = "Redis uses TLS only with REDIS_TLS=true, and over TCP";
            let names = ["REDIS_TLS", "REDIS_TLS_CACERT", "REDIS_TLS_CLIENT_CERT", "REDIS_TLS_CLIENT_KEY", SKIP_NAME];
            without_effect.extend(names.map(|name| (name, reason)));
        }
        if self.flag("DISABLE_STATS") {
            let names = ["USE_STATSD", "USE_DOG_STATSD", "USE_PROMETHEUS", "PROMETHEUS_ADDR", "PROMETHEUS_PATH"];
            without_effect.extend(names.map(|name| (name, "DISABLE_STATS=true disables all metrics")));
        }
        if !self.flag("TRACING_ENABLED") {
            let names = [
                "TRACING_SERVICE_NAME",
                "TRACING_SERVICE_NAMESPACE",
                "TRACING_SERVICE_INSTANCE_ID",
                "TRACING_EXPORTER_PROTOCOL",
                "TRACING_SAMPLING_RATE",
            ];
            without_effect.extend(names.map(|name| (name, "calls have spans only with TRACING_ENABLED=true")));
        }
        if !self.flag("GRPC_SERVER_USE_TLS") {
            let names =
                ["GRPC_SERVER_TLS_CERT", "GRPC_SERVER_TLS_KEY", "GRPC_CLIENT_TLS_CACERT", "GRPC_CLIENT_TLS_SAN"];
            without_effect.extend(names.map(|name| (name, "calls use TLS only with GRPC_SERVER_USE_TLS=true")));
        }
        if self.get("GRPC_UDS").is_empty() {
            return without_effect;
        }
        without_effect.extend(["GRPC_HOST", "GRPC_PORT"].map(|name| (name, "GRPC_UDS takes their place")));
        without_effect
    }
}

/// Where metrics are sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sink {
    Nowhere,
    Statsd,
    Dogstatsd,
}

/// Parse a duration in the syntax of Go, such as `1m30s` or `1.5s`, and return it in µs.
fn parse_go_duration_us(text: &str) -> Option<u64> {
    const UNITS: [(&str, f64); 7] =
        [("ms", 1e3), ("us", 1.0), ("µs", 1.0), ("ns", 1e-3), ("h", 3.6e9), ("m", 6e7), ("s", 1e6)];
    let mut rest = text;
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let (unit, us) = UNITS.iter().find(|(unit, _)| rest[digits..].starts_with(unit))?;
        sum += number * us;
        rest = &rest[digits + unit.len()..];
    }
    (!text.is_empty() && sum < 1e15).then_some(sum as u64)
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
statsd = { address = "localhost:8125", protocol = "tcp", format = "statsd", interval = "10000ms" }
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
            ("TRACING_SERVICE_NAME", "limits"),
            ("LOCAL_CACHE_SIZE_IN_BYTES", "9"),
        ])
        .unwrap();
        let spans: Vec<_> = warnings.iter().map(|issue| &text[issue.span.clone().unwrap()]).collect();
        assert_eq!(spans, ["LOCAL_CACHE_SIZE_IN_BYTES", "REDIS_PERSECOND", "TRACING_SERVICE_NAME"]);
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
            ("GRPC_CLIENT_TLS_SAN", "envoy"),
            ("STATSD_PORT", "x"),
            ("STATS_FLUSH_INTERVAL", "10"),
            ("NEAR_LIMIT_RATIO", "1.1"),
            ("TRACING_ENABLED", "true"),
            ("TRACING_EXPORTER_PROTOCOL", "grpc"),
            ("TRACING_SAMPLING_RATE", "all"),
            ("USE_STATSD", "true"),
            ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
            ("CONFIG_GRPC_XDS_NODE_METADATA", "a=b,c,"),
            ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "authorization=s3cret"),
        ])
        .unwrap_err();
        let messages: Vec<_> = faulty.issues.iter().map(|issue| &*issue.message).collect();
        let names = [
            "LOG_LEVEL is `loud`",
            "TRACING_EXPORTER_PROTOCOL is `grpc`",
            "TRACING_SAMPLING_RATE is `all`",
            "GRPC_SERVER_USE_TLS needs",
            "GRPC_CLIENT_TLS_SAN needs GRPC_CLIENT_TLS_CACERT",
            "PORT is `tcp://",
            "PROMETHEUS_ADDR is `9090`",
            "PROMETHEUS_PATH is `/m`",
            "BACKEND_TYPE is `memcache`",
            "REDIS_URL is `one`",
            "CONFIG_GRPC_XDS_NODE_METADATA: element 2 has no `=`",
            "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS: element 1 has no `:`",
            "SHADOW_MODE is `yes`",
            "NEAR_LIMIT_RATIO is `1.1`",
            "STATSD_PORT is `x`",
            "STATS_FLUSH_INTERVAL is `10`",
        ];
        assert_eq!(messages.len(), names.len(), "{messages:?}");
        for (message, name) in messages.iter().zip(names) {
            assert!(message.starts_with(name), "{message}");
        }
        assert!(faulty.issues.iter().all(|issue| issue.hint.is_some()));
    }

    /// The variables of `settings.go` of envoyproxy/ratelimit at commit f2fb157, each with a value other than its default.
    /// `others` returns the variables that it depends on.
    #[test]
    fn no_variable_of_the_reference_is_ignored_silently() {
        let others = |name: &str| -> &[(&str, &str)] {
            match name {
                _ if name.starts_with("CONFIG_GRPC_XDS_") && name.contains("TLS_") => {
                    &[("CONFIG_TYPE", "GRPC_XDS_SOTW"), ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true")]
                }
                _ if name.starts_with("CONFIG_GRPC_XDS_") => &[("CONFIG_TYPE", "GRPC_XDS_SOTW")],
                "FORCE_START_WITHOUT_INITIAL_CONFIG" | "HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED" => {
                    &[("CONFIG_TYPE", "GRPC_XDS_SOTW")]
                }
                "REDIS_TLS" => &[("REDIS_SOCKET_TYPE", "tcp")],
                "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION"
                | "REDIS_TLS_CLIENT_CERT"
                | "REDIS_TLS_CLIENT_KEY"
                | "REDIS_TLS_CACERT" => &[("REDIS_TLS", "true"), ("REDIS_SOCKET_TYPE", "tcp")],
                "LIMIT_LIMIT_HEADER" | "LIMIT_REMAINING_HEADER" | "LIMIT_RESET_HEADER" => {
                    &[("LIMIT_RESPONSE_HEADERS_ENABLED", "true")]
                }
                "PROMETHEUS_ADDR" | "PROMETHEUS_PATH" => &[("USE_PROMETHEUS", "true")],
                _ => &[],
            }
        };
        let effect = |variables: &[(&str, &str)]| match generated(variables) {
            Ok(Generated { text, .. }) => text,
            Err(faulty) => format!("{:?}", faulty.issues),
        };
        for (name, value) in [
            ("HOST", "127.0.0.1"),
            ("PORT", "1"),
            ("DEBUG_HOST", "x1"),
            ("DEBUG_PORT", "x1"),
            ("GRPC_UDS", "/r.sock"),
            ("GRPC_HOST", "127.0.0.1"),
            ("GRPC_PORT", "1"),
            ("GRPC_MAX_CONNECTION_AGE", "x1"),
            ("GRPC_MAX_CONNECTION_AGE_GRACE", "x1"),
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", "x1"),
            ("GRPC_SERVER_TLS_KEY", "x1"),
            ("GRPC_CLIENT_TLS_CACERT", "x1"),
            ("GRPC_CLIENT_TLS_SAN", "x1"),
            ("LOG_LEVEL", "debug"),
            ("LOG_FORMAT", "json"),
            ("CONFIG_TYPE", "GRPC_XDS_SOTW"),
            ("FORCE_START_WITHOUT_INITIAL_CONFIG", "true"),
            ("CONFIG_GRPC_XDS_NODE_ID", "x1"),
            ("CONFIG_GRPC_XDS_NODE_METADATA", "a=b"),
            ("CONFIG_GRPC_XDS_SERVER_URL", "x1"),
            ("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "x1"),
            ("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "a:b"),
            ("CONFIG_GRPC_XDS_SERVER_USE_TLS", "true"),
            ("CONFIG_GRPC_XDS_CLIENT_TLS_CERT", "x1"),
            ("CONFIG_GRPC_XDS_CLIENT_TLS_KEY", "x1"),
            ("CONFIG_GRPC_XDS_SERVER_TLS_CACERT", "x1"),
            ("CONFIG_GRPC_XDS_SERVER_TLS_SAN", "x1"),
            ("XDS_CLIENT_BACKOFF_INITIAL_INTERVAL", "x1"),
            ("XDS_CLIENT_BACKOFF_MAX_INTERVAL", "x1"),
            ("XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "x1"),
            ("XDS_CLIENT_BACKOFF_JITTER", "true"),
            ("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", "x1"),
            ("USE_DOG_STATSD", "true"),
            ("USE_DOG_STATSD_MOGRIFIERS", "x1"),
            ("USE_STATSD", "false"),
            ("STATSD_HOST", "x1"),
            ("STATSD_PORT", "1"),
            ("EXTRA_TAGS", "a:b"),
            ("STATS_FLUSH_INTERVAL", "1s"),
            ("DISABLE_STATS", "true"),
            ("USE_PROMETHEUS", "true"),
            ("PROMETHEUS_ADDR", ":1"),
            ("PROMETHEUS_PATH", "/m"),
            ("PROMETHEUS_MAPPER_YAML", "x1"),
            ("PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS", "true"),
            ("RUNTIME_ROOT", "x1"),
            ("RUNTIME_SUBDIRECTORY", "x1"),
            ("RUNTIME_APPDIRECTORY", "x1"),
            ("RUNTIME_IGNOREDOTFILES", "true"),
            ("RUNTIME_WATCH_ROOT", "true"),
            ("EXPIRATION_JITTER_MAX_SECONDS", "x1"),
            ("LOCAL_CACHE_SIZE_IN_BYTES", "1"),
            ("NEAR_LIMIT_RATIO", "0.5"),
            ("CACHE_KEY_PREFIX", "x1"),
            ("BACKEND_TYPE", "memcache"),
            ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true"),
            ("LIMIT_RESPONSE_HEADERS_ENABLED", "true"),
            ("LIMIT_LIMIT_HEADER", "x1"),
            ("LIMIT_REMAINING_HEADER", "x1"),
            ("LIMIT_RESET_HEADER", "x1"),
            ("HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED", "true"),
            ("REDIS_SOCKET_TYPE", "tcp"),
            ("REDIS_TYPE", "cluster"),
            ("REDIS_URL", "x1"),
            ("REDIS_POOL_SIZE", "x1"),
            ("REDIS_AUTH", "x1"),
            ("REDIS_TLS", "true"),
            ("REDIS_TLS_CLIENT_CERT", "x1"),
            ("REDIS_TLS_CLIENT_KEY", "x1"),
            ("REDIS_TLS_CACERT", "x1"),
            ("REDIS_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
            ("REDIS_PIPELINE_WINDOW", "x1"),
            ("REDIS_PIPELINE_LIMIT", "x1"),
            ("REDIS_CLUSTER_PIPELINE_PARALLELISM", "x1"),
            ("REDIS_PERSECOND", "true"),
            ("REDIS_PERSECOND_SOCKET_TYPE", "x1"),
            ("REDIS_PERSECOND_TYPE", "x1"),
            ("REDIS_PERSECOND_URL", "x1"),
            ("REDIS_PERSECOND_POOL_SIZE", "x1"),
            ("REDIS_PERSECOND_AUTH", "x1"),
            ("REDIS_PERSECOND_TLS", "true"),
            ("REDIS_SENTINEL_AUTH", "x1"),
            ("REDIS_PERSECOND_SENTINEL_AUTH", "x1"),
            ("REDIS_PERSECOND_PIPELINE_WINDOW", "x1"),
            ("REDIS_PERSECOND_PIPELINE_LIMIT", "x1"),
            ("REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM", "x1"),
            ("REDIS_HEALTH_CHECK_ACTIVE_CONNECTION", "true"),
            ("REDIS_TIMEOUT", "x1"),
            ("REDIS_PERSECOND_TIMEOUT", "x1"),
            ("REDIS_POOL_ON_EMPTY_BEHAVIOR", "x1"),
            ("REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR", "x1"),
            ("REDIS_STARTUP_INITIAL_INTERVAL", "x1"),
            ("REDIS_STARTUP_MAX_INTERVAL", "x1"),
            ("REDIS_STARTUP_MAX_ELAPSED_TIME", "x1"),
            ("MEMCACHE_HOST_PORT", "x1"),
            ("MEMCACHE_MAX_IDLE_CONNS", "x1"),
            ("MEMCACHE_SRV", "x1"),
            ("MEMCACHE_SRV_REFRESH", "x1"),
            ("MEMCACHE_TLS", "true"),
            ("MEMCACHE_TLS_CLIENT_CERT", "x1"),
            ("MEMCACHE_TLS_CLIENT_KEY", "x1"),
            ("MEMCACHE_TLS_CACERT", "x1"),
            ("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION", "true"),
            ("SHADOW_MODE", "true"),
            ("QUOTA_MODE", "true"),
            ("RESPONSE_DYNAMIC_METADATA", "true"),
            ("MERGE_DOMAIN_CONFIG", "true"),
            ("TRACING_ENABLED", "true"),
            ("TRACING_SERVICE_NAME", "x1"),
            ("TRACING_SERVICE_NAMESPACE", "x1"),
            ("TRACING_SERVICE_INSTANCE_ID", "x1"),
            ("TRACING_EXPORTER_PROTOCOL", "grpc"),
            ("TRACING_SAMPLING_RATE", "0.5"),
        ] {
            let without = others(name).to_vec();
            let with = [&without[..], &[(name, value)]].concat();
            // A warning is about a comment in the text, so the text differs as well.
            assert_ne!(effect(&with), effect(&without), "{name}={value}");
        }
    }

    #[test]
    fn durations_of_go_are_parsed() {
        for (text, us) in [
            ("10s", Some(10_000_000)),
            ("1m30s", Some(90_000_000)),
            ("1.5h", Some(5_400_000_000)),
            ("250ms1us", Some(250_001)),
            ("1500ns", Some(1)),
            ("7µs", Some(7)),
            ("10", None),
            ("s", None),
            ("", None),
            ("-1s", None),
            ("1.2.3s", None),
        ] {
            assert_eq!(parse_go_duration_us(text), us, "{text}");
        }
    }
}
