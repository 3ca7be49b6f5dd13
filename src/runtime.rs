//! The configuration ready to use: names resolved, values checked, all errors found. Nothing fails later.

mod admin;
mod client_tls;
mod consumers;
pub mod files;
mod fixed;
mod fleets;
mod identities;
mod limits;
mod listeners;
mod quotas;
mod reader;
mod route;
mod routes;
mod rules;
mod settings;
mod split;
mod store;
mod succession;
mod targets;
mod upstreams;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::time::Duration;

use crate::config::Config;
use crate::config::error::{ConfigError, FaultyFile};
use crate::config::file::{self, Environment, File};
use crate::cost::{Cost, RefundOn};
use crate::http::headers::ProtectedHeaders;
use crate::identity::By;
use crate::identity::api_key::{ApiKeys, Consumers};
use crate::identity::client_ip::ClientIp;
use crate::identity::jwt::Verifier;
use crate::limit::key::IdentityHasher;
use crate::limit::plan::Limit;
use crate::limit::redis::{RedisSettings, Servers};
use crate::route::RouteTable;
use crate::tls::{ClientAuth, DownstreamTls};
use crate::upstream::settings::UpstreamSettings;
use crate::watch::Snapshot;
pub use admin::{AdminSettings, Token};
pub use client_tls::UpstreamTls;
use fixed::Fixed;
pub use listeners::Subject;
use reader::Reader;
pub use route::{Metered, Metering, Redirect, Respond, Rewrite, Route, Target};
pub use settings::{Access, Layout, LogSettings, ServerSettings};
pub use split::Split;
pub use succession::Unfit;

/// Everything that a request needs, compiled once.
#[derive(Debug)]
pub struct Runtime {
    /// The file that says all of this.
    pub file: Snapshot,
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
    pub client_ip: Arc<ClientIp>,
    /// Where API keys stand, and what becomes of unknown ones.
    pub api_keys: ApiKeys,
    /// Whose keys are known; replaced when their file changes.
    pub consumers: ArcSwap<Consumers>,
    /// That file, as it was read first.
    pub consumers_file: Option<Snapshot>,
    /// What tokens are checked against.
    pub verifier: Verifier,
    /// The file that the keys of the verifier came from.
    pub jwks_file: Option<Snapshot>,
    /// Makes keys of identities.
    pub hasher: IdentityHasher,
    /// Headers that only trusted proxies may set, besides those of the X-Forwarded family, and those that identities and routes read.
    pub guarded: ProtectedHeaders,
    /// Upstreams, by the index that routes use.
    pub upstreams: Vec<Arc<UpstreamSettings>>,
    /// TLS of those that have servers with it.
    pub upstream_tls: Vec<Arc<UpstreamTls>>,
    /// Every limit, used or not, by name.
    pub limits: BTreeMap<String, Terms>,
    /// Every route, in the order of the file.
    pub routes: Vec<Arc<Route>>,
    /// The same, by what a request looks like.
    pub table: RouteTable<Arc<Route>>,
    fixed: Fixed,
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
    pub certificates: Vec<[Snapshot; 2]>,
    /// The file of the authorities that sign the certificates of clients.
    pub client_ca: Option<(Snapshot, ClientAuth)>,
}

/// `[store]`
#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Redis; none = the memory of this process.
    pub redis: Option<(Servers, RedisSettings)>,
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
pub struct Terms {
    /// The limit.
    pub limit: Arc<Limit>,
    /// What tells its identities apart.
    pub by: By,
    /// What a request costs; none = what the route says.
    pub cost: Option<Cost>,
    /// The statuses that give a charge back.
    pub refund_on: RefundOn,
}

impl Runtime {
    /// Reads, checks and compiles a configuration.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(path: &Path, environment: Environment<'_>) -> Result<Runtime, ConfigError> {
        Runtime::load_as_written(path, environment).map(|(runtime, _)| runtime)
    }

    /// The same, with the file as written: for whoever has more to say of it.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn load_as_written(path: &Path, environment: Environment<'_>) -> Result<(Runtime, File<Config>), ConfigError> {
        Self::compiled(path, file::gateway(path, environment), environment)
    }

    /// The same as [`Runtime::load`] for the text of a file that is not there, or not yet.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn of(path: &Path, text: String, environment: Environment<'_>) -> Result<Runtime, ConfigError> {
        Self::compiled(path, file::gateway_of(path, text, environment), environment).map(|(runtime, _)| runtime)
    }

    fn compiled(
        path: &Path,
        file: Result<File<Config>, FaultyFile>,
        environment: Environment<'_>,
    ) -> Result<(Runtime, File<Config>), ConfigError> {
        let mut file = file.map_err(|faulty| ConfigError { files: vec![faulty] })?;
        let mut reader = Reader::new(path, file.text.clone(), std::mem::take(&mut file.issues), environment);
        let snapshot = Snapshot { path: path.to_owned(), content: file.text.clone().into_bytes() };
        let runtime = compile(snapshot, &file.value, &mut reader);
        reader.finish()?;
        // Without a finding every part is there.
        Ok((runtime, file))
    }

    /// Listeners that cannot listen beside an earlier one, as pairs of places in the file. A gateway that opens these sockets
    /// itself does not start.
    pub fn collisions(&self) -> impl Iterator<Item = (usize, usize)> {
        listeners::collisions(&self.listeners)
    }

    /// Digests of the values that a reload does not change, by the names of their keys. Gateways and `check` compare
    /// them without their values, of which some are secret.
    pub fn restart_only(&self, salt: &str) -> BTreeMap<String, String> {
        self.fixed.digests(salt)
    }

    /// Takes over what is now in the file of consumers. What they have used stays counted.
    ///
    /// # Errors
    /// Everything that is wrong with it; the consumers stay as they were.
    pub fn reload_consumers(
        &self,
        path: &Path,
        content: &[u8],
        environment: Environment<'_>,
    ) -> Result<(), ConfigError> {
        let consumers = consumers::read(path, content, &self.limits, &self.hasher, environment);
        let consumers = consumers.and_then(|found| match found.unfinished {
            true => Err(FaultyFile::whole(path, "no consumer has a key")),
            false => Ok(found.consumers),
        });
        let consumers = consumers.map_err(|faulty| ConfigError { files: vec![faulty] })?;
        self.consumers.store(Arc::new(consumers));
        Ok(())
    }
}

fn compile(file: Snapshot, config: &Config, reader: &mut Reader<'_>) -> Runtime {
    let server = settings::server(&config.server, reader);
    let log = settings::log(&config.log, reader);
    let client_ip = identities::client_ip(&config.client_ip, reader);
    let listeners = listeners::listeners(&config.listener, &client_ip, reader);
    let admin = config.admin.as_ref().and_then(|admin| admin::admin(admin, &listeners, reader));
    let api_keys = identities::api_keys(&config.api_key, reader);
    let (verifier, jwks_file) = identities::jwt(&config.jwt, reader);
    let secret = config.store.secret.as_ref().map_or("", |secret| secret.get_ref());
    let hasher = IdentityHasher::new(secret);
    let instances = store::instances(&config.store, reader);
    let (upstreams, upstream_tls) = upstreams::upstreams(&config.upstream, reader);
    let limits = limits::limits(config, &hasher, instances, client_ip.trusted.len(), &upstreams, reader);
    let named = config.api_key.consumers.as_ref();
    let (consumers, consumers_file) =
        named.map(|text| consumers::load(text, &limits, &hasher, reader)).unwrap_or_default();
    consumers::needed(config, &limits, &api_keys, &consumers, reader);
    let (routes, table) = routes::routes(config, &limits, &upstreams, reader);
    let mut trusted_headers = limits::trusted_headers(&limits);
    trusted_headers.push(client_ip.header.clone());
    let by = limits.values().flat_map(|terms| &terms.by.sources).filter_map(|source| source.header(&api_keys));
    let guarded = ProtectedHeaders::new(trusted_headers, by.chain(table.headers().cloned()));
    let store = store::store(&config.store, &routes, reader);
    let fixed = Fixed::of(config, &server, &listeners);
    Runtime {
        file,
        server: Arc::new(server),
        listeners,
        admin,
        store,
        log,
        client_ip: Arc::new(client_ip),
        api_keys,
        consumers: ArcSwap::from_pointee(consumers),
        consumers_file,
        verifier,
        jwks_file,
        hasher,
        guarded,
        upstreams: upstreams.into_iter().map(Arc::new).collect(),
        upstream_tls: upstream_tls.into_iter().map(Arc::new).collect(),
        limits,
        routes,
        table,
        fixed,
    }
}
