//! Upstreams: sends a request on and hands its answer back.

mod advice;
pub mod balance;
mod budget;
pub mod condition;
mod connect;
mod connecting;
mod exchange;
pub mod fleet;
pub mod health;
mod http2;
mod link;
pub mod member;
mod patience;
mod pool;
mod queue;
mod repeat;
pub mod resolve;
pub mod settings;
mod succession;
mod table;
pub mod tls;
mod trail;

use std::error::Error;
use std::fmt::{self, Display};
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tokio::time::{Duration, timeout};

use crate::http::bounds::BodyError;
use balance::Dice;
use fleet::Fleet;
use link::Link;
use member::Member;
use queue::Place;
use table::Table;
pub use trail::{RetryReason, Trail};

/// When to ask again for an upstream whose servers have no addresses.
const UNRESOLVED_RETRY: Duration = Duration::from_secs(1);

/// What is spoken with an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1, a connection for each request at a time.
    Http1,
    /// HTTP/2 by prior knowledge, with TLS by ALPN; one connection for all.
    Http2,
}

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum UpstreamError {
    #[error("upstream `{upstream}` has no healthy server")]
    NoServer { upstream: Box<str>, after: Duration },
    #[error("all servers of upstream `{upstream}` have as many requests as they may")]
    Busy { upstream: Box<str> },
    #[error("connecting to upstream `{upstream}` failed: {source}")]
    Connect { upstream: Box<str>, source: std::io::Error },
    #[error("connecting to upstream `{upstream}` took too long")]
    ConnectTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` broke off: {}", Reason(source))]
    Broken { upstream: Box<str>, source: hyper::Error },
    #[error("upstream `{upstream}` sent no valid response: {fault}")]
    Malformed { upstream: Box<str>, fault: &'static str },
    #[error("upstream `{upstream}` switched to a protocol that it was not asked for")]
    Switched { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer in time")]
    ResponseTimeout { upstream: Box<str> },
    #[error("upstream `{upstream}` did not answer before the timeout of the route was over")]
    Overdue { upstream: Box<str> },
    #[error("the client stopped sending the request body")]
    ClientStalled,
    #[error("the request body is longer than the route allows")]
    BodyTooLarge,
    #[error("the client broke off the request body: {0}")]
    ClientBroken(Box<dyn Error + Send + Sync>),
}

impl From<BodyError> for UpstreamError {
    /// A request body did not come as it should, before any upstream had to do with it.
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge => UpstreamError::BodyTooLarge,
            BodyError::Aborted(_) | BodyError::MalformedTrailers => UpstreamError::ClientBroken(error.into()),
            BodyError::ClientTimeout | BodyError::UpstreamIdleTimeout | BodyError::RouteTimeout => UpstreamError::ClientStalled,
        }
    }
}

impl UpstreamError {
    /// Whether the upstream has nothing to do with it.
    pub fn is_clients_fault(&self) -> bool {
        matches!(self, UpstreamError::ClientStalled | UpstreamError::BodyTooLarge | UpstreamError::ClientBroken(_))
    }
}

/// What hyper says of a failure, and what was behind it.
struct Reason<'a>(&'a hyper::Error);

impl Display for Reason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reason(error) = self;
        write!(f, "{error}")?;
        let mut root = error.source();
        while let Some(deeper) = root.and_then(Error::source) {
            root = Some(deeper);
        }
        if let Some(root) = root {
            write!(f, ": {root}")?;
        }
        if error.is_parse() {
            // What answers to plain text, then, is an alert.
            write!(f, "; a server that speaks TLS is written https://")?;
        }
        Ok(())
    }
}

/// One worker's way to an upstream.
#[derive(Debug)]
pub struct Upstream {
    fleet: Arc<Fleet>,
    links: ArcSwap<Links>,
    dice: Dice,
}

/// The ways to the members of a fleet.
#[derive(Debug)]
struct Links {
    table: Arc<Table>,
    /// By which the fleet tells that table from others.
    change: u64,
    /// To each of its members, in their order.
    all: Vec<Arc<Link>>,
}

/// What the members for a request are chosen by.
struct Choice {
    /// The hash of the header that decides, if one does.
    key: Option<u64>,
    /// Those that will not do.
    tried: Vec<Arc<Member>>,
}

impl Upstream {
    /// Without connections yet.
    pub fn new(fleet: Arc<Fleet>) -> Self {
        Upstream::knowing(fleet, &[])
    }

    /// With these ways to its members.
    fn knowing(fleet: Arc<Fleet>, known: &[Arc<Link>]) -> Self {
        let links = ArcSwap::from_pointee(Links::to(&fleet, fleet.changes(), known));
        Upstream { fleet, links, dice: Dice::random() }
    }

    /// Whether it leads there.
    pub fn leads_to(&self, fleet: &Arc<Fleet>) -> bool {
        Arc::ptr_eq(&self.fleet, fleet)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.fleet.settings.name
    }

    /// What it speaks.
    pub fn protocol(&self) -> Protocol {
        self.fleet.settings.protocol
    }

    /// Host and port, for requests that name no host.
    pub fn authority(&self) -> &str {
        &self.fleet.settings.servers[0].authority
    }

    /// To the members that there are now; connections to those that were there before stay.
    fn links(&self) -> Guard<Arc<Links>> {
        let change = self.fleet.changes();
        let links = self.links.load();
        if links.change == change {
            return links;
        }
        self.links.store(Arc::new(Links::to(&self.fleet, change, &links.all)));
        self.links.load()
    }

    /// A place at the member whose turn it is, and the way there; none if there is no room.
    fn place(&self, key: Option<u64>, tried: &[Arc<Member>]) -> Option<(Arc<Link>, Place)> {
        let links = self.links();
        let (index, place) = self.fleet.place(&links.table, key, &self.dice, tried)?;
        Some((links.all[index].clone(), place))
    }

    /// A place as soon as there is one.
    async fn wait(&self, key: Option<u64>) -> Result<(Arc<Link>, Place), UpstreamError> {
        let settings = &self.fleet.settings;
        let busy = || UpstreamError::Busy { upstream: settings.name.clone() };
        if self.links().table.usable.is_empty() {
            let after = settings.health.as_ref().map_or(UNRESOLVED_RETRY, |health| health.interval);
            return Err(UpstreamError::NoServer { upstream: settings.name.clone(), after });
        }
        let mut waiting = self.fleet.queue.join().ok_or_else(busy)?;
        if waiting.first {
            // A place may have become free before anybody could know that somebody waits for it.
            self.place(key, &[]);
        }
        let place = timeout(settings.connect_timeout, waiting.turn()).await.ok().flatten().ok_or_else(busy)?;
        let link = self.links().all.iter().find(|link| link.leads_to(place.member())).cloned();
        Ok((link.unwrap_or_else(|| Arc::new(Link::new(settings, place.member().clone()))), place))
    }
}

impl Links {
    /// Those of a fleet at this change of it or a later one, with what is known.
    fn to(fleet: &Fleet, change: u64, known: &[Arc<Link>]) -> Self {
        let table = Guard::into_inner(fleet.table());
        let link = |member: &Arc<Member>| {
            let known = known.iter().find(|link| link.leads_to(member)).cloned();
            known.unwrap_or_else(|| Arc::new(Link::new(&fleet.settings, member.clone())))
        };
        Links { all: table.members.iter().map(link).collect(), table, change }
    }
}
