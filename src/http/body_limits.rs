//! Limits of bodies: maximum length, total time, idle time, minimum rate and buffered bytes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use std::{io, iter};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, Take};
use tokio::time::{Instant, Sleep, sleep_until};

/// The timeouts and bounds of an exchange with an upstream: one request and its response.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// Time at which the route timeout expires. The timeout covers the whole exchange, including the request body and
    /// the response body.
    pub deadline: Option<Instant>,
    /// Whether the client has set this time, so that its expiry is no failure of the upstream.
    pub is_client_deadline: bool,
    /// Timeouts and bounds for the client while it sends the request body.
    pub upload: UploadLimits,
    /// Maximum time without data from the upstream. This timeout applies only to response bodies of known length.
    pub idle_timeout: Duration,
    /// Maximum length of the request body in bytes. `None` disables the limit.
    pub max_body: Option<u64>,
}

/// The reasons why a body ended early.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BodyError {
    #[error(transparent)]
    Aborted(#[from] hyper::Error),
    #[error("the trailer section of the request is malformed")]
    MalformedTrailers,
    #[error("the request body is longer than the route allows")]
    TooLarge,
    #[error("the client stopped sending the request body")]
    ClientTimeout,
    #[error("the upstream stopped sending a response body of known length")]
    UpstreamIdleTimeout,
    #[error("the timeout of the route has expired")]
    RouteTimeout,
}

impl BodyError {
    /// Return whether the client has closed the connection or reset the stream.
    pub(super) fn is_disconnect(&self) -> bool {
        let BodyError::Aborted(error) = self else { return false };
        let mut causes = iter::successors(error.source(), |cause: &&(dyn Error + 'static)| (*cause).source());
        error.is_incomplete_message()
            || causes.any(|cause| {
                let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
                cause.is::<h2::Error>() || kind.is_some_and(|kind| kind != io::ErrorKind::InvalidInput)
            })
    }
}

/// A time at which a body is aborted, with its timer.
#[derive(Debug)]
pub(super) struct Deadline {
    pub(super) instant: Instant,
    timer: LazyTimer,
}

impl Deadline {
    pub(super) fn new(instant: Instant) -> Self {
        Deadline { instant, timer: LazyTimer::default() }
    }

    /// Return `Poll::Ready` when the deadline has passed.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.timer.poll(self.instant, cx)
    }
}

/// A timeout for periods in which a body makes no progress. A body that has data available at each poll sets no timer.
#[derive(Debug)]
pub(super) struct IdleTimer {
    timeout: Duration,
    timer: LazyTimer,
    /// `None` while data is available.
    deadline: Option<Instant>,
}

impl IdleTimer {
    pub(super) fn new(timeout: Duration) -> Self {
        IdleTimer { timeout, timer: LazyTimer::default(), deadline: None }
    }

    /// Record that data arrived.
    pub(super) fn record_progress(&mut self) {
        self.deadline = None;
    }

    /// Poll the timer. Call this function only while no data is available. Return `Poll::Ready` when `timeout` has
    /// passed without data.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + self.timeout);
        self.timer.poll(deadline, cx)
    }
}

// === Minimum upload rate: only the time in which the gateway waits for the client counts ===

/// Total time for which the gateway waits for a client before it enforces the minimum rate. Kestrel's
/// `MinRequestBodyDataRate` has the same grace period.
pub const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// Total upload timeout if none is configured: 136 years, which is longer than any upload.
const NO_TIMEOUT: Duration = Duration::from_secs(u32::MAX as u64);

/// Timeouts and bounds for a client that sends a body.
#[derive(Debug, Clone, Copy)]
pub struct UploadLimits {
    /// Maximum time without any received byte.
    pub idle_timeout: Duration,
    /// Minimum rate in bytes per second. 0 disables the check.
    pub min_rate: u64,
    /// Maximum time from the moment at which the gateway first waits for the client to the end of the body. `None`
    /// disables this timeout.
    pub total_timeout: Option<Duration>,
}

/// Time credit of a client for one request body. Each second for which the gateway waits for the client costs one
/// second of credit, and `min_rate` received bytes earn one second. The client times out when its credit is used up. No
/// timer is set if data is available when the body is polled.
#[derive(Debug)]
pub(super) struct MinRateTimer {
    limits: UploadLimits,
    credit: Duration,
    waiting_since: Option<Instant>,
    /// Time at which `total_timeout` expires. `None` until the gateway first waits for the client.
    end: Option<Instant>,
    timer: LazyTimer,
}

impl MinRateTimer {
    pub(super) fn new(limits: UploadLimits) -> Self {
        let credit = if limits.min_rate == 0 { Duration::MAX } else { GRACE_PERIOD };
        MinRateTimer { limits, credit, waiting_since: None, end: None, timer: LazyTimer::default() }
    }

    /// Count received bytes towards the minimum rate.
    pub(super) fn received(&mut self, bytes: usize) {
        let waited = self.waiting_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        if let Some(credit_us) = (bytes as u64 * 1_000_000).checked_div(self.limits.min_rate) {
            // Limit the credit, so that a client that has sent data fast cannot then pause for longer than the idle
            // timeout.
            let max = self.limits.idle_timeout.max(GRACE_PERIOD);
            self.credit = (self.credit.saturating_sub(waited) + Duration::from_micros(credit_us)).min(max);
        }
    }

    /// Poll the timer. Call this function only while no data is available. Return `Poll::Ready` when the client's
    /// credit is used up, or when the idle timeout or the total timeout has expired.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let UploadLimits { idle_timeout, total_timeout, .. } = self.limits;
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let end = *self.end.get_or_insert_with(|| since + total_timeout.unwrap_or(NO_TIMEOUT));
        self.timer.poll(end.min(since + idle_timeout.min(self.credit)), cx)
    }
}

// === A timer whose deadline moves often and is rarely reached ===

/// A timer whose deadline is an argument of each poll. The tokio timer is reset only if it fires before the deadline,
/// or if the deadline moves to an earlier time. A deadline that moves to a later time, for example after each request
/// or chunk, therefore causes no reset.
#[derive(Debug, Default)]
pub struct LazyTimer(Option<Pin<Box<Sleep>>>);

impl LazyTimer {
    /// Return `Poll::Ready` when `deadline` has passed. The task may also be woken earlier, by the deadline of an
    /// earlier poll.
    pub fn poll(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() > deadline {
            timer.as_mut().reset(deadline);
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            if timer.deadline() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

// === Buffer budgets, per connection and per process. If a budget is used up, each stream buffers only what it needs to
// make progress ===

/// A maximum number of buffered bytes. If the budget has a parent, the bytes also count against the parent.
#[derive(Debug)]
pub struct BufferBudget {
    used: AtomicUsize,
    max: AtomicUsize,
    /// The budget against which the bytes of this budget count as well.
    parent: Option<Arc<BufferBudget>>,
}

/// Bytes that are reserved from a budget until the value is dropped.
#[derive(Debug)]
pub struct BufferReservation {
    budget: Arc<BufferBudget>,
    size: usize,
    /// The share of the client network. The bytes count against this share in addition to the budget.
    share: Option<NetworkShare>,
}

/// Divisor of `server.max_buffered`. The quotient limits the memory for inspected request bodies per HTTP/2 connection
/// and per client network. An inspected body is a body that the gateway reads before it forwards the request.
pub const INSPECTED_SHARE: usize = 4;

/// What each client network uses of a resource: the bytes of its inspected request bodies, or the number of its uploads
/// to an upstream. A network that uses nothing has no entry. Clients can choose the keys of the map (their addresses),
/// so the map uses the hasher of std, whose random seed prevents collision attacks.
#[derive(Debug, Default)]
pub struct UsageByNetwork(Mutex<HashMap<IpAddr, usize>>);

/// What one body uses of the share of its client network: bytes, or 1 for an upload or for the rest of a response. Dropping the value releases it.
#[derive(Debug)]
pub struct NetworkShare {
    networks: Arc<UsageByNetwork>,
    network: IpAddr,
    max: usize,
    size: usize,
}

impl UsageByNetwork {
    /// Return the share of a new body, which uses nothing yet. All bodies of the network together may use at most
    /// `max`.
    pub fn share(self: &Arc<Self>, network: IpAddr, max: usize) -> NetworkShare {
        NetworkShare { networks: self.clone(), network, max, size: 0 }
    }

    /// Return the share of an upload or of the rest of a response, or `None` if the network already has `max` of them.
    pub fn start(self: &Arc<Self>, network: IpAddr, max: usize) -> Option<NetworkShare> {
        let mut share = self.share(network, max);
        share.try_grow(1).then_some(share)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NetworkShare {
    /// Add `amount` to this body. Return false and add nothing if the network would exceed its maximum.
    fn try_grow(&mut self, amount: usize) -> bool {
        let mut networks = self.networks.lock();
        let used = networks.get(&self.network).copied().unwrap_or(0);
        let has_capacity = used + amount <= self.max;
        if has_capacity && amount > 0 {
            networks.insert(self.network, used + amount);
            self.size += amount;
        }
        has_capacity
    }
}

impl Drop for NetworkShare {
    fn drop(&mut self) {
        if self.size == 0 {
            return;
        }
        if let Entry::Occupied(mut used) = self.networks.lock().entry(self.network) {
            *used.get_mut() -= self.size;
            if *used.get() == 0 {
                used.remove();
            }
        }
    }
}

/// Counts the upstream responses that the gateway reads to their end although their clients have left. Each occupies a
/// connection to an upstream, but none of the client, so the limits on connections do not bound their number.
#[derive(Debug, Default)]
pub struct RestCounter {
    all: AtomicUsize,
    by_network: Arc<UsageByNetwork>,
}

/// The bounds that apply to the rest of one response.
#[derive(Debug)]
pub struct RestBounds {
    /// Counter of all rests.
    pub counter: Arc<RestCounter>,
    /// Maximum number of all rests. A client network may have a quarter of it.
    pub max: usize,
    /// Network of the client, or `None` if the client is exempt.
    pub network: Option<IpAddr>,
}

/// Counts the rest of a response until it is dropped.
#[derive(Debug)]
pub struct RestPermit {
    counter: Arc<RestCounter>,
    _share: Option<NetworkShare>,
}

impl RestBounds {
    /// Start to read a rest. Return `None` if the gateway or the client network already reads too many.
    pub fn start(&self) -> Option<RestPermit> {
        let _share = match self.network {
            Some(network) => Some(self.counter.by_network.start(network, (self.max / 4).max(1))?),
            None => None,
        };
        let permit = RestPermit { counter: self.counter.clone(), _share };
        // The permit subtracts what is added here, also if there are too many.
        (self.counter.all.fetch_add(1, Ordering::Relaxed) < self.max).then_some(permit)
    }
}

impl Drop for RestPermit {
    fn drop(&mut self) {
        self.counter.all.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BufferBudget {
    /// Create a budget of `max` bytes without a parent budget.
    pub fn new(max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: None }
    }

    /// Create a budget of `max` bytes whose bytes also count against `parent`.
    pub fn with_parent(parent: Arc<BufferBudget>, max: usize) -> Self {
        BufferBudget { used: AtomicUsize::new(0), max: max.into(), parent: Some(parent) }
    }

    /// Change the maximum. Existing reservations do not change.
    pub fn resize(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Return whether more bytes may be buffered.
    pub(super) fn has_capacity(&self) -> bool {
        self.used.load(Ordering::Relaxed) < self.max.load(Ordering::Relaxed)
            && self.parent.as_ref().is_none_or(|parent| parent.has_capacity())
    }

    /// Reserve `size` bytes, or return `None` if the budget or its parent would be exceeded.
    pub fn try_reserve(self: &Arc<Self>, size: usize) -> Option<BufferReservation> {
        self.add(size);
        let reservation = BufferReservation { budget: self.clone(), size, share: None };
        let fits = |budget: &BufferBudget| budget.used.load(Ordering::Relaxed) <= budget.max.load(Ordering::Relaxed);
        (fits(self) && self.parent.as_ref().is_none_or(|parent| fits(parent))).then_some(reservation)
    }

    pub(super) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.add(bytes));
    }

    pub(super) fn subtract(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.parent.iter().for_each(|parent| parent.subtract(bytes));
    }
}

impl BufferReservation {
    /// Count the bytes against the share of a client network as well.
    pub(super) fn within(mut self, share: Option<NetworkShare>) -> Self {
        self.share = share;
        self
    }

    /// Reserve `bytes` more. Return whether the budget and the share of the client network allow these bytes.
    pub(super) fn try_grow(&mut self, bytes: usize) -> bool {
        if !self.share.as_mut().is_none_or(|share| share.try_grow(bytes)) {
            return false;
        }
        let more = self.budget.try_reserve(bytes);
        more.map(|mut more| self.size += std::mem::take(&mut more.size)).is_some()
    }
}

impl Drop for BufferReservation {
    fn drop(&mut self) {
        self.budget.subtract(self.size);
    }
}

// === Read limits ===
//
// hyper always reads one chunk ahead of its caller, and the chunks become larger as a response continues. If a client
// opens many HTTP/2 streams and reads none of the responses, most of the gateway's memory consists of these chunks.

/// Maximum number of bytes per read from a connection.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub enum ReadLimit {
    /// Do not read from the connection.
    Paused = 0,
    /// One memory page (4 KiB). hyper allocates a buffer of 8 KiB for each read, but the kernel assigns physical memory
    /// only to the pages of the buffer that are written.
    Page = 4 << 10,
    /// One byte less than hyper's first buffer of 8 KiB. If a read filled this buffer, hyper would allocate a larger
    /// one for the next read.
    Small = (8 << 10) - 1,
    /// No limit except the size of hyper's buffer.
    Any = u64::MAX,
}

/// A shared handle that limits the reads of a connection.
#[derive(Debug, Clone, Default)]
pub struct ReadBound(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: AtomicU64,
    /// Waker of the connection's task, while reads from the connection are paused.
    paused: AtomicWaker,
}

/// A connection with a limit on the number of bytes per read.
#[derive(Debug)]
pub struct ReadLimitedStream<S> {
    stream: Take<S>,
    bound: ReadBound,
}

impl ReadBound {
    /// Apply this limit to each later read from the connection.
    pub fn set(&self, reads: ReadLimit) {
        let Shared { most, paused } = &*self.0;
        let reads = reads as u64;
        // Write the limit only if it changes, which is rare.
        let before = most.load(Ordering::Relaxed);
        if reads != before {
            most.store(reads, Ordering::Release);
            if before == ReadLimit::Paused as u64 {
                paused.wake();
            }
        }
    }
}

impl Default for Shared {
    fn default() -> Self {
        Shared { most: AtomicU64::new(ReadLimit::Any as u64), paused: AtomicWaker::new() }
    }
}

impl<S: AsyncRead> ReadLimitedStream<S> {
    /// Wrap a connection, at first without a read limit. Also return the handle that sets the limit.
    pub fn new(stream: S) -> (Self, ReadBound) {
        let bound = ReadBound::default();
        (ReadLimitedStream { stream: stream.take(u64::MAX), bound: bound.clone() }, bound)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadLimitedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Shared { most: max, paused } = &*self.bound.0;
        let mut limit = max.load(Ordering::Relaxed);
        if limit == ReadLimit::Paused as u64 {
            paused.register(cx.waker());
            // Load the limit again, because the pause may have ended before the waker was registered.
            limit = max.load(Ordering::Acquire);
            if limit == ReadLimit::Paused as u64 {
                return Poll::Pending;
            }
        }
        // `Take` also reports the end of the stream when its limit is used up. Set the limit before each read, so that
        // only the real end is reported.
        self.stream.set_limit(limit);
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

/// Return whether a write failed because the peer has closed the connection. The peer may have sent a response before,
/// such as 413 to a request whose body is still being sent. hyper would discard this response after the error of the
/// write. The stream therefore discards the written bytes, and lets hyper read the response and then the end of the
/// connection, or the error that belongs to it.
fn is_closed_by_peer(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ReadLimitedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(self.stream.get_mut()).poll_write(cx, bytes) {
            Poll::Ready(Err(error)) if is_closed_by_peer(&error) => Poll::Ready(Ok(bytes.len())),
            polled => polled,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(self.stream.get_mut()).poll_flush(cx) {
            Poll::Ready(Err(error)) if is_closed_by_peer(&error) => Poll::Ready(Ok(())),
            polled => polled,
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.stream.get_mut()).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod min_rate_tests {
    use std::future::poll_fn;

    use tokio::time::{advance, sleep, timeout};

    use super::*;

    /// Simulate a client that sends `bytes` bytes every `every` ms. Return the time in seconds until the client times
    /// out, or `None` if it does not time out within an hour.
    async fn seconds_until_timeout(demand: UploadLimits, bytes: usize, every: u64) -> Option<u64> {
        let (mut pace, begun) = (MinRateTimer::new(demand), Instant::now());
        while begun.elapsed() < Duration::from_secs(3600) {
            let wait = timeout(Duration::from_millis(every), poll_fn(|cx| pace.poll(cx)));
            if wait.await.is_ok() {
                return Some(begun.elapsed().as_secs());
            }
            pace.received(bytes);
        }
        None
    }

    #[test]
    fn upload_times_out_below_minimum_rate() {
        let seconds = Duration::from_secs;
        let demand = |rate, total: Option<u64>| UploadLimits {
            idle_timeout: seconds(30),
            min_rate: rate,
            total_timeout: total.map(seconds),
        };
        let reactor = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        for (what, demand, bytes, every, expected) in [
            ("a byte per second", demand(240, None), 1, 1000, Some(5)),
            ("nothing", demand(240, None), 0, 10_000, Some(5)),
            ("half the minimum rate", demand(240, None), 120, 1000, Some(9)),
            ("the minimum rate", demand(240, None), 240, 1000, None),
            ("the minimum rate, in large chunks with pauses", demand(240, None), 1200, 4900, None),
            ("slow, without a minimum rate", demand(0, None), 1, 29_000, None),
            ("silent, without a minimum rate", demand(0, None), 1, 31_000, Some(30)),
            ("fast, but longer than the total timeout", demand(240, Some(60)), 100_000, 1000, Some(60)),
        ] {
            assert_eq!(reactor.block_on(seconds_until_timeout(demand, bytes, every)), expected, "{what}");
        }
    }

    #[test]
    fn fast_upload_may_pause_and_upstream_backpressure_is_not_charged() {
        let reactor = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        reactor.block_on(async {
            let mut pace = MinRateTimer::new(UploadLimits {
                idle_timeout: Duration::from_secs(30),
                min_rate: 240,
                total_timeout: None,
            });
            pace.received(100_000);
            let paused = timeout(Duration::from_secs(29), poll_fn(|cx| pace.poll(cx)));
            assert!(paused.await.is_err(), "the bytes sent earlier have earned enough credit for the pause");
            pace.received(1);
            // During the next 600 s, the gateway does not wait for the client, so the time does not count.
            advance(Duration::from_secs(600)).await;
            sleep(Duration::ZERO).await;
            pace.received(100_000);
            let paused = timeout(Duration::from_secs(29), poll_fn(|cx| pace.poll(cx)));
            assert!(paused.await.is_err(), "time in which the gateway does not wait for the client costs no credit");
            // The pause of 29 s has left 1 s of the credit. The next 240 bytes earn 1 s, so the client times out after
            // 2 s.
            pace.received(240);
            let begun = Instant::now();
            poll_fn(|cx| pace.poll(cx)).await;
            assert_eq!(begun.elapsed().as_secs(), 2);
        });
    }
}

#[cfg(test)]
mod timer_tests {
    use std::future::poll_fn;

    use tokio::time::{Duration, timeout};

    use super::*;

    #[test]
    fn timer_fires_at_its_latest_deadline() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut timer = LazyTimer::default();
            let start = Instant::now();
            let after = |ms| start + Duration::from_millis(ms);
            // Poll the timer once, which sets it to a time one hour later.
            let is_pending = poll_fn(|cx| Poll::Ready(timer.poll(after(3_600_000), cx).is_pending())).await;
            assert!(is_pending, "the timer must not fire before its deadline");
            let short = timeout(Duration::from_secs(60), poll_fn(|cx| timer.poll(after(5), cx)));
            short.await.expect("an earlier deadline resets the timer");
            // Poll the timer once with a deadline in 5 ms, and then with a deadline in 40 ms. The timer fires after 5
            // ms, and must then be reset to the later deadline.
            let soon = Instant::now() + Duration::from_millis(5);
            poll_fn(|cx| Poll::Ready(_ = timer.poll(soon, cx))).await;
            let later = Instant::now() + Duration::from_millis(40);
            poll_fn(|cx| timer.poll(later, cx)).await;
            assert!(Instant::now() >= later, "the timer fired too early");
        });
    }
}

#[cfg(test)]
mod network_tests {
    use super::*;

    #[test]
    fn bodies_of_a_network_share_its_bytes_and_release_them() {
        let networks = Arc::<UsageByNetwork>::default();
        let [one, other] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(IpAddr::from);
        let budget = Arc::new(BufferBudget::new(1000));
        let body = |network| budget.try_reserve(0).unwrap().within(Some(networks.share(network, 100)));
        let (mut first, mut second, mut third) = (body(one), body(one), body(other));
        assert!(networks.lock().is_empty(), "a body without bytes has no entry");
        assert!(first.try_grow(60) && second.try_grow(40));
        assert!(!second.try_grow(1) && !body(one).try_grow(1), "the share of the network is used up");
        assert!(third.try_grow(100) && !third.try_grow(1), "another network has its own share");
        drop(first);
        assert!(second.try_grow(60) && !second.try_grow(1), "released bytes can be used again");
        // If `budget` rejects bytes, the share of the network has already counted these bytes. They are released when
        // the body is dropped.
        let mut large = budget.try_reserve(0).unwrap().within(Some(networks.share(IpAddr::from([192, 0, 2, 3]), 2000)));
        assert!(!large.try_grow(900) && large.try_grow(800));
        drop((second, third, large));
        assert!(networks.lock().is_empty());
        assert!(budget.try_reserve(1000).is_some(), "all bytes of the budget are released");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_are_bounded_in_all_and_for_each_network() {
        let counter = Arc::<RestCounter>::default();
        let start = |last: Option<u8>| {
            let network = last.map(|last| IpAddr::from([192, 0, 2, last]));
            RestBounds { counter: counter.clone(), max: 8, network }.start()
        };
        let mut first: Vec<_> = (0..2).map(|_| start(Some(1)).expect("a quarter")).collect();
        assert!(start(Some(1)).is_none(), "a network has a quarter of the rests");
        first.pop();
        first.extend(start(Some(1)));
        let others: Vec<_> = (0..6).map(|_| start(None).expect("the rest of all")).collect();
        assert!(start(None).is_none() && start(Some(2)).is_none(), "all rests are in use");
        drop(others);
        assert!(start(Some(2)).is_some() && start(Some(1)).is_none());
        drop(first);
        assert_eq!(counter.all.load(Ordering::Relaxed), 0);
    }
}
