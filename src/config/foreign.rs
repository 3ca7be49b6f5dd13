//! The vocabulary of other gateways and rate limiters: their keys and words, each with the form that Sluicegate uses.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::file_schema::FileKind;
use crate::config::sources::Sources;
use crate::config::value_types::quoted;

/// Keys of other programs that mean the same.
struct ForeignKeys {
    /// The table in which the keys have this meaning, without names and indices: `route.cors`. `*` stands for every
    /// table, and `` for the top level of the file.
    table: &'static str,
    /// The keys in lower case, without `-` and `_`.
    names: &'static [&'static str],
    /// What to write instead. `{value}` stands for the value in the file, `{bare}` for the value without quotes, and
    /// `{list}` for a list with this value. `{cert}` and `{key}` stand for the certificate and the key in the table.
    advice: &'static str,
}

const fn keys(table: &'static str, names: &'static [&'static str], advice: &'static str) -> ForeignKeys {
    ForeignKeys { table, names, advice }
}

/// The keys of other programs. The first entry that matches applies.
#[rustfmt::skip]
const FOREIGN_KEYS: &[ForeignKeys] = &[
    // The top level.
    keys("", &["redis", "database", "storage", "backendstore", "rediscluster", "memcached"],
        "write the table [store] with url = \"redis://127.0.0.1:6379/0\""),
    keys("", &["ratelimit", "ratelimits", "ratelimiter", "ratelimiters", "ratelimiting", "limiter", "limiters", "throttle",
        "throttling", "limitreq", "limitreqzone", "limitconn", "limitconnzone", "quota", "quotas", "descriptors", "sticktable"],
        "define [limit.NAME] with `by` and `quota`, and name it in `limits` of a [[route]]"),
    keys("", &["servers"], "write listening addresses in [[listener]], and `servers` in [upstream.NAME]"),
    keys("", &["http"], "write [[listener]] with an address, [[route]] with a path, and [upstream.NAME] with servers"),
    keys("", &["https", "entrypoint", "entrypoints", "frontend", "frontends", "listen", "listeners", "bind", "port", "address"],
        "write [[listener]] with address = \"0.0.0.0:8080\""),
    keys("", &["backend", "backends", "service", "services", "cluster", "clusters", "endpoint", "endpoints", "pool", "target",
        "targets", "proxy", "proxies", "proxypass", "reverseproxy", "origin", "origins"],
        "write [upstream.NAME] with servers = [\"http://127.0.0.1:9000\"]"),
    keys("", &["router", "routers", "location", "locations", "rule", "rules", "path", "paths", "vhost", "virtualhost",
        "virtualhosts", "handle", "route", "api", "apis"],
        "write [[route]] with name, path and upstream"),
    keys("", &["middleware", "middlewares", "plugin", "plugins", "filter", "filters", "httpfilters"],
        "write the settings on each [[route]]: limits, require, cors, request_headers, response_headers, max_body"),
    keys("", &["consumer", "consumers", "users", "apikeys", "keys", "credentials"],
        "write [auth.keys] with kind = \"api-key\" and consumers = \"consumers.toml\""),
    keys("", &["ssl", "tls", "certificate", "certificates", "sslcertificate", "sslcertificatekey", "certfile", "keyfile"],
        "write on the [[listener]]: tls = { certificates = [{ cert = \"…\", key = \"…\" }] }"),
    keys("", &["letsencrypt", "certificatesresolvers", "certresolver", "autohttps"],
        "write [acme] with accept_terms = true, and tls = { acme = true } on the [[listener]]"),
    keys("", &["logging", "logger", "accesslog", "errorlog", "logformat", "loglevel", "logs"],
        "write [log] with the keys format, level and access"),
    keys("", &["prometheus", "dashboard", "status", "health", "healthz", "ping", "management"],
        "write [admin] with address = \"127.0.0.1:9180\", which serves /metrics, /healthz and the dashboard"),
    keys("", &["tracing", "otel", "otlp", "opentelemetry", "telemetry", "traces"],
        "write [log] with trace_endpoint = \"http://127.0.0.1:4318\""),
    keys("", &["trustproxy", "trustedproxies", "setrealipfrom", "realipheader", "trustedips", "forwardedheaders"],
        "write [client_ip] with trusted_proxies = [\"10.0.0.0/8\"]"),
    keys("", &["global", "globals", "defaults", "workerprocesses", "workers", "main", "events", "settings", "general"],
        "write [server] with the settings of the process, such as workers"),
    keys("", &["gatewaycount", "prefix"], "write the key in [store]"),
    keys("", &["import", "includes"], "write include = [\"routes/*.toml\"]"),
    keys("", &["webhook", "webhooks", "alerts", "notifications", "events"], "write [notify.NAME] with webhook = \"https://…\""),
    // `[server]`.
    keys("server", &["workerprocesses", "threads", "nbthread", "numthreads", "concurrency", "processes"], "write workers = {value}"),
    keys("server", &["clientmaxbodysize", "maxbodysize", "bodylimit", "maxbody", "maxrequestbodysize", "maxrequestsize"],
        "write max_body = \"1MiB\" in each [[route]]"),
    keys("server", &["keepalivetimeout", "keepalive", "idle"], "write idle_timeout = \"75s\""),
    keys("server", &["clientheadertimeout", "readheadertimeout", "requestheadertimeout"], "write header_timeout = \"10s\""),
    keys("server", &["clientbodytimeout", "readtimeout", "sendtimeout", "writetimeout"], "write body_idle_timeout = \"30s\""),
    keys("server", &["graceperiod", "gracetimeout", "shutdowntimeout", "gracefultimeout", "terminationgraceperiod", "workershutdowntimeout"],
        "write drain_timeout = \"30s\""),
    keys("server", &["workerconnections", "maxconn", "maxconns"], "write max_connections = {value}"),
    keys("server", &["limitconn", "maxconnperip"], "write max_connections_per_ip = {value}"),
    keys("server", &["largeclientheaderbuffers", "maxheaderbytes", "clientheaderbuffersize"], "write max_header_size = \"32KiB\""),
    keys("server", &["port", "listen", "address", "bind", "host", "hostname"], "write [[listener]] with address = \"0.0.0.0:8080\""),
    keys("server", &["servername", "domain", "domains"], "write hosts = [\"…\"] in the [[route]]"),
    keys("server", &["loglevel", "logformat", "accesslog", "errorlog"], "write [log] with the keys format, level and access"),
    // `[[listener]]`.
    keys("listener", &["port"], "write address = \"127.0.0.1:{bare}\", or \"0.0.0.0:{bare}\" for all addresses"),
    keys("listener", &["host", "ip", "bind", "listen", "addr", "bindaddress", "listenaddress"], "write address with a port, such as \"0.0.0.0:8080\""),
    keys("listener", &["ssl", "https", "cert", "key", "certificate", "certificates", "sslcertificate", "sslcertificatekey", "certfile",
        "keyfile", "crt", "pem", "tlscert", "tlskey", "certificatefile", "keypath", "certpath"],
        "write tls = { certificates = [{ cert = {cert}, key = {key} }] }"),
    keys("listener", &["acceptproxy", "proxy", "proxyproto", "usesproxyprotocol"], "write proxy_protocol = true"),
    keys("listener", &["servername", "hosts", "hostnames", "domains"], "write hosts = [\"…\"] in the [[route]]"),
    keys("listener", &["http2", "h2", "h2c", "protocol", "protocols", "alpn"], "remove the key: every listener serves HTTP/1.1 and HTTP/2"),
    keys("listener", &["trustedips", "trustedproxies", "forwardedheaders"], "write [client_ip] with trusted_proxies = [\"10.0.0.0/8\"]"),
    keys("listener.tls", &["cert", "certfile", "certificate", "crt", "pem", "sslcertificate", "tlscert", "certificatefile", "certpath", "chain", "fullchain"],
        "write certificates = [{ cert = {cert}, key = {key} }]"),
    keys("listener.tls", &["key", "keyfile", "sslcertificatekey", "privatekey", "tlskey", "keypath"],
        "write certificates = [{ cert = {cert}, key = {key} }]"),
    keys("listener.tls.certificates", &["certfile", "certificate", "crt", "chain", "fullchain", "sslcertificate"], "write cert = {value}"),
    keys("listener.tls.certificates", &["keyfile", "privatekey", "sslcertificatekey"], "write key = {value}"),
    keys("listener.tls", &["ca", "cafile", "cafiles", "clientcas", "sslclientcertificate", "clientcertificate", "mtls"], "write client_ca = {value}"),
    keys("listener.tls", &["verify", "verifyclient", "sslverifyclient", "clientauthtype", "requireclientcert"], "write client_auth = \"required\""),
    keys("listener.tls", &["minversion", "maxversion", "versions", "protocols", "sslprotocols", "ciphers", "ciphersuites", "sslciphers", "alpn"],
        "remove the key: the gateway supports TLS 1.2 and 1.3 with the cipher suites of rustls"),
    keys("listener.tls", &["auto", "letsencrypt", "certresolver", "resolver"], "write acme = true, and the table [acme]"),
    keys("listener.tls", &["enabled", "enable"], "remove the key: certificates = [{ cert = \"…\", key = \"…\" }] enables TLS"),
    keys("acme", &["tos", "agree", "agreetos", "termsofserviceagreed", "termsofservice"], "write accept_terms = true"),
    keys("acme", &["caserver", "server", "url", "acmeca"], "write directory = {value}"),
    keys("acme", &["eab"], "write external_account = { key_id = \"…\", mac_key = \"…\" }"),
    keys("acme", &["domains", "names", "hosts"], "write tls = { acme = true, names = {list} } on the [[listener]]"),
    // `[admin]`.
    keys("admin", &["port", "listen", "bind", "host", "addr"], "write address = \"127.0.0.1:9180\""),
    keys("admin", &["password", "apikey", "key", "auth", "secret", "bearer"], "write token = \"${SLUICEGATE_ADMIN_TOKEN}\""),
    keys("admin", &["metrics", "prometheus", "metricspath", "path", "dashboard"],
        "remove the key: the admin listener serves /metrics, /healthz, /readyz and the dashboard"),
    // `[log]`.
    keys("log", &["logformat", "encoding", "formatter", "json"], "write format = \"json\" or \"text\"; the keys of [log] are format, level, access and trace_endpoint"),
    keys("log", &["file", "path", "output", "accesslog", "destination", "to", "filepath", "target"], "write access = {value}"),
    keys("log", &["errorlog", "stderr"], "the process log is written to standard error; `level` is its minimum level"),
    keys("log", &["loglevel", "verbosity", "severity"], "write level = {value}"),
    keys("log", &["sampling", "samplerate", "sample"], "write access = { to = \"stdout\", sample = 0.1 }"),
    keys("log", &["tracing", "otlp", "otlpendpoint", "otelendpoint", "endpoint", "traces"], "write trace_endpoint = \"http://127.0.0.1:4318\""),
    // `[store]`.
    keys("store", &["host", "hostname", "addr", "address", "server", "servers", "port", "db", "database", "uri", "endpoint", "dsn", "type",
        "backend", "kind", "redis", "redisurl", "redishost", "nodes"],
        "write url = \"redis://HOST:6379/0\""),
    keys("store", &["user", "redisusername"], "write username = \"…\", or a percent-encoded user in the URL: redis://USER:PASSWORD@HOST:6379/0"),
    keys("store", &["pass", "auth", "requirepass", "redispassword"], "write password = \"${REDIS_PASSWORD}\""),
    keys("store", &["ssl", "useTls", "sslverify"], "write url = \"rediss://HOST:6379/0\""),
    keys("store", &["poolsize", "pool", "maxconnections"], "write connections = 1: each connection pipelines calls"),
    keys("store", &["keyprefix", "namespace", "redisprefix"], "write prefix = {value}"),
    keys("store", &["sentinel", "mastername", "sentinels"], "write url = \"redis+sentinel://HOST1,HOST2/MASTER\""),
    keys("store", &["cluster"], "write url = \"redis+cluster://HOST1,HOST2\""),
    keys("store", &["readtimeout", "writetimeout", "commandtimeout"], "write timeout = \"50ms\""),
    keys("store", &["salt", "hashkey"], "write secret = \"${SLUICEGATE_STORE_SECRET}\""),
    // `[client_ip]`.
    keys("client_ip", &["trusted", "trustedips", "trust", "trustproxy", "setrealipfrom", "proxies", "sourceranges", "numtrustedhops",
        "xffnumtrustedhops", "depth", "trustedproxy", "cidrs", "from"],
        "write trusted_proxies = [\"10.0.0.0/8\"] with the networks of the proxies"),
    keys("client_ip", &["realipheader", "clientipheaders", "headername", "headers"], "write header = \"x-forwarded-for\""),
    keys("client_ip", &["realiprecursive", "recursive"], "remove the key: the gateway always skips all trusted proxies"),
    // `[limit.NAME]`. `quota_advice` handles counts and windows.
    keys("limit", &["identifier", "identity", "zone", "limitby", "source", "sourcecriterion", "keygenerator", "track", "keyby",
        "groupby", "per", "key", "keys", "selector", "characteristics", "descriptor", "descriptors", "scope"],
        "write by = \"ip\", \"api-key\", \"header:NAME\" or another identity"),
    keys("limit", &["maxburst", "burstsize", "bucketsize", "capacity", "burstcapacity", "maxtokens"], "write burst = {value}"),
    keys("limit", &["nodelay", "delay", "queue", "wait"], "requests beyond the quota are denied at once; max_wait = \"1s\" queues them instead"),
    keys("limit", &["dryrun", "limitreqdryrun", "reportonly", "logonly", "observe", "enforce", "shadowmode"], "write shadow = true"),
    keys("limit", &["skip", "whitelist", "allowlist", "ipwhitelist", "bypass", "exclude", "excludes"], "write exempt = {list}"),
    keys("limit", &["statuscode", "limitreqstatus", "errorcode", "rejectedcode"], "write status = {value}"),
    keys("limit", &["message", "errormessage", "handler", "response"],
        "remove the key: a denial is a problem document (RFC 9457), or the `error_pages` of the route"),
    keys("limit", &["standardheaders", "legacyheaders", "headers", "hideclientheaders", "responseheaders", "addheaders"],
        "write ratelimit_headers = [\"ietf\"] in the [[route]]"),
    keys("limit", &["failopen", "faulttolerant", "allowonerror", "passonstoreerror", "failuremodedeny", "onerror"],
        "write on_store_error = \"allow\", \"deny\" or \"local\""),
    keys("limit", &["policy", "store", "redis", "redishost", "redisport", "storage"], "write [store] with url = \"redis://127.0.0.1:6379/0\""),
    keys("limit", &["weight", "increment", "hits", "hitsaddend"], "write cost = {value}"),
    keys("limit", &["type", "strategy", "kind", "limittype"], "write algorithm = \"token-bucket\", \"fixed-window\", \"sliding-window\" or another algorithm"),
    keys("limit", &["name"], "remove the key: the name of a limit is in its header, [limit.NAME]"),
    keys("limit", &["route", "routes", "path", "paths", "upstream"], "name the limit in `limits` of the [[route]]"),
    keys("limit", &["concurrency", "maxconcurrent", "maxinflight", "inflight", "connections"], "write algorithm = \"concurrency\" and quota = \"20\""),
    // `[upstream.NAME]`.
    keys("upstream", &["health", "healthcheck", "healthchecks", "healthpath", "healthuri", "check", "activehealthchecks", "httpchk"],
        "write health_check = \"/healthz\""),
    keys("upstream", &["url", "urls", "uri", "hosts", "server", "address", "addresses", "target", "targets", "endpoint", "endpoints",
        "backends", "nodes", "origin", "origins", "proxypass", "to", "upstreams", "loadassignment", "dial", "addr"],
        "write servers = {list}"),
    keys("upstream", &["port"], "write servers = [\"http://127.0.0.1:{bare}\"]"),
    keys("upstream", &["lbpolicy", "algorithm", "loadbalancer", "loadbalancing", "lb", "loadbalance", "strategy", "policy", "method"],
        "write balance = \"least-requests\", \"round-robin\", \"random\", \"hash:HEADER\" or \"sticky\""),
    keys("upstream", &["sticky", "stickysession", "sessionaffinity", "affinity", "persistence", "cookie"], "write balance = \"sticky\""),
    keys("upstream", &["timeout", "readtimeout", "proxyreadtimeout", "sendtimeout", "proxysendtimeout", "requesttimeout", "timeoutserver",
        "responseheadertimeout"], "write response_timeout = \"30s\""),
    keys("upstream", &["proxyconnecttimeout", "dialtimeout", "timeoutconnect"], "write connect_timeout = \"2s\""),
    keys("upstream", &["keepalive", "keepalivetimeout", "idletimeout", "idleconntimeout"], "write pool_idle_timeout = \"4s\""),
    keys("upstream", &["maxconn", "maxconns", "maxconnections", "maxinflight"], "write max_requests = {value}"),
    keys("upstream", &["maxfails", "failtimeout", "circuitbreaker", "passivehealthchecks", "passive", "unhealthythreshold"],
        "write outlier_detection = { consecutive_errors = 5, base_ejection_time = \"10s\" }"),
    keys("upstream", &["ssl", "ca", "cafile", "rootcas", "sni", "servername", "sslverify", "insecureskipverify", "proxysslverify"],
        "write https:// in the URLs of `servers`, and tls = { ca = \"ca.pem\", server_name = \"…\" }"),
    keys("upstream", &["http2", "h2", "h2c", "grpc", "httpversion", "proxyhttpversion"], "write protocol = \"http2\""),
    keys("upstream", &["maxretries", "retry", "numretries", "attempts", "proxynextupstream"], "write retries = 1"),
    keys("upstream", &["weight", "weights"], "write servers = [{ url = \"http://…\", weight = {value} }]"),
    keys("upstream", &["sendproxy", "sendproxyv2", "proxyprotocolversion"], "write proxy_protocol = \"v2\""),
    keys("upstream", &["name"], "remove the key: the name of an upstream is in its header, [upstream.NAME]"),
    keys("upstream", &["path", "prefix", "basepath", "rewrite", "stripprefix"], "write rewrite or strip_prefix in the [[route]]"),
    keys("upstream.servers", &["address", "host", "uri", "target", "server", "addr"], "write url = \"http://HOST:PORT\""),
    keys("upstream.servers", &["port"], "write the port in `url`: \"http://HOST:{bare}\""),
    keys("upstream.health_check", &["url", "uri", "endpoint"], "write path = {value}"),
    keys("upstream.health_check", &["statuscode", "statuses", "httpstatuses", "expectedstatus"], "write status = [200]"),
    keys("upstream.health_check", &["rise", "passes", "successes"], "write healthy_threshold = {value}"),
    keys("upstream.health_check", &["fall", "fails", "failures"], "write unhealthy_threshold = {value}"),
    keys("upstream.outlier_detection", &["maxfails", "consecutive5xx", "consecutivegatewayerrors", "failures"], "write consecutive_errors = {value}"),
    keys("upstream.outlier_detection", &["failtimeout", "failduration", "ejectiontime"], "write base_ejection_time = {value}"),
    // `[[route]]`.
    keys("route", &["proxypass", "reverseproxy", "backend", "backends", "service", "services", "target", "targets", "to", "forward", "forwardto",
        "cluster", "usebackend", "defaultbackend", "url", "upstreams", "destination", "proxyto", "grpcpass", "fastcgipass", "uwsgipass", "server", "servers"],
        "write upstream = \"NAME\", and define [upstream.NAME] with servers = [\"http://127.0.0.1:9000\"]"),
    keys("route", &["clientmaxbodysize", "maxbodysize", "bodylimit", "maxrequestbodysize", "requestbody", "maxrequestsize", "allowedpayloadsize"],
        "write max_body = \"1MiB\""),
    keys("route", &["ratelimit", "ratelimits", "ratelimiting", "limit", "limitreq", "limitconn", "throttle", "ratelimiter", "ratelimitadvanced", "quota"],
        "write limits = [\"NAME\"], and define [limit.NAME] with `by` and `quota`"),
    keys("route", &["plugins", "middlewares", "middleware", "filters", "plugin"],
        "write the settings on the route: limits, require, cors, request_headers, response_headers, max_body"),
    keys("route", &["host", "servername", "domain", "domains", "hostname", "hostnames", "vhost", "serveralias"], "write hosts = {list}"),
    keys("route", &["location", "uri", "match_path", "pathpattern", "pattern", "endpoint", "paths"], "write path = \"/api/{*rest}\""),
    keys("route", &["prefix", "pathprefix", "contextpath", "basepath"], "write path = \"/PREFIX/{*rest}\""),
    keys("route", &["rule", "rules", "matcher", "matchers", "matches", "expression"], "write path, hosts, methods and match"),
    keys("route", &["regex", "pathregexp"], "write path_regex = {value}"),
    keys("route", &["method", "verb", "verbs", "httpmethod", "httpmethods", "allowedmethods"], "write methods = {list}"),
    keys("route", &["proxysetheader", "headerup", "setheader", "setheaders", "requestheader", "customrequestheaders", "requestheaderstoadd",
        "requestheaderstoset", "requesttransformer", "proxyhideheader"],
        "write request_headers = { set = { x-name = \"value\" }, remove = [\"x-other\"] }"),
    keys("route", &["addheader", "headerdown", "header", "responseheader", "customresponseheaders", "responseheaderstoadd", "moresetheaders", "expires"],
        "write response_headers = { set = { x-name = \"value\" }, remove = [\"x-other\"] }"),
    keys("route", &["return", "staticresponse", "directresponse", "response", "errorpage"], "write respond = { status = 200, body = \"…\" }, or redirect = { to = \"/new\" }"),
    keys("route", &["redir", "redirectto", "redirecturl", "redirectregex", "redirectscheme"], "write redirect = { to = \"/new\" }, or redirect = { scheme = \"https\" }"),
    keys("route", &["auth", "authbasic", "basicauth", "authentication", "jwt", "apikey", "keyauth", "forwardauth", "authrequest", "oauth2", "authjwt", "security"],
        "write require = [\"NAME\"], and define [auth.NAME] with a `kind`"),
    keys("route", &["whitelist", "ipwhitelist", "allowlist", "ipallowlist", "allowfrom", "iprestriction", "sourcerange"], "write allow = {list}"),
    keys("route", &["blacklist", "ipblacklist", "denylist", "ipdenylist", "block"], "write deny = {list}"),
    keys("route", &["strippath", "stripuriprefix", "handlepath", "uristripprefix"], "write strip_prefix = \"/prefix\""),
    keys("route", &["replacepath", "replacepathregex", "pathrewrite", "rewritetarget", "prefixrewrite", "rewriteurl"], "write rewrite = \"/internal/{rest}\""),
    keys("route", &["proxyreadtimeout", "requesttimeout", "readtimeout", "timeoutms", "sendtimeout", "proxysendtimeout"],
        "write timeout = \"10s\", or response_timeout in [upstream.NAME]"),
    keys("route", &["proxyconnecttimeout", "connecttimeout", "loadbalancer", "lbpolicy", "balance",
        "healthcheck", "health", "circuitbreaker", "protocol", "tls", "outlierdetection"],
        "write the setting in [upstream.NAME]"),
    keys("route", &["retry", "numretries", "attempts", "proxynextupstreamtries"], "write retries = 2, and retry_on = [502, 503, \"timeout\"]"),
    keys("route", &["proxynextupstream", "retryconditions", "retrystatuses", "retriablestatuscodes"], "write retry_on = [502, 503, \"timeout\"]"),
    keys("route", &["failover", "backup", "backups", "fallbacks"], "write fallback = [\"NAME\"], and define [upstream.NAME]"),
    keys("route", &["priority", "order", "rank", "regexpriority"], "remove the key: the most specific route wins, and the order has no effect"),
    keys("route", &["alloworigins", "allowedorigins", "accesscontrolalloworigin", "corsorigins", "corsallowedorigins", "crossorigin", "origin", "origins"],
        "write cors = { origins = {list} }"),
    keys("route", &["gzip", "compression", "encode", "brotli", "zstd"], "write compress = true"),
    keys("route", &["cache", "proxycache"], "remove the key: the gateway does not cache responses"),
    keys("route", &["websockets", "upgrade", "enablewebsocket", "allowupgrade", "upgradeconfigs"], "write websocket = true"),
    keys("route", &["root", "fileserver", "tryfiles", "index", "alias"], "remove the key: the gateway serves no files"),
    keys("route", &["shadow", "mirrorto", "requestmirrorpolicies", "trafficshadow"], "write mirror = { upstream = \"NAME\", percent = 10 }"),
    keys("route", &["weight", "weights", "split", "canary"], "write upstream = { api = 9, canary = 1 }"),
    keys("route", &["by", "burst", "algorithm"], "write the key in [limit.NAME], and name the limit in `limits`"),
    keys("route.cors", &["alloworigin", "alloworigins", "allowedorigins", "accesscontrolalloworigin", "alloworiginstringmatch"], "write origins = {list}"),
    keys("route.cors", &["allowmethods", "allowedmethods", "accesscontrolallowmethods"], "write methods = {list}"),
    keys("route.cors", &["allowheaders", "allowedheaders", "accesscontrolallowheaders"], "write headers = {list}"),
    keys("route.cors", &["allowcredentials", "accesscontrolallowcredentials", "supportscredentials"], "write credentials = {value}"),
    keys("route.cors", &["exposeheaders", "exposedheaders", "accesscontrolexposeheaders"], "write expose = {list}"),
    keys("route.cors", &["maxageseconds", "accesscontrolmaxage", "preflightmaxage", "preflightcontinue"], "write max_age = \"600s\""),
    keys("route.cors", &["privatenetwork", "allowprivatenetworkaccess", "allowpna"], "write private_network = {value}"),
    keys("route.respond", &["statuscode", "code"], "write status = {value}"),
    keys("route.respond", &["text", "content", "message", "json"], "write body = {value}"),
    keys("route.respond", &["headers"], "write content_type = \"application/json\", or response_headers on the route"),
    keys("route.redirect", &["url", "location", "target", "path"], "write to = {value}"),
    keys("route.redirect", &["code", "statuscode", "permanent"], "write status = 308"),
    keys("route.request_headers", &["add", "append", "replace", "rename"], "write set = { x-name = \"value\" }"),
    keys("route.response_headers", &["add", "append", "replace", "rename"], "write set = { x-name = \"value\" }"),
    keys("route.match", &["header", "cookies", "cookie"], "write headers = { x-name = { exact = \"…\" } }"),
    keys("route.match", &["params", "queryparams", "queryparameters", "args"], "write query = { name = { exact = \"…\" } }"),
    keys("route.match", &["path", "paths", "pathprefix", "host", "hosts", "method", "methods"], "write path, hosts and methods on the route itself"),
    keys("route.mirror", &["to", "target", "cluster", "service", "backend"], "write upstream = {value}"),
    keys("route.mirror", &["percentage", "fraction", "sample"], "write percent = {value}"),
    // `[auth.NAME]`.
    keys("auth", &["secret", "signingkey", "signingsecret", "hmacsecret", "sharedsecret", "secretbase64", "jwtsecret", "algorithm", "algorithms", "alg"],
        "shared secrets (HS256) are not supported: set jwks_url or jwks_file with the public keys (RS256, ES256, EdDSA)"),
    keys("auth", &["jwks", "jwksuri", "keysurl", "jwksetsuri", "jwksetsurl", "jwkseturi", "remotejwks", "certsurl", "wellknownurl"], "write jwks_url = {value}"),
    keys("auth", &["publickey", "keyfile", "pubkey", "rsapublickey", "jwksjson", "localjwks"], "write jwks_file = \"jwks.json\""),
    keys("auth", &["iss", "issuers"], "write issuer = \"…\""),
    keys("auth", &["aud", "audiences"], "write audience = \"…\""),
    keys("auth", &["type", "method", "provider", "scheme_type", "strategy"], "write kind = \"api-key\", \"jwt\", \"basic\", \"client-cert\" or \"forward\""),
    keys("auth", &["usersfile", "userfile", "authbasicuserfile", "htpasswd", "passwordfile", "password", "passwords", "username"], "write users = \"users.htpasswd\""),
    keys("auth", &["keys", "apikeys", "consumersfile", "keysfile"], "write consumers = \"consumers.toml\"; `sluicegate key new` creates keys"),
    keys("auth", &["headername", "headers", "keynames", "headernames", "keyheader", "in", "name"], "write header = \"x-api-key\""),
    keys("auth", &["claimstoverify", "requiredclaims", "scopes", "scope", "claim", "roles"], "write claims = { scope = \"write\" }"),
    keys("auth", &["address", "authurl", "uri", "endpoint", "server", "forwardauth"], "write url = \"http://127.0.0.1:4181/verify\""),
    keys("auth", &["authresponseheaders", "copyheaders", "allowedupstreamheaders", "authrequestset"], "write response_headers = {list}"),
    keys("auth", &["authrequestheaders", "allowedheaders", "forwardheaders"], "write request_headers = {list}"),
    keys("auth", &["cachettl", "ttl", "authcacheduration"], "write cache = { ttl = \"10s\" }"),
    keys("auth", &["cacheduration", "remotejwkscacheduration", "jwkscacheduration", "refresh"], "write refresh_interval = \"10m\""),
    keys("auth", &["hidecredentials", "forwardpayloadheader", "forward"], "write forward_credential = true or false"),
    keys("auth", &["failopen", "failuremodeallow"], "write on_error = \"allow\""),
    // `[notify.NAME]` and consumers.
    keys("notify", &["url", "hook", "webhookurl", "endpoint", "uri", "slack"], "write webhook = \"https://…\""),
    keys("notify", &["token", "key", "signingkey", "signingsecret"], "write secret = \"${WEBHOOK_SECRET}\""),
    keys("notify", &["maxlen", "streammaxlen"], "write max_length = {value}"),
    keys("consumer", &["username", "id", "customid", "user"], "write name = {value}"),
    keys("consumer", &["key", "apikey", "keyauthcredentials", "hash", "keyhash", "token"], "write keys = [\"sha256:…\"]; `sluicegate key new` creates a key"),
    keys("consumer", &["plan", "level"], "write tier = {value}"),
    keys("consumer", &["limits", "quota", "quotas"], "write limit.NAME = { quota = \"900/min\" }"),
    keys("consumer.keys", &["key", "sha256", "value", "keyhash"], "write hash = \"sha256:…\""),
    keys("consumer.keys", &["expiry", "expiresat", "validuntil", "ttl"], "write expires = 2027-01-01T00:00:00Z"),
    // Every table.
    keys("*", &["enabled", "enable", "disabled"], "remove the key: to disable a table, remove it or put # before its lines"),
    keys("*", &["description", "comment", "comments", "note", "notes", "remark"], "write a comment: # …"),
    keys("*", &["websockets"], "write websocket = true in the [[route]]"),
    keys("*", &["clientmaxbodysize", "maxbodysize"], "write max_body = \"1MiB\" in the [[route]]"),
    keys("*", &["proxypass", "reverseproxy"], "write upstream = \"NAME\" in the [[route]], and servers in [upstream.NAME]"),
    keys("*", &["proxysetheader", "headerup"], "write request_headers = { set = { x-name = \"value\" } } in the [[route]]"),
    keys("*", &["addheader", "headerdown"], "write response_headers = { set = { x-name = \"value\" } } in the [[route]]"),
    keys("*", &["sslcertificate", "sslcertificatekey", "certfile", "keyfile"], "write on the [[listener]]: tls = { certificates = [{ cert = \"…\", key = \"…\" }] }"),
    keys("*", &["ratelimit", "limitreq", "limitreqzone"], "define [limit.NAME] with `by` and `quota`, and name it in `limits` of a [[route]]"),
    keys("*", &["logformat"], "write [log] with the keys format, level and access"),
    keys("*", &["setrealipfrom", "trustedproxies"], "write [client_ip] with trusted_proxies = [\"10.0.0.0/8\"]"),
    keys("*", &["servername"], "write hosts = [\"…\"] in the [[route]]"),
];

/// Keys of a limit that contain the number of requests.
const COUNT_KEYS: [&str; 19] = [
    "max",
    "limit",
    "limits",
    "rate",
    "count",
    "requests",
    "points",
    "requestsperunit",
    "average",
    "events",
    "hits",
    "maxrequests",
    "tokens",
    "threshold",
    "amount",
    "refillrate",
    "replenishrate",
    "requestsperperiod",
    "tokensperfill",
];

/// Keys of a limit that contain the length of the window.
const WINDOW_KEYS: [&str; 17] = [
    "window",
    "windowms",
    "duration",
    "period",
    "interval",
    "unit",
    "windowsize",
    "timewindow",
    "every",
    "fillinterval",
    "time",
    "refillinterval",
    "windowseconds",
    "seconds",
    "windowlength",
    "durationms",
    "timeunit",
];

/// Keys of a limit that contain the number of requests in a unit of time, each with the unit of a quota.
const COUNT_BY_UNIT_KEYS: [(&str, &str); 15] = [
    ("second", "s"),
    ("minute", "min"),
    ("hour", "hour"),
    ("day", "day"),
    ("month", "month"),
    ("year", "year"),
    ("rps", "s"),
    ("rpm", "min"),
    ("rph", "hour"),
    ("persecond", "s"),
    ("perminute", "min"),
    ("perhour", "hour"),
    ("perday", "day"),
    ("requestspersecond", "s"),
    ("requestsperminute", "min"),
];

/// Return what to write instead of an unknown key of another program.
pub(super) fn advice(path: &[String], all: &DeTable<'_>, sources: &Sources, file: FileKind) -> Option<String> {
    let (key, parents) = path.split_last()?;
    let name = normalized(key);
    let table = table_name(parents, file);
    let (siblings, value) = value_of(all, path)?;
    if table == "limit"
        && let Some(advice) = quota_advice(&name, siblings)
    {
        return Some(advice);
    }
    let applies = |keys: &&ForeignKeys| (keys.table == table || keys.table == "*") && keys.names.contains(&&*name);
    let found = FOREIGN_KEYS.iter().find(applies)?;
    let keys: Vec<_> = path.iter().map(String::as_str).collect();
    let written = sources.text_at(&value.span()).unwrap_or_default().trim();
    let written = if written.is_empty() { "\"…\"".to_owned() } else { quoted(written, &keys) };
    let list = if matches!(value.get_ref(), DeValue::Array(_)) { written.clone() } else { format!("[{written}]") };
    let bare = written.trim_matches(['"', '\'', ':']);
    let [cert, key] = [&CERT_KEYS[..], &KEY_KEYS[..]].map(|names| {
        let found = siblings.iter().find(|(key, _)| names.contains(&&*normalized(key.get_ref())));
        let text = found.and_then(|(_, value)| sources.text_at(&value.span()));
        text.map_or("\"…\"".to_owned(), |text| quoted(text, &[]))
    });
    let advice = found.advice.replace("{value}", &written).replace("{list}", &list).replace("{bare}", bare);
    Some(advice.replace("{cert}", &cert).replace("{key}", &key))
}

/// Keys that contain the path of a certificate, and keys that contain the path of its private key.
const CERT_KEYS: [&str; 9] =
    ["cert", "certfile", "certificate", "crt", "pem", "sslcertificate", "tlscert", "certificatefile", "fullchain"];
const KEY_KEYS: [&str; 6] = ["key", "keyfile", "sslcertificatekey", "privatekey", "tlskey", "keypath"];

/// Return a key in lower case, without the characters that separate its words.
fn normalized(key: &str) -> String {
    key.chars().filter(|c| !matches!(c, '_' | '-' | ' ' | '.')).flat_map(char::to_lowercase).collect()
}

/// Return the name of the table at a path as [`FOREIGN_KEYS`] has it: without the names of entries, and without indices.
fn table_name(path: &[String], file: FileKind) -> String {
    let mut schema_path: Vec<&str> = Vec::new();
    let mut names = Vec::new();
    for segment in path {
        let keys = file.keys(&schema_path);
        if keys.contains(&segment.as_str()) {
            names.push(segment.as_str());
        }
        schema_path.push(segment);
    }
    names.join(".")
}

/// Return the table that contains the last key of a path, and the value of the key.
fn value_of<'t, 'd>(all: &'t DeTable<'d>, path: &[String]) -> Option<(&'t DeTable<'d>, &'t Spanned<DeValue<'d>>)> {
    let (key, parents) = path.split_last()?;
    let mut table = Some(all);
    let mut list: Option<&'t [Spanned<DeValue<'d>>]> = None;
    for segment in parents {
        let value = match (list.take(), table) {
            (Some(items), _) => items.get(segment.parse::<usize>().ok()?)?,
            (None, Some(table)) => table.get(segment.as_str())?,
            (None, None) => return None,
        };
        (table, list) = match value.get_ref() {
            DeValue::Table(inner) => (Some(inner), None),
            DeValue::Array(items) => (None, Some(&**items)),
            _ => return None,
        };
    }
    Some((table?, table?.get(key.as_str())?))
}

/// Return the quota that the count and the window of another rate limiter mean: `max = 100` with `windowMs = 60000`.
fn quota_advice(name: &str, table: &DeTable<'_>) -> Option<String> {
    let find = |names: &[&str]| {
        table.iter().find_map(|(key, value)| {
            let key = normalized(key.get_ref());
            names.contains(&&*key).then(|| (key, plain_text(value.get_ref())))
        })
    };
    if let Some((_, unit)) = COUNT_BY_UNIT_KEYS.iter().find(|(key, _)| *key == name) {
        let (_, count) = find(&[name])?;
        return Some(format!("write quota = \"{count}/{unit}\""));
    }
    if !COUNT_KEYS.contains(&name) && !WINDOW_KEYS.contains(&name) {
        return None;
    }
    let count = find(&COUNT_KEYS).map_or("100".to_owned(), |(_, count)| count);
    if let Some((count, window)) = count.split_once('/') {
        // `10r/s` of nginx.
        let count = count.trim_end_matches(|c: char| !c.is_ascii_digit());
        return Some(format!("write quota = \"{count}/{}\"", window_text("", window)));
    }
    let window = find(&WINDOW_KEYS).map_or("min".to_owned(), |(key, window)| window_text(&key, &window));
    Some(format!("write quota = \"{count}/{window}\", a count per window, in place of these keys"))
}

/// Return a number or a string as text, up to a length that a quota may have.
fn plain_text(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) if text.len() <= 16 => text.to_string(),
        DeValue::Integer(number) => number.as_str().to_owned(),
        DeValue::Float(number) => number.as_str().to_owned(),
        _ => "100".to_owned(),
    }
}

/// Return the window of a quota for the window of another program: `60000` in milliseconds, `1m`, `60` or `minute`.
fn window_text(key: &str, window: &str) -> String {
    if let Ok(number) = window.parse::<u64>() {
        let is_milliseconds = key.ends_with("ms") || number >= 1000 && number.is_multiple_of(1000) && key != "seconds";
        let seconds = if is_milliseconds { number as f64 / 1000.0 } else { number as f64 };
        return match seconds {
            1.0 => "s".to_owned(),
            60.0 => "min".to_owned(),
            3600.0 => "hour".to_owned(),
            86_400.0 => "day".to_owned(),
            seconds if seconds.fract() == 0.0 => format!("{seconds}s"),
            _ => format!("{number}ms"),
        };
    }
    let unit = match window.to_ascii_lowercase().trim_start_matches("per").trim_end_matches('s').trim() {
        "" | "sec" | "second" | "1" => "s",
        "m" | "min" | "minute" => "min",
        "h" | "hr" | "hour" => "hour",
        "d" | "day" => "day",
        "month" => "month",
        _ => return window.to_owned(),
    };
    unit.to_owned()
}

/// Words of other programs in values, each with the word that Sluicegate uses.
const FOREIGN_WORDS: &[(&str, &[&str])] = &[
    (
        "ip",
        &[
            "clientip",
            "remoteaddr",
            "binaryremoteaddr",
            "remoteip",
            "realip",
            "sourceip",
            "src",
            "source",
            "ipaddress",
            "address",
            "remotehost",
            "client",
            "peer",
            "remoteaddress",
            "xforwardedfor",
            "xff",
            "requestremoteip",
            "httprequestremotehost",
            "ipstrategy",
            "reqip",
            "clientaddress",
            "remote",
        ],
    ),
    ("api-key", &["apikey", "key", "consumer", "credential", "token", "authorization", "bearer", "xapikey"]),
    ("jwt:sub", &["user", "userid", "jwt", "sub", "subject", "username", "account", "claim"]),
    ("header:NAME", &["header", "headername", "requestheader"]),
    ("route", &["path", "uri", "url", "requesturi", "endpoint", "resource", "genericenvoy"]),
    ("host", &["hostname", "domain", "servername"]),
    ("global", &["service", "all", "none", "server", "total", "everything", "any", "*"]),
    ("client-cert", &["clientcertificate", "cert", "certificate", "mtls", "tlsclientauth"]),
    ("token-bucket", &["bucket", "tokens", "rate", "leaky", "leakybucketasmeter", "limitreq"]),
    ("fixed-window", &["fixed", "fixedwindowcounter", "counter", "window", "calendar"]),
    (
        "sliding-window",
        &[
            "sliding",
            "slidingwindowcounter",
            "rolling",
            "rollingwindow",
            "movingwindow",
            "slidingcounter",
            "approximatedslidingwindow",
        ],
    ),
    ("sliding-log", &["slidingwindowlog", "log", "exact", "slidinglogs", "timestamps"]),
    (
        "concurrency",
        &["semaphore", "inflight", "maxinflight", "concurrent", "connections", "limitconn", "parallel", "inflightreq"],
    ),
    ("least-requests", &["leastconn", "leastconnections", "leastrequest", "roundrobinweighted", "p2c", "wrr", "ewma"]),
    ("round-robin", &["rr", "roundrobin"]),
    ("random", &["randomchoice", "randomtwo"]),
    (
        "hash:HEADER",
        &["iphash", "hash", "consistenthash", "ringhash", "maglev", "sourcehash", "sticky", "urihash", "cookie"],
    ),
    ("http2", &["h2", "h2c", "grpc", "http/2"]),
    ("http1", &["http", "http11", "http/1.1", "h1"]),
    ("ratelimit", &["grpc", "rls", "envoy", "ratelimitservice"]),
    ("decisions", &["extauthz", "authrequest", "forwardauth", "auth"]),
    ("warn", &["warning"]),
    ("error", &["crit", "critical", "fatal", "alert", "emerg"]),
    ("info", &["notice", "information"]),
    ("debug", &["verbose"]),
    ("text", &["plain", "console", "logfmt", "common", "combined", "clf"]),
    ("allow", &["open", "failopen", "pass", "accept"]),
    ("deny", &["closed", "failclosed", "fail", "block", "drop"]),
    ("local", &["memory", "fallback"]),
    ("jwt", &["bearer", "oidc", "oauth", "oauth2", "openid", "openidconnect", "jwks"]),
    ("basic", &["basicauth", "password", "htpasswd", "authbasic"]),
    ("forward", &["forwardauth", "authrequest", "extauth", "extauthz", "external"]),
    ("required", &["require", "on", "always", "requireandverify", "mandatory"]),
    ("optional", &["off", "request", "verifyifgiven", "want"]),
    ("github", &["legacy", "x-ratelimit", "xratelimit", "x"]),
];

/// Return the word among `known` that has the meaning of a word of another program.
pub(crate) fn meant_word<'n>(word: &str, mut known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    let plain = normalized(word.trim_start_matches('$')).replace([':', '('], "");
    known.find(|known| {
        let words = FOREIGN_WORDS.iter().filter(|(own, _)| own == known).flat_map(|(_, words)| *words);
        normalized(known) == plain || words.into_iter().any(|word| normalized(word) == plain)
    })
}
