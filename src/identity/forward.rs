//! Forward authentication: the parts of a request that an authentication server receives, the server's decision, and a
//! cache of admissions. The exchange with the server is in `proxy/forward_auth.rs`.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{Context, SHA256};
use aws_lc_rs::rand;
use http::header::{
    ACCEPT, ACCEPT_CHARSET, ACCEPT_ENCODING, ACCEPT_LANGUAGE, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING,
    CONTENT_LANGUAGE, COOKIE, FORWARDED, IF_MATCH, IF_NONE_MATCH, TE, TRAILER, UPGRADE, VIA,
};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};
use quick_cache::sync::Cache;
use tokio::sync::watch;

use crate::clock::monotonic;
use crate::identity::verification::{Admission, AuthError};

/// A provider of kind `forward`.
#[derive(Debug)]
pub struct ForwardProvider {
    /// Settings of the provider.
    pub settings: ForwardSettings,
    /// Index of the authentication server's internal upstream among all upstreams.
    pub upstream: usize,
    /// Cache of admissions. `None` if the server is called for each request.
    pub cache: Option<Arc<ForwardCache>>,
    /// Admissions of requests that a limit has denied, for [`DENIED_TTL`]. They admit no request, but the limit can deny
    /// the next request of the same client to the same route without a call to the server.
    pub denied: Box<ForwardCache>,
}

/// Time for which the admission of a request that a limit has denied is kept. A client that keeps sending this request
/// therefore costs the server one call per second.
const DENIED_TTL: Duration = Duration::from_secs(1);

/// Maximum number of admissions of denied requests.
const MAX_DENIED: usize = 1000;

/// Settings of a provider of kind `forward`, except the settings of its internal upstream.
#[derive(Debug, PartialEq)]
pub struct ForwardSettings {
    /// Path and query of `url`.
    pub target: PathAndQuery,
    /// Host and port of `url`. They are the value of the `Host` header that the gateway sends to the server.
    pub authority: HeaderValue,
    /// Request headers of the client that the server receives.
    pub request_headers: Vec<HeaderName>,
    /// Headers from the server that the upstream receives. Headers with these names that a client sent are always
    /// removed.
    pub response_headers: Vec<HeaderName>,
    /// Maximum time for a request to the authentication server, including the response.
    pub timeout: Duration,
    /// Whether to admit requests while the server does not respond.
    pub fail_open: bool,
    /// The parts of the request that the server receives in addition to `request_headers`.
    pub told: ToldParts,
    /// The parts of the request that distinguish the requests that a limit has denied. Without `cache.by`, neither the
    /// method nor the URI does, because the identities of a client rarely depend on them.
    pub denied_by: ToldParts,
    /// Lifetime and maximum number of cached admissions. `None` disables the cache.
    pub cache: Option<(Duration, usize)>,
}

/// The parts of a request that an authentication server receives. All of these parts are in the cache key, so that the
/// decision depends only on the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToldParts {
    /// Send `X-Forwarded-Method`.
    pub method: bool,
    /// Send `X-Forwarded-Host` and `X-Forwarded-Proto`.
    pub host: bool,
    /// Send `X-Forwarded-Uri`, which contains path and query.
    pub uri: bool,
    /// Send `X-Forwarded-For`, which contains the client address.
    pub ip: bool,
}

impl ToldParts {
    /// Send all parts of the request.
    pub const ALL: ToldParts = ToldParts { method: true, host: true, uri: true, ip: true };

    /// The parts that do not depend on the resource.
    pub const CLIENT: ToldParts = ToldParts { method: false, host: true, uri: false, ip: true };
}

/// Headers that may occur several times, because their values form one list (RFC 9110 §5.3). `Cookie` is also in this
/// list, because the gateway joins its occurrences. All other headers may occur only once.
const LIST_HEADERS: [HeaderName; 16] = [
    ACCEPT,
    ACCEPT_CHARSET,
    ACCEPT_ENCODING,
    ACCEPT_LANGUAGE,
    CACHE_CONTROL,
    CONNECTION,
    CONTENT_ENCODING,
    CONTENT_LANGUAGE,
    COOKIE,
    FORWARDED,
    IF_MATCH,
    IF_NONE_MATCH,
    TE,
    TRAILER,
    UPGRADE,
    VIA,
];

impl ForwardProvider {
    /// Return the first header that the authentication server receives and that occurs more than once, except for
    /// `LIST_HEADERS`. The caller rejects the request, because the server and the upstream could use different values.
    /// For a repeated `Authorization`, nginx rejects the request, and Envoy joins the values with commas.
    pub fn repeated_header(&self, headers: &HeaderMap) -> Option<&HeaderName> {
        let is_repeated = |name: &&HeaderName| headers.get_all(*name).iter().nth(1).is_some();
        self.settings.request_headers.iter().filter(|name| !LIST_HEADERS.contains(name)).find(is_repeated)
    }

    /// Create a provider with an empty cache. `upstream` is the index of its internal upstream.
    pub fn new(settings: ForwardSettings, upstream: usize) -> Self {
        let cache = settings.cache.map(|(_, max_entries)| Arc::new(ForwardCache::new(max_entries)));
        ForwardProvider { settings, upstream, cache, denied: Box::new(ForwardCache::new(MAX_DENIED)) }
    }
}

// === Cache of admissions. The key covers all values that the server receives ===

/// Maximum size in bytes of the headers of a cached admission. Larger admissions are not cached, so that memory use is
/// bounded.
const MAX_CACHED_HEADERS: usize = 4096;

/// Cached admissions by a keyed hash of the values that the server receives. All workers share the cache. Denials are
/// not cached: a denial may set a session cookie for one client, and the next request may have a valid credential.
pub struct ForwardCache {
    admissions: Cache<CacheKey, CachedAdmission>,
    /// Calls to the server that are in progress, each with a receiver for its result.
    pending: Mutex<HashMap<CacheKey, watch::Receiver<Option<SharedResult>>>>,
    /// Random secret key of the hash, unique to this cache. Credentials cannot be guessed from a hash without it.
    secret: [u8; 32],
}

/// Hash of the request values that the authentication server receives.
pub type CacheKey = [u8; 32];

#[derive(Debug, Clone)]
struct CachedAdmission {
    admission: Arc<Admission>,
    expires_at: Instant,
}

/// The result of a call to the server, as seen by the requests that wait for it.
#[derive(Debug, Clone)]
pub enum SharedResult {
    /// The server admits these requests as well.
    Admitted(Arc<Admission>),
    /// The server did not respond.
    Unavailable(AuthError),
    /// The response applies to one request only. This is the case for each denial, and for an admission if
    /// `Cache-Control` forbids caching.
    Private,
}

/// What a request with a given cache key must do.
#[derive(Debug)]
pub enum CacheRole<'a> {
    /// Use the cached admission.
    Hit(Arc<Admission>),
    /// Call the server and publish the result, for which other requests wait.
    Ask(PendingExchange<'a>),
    /// Wait for the result of another request, which is calling the server.
    Wait(watch::Receiver<Option<SharedResult>>),
}

/// A call to the server that other requests wait for. If it is dropped without a result, another request must call the
/// server.
#[derive(Debug)]
pub struct PendingExchange<'a> {
    cache: &'a ForwardCache,
    key: CacheKey,
    result: watch::Sender<Option<SharedResult>>,
}

impl fmt::Debug for ForwardCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForwardCache").finish_non_exhaustive()
    }
}

impl ForwardCache {
    fn new(max_entries: usize) -> Self {
        let mut secret = [0; 32];
        // Ignore the error: without random bytes, TLS cannot start either.
        let _ = rand::fill(&mut secret);
        ForwardCache { admissions: Cache::new(max_entries), pending: Mutex::default(), secret }
    }

    /// Return the cache key of a request to the server. It covers the names and values of all headers, in order.
    pub fn key(&self, headers: &HeaderMap) -> CacheKey {
        let mut context = Context::new(&SHA256);
        context.update(&self.secret);
        for (name, value) in headers {
            // Length prefixes make the encoding unambiguous.
            for part in [name.as_str().as_bytes(), value.as_bytes()] {
                context.update(&(part.len() as u64).to_be_bytes());
                context.update(part);
            }
        }
        let mut key = CacheKey::default();
        // A SHA-256 hash has 32 bytes.
        key.copy_from_slice(context.finish().as_ref());
        key
    }

    /// Return the cached admission for this key.
    pub fn get(&self, key: CacheKey) -> Option<Arc<Admission>> {
        let cached = self.admissions.get(&key)?;
        if monotonic() < cached.expires_at {
            return Some(cached.admission);
        }
        self.admissions.remove(&key);
        None
    }

    /// Store an admission for this time, unless its headers are too large.
    fn insert(&self, key: CacheKey, admission: &Arc<Admission>, ttl: Duration) {
        if header_size(&admission.headers) <= MAX_CACHED_HEADERS {
            let expires_at = monotonic() + ttl;
            self.admissions.insert(key, CachedAdmission { admission: admission.clone(), expires_at });
        }
    }

    /// Store the admission of a request that a limit has denied.
    pub fn insert_denied(&self, key: CacheKey, admission: &Arc<Admission>) {
        self.insert(key, admission, DENIED_TTL);
    }

    /// Remove the admission for this key.
    pub fn remove(&self, key: CacheKey) {
        self.admissions.remove(&key);
    }

    /// Return whether the cache has no admissions.
    pub fn is_empty(&self) -> bool {
        self.admissions.is_empty()
    }

    /// Return what a request with this key must do: use the cached admission, call the server, or wait for a call in
    /// progress.
    pub fn role(&self, key: CacheKey) -> CacheRole<'_> {
        if let Some(admission) = self.get(key) {
            return CacheRole::Hit(admission);
        }
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        match pending.get(&key) {
            Some(result) => CacheRole::Wait(result.clone()),
            None => {
                let (sender, receiver) = watch::channel(None);
                pending.insert(key, receiver);
                CacheRole::Ask(PendingExchange { cache: self, key, result: sender })
            }
        }
    }
}

impl PendingExchange<'_> {
    /// Publish the result. Cache an admission for at most `ttl`. `response` contains all response headers of the
    /// server.
    pub fn finish(self, result: &Result<Arc<Admission>, AuthError>, response: &HeaderMap, ttl: Duration) {
        let shared = match result {
            Ok(admission) => match storable_time(response, ttl) {
                Some(ttl) => {
                    self.cache.insert(self.key, admission, ttl);
                    SharedResult::Admitted(admission.clone())
                }
                None => SharedResult::Private,
            },
            Err(error) if error.is_unavailable() => SharedResult::Unavailable(error.clone()),
            Err(_) => SharedResult::Private,
        };
        self.result.send_replace(Some(shared));
    }
}

impl Drop for PendingExchange<'_> {
    fn drop(&mut self) {
        self.cache.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

fn header_size(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum()
}

/// Return how long an admission may be cached: `ttl`, or a shorter time if `Cache-Control` requires it (RFC 9111
/// §5.2.2). Return `None` if it must not be cached.
fn storable_time(response: &HeaderMap, ttl: Duration) -> Option<Duration> {
    let mut ttl = ttl;
    for line in response.get_all(CACHE_CONTROL) {
        // A value that is not ASCII text cannot be parsed, so do not cache the admission.
        for directive in line.to_str().ok()?.split(',').map(str::trim) {
            let (name, value) = directive.split_once('=').unwrap_or((directive, ""));
            if ["no-store", "no-cache"].iter().any(|word| name.eq_ignore_ascii_case(word)) {
                return None;
            }
            if name.eq_ignore_ascii_case("max-age") {
                let seconds = value.trim_matches('"').parse().ok().filter(|seconds| *seconds > 0)?;
                ttl = ttl.min(Duration::from_secs(seconds));
            }
        }
    }
    Some(ttl)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::StatusCode;

    use super::*;
    use crate::identity::verification::Denial;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        map
    }

    fn admitted(user: &str) -> Result<Arc<Admission>, AuthError> {
        Ok(Arc::new(Admission { headers: headers(&[("x-user", user)]) }))
    }

    #[test]
    fn key_differs_for_everything_that_the_server_is_told() {
        let cache = ForwardCache::new(10);
        let told = [
            &[][..],
            &[("cookie", "")],
            &[("cookie", "a")],
            &[("cookie", "ab")],
            &[("authorization", "a")],
            &[("cookie", "a"), ("authorization", "b")],
            &[("cookie", "a"), ("cookie", "b")],
            &[("cookie", "b"), ("cookie", "a")],
            &[("cookie", "a, b")],
            &[("x-forwarded-uri", "/a"), ("cookie", "a")],
            &[("x-forwarded-uri", "/a"), ("cookie", "/a")],
        ];
        let keys: std::collections::HashSet<_> = told.iter().map(|lines| cache.key(&headers(lines))).collect();
        assert_eq!(keys.len(), told.len());
        assert_eq!(cache.key(&headers(told[5])), cache.key(&headers(told[5])));
        assert_ne!(
            cache.key(&headers(told[5])),
            ForwardCache::new(10).key(&headers(told[5])),
            "each cache has its own secret key"
        );
    }

    #[test]
    fn cache_control_of_the_server_shortens_or_forbids_storing() {
        let ttl = Duration::from_secs(10);
        for (lines, expected) in [
            (&[][..], Some(10)),
            (&[("cache-control", "private")], Some(10)),
            (&[("cache-control", "max-age=3")], Some(3)),
            (&[("cache-control", "max-age=300, private")], Some(10)),
            (&[("cache-control", "max-age=0")], None),
            (&[("cache-control", "max-age=soon")], None),
            (&[("cache-control", "No-Store")], None),
            (&[("cache-control", "private, no-store")], None),
            (&[("cache-control", "private"), ("cache-control", "no-cache")], None),
            (&[("cache-control", "no-cache=\"x-user\"")], None),
        ] {
            assert_eq!(storable_time(&headers(lines), ttl), expected.map(Duration::from_secs), "{lines:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn admission_is_shared_and_expires() {
        let cache = ForwardCache::new(10);
        let key = cache.key(&headers(&[("cookie", "a")]));
        let CacheRole::Ask(exchange) = cache.role(key) else { panic!("the first request calls the server") };
        let CacheRole::Wait(mut waiting) = cache.role(key) else { panic!("the second waits") };
        exchange.finish(&admitted("alice"), &HeaderMap::new(), Duration::from_secs(10));
        assert!(waiting.changed().await.is_ok());
        assert!(matches!(&*waiting.borrow(), Some(SharedResult::Admitted(_))));
        let CacheRole::Hit(hit) = cache.role(key) else { panic!("the third request uses the cached admission") };
        assert_eq!(hit.identity(&HeaderName::from_static("x-user")), Some(&b"alice"[..]));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(matches!(cache.role(key), CacheRole::Ask(_)), "the admission has expired");
    }

    #[tokio::test]
    async fn denial_and_unstorable_admission_are_neither_shared_nor_cached() {
        let cache = ForwardCache::new(10);
        let key = cache.key(&HeaderMap::new());
        let denial = Denial { status: StatusCode::FOUND, headers: HeaderMap::new(), body: Bytes::new() };
        let no_store = headers(&[("cache-control", "no-store")]);
        for (result, response) in
            [(Err(AuthError::Denied(Arc::new(denial))), HeaderMap::new()), (admitted("alice"), no_store)]
        {
            let CacheRole::Ask(exchange) = cache.role(key) else { panic!("not cached") };
            let CacheRole::Wait(mut waiting) = cache.role(key) else { panic!("the second waits") };
            exchange.finish(&result, &response, Duration::from_secs(10));
            assert!(waiting.changed().await.is_ok());
            assert!(matches!(&*waiting.borrow(), Some(SharedResult::Private)));
        }
        let CacheRole::Ask(cancelled) = cache.role(key) else { panic!("not cached") };
        let CacheRole::Wait(mut waiting) = cache.role(key) else { panic!("the second waits") };
        drop(cancelled);
        assert!(waiting.changed().await.is_err(), "the request was cancelled");
        assert!(matches!(cache.role(key), CacheRole::Ask(_)), "another request calls the server");
    }

    #[test]
    fn identity_is_the_only_value_of_a_header() {
        let name = HeaderName::from_static("x-user");
        for (lines, expected) in [
            (&[("x-user", "alice")][..], Some(&b"alice"[..])),
            (&[("x-user", "")], None),
            (&[("x-user", "alice"), ("x-user", "eve")], None),
            (&[("x-plan", "gold")], None),
        ] {
            assert_eq!(Admission { headers: headers(lines) }.identity(&name), expected, "{lines:?}");
        }
    }
}
