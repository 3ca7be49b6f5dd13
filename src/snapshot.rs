//! The compiled configuration: references resolved, values validated, all errors reported. Nothing fails later.

pub mod acme;
pub mod client_tls;
pub mod cost;
pub mod current;
mod identities;
mod limits;
pub mod listeners;
mod restart_required;
pub mod route_action;
pub mod routes;
pub mod settings;
pub(crate) mod store;
mod upstreams;
mod validator;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::config::error::{ConfigError, FileIssues};
use crate::config::file::FileSnapshot;
use crate::config::file::{EnvLookup, ParsedFile, UnsetVariables};
use crate::config::{Config, file};
use crate::http::headers::ProtectedHeaders;
use crate::identity::IdentitySpec;
use crate::identity::api_key::{ApiKeySettings, Consumers};
use crate::identity::client_ip::ClientIpResolver;
use crate::identity::jwt::JwtVerifier;
use crate::limiter::key::IdentityHasher;
use crate::limiter::redis::{RedisDeployment, RedisSettings};
use crate::limiter::spec::LimitSpec;
use crate::routing::RouteTable;
use crate::snapshot::acme::{Acme, AcmeListeners};
use crate::snapshot::client_tls::UpstreamTls;
use crate::snapshot::cost::{Cost, RefundOn};
use crate::snapshot::restart_required::RestartOnlyKeys;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::{AdminSettings, LogSettings, ServerSettings};
use crate::snapshot::validator::Validator;
use crate::tls::{ClientAuth, DownstreamTls};
use crate::upstream::UpstreamSettings;

/// The compiled configuration that requests use.
#[derive(Debug)]
pub struct CompiledConfig {
    /// The configuration file as read.
    pub file: FileSnapshot,
    /// Settings of the HTTP server and the workers.
    pub server: Arc<ServerSettings>,
    /// Listening sockets.
    pub listeners: Vec<Listener>,
    /// Certificates by ACME, if configured.
    pub acme: Option<Acme>,
    /// Admin listener, if configured.
    pub admin: Option<AdminSettings>,
    /// Store for rate limit state.
    pub store: StoreSettings,
    /// The process log and the access log.
    pub log: LogSettings,
    /// Trusted proxies and client network prefixes.
    pub client_ip: Arc<ClientIpResolver>,
    /// The API key header, and the handling of missing and unknown keys.
    pub api_key_settings: ApiKeySettings,
    /// Consumers and the hashes of their keys. Replaced when the file of consumers changes.
    pub consumers: ArcSwap<Consumers>,
    /// The file of consumers as read by the loader.
    pub consumers_file: Option<FileSnapshot>,
    /// Verifier of bearer tokens.
    pub verifier: JwtVerifier,
    /// The JWK Set file as read by the loader.
    pub jwks_file: Option<FileSnapshot>,
    /// Hash function for identities.
    pub hasher: IdentityHasher,
    /// Headers that need protection: those that only trusted proxies may set, besides the X-Forwarded family, and those
    /// that identities and routes read.
    pub protected_headers: ProtectedHeaders,
    /// Upstreams, by the index that routes use.
    pub upstreams: Vec<Arc<UpstreamSettings>>,
    /// TLS of the upstreams that have servers at `https://`.
    pub upstream_tls: Vec<Arc<UpstreamTls>>,
    /// All limits by name, used or not.
    pub limits: BTreeMap<String, CompiledLimit>,
    /// All routes, in file order.
    pub routes: Vec<Arc<Route>>,
    /// The routes, indexed for lookup.
    pub table: RouteTable<Arc<Route>>,
    /// Values of the keys that need a restart to change.
    pub(crate) restart_only_keys: RestartOnlyKeys,
}

/// `[[listener]]`
#[derive(Debug)]
pub struct Listener {
    /// Address and port.
    pub address: SocketAddr,
    /// Whether connections start with a PROXY protocol header from a trusted proxy.
    pub proxy_protocol: bool,
    /// TLS settings. `None` for plaintext.
    pub tls: Option<ListenerTls>,
}

/// `tls` of a listener
#[derive(Debug)]
pub struct ListenerTls {
    /// TLS configuration for new connections.
    pub tls: DownstreamTls,
    /// The files of each certificate and its key, as read by the loader.
    pub certificates: Vec<[FileSnapshot; 2]>,
    /// The file with the CA certificates for client certificates, as read by the loader, and whether clients need one.
    pub client_ca: Option<(FileSnapshot, ClientAuth)>,
}

/// `[store]`
#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Redis deployment and settings. `None` selects the memory of this process.
    pub redis: Option<(RedisDeployment, RedisSettings)>,
    /// Name of the store in logs, without credentials.
    pub name: String,
    /// Maximum time for a rate limit check.
    pub timeout: Duration,
    /// Maximum number of cached denials. 0 disables the cache.
    pub denial_cache: usize,
    /// Maximum number of states in the memory of this process.
    pub max_memory_states: usize,
}

/// A limit, with the identity and cost of its requests.
#[derive(Debug, Clone)]
pub struct CompiledLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// Identity that the limit counts.
    pub identity_spec: IdentitySpec,
    /// Cost of a request. `None` = the cost of the route.
    pub cost: Option<Cost>,
    /// Statuses that refund the charge.
    pub refund_on: RefundOn,
}

impl CompiledConfig {
    /// Read, validate and compile a configuration.
    ///
    /// # Errors
    /// All errors of the files.
    pub fn load(path: &Path, environment: EnvLookup<'_>) -> Result<CompiledConfig, ConfigError> {
        CompiledConfig::load_with_source(path, environment, UnsetVariables::Error).map(|(config, _)| config)
    }

    /// Like [`CompiledConfig::load`], and return the parsed file as well, with all warnings in it. With
    /// [`UnsetVariables::WarnExcept`], parts of the configuration that have unset variables may be missing.
    ///
    /// # Errors
    /// As for [`CompiledConfig::load`].
    pub fn load_with_source(
        path: &Path,
        environment: EnvLookup<'_>,
        policy: UnsetVariables<'_>,
    ) -> Result<(CompiledConfig, ParsedFile<Config>), ConfigError> {
        Self::compile_file(path, file::read_gateway(path, environment), environment, policy)
    }

    /// Like [`CompiledConfig::load`], but with `text` as the content of the file at `path`, which need not exist.
    ///
    /// # Errors
    /// As for [`CompiledConfig::load`].
    pub fn from_text(path: &Path, text: String, environment: EnvLookup<'_>) -> Result<CompiledConfig, ConfigError> {
        let file = file::parse_gateway(path, text, environment);
        Self::compile_file(path, file, environment, UnsetVariables::Error).map(|(config, _)| config)
    }

    fn compile_file(
        path: &Path,
        file: Result<ParsedFile<Config>, FileIssues>,
        environment: EnvLookup<'_>,
        policy: UnsetVariables<'_>,
    ) -> Result<(CompiledConfig, ParsedFile<Config>), ConfigError> {
        let mut file = file.map_err(|faulty| ConfigError { files: vec![faulty] })?;
        let mut reader = Validator::new(path, &mut file, environment);
        let snapshot = FileSnapshot { path: path.to_owned(), content: file.text.clone().into_bytes() };
        let config = compile(snapshot, &file.value, &mut reader);
        file.warnings = reader.finish(policy)?;
        // Without errors, no part is missing.
        Ok((config, file))
    }

    /// Return the listeners that conflict with an earlier one, as pairs of indices (earlier, later). A gateway that
    /// opens these sockets itself does not start.
    pub fn address_conflicts(&self) -> impl Iterator<Item = (usize, usize)> {
        listeners::address_conflicts(&self.listeners)
    }

    /// Return keyed digests of the values that a reload cannot change, by key. Gateways and `check` compare digests,
    /// since some values are secret.
    pub fn restart_only_digests(&self, salt: &str) -> BTreeMap<String, String> {
        self.restart_only_keys.digests(salt)
    }

    /// Replace the consumers by those in `content`. Their usage stays counted.
    ///
    /// # Errors
    /// All errors of the file. The consumers in use do not change.
    pub fn reload_consumers(&self, path: &Path, content: &[u8], environment: EnvLookup<'_>) -> Result<(), ConfigError> {
        let limits = identities::KnownLimits::new(&self.limits);
        let consumers = identities::read(path, content, &limits, &self.hasher, environment);
        let consumers = consumers.and_then(|loaded| match loaded.is_incomplete {
            true => Err(FileIssues::from_message(path, "no consumer has a key")),
            false => Ok(loaded.consumers),
        });
        let consumers = consumers.map_err(|faulty| ConfigError { files: vec![faulty] })?;
        self.consumers.store(Arc::new(consumers));
        Ok(())
    }
}

fn compile(file: FileSnapshot, config: &Config, reader: &mut Validator<'_>) -> CompiledConfig {
    let server = settings::server(&config.server, reader);
    let log = settings::log(&config.log, reader);
    let client_ip = identities::client_ip(&config.client_ip, reader);
    // Counts invalid networks, too, so that these are the only error.
    let trusted_proxies = config.client_ip.trusted_proxies.as_ref().map_or(0, Vec::len);
    let mut acme = AcmeListeners::new(config, reader);
    let listeners = listeners::listeners(&config.listener, trusted_proxies, &mut acme, reader);
    let acme = acme::acme(config, acme, &listeners, reader);
    let admin = config.admin.as_ref().and_then(|admin| settings::admin(admin, &listeners, reader));
    let api_keys = identities::api_key_settings(&config.api_key, reader);
    let (verifier, jwks_file) = identities::jwt_verifier(&config.jwt, reader);
    let secret = config.store.secret.as_ref().map_or("", |secret| secret.get_ref());
    let hasher = IdentityHasher::new(secret);
    let instances = store::gateway_count(&config.store, reader);
    let (upstreams, upstream_tls) = upstreams::upstreams(&config.upstream, reader);
    let limits = limits::limits(config, &hasher, instances, trusted_proxies, &upstreams, reader);
    let named = config.api_key.consumers.as_ref();
    let (consumers, consumers_file) =
        named.map(|text| identities::load(text, config, &limits, &hasher, reader)).unwrap_or_default();
    identities::check_keys_known(config, &limits, &api_keys, &consumers, reader);
    let (routes, table) = routes::routes(config, &limits, &upstreams, reader);
    let mut trusted_headers = limits::trusted_headers(&limits);
    trusted_headers.push(client_ip.header.clone());
    let identity_headers = limits
        .values()
        .flat_map(|compiled| &compiled.identity_spec.descriptors)
        .filter_map(|descriptor| descriptor.header(&api_keys));
    let guarded = ProtectedHeaders::new(trusted_headers, identity_headers.chain(table.matched_headers().cloned()));
    let store = store::store(&config.store, &routes, reader);
    let fixed = RestartOnlyKeys::from_config(config, &server, &listeners);
    CompiledConfig {
        file,
        server: Arc::new(server),
        listeners,
        acme,
        admin,
        store,
        log,
        client_ip: Arc::new(client_ip),
        api_key_settings: api_keys,
        consumers: ArcSwap::from_pointee(consumers),
        consumers_file,
        verifier,
        jwks_file,
        hasher,
        protected_headers: guarded,
        upstreams: upstreams.into_iter().map(Arc::new).collect(),
        upstream_tls: upstream_tls.into_iter().map(Arc::new).collect(),
        limits,
        routes,
        table,
        restart_only_keys: fixed,
    }
}
