//! The configuration ready to use: names resolved, values checked, all errors found. Nothing fails later.

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
use crate::config::file::{EnvLookup, ParsedFile};
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
use crate::snapshot::client_tls::UpstreamTls;
use crate::snapshot::cost::{Cost, RefundOn};
use crate::snapshot::restart_required::RestartOnlyKeys;
use crate::snapshot::routes::Route;
use crate::snapshot::settings::{AdminSettings, LogSettings, ServerSettings};
use crate::snapshot::validator::Validator;
use crate::tls::{ClientAuth, DownstreamTls};
use crate::upstream::UpstreamSettings;

/// Everything that a request needs, compiled once.
#[derive(Debug)]
pub struct CompiledConfig {
    /// The file that says all of this.
    pub file: FileSnapshot,
    /// Limits of the HTTP side, and workers.
    pub server: Arc<ServerSettings>,
    /// Where to listen.
    pub listeners: Vec<Listener>,
    /// Where the operator asks; none = nowhere.
    pub admin: Option<AdminSettings>,
    /// Where the counters live.
    pub store: StoreSettings,
    /// The process' own log and the access log.
    pub log: LogSettings,
    /// Whom to believe about addresses.
    pub client_ip: Arc<ClientIpResolver>,
    /// Where API keys stand, and what becomes of unknown ones.
    pub api_key_settings: ApiKeySettings,
    /// Whose keys are known; replaced when their file changes.
    pub consumers: ArcSwap<Consumers>,
    /// That file, as it was read first.
    pub consumers_file: Option<FileSnapshot>,
    /// What tokens are checked against.
    pub verifier: JwtVerifier,
    /// The file that the keys of the verifier came from.
    pub jwks_file: Option<FileSnapshot>,
    /// Makes keys of identities.
    pub hasher: IdentityHasher,
    /// Headers that only trusted proxies may set, besides those of the X-Forwarded family, and those that identities and routes read.
    pub protected_headers: ProtectedHeaders,
    /// Upstreams, by the index that routes use.
    pub upstreams: Vec<Arc<UpstreamSettings>>,
    /// TLS of those that have servers with it.
    pub upstream_tls: Vec<Arc<UpstreamTls>>,
    /// Every limit, used or not, by name.
    pub limits: BTreeMap<String, CompiledLimit>,
    /// Every route, in the order of the file.
    pub routes: Vec<Arc<Route>>,
    /// The same, by what a request looks like.
    pub table: RouteTable<Arc<Route>>,
    pub(crate) restart_only_keys: RestartOnlyKeys,
}

/// `[[listener]]`
#[derive(Debug)]
pub struct Listener {
    /// Where.
    pub address: SocketAddr,
    /// Whether trusted proxies say in a PROXY header whom they speak for.
    pub proxy_protocol: bool,
    /// With TLS; none = clear text.
    pub tls: Option<ListenerTls>,
}

/// `tls` of a listener
#[derive(Debug)]
pub struct ListenerTls {
    /// What makes connections.
    pub tls: DownstreamTls,
    /// The files of each certificate and its key, as they were read first.
    pub certificates: Vec<[FileSnapshot; 2]>,
    /// The file of the authorities that sign the certificates of clients.
    pub client_ca: Option<(FileSnapshot, ClientAuth)>,
}

/// `[store]`
#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Redis; none = the memory of this process.
    pub redis: Option<(RedisDeployment, RedisSettings)>,
    /// How the store is called in logs; no credentials.
    pub name: String,
    /// Bound of a decision.
    pub timeout: Duration,
    /// Denials remembered; 0 = none.
    pub denial_cache: usize,
    /// Bound of the states kept in this process.
    pub max_memory_states: usize,
}

/// A limit, and how requests meet it.
#[derive(Debug, Clone)]
pub struct CompiledLimit {
    /// The limit.
    pub limit: Arc<LimitSpec>,
    /// What tells its identities apart.
    pub identity_spec: IdentitySpec,
    /// What a request costs; none = what the route says.
    pub cost: Option<Cost>,
    /// The statuses that give a charge back.
    pub refund_on: RefundOn,
}

impl CompiledConfig {
    /// Reads, checks and compiles a configuration.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(path: &Path, environment: EnvLookup<'_>) -> Result<CompiledConfig, ConfigError> {
        CompiledConfig::load_with_source(path, environment).map(|(config, _)| config)
    }

    /// The same, with the file as written: for whoever has more to say of it.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn load_with_source(
        path: &Path,
        environment: EnvLookup<'_>,
    ) -> Result<(CompiledConfig, ParsedFile<Config>), ConfigError> {
        Self::compile_file(path, file::read_gateway(path, environment), environment)
    }

    /// The same as [`Runtime::load`] for the text of a file that is not there, or not yet.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_text(path: &Path, text: String, environment: EnvLookup<'_>) -> Result<CompiledConfig, ConfigError> {
        Self::compile_file(path, file::parse_gateway(path, text, environment), environment).map(|(config, _)| config)
    }

    fn compile_file(
        path: &Path,
        file: Result<ParsedFile<Config>, FileIssues>,
        environment: EnvLookup<'_>,
    ) -> Result<(CompiledConfig, ParsedFile<Config>), ConfigError> {
        let mut file = file.map_err(|faulty| ConfigError { files: vec![faulty] })?;
        let mut reader = Validator::new(path, file.text.clone(), std::mem::take(&mut file.issues), environment);
        let snapshot = FileSnapshot { path: path.to_owned(), content: file.text.clone().into_bytes() };
        let config = compile(snapshot, &file.value, &mut reader);
        reader.finish()?;
        // Without a finding every part is there.
        Ok((config, file))
    }

    /// Listeners that cannot listen beside an earlier one, as pairs of places in the file. A gateway that opens these sockets
    /// itself does not start.
    pub fn address_conflicts(&self) -> impl Iterator<Item = (usize, usize)> {
        listeners::address_conflicts(&self.listeners)
    }

    /// Digests of the values that a reload does not change, by the names of their keys. Gateways and `check` compare
    /// them without their values, of which some are secret.
    pub fn restart_only_digests(&self, salt: &str) -> BTreeMap<String, String> {
        self.restart_only_keys.digests(salt)
    }

    /// Takes over what is now in the file of consumers. What they have used stays counted.
    ///
    /// # Errors
    /// Everything that is wrong with it; the consumers stay as they were.
    pub fn reload_consumers(&self, path: &Path, content: &[u8], environment: EnvLookup<'_>) -> Result<(), ConfigError> {
        let consumers = identities::read(path, content, &self.limits, &self.hasher, environment);
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
    let listeners = listeners::listeners(&config.listener, &client_ip, reader);
    let admin = config.admin.as_ref().and_then(|admin| settings::admin(admin, &listeners, reader));
    let api_keys = identities::api_key_settings(&config.api_key, reader);
    let (verifier, jwks_file) = identities::jwt_verifier(&config.jwt, reader);
    let secret = config.store.secret.as_ref().map_or("", |secret| secret.get_ref());
    let hasher = IdentityHasher::new(secret);
    let instances = store::gateway_count(&config.store, reader);
    let (upstreams, upstream_tls) = upstreams::upstreams(&config.upstream, reader);
    let limits = limits::limits(config, &hasher, instances, client_ip.trusted_proxies.len(), &upstreams, reader);
    let named = config.api_key.consumers.as_ref();
    let (consumers, consumers_file) =
        named.map(|text| identities::load(text, &limits, &hasher, reader)).unwrap_or_default();
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
