//! The compiled configuration. All references are resolved and all values are validated, so code that uses it needs no
//! further validation.

pub mod auth;
mod consumers;
pub mod cost;
mod decision_routes;
pub mod decisions;
pub mod descriptor_files;
pub mod descriptors;
mod header_rules;
mod identities;
pub(crate) mod limits;
pub mod listeners;
pub mod memory;
pub mod notify;
pub mod remote_auth;
pub mod route_action;
pub(crate) mod route_match;
pub mod route_retry;
pub mod routes;
pub mod settings;
pub mod statsd;
mod upstreams;
mod validator;
pub mod xds;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::RandomState;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::hmac::{HMAC_SHA256, Key, sign};
use data_encoding::HEXLOWER;
use serde::Serialize;
use serde_json::Value;

use crate::config::environment::EnvLookup;
use crate::config::error::{ConfigError, FileIssues, Issue};
use crate::config::file;
use crate::config::file::{ParsedFile, UnsetVariables};
use crate::config::gateway::Config;
use crate::config::include::ConfigFiles;
use crate::config::secrets::{hashed_config, redacted_config};
use crate::config::sources::FileSnapshot;
use crate::http::headers::{ProtectedHeaders, TrailerFilter};
use crate::identity::access::NetworkFile;
use crate::identity::auth::{AuthProvider, TierSource};
use crate::identity::consumer::{ANONYMOUS_TIER, ConsumerDirectory};
use crate::identity::spec::{ClientIpResolver, Descriptor, OnMissing};
use crate::limiter::key::IdentityHasher;
use crate::limiter::spec::LimitSpec;
use crate::payload::json::body::{JsonPointers, MAX_POINTERS};
use crate::routing::RouteTable;
use crate::snapshot::auth::Authentication;
use crate::snapshot::cost::{CostContext, InspectBounds, LLM_INSPECT_BODY};
use crate::snapshot::descriptor_files::{DescriptorFiles, FileContext};
use crate::snapshot::descriptors::{DescriptorHeaders, DescriptorTable};
use crate::snapshot::identities::NetworkFiles;
use crate::snapshot::limits::{CompiledLimit, LimitContext};
use crate::snapshot::listeners::{Acme, AcmeListeners, Listener, ListenerProtocol, ListenerTls, WarningSubject};
use crate::snapshot::memory::MemoryLimit;
use crate::snapshot::notify::EventDestination;
use crate::snapshot::remote_auth::InternalUpstreams;
use crate::snapshot::routes::{Route, RouteCompiler};
use crate::snapshot::settings::{AdminSettings, AdminSocket, LogSettings, MetricRoutes, ServerSettings, StoreSettings};
use crate::snapshot::statsd::StatsdSettings;
use crate::snapshot::upstreams::UpstreamTls;
use crate::snapshot::validator::Validator;
use crate::snapshot::xds::{ReadyAfter, XdsSettings};
use crate::upstream::settings::UpstreamSettings;

/// Maximum number of limits of YAML files that the dashboard and the API list.
const MAX_LISTED_FILE_LIMITS: usize = 100;

/// The compiled configuration, which the gateway uses to handle requests.
#[derive(Debug)]
pub struct CompiledConfig {
    /// The configuration file and the files that it includes, with the contents that were read.
    pub files: ConfigFiles,
    /// 8 hexadecimal digits that identify the contents of the files: a hash with `store.secret` as its key, because the
    /// files may contain secrets.
    pub revision: Box<str>,
    /// Settings of the HTTP server and the workers.
    pub server: Arc<ServerSettings>,
    /// Sockets on which the gateway accepts client connections.
    pub listeners: Vec<Listener>,
    /// The certificates that the gateway obtains by ACME. `None` without `[acme]`.
    pub acme: Option<Acme>,
    /// The admin listener. `None` if it is not configured.
    pub admin: Option<AdminSettings>,
    /// The routes that have metrics of their own.
    pub metric_routes: MetricRoutes,
    /// The admin socket.
    pub admin_socket: AdminSocket,
    /// Store for the rate limit state.
    pub store: StoreSettings,
    /// The process log and the access log.
    pub log: LogSettings,
    /// Trusted proxies, and the prefix lengths of client networks.
    pub client_ip: Arc<ClientIpResolver>,
    /// Whether the gateway must check client addresses or hosts: a listener or route has access rules, or unknown hosts
    /// are blocked.
    pub checks_access: bool,
    /// Network files that access rules refer to.
    pub network_files: Vec<Arc<NetworkFile>>,
    /// Authentication providers, and the files that they use.
    pub auth: Authentication,
    /// Keyed hash function for identities.
    pub hasher: IdentityHasher,
    /// The values to read from request bodies, for routes and limits.
    pub body_inspection: BodyInspection,
    /// Headers that clients must not remove through `Connection` or send under an alias. Only trusted proxies may set
    /// some of these headers, in addition to the `X-Forwarded-*` headers. The gateway reads the other headers from any
    /// client, for identities, authentication and routing.
    pub protected_headers: ProtectedHeaders,
    /// Trailers of requests that are not forwarded.
    pub trailer_filter: Arc<TrailerFilter>,
    /// Upstreams. Routes refer to them by index.
    pub upstreams: Vec<Arc<UpstreamSettings>>,
    /// Whether the gateway sends PROXY protocol headers to at least one upstream.
    pub sends_proxy_headers: bool,
    /// TLS settings of the upstreams that have servers with `https://` URLs.
    pub upstream_tls: Vec<Arc<UpstreamTls>>,
    /// All limits by name, including limits that no route uses.
    pub limits: BTreeMap<String, CompiledLimit>,
    /// Destinations of quota events by name.
    pub event_destinations: BTreeMap<String, EventDestination>,
    /// All routes, in the order of the configuration.
    pub routes: Vec<Arc<Route>>,
    /// The routes, indexed for lookup.
    pub table: RouteTable<Arc<Route>>,
    /// The descriptors, indexed for lookup.
    pub descriptors: DescriptorTable,
    /// The management server that sends descriptors.
    pub xds: Option<XdsSettings>,
    /// Whether the management server has not sent descriptors yet.
    awaits_descriptors: bool,
    /// The StatsD server that receives the metrics of envoyproxy/ratelimit.
    pub statsd: Option<StatsdSettings>,
    /// The headers with the state of a descriptor's limit.
    pub descriptor_headers: Option<DescriptorHeaders>,
    /// The YAML files of `[ratelimit]`.
    pub descriptor_files: DescriptorFiles,
    /// Values of the keys that require a restart when they change.
    pub(crate) restart_only_keys: RestartOnlyKeys,
}

/// The values to read from request bodies, for routes and limits. One pass over the body reads all of them.
#[derive(Debug, Default)]
pub struct BodyInspection {
    /// Pointers to the JSON values to read.
    pub pointers: Arc<JsonPointers>,
    /// Names of the form fields to read.
    pub fields: Arc<[Box<str>]>,
    /// Whether a limit reads JSON-RPC messages.
    pub reads_messages: bool,
    /// Whether a limit counts the tokens of an LLM API.
    pub reads_tokens: bool,
}

impl CompiledConfig {
    /// Return whether load balancers should send requests to a gateway with this configuration: the certificates and
    /// descriptors that it needs have arrived.
    pub fn is_complete(&self) -> bool {
        let has_descriptors = self.xds.as_ref().is_none_or(|xds| match xds.ready_after {
            ReadyAfter::Start => true,
            ReadyAfter::Response => !self.awaits_descriptors,
            ReadyAfter::Domain => self.descriptors.has_file_domains(),
        });
        has_descriptors && self.has_certificates()
    }

    /// Return whether the management server has not sent descriptors yet.
    pub fn awaits_descriptors(&self) -> bool {
        self.awaits_descriptors
    }

    /// Add the descriptors that the management server has sent.
    ///
    /// # Errors
    /// The descriptors have errors. The error contains all of them.
    pub fn add_received(&mut self, files: &[FileSnapshot]) -> Result<(), ConfigError> {
        let Some(xds) = &self.xds else { return Ok(()) };
        let limits = LimitContext { hasher: &self.hasher, gateways: &self.store.gateways };
        let context = FileContext { limits, options: xds.options, first_rule: self.descriptors.rules.len() };
        let read = descriptor_files::read_files(files, context);
        let of_both = |domain: String| {
            let message = format!("the domain `{domain}` has a [[descriptor]] in the configuration file");
            FileIssues::from_message(Path::new("xds"), &message)
        };
        let mut faulty: Vec<_> = self.descriptors.domains_of_both(&read).into_iter().map(of_both).collect();
        faulty.extend(self.descriptors.add(read));
        if !faulty.is_empty() {
            return Err(ConfigError { files: faulty });
        }
        self.awaits_descriptors = false;
        Ok(())
    }

    /// Return whether each listener with ACME has obtained a certificate.
    pub fn has_certificates(&self) -> bool {
        self.listeners
            .iter()
            .filter_map(|listener| listener.tls.as_ref()?.tls.managed())
            .all(|(names, certificates)| names.iter().any(|name| certificates.get(name).certificate.is_some()))
    }

    /// Read, validate and compile a configuration.
    ///
    /// # Errors
    /// The files have errors. The error contains all of them.
    pub fn load(path: &Path, environment: EnvLookup<'_>) -> Result<CompiledConfig, ConfigError> {
        CompiledConfig::load_with_source(path, environment, UnsetVariables::Error).map(|(config, _)| config)
    }

    /// Load a configuration as [`CompiledConfig::load`] does. Also return the parsed file with all warnings. With a
    /// `policy` other than [`UnsetVariables::Error`], parts of the configuration that refer to unset variables may be
    /// missing.
    ///
    /// # Errors
    /// See [`CompiledConfig::load`].
    pub fn load_with_source(
        path: &Path,
        environment: EnvLookup<'_>,
        policy: UnsetVariables<'_>,
    ) -> Result<(CompiledConfig, ParsedFile<Config>), ConfigError> {
        Self::compile_file(file::read_gateway(path, environment)?, environment, policy)
    }

    /// Load a configuration as [`CompiledConfig::load`] does, but use `text` as the content of the file at `path`. This
    /// file need not exist.
    ///
    /// # Errors
    /// See [`CompiledConfig::load`].
    pub fn from_text(path: &Path, text: String, environment: EnvLookup<'_>) -> Result<CompiledConfig, ConfigError> {
        let file = file::parse_gateway(path, text, environment)?;
        Self::compile_file(file, environment, UnsetVariables::Error).map(|(config, _)| config)
    }

    fn compile_file(
        mut file: ParsedFile<Config>,
        environment: EnvLookup<'_>,
        policy: UnsetVariables<'_>,
    ) -> Result<(CompiledConfig, ParsedFile<Config>), ConfigError> {
        let mut reader = Validator::new(&mut file, environment);
        let config = compile(&file, &mut reader);
        file.warnings = reader.finish(policy)?;
        // There are no errors, so only parts that refer to unset variables can be missing.
        Ok((config, file))
    }

    /// Find a limit by its name: one of `[limit.NAME]`, or of the YAML files of `[ratelimit]`.
    pub fn find_limit(&self, name: &str) -> Option<&Arc<LimitSpec>> {
        self.limits.get(name).map(|compiled| &compiled.limit).or_else(|| self.descriptors.file_limit(name))
    }

    /// Return the limits that the dashboard and the API list, by name: all of `[limit.NAME]`, and at most
    /// [`MAX_LISTED_FILE_LIMITS`] of the YAML files.
    pub fn listed_limits(&self) -> BTreeMap<&str, &Arc<LimitSpec>> {
        let of_files = self.descriptors.file_limits().map(|limit| (&*limit.limit.name, &limit.limit));
        let mut listed: BTreeMap<_, _> = of_files.take(MAX_LISTED_FILE_LIMITS).collect();
        listed.extend(self.limits.iter().map(|(name, compiled)| (name.as_str(), &compiled.limit)));
        listed
    }

    /// Return the configuration as written, including the tables of included files. The result is JSON with masked
    /// secrets.
    pub fn redacted(&self) -> Value {
        redacted_config(self.texts()).unwrap_or_default()
    }

    /// Like [`redacted`](Self::redacted), but with a keyed hash after each masked secret.
    pub(crate) fn hashed_secrets(&self, hasher: &RandomState) -> Value {
        hashed_config(self.texts(), hasher).unwrap_or_default()
    }

    /// Return the texts of the configuration file and of the files that it includes. The configuration was compiled from
    /// these texts, so parsing them cannot fail.
    fn texts(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let ConfigFiles { main, included, .. } = &self.files;
        std::iter::once(main).chain(included).map(|file| String::from_utf8_lossy(&file.content))
    }

    /// Return the listeners whose address conflicts with that of an earlier listener, as pairs of indices (earlier,
    /// later). A gateway with conflicting listeners does not start.
    pub fn address_conflicts(&self) -> impl Iterator<Item = (usize, usize)> {
        listeners::address_conflicts(&self.listeners)
    }

    /// Return keyed digests of the values that a reload cannot change, by key. The admin API compares digests instead
    /// of values, because some values are secret.
    pub fn restart_only_digests(&self, salt: &str) -> BTreeMap<String, String> {
        self.restart_only_keys.digests(salt)
    }

    /// Replace the consumers of a consumers file with those in `content`. The rate limit state of the consumers does
    /// not change. `index` is the index of the file in [`Authentication::consumers_files`].
    ///
    /// # Errors
    /// The file has errors. The error contains all of them. After an error, the active consumers do not change.
    pub fn reload_consumers(
        &self,
        index: usize,
        content: &[u8],
        environment: EnvLookup<'_>,
    ) -> Result<(), ConfigError> {
        let files = &self.auth.consumers_files;
        let Some(file) = files.get(index) else { return Ok(()) };
        let path = &file.file.path;
        let others = files.iter().enumerate().filter(|(other, _)| *other != index);
        let others = ConsumerDirectory(others.map(|(_, other)| other.consumers.load_full()).collect());
        let routes = self.routes.iter().map(|route| &*route.name).collect();
        let names = consumers::KnownNames::new(&self.limits, routes, &self.auth.tier_source, others);
        let consumers = consumers::read(path, content, &names, &self.hasher, environment);
        let consumers = consumers.and_then(|loaded| match loaded.is_incomplete {
            true => Err(FileIssues::from_message(path, "no consumer has a key")),
            false => Ok(loaded.consumers),
        });
        let consumers = consumers.map_err(|faulty| ConfigError { files: vec![faulty] })?;
        file.consumers.store(Arc::new(consumers));
        Ok(())
    }

    /// Replace the networks of a network file with those in `content`. `index` is the index of the file.
    ///
    /// # Errors
    /// The file has errors, or is empty. An empty file may be one that a program is still writing. After an error, the
    /// active networks do not change.
    pub fn reload_networks(&self, index: usize, content: &[u8]) -> Result<(), ConfigError> {
        let NetworkFile { file, networks, .. } = &*self.network_files[index];
        let parsed = match content.trim_ascii().is_empty() {
            true => Err(FileIssues::from_message(
                &file.path,
                "the file is empty: if it lists no networks intentionally, write a comment into it",
            )),
            false => identities::parse_network_file(&file.path, content),
        };
        networks.store(Arc::new(parsed.map_err(|faulty| ConfigError { files: vec![faulty] })?));
        Ok(())
    }

    /// Return warnings about settings that are valid, but may not have the intended effect.
    pub fn warnings(&self, now: Duration) -> Vec<(WarningSubject, String)> {
        let of_upstream =
            |tls: &Arc<UpstreamTls>| Some((WarningSubject::Upstream(tls.name.clone()), tls.certificate_warning(now)?));
        let trust = |tls: &Arc<UpstreamTls>| Some((WarningSubject::Upstream(tls.name.clone()), tls.trust_warning()?));
        let mut warnings: Vec<_> = self.upstream_tls.iter().filter_map(of_upstream).collect();
        warnings.extend(self.upstream_tls.iter().filter_map(trust));
        warnings.extend(self.auth.key_warnings(now));
        if let Some(acme) = &self.acme {
            warnings.extend(acme.warnings().map(|text| (WarningSubject::Acme, text)));
        }
        for (index, Listener { address, tls, .. }) in self.listeners.iter().enumerate() {
            let certificates = tls.iter().flat_map(|tls| tls.tls.certificates().zip(&tls.certificates)).enumerate();
            for (certificate_index, (certificate, [file, _])) in certificates {
                if let Err(error) = certificate.check_validity(now.as_secs() as i64) {
                    let text = format!("{}: {error}; clients will reject the certificate", file.path.display());
                    warnings.push((WarningSubject::Certificate(index, certificate_index), text));
                }
            }
            for (certificate_index, text) in tls.iter().flat_map(listeners::shadowed_certificates) {
                warnings.push((WarningSubject::Certificate(index, certificate_index), text));
            }
            if tls.as_ref().is_some_and(ListenerTls::requests_client_certificates) {
                continue;
            }
            for compiled in self.limits.values() {
                let by_certificate = compiled.identity_spec.descriptors.contains(&Descriptor::ClientCert);
                if by_certificate && compiled.identity_spec.on_missing == OnMissing::Reject {
                    let text = format!(
                        "`{}` counts by client-cert, but {address} has no tls.client_ca: the limit rejects every \
                         request on this listener",
                        compiled.limit.name
                    );
                    warnings.push((WarningSubject::Listener(index), text));
                }
            }
        }
        warnings
    }

    /// Return the tiers that consumers can choose with `tier`. The result is empty if `[tiers]` selects another source.
    pub fn consumer_tiers(&self) -> BTreeSet<&str> {
        match self.auth.tier_source {
            TierSource::ApiKey => consumers::tiers(&self.limits).filter(|tier| *tier != ANONYMOUS_TIER).collect(),
            TierSource::Jwt(_) | TierSource::Forward(_) => BTreeSet::new(),
        }
    }
}

fn compile(file: &ParsedFile<Config>, reader: &mut Validator<'_>) -> CompiledConfig {
    let config = &file.value;
    let server = settings::server(&config.server, &config.listener, reader);
    let log = settings::log(&config.log, reader);
    let client_ip = identities::client_ip(&config.client_ip, reader);
    // Invalid networks count as well. Otherwise, a list with only invalid networks would also be reported as empty.
    let trusted_proxies = config.client_ip.trusted_proxies.as_ref().map_or(0, Vec::len);
    let mut network_files = NetworkFiles::default();
    let mut acme = AcmeListeners::new(config, reader);
    let mut listeners = listeners::listeners(&config.listener, trusted_proxies, &mut acme, &mut network_files, reader);
    let acme = listeners::acme(config, acme, &listeners, reader);
    let admin = config.admin.as_ref().and_then(|admin| settings::admin(admin, &listeners, reader));
    let admin_socket = settings::admin_socket(config.admin.as_ref(), reader);
    let secret = config.store.secret.as_ref().map_or("", |secret| secret.get_ref());
    let hasher = IdentityHasher::new(secret);
    let (mut upstreams, mut upstream_tls) =
        upstreams::upstreams(&config.upstream, config.store.secret.as_ref(), reader);
    let tier_source = remote_auth::tier_source(config, reader);
    let is_set = config.server.inspect_body.is_some();
    let default = if is_set { server.inspect_body } else { LLM_INSPECT_BODY.min(server.max_buffered) };
    let inspect = InspectBounds { default, max: server.max_buffered };
    let prices = cost::price_lists(config, reader);
    let costs = CostContext { inspect, prices: &prices };
    let gateways = settings::gateway_count(&config.store, reader);
    let context = LimitContext { hasher: &hasher, gateways: &gateways };
    let limits = limits::limits(config, context, costs, trusted_proxies, &upstreams, &tier_source, reader);
    let mut internal = InternalUpstreams { first: upstreams.len(), settings: Vec::new(), tls: Vec::new() };
    let auth = auth::authentication(config, &limits, &hasher, tier_source, &mut internal, reader);
    let event_destinations = notify::destinations(config, &mut internal, reader);
    let mut descriptors = descriptors::descriptors(config, &limits, reader);
    let descriptor_files = descriptors::add_files(&mut descriptors, config, context, reader);
    let xds = xds::settings(config, reader);
    let statsd = config.ratelimit.statsd.as_ref().and_then(|written| statsd::settings(written, reader));
    let descriptor_headers = descriptors::headers(config, reader);
    let compiler =
        RouteCompiler { config, paths: server.paths, limits: &limits, authentication: &auth, upstreams: &upstreams };
    let (routes, table) = compiler.routes(&mut network_files, reader);
    for (index, listener) in listeners.iter_mut().enumerate() {
        let serves = |route: &Route| route.listeners.is_empty() || route.listeners.contains(&index);
        listener.has_websockets =
            listener.protocol == ListenerProtocol::Http && routes.iter().any(|route| route.websocket && serves(route));
    }
    decision_routes::check(config, &mut listeners, &routes, &auth, reader);
    upstreams.extend(internal.settings);
    let socket_buffers = server.memory.as_ref().map(MemoryLimit::socket_buffers);
    upstreams.iter_mut().for_each(|upstream| upstream.socket_buffers = socket_buffers);
    upstream_tls.extend(internal.tls);
    if let Some(value) = config.server.block_unknown_hosts.as_ref().filter(|_| server.block_unknown_hosts)
        && !table.has_hosts()
    {
        let issue = Issue::new(value.span(), "no route has `hosts`: every request would be rejected");
        reader.push_missing_elsewhere(issue.with_hint("set `hosts` in the routes, or remove `block_unknown_hosts`"));
    }
    let body_inspection = body_inspection(&routes, &table, reader);
    let checks_access = server.block_unknown_hosts
        || listeners.iter().any(|listener| listener.access.is_some())
        || routes.iter().any(|route| route.access.is_some());
    let mut trusted_headers = limits::trusted_headers(&limits);
    trusted_headers.push(client_ip.header.clone());
    trusted_headers.extend(auth.providers.iter().flat_map(AuthProvider::identity_headers).cloned());
    let identity_headers =
        limits.values().flat_map(|compiled| &compiled.identity_spec.descriptors).filter_map(Descriptor::header);
    let auth_headers = auth.providers.iter().flat_map(AuthProvider::headers).cloned();
    let read_headers = identity_headers.chain(auth_headers).chain(table.matched_headers().cloned());
    let guarded = ProtectedHeaders::new(trusted_headers, read_headers);
    let store = settings::store(&config.store, gateways, &routes, &descriptors, reader);
    let fixed = RestartOnlyKeys::from_config(config, &server, &listeners);
    let metric_routes = settings::metric_routes(config.metrics.routes.as_ref(), &routes, reader);
    let files = ConfigFiles::from_sources(&file.sources);
    CompiledConfig {
        revision: hasher.hash(&files.contents()).short_hex().trim_start_matches('#').into(),
        files,
        server: Arc::new(server),
        listeners,
        acme,
        admin,
        metric_routes,
        admin_socket,
        store,
        log,
        client_ip: Arc::new(client_ip),
        checks_access,
        network_files: network_files.0,
        auth,
        hasher,
        body_inspection,
        trailer_filter: Arc::new(TrailerFilter::new(
            &guarded,
            routes.iter().flat_map(|route| route.request_headers.names()),
        )),
        protected_headers: guarded,
        sends_proxy_headers: upstreams.iter().any(|upstream| upstream.proxy_protocol),
        upstreams: upstreams.into_iter().map(Arc::new).collect(),
        upstream_tls: upstream_tls.into_iter().map(Arc::new).collect(),
        limits,
        event_destinations,
        routes,
        table,
        descriptors,
        awaits_descriptors: xds.is_some(),
        xds,
        statsd,
        descriptor_headers,
        descriptor_files,
        restart_only_keys: fixed,
    }
}

/// Return the values to read from request bodies, for these routes and their limits.
fn body_inspection(
    routes: &[Arc<Route>],
    table: &RouteTable<Arc<Route>>,
    reader: &mut Validator<'_>,
) -> BodyInspection {
    let mut pointers = table.matched_pointers().to_vec();
    let mut inspection = BodyInspection::default();
    let mut fields = BTreeSet::new();
    for limits in routes.iter().map(|route| &route.rate_limits) {
        for descriptor in limits.identities.iter().flat_map(|spec| &spec.descriptors) {
            if let Descriptor::Json(pointer) = descriptor
                && !pointers.contains(pointer)
            {
                pointers.push(pointer.clone());
            }
            if let Descriptor::Form(name) = descriptor {
                fields.insert(name.clone());
            }
        }
        inspection.reads_messages |=
            limits.tools.is_some() || limits.limits.iter().any(|limit| limit.counted.is_some());
        inspection.reads_tokens |= limits.llm.is_some();
    }
    if pointers.len() > MAX_POINTERS {
        let message = format!("routes and limits use {} different JSON pointers", pointers.len());
        reader.push_issue(Issue { span: None, message, hint: Some(format!("at most {MAX_POINTERS} are supported")) });
    }
    BodyInspection {
        pointers: Arc::new(JsonPointers::new(pointers)),
        fields: fields.into_iter().collect(),
        ..inspection
    }
}

// === Keys that require a restart when they change ===

/// The values of the keys that require a restart when they change.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct RestartOnlyKeys(BTreeMap<String, String>);

/// Prints only the keys, because some of the values are secret.
impl fmt::Debug for RestartOnlyKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl RestartOnlyKeys {
    /// Collect the values of a configuration.
    pub(crate) fn from_config(config: &Config, server: &ServerSettings, listeners: &[Listener]) -> Self {
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.address.to_string()).collect();
        let admin = config.admin.as_ref().and_then(|admin| admin.get_ref().address.as_ref());
        let mut fixed = BTreeMap::from([
            ("server.workers".to_owned(), server.workers.to_string()),
            ("server.threading".to_owned(), format!("{:?}", server.worker_model)),
            ("listener.address".to_owned(), addresses.join(" ")),
            ("admin.address".to_owned(), admin.map_or(String::new(), |address| address.get_ref().clone())),
        ]);
        let socket = config.admin.as_ref().and_then(|admin| admin.get_ref().socket.as_ref());
        // Omit the key if it is absent, as `add_table` does.
        fixed.extend(socket.map(|socket| ("admin.socket".to_owned(), socket.get_ref().clone())));
        add_table("acme", &config.acme.as_ref().map(|acme| acme.get_ref()), &mut fixed);
        add_table("store", &config.store, &mut fixed);
        // A reload applies a new minimum of the number of gateways.
        fixed.remove("store.gateway_count");
        add_table("log", &config.log, &mut fixed);
        add_table("ratelimit.xds", &config.ratelimit.xds.as_ref().map(|xds| xds.get_ref()), &mut fixed);
        add_table("ratelimit.statsd", &config.ratelimit.statsd.as_ref().map(|statsd| statsd.get_ref()), &mut fixed);
        RestartOnlyKeys(fixed)
    }

    /// Return the HMAC-SHA-256 of each value in hexadecimal, with the salt as the HMAC key.
    pub(crate) fn digests(&self, salt: &str) -> BTreeMap<String, String> {
        let key = Key::new(HMAC_SHA256, salt.as_bytes());
        let digest = |value: &String| HEXLOWER.encode(sign(&key, value.as_bytes()).as_ref());
        self.0.iter().map(|(name, value)| (name.clone(), digest(value))).collect()
    }

    /// Return the keys whose values differ.
    pub(crate) fn changed_keys(&self, other: &RestartOnlyKeys) -> Vec<String> {
        let names: BTreeSet<_> = self.0.keys().chain(other.0.keys()).collect();
        names.into_iter().filter(|name| self.0.get(*name) != other.0.get(*name)).cloned().collect()
    }
}

/// Add all keys of a table, with their values as written.
fn add_table(name: &str, values: &impl Serialize, fixed: &mut BTreeMap<String, String>) {
    // The structs contain only strings and numbers, so serialization cannot fail.
    if let Ok(serde_json::Value::Object(keys)) = serde_json::to_value(values) {
        // Omit absent keys, so that gateway versions without these keys compute the same digests.
        let keys = keys.into_iter().filter(|(_, value)| !value.is_null());
        fixed.extend(keys.map(|(key, value)| (format!("{name}.{key}"), value.to_string())));
    }
}
