//! Connecting: to the member that was chosen, and to others where it does not take connections or takes long over it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::{Duration, sleep, timeout};

use super::link::{Connection, Link};
use super::member::Member;
use super::queue::Place;
use super::{Choice, Upstream, UpstreamError};
use crate::limit::clock::monotonic;

/// For this long a connect is alone, then another one runs beside it (the Connection Attempt Delay of RFC 8305 §5).
const HEAD_START: Duration = Duration::from_millis(250);

/// Members that one request tries at most.
const MOST: usize = 9;

/// A connection, to whichever member it is.
pub(super) struct Connected {
    pub(super) link: Arc<Link>,
    pub(super) place: Place,
    pub(super) connection: Connection,
    pub(super) reused: bool,
}

impl Upstream {
    /// Connects to a member, or to another one; nothing has been written, so any request may do this. Connections that
    /// are there will do for others if `idle_will_do`.
    ///
    /// # Errors
    /// None could be reached, or not in time.
    pub(super) async fn connect(
        &self,
        first: (Arc<Link>, Place),
        choice: &mut Choice,
        idle_will_do: bool,
    ) -> Result<Connected, UpstreamError> {
        let mut running = Vec::new();
        let racing = self.race(first, choice, idle_will_do, &mut running);
        match timeout(self.fleet.settings.connect_timeout, racing).await {
            Ok(result) => result,
            Err(_) => {
                let error = UpstreamError::ConnectTimeout { upstream: self.name().into() };
                running.iter().for_each(|(member, _)| self.fleet.unreachable(member, &error));
                Err(error)
            }
        }
    }

    async fn race(
        &self,
        first: (Arc<Link>, Place),
        choice: &mut Choice,
        idle_will_do: bool,
        running: &mut Vec<(Arc<Member>, Instant)>,
    ) -> Result<Connected, UpstreamError> {
        let mut connecting = FuturesUnordered::new();
        let mut next = Some(first);
        loop {
            if let Some((link, place)) = next.take() {
                choice.tried.push(place.member().clone());
                running.push((place.member().clone(), monotonic()));
                connecting.push(async move {
                    let result = link.connect().await;
                    (link, place, result)
                });
            }
            tokio::select! {
                biased;
                Some((link, place, result)) = connecting.next() => {
                    running.retain(|(member, _)| !Arc::ptr_eq(member, place.member()));
                    let error = match result {
                        Ok((connection, reused)) => {
                            self.overtaken(running);
                            return Ok(Connected { link, place, connection, reused });
                        }
                        Err(error) => error,
                    };
                    self.fleet.unreachable(place.member(), &error);
                    drop(place);
                    next = self.another(choice);
                    if next.is_none() && connecting.is_empty() {
                        return Err(UpstreamError::Connect { upstream: self.name().into(), source: error });
                    }
                }
                () = sleep(HEAD_START) => next = self.another(choice),
            }
            if let Some((link, _)) = next.as_ref().filter(|_| idle_will_do)
                && let Some(connection) = link.idle()
                && let Some((link, place)) = next.take()
            {
                self.overtaken(running);
                return Ok(Connected { link, place, connection, reused: true });
            }
        }
    }

    /// Another member, of another family of addresses if there is one.
    pub(super) fn another(&self, choice: &Choice) -> Option<(Arc<Link>, Place)> {
        if choice.tried.len() >= MOST {
            return None;
        }
        let family = |member: &Member| member.address.map(|address| address.is_ipv6());
        let last = choice.tried.last().and_then(|member| family(member));
        let table = self.fleet.table();
        let same = table.members.iter().filter(|member| family(member) == last).cloned();
        let same_and_tried: Vec<_> = same.chain(choice.tried.iter().cloned()).collect();
        self.place(choice.key, &same_and_tried).or_else(|| self.place(choice.key, &choice.tried))
    }

    /// Those that had their head start and have lost all the same.
    fn overtaken(&self, running: &[(Arc<Member>, Instant)]) {
        for (member, _) in running.iter().filter(|(_, since)| since.elapsed() >= HEAD_START) {
            self.fleet.unreachable(member, &"connecting takes long");
        }
    }
}
